"""Tensors and rows of real models' buffers, built by name from ``specpool_kernels.shapes``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specpool import Rows, rows_from
from specpool_kernels.shapes import MODELS, Flat, Model, Pages


class Buffer(NamedTuple):
    """A tensor and what it is."""

    kind: Flat | Pages
    tensor: torch.Tensor

    def rows(self, name: str) -> list[Rows]:
        """Its rows: one set, or one a part of its pages."""
        if isinstance(self.kind, Flat):
            return rows_from(self.tensor, name=name)
        return rows_from(
            self.tensor,
            "page_split",
            page_size=self.kind.page_size,
            widths=self.kind.widths,
            name=name,
        )


class Shape(NamedTuple):
    """A model's buffers, to be built."""

    model: Model

    def build(self, slots: int, device: str, seed: int = 0) -> list[Buffer]:
        """Buffers of random bytes: zeros would be kinder to caches than real data.

        Args:
            slots: slots of each buffer; a multiple of the model's page size.
            device: of the tensors.
            seed: of the bytes.
        """
        generator = torch.Generator(device).manual_seed(seed)
        out = []
        for kind in self.model.buffers:
            for _ in range(kind.count):
                if isinstance(kind, Flat):
                    tensor = torch.empty(slots, *kind.row, dtype=kind.dtype, device=device)
                else:
                    if slots % kind.page_size:
                        raise ValueError(f"{slots} slots do not fill pages of {kind.page_size}")
                    pages = slots // kind.page_size
                    tensor = torch.empty(pages, kind.page_bytes, dtype=torch.uint8, device=device)
                tensor.view(torch.uint8).random_(256, generator=generator)
                out.append(Buffer(kind, tensor))
        return out


def rows_of(buffers: list[Buffer]) -> list[Rows]:
    """All rows of all buffers."""
    return [
        row for i, buffer in enumerate(buffers) for row in buffer.rows(f"{buffer.kind.name} {i}")
    ]


SHAPES = {name: Shape(model) for name, model in MODELS.items()}
