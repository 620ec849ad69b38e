"""Our pools under SGLang's host cache: descriptions, host pools, copies both ways, sizing.

The transfer operations are of a CUDA wheel; a stand-in of theirs copies tokens between the lists of
layers that SGLang hands it.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache import hicache_auto_size, kv_cache_builder
from sglang.srt.mem_cache.hybrid_cache import host_pool_config, hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool
from sglang.srt.mem_cache.pool_host import mha as host
from sglang.srt.runtime_context import get_context, get_memory, get_parallel, get_schedule

from tests.sglang.our_pools import (
    CASES,
    CLASSES,
    PAGE,
    SIZE,
    buffers,
    pair,
    parts,
    raw,
    standing_in,
)

MHA = [name for name in CASES if name.startswith("mha")]
MINIMAX = ["minimax-m3", "minimax-fp8-stage"]


@pytest.fixture(autouse=True)
def configuration():
    with get_context().override_server_args(), standing_in():
        yield


def transfer(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def main_host(pool, layout="layer_first"):
    cls, info, arguments = hybrid_pool_assembler._mha_host_inputs(pool)
    info.validate(layer_ids=pool.model_layer_ids)
    return cls(info, 2.0, 0, PAGE, layout, pin_memory=False, **arguments)


def described(pool):
    """The engine's description without the tensors, whose bytes differ by address only."""
    (info,) = pool.get_device_pool_infos()
    facts = ("page_size", "head_num", "head_dim", "v_head_dim", "dtype", "device", "scales")
    found = {fact: getattr(info.buffer_info, fact) for fact in facts}
    return (info.pool_name, info.indices_from_pool, info.layer_ids, found), info.buffer_info.buffers


@pytest.mark.parametrize("name", MHA)
def test_device_pool_infos(name):
    theirs, ours = pair(name)
    (facts, held), (wanted, other) = described(ours), described(theirs)
    assert facts == wanted
    assert held.layout == other.layout
    for side, mine in (("k", ours.k_buffer), ("v", ours.v_buffer)):
        assert all(a is b for a, b in zip(getattr(held, side), mine, strict=True))
        addresses = getattr(held, f"{side}_data_ptrs")
        assert addresses.tolist() == [buffer.data_ptr() for buffer in mine]
        assert addresses.dtype == getattr(other, f"{side}_data_ptrs").dtype


def test_a_stage_without_layers_is_described():
    cls, keywords = CASES["mha"]
    for kind in (cls, CLASSES[cls]):
        (info,) = kind(**keywords | {"layer_num": 0}).get_device_pool_infos()
        info.buffer_info.validate(layer_ids=())


@pytest.mark.parametrize("name", ["mha", "minimax-m3"])
def test_what_a_pool_declares(name):
    for pool in pair(name):
        (decl,) = pool.host_pool_decls()
        assert decl.device_pool is pool
        assert (decl.pool_name.value, decl.is_primary, decl.is_layout_root) == ("kv", True, True)


def test_a_draft_of_one_layer_is_packed_beside_ours():
    cls, keywords = CASES["mha"]
    (target,) = pair("mha").ours.host_pool_decls()
    drafts = tuple(kind(**keywords | {"layer_num": 1}) for kind in (cls, CLASSES[cls]))
    checked = host_pool_config._validate_packed_draft_pools(
        target_decls=(target,), draft_pools=drafts
    )
    assert [decl.device_pool for (decl,) in checked] == list(drafts)
    info, mtp = (
        pool.get_device_pool_infos()[0].buffer_info for pool in (target.device_pool, drafts[1])
    )
    host.MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        "layer_first",
        pin_memory=False,
        device_capacity_tokens=SIZE,
        start_layer=0,
        end_layer=3,
        draft_buffer_infos=(mtp,),
    )


@pytest.mark.parametrize("name", ["mha", "mha-fp8-stage"])
def test_keys_and_values_to_the_host_and_back(name, monkeypatch):
    monkeypatch.setattr(host, "transfer_kv_direct", transfer, raising=False)
    both = pair(name)
    pools = [main_host(pool) for pool in both]
    assert type(pools[0]) is type(pools[1])
    for pool, kept in zip(both, pools, strict=True):
        round_trip(pool, kept)
    assert both.same()
    assert torch.equal(raw(pools[0].k_buffer), raw(pools[1].k_buffer))
    assert torch.equal(raw(pools[0].v_buffer), raw(pools[1].v_buffer))


@pytest.mark.parametrize("name", MHA)
def test_the_host_pool_is_as_large_as_over_sglangs(name):
    fields = ("size", "page_num", "size_per_token", "start_layer", "layer_num", "dtype")
    pools = [main_host(pool, "page_first") for pool in pair(name)]
    sizes = [[getattr(pool, field) for field in fields] for pool in pools]
    assert sizes[0] == sizes[1]
    assert type(pools[0]) is type(pools[1])


