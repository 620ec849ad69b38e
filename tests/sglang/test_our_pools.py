"""Our pools in SGLang's place: sizes, allocators, retraction, wrappers, attention, its builder."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.internal_state import SchedulerInternalStateController
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, KVWriteLoc, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

import specpool
from tests.sglang.our_pools import (
    CASES,
    CLASSES,
    PAGE,
    SIZE,
    Pair,
    buffers,
    common,
    filled,
    layer,
    minimax,
    pair,
    parts,
    raw,
    rows,
)

# What is read of a pool by name outside of it (attention backends, schedulers, host caches).
ATTRIBUTES = """
    size page_size dtype store_dtype device layer_num start_layer head_num head_dim v_head_dim
    row_dim v_row_dim model_layer_ids kv_cache_layout use_hnd k_scale_buffer v_scale_buffer
    native_k_scale_buffer native_v_scale_buffer
    post_capture_active layer_shard_enabled cpu_copy_carries_mamba host_capacity_tokens
    cpu_offloading_chunk_size layer_transfer_counter hicache_write_back_staging
    sparse_layer_id_mapping index_kv_layer_id_mapping index_k_layer_id_mapping dense_pool
    global_page_size kv_cache_total_dim bytes_per_page_padded qk_nope_head_dim qk_rope_head_dim
    quantize_block_size scale_pad rope_storage_dtype
"""
MHA = [specpool.MHATokenToKVPool, CASES["mha"][0]]


@pytest.fixture(autouse=True)
def configuration():
    with get_context().override_server_args():
        yield


def tensor_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", CASES)
def test_attributes_and_sizes(name):
    theirs, ours = pair(name)
    for mine, other in zip([ours, *parts(ours)], [theirs, *parts(theirs)], strict=True):
        known = [attribute for attribute in ATTRIBUTES.split() if hasattr(other, attribute)]
        assert {a: getattr(mine, a) for a in known} == {a: getattr(other, a) for a in known}
    if "end_layer" in CASES[name][1]:
        assert ours.end_layer == theirs.end_layer
    for method in ("get_v_head_dim", "get_bytes_per_token", "maybe_get_custom_mem_pool"):
        if hasattr(theirs, method):
            assert getattr(ours, method)() == getattr(theirs, method)()
    nbytes = sum(buffer.nbytes for buffer in buffers(ours))
    assert sum(ours.get_kv_size_bytes()) == nbytes
    if hasattr(theirs, "get_kv_size_bytes"):
        assert ours.get_kv_size_bytes() == theirs.get_kv_size_bytes()
        assert ours.mem_usage == pytest.approx(theirs.mem_usage)
    if hasattr(ours, "get_kv_buffer_shape"):
        assert ours.get_kv_buffer_shape() == theirs.get_kv_buffer_shape()


def test_the_servers_memory_report():
    def report(pool):
        runner = SimpleNamespace(weight_load_mem_usage=1.0)
        scheduler = SimpleNamespace(
            draft_worker=None,
            tp_worker=SimpleNamespace(model_runner=runner, graph_memory_usage={}),
            token_to_kv_pool_allocator=TokenToKVPoolAllocator(SIZE, pool.dtype, "cpu", pool, False),
            startup_available_gpu_memory_gb=1.0,
            max_total_num_tokens=SIZE,
            swa_tokens_per_layer=None,
        )
        state = {}
        SchedulerInternalStateController._add_memory_usage(
            SimpleNamespace(scheduler=scheduler), state
        )
        return state["memory_usage"]

    keywords = dict(minimax, size=40_000, head_num=8)
    theirs, ours = (cls(**keywords) for cls in (CASES["minimax"][0], CLASSES[CASES["minimax"][0]]))
    assert report(ours) == report(theirs)
    assert report(ours)["kvcache"] > 0.1


def allocator_over(pool, page_size):
    if page_size == 1:
        return TokenToKVPoolAllocator(SIZE, pool.dtype, "cpu", pool, False)
    return PagedTokenToKVPoolAllocator(SIZE, page_size, pool.dtype, "cpu", pool, False)


def retracted(pool, page_size):
    """A request's rows before it is retracted, and in the slots it gets when it comes back."""
    allocator = allocator_over(pool, page_size)
    table = ReqToTokenPool(4, 32, "cpu", False)
    req = Req("r", "", array("q", range(11)), SamplingParams())
    req.kv.req_pool_idx = 1
    slots = allocator.alloc(12)
    table.req_to_token[1, :12] = slots
    before = rows(pool, slots[:10])
    req.offload_kv_cache(table, allocator)
    allocator.free(slots)
    for buffer in buffers(pool):
        raw(buffer).zero_()
    others = allocator.alloc(8)
    again = allocator.alloc(12).flip(0)
    assert others is not None
    assert not torch.equal(again, slots)
    table.req_to_token[1, :12] = again
    req.load_kv_cache(table, allocator)
    assert req.kv.retraction_backup is None
    assert not any(part.any() for part in rows(pool, others))
    return before, rows(pool, again[:10])


