"""Defects of SGLang 0.5.23's moves, each shown without the plugin and gone, or refused, with it.

Every scenario runs twice: in a process without the plugin, which shows today's wrong behaviour, and
in one with SPECPOOL_SGLANG=all. `tiled` pools move by SGLang's Triton kernel, interpreted, as they
do on a GPU; the others by its indexing path.
"""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPoolFP4, MHATokenToKVPoolMXFP8

import specpool
from tests.sglang import pools
from tests.sglang.driving import move, run
from tests.sglang.pools import Case, build_mha, cases, mha


def tiled(tgt, src, strided=False, **keywords):
    """A move by SGLang's Triton kernel: what is wrong afterwards, row by row and buffer by buffer.

    Returns:
        What was raised, the rows of each buffer that are wrong, and specpool's launches.
    """
    with envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(False):
        case = Case(lambda: build_mha(enable_kv_cache_copy=True, **keywords), mha)
        pool = case.filled()
    locs = [torch.tensor(side) for side in (tgt, src)]
    if strided:
        locs = [torch.stack((loc, loc + 100), 1)[:, 0] for loc in locs]
    expected = [buffer.tensor.view(torch.uint8).clone() for buffer in case.buffers(pool)]
    for tensor in expected:
        tensor[tgt] = tensor[src]
    result = run(case, lambda pool: pool.move_kv_cache(*locs), (tgt, src), pool=pool)
    wrong = [
        torch.nonzero((buffer.tensor.view(torch.uint8) != want).flatten(1).any(1)).flatten()
        for buffer, want in zip(case.buffers(pool), expected, strict=True)
    ]
    return result.error, [rows.tolist() for rows in wrong], result.launches


RIGHT = (None, [[], []], 1)


def test_1_chunks_of_256_overlap(without, everything):
    """600 rows slide forward by one: the first row of each later chunk is lost."""
    slots = list(range(2, 602))
    given = (tiled_one_layer, slots, [slot - 1 for slot in slots])
    assert without(*given) == (None, [[258, 514], [258, 514]], None)
    assert everything(*given) == RIGHT


def tiled_one_layer(tgt, src, strided=False, **keywords):
    return tiled(tgt, src, strided, size=700, layer_num=1, head_num=1, **keywords)


def test_2_a_wider_v_moves_by_the_width_of_k(without, everything):
    given = (wide_v, list(range(1, 9)), list(range(11, 19)))
    assert without(*given) == (None, [[], list(range(1, 9))], None)
    assert everything(*given) == RIGHT


def wide_v(tgt, src):
    return tiled_one_layer(tgt, src, head_dim=64, v_head_dim=128)


def test_3_strided_locs_are_read_as_if_dense(without, everything):
    given = (tiled_one_layer, list(range(1, 9)), list(range(11, 19)), True)
    error, wrong, _ = without(*given)
    assert error is None
    assert [len(rows) for rows in wrong] == [8, 8]
    assert everything(*given) == RIGHT


def test_4_mxfp8_fails_after_its_payload_has_moved(without, everything):
    theirs = without(mxfp8)
    assert theirs.error.startswith("AttributeError")
    assert theirs.changed > 0
    ours = everything(mxfp8)
    assert ours.right, ours
    assert ours.launches == 1


def mxfp8():
    """As a server with speculation builds it."""
    with envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(False):
        case = Case(
            lambda: build_mha(
                cls=MHATokenToKVPoolMXFP8,
                dtype=pools.FP8,
                head_num=1,
                head_dim=32,
                enable_kv_cache_copy=True,
            ),
            pools.mxfp8,
        )
        pool = case.filled()
    tgt, src = [1, 2, 3], [2, 3, 9]
    call = lambda pool: pool.move_kv_cache(torch.tensor(tgt), torch.tensor(src))  # noqa: E731
    return run(case, call, (tgt, src), pool=pool)


def test_5_an_fp4_pool_for_speculation_cannot_be_built(without, everything):
    with pytest.raises(AttributeError, match="data_strides"):
        without(fp4)
    ours = everything(fp4)
    assert ours.right, ours
    assert ours.launches == 1


def fp4():
    case = Case(lambda: build_mha(cls=MHATokenToKVPoolFP4, enable_kv_cache_copy=True), mha)
    tgt, src = [1, 2, 3], [2, 3, 9]
    call = lambda pool: pool.move_kv_cache(torch.tensor(tgt), torch.tensor(src))  # noqa: E731
    return run(case, call, (tgt, src))


@pytest.mark.parametrize("name", [n for n in cases() if n.startswith(("k-only", "single", "c4"))])
def test_6_pools_that_have_no_move(without, everything, name):
    given = (move, name, [1, 2, 3], [2, 3, 9])
    assert without(*given).error.startswith("AttributeError")
    assert everything(*given).right


def test_7_minus_one_wraps_to_the_last_row(without, everything):
    given = (move, "mha", [1, -1], [2, 3])
    assert without(*given).wrong > 0
    assert everything(*given).right


def test_7_minus_one_writes_before_the_buffer(without, everything):
    assert without(before_the_buffer) == (1, None)
    assert everything(before_the_buffer) == (0, 1)


