"""KV-cache pools for speculative decoding: every buffer of every layer moves in one launch.

Build one of the pools, or wrap tensors of your own as rows (``rows_from``) and move them with a
``RowMover``.
"""

from specpool.backends import backend_for
from specpool.errors import UnsupportedAccess
from specpool.mover import RowMover
from specpool.pools import (
    DeepSeekV4SingleKVPool,
    HiSparseC4DevicePool,
    KVCache,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    NopeFp8RopeBf16Pack,
)
from specpool.rows import Rows, rows_from

__all__ = [
    "DeepSeekV4SingleKVPool",
    "HiSparseC4DevicePool",
    "KVCache",
    "MHATokenToKOnlyPool",
    "MHATokenToKVPool",
    "MiniMaxSparseKVPool",
    "NopeFp8RopeBf16Pack",
    "RowMover",
    "Rows",
    "UnsupportedAccess",
    "backend_for",
    "rows_from",
]
__version__ = "0.1.0"
