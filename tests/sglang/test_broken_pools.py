"""Pools that no case of `pools` has: parts of a platform's own class, slots spread over ranks.

Where SGLang's own move is right, or nobody's is, the plugin changes nothing.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_parallel

from tests.sglang import pools
from tests.sglang.driving import accept, move, run
from tests.sglang.pools import Case, build_hybrid, build_swa, cases
from tests.sglang.test_accept import ACCEPT

MOVE = ([1, 2, 3], [2, 3, 9])


class PlatformMHA(MHATokenToKVPool):
    """A platform's pool, which SGLang takes for the parts of hybrid pools there."""


COMPOSED = {
    "hybrid": Case(partial(build_hybrid, full_kv_pool_class=PlatformMHA), pools.inner(pools.mha)),
    "swa": Case(partial(build_swa, token_to_kv_pool_class=PlatformMHA), pools.swa),
    "swa-window": Case(partial(build_swa, swa_kv_pool_class=PlatformMHA), pools.swa),
}


def composed(name, call, *given):
    cases()["composed"] = COMPOSED[name]
    try:
        return call("composed", *given)
    finally:
        del cases()["composed"]


@pytest.mark.parametrize("name", COMPOSED)
def test_a_pool_with_a_part_of_another_class_goes_on_with_sglang_s_own_move(everything, name):
    result = everything(composed, name, move, *MOVE)  # slots that the window's mapping has
    assert result.right, result
    assert everything(composed, name, accept, *ACCEPT).error is None
    said = [line for line in everything.log() if "PlatformMHA" in line]
    assert said
    assert all(line.startswith("WARNING") for line in said)


def test_parts_of_a_pool_that_is_left_are_left_too(everything):
    """Its own move sends two locs without a window slot to slot 0, which ours would refuse."""
    assert everything(unmapped) == [None, None, None]


def unmapped():
    from specpool.adapters.sglang import moves

    full = {"head_num": 2, "head_dim": 16, "page_size": 4, "device": "cpu"}
    given = {"full_kv_pool_class": PlatformMHA, "full_kv_pool_kwargs": full}
    full["enable_memory_saver"] = False
    served = []

    def call(pool):
        pool.move_kv_cache(torch.tensor([5, 10]), torch.tensor([6, 7]))
        served.extend(map(moves._SERVED.get, (pool.full_kv_pool, pool.swa_kv_pool)))

    result = run(Case(partial(build_swa, **given), pools.swa), call, ((), ()))
    return [result.error, *served]


def spread(name):
    """A move in an engine whose decode is spread over two ranks, which hold every other token."""

    def two_ranks(pool):
        with get_parallel().override(attn_dcp_size=2, attn_dcp_rank=0, dcp_enabled=True):
            pool.move_kv_cache(*map(torch.tensor, MOVE))

    return run(cases()[name], two_ranks, MOVE)


@pytest.mark.parametrize("name", ["minimax", "k-only", "mla", "mla-fp4"])
def test_slots_of_several_ranks_are_refused(everything, name):
    result = everything(spread, name)
    assert result.refused, result
    assert "decode context parallelism" in result.error


def test_slots_of_several_ranks_are_refused_with_nothing_configured(default):
    assert default(spread, "minimax").refused


@pytest.mark.parametrize("name", ["mha", "hybrid"])
def test_slots_of_several_ranks_are_left_to_sglang(everything, name):
    """A draft's pool holds all of them, and SGLang's own move of it is right."""
    assert everything(spread, name).launches is None


def test_a_pool_outside_of_an_engine_is_moved(everything):
    """As a tool has it, which publishes nothing of an engine."""
    for name in ("mha", "mla", "minimax"):
        assert everything(bare, name) == 1


def bare(name):
    from specpool.adapters.sglang.moves import mover_of

    pool = cases()[name].filled()
    pool.move_kv_cache(*map(torch.tensor, MOVE))
    return mover_of(pool).launches


def test_a_stage_of_a_sliding_window_model_waits_as_its_getters_do(everything):
    assert everything(waited) == ([4, 5, 6], [4, 5, 6])


def waited():
    """What a move waits for, and what the getters of every layer do."""
    pool, found = build_swa(swa_attention_layer_ids=[4, 6], full_attention_layer_ids=[5]), []
    pool.register_layer_transfer_counter(SimpleNamespace(wait_until=found.append))
    pool.move_kv_cache(*map(torch.tensor, MOVE))
    by_move = sorted(found)
    found.clear()
    for layer in (4, 5, 6):
        pool.get_key_buffer(layer)
    return by_move, found
