"""Every KV pool of SGLang 0.5.23, small, built as its engine builds it, and where its bytes lie.

The oracle asks a pool for its tensors and for nothing else: `Buffer.at` indexes a tensor of byte
addresses as the pool's own setter indexes its buffer, or by a layout's published numbers. No row of
specpool's is involved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.deepseek_v4_memory_pool import (
    DeepSeekV4SingleKVPool,
    DeepSeekV4UniformFP8KVPool,
    HiSparseC4DevicePool,
)
from sglang.srt.mem_cache.hisparse_memory_pool import HiSparseDSATokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MHATokenToKVPoolFP4,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
    MLATokenToKVPoolFP4,
)
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_parallel

SIZE, PAGE = 28, 4
FP8 = torch.float8_e4m3fn
common = {"size": SIZE, "page_size": PAGE, "device": "cpu", "enable_memory_saver": False}


@dataclass(frozen=True, eq=False)
class Buffer:
    """One tensor of a pool.

    Attributes:
        tensor: the pool's own, any dtype, a view or not.
        at: given the address of every byte of the tensor (its shape, bytes last) and a slot, the
            addresses of that slot's bytes.
        mapping: where the pool translates a loc before it writes.
    """

    tensor: torch.Tensor
    at: Callable[[torch.Tensor, int], torch.Tensor]
    mapping: torch.Tensor | None = None

    @property
    def memory(self) -> torch.Tensor:
        """All bytes of the allocation that the tensor lies in, shared."""
        return torch.empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage())

    def addresses(self, loc: int) -> torch.Tensor | None:
        """Where in `memory` the bytes of a loc lie; None where it has none."""
        slot = loc if self.mapping is None else int(self.mapping[loc])
        if self.mapping is not None and slot <= 0:
            return None
        return self.at(self._every, slot).flatten()

    @cached_property
    def _every(self) -> torch.Tensor:
        tensor, item = self.tensor, self.tensor.element_size()
        stride = tuple(step * item for step in tensor.stride())
        held = torch.arange(tensor.untyped_storage().nbytes())
        return held.as_strided((*tensor.shape, item), (*stride, 1), tensor.storage_offset() * item)


def token(addresses: torch.Tensor, slot: int) -> torch.Tensor:
    return addresses[slot]


def head_major(addresses: torch.Tensor, slot: int, page_size: int = PAGE) -> torch.Tensor:
    return addresses[slot // page_size, :, slot % page_size]


def paged(addresses: torch.Tensor, slot: int, page_size: int) -> torch.Tensor:
    return addresses[slot // page_size, slot % page_size]


def packed(
    addresses: torch.Tensor, slot: int, page_size: int, data: int, scale: int, together: bool
) -> torch.Tensor:
    """A page of data runs, then scale runs; or each token's data and scales together."""
    page, i = addresses[slot // page_size].flatten(), slot % page_size
    if together:
        return page[i * (data + scale) : (i + 1) * (data + scale)]
    scales = page_size * data + i * scale
    return torch.cat((page[i * data : (i + 1) * data], page[scales : scales + scale]))


def interleaved_scales(addresses: torch.Tensor, slot: int) -> torch.Tensor:
    """[pages, heads, 32, 4, bytes]: token t of a page of 128 sits at [t % 32, t // 32]."""
    page, i = divmod(slot, 128)
    return addresses[page, :, i % 32, i // 32]


def mapping(locs: int, slots: int) -> torch.Tensor:
    """Locs to slots in descending order, holes at every fifth loc, SGLang's sentinel last."""
    held = torch.zeros(locs + 1, dtype=torch.int64)
    mapped = [loc for loc in range(1, locs) if loc % 5][: slots - 1]
    held[mapped] = torch.arange(slots - 1, slots - 1 - len(mapped), -1)
    held[-1] = -1
    return held


def mha(pool: Any, at: Callable = token, mapping: torch.Tensor | None = None) -> list[Buffer]:
    tensors = [*pool.k_buffer, *pool.v_buffer]
    if pool.k_scale_buffer is not None:
        tensors += [*pool.k_scale_buffer, *pool.v_scale_buffer]
    return [Buffer(tensor, at, mapping) for tensor in tensors]


def mla(pool: Any, mapping: torch.Tensor | None = None) -> list[Buffer]:
    tensors = [*pool.kv_buffer, *(pool.kv_scale_buffer or [])]
    return [Buffer(tensor, token, mapping) for tensor in tensors]


def k_only(pool: Any) -> list[Buffer]:
    return [Buffer(tensor, token) for tensor in pool.k_buffer]


def dsa(pool: Any, latent_mapping: torch.Tensor | None = None) -> list[Buffer]:
    index = partial(packed, page_size=64, data=128, scale=4, together=False)
    kept = [tensor for tensor in pool.index_k_with_scale_buffer if tensor.shape[0]]
    return mla(pool, latent_mapping) + [Buffer(tensor, index) for tensor in kept]


def minimax(pool: Any) -> list[Buffer]:
    main = pool.main_pool
    held = getattr(main, "full_to_hisparse_device_index_mapping", None)
    found = mha(main, mapping=held)
    found += mha(pool.dense_pool) if pool.dense_pool is not None else []
    found += mha(pool.index_kv_pool) if pool.index_kv_pool is not None else []
    return found + (k_only(pool.index_k_pool) if pool.index_k_pool is not None else [])


def nvfp4(pool: Any) -> list[Buffer]:
    main, index = pool.main_pool, pool.index_k_pool
    tensors = [*main.k_buffer, *main.v_buffer, *main.k_scale_buffer, *main.v_scale_buffer]
    found = [Buffer(tensor, partial(head_major, page_size=128)) for tensor in tensors]
    tensors = [*index.k_buffer, *index.k_scale_buffer]
    return found + [Buffer(tensor, partial(paged, page_size=128)) for tensor in tensors]


def mxfp8(pool: Any) -> list[Buffer]:
    found = [Buffer(tensor, token) for tensor in (*pool.k_buffer, *pool.v_buffer)]
    at = interleaved_scales if pool.mxfp8_sf_interleaved else token
    scales = (*pool.k_scale_buffer, *pool.v_scale_buffer)
    return found + [Buffer(tensor, at) for tensor in scales]


# data bytes, scale bytes, whether a token's scales follow its data
DEEPSEEK_V4 = {
    "v4": (576, 8, False),
    "v41": (512, 16, False),
    "v41_fp4": (256, 32, False),
    "v41_new": (512, 16, True),
    "v41_fp4_new": (256, 32, True),
    "uniform_fp8": (512, 0, True),
}


def single(pool: Any) -> list[Buffer]:
    uniform = isinstance(pool, DeepSeekV4UniformFP8KVPool)
    layout = "uniform_fp8" if uniform else pool.kv_layout.value
    data, scale, together = DEEPSEEK_V4[layout]
    at = partial(packed, page_size=pool.page_size, data=data, scale=scale, together=together)
    held = getattr(pool, "full_to_hisparse_device_index_mapping", None)
    return [Buffer(tensor, at, held) for tensor in pool.kv_buffer]


def swa(pool: Any) -> list[Buffer]:
    held = pool.full_to_swa_index_mapping
    return mha(pool.full_kv_pool) + mha(pool.swa_kv_pool, mapping=held)


class Case(NamedTuple):
    """A pool class in one of its configurations.

    Attributes:
        build: the pool, without values.
        buffers: its buffers.
        locs: locs its setters take: 0 up to, and without, this.
        served: ``default``: by the plugin with nothing configured; ``all``: with
            SPECPOOL_SGLANG=all; ``parts``: its parts' own movers are called; ``left``: SGLang's own
            move stays; ``never``: refused by name.
        own_is_right: whether SGLang's own move, on a CPU, does what a move must.
    """

    build: Callable[[], Any]
    buffers: Callable[[Any], list[Buffer]]
    locs: int = SIZE + PAGE
    served: str = "all"
    own_is_right: bool = True

    def filled(self, seed: int = 0) -> Any:
        """The pool with random bytes in every allocation."""
        pool, generator = self.build(), torch.Generator().manual_seed(seed)
        for memory in memories(self.buffers(pool)):
            memory.random_(0, 256, generator=generator)
        return pool


def memories(buffers: list[Buffer]) -> list[torch.Tensor]:
    """The allocations of buffers, each once."""
    return list({b.tensor.untyped_storage().data_ptr(): b.memory for b in buffers}.values())


def snapshot(buffers: list[Buffer]) -> list[torch.Tensor]:
    return [memory.clone() for memory in memories(buffers)]


def moved(buffers: list[Buffer], tgt: list[int], src: list[int]) -> list[torch.Tensor]:
    """What every allocation must hold after a move: all rows gathered, then all scattered."""
    before = {b.tensor.untyped_storage().data_ptr(): b.memory.clone() for b in buffers}
    after = {key: memory.clone() for key, memory in before.items()}
    for buffer in buffers:
        key = buffer.tensor.untyped_storage().data_ptr()
        for to, at in zip(tgt, src, strict=True):
            if -1 in (to, at):
                continue
            into, out = buffer.addresses(to), buffer.addresses(at)
            if into is not None and out is not None:
                after[key][into] = before[key][out]
    return list(after.values())


def wrong(buffers: list[Buffer], expected: list[torch.Tensor]) -> int:
    """Bytes that differ."""
    pairs = zip(memories(buffers), expected, strict=True)
    return sum(int((memory != want).sum()) for memory, want in pairs)


def build_mha(**keywords: Any) -> MHATokenToKVPool:
    cls = keywords.pop("cls", MHATokenToKVPool)
    given = dict(common, head_num=2, head_dim=16, layer_num=2, dtype=torch.bfloat16)
    return cls(**given | keywords)


def build_hnd(**keywords: Any) -> MHATokenToKVPool:
    from sglang.srt.environ import envs

    with envs.SGLANG_USE_HND_KVCACHE.override(True):
        return build_mha(**keywords)


def build_scaled() -> MHATokenToKVPool:
    """What `--kv-cache-dtype fp4` makes: packed values and a scale for every 16 of them."""
    from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import FP4MXBlock16KVCacheMethod

    return build_mha(quant_method=FP4MXBlock16KVCacheMethod(), head_dim=32)


def build_k_only(**keywords: Any) -> MHATokenToKOnlyPool:
    given = dict(common, head_num=1, head_dim=16, layer_num=3, dtype=torch.bfloat16)
    return MHATokenToKOnlyPool(**given | keywords)


def build_mla(**keywords: Any) -> MLATokenToKVPool:
    cls = keywords.pop("cls", MLATokenToKVPool)
    given = dict(common, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=3, dtype=torch.bfloat16)
    return cls(**given | keywords)


def build_dsa(**keywords: Any) -> DSATokenToKVPool:
    cls = keywords.pop("cls", DSATokenToKVPool)
    given = {
        "size": 64,
        "page_size": 64,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "dtype": torch.bfloat16,
        "layer_num": 2,
        "device": "cpu",
        "index_head_dim": 128,
        "enable_memory_saver": False,
        "kv_cache_dim": 40,
    }
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        return cls(**given | keywords)


def build_hisparse_dsa() -> HiSparseDSATokenToKVPool:
    pool = build_dsa(cls=HiSparseDSATokenToKVPool, host_to_device_ratio=2)
    pool.register_mapping(keep(pool, mapping(192, 128)))
    return pool


def build_minimax(**keywords: Any) -> MiniMaxSparseKVPool:
    given = dict(
        common,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=16,
        idx_head_dim=16,
        dense_layer_ids=[0, 1],
        sparse_layer_ids=[2, 3, 4, 5],
        disable_value_sparse_layer_ids=[2, 3, 4, 5],
        start_layer=0,
        end_layer=6,
    )
    cls = keywords.pop("cls", MiniMaxSparseKVPool)
    return cls(**given | keywords)


def build_minimax_hisparse() -> MiniMaxSparseKVPool:
    pool = build_minimax(enable_hisparse=True, host_to_device_ratio=2)
    pool.register_mapping(keep(pool, mapping(2 * SIZE + PAGE, SIZE + PAGE)))
    return pool


def build_nvfp4() -> MiniMaxM3Nvfp4KVPool:
    return build_minimax(
        cls=MiniMaxM3Nvfp4KVPool,
        size=128,
        page_size=128,
        head_dim=128,
        idx_head_dim=128,
        dense_layer_ids=[],
        sparse_layer_ids=[0, 1],
        disable_value_sparse_layer_ids=[0, 1],
        end_layer=2,
    )


def build_single(cls: type = DeepSeekV4SingleKVPool, **keywords: Any) -> DeepSeekV4SingleKVPool:
    given = dict(
        common, dtype=FP8, qk_nope_head_dim=448, qk_rope_head_dim=64, layer_num=2, page_size=4
    )
    return cls(**given | keywords)


def build_c4() -> HiSparseC4DevicePool:
    pool = build_single(HiSparseC4DevicePool)
    pool.register_mapping(keep(pool, mapping(40, SIZE + PAGE)))
    return pool


def keep(pool: Any, held: torch.Tensor) -> torch.Tensor:
    """A mapping as SGLang's allocators register theirs: they keep it, the pool has a proxy."""
    pool.kept_by_the_allocator = held
    return weakref.proxy(held)


def build_swa(**keywords: Any) -> SWAKVPool:
    given = {
        "size": SIZE,
        "size_swa": 16,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 16,
        "swa_attention_layer_ids": [0, 2],
        "full_attention_layer_ids": [1],
        "device": "cpu",
    }
    pool = SWAKVPool(**given | keywords)
    pool.register_mapping(mapping(SIZE + PAGE, 16 + PAGE))
    return pool


def build_hybrid(**keywords: Any) -> HybridLinearKVPool:
    given = {
        "size": SIZE,
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "head_num": 2,
        "head_dim": 16,
        "full_attention_layer_ids": [3, 7],
        "device": "cpu",
        "mamba_pool": None,
    }
    with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0):
        return HybridLinearKVPool(**given | keywords)


def inner(buffers: Callable) -> Callable:
    return lambda pool: buffers(pool.full_kv_pool)


@cache
def cases() -> dict[str, Case]:
    """Every configuration, by name."""
    full = partial(build_mha, cls=MHATokenToKVPoolMXFP8, dtype=FP8, head_num=1, head_dim=32)
    return {
        "mha": Case(build_mha, mha),
        "mha-large": Case(partial(build_mha, size=700, head_num=1, layer_num=1), mha, locs=704),
        "mha-wide-v": Case(partial(build_mha, v_head_dim=24), mha),
        "mha-fp8": Case(partial(build_mha, dtype=FP8, start_layer=3), mha),
        "mha-hnd": Case(build_hnd, partial(mha, at=head_major)),
        "mha-hnd-wide-v": Case(partial(build_hnd, v_head_dim=24), partial(mha, at=head_major)),
        "mha-scales": Case(build_scaled, mha),
        "k-only": Case(build_k_only, k_only, served="default", own_is_right=False),
        "k-only-fp8": Case(
            partial(build_k_only, dtype=FP8), k_only, served="default", own_is_right=False
        ),
        "mla": Case(build_mla, mla),
        "dsa": Case(build_dsa, dsa, locs=128),
        "dsa-skips": Case(partial(build_dsa, skip_topk_layers=[False, True]), dsa, locs=128),
        "dsa-fp8": Case(partial(build_dsa, dtype=FP8, kv_cache_dim=656), dsa, locs=128),
        "minimax": Case(build_minimax, minimax, served="default", own_is_right=False),
        "minimax-large": Case(
            partial(build_minimax, size=252),
            minimax,
            locs=256,
            served="default",
            own_is_right=False,
        ),
        "minimax-index-v": Case(
            partial(build_minimax, disable_value_sparse_layer_ids=[3, 5], index_dtype=FP8),
            minimax,
            served="default",
            own_is_right=False,
        ),
        "minimax-stage": Case(
            partial(build_minimax, start_layer=1, end_layer=4),
            minimax,
            served="default",
            own_is_right=False,
        ),
        "minimax-hisparse": Case(
            build_minimax_hisparse,
            minimax,
            locs=2 * SIZE + PAGE,
            served="never",
            own_is_right=False,
        ),
        "minimax-nvfp4": Case(build_nvfp4, nvfp4, locs=256, served="parts", own_is_right=False),
        **{
            f"single-{layout}": Case(
                partial(build_single, kv_layout=layout),
                single,
                served="default",
                own_is_right=False,
            )
            for layout in DEEPSEEK_V4
            if layout != "uniform_fp8"
        },
        "single-uniform": Case(
            partial(build_single, DeepSeekV4UniformFP8KVPool),
            single,
            served="default",
            own_is_right=False,
        ),
        "single-global-page": Case(
            partial(build_single, global_page_size=16),
            single,
            locs=44,
            served="default",
            own_is_right=False,
        ),
        "c4": Case(build_c4, single, locs=40, served="default", own_is_right=False),
        "swa": Case(build_swa, swa),
        "hybrid": Case(build_hybrid, inner(mha)),
        "hybrid-mla": Case(
            partial(build_hybrid, use_mla=True, kv_lora_rank=24, qk_rope_head_dim=8), inner(mla)
        ),
        "mxfp8": Case(full, mxfp8, own_is_right=False),
        "fp4": Case(partial(build_mha, cls=MHATokenToKVPoolFP4), mha, own_is_right=False),
        "mla-fp4": Case(
            partial(build_mla, cls=MLATokenToKVPoolFP4, kv_lora_rank=56), mla, own_is_right=False
        ),
        "mxfp8-interleaved": Case(
            partial(full, size=128, page_size=128, head_dim=128),
            mxfp8,
            locs=256,
            served="left",
        ),
        "hisparse-dsa": Case(
            build_hisparse_dsa,
            lambda pool: dsa(pool, pool.full_to_hisparse_device_index_mapping),
            locs=192,
            served="never",
            own_is_right=False,
        ),
    }