def round_trip(pool, kept):
    """Two pages to the host, the pool forgotten, the pages back into others."""
    device, hosted = torch.arange(4, 12), torch.arange(16, 24)
    before = [raw(buffer)[device].clone() for buffer in buffers(pool)]
    kept.backup_from_device_all_layer(pool, hosted, device, "direct")
    for buffer in buffers(pool):
        raw(buffer).zero_()
    again = torch.cat([device[4:] + 16, device[:4]])
    for layer in range(pool.layer_num):
        kept.load_to_device_per_layer(pool, hosted, again, layer, "direct")
    after = [raw(buffer)[again] for buffer in buffers(pool)]
    assert before[0].any()
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("name", MINIMAX)
def test_index_keys_to_the_host_and_back(name, monkeypatch):
    monkeypatch.setattr(host, "transfer_kv_direct", transfer, raising=False)
    both = pair(name)
    for pool in both:
        anchor = main_host(pool.main_pool)
        index = host.MHATokenToKOnlyPoolHost(
            pool.index_k_pool, anchor, "layer_first", pin_memory=False
        )
        assert (index.size, index.layer_num) == (anchor.size, pool.index_k_pool.layer_num)
        round_trip(pool.main_pool, anchor)
        round_trip(pool.index_k_pool, index)
    assert both.same()


def test_a_minimax_stack_is_assembled_over_ours(monkeypatch):
    """As a server assembles it, but for memory that is not pinned and streams that are CUDA's."""
    unpinned = (False, "cpu", "default")
    for cls in (host.MHATokenToKVPoolHost, host.MHATokenToKOnlyPoolHost):
        monkeypatch.setattr(cls.__init__, "__defaults__", unpinned)
    controller = Mock()
    monkeypatch.setattr(hybrid_pool_assembler, "HybridCacheController", controller)

    def assembled(pool):
        with (
            get_parallel().override(dcp_enabled=False),
            get_memory().override(hicache_ratio=2.0, hicache_size=0),
        ):
            return hybrid_pool_assembler._MiniMaxSparseStrategy().build(
                cache=None,
                kvcache=pool,
                params=Mock(page_size=PAGE, pp_size=1),
                server_args=None,
                load_cache_event=None,
            )

    theirs, ours = pair("minimax-m3")
    result, wanted = assembled(ours), assembled(theirs)
    assert result.pools_desc == wanted.pools_desc == "KV + INDEXER(k-only)"
    entries = result.host_pool_group.entries
    assert [entry.device_pool for entry in entries] == [ours.main_pool, ours.index_k_pool]
    for entry, other in zip(entries, wanted.host_pool_group.entries, strict=True):
        assert entry.name == other.name
        assert type(entry.host_pool) is type(other.host_pool)
        layers = range(ours.layer_num)
        assert [*map(entry.layer_mapper, layers)] == [*map(other.layer_mapper, layers)]
    strategy = hybrid_pool_assembler._select_strategy(
        ours, {hybrid_pool_assembler.ComponentType.FULL}
    )
    hybrid_pool_assembler._check_declared_pools_present(
        kvcache=ours, result=result, strategy=strategy
    )
    assert controller.call_count == 2


@pytest.mark.parametrize("name", [*MHA, *MINIMAX])
def test_the_host_cache_is_sized_by_ours(name):
    def estimate(pool, draft):
        params = SimpleNamespace(
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
            req_to_token_pool=None,
            mtp_draft_device_pools=(draft,),
        )
        return hicache_auto_size._estimate_hicache_bytes(params, None)

    (theirs, ours), (their_draft, our_draft) = pair(name), pair("mha")
    assert estimate(ours, our_draft) == estimate(theirs, their_draft)


@pytest.mark.parametrize("name", MHA)
def test_staging_is_prepared_over_ours(name, monkeypatch):
    """On a GPU it allocates; here the buffers it would make are recorded."""
    asked = []
    monkeypatch.setattr(
        kv_cache_builder,
        "prepare_mha_write_back_staging",
        lambda info, **keywords: asked.append((info.head_num, info.dtype, keywords)),
    )
    for pool in pair(name):
        runner = SimpleNamespace(token_to_kv_pool=pool, mtp_draft_device_pools=())
        with (
            get_memory().override(
                hicache_mem_layout="page_first",
                enable_hierarchical_cache=True,
                hicache_ratio=2.0,
                hicache_size=0,
            ),
            get_schedule().override(page_size=PAGE),
        ):
            kv_cache_builder.prepare_hicache_staging(tp_worker=SimpleNamespace(model_runner=runner))
        assert pool.hicache_write_back_staging is None
    assert asked[0] == asked[1]


@pytest.mark.parametrize("name", ["single", "single-large-pages"])
def test_latent_pages_to_the_host(name):
    theirs, ours = pair(name)
    sizes = []
    for pool in (theirs, ours):
        kept = DeepSeekV4PagedHostPool(
            "c4",
            pool.kv_buffer,
            pool.kv_buffer[0][0].nbytes,
            num_host_pages=12,
            slot_page_size=PAGE,
            pin_memory=False,
        )
        assert kept.device_ptrs.tolist() == [buffer.data_ptr() for buffer in pool.kv_buffer]
        sizes.append((kept.size, kept.item_bytes, kept.layer_num))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", ["mha", "minimax"])
def test_the_attention_backends_question_how_values_are_stored(name):
    for pool in pair(name):
        method = pool.get_kv_cache_quant_method()
        assert type(method) is UnquantizedKVCacheMethod
        assert not method.needs_global_scale()


def test_a_round_trip_that_forgets_a_layer_is_seen(monkeypatch):
    def short(src_layers, dst_layers, **arguments):
        transfer(src_layers[:-1], dst_layers[:-1], **arguments)

    monkeypatch.setattr(host, "transfer_kv_direct", short, raising=False)
    pool = parts(pair("mha").ours)[0]
    with pytest.raises(AssertionError):
        round_trip(pool, main_host(pool))