@pytest.mark.parametrize("page_size", [1, PAGE])
@pytest.mark.parametrize("name", CASES)
def test_a_retracted_request_finds_its_rows_again(name, page_size):
    _, ours = pair(name)
    for part in parts(ours):
        part.cpu_offloading_chunk_size = 3
    before, after = retracted(ours, page_size)
    assert len(before) >= 2
    assert all(map(torch.equal, before, after))


def test_a_retraction_that_forgets_a_sub_pool_is_seen(monkeypatch):
    _, ours = pair("minimax-m3")
    everything = ours._parts()
    monkeypatch.setattr(ours, "_parts", lambda: everything | {"index_k": None})
    before, after = retracted(ours, PAGE)
    assert not all(map(torch.equal, before, after))


def test_a_host_copy_of_keys_and_values_is_sglangs():
    theirs, ours = pair("mha")
    slots = torch.tensor([5, 9, 2, 30], dtype=torch.int32)
    for given, into in ((ours, theirs), (theirs, ours)):
        into.load_cpu_copy(given.get_cpu_copy(slots), slots + 1)
    assert Pair(theirs, ours).same()


# Pools that SGLang composes of others, with ours inside


def swa(cls):
    with envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True):
        pool = SWAKVPool(
            **common | {"size_swa": 16, "dtype": torch.bfloat16, "head_num": 2, "head_dim": 16},
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1],
            token_to_kv_pool_class=cls,
            enable_kv_cache_copy=False,
        )
    mapping = torch.zeros(SIZE + PAGE + 1, dtype=torch.int64)
    mapping[1:18] = torch.arange(17, 0, -1)
    mapping[-1] = -1
    pool.register_mapping(mapping)
    return pool


def hybrid(cls):
    sizes = {"size": SIZE, "page_size": PAGE, "dtype": torch.bfloat16, "device": "cpu"}
    with (
        envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True),
        get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0),
    ):
        return HybridLinearKVPool(
            **sizes,
            head_num=2,
            head_dim=16,
            full_attention_layer_ids=[1, 3],
            mamba_pool=None,
            full_kv_pool_class=cls,
        )


@pytest.mark.parametrize("build", [swa, hybrid])
def test_sglangs_wrappers_over_our_pool(build):
    ours, theirs = map(build, MHA)
    both = filled(theirs, ours)
    loc = torch.tensor([3, 7, 12, 16])
    for pool in both:
        write = KVWriteLoc(loc, swa_loc=18 - loc)
        for layer_id in (1, 2 if build is swa else 3):
            k, v = tensor_of(4, 2, 16, seed=1), tensor_of(4, 2, 16, seed=2)
            pool.set_kv_buffer(layer(layer_id), write, k, v)
        pool.move_kv_cache(torch.tensor([4, 5, 6, 7]), torch.tensor([5, 7, 12, 4]))
    assert both.same()
    for method in ("get_key_buffer", "get_value_buffer"):
        assert torch.equal(getattr(ours, method)(1), getattr(theirs, method)(1))
    assert ours.get_kv_size_bytes() == theirs.get_kv_size_bytes()
    assert ours.get_v_head_dim() == theirs.get_v_head_dim()
    assert ours.get_contiguous_buf_infos()[1:] == theirs.get_contiguous_buf_infos()[1:]


