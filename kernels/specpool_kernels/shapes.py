"""Real models' caches and trees, by name: what a token stores in each buffer, in bytes.

The benchmarks build tensors from these entries; the compile report reckons traffic with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class Flat:
    """Equal buffers ``[slots, *row]``.

    Attributes:
        name: what the buffers hold.
        count: buffers there are, one a layer.
        row: shape of a slot's row.
        dtype: of the elements.
    """

    name: str
    count: int
    row: tuple[int, ...]
    dtype: torch.dtype

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of a slot's row: one part."""
        return (prod(self.row) * self.dtype.itemsize,)


@dataclass(frozen=True)
class Pages:
    """Equal uint8 buffers ``[pages, page_bytes]``: a page holds its slots' parts one after another.

    Attributes:
        name: what the buffers hold.
        count: buffers there are, one a layer.
        widths: bytes a slot has in each part.
        page_size: slots a page.
        page_bytes: bytes a page, padding included.
    """

    name: str
    count: int
    widths: tuple[int, ...]
    page_size: int
    page_bytes: int


class Model(NamedTuple):
    """What one rank stores of a token.

    Attributes:
        buffers: all kinds of buffers.
        source: where the numbers are from.
    """

    buffers: tuple[Flat | Pages, ...]
    source: str

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of a token's rows in all buffers."""
        return sum(kind.count * sum(kind.widths) for kind in self.buffers)


class Tree(NamedTuple):
    """A draft tree as engines are told of it.

    Attributes:
        steps: draft steps, the depth.
        topk: branches a step.
        drafts: tokens verified at once, the root included: the window.
    """

    steps: int
    topk: int
    drafts: int


_BF16, _BYTE = torch.bfloat16, torch.uint8
_MINIMAX = "MiniMax-M3: 60 layers, 3 to 59 sparse; 4 KV heads of 128, index keys of 128"
_LATENT_PAGE = 64 * 584  # padded to a multiple of 576 below

MODELS = {
    "minimax-m3": Model(
        (
            Flat("main K", 60, (4, 128), _BF16),
            Flat("main V", 60, (4, 128), _BF16),
            Flat("index K", 57, (1, 128), _BF16),
        ),
        _MINIMAX,
    ),
    "minimax-m3-tp8": Model(
        (
            Flat("main K", 60, (1, 128), _BF16),
            Flat("main V", 60, (1, 128), _BF16),
            Flat("index K", 57, (1, 128), _BF16),
        ),
        f"{_MINIMAX}; over 8 ranks one KV head each, index keys on every rank",
    ),
    "llama-3.1-8b": Model(
        (Flat("K", 32, (8, 128), _BF16), Flat("V", 32, (8, 128), _BF16)),
        "Llama-3.1-8B: 32 layers, 8 KV heads of 128",
    ),
    "deepseek-v3": Model(
        (Flat("latent", 61, (1, 576), _BF16),),
        "DeepSeek-V3: 61 layers, 512 latent and 64 rotary values",
    ),
    "deepseek-v3.2": Model(
        (
            Flat("latent", 61, (1, 656), _BYTE),
            Pages("index K", 61, (128, 4), page_size=64, page_bytes=64 * 132),
        ),
        "DeepSeek-V3.2: 61 layers; 512 fp8 values, 16 bytes of scales, 64 rotary bf16 values; "
        "index pages of 64 fp8 keys, then 64 fp32 scales",
    ),
    "deepseek-v4": Model(
        (Pages("single KV", 43, (576, 8), page_size=64, page_bytes=-(-_LATENT_PAGE // 576) * 576),),
        "DeepSeek-V4-Flash: 43 layers of sliding windows in SGLang 0.5.23's layout v4; compressed "
        "states are not counted",
    ),
}
TREES = (Tree(5, 4, 8), Tree(3, 1, 4), Tree(5, 8, 32), Tree(5, 8, 64), Tree(7, 10, 60))
