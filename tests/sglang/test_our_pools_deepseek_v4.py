"""SGLang's DeepSeek-V4 pool with our single-KV pools as its parts, and its HiSparse allocator."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.disaggregation.utils import get_pd_kv_layout
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4
from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
from sglang.srt.runtime_context import get_context

import specpool
from tests.sglang.our_pools import FP8, Pair, buffers, filled, raw, standing_in

PARTS = ("swa_kv_pool", "c4_kv_pool", "c128_kv_pool")
LAYERS = {0: 0, 4: 1, 128: 2}


@pytest.fixture(autouse=True)
def configuration():
    with get_context().override_server_args(), standing_in():
        yield


def engine_pool(enable_hisparse: bool) -> v4.DeepSeekV4TokenToKVPool:
    return v4.DeepSeekV4TokenToKVPool(
        max_num_reqs=2,
        swa_size=512,
        c4_size=256,
        c128_size=8,
        c4_state_pool_size=64,
        c128_state_pool_size=64,
        page_size=256,
        swa_page_size=256,
        dtype=FP8,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=list(LAYERS),
        enable_hisparse=enable_hisparse,
    )


def whole(pool) -> SimpleNamespace:
    """The parts that are single-KV pools, as one list of buffers."""
    return SimpleNamespace(kv_buffer=[b for part in PARTS for b in buffers(getattr(pool, part))])


def both_engines(monkeypatch, enable_hisparse: bool = False) -> Pair:
    theirs = engine_pool(enable_hisparse)
    for name in ("DeepSeekV4SingleKVPool", "HiSparseC4DevicePool"):
        monkeypatch.setattr(v4, name, getattr(specpool, name))
    ours = engine_pool(enable_hisparse)
    monkeypatch.undo()
    filled(whole(theirs), whole(ours))
    return Pair(theirs, ours)


def same(both: Pair) -> bool:
    return Pair(*map(whole, both)).same()


def latents(n: int) -> NopeFp8RopeBf16Pack:
    generator = torch.Generator().manual_seed(n)
    return NopeFp8RopeBf16Pack(
        torch.randn(n, 448, generator=generator).to(FP8),
        torch.randn(n, 64, generator=generator).bfloat16(),
        torch.randint(100, 140, (n, 7), generator=generator, dtype=torch.uint8),
    )


@pytest.mark.parametrize("enable_hisparse", [False, True])
def test_the_parts_are_ours_and_look_alike(monkeypatch, enable_hisparse):
    theirs, ours = both_engines(monkeypatch, enable_hisparse)
    c4 = specpool.HiSparseC4DevicePool if enable_hisparse else specpool.DeepSeekV4SingleKVPool
    assert type(ours.c4_kv_pool) is c4
    assert type(ours.swa_kv_pool) is specpool.DeepSeekV4SingleKVPool
    for method in ("get_contiguous_buf_infos", "get_state_buf_infos"):
        assert getattr(ours, method)()[1:] == getattr(theirs, method)()[1:]
    held = {buffer.data_ptr() for buffer in whole(ours).kv_buffer}
    assert set(ours.get_contiguous_buf_infos()[0]) & held
    assert get_pd_kv_layout(ours) == get_pd_kv_layout(theirs)
    for layer_id in (1, 2):
        for method in (
            "get_extra_key_page_size",
            "get_extra_key_layout",
            "get_extra_key_bytes_per_token",
        ):
            assert getattr(ours, method)(layer_id) == getattr(theirs, method)(layer_id)
    assert ours.get_swa_key_page_size() == theirs.get_swa_key_page_size()


def test_stores_and_reads_through_the_engines_pool(monkeypatch):
    both = both_engines(monkeypatch)
    for pool in both:
        pool.set_swa_key_buffer(0, torch.tensor([3, 300, 17]), latents(3))
        pool.set_extra_key_buffer(1, torch.tensor([3, 70]), latents(2))
        pool.set_extra_key_buffer(2, torch.tensor([1]), latents(1))
    assert same(both)
    for layer_id in (1, 2):
        ours, theirs = (pool.get_extra_key_buffer(layer_id) for pool in (both.ours, both.theirs))
        assert ours.dtype == theirs.dtype
        assert torch.equal(raw(ours), raw(theirs))
    ours, theirs = (pool.get_swa_key_buffer_radix(2) for pool in (both.ours, both.theirs))
    assert torch.equal(raw(ours), raw(theirs))


def test_a_store_into_another_page_is_seen(monkeypatch):
    both = both_engines(monkeypatch)
    assert same(both)
    both.ours.set_extra_key_buffer(1, torch.tensor([70]), latents(1))
    both.theirs.set_extra_key_buffer(1, torch.tensor([6]), latents(1))
    assert not same(both)


def allocated(pool):
    """SGLang's HiSparse allocator over the engine's pool, with some of its locs mapped."""
    logical = SimpleNamespace(
        _kvcache=pool, page_size=256, size=1024, size_full=1024, need_sort=False, clear=lambda: None
    )
    allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
    mapping = allocator.full_to_hisparse_device_index_mapping
    mapping[64:164] = torch.arange(299, 199, -1)
    return allocator


def test_sglangs_hisparse_allocator_maps_for_our_pool(monkeypatch):
    both = both_engines(monkeypatch, enable_hisparse=True)
    allocators = [allocated(pool) for pool in both]
    full = torch.arange(280, 300)
    translated = [
        (
            pool.c4_kv_pool.translate_loc_from_full_to_compressed(full),
            pool.c4_kv_pool.translate_loc_from_full_to_hisparse_device(full),
            pool.c4_kv_pool.translate_loc_to_hisparse_device(torch.tensor([5, 70])),
        )
        for pool in both
    ]
    for theirs, ours in zip(*translated, strict=True):
        assert (theirs.dtype, theirs.tolist()) == (ours.dtype, ours.tolist())
    loc = torch.tensor([70, 71, 100])
    for pool in both:
        pool.set_extra_key_buffer(1, loc, latents(3))
    assert same(both)
    assert both.ours.c4_kv_pool.data_ptrs.tolist() == [
        buffer.data_ptr() for buffer in both.ours.c4_kv_pool.kv_buffer
    ]
    # The mapping that it registered is a weak proxy, and it changes entries in place.
    pool, mapping = both.ours.c4_kv_pool, allocators[1].full_to_hisparse_device_index_mapping
    before = pool.get_cpu_copy(torch.tensor([71, 100]))
    pool.move_kv_cache(torch.tensor([70, 71]), torch.tensor([71, 100]))
    assert torch.equal(pool.get_cpu_copy(torch.tensor([70, 71]))[0][0], before[0][0])
    mapping[120] = 250
    before = pool.get_cpu_copy(torch.tensor([120]))
    pool.move_kv_cache(torch.tensor([70]), torch.tensor([120]))
    assert torch.equal(pool.get_cpu_copy(torch.tensor([70]))[0][0], before[0][0])


def test_our_pool_outlives_sglangs_allocator(monkeypatch):
    """SGLang's pool has a dead proxy then; ours moves by the entries that were the last."""
    both = both_engines(monkeypatch, enable_hisparse=True)
    for pool in both:
        allocated(pool)
    gc.collect()
    with pytest.raises(ReferenceError):
        both.theirs.c4_kv_pool.translate_loc_to_hisparse_device(torch.tensor([70]))
    before = both.ours.c4_kv_pool.get_cpu_copy(torch.tensor([71]))
    both.ours.c4_kv_pool.move_kv_cache(torch.tensor([70]), torch.tensor([71]))
    assert torch.equal(both.ours.c4_kv_pool.get_cpu_copy(torch.tensor([70]))[0][0], before[0][0])
