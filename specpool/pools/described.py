"""A pool in the structs of SGLang 0.5.23, for the engine's own code that asks for them.

SGLang is imported when one is asked for and not before: no pool needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specpool.pools.base import KVCache
    from specpool.pools.mha import MHATokenToKVPool


def host_pool_decl(pool: KVCache) -> Any:
    """A ``HostPoolDecl``: the host cache keeps this pool's slots under their own numbers."""
    return _module("mem_cache.pool_host.host_pool_decl").make_kv_pool_decl(pool)


def device_pool_info(pool: MHATokenToKVPool) -> Any:
    """A ``DevicePoolInfo``: the buffers of every layer, their addresses and their geometry."""
    info = _module("mem_cache.device_pool_info")
    name = _module("mem_cache.hicache_storage").PoolName.KV
    buffers = info.KVBuffers(
        k=tuple(pool.k_buffer),
        v=tuple(pool.v_buffer),
        k_data_ptrs=pool.k_data_ptrs,
        v_data_ptrs=pool.v_data_ptrs,
        layout=info.KVBufferLayout(pool.kv_cache_layout),
    )
    return info.DevicePoolInfo(
        pool_name=name,
        indices_from_pool=name,
        layer_ids=pool.model_layer_ids,
        buffer_info=info.MHABufferInfo(
            buffers=buffers,
            page_size=pool.page_size,
            head_num=pool.head_num,
            head_dim=pool.head_dim,
            v_head_dim=pool.v_head_dim,
            dtype=pool.store_dtype,
            device=buffers.k_data_ptrs.device,
        ),
    )


def unquantized() -> Any:
    """An ``UnquantizedKVCacheMethod``: what is stored is read as it is."""
    return _module("layers.quantization.fp4_kv_cache_quant_method").UnquantizedKVCacheMethod()


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")
