"""These tests' oracle, held against SGLang: its own moves where they are right, its setters."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from tests.sglang import pools
from tests.sglang.pools import DEEPSEEK_V4, SIZE, cases

RIGHT = [name for name, case in cases().items() if case.own_is_right]
PAIRS = {"tgt": [1, 2, 3, 7, 11, 12], "src": [4, 2, 9, 8, 13, 14]}


@pytest.mark.parametrize("name", RIGHT)
def test_sglang_s_own_move_is_the_oracle_s(name):
    case = cases()[name]
    with envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True):
        pool = case.filled()
    expected = pools.moved(case.buffers(pool), **PAIRS)
    before = pools.snapshot(case.buffers(pool))
    pool.move_kv_cache(*map(torch.tensor, PAIRS.values()))
    assert pools.wrong(case.buffers(pool), expected) == 0
    assert pools.wrong(case.buffers(pool), before) > 0


@pytest.mark.parametrize("name", [name for name in cases() if name.startswith(("single", "c4"))])
def test_the_numbers_of_deepseek_v4_are_sglang_s(name):
    pool = cases()[name].build()
    layout = "uniform_fp8" if name == "single-uniform" else pool.kv_layout.value
    data, scale, together = DEEPSEEK_V4[layout]
    page = pool.page_size
    if name != "single-uniform":
        split = (data, page * data, scale)
        assert pool.kv_layout.row_addressing(page) == (
            (data + scale, data, data + scale) if together else split
        )
    assert pool.kv_cache_total_dim == data + scale


STORES = {
    "mha": lambda pool, layer, loc, x: pool.set_kv_buffer(layer(1), loc, x(2, 16), x(2, 16)),
    "mha-fp8": lambda pool, layer, loc, x: pool.set_kv_buffer(layer(4), loc, x(2, 16), x(2, 16)),
    "mha-hnd": lambda pool, layer, loc, x: pool.set_kv_buffer(layer(1), loc, x(2, 16), x(2, 16)),
    "k-only": lambda pool, layer, loc, x: pool.set_k_buffer(1, loc, x(1, 16)),
    "mla": lambda pool, layer, loc, x: pool.set_kv_buffer(layer(1), loc, x(1, 32), None),
    "minimax": lambda pool, layer, loc, x: (
        pool.set_kv_buffer(layer(3), loc, x(2, 16), x(2, 16)),
        pool.set_index_k_buffer(layer(3), loc, x(1, 16)),
    ),
    "minimax-hisparse": lambda pool, layer, loc, x: (
        pool.set_kv_buffer(layer(3), loc, x(2, 16), x(2, 16)),
        pool.set_index_k_buffer(layer(3), loc, x(1, 16)),
        pool.set_kv_buffer(layer(1), loc, x(2, 16), x(2, 16)),
    ),
    "minimax-index-v": lambda pool, layer, loc, x: pool.set_index_kv_buffer(
        layer(4), loc, x(1, 16), x(1, 16)
    ),
    "single-uniform": lambda pool, layer, loc, x: pool.set_key_buffer_fused(1, loc, x(512)),
}


@pytest.mark.parametrize("name", STORES)
def test_a_setter_writes_where_the_oracle_says(name):
    """Bytes that a store of one loc changes are that loc's, and most of them are changed."""
    case, loc = cases()[name], SIZE - 6
    pool = case.filled()
    buffers = case.buffers(pool)
    before = pools.snapshot(buffers)
    torch.manual_seed(0)
    with get_parallel().override(dcp_enabled=False):
        STORES[name](
            pool,
            lambda layer: SimpleNamespace(layer_id=layer),
            torch.tensor([loc]),
            lambda *shape: torch.randn(1, *shape, dtype=torch.bfloat16),
        )
    changed, possible = 0, 0
    for memory, was in zip(pools.memories(buffers), before, strict=True):
        owned = torch.zeros(len(memory), dtype=torch.bool)
        for buffer in buffers:
            if buffer.memory.data_ptr() == memory.data_ptr():
                owned[buffer.addresses(loc)] = True
        differs = memory != was
        assert not (differs & ~owned).any()
        if differs.any():
            changed, possible = changed + int(differs.sum()), possible + int(owned.sum())
    assert changed > possible * 0.4 > 0