def before_the_buffer():
    """Rows that changed of the memory before a K buffer."""
    with envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(False):
        pool = build_mha(size=28, layer_num=1, enable_kv_cache_copy=True)
    memory = torch.randn(2, 40, 2, 16).bfloat16()
    pool.k_buffer, pool.v_buffer = [memory[0, 4:36]], [memory[1, 4:36]]
    pool._init_data_ptrs_and_strides()
    before = memory[:, :4].clone()
    result = run(
        Case(lambda: pool, mha),
        lambda pool: pool.move_kv_cache(torch.tensor([1, -1]), torch.tensor([2, 3])),
        ([1], [2]),
        pool=pool,
    )
    assert result.error is None
    return int((memory[0, :4] != before[0]).flatten(1).any(1).sum()), result.launches


def test_8_no_move_waits_for_layers_that_are_being_loaded(without, everything):
    assert without(waits, "mha") == []
    assert everything(waits, "mha") == [0, 1]
    assert everything(waits, "minimax") == list(range(6))
    assert everything(waits, "swa") == list(range(3))
    assert everything(waits, "c4") == [0, 1]
    assert everything(waits, "hybrid") == [3, 7]  # its layers with attention, as its getters do


def waits(name):
    """The layers that a move waited for before it changed a byte."""
    case, waited = cases()[name], []

    def call(pool):
        before = pools.snapshot(case.buffers(pool))

        def wait_until(layer):
            assert pools.wrong(case.buffers(pool), before) == 0, "it moved before it waited"
            waited.append(layer)

        pool.register_layer_transfer_counter(SimpleNamespace(wait_until=wait_until))
        pool.move_kv_cache(torch.tensor([1, 2]), torch.tensor([2, 3]))

    result = run(case, call, ([1, 2], [2, 3]))
    assert result.right, result
    return waited


def test_9_dsa_checks_after_its_latent_rows_have_moved(without, everything):
    theirs = without(pooled_index_keys)
    assert theirs.error.startswith("AssertionError")
    assert theirs.changed > 0
    ours = everything(pooled_index_keys)
    assert ours.refused, ours
    assert ours.error.startswith("UnsupportedAccess")
    assert "index_kpool" in ours.error


def pooled_index_keys():
    """Two tokens to an index key, which no move can take apart."""
    case = Case(lambda: pools.build_dsa(size=128, page_size=128, index_kpool=2), pools.mla)
    call = lambda pool: pool.move_kv_cache(torch.tensor([1]), torch.tensor([2]))  # noqa: E731
    return run(case, call, ((), ()))


ours_k_only = {"size": 28, "page_size": 4, "dtype": torch.float32, "head_num": 1, "head_dim": 4}


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
def test_10_a_k_only_pool_stores_by_the_raw_layer_id(ours):
    """Cured in specpool's own pool; the plugin leaves SGLang's setters alone."""
    build = specpool.MHATokenToKOnlyPool if ours else pools.build_k_only
    pool = build(**ours_k_only, layer_num=3, start_layer=1, device="cpu", enable_memory_saver=False)
    pool.set_k_buffer(1, torch.tensor([5]), torch.ones(1, 1, 4))
    assert bool(pool.get_key_buffer(1)[5].eq(1).all()) == ours
    assert bool(pool.k_buffer[1][5].eq(1).all()) != ours


@pytest.mark.parametrize("ours", [False, True], ids=["theirs", "ours"])
def test_11_a_scale_divides_the_caller_s_tensor(ours):
    """Cured in specpool's own pool; the plugin leaves SGLang's setters alone."""
    build = specpool.MHATokenToKVPool if ours else build_mha
    pool = build(
        **{**pools.common, "dtype": pools.FP8, "head_num": 1, "head_dim": 16, "layer_num": 1}
    )
    k, v = torch.ones(1, 1, 16), torch.ones(1, 1, 16)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), torch.tensor([5]), k, v, 2.0, 2.0)
    assert bool(k.eq(1).all()) == ours
    assert bool(pool.get_key_buffer(0)[5].float().eq(0.5).all())


@pytest.mark.parametrize("name", ["k-only", "minimax", "single-v4"])
def test_12_pools_without_host_copies(name):
    """Cured in specpool's own pools; the plugin gives SGLang's none."""
    with pytest.raises(NotImplementedError):
        cases()[name].build().get_cpu_copy(torch.tensor([1]))


def test_12_ours_copy_to_the_host_and_back():
    pool = specpool.MHATokenToKOnlyPool(
        **ours_k_only, layer_num=2, device="cpu", enable_memory_saver=False
    )
    for buffer in pool.k_buffer:
        buffer.normal_()
    kept = pool.get_cpu_copy(torch.tensor([3, 7]))
    pool.load_cpu_copy(kept, torch.tensor([20, 9]))
    assert all(torch.equal(b[[20, 9]], b[[3, 7]]) for b in pool.k_buffer)


def test_14_mla_fp4_leaves_its_scales_behind(without, everything):
    given = (move, "mla-fp4", [1, 2, 3], [2, 3, 9])
    theirs = without(*given)
    assert theirs.error is None
    assert theirs.wrong > 0
    assert everything(*given).right


def test_15_windows_write_their_dummy_slot_and_read_it(without, everything):
    """Locs 5 and 10 have no window slot: a target moves into slot 0, a source comes from it."""
    for tgt, src in (([5], [6]), ([6], [10])):
        theirs = without(move, "swa", tgt, src)
        assert theirs.error is None
        assert theirs.wrong > 0
        assert everything(move, "swa", tgt, src).right


def test_16_hisparse_dsa_moves_latents_by_the_loc_itself(without, everything):
    given = (move, "hisparse-dsa", [1, 2, 3], [2, 3, 9])
    theirs = without(*given)
    assert theirs.error is None
    assert theirs.wrong > 0
    ours = everything(*given)
    assert ours.right or ours.refused, ours
