"""Moves inside `torch.compile`: one opaque op, no graph break, the same bytes."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests import oracle
from tests.moves.conftest import same_bytes

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _pool(on):
    key = torch.arange(48.0, device=on.device).view(12, 4)
    value = torch.arange(100.0, 136.0, device=on.device).view(12, 3)
    rows = rows_from(key, name="key") + rows_from(value, name="value")
    return key, value, RowMover(rows, backend=on.backend)


BACKENDS = ["eager", "aot_eager"]


@pytest.mark.parametrize("compiler", BACKENDS)
def test_a_compiled_move(on, compiler):
    """The step reads rows before and after the move: the order stays."""
    key, value, mover = _pool(on)

    def step(tgt, src):
        before = key[0] + 1
        mover.move(tgt, src)
        return before, key[0] * 2, value[0] + 1

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    before, after, other = compiled(on.loc([0, 1]), on.loc([5, 0]))
    assert before.tolist() == [1, 2, 3, 4]
    assert after.tolist() == [40, 42, 44, 46]
    assert other.tolist() == [116, 117, 118]
    assert key[:2].tolist() == [[20, 21, 22, 23], [0, 1, 2, 3]]
    assert value[:2].tolist() == [[115, 116, 117], [100, 101, 102]]
    assert (mover.launches, mover.rows_moved) == (1, 4)


@pytest.mark.parametrize("compiler", BACKENDS)
def test_a_compiled_accept(on, compiler):
    key, value, mover = _pool(on)

    def step(window, index, length):
        mover.move_accepted(window, index, length)
        return key.sum(), value[5] + 0

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    window = on.loc([[4, 5, 6, 7], [8, 9, 10, 11]])
    index = on.loc([[0, 2, -1], [4, 7, -1]], torch.int32)
    total, row = compiled(window, index, on.loc([2, 2], torch.int32))
    assert key[:, 0].tolist() == [0, 4, 8, 12, 16, 24, 24, 28, 32, 44, 40, 44]
    assert value[[5, 9], 0].tolist() == [118, 133]
    assert total == key.sum()
    assert row.tolist() == [118, 119, 120]
    assert mover.launches == 1


@pytest.mark.parametrize("compiler", BACKENDS)
def test_a_store_then_a_move(on, compiler):
    """What the compiled step writes is what moves."""
    key, _, mover = _pool(on)

    def step(rows, tgt, src):
        key[src] = rows
        mover.move(tgt, src)
        key[src] = rows * 2

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    compiled(torch.full((1, 4), 7.0, device=on.device), on.loc([1]), on.loc([6]))
    assert key[1].tolist() == [7] * 4
    assert key[6].tolist() == [14] * 4


LAYOUTS = {
    "slices_of_a_guarded_buffer": lambda device: oracle.nhd(12, (4,), device=device),
    "strided": lambda device: oracle.nhd(12, (2, 5), torch.float16, gap=3, device=device),
    "head_major": lambda device: oracle.hnd(3, 2, 4, 8, gap=2, device=device),
    "split_pages": lambda device: oracle.page_split(3, 4, (12, 4), padding=4, gap=8, device=device),
    "mapped": lambda device: oracle.nhd(
        9, mapping=torch.tensor([0, 3, 1, 2, 8, 7, 0, 5, 6, 4, 0, 0], device=device), device=device
    ),
}


@pytest.mark.parametrize("compiler", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_moves_of_every_layout(on, layout, compiler):
    buffer = LAYOUTS[layout](on.device)
    mover = on.mover(buffer)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend=compiler)
    for tgt, src in (([1, 2, 3], [2, 9, 1]), ([4, 5, 0], [11, -1, 6])):
        expected = oracle.moved(buffer, oracle.given(on.loc(tgt), on.loc(src)))
        step(on.loc(tgt), on.loc(src))
        same_bytes(buffer, expected)
    assert mover.launches == 2


@pytest.mark.parametrize("compiler", BACKENDS)
def test_keys_and_values_in_one_allocation(on, compiler):
    """Both buffers are views of one tensor, which a compiler copies as a whole."""
    both = torch.arange(48.0, device=on.device).view(2, 12, 2)
    key, value = both[0], both[1]
    mover = RowMover(rows_from(key) + rows_from(value), backend=on.backend)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend=compiler)
    step(on.loc([0, 1]), on.loc([5, 0]))
    assert key[:2].tolist() == [[10, 11], [0, 1]]
    assert value[:2].tolist() == [[34, 35], [24, 25]]


@pytest.mark.parametrize("compiler", BACKENDS)
def test_compiled_under_inference_mode(on, compiler):
    key, _, mover = _pool(on)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend=compiler)
    with torch.inference_mode():
        step(on.loc([0]), on.loc([5]))
    assert key[0].tolist() == [20, 21, 22, 23]
    assert mover.rows_moved == 2


def test_one_compilation_serves_many_calls(on):
    key, _, mover = _pool(on)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend="eager")
    for slot in (1, 2, 3):
        step(on.loc([slot]), on.loc([slot + 1]))
    assert key[1:4, 0].tolist() == [8, 12, 16]
    assert mover.launches == 3


@pytest.mark.parametrize("compiler", BACKENDS)
def test_tensors_attached_after_compiling_move_too(on, compiler):
    _, _, mover = _pool(on)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend=compiler)
    step(on.loc([1]), on.loc([2]))
    experts = torch.arange(12, device=on.device)
    mover.attach("experts", experts)
    step(on.loc([1]), on.loc([2]))
    assert experts[1] == 2


def test_bad_input_still_raises(on):
    key, _, mover = _pool(on)
    step = torch.compile(lambda tgt, src: mover.move(tgt, src), fullgraph=True, backend="eager")
    with pytest.raises(ValueError, match="has 2 locs and src_loc 1"):
        step(on.loc([1, 2]), on.loc([2]))
    assert key[1, 0] == 4


def test_empty_movers_and_empty_calls_compile(on):
    _, _, mover = _pool(on)
    none = torch.empty(0, dtype=torch.int64, device=on.device)
    for moves in (mover, RowMover([])):
        step = torch.compile(lambda t, s, m=moves: m.move(t, s), fullgraph=True, backend="eager")
        step(none, none)
        assert moves.launches == 0


def test_the_op_passes_its_own_checks(on):
    """Schema, fake kernel and functionalization, as PyTorch tests an op."""
    key, value, mover = _pool(on)
    args = ([key, value], mover._handle, on.loc([0, 1]), on.loc([5, 0]))
    torch.library.opcheck(torch.ops.specpool.move.default, args, test_utils=["test_faketensor"])
