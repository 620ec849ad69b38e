"""What SGLang's pools store, as groups of tensors in a declared layout.

Every layout is taken from the pool (its layout label, strides, page sizes), and a pool is known by
its exact class: a subclass may store something else. What rows cannot express is either left to
SGLang, where its own move is right, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from specpool.errors import UnsupportedAccess
from specpool.rows import Rows, rows_from


class LeftToSGLangError(UnsupportedAccess):
    """The pool's storage is no rows known here, and SGLang has a move of its own for it."""


class Group(NamedTuple):
    """Tensors of one kind, one a layer, in one of the layouts of ``rows_from``."""

    name: str
    tensors: Sequence[torch.Tensor]
    layout: str = "nhd"
    page_size: int | None = None
    widths: tuple[int, ...] | None = None
    mapping: torch.Tensor | None = None

    def rows(self) -> Iterator[Rows]:
        """The rows of every tensor that has any."""
        for layer, tensor in enumerate(self.tensors):
            yield from rows_from(
                tensor,
                self.layout,
                page_size=self.page_size,
                widths=self.widths,
                mapping=self.mapping,
                name=f"{self.name} {layer}",
            )


def groups_of(pool: Any) -> list[Group]:
    """What moves when a slot of ``pool`` moves.

    Args:
        pool: a KV pool of SGLang 0.5.23.

    Raises:
        LeftToSGLangError: its storage is no rows; SGLang's own move serves it.
        UnsupportedAccess: nothing moves it rightly; the message says what to switch off.
    """
    describe = _DESCRIBED.get(class_name(pool))
    if describe is None:
        raise _refusal(pool, "it is no class that specpool knows the storage of", _OFF)
    return describe(pool)


def is_described(pool: Any) -> bool:
    """Whether the storage of the pool's class is known here."""
    return class_name(pool) in _DESCRIBED


def parts_of(pool: Any) -> Iterator[Any]:
    """The pool and the pools it is composed of."""
    yield pool
    for name in _SUB_POOLS:
        part = getattr(pool, name, None)
        if part is not None:
            yield from parts_of(part)


def awaited_layers(pool: Any) -> Iterable[int]:
    """The places in a layer-transfer counter that the pool's getters wait for."""
    # hybrid models: the counter knows the other layers too
    absolute = getattr(pool, "full_attention_layer_id_mapping", None)
    if absolute is None:
        absolute = getattr(pool, "layers_mapping", None)  # sliding-window models
    if absolute is None:
        return range(pool.layer_num)
    return sorted(layer - pool.start_layer for layer in absolute)


def class_name(pool: Any) -> str:
    """``module.Class`` of a pool, which layouts go by."""
    return f"{type(pool).__module__}.{type(pool).__qualname__}"


_OFF = "turn speculative decoding off, or trees with --speculative-eagle-topk 1"
_ON_HOST = "HiSparse keeps copies of its rows on the host, which a move on the device cannot see"
_SPREAD = "decode context parallelism spreads a request's slots over several ranks"
_SUB_POOLS = (
    "full_kv_pool",
    "swa_kv_pool",
    "main_pool",
    "dense_pool",
    "index_kv_pool",
    "index_k_pool",
)


def _refusal(pool: Any, why: str, instead: str) -> UnsupportedAccess:
    return UnsupportedAccess(
        f"specpool does not move {class_name(pool)}: {why}; {instead}, or set SPECPOOL_SGLANG=off"
    )


def _left(pool: Any, why: str) -> LeftToSGLangError:
    return LeftToSGLangError(f"specpool leaves {class_name(pool)} to SGLang: {why}")


def _mha(pool: Any) -> list[Group]:
    if pool.layer_num == 0:
        return []
    if _ranks() > 1:
        raise _left(pool, _SPREAD)
    if getattr(pool, "native_k_scale_buffer", None) is not None:
        raise _left(pool, "native FP4 scales are swizzled, which is no row a slot")
    has_scales = getattr(pool, "k_scale_buffer", None) is not None
    if pool.kv_cache_layout == "hnd" and not has_scales:
        return [
            Group("K", pool.k_buffer, "hnd", pool.page_size),
            Group("V", pool.v_buffer, "hnd", pool.page_size),
        ]
    if pool.kv_cache_layout != "nhd":
        raise _left(pool, f"its layout is {pool.kv_cache_layout!r}")
    return _payload_and_scales(pool) if has_scales else _payload(pool)


