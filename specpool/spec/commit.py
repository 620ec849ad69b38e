"""Commit of a verify step: accepted entries stay, rejected slots come free, requests grow.

There are two ways to the same logical KV. ``remap`` writes the accepted nodes' slots into the
request's row of the table, and no byte moves; it needs pages of one slot. ``move`` relocates the
accepted entries to the front of the window, in every pool, and writes that front into the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specpool.allocator import PagedSlotAllocator
from specpool.checks import PairCheck, check_accept
from specpool.mover import RowMover
from specpool.paging import Ints, host_ints
from specpool.request_table import RequestTable
from specpool.spec.movers import HasMover, check_pools, mover_of

Mode = Literal["auto", "remap", "move"]


class HostAccept(NamedTuple):
    """The values of ``commit``'s three tensors, on the host, in the same shapes."""

    out_cache_loc: torch.Tensor
    accept_index: torch.Tensor
    accept_len: torch.Tensor


@dataclass(frozen=True, eq=False)
class CommitResult:
    """What a commit did.

    Attributes:
        mode: ``"remap"`` or ``"move"``.
        accept_len: entries that each row of the batch was given, 0 for padding.
        kept: int64 on the host, the slots written into the table, row by row.
        freed: int64 on the host, the rejected slots.
    """

    mode: Literal["remap", "move"]
    accept_len: list[int]
    kept: torch.Tensor
    freed: torch.Tensor


class _Step(NamedTuple):
    """A validated step, on the host; padding rows are left out."""

    rows: Ints
    counts: Ints
    window: Ints
    """Every slot of the windows."""
    path: Ints
    """The slots where the accepted entries lie, row by row."""
    front: Ints
    """The window's slots that they move to; -1 where a window has no slot."""


def commit(
    pools: Sequence[HasMover | RowMover],
    allocator: PagedSlotAllocator,
    table: RequestTable,
    requests: Sequence[int] | torch.Tensor,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_len: torch.Tensor,
    mode: Mode = "auto",
    *,
    host: HostAccept | None = None,
) -> CommitResult:
    """Keep the accepted entries of a verify step and give the rejected slots back.

    Request r's row grows by ``accept_len[r]`` entries, and position by position its KV is that of
    the accepted path, whichever the mode. All is validated before a byte moves or a slot is freed.

    Args:
        pools: everything that is keyed by these slots: the target's pool, the draft model's own,
            movers over tensors of yours. Each moves in one launch, and in none where every
            accepted path is the window's front already. Leave one out and its KV is lost.
        allocator: where the window came from. Rejected slots go back to it.
        table: the requests' rows, to be read slot by slot where ``remap`` is used.
        requests: ``[bs]`` row of each request, on the host (or it is one more synchronisation);
            not read where accept_len is 0.
        out_cache_loc: int32 or int64 ``[bs, D]`` or ``[bs * D]``, the slots that the verify step
            wrote; -1 behind the nodes of a tree smaller than D. Not read where accept_len is 0.
        accept_index: int32 or int64 ``[bs, S]``, flat into ``[bs * D]``.
        accept_len: ``[bs]`` entries of a row that count, **the root included**; 0 is padding.
        mode: ``"auto"`` is ``"remap"`` for pages of one slot, else ``"move"``. Ask for ``"move"``
            where a reader needs the window's front, or reads KV other than through the table.
        host: the three tensors' values, where the caller has read them; they are read here when
            not given, in one synchronisation, the only one of a step (freeing needs it, so a
            commit cannot be captured into a graph).

    Raises:
        TypeError: tensors that are no int32 or int64.
        ValueError: shapes or a batch that do not fit; an accept_len outside [0, min(S, D)]; a
            request's row that is not in use, named twice, or would overgrow; window slots that are
            not live, repeat, or are in a row already; a window that does not continue its
            request's last page; ``remap`` with pages of several slots; ``move`` without pools,
            with one pool twice, or with a pool of fewer slots than the allocator.
        IndexError: an accepted entry outside its request's window, or without a slot.
        RuntimeError: memory of a pool was freed.
        Nothing has moved, and nothing is freed, when it raises.
    """
    chosen = _mode(mode, allocator)
    check_accept(out_cache_loc, accept_index, accept_len, out_cache_loc.device)
    if host is None:
        host = HostAccept(*read_together(out_cache_loc, accept_index, accept_len))
    given = (out_cache_loc, accept_index, accept_len)
    if [t.shape for t in host] != [t.shape for t in given]:
        raise ValueError(
            f"host has shapes {[list(t.shape) for t in host]}, the tensors "
            f"{[list(t.shape) for t in given]}: they are of different steps"
        )
    step = _judged(host, requests, table, allocator)
    kept = step.path if chosen == "remap" else step.front
    table.check_append(step.rows, kept, step.counts)
    relocates = chosen == "move" and not np.array_equal(step.path, step.front)
    if chosen == "move":
        _check_pages(step, table, allocator)
        check_pools(pools, allocator.slot_limit, out_cache_loc.device)
        _check_mappings(pools, host)

    if relocates:
        for pool in pools:
            pool.move_accepted(out_cache_loc, accept_index, accept_len)
    freed = torch.from_numpy(np.setdiff1d(step.window, kept, assume_unique=True))
    allocator.free(freed)
    table.append(step.rows.tolist(), torch.from_numpy(kept), step.counts.tolist())
    return CommitResult(chosen, host.accept_len.tolist(), torch.from_numpy(kept), freed)


