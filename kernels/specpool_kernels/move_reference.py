"""The same moves in plain PyTorch, on any device: per set of rows, gather, then scatter.

It serves devices that Triton does not, and is what the kernels are read against. No host
synchronisation: a pair that must not move becomes a copy of one that does, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specpool_kernels.table import RowSet


class TorchMove:
    """Moves within ``rows``, or copies from ``sources`` to ``rows``, by PyTorch indexing.

    Args:
        rows: at least one set of rows, all on one device, disjoint.
        counters: int64 ``[2]`` on that device: bad pairs and rows moved are added to it.
        sources: rows of the same widths on the same device, sharing no bytes with ``rows``.
    """

    def __init__(
        self,
        rows: Sequence[RowSet],
        counters: torch.Tensor,
        sources: Sequence[RowSet] | None = None,
    ) -> None:
        self._copies = sources is not None
        self._counters = counters
        self._limits = (
            min(r.loc_limit for r in rows),
            min(s.loc_limit for s in sources or rows),
        )
        # rows with the same bounds and mappings have the same live pairs
        self._groups: dict[tuple[int, ...], list[tuple[RowSet, RowSet]]] = {}
        for row, source in zip(rows, sources or rows, strict=True):
            key = (*_bounds(row), *_bounds(source))
            self._groups.setdefault(key, []).append((row, source))

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """``row[tgt] = row[src]`` in every buffer, all sources of a buffer read first.

        Args:
            tgt_loc: n int32 or int64 locs on the rows' device; -1 skips a pair.
            src_loc: as many locs.
        """
        tgt, src = tgt_loc.reshape(-1).long(), src_loc.reshape(-1).long()
        limit, source_limit = self._limits
        live = (src >= 0) & (src < source_limit) & (tgt >= 0) & (tgt < limit)
        self._counters[0] += (~live & (src != -1) & (tgt != -1)).sum()
        for group in self._groups.values():
            self._move_group(group, tgt, src, live)

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Move every request's accepted entries to the front of its window.

        Args:
            out_cache_loc: ``[bs, D]`` int32 or int64 locs that the verify step wrote.
            accept_index: ``[bs, S]`` int32 or int64, flat into ``[bs * D]``; -1 skips.
            accept_len: ``[bs]`` int32 or int64, entries of each row that count.
        """
        (bs, window), entries = out_cache_loc.shape, accept_index.shape[1]
        j = torch.arange(entries, device=out_cache_loc.device)
        length = accept_len.long()[:, None]
        node = accept_index.long() - torch.arange(bs, device=j.device)[:, None] * window
        too_long = (length < 0) | (length > entries)
        used = (j < length) & (accept_index != -1) & ~too_long
        fits = used & (node >= 0) & (node < window) & (j < window)
        bad = (used & ~fits) | (too_long & (j == 0))
        src = out_cache_loc.gather(1, node.clamp(0, window - 1)).long()
        tgt = out_cache_loc[:, j.clamp(max=window - 1)].long()
        nothing = torch.where(bad, -2, -1)  # -2 lies outside and is counted there
        self.move(torch.where(fits, tgt, -2), torch.where(fits, src, nothing))

    def reserve(self, max_pairs: int) -> None:
        """Nothing to prepare."""

    def _move_group(
        self,
        group: list[tuple[RowSet, RowSet]],
        tgt: torch.Tensor,
        src: torch.Tensor,
        live: torch.Tensor,
    ) -> None:
        row, source = group[0]
        tgt, live = self._mapped(row, tgt, live)
        src, live = self._mapped(source, src, live)
        inside = (src < source.slots) & (tgt < row.slots)
        self._counters[0] += (live & ~inside).sum()
        live = live & inside
        if not self._copies:
            live = live & (src != tgt)
        tensors = {r.tensor.data_ptr() for r, _ in group}
        self._counters[1] += live.sum() * len(tensors)
        # what must not move repeats the first pair that does; indexing by ``first`` would read it
        first, some = live.to(torch.int8).argmax(), live.any()
        src = torch.where(live, src, torch.where(some, src.take(first), 0))
        tgt = torch.where(live, tgt, torch.where(some, tgt.take(first), 0))
        for row, source in group:
            rows, sources = row.view(), source.view()
            to = _place(rows, tgt)
            rows[to] = torch.where(some, sources[_place(sources, src)], rows[to])

    @staticmethod
    def _mapped(
        row: RowSet, loc: torch.Tensor, live: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if row.mapping is None:
            return loc, live
        slot = row.mapping[torch.where(live, loc, 0)]
        return slot, live & (slot > 0)


def _bounds(row: RowSet) -> tuple[int, int]:
    return row.slots, 0 if row.mapping is None else row.mapping.data_ptr()


def _place(view: torch.Tensor, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and place in the page of each slot of a ``[pages, page_size, width]`` view."""
    page_size = view.shape[1]
    return torch.div(slot, page_size, rounding_mode="floor"), slot % page_size