def test_a_retraction_through_a_sliding_window_pool():
    ours, theirs = map(swa, MHA)
    both = filled(theirs, ours)
    slots, again = torch.tensor([3, 7, 12, 25]), torch.tensor([9, 26, 2, 11])
    for pool in both:
        pool.load_cpu_copy(pool.get_cpu_copy(slots), again)
    assert both.same()


# Attention and construction


@pytest.mark.parametrize("name", ["mha", "mha-wide-v", "mha-fp8-stage", "minimax"])
def test_attention_reads_and_writes_our_pool(name):
    both = pair(name)
    results = [attended(pool) for pool in both]
    assert both.same()
    assert torch.equal(*results)
    buffers(both.ours)[1].zero_()
    assert not torch.equal(attended(both.ours), results[0])


def attended(pool):
    """A prefill of two requests, then a step of each, on the second layer."""
    table = ReqToTokenPool(4, 32, "cpu", False)
    for request, slots in ((1, range(1, 7)), (2, range(20, 24))):
        table.req_to_token[request, : len(slots)] = torch.tensor(slots)
    backend = TorchNativeAttnBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool)
    )
    attention = layer(
        pool.start_layer + 1,
        tp_q_head_num=4,
        tp_k_head_num=2,
        qk_head_dim=16,
        v_head_dim=pool.v_head_dim,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        scaling=0.25,
        sliding_window_size=-1,
    )

    def batch(loc, lens, extend):
        return SimpleNamespace(
            out_cache_loc=torch.tensor(loc),
            req_pool_indices=torch.tensor([1, 2]),
            seq_lens=torch.tensor(lens),
            extend_prefix_lens=torch.tensor(lens) - torch.tensor(extend),
            extend_seq_lens=torch.tensor(extend),
            encoder_lens=None,
        )

    def given(n):
        return (
            tensor_of(n, 64, seed=3),
            tensor_of(n, 2, 16, seed=4),
            tensor_of(n, 2, pool.v_head_dim, seed=5),
        )

    backend.init_forward_metadata(prefill := batch([2, 3, 4, 5, 21, 22], [5, 3], [4, 2]))
    first = backend.forward_extend(*given(6), attention, prefill)
    backend.init_forward_metadata(step := batch([6, 23], [6, 4], [1, 1]))
    second = backend.forward_decode(*given(2), attention, step)
    return torch.cat([first, second])


def test_sglang_builds_our_minimax_pool(monkeypatch):
    sparse = {
        "use_sparse_attention": True,
        "sparse_index_dim": 16,
        "sparse_attention_freq": [0, 0, 1, 1],
        "sparse_disable_index_value": [0, 0, 1, 1],
    }
    configurator = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(sparse_attention_config=sparse),
            quantization=None,
            head_dim=16,
            get_num_kv_heads=lambda *sizes: 2,
        ),
        server_args=get_context().server_args,
        pool_page_size=PAGE,
        kv_cache_dtype=torch.bfloat16,
        model_dtype=torch.bfloat16,
        device="cpu",
        layer_info=SimpleNamespace(start_layer=1, end_layer=4),
    )
    build = kv_cache_configurator.KVCacheConfigurator._build_minimax_sparse_kv_pool
    monkeypatch.setattr(kv_cache_configurator, "MiniMaxSparseKVPool", specpool.MiniMaxSparseKVPool)
    with get_parallel().override(attn_tp_size=1, attn_dcp_size=1):
        pool = build(configurator, max_total_num_tokens=SIZE)
    assert isinstance(pool, specpool.MiniMaxSparseKVPool)
    assert pool.layer_ids == (1, 2, 3)
    assert (pool.index_kv_pool, pool.index_k_pool.layer_num) == (None, 2)
