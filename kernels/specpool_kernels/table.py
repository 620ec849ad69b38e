"""The device table: every row of every buffer, described to a kernel in 256-byte blocks.

A block is up to eight chunks that share one geometry (access class, strides, page, mapping,
bounds), whatever buffers they come from; a chunk is a run of a row's columns. A program moves all
chunks of a block, or a part of them, so one table serves every way to launch. Words of a block
(int64):

    0       access class | counting flags << 8 | rows a live pair counts for << 32
    1       locs at and above this are bad, for every block alike
    2       slots behind the mapping
    3       address of the mapping (int64 entries), 0 = none
    4, 5    token stride; page stride - page size * token stride (bytes)
    6, 7    multiplier and shift of the division by the page size
    8-15    as 0-7 for the source of a copy between two sets of rows (word 8 unused)
    16-23   chunks: address in slot 0's row | bytes << 56; 0 bytes = padding
    24-31   as 16-23 for the source of a copy

Pages without gaps between them are flat rows. A slot's page is ``slot * multiplier >> shift``,
exact for 0 <= slot < 2^31 (Granlund and Montgomery, "Division by Invariant Integers using
Multiplication", PLDI 1994).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

CHUNKS = 8
WORDS = 32
"""Words of a block."""
CLASS_ALIGNMENT = (16, 4, 1)
"""Bytes to which addresses, strides and widths of an access class are aligned."""
CLASS_CHUNK_BYTES = (128, 32, 8)
"""Bytes of a whole chunk of an access class."""
COUNT_BAD_LOCS = 1
COUNT_BAD_MAPPED = 2


class RowSet(Protocol):
    """What a table needs to know of rows; ``specpool.Rows`` is one."""

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that owns the bytes."""

    @property
    def address(self) -> int:
        """Address of the row of slot 0."""

    @property
    def width(self) -> int:
        """Bytes a row."""

    @property
    def slots(self) -> int:
        """Rows there are."""

    @property
    def token_stride(self) -> int:
        """Bytes from one slot to the next in a page."""

    @property
    def page_size(self) -> int:
        """Slots a page."""

    @property
    def page_gap(self) -> int:
        """Bytes between a page's last token stride and the next page; 0 = flat."""

    @property
    def mapping(self) -> torch.Tensor | None:
        """int64 ``[n]``: the slot behind each loc; None = locs are slots."""

    @property
    def loc_limit(self) -> int:
        """Locs at and above this have no row."""

    def view(self) -> torch.Tensor:
        """The rows as uint8 ``[pages, page_size, width]``."""


@dataclass(frozen=True)
class RowTable:
    """Rows as a kernel reads them.

    Attributes:
        words: int64 ``[blocks, 32]`` on the rows' device.
        classes: bit c is set when a block of access class c is present.
        paged: some block has gaps between its pages.
        mapped: some block lies behind a mapping.
        copy: the table describes a copy from other rows.
    """

    words: torch.Tensor
    classes: int
    paged: bool
    mapped: bool
    copy: bool

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return self.words.shape[0]


def page_division(page_size: int) -> tuple[int, int]:
    """Multiplier m < 2^32 and shift s with ``n // page_size == n * m >> s`` for 0 <= n < 2^31."""
    bits = (page_size - 1).bit_length()
    return ((1 << (31 + bits)) + page_size - 1) // page_size, 31 + bits


class _Geometry(NamedTuple):
    """What a block's chunks share on one side."""

    slots: int
    mapping: int
    token_stride: int
    page_gap: int
    page_size: int

    @classmethod
    def of(cls, rows: RowSet) -> _Geometry:
        mapping = 0 if rows.mapping is None else rows.mapping.data_ptr()
        page_size = rows.page_size if rows.page_gap else 1  # no gaps: one flat run
        return cls(rows.slots, mapping, rows.token_stride, rows.page_gap, page_size)

    @property
    def bounds(self) -> tuple[int, int]:
        """What decides which locs have a row."""
        return self.slots, self.mapping

    def words(self, head: int, loc_limit: int) -> list[int]:
        """The eight words of one side of a block."""
        strides = (self.token_stride, self.page_gap)
        return [head, loc_limit, *self.bounds, *strides, *page_division(self.page_size)]


class _Group(NamedTuple):
    """The key of chunks that may share a block: the access class and both sides' geometry."""

    access: int
    rows: _Geometry
    sources: _Geometry

    @classmethod
    def of(cls, rows: RowSet, sources: RowSet) -> _Group:
        mine, theirs = _Geometry.of(rows), _Geometry.of(sources)
        bits = rows.address | sources.address | rows.width
        bits |= mine.token_stride | mine.page_gap | theirs.token_stride | theirs.page_gap
        access = next(c for c, align in enumerate(CLASS_ALIGNMENT) if bits % align == 0)
        return cls(access, mine, theirs)

    @property
    def bounds(self) -> tuple[int, ...]:
        """What decides which pairs are live for the group."""
        return self.rows.bounds + self.sources.bounds


def build_table(rows: Sequence[RowSet], sources: Sequence[RowSet] | None = None) -> RowTable:
    """The table of ``rows``; with ``sources``, of copies from ``sources[i]`` to ``rows[i]``.

    Args:
        rows: at least one set of rows, all on one device.
        sources: as many sets of rows of the same widths on the same device.
    """
    pairs = list(zip(rows, sources or rows, strict=True))
    chunks: dict[_Group, list[tuple[int, int, int]]] = {}
    tensors: dict[tuple[int, ...], set[int]] = {}
    for row, source in pairs:
        group = _Group.of(row, source)
        tensors.setdefault(group.bounds, set()).add(row.tensor.data_ptr())
        step = CLASS_CHUNK_BYTES[group.access]
        chunks.setdefault(group, []).extend(
            (row.address + at, min(step, row.width - at), source.address + at)
            for at in range(0, row.width, step)
        )
    limit = min(r.loc_limit for r, _ in pairs)
    source_limit = min(s.loc_limit for _, s in pairs)
    blocks: list[list[int]] = []
    for group, all_chunks in chunks.items():
        for at in range(0, len(all_chunks), CHUNKS):
            flags = 0 if blocks else COUNT_BAD_LOCS
            weight = 0
            if group.bounds in tensors:  # one block counts for all rows with these bounds
                weight = len(tensors.pop(group.bounds))
                flags |= COUNT_BAD_MAPPED
            part = all_chunks[at : at + CHUNKS]
            part += [(part[0][0], 0, part[0][2])] * (CHUNKS - len(part))
            blocks.append(
                [
                    *group.rows.words(group.access | flags << 8 | weight << 32, limit),
                    *group.sources.words(0, source_limit),
                    *(address | _signed_byte(size) << 56 for address, size, _ in part),
                    *(address for _, _, address in part),
                ]
            )
    groups = list(chunks)
    return RowTable(
        words=torch.tensor(blocks, dtype=torch.int64).view(-1, WORDS).to(rows[0].tensor.device),
        classes=sum({1 << g.access for g in groups}),
        paged=any(g.rows.page_gap or g.sources.page_gap for g in groups),
        mapped=any(g.rows.mapping or g.sources.mapping for g in groups),
        copy=sources is not None,
    )


def _signed_byte(value: int) -> int:
    """The top byte of an int64 word that reads back as ``value`` after ``>> 56 & 255``."""
    return value - 256 if value > 127 else value
