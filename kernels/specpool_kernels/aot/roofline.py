"""What an accept costs at best, for real models: bytes, time at a GPU's copy rate, programs.

Reckoned from the tables that the models' rows would have; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from specpool_kernels import plan
from specpool_kernels.shapes import MODELS, Flat, Model
from specpool_kernels.table import CHUNKS, CLASS_CHUNK_BYTES, RowTable, build_table

H200_BYTES_A_SECOND = 4.3e12
"""Read and written together, in a large copy."""
LAUNCH_SECONDS = (5e-6, 8e-6)
BATCHES = (1, 64, 256)
ACCEPTED = 4
"""Accepted entries a request, the root included, which never moves."""
_SLOTS = 1 << 16


class Cost(NamedTuple):
    """One accept of a batch.

    Attributes:
        model: its name.
        requests: batch size.
        traffic: bytes read and written.
        seconds: that the traffic takes at the copy rate.
        programs: that the launch has.
        lanes: share of the programs' threads that have bytes to move, padding of windows apart.
    """

    model: str
    requests: int
    traffic: int
    seconds: float
    programs: int
    lanes: float


def costs(rate: float = H200_BYTES_A_SECOND) -> list[Cost]:
    """Every model at every batch size.

    Args:
        rate: bytes a second that the GPU copies, read and written together.
    """
    out = []
    for name, model in MODELS.items():
        table = imagined_table(model)
        for requests in BATCHES:
            variant = plan.accept_variant(ACCEPTED, requests)
            groups = -(-requests // (variant.rows // plan.padded(ACCEPTED)))
            traffic = 2 * requests * (ACCEPTED - 1) * model.bytes_per_slot
            programs = table.blocks * variant.split * groups
            out.append(Cost(name, requests, traffic, traffic / rate, programs, lanes_used(table)))
    return out


def lanes_used(table: RowTable) -> float:
    """Share of the blocks' room for bytes that holds some."""
    access = table.words[:, 0] & 255
    room = CHUNKS * torch.tensor(CLASS_CHUNK_BYTES)[access].sum()
    used = (table.words[:, 16 : 16 + CHUNKS] >> 56 & 255).sum()
    return float(used / room)


@dataclass(frozen=True)
class _Imagined:
    """Rows of memory that nobody allocated: all that a table asks of rows."""

    address: int
    width: int
    token_stride: int
    page_size: int
    page_gap: int
    slots: int = _SLOTS
    mapping: None = None
    loc_limit: int = _SLOTS
    tensor: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def view(self) -> torch.Tensor:
        """There are no bytes."""
        return self.tensor


def imagined_table(model: Model) -> RowTable:
    """The table of a model's rows, at addresses as an allocator gives them."""
    rows, address = [], 1 << 30
    for kind in model.buffers:
        for _ in range(kind.count):
            if isinstance(kind, Flat):
                page_size, page_bytes = 1, kind.widths[0]
            else:
                page_size, page_bytes = kind.page_size, kind.page_bytes
            at = address
            for width in kind.widths:
                gap = page_bytes - page_size * width
                rows.append(_Imagined(at, width, width, page_size, gap))
                at += page_size * width
            address += -(-_SLOTS // page_size) * page_bytes
            address += -address % 512
    return build_table(rows)
