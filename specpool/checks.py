"""What a move's arguments must be, and which of its pairs move.

The first half needs no values and runs for every call; ``PairCheck`` reads values, so it runs on
the CPU, and on a GPU only when asked (it synchronises). Nothing here moves a byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specpool.rows import Rows

Locs = npt.NDArray[np.int64]
_INTEGERS = (torch.int32, torch.int64)


class Placed(NamedTuple):
    """Live pairs of slots, behind the mappings: ``row[tgt[i]] = source[src[i]]``."""

    tgt: Locs
    src: Locs


def bounds_key(rows: Rows, sources: Rows) -> tuple[int, int, int, int]:
    """Rows with the same key have the same live pairs: slots and mapping of both sides."""
    mapping, source_mapping = (
        0 if r.mapping is None else r.mapping.data_ptr() for r in (rows, sources)
    )
    return rows.slots, mapping, sources.slots, source_mapping


def check_locs(name: str, loc: torch.Tensor, device: torch.device) -> None:
    """Refuse what is no int32 or int64 tensor on ``device``.

    Raises:
        TypeError: not a tensor, or of another dtype.
        ValueError: on another device.
    """
    if not isinstance(loc, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of locs, got {type(loc).__name__}")
    if loc.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {loc.dtype}")
    if loc.device != device:
        raise ValueError(f"{name} is on {loc.device}, the rows are on {device}; move it there")


def check_pairs(tgt_loc: torch.Tensor, src_loc: torch.Tensor, device: torch.device) -> None:
    """Refuse pairs that are not two loc tensors of one element count."""
    check_locs("tgt_loc", tgt_loc, device)
    check_locs("src_loc", src_loc, device)
    if tgt_loc.numel() != src_loc.numel():
        raise ValueError(
            f"tgt_loc has {tgt_loc.numel()} locs and src_loc {src_loc.numel()}; "
            "every target needs one source"
        )


def check_accept(
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_len: torch.Tensor,
    device: torch.device,
) -> torch.Tensor:
    """Refuse an accept of other shapes; return ``out_cache_loc`` as ``[bs, D]``."""
    check_locs("out_cache_loc", out_cache_loc, device)
    check_locs("accept_index", accept_index, device)
    check_locs("accept_len", accept_len, device)
    if accept_index.dim() != 2:
        raise ValueError(f"accept_index must be [bs, S], got {list(accept_index.shape)}")
    bs = accept_index.shape[0]
    if accept_len.shape != (bs,):
        raise ValueError(
            f"accept_len must be [bs] = [{bs}] as accept_index has {bs} rows, "
            f"got {list(accept_len.shape)}"
        )
    if out_cache_loc.dim() == 1 and (out_cache_loc.numel() % bs == 0 if bs else True):
        return out_cache_loc.view(bs, -1) if bs and out_cache_loc.numel() else out_cache_loc[None]
    if out_cache_loc.dim() == 2 and out_cache_loc.shape[0] == bs:
        return out_cache_loc
    raise ValueError(
        f"out_cache_loc must be [bs, D] or [bs * D] with bs = {bs}, got {list(out_cache_loc.shape)}"
    )


class PairCheck:
    """Which pairs of a call move, for rows with their sources; bad input raises, by value.

    Args:
        rows: at least one set of rows.
        sources: as many, to copy from; the rows themselves for a move.
    """

    def __init__(self, rows: Sequence[Rows], sources: Sequence[Rows] | None = None) -> None:
        self._copies = sources is not None
        self._limit = min(r.loc_limit for r in rows)
        self._source_limit = min(s.loc_limit for s in sources or rows)
        self._groups = {
            bounds_key(r, s): (r, s) for r, s in zip(rows, sources or rows, strict=True)
        }

    def pairs(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> dict[object, Placed]:
        """The live pairs of a move, for each ``bounds_key``.

        Raises:
            IndexError: a loc other than -1 lies outside, before or behind a mapping.
            ValueError: one target has different sources.
        """
        return self._place(_array(tgt_loc), _array(src_loc))

    def accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> dict[object, Placed]:
        """The live pairs of an accept (shapes as ``check_accept`` returns), as ``pairs``.

        Raises:
            IndexError: an entry lies outside its request's window.
            ValueError: an ``accept_len`` is outside [0, min(S, D)], or two requests use one slot.
        """
        window = out_cache_loc.cpu().numpy()
        index, length = accept_index.cpu().numpy(), accept_len.cpu().numpy()
        size, entries = window.shape[1], index.shape[1]
        most = min(entries, size)
        bad = np.flatnonzero((length < 0) | (length > most))
        if bad.size:
            raise ValueError(
                f"accept_len[{bad[0]}] is {length[bad[0]]}; it counts a row's accepted entries, "
                f"the root included, so it lies in [0, {most}]"
            )
        place = np.arange(entries)
        used = (place < length[:, None]) & (index != -1)
        request, j = np.nonzero(used)
        flat = index[request, j].astype(np.int64)
        node = flat - request * size
        bad = np.flatnonzero((node < 0) | (node >= size))
        if bad.size:
            r = request[bad[0]]
            raise IndexError(
                f"accept_index[{r}, {j[bad[0]]}] is {flat[bad[0]]}; entries of row {r} lie in "
                f"its window [{r * size}, {(r + 1) * size})"
            )
        tgt, src = window[request, j].astype(np.int64), window[request, node].astype(np.int64)
        if len(length) > 1:
            _check_windows(request, tgt, src)
        return self._place(tgt, src)

    def _place(self, tgt: Locs, src: Locs) -> dict[object, Placed]:
        given = (tgt != -1) & (src != -1)
        if not given.all():
            tgt, src = tgt[given], src[given]
        _check_range("tgt_loc", tgt, self._limit)
        _check_range("src_loc", src, self._source_limit)
        _check_duplicates(tgt, src)
        placed: dict[object, Placed] = {}
        for key, (row, source) in self._groups.items():
            to, at = _behind(row, tgt), _behind(source, src)
            live = np.ones(len(to), dtype=bool) if self._copies else to != at
            if row.mapping is not None:
                live &= to > 0
            if source.mapping is not None:
                live &= at > 0
            if not live.all():
                to, at = to[live], at[live]
            _check_range(f"the mapping of {row.name}", to, row.slots)
            _check_range(f"the mapping of {source.name}", at, source.slots)
            placed[key] = Placed(to, at)
        return placed


def _array(loc: torch.Tensor) -> Locs:
    return loc.detach().cpu().numpy().reshape(-1).astype(np.int64, copy=False)


def _check_range(name: str, loc: Locs, limit: int) -> None:
    if not loc.size or int(loc.view(np.uint64).max()) < limit:
        return
    bad = loc[(loc < 0) | (loc >= limit)][0]
    raise IndexError(
        f"{name} holds slot {bad}; slots lie in [0, {limit}), and -1 skips a pair. Nothing moved"
    )


def _check_duplicates(tgt: Locs, src: Locs) -> None:
    order = np.argsort(tgt, kind="stable")
    same = tgt[order][1:] == tgt[order][:-1]
    if not same.any():
        return
    bad = np.flatnonzero(same & (src[order][1:] != src[order][:-1]))
    if bad.size:
        first, second = order[bad[0]], order[bad[0] + 1]
        raise ValueError(
            f"target {tgt[first]} is given with sources {src[first]} and {src[second]}; a target "
            "takes one source. Nothing moved"
        )


def _check_windows(request: Locs, tgt: Locs, src: Locs) -> None:
    """Refuse a slot that two requests use: on a GPU their windows move in different programs."""
    slot, owner = np.concatenate((tgt, src)), np.concatenate((request, request))
    order = np.argsort(slot, kind="stable")
    slot, owner = slot[order], owner[order]
    bad = np.flatnonzero((slot[1:] == slot[:-1]) & (owner[1:] != owner[:-1]) & (slot[1:] != -1))
    if bad.size:
        at = bad[0]
        first, second = sorted(owner[at : at + 2])
        raise ValueError(
            f"slot {slot[at]} is in the windows of requests {first} and {second}; "
            "windows that are verified together are disjoint. Nothing moved"
        )


def _behind(rows: Rows, loc: Locs) -> Locs:
    """Slots behind the rows' mapping."""
    if rows.mapping is None:
        return loc
    mapping: Locs = rows.mapping.cpu().numpy()
    return mapping[loc]
