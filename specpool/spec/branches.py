"""Draft branches of a paged pool: slots for every branch, and the tail of the prefix in each.

Attention that reads by page finds a branch's tokens in the branch's own pages. Where the prefix
ends inside a page, that page belongs to branch 0; every other branch begins a page of its own, and
the prefix's last rows must lie at its front (SGLang issue 7725 moved slot numbers without them).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specpool.allocator import PagedSlotAllocator
from specpool.mover import RowMover
from specpool.paging import host_ints
from specpool.request_table import RequestTable
from specpool.spec.movers import HasMover, check_pools


def duplicate_tail(
    pool: HasMover | RowMover,
    allocator: PagedSlotAllocator,
    table: RequestTable,
    requests: Sequence[int] | torch.Tensor,
    topk: int,
    steps: int,
) -> torch.Tensor:
    """Allocate ``topk`` branches of ``steps`` slots and copy the prefix's tail to each of them.

    The ``length % page_size`` rows of a request's partial last page are copied to the front of the
    first page of the branches 1 to topk - 1, all requests in one launch and without a
    synchronisation; branch 0 goes on in the page where they are. A prefix of 7 in pages of 4 with
    8 branches is 3 rows to 7 branches: 21 rows. Pages of one slot and full pages copy nothing.

    The slots are for drafting: give them back with ``allocator.free`` (or ``restore`` a state) when
    the draft is done. They are not written into the table.

    Args:
        pool: the draft model's pool, on the device of allocator and table.
        allocator: where the branches come from.
        table: the requests' rows.
        requests: ``[bs]`` different rows in use; no padding.
        topk: branches a request, at least 1.
        steps: slots a branch, at least 1.

    Returns:
        int64 ``[bs, topk, steps]``: slot ``[r, b, i]`` is for position ``lengths[r] + i``. Position
        p of the tail lies ``lengths[r] - p`` slots before ``[r, b, 0]``, in every branch.

    Raises:
        OutOfSlots: not enough pages are free.
        ValueError: a row that is not in use or is named twice, a last slot that does not end its
            page, a number below 1, or a pool of fewer slots or another device.
        IndexError: as ``RowMover.move``.
        Nothing was copied then, and no slot is taken.
    """
    rows = host_ints("requests", requests)
    table.check_rows(rows)
    check_pools([pool], allocator.slot_limit, allocator.device)
    index = torch.from_numpy(rows)
    length, last = table.lengths[index], table.last_loc[index]
    branches = allocator.alloc_branches(length, last, topk, steps)
    tail = length % allocator.page_size
    most = int(tail.max()) if len(rows) else 0
    if topk == 1 or most == 0:
        return branches
    # Tails are ragged: every branch has room for the longest, and -1 skips what it lacks.
    place = torch.arange(most) - tail[:, None]  # counted from the branch's own first slot
    source = torch.where(place < 0, last[:, None] + 1 + place, -1)
    target = branches[:, 1:, :1] + place.to(allocator.device)[:, None]
    source = source.to(allocator.device)[:, None].expand_as(target)
    move = pool.move if isinstance(pool, RowMover) else pool.move_kv_cache
    try:
        move(target.reshape(-1), source.reshape(-1))
    except Exception:
        allocator.free(branches)
        raise
    return branches
