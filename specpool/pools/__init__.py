"""Pools: what is stored for each kind of attention, how it is written and read, which rows it has.

Every pool moves all its buffers in one launch (``move_kv_cache``, ``move_accepted``), and keeps the
names of SGLang 0.5.23's class of the same name.
"""

from specpool.pools.base import KVCache
from specpool.pools.deepseek_v4 import DeepSeekV4SingleKVPool
from specpool.pools.hisparse import HiSparseC4DevicePool
from specpool.pools.k_only import MHATokenToKOnlyPool
from specpool.pools.latent import NopeFp8RopeBf16Pack
from specpool.pools.mha import MHATokenToKVPool
from specpool.pools.minimax_sparse import MiniMaxSparseKVPool

__all__ = [
    "DeepSeekV4SingleKVPool",
    "HiSparseC4DevicePool",
    "KVCache",
    "MHATokenToKOnlyPool",
    "MHATokenToKVPool",
    "MiniMaxSparseKVPool",
    "NopeFp8RopeBf16Pack",
]
