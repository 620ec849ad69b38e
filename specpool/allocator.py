"""Which slots of a pool are in use: one slot at a time, or whole pages.

The bookkeeping lies on the host, so nothing here waits for a device except ``free`` of slots that
lie on one. A page belongs to whoever has a live slot in it, and to nobody from the moment that its
last live slot is freed: no tail of a page can leak, and no page is ever shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from specpool.paging import Ints, extension, host_ints
from specpool.pools.store import checked_int

_INT32_MAX = 2**31 - 1


class OutOfSlots(RuntimeError):
    """More slots, or more rows of a request table, were asked for than are free; none was taken."""


@dataclass(frozen=True, eq=False)
class AllocatorState:
    """What an allocator was like when ``state`` was called; ``restore`` takes it back to that."""

    size: int
    page_size: int
    _live: npt.NDArray[np.bool_]
    _free_pages: Ints


class PagedSlotAllocator:
    """Hands out slots of a pool by whole pages.

    Pages 1 to ``size / page_size`` are handed out, that is the slots ``page_size`` to
    ``size + page_size - 1``; page 0 holds the dummy slot 0 and is never handed out. At any moment

        live + held + available == size

    where *live* slots are handed out, *held* ones are the rest of pages that have a live slot
    (only ``alloc_extend`` of the request that ends there hands them out), and *available* ones are
    in free pages. Which slots a call returns depends only on the calls before it: the pages freed
    last are taken first, in ascending order.

    Args:
        size: slots to hand out, a multiple of ``page_size``, as the pool's ``size``.
        page_size: slots a page, at least 1.
        device: where returned slots lie.

    Raises:
        TypeError: a size that is no integer.
        ValueError: one that is too small, or a size that does not fill pages.
    """

    def __init__(self, size: int, page_size: int, device: str | torch.device) -> None:
        self.size = checked_int("size", size, 1)
        self.page_size = checked_int("page_size", page_size, 1)
        if self.size % self.page_size:
            down = self.size // self.page_size * self.page_size
            raise ValueError(
                f"a size of {self.size} slots does not fill pages of {self.page_size}; use "
                f"{down or self.page_size} or {down + self.page_size}"
            )
        if self.slot_limit > _INT32_MAX:
            raise ValueError(f"slots are int32 in a request table; a size of {size} is too large")
        self.device = torch.empty(0, device=device).device
        pages = self.size // self.page_size
        self._live = np.zeros(self.slot_limit, dtype=np.bool_)
        self._live_in_page = np.zeros(pages + 1, dtype=np.int64)
        # A stack, its top at the end: taking and freeing cost what they take and free.
        self._free_pages: Ints = np.arange(pages, 0, -1)
        self._free_count = pages
        self.live = 0

    @property
    def slot_limit(self) -> int:
        """One more than the largest slot; what every buffer must have rows for."""
        return self.size + self.page_size

    @property
    def available(self) -> int:
        """Slots in free pages. A call that needs more pages than are free is refused."""
        return self._free_count * self.page_size

    @property
    def held(self) -> int:
        """Slots that are not in use, of pages that are."""
        return self.size - self.available - self.live

    def alloc(self, count: int) -> torch.Tensor:
        """Hand out ``count`` slots from the start of free pages.

        Returns:
            int64 ``[count]`` on ``device``; page by page, each page's in ascending order.

        Raises:
            OutOfSlots: not enough pages are free.
            TypeError, ValueError: ``count`` is no integer or negative.
        """
        count = checked_int("count", count, 0)
        begin = np.array([0])
        return self._on_device(self._take(begin, np.array([count]), np.array([-1])))

    def alloc_extend(
        self,
        prefix_lens: Sequence[int] | torch.Tensor,
        seq_lens: Sequence[int] | torch.Tensor,
        last_loc: Sequence[int] | torch.Tensor,
    ) -> torch.Tensor:
        """Hand out the slots of positions ``prefix_lens[r] .. seq_lens[r] - 1`` of every request.

        A request's partial last page is filled before it is given new pages, so that position p
        lies at offset ``p % page_size`` of its page.

        Args:
            prefix_lens: ``[bs]`` tokens that request r has slots for.
            seq_lens: ``[bs]`` tokens it is to have slots for.
            last_loc: ``[bs]`` the slot of its last token; read only where ``prefix_lens[r]`` is no
                multiple of ``page_size``, so anything (-1) serves elsewhere.
            All are read on the host: lists, or the request table's own tensors.

        Returns:
            int64 ``[sum(seq_lens - prefix_lens)]`` on ``device``, request by request.

        Raises:
            OutOfSlots: not enough pages are free.
            ValueError: counts that differ, ``seq_lens`` below ``prefix_lens``, or a ``last_loc``
                that does not end a request of that length (not live, at another offset, or with
                live slots behind it in its page).
        """
        start, end, last = (
            host_ints(name, values)
            for name, values in (
                ("prefix_lens", prefix_lens),
                ("seq_lens", seq_lens),
                ("last_loc", last_loc),
            )
        )
        if not len(start) == len(end) == len(last):
            raise ValueError(
                f"prefix_lens, seq_lens and last_loc have {len(start)}, {len(end)} and "
                f"{len(last)} entries; give one of each a request"
            )
        bad = np.flatnonzero((start < 0) | (end < start))
        if bad.size:
            r = bad[0]
            raise ValueError(
                f"request {r} of the call goes from prefix_lens {start[r]} to seq_lens {end[r]}; "
                "give 0 <= prefix_lens <= seq_lens"
            )
        count = end - start
        return self._on_device(self._take(start, count, self._tails(start, count, last)))

    def alloc_branches(
        self,
        prefix_lens: Sequence[int] | torch.Tensor,
        last_loc: Sequence[int] | torch.Tensor,
        topk: int,
        steps: int,
    ) -> torch.Tensor:
        """Hand out ``steps`` slots for each of ``topk`` draft branches of every request.

        Branch 0 continues the request's partial last page. Every other branch begins a page of its
        own at the same offset, ``prefix_lens[r] % page_size``; what lies before it in that page is
        held for a copy of the request's tail (``duplicate_tail``), and comes free with the branch.

        Returns:
            int64 ``[bs, topk, steps]`` on ``device``.

        Raises:
            OutOfSlots, ValueError: as ``alloc_extend``; ``topk`` or ``steps`` below 1.
        """
        topk, steps = checked_int("topk", topk, 1), checked_int("steps", steps, 1)
        start, last = host_ints("prefix_lens", prefix_lens), host_ints("last_loc", last_loc)
        if len(start) != len(last) or (start < 0).any():
            raise ValueError(
                f"prefix_lens and last_loc have {len(start)} and {len(last)} entries; give one of "
                "each a request, and lengths of at least 0"
            )
        tail = np.full((len(start), topk), -1, dtype=np.int64)
        tail[:, 0] = self._tails(start, np.full(len(start), steps), last)
        taken = self._take(
            np.repeat(start, topk), np.full(len(start) * topk, steps), tail.reshape(-1)
        )
        return self._on_device(taken).view(len(start), topk, steps)

    def free(self, slots: torch.Tensor) -> None:
        """Take slots back. A page is free again once none of its slots is live.

        Args:
            slots: int32 or int64 of any shape; reading them from a GPU synchronises.

        Raises:
            TypeError: no integer tensor.
            ValueError: a slot that this allocator never hands out, is not live, or is given twice;
                nothing is freed then.
        """
        loc = host_ints("slots", slots)
        self._check_live("slots to free", loc)
        self._live[loc] = False
        self.live -= len(loc)
        pages, counts = np.unique(loc // self.page_size, return_counts=True)
        self._live_in_page[pages] -= counts
        emptied = pages[self._live_in_page[pages] == 0]
        self._free_pages[self._free_count : self._free_count + len(emptied)] = emptied[::-1]
        self._free_count += len(emptied)

    def check_live(self, name: str, slots: torch.Tensor) -> None:
        """Refuse slots that are not all live and different.

        Raises:
            ValueError: names the first one.
        """
        self._check_live(name, host_ints(name, slots))

    def state(self) -> AllocatorState:
        """What ``restore`` takes, any number of times."""
        return AllocatorState(
            self.size,
            self.page_size,
            self._live.copy(),
            self._free_pages[: self._free_count].copy(),
        )

    def restore(self, state: AllocatorState) -> None:
        """Be as when ``state`` was taken: what was handed out since is free, what was freed live.

        Raises:
            ValueError: a state of an allocator of another size or page size.
        """
        if (state.size, state.page_size) != (self.size, self.page_size):
            raise ValueError(
                f"the state is of {state.size} slots in pages of {state.page_size}, this allocator "
                f"has {self.size} in pages of {self.page_size}"
            )
        self._live = state._live.copy()
        self._live_in_page = self._live.reshape(-1, self.page_size).sum(1)
        self._free_count = len(state._free_pages)
        self._free_pages[: self._free_count] = state._free_pages
        self.live = int(self._live_in_page.sum())

    def check_consistent(self) -> None:
        """Recount everything and compare: live + held + available == size, no page lost or twice.

        Raises:
            RuntimeError: what does not add up; that is a defect of this class.
        """
        by_page = self._live.reshape(-1, self.page_size).sum(1)
        free = np.sort(self._free_pages[: self._free_count])
        empty = np.flatnonzero(by_page[1:] == 0) + 1
        held = int((by_page > 0).sum()) * self.page_size - int(by_page.sum())
        for problem in (
            "a slot of page 0 is live" if by_page[0] else "",
            "counts of live slots are off"
            if self.live != by_page.sum() or (by_page != self._live_in_page).any()
            else "",
            "pages without live slots and free pages differ"
            if not np.array_equal(free, empty)
            else "",
            f"live {self.live} + held {held} + available {self.available} != size {self.size}"
            if self.live + held + self.available != self.size
            else "",
        ):
            if problem:
                raise RuntimeError(f"the allocator is inconsistent: {problem}")

    def _on_device(self, slots: Ints) -> torch.Tensor:
        # pageable memory is staged before this returns; a blocking copy would wait for the device
        return torch.from_numpy(slots).to(self.device, non_blocking=True)

    def _tails(self, start: Ints, count: Ints, last: Ints) -> Ints:
        """The slot to continue behind, -1 for requests that begin a page."""
        tail = np.where((start % self.page_size != 0) & (count > 0), last, -1)
        used = np.flatnonzero((start % self.page_size != 0) & (count > 0))
        loc = last[used]
        out = (loc < self.page_size) | (loc >= self.slot_limit)
        inside = np.where(out, 0, loc)
        offset = inside % self.page_size
        behind = np.arange(self.page_size) > offset[:, None]
        for problem, why in (
            (out | ~self._live[inside], "is not live"),
            (offset != (start[used] - 1) % self.page_size, "is at another offset of its page"),
            (
                (self._live.reshape(-1, self.page_size)[inside // self.page_size] & behind).any(1),
                "has live slots behind it in its page",
            ),
        ):
            bad = np.flatnonzero(problem)
            if bad.size:
                r = used[bad[0]]
                raise ValueError(
                    f"last_loc[{r}] is {last[r]}, which {why}: it is not the last slot of a "
                    f"request of {start[r]} tokens in pages of {self.page_size}"
                )
        if len(np.unique(loc)) != len(loc):
            raise ValueError(f"last_loc names a slot for two requests: {loc.tolist()}")
        return tail

    def _take(self, start: Ints, count: Ints, tail: Ints) -> Ints:
        """The slots of ``count`` positions from ``start``, behind ``tail`` or in new pages."""
        new = extension(start, count, tail, self.page_size)
        needed = int(new.pages.sum())
        if needed > self._free_count:
            raise OutOfSlots(
                f"{int(count.sum())} slots take {needed} free pages of {self.page_size}, and "
                f"{self._free_count} are free ({self.live} of {self.size} slots are live, "
                f"{self.held} held in partial pages); free some, or build a larger pool"
            )
        slots = new.slots(self._free_pages[self._free_count - needed : self._free_count][::-1])
        self._free_count -= needed
        self._live[slots] = True
        self.live += len(slots)
        used, counts = np.unique(slots // self.page_size, return_counts=True)
        self._live_in_page[used] += counts
        return slots

    def _check_live(self, name: str, loc: Ints) -> None:
        bad = loc[(loc < self.page_size) | (loc >= self.slot_limit)]
        if bad.size:
            raise ValueError(
                f"{name} hold {bad[0]}, which is not of this allocator: it hands out the slots "
                f"{self.page_size} to {self.slot_limit - 1}"
            )
        bad = loc[~self._live[loc]]
        if bad.size:
            raise ValueError(f"{name} hold {bad[0]}, which is not live: it was freed already")
        ordered = np.sort(loc)
        bad = ordered[1:][ordered[1:] == ordered[:-1]]
        if bad.size:
            raise ValueError(f"{name} hold {bad[0]} more than once")


class SlotAllocator(PagedSlotAllocator):
    """Hands out the slots 1 to ``size`` one by one (pages of one slot); 0 is the dummy slot.

    ``live + available == size`` at any moment. Arguments are ``PagedSlotAllocator``'s.
    """

    def __init__(self, size: int, device: str | torch.device) -> None:
        super().__init__(size, 1, device)
