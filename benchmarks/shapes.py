"""Real models' buffers, by name: how many, of what row width, at tensor parallel size 1."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specpool import Rows, rows_from


class Shape(NamedTuple):
    """A model's per-token buffers.

    ``buffers`` holds (name, count, shape of a slot's row, dtype).
    """

    buffers: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]

    def build(self, slots: int, device: str, seed: int = 0) -> list[torch.Tensor]:
        """Random buffers ``[slots, ...]``: zeros would be kinder to caches than real data."""
        generator = torch.Generator(device).manual_seed(seed)
        out = []
        for _, count, row, dtype in self.buffers:
            for _ in range(count):
                tensor = torch.empty(slots, *row, dtype=dtype, device=device)
                tensor.view(torch.uint8).random_(256, generator=generator)
                out.append(tensor)
        return out


def rows_of(tensors: list[torch.Tensor]) -> list[Rows]:
    """Flat rows of every tensor."""
    return [r for i, t in enumerate(tensors) for r in rows_from(t, name=f"buffer {i}")]


_BF16 = torch.bfloat16
SHAPES = {
    "minimax-m3": Shape(
        (
            ("main K", 60, (4, 128), _BF16),
            ("main V", 60, (4, 128), _BF16),
            ("index K", 57, (1, 128), _BF16),
        )
    ),
    "minimax-m3-tp8": Shape(  # 4 KV heads over 8 ranks: one each; index keys are replicated
        (
            ("main K", 60, (1, 128), _BF16),
            ("main V", 60, (1, 128), _BF16),
            ("index K", 57, (1, 128), _BF16),
        )
    ),
    "llama-3.1-8b": Shape((("K", 32, (8, 128), _BF16), ("V", 32, (8, 128), _BF16))),
    "deepseek-v3": Shape((("latent", 61, (1, 576), _BF16),)),
}
