"""Real models' shapes: bytes a token, reckoned by hand, and the tensors that benchmarks build."""

import pytest

from benchmarks.shapes import SHAPES, rows_of
from specpool_kernels.shapes import MODELS, TREES

BYTES = {
    "minimax-m3": 120 * 1024 + 57 * 256,
    "minimax-m3-tp8": 177 * 256,
    "llama-3.1-8b": 64 * 2048,
    "deepseek-v3": 61 * 1152,
    "deepseek-v3.2": 61 * (656 + 132),
    "deepseek-v4": 43 * 584,
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_a_token(name):
    assert MODELS[name].bytes_per_slot == BYTES[name]


@pytest.mark.parametrize("name", SHAPES)
def test_built_rows_are_the_models(name):
    buffers = SHAPES[name].build(64, "cpu")
    rows = rows_of(buffers)
    assert len(buffers) == sum(kind.count for kind in MODELS[name].buffers)
    assert sum(row.width for row in rows) == BYTES[name]
    assert {row.slots for row in rows} == {64}
    assert len({buffer.tensor.view(-1)[:8].tolist().__repr__() for buffer in buffers}) > 1


def test_pages_hold_payloads_then_scales():
    index = rows_of(SHAPES["deepseek-v3.2"].build(128, "cpu"))[61:63]
    assert [(r.offset, r.width, r.page_size, r.page_stride) for r in index] == [
        (0, 128, 64, 8448),
        (8192, 4, 64, 8448),
    ]
    latent = rows_of(SHAPES["deepseek-v4"].build(64, "cpu"))[:2]
    assert [(r.offset, r.width) for r in latent] == [(0, 576), (36864, 8)]


def test_slots_that_do_not_fill_pages_are_refused():
    with pytest.raises(ValueError, match="100 slots do not fill pages of 64"):
        SHAPES["deepseek-v4"].build(100, "cpu")


def test_trees_fit_their_windows():
    for tree in TREES:
        assert tree.steps < tree.drafts <= 1 + tree.topk * tree.steps * tree.topk
