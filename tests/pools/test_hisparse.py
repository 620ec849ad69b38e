"""The pool behind a mapping: every door translates locs, and none works before the mapping."""

import gc
import weakref

import pool_cases as cases
import pytest
import torch

from specpool.pools import HiSparseC4DevicePool


def bare():
    return HiSparseC4DevicePool(28, 4, torch.float8_e4m3fn, 448, 64, 2, "cpu", False)


def latents(n):
    return torch.randn(n, 512, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_stores_and_reads_translate():
    pool, plain = cases.hisparse(), cases.single(start_layer=1)
    values = latents(2)
    pool.set_key_buffer_fused(2, cases.loc(1, 5), values)
    plain.set_key_buffer_fused(2, cases.loc(30, 26), values)
    assert cases.unchanged(pool, cases.snapshot(plain))
    assert torch.equal(
        pool.get_dequantized(2, cases.loc(5, 1)), plain.get_dequantized(2, cases.loc(26, 30))
    )


@pytest.mark.parametrize("nowhere", [0, 38, 39], ids=["loc 0", "entry 0", "entry -1"])
@pytest.mark.parametrize("check", ["0", "1"])
def test_a_loc_without_a_slot_writes_the_dummy_slot_only(nowhere, check, monkeypatch):
    monkeypatch.setenv("SPECPOOL_CHECK", check)
    pool = cases.hisparse()
    pool.set_key_buffer_fused(1, cases.loc(nowhere, 0), latents(1).expand(2, -1))
    assert torch.equal(
        pool.get_dequantized(1, cases.loc(nowhere)), pool.get_dequantized(1, cases.loc(0))
    )
    assert pool.kv_buffer[0][0, :576].any()
    for slot in range(1, pool.slots):
        page, offset = divmod(slot, 4)
        assert not pool.kv_buffer[0][page, offset * 576 : offset * 576 + 576].any()


@pytest.mark.parametrize("bad", [40, -1])
def test_a_bad_loc_is_refused(bad):
    pool = cases.hisparse()
    cases.fill(pool)
    before = cases.snapshot(pool)
    with pytest.raises(IndexError, match="outside"):
        pool.set_key_buffer_fused(1, cases.loc(3, bad), latents(2))
    assert cases.unchanged(pool, before)


def test_moves_skip_pairs_that_have_no_slot():
    pool = cases.hisparse()
    cases.fill(pool)
    expected = cases.moved(pool, [3], [4])
    pool.move_kv_cache(cases.loc(3, 30, 6), cases.loc(4, 5, 31))
    assert cases.unchanged(pool, expected)


def test_a_mapping_that_changes_in_place_is_followed():
    pool = cases.hisparse()
    cases.fill(pool)
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    pool.full_to_hisparse_device_index_mapping[4] = 1
    expected = cases.moved(pool, [3], [4])
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    assert cases.unchanged(pool, expected)


def test_another_mapping_takes_the_place_of_the_first():
    pool = cases.hisparse()
    cases.fill(pool)
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    mover = pool.mover
    pool.register_mapping(torch.arange(10))
    expected = cases.moved(pool, [3], [4])
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    assert cases.unchanged(pool, expected)
    assert pool.mover is mover


def test_nothing_works_before_the_mapping():
    pool = bare()
    for use in (
        lambda: pool.move_kv_cache(cases.loc(1), cases.loc(2)),
        lambda: pool.set_key_buffer_fused(0, cases.loc(1), latents(1)),
        lambda: pool.get_cpu_copy(cases.loc(1)),
        lambda: pool.translate_loc_to_hisparse_device(cases.loc(1)),
    ):
        with pytest.raises(RuntimeError, match=r"call register_mapping\(mapping\) first"):
            use()


@pytest.mark.parametrize(
    "mapping",
    [torch.arange(9).int(), torch.zeros(3, 3).long(), torch.arange(9)[::2]],
    ids=["int32", "2-D", "strided"],
)
def test_a_bad_mapping_is_refused(mapping):
    with pytest.raises(ValueError, match=r"must be contiguous int64 \[n\], got"):
        bare().register_mapping(mapping)
    with pytest.raises(ValueError, match="mapping is on meta"):
        bare().register_mapping(torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(TypeError, match=r"contiguous int64 tensor \[n\], got list"):
        bare().register_mapping([1, 2])


@pytest.mark.parametrize("held", [0, 30], ids=["freed", "shrunk"])
def test_a_mapping_whose_memory_shrank_is_refused_before_it_is_read(held):
    pool = cases.hisparse()
    cases.fill(pool)
    copy = pool.get_cpu_copy(cases.loc(3))
    before = cases.snapshot(pool)
    pool.full_to_hisparse_device_index_mapping.untyped_storage().resize_(held * 8)
    for use in (
        lambda: pool.set_key_buffer_fused(1, cases.loc(35), latents(1)),
        lambda: pool.get_dequantized(1, cases.loc(35)),
        lambda: pool.get_cpu_copy(cases.loc(3)),
        lambda: pool.load_cpu_copy(copy, cases.loc(3)),
        lambda: pool.translate_loc_to_hisparse_device(cases.loc(35)),
        lambda: pool.move_kv_cache(cases.loc(3), cases.loc(35)),
    ):
        with pytest.raises(RuntimeError, match="the mapping's memory was freed or shrunk to"):
            use()
    assert cases.unchanged(pool, before)


def test_translations():
    pool = cases.hisparse()
    assert pool.compress_ratio == 4
    full = torch.arange(12)
    assert pool.translate_loc_from_full_to_compressed(full).tolist() == [0, 1, 2]
    assert pool.translate_loc_from_full_to_hisparse_device(full).tolist() == [0, 30, 29]
    slots = pool.translate_loc_to_hisparse_device(cases.loc(2, 1))
    assert (slots.tolist(), slots.dtype) == ([29, 30], torch.int32)
    assert pool.data_ptrs.tolist() == [b.data_ptr() for b in pool.kv_buffer]


def test_host_copies_take_locs_on_both_ways():
    pool = cases.hisparse()
    cases.fill(pool)
    saved = [cases.rows_at(pool, loc) for loc in (3, 7)]
    copy = pool.get_cpu_copy(cases.loc(3, 7))
    pool.load_cpu_copy(copy, cases.loc(20, 11))
    assert all(map(torch.equal, cases.rows_at(pool, 20), saved[0]))
    assert all(map(torch.equal, cases.rows_at(pool, 11), saved[1]))


def test_host_copies_refuse_locs_without_a_slot():
    pool = cases.hisparse()
    copy = pool.get_cpu_copy(cases.loc(3, 7))
    before = cases.snapshot(pool)
    for bad in (30, 39, 0):
        for use in (
            lambda bad=bad: pool.get_cpu_copy(cases.loc(3, bad)),
            lambda bad=bad: pool.load_cpu_copy(copy, cases.loc(3, bad)),
        ):
            with pytest.raises(ValueError, match=f"loc {bad} has no slot on the device"):
                use()
    with pytest.raises(IndexError, match="outside"):
        pool.get_cpu_copy(cases.loc(40))
    pool.full_to_hisparse_device_index_mapping[9] = pool.slots
    with pytest.raises(IndexError, match=rf"mapping\[indices\] holds {pool.slots}, outside"):
        pool.load_cpu_copy(copy, cases.loc(3, 9))
    pool.full_to_hisparse_device_index_mapping[8] = 24
    with pytest.raises(ValueError, match="indices name a slot twice"):
        pool.load_cpu_copy(copy, cases.loc(7, 8))  # both lead to slot 24
    assert cases.unchanged(pool, before)


def test_a_weak_proxy_is_a_mapping_and_its_entries_stay():
    mapping = cases.hisparse().full_to_hisparse_device_index_mapping.clone()
    pool = cases.hisparse(weakref.proxy(mapping))
    cases.fill(pool)
    mapping[3] = 12  # the owner's changes are seen
    expected = cases.moved(pool, [3], [4])
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    assert cases.unchanged(pool, expected)
    del mapping
    gc.collect()
    expected = cases.moved(pool, [5], [3])
    pool.move_kv_cache(cases.loc(5), cases.loc(3))
    assert cases.unchanged(pool, expected)
