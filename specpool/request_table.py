"""The slots of every request, position by position (an engine's ``req_to_token``).

The table lies on the device, where attention reads it; lengths, last slots and which slots are in
use by a row are kept on the host, so that a row that would overgrow, or a slot that another row
holds, is refused before anything is written and without waiting for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specpool.allocator import OutOfSlots
from specpool.paging import Ints, host_ints
from specpool.pools.store import checked_int


class RequestTable:
    """``slots[row, position]`` for up to ``requests`` requests of up to ``max_context`` tokens.

    Entries at and behind a row's length are 0, the dummy slot, so a gather that is padded to the
    longest row reads the dummy slot there and nothing of a request. In a batch, a row number of -1
    is padding: attention never reads it, ``commit`` skips it, everything else refuses it.

    Args:
        requests: rows, at least 1.
        max_context: tokens a row, at least 1.
        device: where ``slots`` lies.

    Attributes:
        slots: int32 ``[requests, max_context]`` on ``device``. To be read, not written.
        lengths: int64 ``[requests]`` on the host: tokens of each row; 0 in rows not in use.
        last_loc: int64 ``[requests]`` on the host: the slot of a row's last token, -1 where it has
            none; what ``alloc_extend`` continues from.

    Raises:
        TypeError, ValueError: a size that is no integer or too small.
    """

    def __init__(self, requests: int, max_context: int, device: str | torch.device) -> None:
        self.requests = checked_int("requests", requests, 1)
        self.max_context = checked_int("max_context", max_context, 1)
        self.device = torch.empty(0, device=device).device
        with torch.inference_mode(False):  # or it could not be written outside of it
            self.slots = torch.zeros(
                self.requests, self.max_context, dtype=torch.int32, device=self.device
            )
            self.lengths = torch.zeros(self.requests, dtype=torch.int64)
            self.last_loc = torch.full((self.requests,), -1, dtype=torch.int64)
        self._in_use = np.zeros(self.requests, dtype=np.bool_)
        self._held = np.zeros(1, dtype=np.bool_)  # by slot; grows to the largest one seen

    @property
    def available(self) -> int:
        """Rows that are free."""
        return self.requests - int(self._in_use.sum())

    def alloc(self, count: int = 1) -> list[int]:
        """Take ``count`` free rows, the lowest first; they are empty.

        Raises:
            OutOfSlots: fewer are free; none is taken then.
        """
        count = checked_int("count", count, 0)
        free = np.flatnonzero(~self._in_use)[:count]
        if len(free) < count:
            raise OutOfSlots(
                f"{count} rows asked for, {len(free)} of {self.requests} are free: finish "
                "requests, or build a table of more rows"
            )
        self._in_use[free] = True
        return [int(row) for row in free]

    def row(self, row: int) -> torch.Tensor:
        """The slots of one request: an int32 view ``[length]`` of the table.

        Raises:
            ValueError: the row is not in use.
        """
        self.check_rows([row])
        return self.slots[row, : int(self.lengths[row])]

    def append(
        self,
        rows: int | Sequence[int],
        slots: torch.Tensor,
        counts: Sequence[int] | None = None,
    ) -> None:
        """Append slots to rows.

        Args:
            rows: one row, or as many as ``counts``.
            slots: int32 or int64, row by row, as ``alloc_extend`` returns them. Reading them from
                a GPU synchronises.
            counts: how many of them each row gets; all go to the one row when not given.

        Raises:
            ValueError: a row that is not in use or named twice, one that would grow past
                ``max_context``, counts that do not add up, a slot that is no slot (0 and below) or
                that a row holds already. Nothing is written then.
            TypeError: no integers.
        """
        row, loc = host_ints("rows", np.atleast_1d(rows)), host_ints("slots", slots)
        count = host_ints("counts", np.array([loc.size]) if counts is None else counts)
        self.check_append(row, loc, count)
        begin = np.cumsum(count) - count
        step = np.arange(loc.size) - np.repeat(begin, count)
        length = self.lengths.numpy()
        where = np.repeat(row * self.max_context + length[row], count) + step
        # One copy to the device holds both; a blocking one would wait for all that is queued there.
        pair = torch.from_numpy(np.stack([where, loc])).to(self.device, non_blocking=True)
        self.slots.view(-1)[pair[0]] = pair[1].to(torch.int32)
        length[row] += count
        some = count > 0
        self.last_loc.numpy()[row[some]] = loc[(begin + count - 1)[some]]
        self._hold(loc, True)

    def check_append(self, rows: Ints, slots: Ints, counts: Ints) -> None:
        """Refuse what ``append`` refuses, and write nothing.

        Args:
            rows: int64 ``[n]`` on the host.
            slots: int64 ``[sum(counts)]`` on the host.
            counts: int64 ``[n]`` on the host.

        Raises:
            ValueError: as ``append``.
        """
        self.check_rows(rows)
        if len(counts) != len(rows) or (counts < 0).any() or counts.sum() != slots.size:
            raise ValueError(
                f"{slots.size} slots do not go to {len(rows)} rows by counts {counts.tolist()}; "
                "give one count a row, and as many slots as they add up to"
            )
        self.check_room(rows, counts)
        bad = slots[(slots < 1) | (slots >= 2**31)]
        if bad.size:
            raise ValueError(f"slot {bad[0]} is no slot of a request: slots are 1 and up, int32")
        bad = slots[self.holds(slots)]
        if bad.size:
            raise ValueError(f"slot {bad[0]} is in a row of the table already")
        ordered = np.sort(slots)
        bad = ordered[1:][ordered[1:] == ordered[:-1]]
        if bad.size:
            raise ValueError(f"slot {bad[0]} is given more than once")

    def check_rows(self, rows: Sequence[int] | Ints) -> None:
        """Refuse rows that are not in use, or named twice.

        Raises:
            ValueError: names the first one.
        """
        row = host_ints("rows", rows)
        outside = (row < 0) | (row >= self.requests)
        bad = row[outside | ~self._in_use[np.where(outside, 0, row)]]
        if bad.size:
            raise ValueError(
                f"row {bad[0]} is not in use: rows come from alloc() and lie in "
                f"[0, {self.requests})"
            )
        if len(np.unique(row)) != len(row):
            raise ValueError(f"a row is named twice: {row.tolist()}")

    def check_room(self, rows: Sequence[int] | Ints, counts: Sequence[int] | Ints) -> None:
        """Refuse rows that ``counts`` more tokens would grow past ``max_context``.

        A loop asks this for the whole draft before it allocates, so that a row near its end
        drafts less.

        Raises:
            ValueError: names the first one.
        """
        row, count = host_ints("rows", rows), host_ints("counts", counts)
        length = self.lengths.numpy()[row]
        bad = np.flatnonzero(length + count > self.max_context)
        if bad.size:
            i = bad[0]
            raise ValueError(
                f"row {row[i]} has {length[i]} tokens and would get {count[i]} more, past "
                f"max_context={self.max_context}; draft fewer, or finish the request"
            )

    def holds(self, slots: Ints) -> npt.NDArray[np.bool_]:
        """Which of the slots (int64, host, 0 and up) are in a row."""
        # Slot 0, which stands in for slots larger than any seen, is in none.
        return self._held[np.where(slots < len(self._held), slots, 0)]

    def free(self, rows: int | Sequence[int]) -> torch.Tensor:
        """Empty rows and give them back; reading their slots from a GPU synchronises.

        Returns:
            int64 ``[n]`` on the host: all slots that the rows held, for the allocator to free.

        Raises:
            ValueError: a row that is not in use, or is named twice; nothing changes then.
        """
        row = host_ints("rows", np.atleast_1d(rows))
        self.check_rows(row)
        loc = torch.cat([self.slots[r, : int(self.lengths[r])] for r in row] or [self.slots[0, :0]])
        slots = loc.cpu().long()
        self.slots[torch.from_numpy(row).to(self.device, non_blocking=True)] = 0
        self.lengths[row] = 0
        self.last_loc[row] = -1
        self._in_use[row] = False
        self._hold(slots.numpy(), False)
        return slots

    def _hold(self, slots: Ints, held: bool) -> None:
        most = int(slots.max(initial=0)) + 1
        if most > len(self._held):
            self._held = np.append(self._held, np.zeros(most * 2 - len(self._held), dtype=np.bool_))
        self._held[slots] = held