def _payload(pool: Any) -> list[Group]:
    return [Group("K", pool.k_buffer), Group("V", pool.v_buffer)]


def _payload_and_scales(pool: Any) -> list[Group]:
    scales = [Group("K scale", pool.k_scale_buffer), Group("V scale", pool.v_scale_buffer)]
    return [*_payload(pool), *scales]


def _mxfp8(pool: Any) -> list[Group]:
    if pool.mxfp8_sf_interleaved:
        raise _left(pool, "scales of pages of 128 are interleaved, which is no row a slot")
    return _payload_and_scales(pool)


def _k_only(pool: Any) -> list[Group]:
    if _ranks() > 1:
        raise _refusal(pool, _SPREAD, "start with --dcp-size 1")
    return [Group("K", pool.k_buffer)]


def _mla(pool: Any) -> list[Group]:
    if _ranks() > 1 and pool._write_loc_dcp_span != 1:
        raise _refusal(pool, _SPREAD, "start with --dcp-size 1")
    groups = [Group("latent", _held(pool.kv_buffer))]
    if pool.kv_scale_buffer is not None:
        groups.append(Group("latent scale", _held(pool.kv_scale_buffer)))
    return groups


def _dsa(pool: Any) -> list[Group]:
    if pool.index_kpool != 1:
        raise _refusal(
            pool,
            f"{pool.index_kpool} tokens share an index key (index_kpool)",
            "a moved token would need its neighbours' keys computed anew: " + _OFF,
        )
    cache = pool.index_key_cache
    if class_name(cache) != "sglang.srt.mem_cache.index_key_cache.IndexKeyCache":
        raise _left(pool, f"its index keys are in a {class_name(cache)}")
    if _preshuffled():
        raise _left(pool, "index keys are preshuffled into tiles")
    if pool.index_page_size != pool.page_size:
        raise _left(pool, "pages of its index keys are not the pool's")
    scale_bytes = pool.index_head_dim // pool.quant_block_size * 4
    index = Group(
        "index key and scale",
        _held(cache.buffer),
        "page_split",
        pool.index_page_size,
        (pool.index_head_dim, scale_bytes),
    )
    return [*_mla(pool), index]


def _deepseek_v4(pool: Any) -> list[Group]:
    layout, page_size = pool.kv_layout, pool.page_size
    data_stride, scale_base, scale_stride = layout.row_addressing(page_size)
    data, scale = layout.data_bytes, layout.scale_bytes
    widths: tuple[int, ...]
    if (data_stride, scale_base, scale_stride) == (data, page_size * data, scale):
        widths = (data, scale)
    elif (data_stride, scale_base, scale_stride) == (data + scale, data, data + scale):
        widths = (data + scale,)
    else:
        raise _refusal(pool, f"its layout {layout} addresses rows in a way unknown here", _OFF)
    return [Group("KV", pool.kv_buffer, "page_split", page_size, widths)]


def _deepseek_v4_uniform(pool: Any) -> list[Group]:
    widths = (pool.kv_cache_total_dim,)
    return [Group("KV", pool.kv_buffer, "page_split", pool.page_size, widths)]


def _hisparse_c4(pool: Any) -> list[Group]:
    mapping = getattr(pool, "full_to_hisparse_device_index_mapping", None)
    if mapping is None:
        raise _refusal(pool, "no mapping is registered", "call register_mapping first")
    return [group._replace(mapping=_referent(mapping)) for group in _deepseek_v4(pool)]


