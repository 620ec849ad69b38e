"""Moves on the CPU: numpy views of the pool's own memory, one element a row.

A row seen as one element of ``width`` raw bytes lets numpy gather and scatter whole rows; what a
call allocates is one buffer's moved rows at a time. No Triton, no copy of the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        groups: dict[object, tuple[list[tuple[_View, _View]], set[int]]] = {}
        for row, source in zip(rows, sources or rows, strict=True):
            views, tensors = groups.setdefault(bounds_key(row, source), ([], set()))
            views.append((_row_elements(row), _row_elements(source)))
            tensors.add(row.tensor.data_ptr())
        self._groups = [(key, views, len(t)) for key, (views, t) in groups.items()]

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
        for key, views, buffers in self._groups:
            tgt, src = placed[key]
            if not tgt.size:
                continue
            self._counters[1] += tgt.size * buffers
            to, at = _Places(tgt), _Places(src)
            for rows, sources in views:
                rows[to.within(rows)] = sources[at.within(sources)]


class _Places:
    """Where slots lie in views of one or two dimensions; a page size is divided by once."""

    def __init__(self, slots: Locs) -> None:
        self._slots = slots
        self._pages: dict[int, tuple[Locs, Locs]] = {}

    def within(self, view: _View) -> Locs | tuple[Locs, Locs]:
        if view.ndim == 1:
            return self._slots
        page_size = view.shape[1]
        if page_size not in self._pages:
            page = self._slots // page_size
            self._pages[page_size] = page, self._slots - page * page_size
        return self._pages[page_size]


def _row_elements(rows: Rows) -> _View:
    """The rows as one element each: ``[slots]``, or ``[pages, page_size]`` with gaps."""
    memory = torch.empty(0, dtype=torch.uint8).set_(rows.tensor.untyped_storage()).numpy()
    element = np.dtype((np.void, rows.width))
    if rows.page_gap:
        shape, strides = (rows.pages, rows.page_size), (rows.page_stride, rows.token_stride)
        return np.ndarray(shape, element, memory, rows.start, strides)
    return np.ndarray((rows.slots,), element, memory, rows.start, (rows.token_stride,))
