"""SGLang's pools and ours of the same name, built by the same keywords, with the same bytes.

What the tests compare is SGLang's own code over the one and over the other. `standing_in` is for
that code where it asks `isinstance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4
from sglang.srt.mem_cache import memory_pool as sglang

import specpool

FP8 = torch.float8_e4m3fn
SIZE, PAGE = 28, 4
common = {"size": SIZE, "page_size": PAGE, "device": "cpu", "enable_memory_saver": False}
mha = dict(common, dtype=torch.bfloat16, head_num=2, head_dim=16, layer_num=3)
k_only = dict(common, dtype=torch.bfloat16, head_num=1, head_dim=16, layer_num=3)
single = dict(common, dtype=FP8, qk_nope_head_dim=448, qk_rope_head_dim=64, layer_num=2)
minimax = dict(
    common,
    dtype=torch.bfloat16,
    head_num=2,
    head_dim=16,
    idx_head_dim=16,
    dense_layer_ids=[0, 1],
    sparse_layer_ids=[2, 3, 4, 5],
    disable_value_sparse_layer_ids=[3, 5],
    start_layer=0,
    end_layer=6,
)
k_only_index = dict(minimax, disable_value_sparse_layer_ids=[2, 3, 4, 5])

CLASSES = {
    sglang.MHATokenToKVPool: specpool.MHATokenToKVPool,
    sglang.MHATokenToKOnlyPool: specpool.MHATokenToKOnlyPool,
    sglang.MiniMaxSparseKVPool: specpool.MiniMaxSparseKVPool,
    v4.DeepSeekV4SingleKVPool: specpool.DeepSeekV4SingleKVPool,
    v4.HiSparseC4DevicePool: specpool.HiSparseC4DevicePool,
}
CASES = {
    "mha": (sglang.MHATokenToKVPool, mha),
    "mha-wide-v": (sglang.MHATokenToKVPool, dict(mha, v_head_dim=24)),
    "mha-fp8-stage": (sglang.MHATokenToKVPool, dict(mha, dtype=FP8, start_layer=3, end_layer=6)),
    "hnd": (sglang.MHATokenToKVPool, dict(mha, kv_cache_layout="hnd")),
    "hnd-wide-v": (sglang.MHATokenToKVPool, dict(mha, kv_cache_layout="hnd", v_head_dim=24)),
    "k-only": (sglang.MHATokenToKOnlyPool, k_only),
    "k-only-fp8": (sglang.MHATokenToKOnlyPool, dict(k_only, dtype=FP8)),
    "minimax": (sglang.MiniMaxSparseKVPool, minimax),
    "minimax-m3": (sglang.MiniMaxSparseKVPool, k_only_index),
    "minimax-fp8-stage": (
        sglang.MiniMaxSparseKVPool,
        dict(k_only_index, dtype=FP8, index_dtype=torch.bfloat16, start_layer=1, end_layer=4),
    ),
    "single": (v4.DeepSeekV4SingleKVPool, single),
    "single-large-pages": (v4.DeepSeekV4SingleKVPool, dict(single, global_page_size=16)),
}


class Pair(NamedTuple):
    """A pool of SGLang's and ours, with the same bytes in every buffer."""

    theirs: Any
    ours: Any

    def same(self) -> bool:
        """Whether they still hold the same bytes, padding included."""
        pairs = zip(buffers(self.theirs), buffers(self.ours), strict=True)
        return all(torch.equal(raw(theirs), raw(ours)) for theirs, ours in pairs)


def pair(name: str, seed: int = 0) -> Pair:
    cls, keywords = CASES[name]
    return filled(built(name), CLASSES[cls](**keywords), seed)


def built(name: str) -> Any:
    """SGLang's, which takes its layout from a variable, and moves by indexing."""
    cls, keywords = CASES[name]
    given = {name: value for name, value in keywords.items() if name != "kv_cache_layout"}
    with (
        envs.SGLANG_USE_HND_KVCACHE.override(given != keywords),
        envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True),
    ):
        return cls(**given)


def filled(theirs: Any, ours: Any, seed: int = 0) -> Pair:
    """Random values in both; bytes of fp8 are any that are no NaN."""
    generator = torch.Generator().manual_seed(seed)
    for into, out in zip(buffers(theirs), buffers(ours), strict=True):
        assert (into.shape, into.dtype) == (out.shape, out.dtype)
        values = torch.randint(0, 0x7F, raw(into).shape, generator=generator, dtype=torch.uint8)
        raw(into).copy_(values)
        raw(out).copy_(values)
    return Pair(theirs, ours)


def parts(pool: Any) -> list[Any]:
    """The pools that own buffers: of a composite its sub-pools, else the pool itself."""
    named = [getattr(pool, f"{name}_pool", None) for name in ("main", "index_kv", "index_k")]
    named += [getattr(pool, name, None) for name in ("full_kv_pool", "swa_kv_pool")]
    return [part for part in named if part is not None] or [pool]


def buffers(pool: Any) -> list[torch.Tensor]:
    """Every buffer of a pool, of either side, in one order."""
    names = ("k_buffer", "v_buffer", "kv_buffer")
    return [b for part in parts(pool) for name in names for b in getattr(part, name, None) or []]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, in its own memory."""
    return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor


def rows(pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of slots in every buffer, by index arithmetic of the test's own."""
    found = []
    for buffer in buffers(pool):
        if buffer.dim() == 3:
            found.append(raw(buffer)[slots])
            continue
        if buffer.dim() == 4:
            found.append(raw(buffer).transpose(1, 2)[slots // PAGE, slots % PAGE])
            continue
        page, offset = (slots // PAGE).unsqueeze(1), (slots % PAGE).unsqueeze(1)
        payload, scales = torch.arange(576), PAGE * 576 + torch.arange(8)
        found += [buffer[page, offset * 576 + payload], buffer[page, offset * 8 + scales]]
    return found


def layer(layer_id: int, **attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id, **attributes)


@contextmanager
def standing_in() -> Iterator[None]:
    """SGLang's `isinstance` takes our pools for its own of the same name, inside."""
    for theirs, ours in CLASSES.items():
        theirs.register(ours)
    try:
        yield
    finally:
        for theirs in CLASSES:
            theirs._abc_registry_clear()
            theirs._abc_caches_clear()