def _minimax(pool: Any) -> list[Group]:
    if pool._enable_hisparse:
        return _hisparse(pool)
    named = {"main": pool.main_pool, "index": pool.index_kv_pool, "index K": pool.index_k_pool}
    try:
        return [
            group._replace(name=f"{name} {group.name}")
            for name, part in named.items()
            if part is not None
            for group in groups_of(part)
        ]
    except LeftToSGLangError as error:
        raise _refusal(pool, f"of one of its sub-pools ({error})", _OFF) from error


def _hisparse(pool: Any) -> list[Group]:
    raise _refusal(pool, _ON_HOST, "start without --enable-hisparse")


def _swa(pool: Any) -> list[Group]:
    _check_parts(pool, pool.full_kv_pool, pool.swa_kv_pool)
    mapping = pool.full_to_swa_index_mapping
    if mapping is None:
        raise _left(pool, "no mapping from full to sliding-window slots is registered yet")
    full = [g._replace(name=f"full {g.name}") for g in groups_of(pool.full_kv_pool)]
    mapping = _referent(mapping)
    window = [
        g._replace(name=f"window {g.name}", mapping=mapping) for g in groups_of(pool.swa_kv_pool)
    ]
    return full + window


def _hybrid_linear(pool: Any) -> list[Group]:
    _check_parts(pool, pool.full_kv_pool)
    return groups_of(pool.full_kv_pool)


def _check_parts(pool: Any, *parts: Any) -> None:
    """Leave a pool with a part of another class (a platform's own) to SGLang, which asks the part.

    Raises:
        LeftToSGLangError: a part's storage is unknown here.
    """
    for part in parts:
        if not is_described(part):
            raise _left(
                pool, f"a part of it is a {class_name(part)}, whose storage is unknown here"
            )


def _ranks() -> int:
    """Ranks that share a request's slots; 1 where no engine has said how many."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return int(get_parallel().attn_dcp_size)
    except RuntimeError:  # nothing is published: a pool outside of an engine
        return 1


def _held(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Buffers of layers that this rank holds; others are placeholders without rows."""
    return [buffer for buffer in buffers if buffer.shape[0]]


def _referent(mapping: torch.Tensor) -> torch.Tensor:
    """The tensor itself: allocators register a weak proxy of their mapping."""
    tensor: torch.Tensor = mapping.data_ptr.__self__  # type: ignore[attr-defined]
    return tensor


def _preshuffled() -> bool:
    from sglang.srt.mem_cache import index_key_cache

    return bool(index_key_cache._use_aiter_preshuffle)


_MEMORY_POOL = "sglang.srt.mem_cache.memory_pool."
_DEEPSEEK_V4 = "sglang.srt.mem_cache.deepseek_v4_memory_pool."
_HISPARSE = "sglang.srt.mem_cache.hisparse_memory_pool."
_DESCRIBED: dict[str, Callable[[Any], list[Group]]] = {
    f"{_MEMORY_POOL}MHATokenToKVPool": _mha,
    f"{_MEMORY_POOL}MHATokenToKVPoolFP4": _payload_and_scales,
    f"{_MEMORY_POOL}MHATokenToKVPoolMXFP8": _mxfp8,
    f"{_MEMORY_POOL}MHATokenToKOnlyPool": _k_only,
    f"{_MEMORY_POOL}MLATokenToKVPool": _mla,
    f"{_MEMORY_POOL}MLATokenToKVPoolFP4": _mla,
    f"{_MEMORY_POOL}DSATokenToKVPool": _dsa,
    f"{_MEMORY_POOL}MiniMaxSparseKVPool": _minimax,
    f"{_MEMORY_POOL}HybridLinearKVPool": _hybrid_linear,
    "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool": _swa,
    f"{_DEEPSEEK_V4}DeepSeekV4SingleKVPool": _deepseek_v4,
    f"{_DEEPSEEK_V4}DeepSeekV4UniformFP8KVPool": _deepseek_v4_uniform,
    f"{_DEEPSEEK_V4}HiSparseC4DevicePool": _hisparse_c4,
    # they inherit moves of SGLang's that take locs for device slots
    f"{_HISPARSE}HiSparseDSATokenToKVPool": _hisparse,
    f"{_HISPARSE}HiSparseMHAMainPool": _hisparse,
}
