"""The oracle: what a move must leave behind, worked out without the product's arithmetic.

Every buffer lies in a larger allocation of random bytes. The oracle clones that whole allocation,
finds each row's bytes by its own formula for the declared layout, gathers all sources and then
scatters them; a test compares every byte of the allocation, so a byte written beside a row fails
as surely as a byte that did not move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specpool.rows import Rows, rows_from

GUARD = 208
"""Random bytes before and after a buffer; a multiple of 16."""
Pairs = list[tuple[int, int]]
"""(target, source) of every pair of a call that is not skipped by -1."""


@dataclass(repr=False)
class Buffer:
    """A tensor inside guard bytes, with the oracle's own idea of where its rows lie.

    Attributes:
        memory: the whole allocation, uint8.
        tensor: what the product is given.
        starts: for each run of a slot, the function from slots to bytes into ``memory``.
        widths: bytes of each run.
        slots: rows there are.
        mapping: the mapping that the rows live behind.
    """

    memory: torch.Tensor
    tensor: torch.Tensor
    starts: list[Callable[[np.ndarray], np.ndarray]]
    widths: list[int]
    slots: int
    layout: str = "nhd"
    page_size: int | None = None
    mapping: torch.Tensor | None = None
    name: str = "buffer"

    def rows(self) -> list[Rows]:
        widths = self.widths if self.layout == "page_split" else None
        return rows_from(
            self.tensor,
            self.layout,
            page_size=self.page_size,
            widths=widths,
            mapping=self.mapping,
            name=self.name,
        )

    def bytes(self) -> np.ndarray:
        return self.memory.cpu().numpy().copy()

    def row(self, slot: int, run: int = 0) -> list[int]:
        start = int(self.starts[run](np.array(slot)))
        return self.memory[start : start + self.widths[run]].tolist()

    def placed(self, loc: int) -> int:
        """The slot behind a loc, 0 or less where there is none."""
        return loc if self.mapping is None else int(self.mapping[loc])


def _guarded(size: int, device: str, lead: int) -> torch.Tensor:
    memory = torch.randint(0, 256, (lead + size + GUARD,), dtype=torch.uint8)
    return memory.to(device)


def _view(memory: torch.Tensor, lead: int, dtype: torch.dtype, shape, stride) -> torch.Tensor:
    item = dtype.itemsize
    assert lead % item == 0, "a torch tensor starts at a multiple of its element"
    tensor = torch.empty(0, dtype=dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), lead // item, shape, stride)


def nhd(
    slots: int,
    shape: Sequence[int] = (16,),
    dtype: torch.dtype = torch.uint8,
    *,
    gap: int = 0,
    lead: int = GUARD,
    device: str = "cpu",
    mapping: torch.Tensor | None = None,
    name: str = "buffer",
) -> Buffer:
    """``[slots, *shape]`` with ``gap`` elements between rows, ``lead`` bytes into its memory."""
    per_row = int(np.prod(shape))
    stride = per_row + gap
    item = dtype.itemsize
    memory = _guarded(slots * stride * item, device, lead)
    inner = [int(np.prod(shape[i + 1 :])) for i in range(len(shape))]
    tensor = _view(memory, lead, dtype, (slots, *shape), (stride, *inner))
    return Buffer(
        memory,
        tensor,
        [lambda slot: lead + slot * (stride * item)],
        [per_row * item],
        slots,
        mapping=mapping,
        name=name,
    )


def hnd(
    pages: int,
    heads: int,
    page_size: int,
    dim: int,
    dtype: torch.dtype = torch.uint8,
    *,
    gap: int = 0,
    device: str = "cpu",
    mapping: torch.Tensor | None = None,
    name: str = "paged",
) -> Buffer:
    """``[pages, heads, page_size, dim]`` with ``gap`` elements after every head's run."""
    item = dtype.itemsize
    head = page_size * dim + gap
    page = heads * head
    memory = _guarded(pages * page * item, device, GUARD)
    tensor = _view(memory, GUARD, dtype, (pages, heads, page_size, dim), (page, head, dim, 1))

    def start_of(h: int) -> Callable[[np.ndarray], np.ndarray]:
        return lambda slot: (
            GUARD + ((slot // page_size) * page + h * head + (slot % page_size) * dim) * item
        )

    return Buffer(
        memory,
        tensor,
        [start_of(h) for h in range(heads)],
        [dim * item] * heads,
        pages * page_size,
        layout="hnd",
        page_size=page_size,
        mapping=mapping,
        name=name,
    )


def page_split(
    pages: int,
    page_size: int,
    widths: Sequence[int],
    *,
    padding: int = 0,
    gap: int = 0,
    device: str = "cpu",
    mapping: torch.Tensor | None = None,
    name: str = "split",
) -> Buffer:
    """``[pages, page_bytes]`` uint8: parts, then ``padding``; ``gap`` bytes between pages."""
    page_bytes = page_size * sum(widths) + padding
    stride = page_bytes + gap
    memory = _guarded(pages * stride, device, GUARD)
    tensor = _view(memory, GUARD, torch.uint8, (pages, page_bytes), (stride, 1))

    def start_of(part: int) -> Callable[[np.ndarray], np.ndarray]:
        before = page_size * sum(widths[:part])
        return lambda slot: (
            GUARD + (slot // page_size) * stride + before + (slot % page_size) * widths[part]
        )

    return Buffer(
        memory,
        tensor,
        [start_of(part) for part in range(len(widths))],
        list(widths),
        pages * page_size,
        layout="page_split",
        page_size=page_size,
        mapping=mapping,
        name=name,
    )


def given(tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> Pairs:
    """The pairs of a move that -1 does not skip, read element by element."""
    tgt, src = tgt_loc.flatten().tolist(), src_loc.flatten().tolist()
    return [(t, s) for t, s in zip(tgt, src, strict=True) if t != -1 and s != -1]


def accepted(out_cache_loc, accept_index, accept_len) -> Pairs:
    """The pairs that an accept means, entry by entry; nothing behind ``accept_len`` is read."""
    lengths, index = torch.as_tensor(accept_len).tolist(), torch.as_tensor(accept_index).tolist()
    bs = len(lengths)
    flat = out_cache_loc.flatten().tolist()
    size = len(flat) // bs
    pairs = []
    for r in range(bs):
        for j in range(lengths[r]):
            entry = index[r][j]
            if entry == -1:
                continue
            assert r * size <= entry < (r + 1) * size
            pairs.append((flat[r * size + j], flat[entry]))
    return [(t, s) for t, s in pairs if t != -1 and s != -1]


def behind(pairs: Pairs, buffer: Buffer, source: Buffer | None = None) -> Pairs:
    """The pairs as slots of one buffer (and of the one it copies from)."""
    source = source or buffer
    slots = [(buffer.placed(t), source.placed(s)) for t, s in pairs]
    return [
        (t, s)
        for t, s in slots
        if (t > 0 or buffer.mapping is None) and (s > 0 or source.mapping is None)
    ]


def moved(buffer: Buffer, pairs: Pairs, source: Buffer | None = None) -> np.ndarray:
    """Every byte of the buffer's allocation after the pairs moved: gather all, then scatter."""
    source = source or buffer
    before, after = source.bytes(), buffer.bytes()
    slots = behind(pairs, buffer, source)
    if not slots:
        return after
    tgt, src = (np.array(side, dtype=np.int64) for side in zip(*slots, strict=True))
    runs = zip(buffer.starts, source.starts, buffer.widths, strict=True)
    for to_start, from_start, width in runs:
        column = np.arange(width)
        after[to_start(tgt)[:, None] + column] = before[from_start(src)[:, None] + column]
    return after


def rows_that_move(buffers: Sequence[Buffer], pairs: Pairs) -> int:
    """Live pairs, each times the buffers it moves in."""
    return sum(t != s for b in buffers for t, s in behind(pairs, b))
