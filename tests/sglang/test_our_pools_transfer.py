"""Our pools in a disaggregated server: buffer infos, state components, signature, checksum, canary.

The checksum's kernel is CUDA; `zlib.adler32` over the same addresses stands in for it, so what is
digested is exactly what SGLang's code points the kernel at.
"""

from __future__ import annotations

import ctypes
import zlib
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.memory import adler32
from sglang.srt.disaggregation import checksum
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.prefill import _transfer_start_layer
from sglang.srt.disaggregation.utils import (
    get_kv_transfer_buf_infos,
    get_pd_kv_layout,
    kv_layout_signature,
    setup_state_kv_args,
)
from sglang.srt.kv_canary.pool_patcher.adapters.mha import attach_mha
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _mha_device_pool_entry

import specpool
from tests.sglang.our_pools import CASES, PAGE, SIZE, buffers, pair, raw, standing_in

TRANSFERRED = [name for name in CASES if name.startswith(("mha", "minimax-"))]


@pytest.fixture(autouse=True)
def ours_are_theirs():
    with standing_in():
        yield


def arguments(pool) -> KVArgs:
    """A prefill's arguments, filled by SGLang's own functions."""
    args = KVArgs()
    args.page_size = PAGE
    args.kv_cache_dtype_str = str(pool.dtype)
    args.kv_layout = get_pd_kv_layout(pool)
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = get_kv_transfer_buf_infos(pool)
    args.prefill_start_layer = _transfer_start_layer(pool=pool, hf_text_config=None)
    setup_state_kv_args(args, pool)
    return args


def lengths(args: KVArgs) -> tuple:
    return (
        args.kv_data_lens,
        args.kv_item_lens,
        args.state_types,
        args.state_data_lens,
        args.state_item_lens,
        args.prefill_start_layer,
    )


def places(pool, addresses) -> list[int]:
    """Which buffer of the pool begins at each address."""
    begins = {buffer.data_ptr(): i for i, buffer in enumerate(buffers(pool))}
    return [begins[address] for address in addresses]


@pytest.mark.parametrize("name", TRANSFERRED)
def test_a_prefill_registers_our_buffers_as_it_would_its_own(name):
    theirs, ours = pair(name)
    args, wanted = arguments(ours), arguments(theirs)
    assert lengths(args) == lengths(wanted)
    assert kv_layout_signature(args) == kv_layout_signature(wanted)
    assert places(ours, args.kv_data_ptrs) == places(theirs, wanted.kv_data_ptrs)
    for mine, other in zip(args.state_data_ptrs, wanted.state_data_ptrs, strict=True):
        assert places(ours, mine) == places(theirs, other)
    if name.startswith("minimax"):
        assert args.state_types == [StateType.MINIMAX_INDEX_K, StateType.MINIMAX_DENSE_KV]
        registered = args.kv_data_ptrs + [a for part in args.state_data_ptrs for a in part]
        assert sorted(places(ours, registered)) == list(range(len(buffers(ours))))


def test_index_values_are_refused_as_they_are_for_sglangs_pool():
    for pool in pair("minimax"):
        with pytest.raises(NotImplementedError, match="index value"):
            arguments(pool)


# Checksums


class OnCuda(torch.Tensor):
    """A CPU tensor of which SGLang's assertion is true."""

    is_cuda = True


class Kernel:
    """The digest of the items at ``ptrs``, in order."""

    def adler32_strided(self, ptrs, lens, states, total_items):
        pairs = zip(ptrs.tolist(), lens.tolist(), strict=True)
        items = [ctypes.string_at(address, length) for address, length in pairs]
        assert len(items) == total_items
        states[0] = zlib.adler32(b"".join(items))

    def adler32_reduce(self, states, result, num_blocks):
        result[0] = states[0]


def request(pool):
    """A scheduler and a request of three pages, out of order."""
    table = torch.zeros(4, 32, dtype=torch.int32)
    table[1, :12] = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11, 16, 17, 18, 19])
    allocator = PagedTokenToKVPoolAllocator(SIZE, PAGE, pool.dtype, "cpu", pool, False)
    scheduler = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
    )
    return scheduler, SimpleNamespace(kv=SimpleNamespace(req_pool_idx=1))


def digest(pool, monkeypatch) -> int:
    monkeypatch.setattr(adler32, "_jit_adler32_module", Kernel)
    args = arguments(pool)
    computer = checksum.KvChecksumComputer(
        torch.device("cpu"),
        args.kv_data_ptrs,
        args.kv_item_lens,
        args.state_data_ptrs,
        args.state_item_lens,
    )
    pages = checksum.page_indices_for_request(*request(pool), 12)
    states = checksum.state_indices_for_request(*request(pool), 12)
    assert pages.tolist() == [5, 2, 4]
    assert states is None or torch.equal(states, pages)
    on_cuda = [None if i is None else i.as_subclass(OnCuda) for i in (pages, states)]
    return computer.compute(*on_cuda)


@pytest.mark.parametrize("name", TRANSFERRED)
def test_the_checksum_of_a_request(name, monkeypatch):
    theirs, ours = pair(name)
    whole = digest(ours, monkeypatch)
    assert whole == digest(theirs, monkeypatch)
    for buffer in buffers(ours):
        inside, outside = raw(buffer)[17], raw(buffer)[24]
        outside[-1, -1] ^= 1
        assert digest(ours, monkeypatch) == whole
        inside[-1, -1] ^= 1
        assert digest(ours, monkeypatch) != whole
        inside[-1, -1] ^= 1


# The canary, and an external cache


def test_canary_buffers_ride_with_ours():
    spliced = []
    for pool in pair("mha"):
        (group,) = attach_mha(
            pool=pool,
            device=torch.device("cpu"),
            read_bytes=16,
            kv_token_id_vs_position_offset=0,
        )
        (keys,), (values,) = group.real_kv_sources_k, group.real_kv_sources_v
        assert keys.tensor.data_ptr() == pool.k_buffer[0].data_ptr()
        assert values.tensor.data_ptr() == pool.v_buffer[0].data_ptr()
        spliced.append(pool.get_contiguous_buf_infos()[1:])
    assert spliced[0] == spliced[1]
    assert len(spliced[1][0]) == 2 * 3 + 4


@pytest.mark.parametrize("name", ["mha", "mha-wide-v"])
def test_an_external_cache_links_our_buffers(name):
    """The addresses that it is told of one layer lead to the pages of that layer."""
    slots = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])
    for pool in pair(name):
        linked = _mha_device_pool_entry(PoolName.KV, pool, {0: 1}, PAGE)
        rows = linked.prepare_locations(slots)
        told = linked.get_prepared_layer_range_meta(rows, 0)
        for addresses, sizes, start in zip(*told[:2], (20, 8), strict=True):
            for side, address, size in zip("kv", addresses, sizes, strict=True):
                page = raw(getattr(pool, f"{side}_buffer")[1])[start : start + PAGE]
                assert ctypes.string_at(address, size) == page.numpy().tobytes()


def test_a_class_that_is_not_registered_is_not_taken_for_sglangs():
    theirs = CASES["minimax"][0]
    assert issubclass(specpool.MiniMaxSparseKVPool, theirs)
    theirs._abc_registry_clear()
    theirs._abc_caches_clear()
    assert not issubclass(specpool.MiniMaxSparseKVPool, theirs)
