"""The v4 encoding of DeepSeek-V4's latent: 448 fp8 values, 64 bf16 rotary values, 7 scales.

Scales are powers of two and kept as exponents (ue8m0), so reading back is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

NOPE, ROPE, TILE = 448, 64, 64
SCALES = NOPE // TILE
E4M3 = torch.float8_e4m3fn
_E4M3_MAX = 448.0
_EXPONENT_BIAS = 127


class LatentPack(Protocol):
    """What ``set_key_buffer`` writes; see ``NopeFp8RopeBf16Pack``."""

    @property
    def k_nope_fp8(self) -> torch.Tensor:
        """float8_e4m3fn ``[n, 448]``."""

    @property
    def k_rope_bf16(self) -> torch.Tensor:
        """bfloat16 ``[n, 64]``."""

    @property
    def scale_k_nope_ue8m0(self) -> torch.Tensor:
        """uint8 ``[n, 7]``."""


@dataclass
class NopeFp8RopeBf16Pack:
    """A quantised latent of ``n`` tokens.

    Attributes:
        k_nope_fp8: float8_e4m3fn ``[n, 448]``, the values without position.
        k_rope_bf16: bfloat16 ``[n, 64]``, the rotary values.
        scale_k_nope_ue8m0: uint8 ``[n, 7]``; each 64 values are times ``2 ** (scale - 127)``.
    """

    k_nope_fp8: torch.Tensor
    k_rope_bf16: torch.Tensor
    scale_k_nope_ue8m0: torch.Tensor


def quantize(latent: torch.Tensor) -> NopeFp8RopeBf16Pack:
    """A bf16 latent ``[n, 512]`` in the v4 encoding.

    Per 64 values ``scale = 2 ** ceil(log2(max(amax, 1e-4) / 448))``, stored as its exponent + 127,
    as SGLang 0.5.23's ``fused_store_flashmla_cache`` does. A NaN stays NaN and leaves its
    neighbours' scale alone; an infinite value counts as the largest finite one.
    """
    limit = torch.finfo(torch.bfloat16).max
    tiles = latent[:, :NOPE].float().clamp(-limit, limit)
    tiles = tiles.view(latent.shape[0], SCALES, TILE)
    amax = tiles.abs().nan_to_num(nan=0.0).amax(dim=2)
    # A positive float's exponent, plus one unless its mantissa is zero, is the ceiling of its log2:
    # exact, where log2 itself rounds.
    bits = (amax.clamp_min(1e-4) / _E4M3_MAX).view(torch.int32)
    exponent = (bits >> 23) + (bits & 0x7FFFFF != 0)
    nope = torch.ldexp(tiles, (_EXPONENT_BIAS - exponent).unsqueeze(2))
    return NopeFp8RopeBf16Pack(
        nope.flatten(1).to(E4M3),  # at most 448, by the choice of the scale
        latent[:, NOPE:],
        exponent.to(torch.uint8),
    )


def dequantize(pack: LatentPack) -> torch.Tensor:
    """The bf16 latent ``[n, 512]`` of a pack; exact, as every e4m3 value times 2^k is a bf16."""
    tiles = pack.k_nope_fp8.float().view(-1, SCALES, TILE)
    exponent = pack.scale_k_nope_ue8m0.to(torch.int32) - _EXPONENT_BIAS
    nope = torch.ldexp(tiles, exponent.unsqueeze(2)).flatten(1).to(torch.bfloat16)
    return torch.cat([nope, pack.k_rope_bf16], dim=1)