def read_together(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Values of integer or bool tensors of one device, on the host, in one synchronisation.

    Returns:
        As many int64 tensors of the same shapes; those that are on the host already, as they are.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    packed = torch.cat([t.reshape(-1).long() for t in tensors]).cpu()
    parts = torch.split(packed, [t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def _mode(mode: Mode, allocator: PagedSlotAllocator) -> Literal["remap", "move"]:
    if mode not in ("auto", "remap", "move"):
        raise ValueError(f"mode is 'auto', 'remap' or 'move', got {mode!r}")
    if mode == "auto":
        return "remap" if allocator.page_size == 1 else "move"
    if mode == "remap" and allocator.page_size > 1:
        raise ValueError(
            f"mode='remap' needs pages of one slot, and page_size is {allocator.page_size}: an "
            "accepted path leaves holes in its pages; use mode='move' or 'auto'"
        )
    return mode


def _judged(
    host: HostAccept,
    requests: Sequence[int] | torch.Tensor,
    table: RequestTable,
    allocator: PagedSlotAllocator,
) -> _Step:
    """What the step means, once all of it is right but the pools."""
    window = check_accept(*host, torch.device("cpu")).numpy().astype(np.int64)
    index, length = (
        host.accept_index.numpy().astype(np.int64),
        host.accept_len.numpy().astype(np.int64),
    )
    rows = host_ints("requests", requests)
    if len(rows) != len(length):
        raise ValueError(f"requests has {len(rows)} rows, accept_len {len(length)}; give one each")
    size, entries = window.shape[1], index.shape[1]
    most = min(entries, size)
    bad = np.flatnonzero((length < 0) | (length > most))
    if bad.size:
        raise ValueError(
            f"accept_len[{bad[0]}] is {length[bad[0]]}; it counts a row's accepted entries, the "
            f"root included, so it lies in [0, {most}]"
        )
    alive = length > 0
    table.check_rows(rows[alive])
    request, j = np.nonzero(np.arange(entries) < length[:, None])
    node = index[request, j] - request * size
    _refuse_entry((node < 0) | (node >= size), request, j, index, f"outside its window of {size}")
    path = window[request, node]
    _refuse_entry(path == -1, request, j, index, "a node without a slot (-1)")

    slots = window[alive]
    slots = slots[slots != -1]
    allocator.check_live("the windows", torch.from_numpy(slots))
    # The windows' slots differ, so one slot twice in a path is one node twice.
    first = np.unique(path, return_index=True)[1]
    repeated = np.ones(len(path), dtype=np.bool_)
    repeated[first] = False
    _refuse_entry(repeated, request, j, index, "a node that the path has already")
    taken = slots[table.holds(slots)]
    if taken.size:
        raise ValueError(f"a window holds slot {taken[0]}, which is in a request's row already")
    return _Step(rows[alive], length[alive], slots, path, window[request, j])


def _refuse_entry(
    bad: npt.NDArray[np.bool_], request: Ints, j: Ints, index: Ints, what: str
) -> None:
    for at in np.flatnonzero(bad)[:1]:
        r = request[at]
        raise IndexError(
            f"accept_index[{r}, {j[at]}] is {index[r, j[at]]}, {what}: entries of row {r} are flat "
            "into [bs * D] and lie in its own window"
        )


def _check_pages(step: _Step, table: RequestTable, allocator: PagedSlotAllocator) -> None:
    """Position p lies at offset p % page_size, behind position p - 1, or readers by page fail."""
    begin = np.cumsum(step.counts) - step.counts
    count = np.arange(len(step.front)) - np.repeat(begin, step.counts)
    offset = (np.repeat(table.lengths.numpy()[step.rows], step.counts) + count) % (
        allocator.page_size
    )
    before = np.roll(step.front, 1)
    before[begin] = table.last_loc.numpy()[step.rows]
    misplaced = np.where(
        offset == 0, step.front % allocator.page_size != 0, step.front != before + 1
    )
    for at in np.flatnonzero(misplaced)[:1]:
        row = np.repeat(step.rows, step.counts)[at]
        raise ValueError(
            f"slot {step.front[at]} of row {row}'s window does not continue slot {before[at]} in "
            f"pages of {allocator.page_size}; allocate windows with alloc_extend from the row's "
            "length and last_loc"
        )


def _check_mappings(pools: Sequence[HasMover | RowMover], host: HostAccept) -> None:
    """Refuse a bad mapping of any pool before the first one moves (a GPU drops such pairs)."""
    rows = [r for pool in pools for r in mover_of(pool).rows if r.mapping is not None]
    if rows and rows[0].tensor.device.type == "cpu":
        window = check_accept(*host, torch.device("cpu"))
        PairCheck(rows).accepted(window, host.accept_index, host.accept_len)
