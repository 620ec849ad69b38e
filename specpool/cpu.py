"""Moves on the CPU: numpy views of the pool's own memory, one element a row.

A row seen as one element of ``width`` raw bytes lets numpy gather and scatter whole rows; what a
call allocates is one buffer's moved rows at a time. No Triton, no copy of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specpool.checks import Locs, PairCheck, Placed, bounds_key
from specpool.rows import Rows

_View = npt.NDArray[Any]


class CpuMove:
    """Moves within ``rows``, or copies from ``sources`` to ``rows``, by numpy.

    Args:
        rows: at least one set of rows on the CPU, disjoint.
        counters: int64 ``[2]``: bad pairs (never any here: they raise) and rows moved.
        sources: rows of the same widths, sharing no bytes with ``rows``.
    """

    def __init__(
        self, rows: Sequence[Rows], counters: torch.Tensor, sources: Sequence[Rows] | None = None
    ) -> None:
        self._check = PairCheck(rows, sources)
        self._counters = counters.numpy()
        self._groups: dict[object, _Group] = {}
        for row, source in zip(rows, sources or rows, strict=True):
            group = self._groups.setdefault(bounds_key(row, source), _Group({}, set()))
            views = group.views.setdefault((_view_page(row), _view_page(source)), [])
            views.append((_row_elements(row), _row_elements(source)))
            group.tensors.add(row.tensor.data_ptr())

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """``row[tgt] = row[src]`` in every buffer, all sources of a buffer read first.

        Raises:
            IndexError: a loc other than -1 lies outside; nothing moved.
            ValueError: one target has different sources; nothing moved.
        """
        self._run(self._check.pairs(tgt_loc, src_loc))

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Move every request's accepted entries to the front of its window; raises as ``move``."""
        self._run(self._check.accepted(out_cache_loc, accept_index, accept_len))

    def reserve(self, max_pairs: int) -> None:
        """Nothing to prepare."""

    def _run(self, placed: dict[object, Placed]) -> None:
        for key, group in self._groups.items():
            tgt, src = placed[key]
            if not tgt.size:
                continue
            self._counters[1] += tgt.size * len(group.tensors)
            for (page, source_page), views in group.views.items():
                to, at = _place(tgt, page), _place(src, source_page)
                for rows, sources in views:
                    rows[to] = sources[at]


class _Group(NamedTuple):
    """Rows with the same live pairs: views by the page sizes of both sides, and their tensors."""

    views: dict[tuple[int, int], list[tuple[_View, _View]]]
    tensors: set[int]


def _view_page(rows: Rows) -> int:
    """Slots a page of the rows' view; pages without gaps are one flat run."""
    return rows.page_size if rows.page_gap else 1


def _place(slots: Locs, page_size: int) -> Locs | tuple[Locs, Locs]:
    """Index of slots in a view of one dimension, or of pages and places in them."""
    if page_size == 1:
        return slots
    page = slots // page_size
    return page, slots - page * page_size


def _row_elements(rows: Rows) -> _View:
    """The rows as one element each: ``[slots]``, or ``[pages, page_size]`` with gaps."""
    memory = torch.empty(0, dtype=torch.uint8).set_(rows.tensor.untyped_storage()).numpy()
    element = np.dtype((np.void, rows.width))
    if rows.page_gap:
        shape, strides = (rows.pages, rows.page_size), (rows.page_stride, rows.token_stride)
        return np.ndarray(shape, element, memory, rows.start, strides)
    return np.ndarray((rows.slots,), element, memory, rows.start, (rows.token_stride,))
