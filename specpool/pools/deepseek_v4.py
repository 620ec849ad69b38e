"""DeepSeek-V4's single KV: one latent of 512 values a token, in 584 bytes of a packed page.

Layout v4, as FlashMLA reads it (SGLang 0.5.23, ``dsv4/kv_layout.py``): a page holds ``page_size``
payloads of 576 bytes (448 fp8 values without position, 64 bf16 rotary values), then ``page_size``
times 8 scale bytes (7 exponents, each of 64 values, and 1 of padding), up to a multiple of 576.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from specpool.pools.latent import (
    E4M3,
    NOPE,
    ROPE,
    SCALES,
    TILE,
    LatentPack,
    NopeFp8RopeBf16Pack,
    dequantize,
    quantize,
)
from specpool.pools.layer_buffers import LayerBufferPool
from specpool.pools.store import HasLoc, Staged, check_device, check_values, checked_int, write
from specpool.rows import Rows

PAYLOAD_BYTES = NOPE + ROPE * 2
SCALE_BYTES = SCALES + 1
WIDTHS = (PAYLOAD_BYTES, SCALE_BYTES)


class DeepSeekV4SingleKVPool(LayerBufferPool):
    """One uint8 buffer ``[pages, bytes_per_page_padded]`` a layer, in layout v4.

    ``pages`` is ``ceil((size + global_page_size) / page_size)``. See ``KVCache`` for the arguments
    not named here.

    Args:
        dtype: float8_e4m3fn, or uint8 for the bytes themselves: what ``get_key_buffer`` views.
        qk_nope_head_dim: 448.
        qk_rope_head_dim: 64.
        kv_layout: ``"v4"``, or an enum member of that value.
        global_page_size: slots a page of the allocator above; ``page_size`` when not given.
        enable_kv_cache_copy: accepted and not needed: every pool moves.

    Raises:
        ValueError: other widths or another layout; see also ``KVCache``.
    """

    has_value = False
    scale_pad = SCALE_BYTES - SCALES
    quantize_block_size = TILE
    rope_storage_dtype = torch.bfloat16
    kv_cache_total_dim = PAYLOAD_BYTES + SCALE_BYTES

    _dtypes = (E4M3, torch.uint8)

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        kv_layout: str = "v4",
        global_page_size: int | None = None,
        enable_kv_cache_copy: bool = True,
    ) -> None:
        super().__init__(
            size,
            page_size,
            dtype,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
        )
        if (qk_nope_head_dim, qk_rope_head_dim) != (NOPE, ROPE):
            raise ValueError(
                f"layout v4 holds qk_nope_head_dim={NOPE} and qk_rope_head_dim={ROPE}, got "
                f"{qk_nope_head_dim} and {qk_rope_head_dim}"
            )
        if str(getattr(kv_layout, "value", kv_layout)).lower() != "v4":
            raise ValueError(f"kv_layout {kv_layout!r} is not supported; the layout here is 'v4'")
        self.qk_nope_head_dim = qk_nope_head_dim
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_layout = kv_layout
        self.global_page_size = checked_int(
            "global_page_size", self.page_size if global_page_size is None else global_page_size, 1
        )
        page_bytes = self.page_size * self.kv_cache_total_dim
        self.bytes_per_page_padded = math.ceil(page_bytes / PAYLOAD_BYTES) * PAYLOAD_BYTES
        with self._allocation():
            self.kv_buffer = [
                torch.zeros(self._shape(), dtype=torch.uint8, device=self._device)
                for _ in range(self.layer_num)
            ]

    def _shape(self) -> tuple[int, int]:
        pages = math.ceil((self.size + self.global_page_size) / self.page_size)
        return pages, self.bytes_per_page_padded

    # What is stored

    @property
    def slots(self) -> int:
        """Slots of all pages."""
        return self._shape()[0] * self.page_size

    def get_bytes_per_token(self) -> int:
        """584: payload, scales and their padding."""
        return self.kv_cache_total_dim

    def rows(self) -> list[Rows]:
        """A payload row and a scale row a slot, of every layer; see ``KVCache.rows``."""
        return self._rows_of(
            "kv_buffer",
            self.kv_buffer,
            self._shape(),
            "page_split",
            page_size=self.page_size,
            widths=WIDTHS,
        )

    def _tensors(self) -> list[torch.Tensor]:
        return list(self.kv_buffer)

    def _slot_views(self, index: int) -> list[torch.Tensor]:
        """uint8 ``[pages, page_size, 576]`` and ``[pages, page_size, 8]``."""
        parts = self.kv_buffer[index].split_with_sizes(
            [
                self.page_size * PAYLOAD_BYTES,
                self.page_size * SCALE_BYTES,
                self.bytes_per_page_padded - self.page_size * self.kv_cache_total_dim,
            ],
            dim=1,
        )
        return [
            part.view(-1, self.page_size, width)
            for part, width in zip(parts[:2], WIDTHS, strict=True)
        ]

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return slots // self.page_size, slots % self.page_size

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts, dim=1)

    def _split(self, where: str, chunk: Any) -> list[Any]:
        wanted = f"{where} needs torch.uint8 [n, {self.kv_cache_total_dim}]"
        if not isinstance(chunk, torch.Tensor):
            raise TypeError(f"{wanted}, got {type(chunk).__name__}")
        if chunk.shape[1:] != (self.kv_cache_total_dim,):
            raise ValueError(f"{wanted}, got {chunk.dtype} {list(chunk.shape)}")
        return list(torch.split(chunk, list(WIDTHS), dim=1))

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of all pages, and 0: keys and values are one."""
        return sum(buffer.nbytes for buffer in self.kv_buffer), 0

    # How it is read

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The pages of a layer viewed as ``dtype``, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        index = self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.kv_buffer[index].view(self.dtype)

    def get_dequantized(self, layer_id: int, loc: torch.Tensor | HasLoc) -> torch.Tensor:
        """The latents at ``loc``, bf16 ``[n, 512]``.

        Raises:
            TypeError, ValueError, IndexError: as ``set_key_buffer``.
        """
        index = self._index(layer_id)
        at = self._at(self._checked_slots(loc))
        self._wait_for_layer(layer_id)
        payload, scale = (view[at] for view in self._slot_views(index))
        return dequantize(
            NopeFp8RopeBf16Pack(
                payload[:, :NOPE].view(E4M3),
                payload[:, NOPE:].contiguous().view(torch.bfloat16),
                scale[:, :SCALES],
            )
        )

    def get_value_buffer(self, layer_id: int) -> NoReturn:
        """Refused: keys and values are one latent.

        Raises:
            UnsupportedAccess: always; ``get_key_buffer`` is what there is.
        """
        raise self._refuse("get_value_buffer", "get_key_buffer (the latent is key and value)")

    def get_kv_buffer(self, layer_id: int) -> NoReturn:
        """Refused: keys and values are one latent.

        Raises:
            UnsupportedAccess: always; ``get_key_buffer`` is what there is.
        """
        raise self._refuse("get_kv_buffer", "get_key_buffer (the latent is key and value)")

    # How it is written

    def set_key_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor | HasLoc,
        cache_nope_fp8_rope_bf16_pack: LatentPack,
    ) -> None:
        """Write quantised latents of ``n`` tokens; the pad byte behind the scales stays.

        Args:
            layer_id: absolute id of the layer.
            loc: int32 or int64 slots ``[n]``, or an object whose ``loc`` they are.
            cache_nope_fp8_rope_bf16_pack: see ``NopeFp8RopeBf16Pack``; SGLang's own will do.

        Raises:
            TypeError: locs of a wrong dtype; a pack, or a part of one, that is none.
            ValueError: a layer the pool lacks; wrong dtypes, shapes or devices in the pack.
            IndexError: a slot outside the pool (on a CPU, or with ``SPECPOOL_CHECK=1``). Nothing
                has been written in any of these cases.
        """
        index = self._index(layer_id)
        slots = self._checked_slots(loc)
        pack = cache_nope_fp8_rope_bf16_pack
        nope = self._part("k_nope_fp8", pack, E4M3, slots, NOPE)
        rope = self._part("k_rope_bf16", pack, torch.bfloat16, slots, ROPE)
        scale = self._part("scale_k_nope_ue8m0", pack, torch.uint8, slots, SCALES)
        self._write_pack(index, slots, NopeFp8RopeBf16Pack(nope, rope, scale))

    def set_key_buffer_fused(
        self,
        layer_id: int,
        loc: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        freqs_cis: None = None,
    ) -> None:
        """Quantise bf16 latents ``[n, 512]``, already rotated, and write them; see ``quantize``.

        Raises:
            TypeError, ValueError, IndexError: as ``set_key_buffer``.
            UnsupportedAccess: ``freqs_cis``, which only later layouts take.
        """
        if freqs_cis is not None:
            raise self._refuse("freqs_cis", "cache_k that is already rotated (layout v4)")
        index = self._index(layer_id)
        slots = self._checked_slots(loc)
        values = check_values("cache_k", cache_k, slots.numel(), (NOPE + ROPE,), self._device)
        if values.dtype != torch.bfloat16:
            raise TypeError(f"cache_k must be bfloat16, got {values.dtype}")
        self._write_pack(index, slots, quantize(values))

    def set_kv_buffer(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: keys and values are one latent.

        Raises:
            UnsupportedAccess: always; ``set_key_buffer`` is what there is.
        """
        raise self._refuse("set_kv_buffer", "set_key_buffer or set_key_buffer_fused")

    def _part(
        self, name: str, pack: LatentPack, dtype: torch.dtype, slots: torch.Tensor, width: int
    ) -> torch.Tensor:
        try:
            values = getattr(pack, name)
        except AttributeError:
            raise TypeError(
                "cache_nope_fp8_rope_bf16_pack must have k_nope_fp8, k_rope_bf16 and "
                f"scale_k_nope_ue8m0, as NopeFp8RopeBf16Pack has; got {type(pack).__name__}"
            ) from None
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
        if values.dtype != dtype or tuple(values.shape) != (slots.numel(), width):
            raise ValueError(
                f"{name} must be {dtype} {[slots.numel(), width]}, got {values.dtype} "
                f"{list(values.shape)}"
            )
        check_device(name, values, self._device)
        return values

    def _write_pack(self, index: int, slots: torch.Tensor, pack: NopeFp8RopeBf16Pack) -> None:
        payload, scale = self._slot_views(index)
        latent = torch.cat(
            [
                pack.k_nope_fp8.view(torch.uint8),
                pack.k_rope_bf16.contiguous().view(torch.uint8),
            ],
            dim=1,
        )
        views = [payload, scale[..., :SCALES]]
        write(Staged(views, self._at(slots), [latent, pack.scale_k_nope_ue8m0]))
