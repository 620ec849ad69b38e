"""Addresses past 2^31 bytes, with int32 locs: no product of slot and stride may be 32 bits wide.

Gigabytes are allocated and never filled, so that only the touched pages cost memory. The oracle
looks at the rows that matter and their neighbours, and at the rows that a wrapped address would
reach.
"""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from

EDGE = 2**31
NEAR = 64
"""Bytes compared on both sides of a row."""


class Far:
    """Memory of gigabytes, of which a few places are random bytes."""

    def __init__(self, on, size: int) -> None:
        self.memory = torch.empty(size, dtype=torch.uint8, device=on.device)

    def fill(self, starts, width: int) -> None:
        self.places = [
            slice(max(0, start - NEAR), min(len(self.memory), start + width + NEAR))
            for start in sorted({wrapped for s in starts for wrapped in self._reached(s, width)})
        ]
        for place in self.places:
            size = place.stop - place.start
            self.memory[place] = torch.randint(1, 256, (size,), dtype=torch.uint8)

    def _reached(self, start: int, width: int) -> list[int]:
        """Where the row starts, and where 32 bits would put it."""
        return [s for s in (start, start % EDGE, start % 2**32) if s + width <= len(self.memory)]

    def moves(self, mover, call, pairs, start, width) -> None:
        """``start(slot)`` is a row's first byte; all rows are read before any is written."""
        self.fill([start(slot) for pair in pairs for slot in pair], width)
        rows = {s: self.memory[start(s) : start(s) + width].clone() for _, s in pairs}
        expected = [self.memory[place].clone() for place in self.places]
        for target, source in pairs:
            for place, memory in zip(self.places, expected, strict=True):
                first = start(target) - place.start
                low, high = max(first, 0), min(first + width, len(memory))
                if low < high:
                    memory[low:high] = rows[source][low - first : high - first]
        call()
        for place, memory in zip(self.places, expected, strict=True):
            assert torch.equal(self.memory[place], memory), place
        assert mover.launches == 1


@pytest.mark.parametrize("width", [1024, 1020, 1021], ids="{}B".format)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_rows_past_2_31_bytes(on, width, dtype):
    slots = 3_000_000
    far = Far(on, slots * width)
    mover = RowMover(rows_from(far.memory.view(slots, width)), backend=on.backend)
    first = EDGE // width
    tgt = [0, first - 1, first + 1, slots - 1, 7]
    src = [first + 1, first, slots - 1, first + 2, slots - 2]
    call = lambda: mover.move(on.loc(tgt, dtype), on.loc(src, dtype))  # noqa: E731
    pairs = list(zip(tgt, src, strict=True))
    far.moves(mover, call, pairs, lambda slot: slot * width, width)


def test_accepted_rows_past_2_31_bytes(on):
    slots, width = 3_000_000, 1024
    far = Far(on, slots * width)
    mover = RowMover(rows_from(far.memory.view(slots, width)), backend=on.backend)
    window = on.loc([slots - 4, slots - 3, EDGE // width, 5], torch.int32)
    index = on.loc([[0, 3, 2, -1]], torch.int32)
    length = on.loc([3], torch.int32)
    pairs = [(slots - 3, 5), (EDGE // width, EDGE // width)]
    call = lambda: mover.move_accepted(window, index, length)  # noqa: E731
    far.moves(mover, call, pairs, lambda slot: slot * width, width)


def test_slots_up_to_2_31(on):
    """One byte a slot: the slot itself is next to what 32 bits hold."""
    slots = EDGE - 1
    far = Far(on, slots)
    mover = RowMover(rows_from(far.memory), backend=on.backend)
    pairs = [(slots - 1, 3), (0, slots - 1), (slots - 2, slots - 100)]
    tgt, src = (on.loc(list(side), torch.int32) for side in zip(*pairs, strict=True))
    far.moves(mover, lambda: mover.move(tgt, src), pairs, lambda slot: slot, 1)


@pytest.mark.parametrize("widths", [(576, 8), (575, 10), (8, 576), (1, 583)], ids=str)
@pytest.mark.parametrize("page_size", [3, 24, 64])
def test_pages_past_2_31_bytes(on, page_size, widths):
    """Split pages whose strides are no powers of two: slots or pages step through gigabytes."""
    width = widths[0]
    page_bytes = page_size * sum(widths) + (72 if width % 8 == 0 else 73)
    pages = 3 * 10**9 // page_bytes
    far = Far(on, pages * page_bytes)
    view = far.memory.view(pages, page_bytes)
    rows = rows_from(view, "page_split", page_size=page_size, widths=widths)
    mover = RowMover(rows[:1], backend=on.backend)
    last = pages * page_size - 1
    middle = EDGE // page_bytes * page_size
    pairs = [(0, last), (middle + page_size, 1), (last, middle), (last - page_size, middle + 1)]
    tgt, src = (on.loc(list(side), torch.int32) for side in zip(*pairs, strict=True))

    def start(slot):
        return slot // page_size * page_bytes + slot % page_size * width

    far.moves(mover, lambda: mover.move(tgt, src), pairs, start, width)


@pytest.mark.parametrize("page_size", [3, 7])
def test_page_division_next_to_2_31_slots(on, page_size):
    """One byte a slot and one of padding a page."""
    pages = (EDGE - 1) // page_size
    stride = page_size + 1
    far = Far(on, pages * stride)
    view = far.memory.view(pages, stride)
    rows = rows_from(view, "page_split", page_size=page_size, widths=(1,))
    mover = RowMover(rows, backend=on.backend)
    last = pages * page_size - 1
    pairs = [(last, 2), (0, last), (last - 1, last - page_size), (last - page_size - 1, 1)]
    tgt, src = (on.loc(list(side), torch.int32) for side in zip(*pairs, strict=True))

    def start(slot):
        return slot // page_size * stride + slot % page_size

    far.moves(mover, lambda: mover.move(tgt, src), pairs, start, 1)


def test_strides_next_to_2_31(on):
    """Few slots, gigabytes apart."""
    stride = 1_400_000_000
    far = Far(on, 2 * stride + 16)
    mover = RowMover(rows_from(far.memory.as_strided((3, 16), (stride, 1))), backend=on.backend)
    pairs = [(0, 2), (1, 0), (2, 1)]
    tgt, src = (on.loc(list(side), torch.int32) for side in zip(*pairs, strict=True))
    far.moves(mover, lambda: mover.move(tgt, src), pairs, lambda slot: slot * stride, 16)


def test_copies_past_2_31_bytes(on):
    slots, width = 3_000_000, 1024
    far = Far(on, slots * width)
    near = torch.randint(0, 256, (4, width), dtype=torch.uint8, device=on.device)
    mover = RowMover(rows_from(far.memory.view(slots, width)), backend=on.backend)
    other = RowMover(rows_from(near), backend=on.backend)
    mover.copy_from(other, on.loc([slots - 1], torch.int32), on.loc([2], torch.int32))
    assert torch.equal(far.memory[-width:], near[2])
    before = near.clone()
    other.copy_from(mover, on.loc([0, 3], torch.int32), on.loc([slots - 1, -1], torch.int32))
    assert torch.equal(near[0], before[2])
    assert torch.equal(near[1:], before[1:])


def test_past_the_register_limit_past_2_31_bytes(on, register_limit):
    slots, width = 3_000_000, 1024
    far = Far(on, slots * width)
    mover = RowMover(rows_from(far.memory.view(slots, width)), backend=on.backend)
    tgt = torch.full((register_limit + 1,), -1, dtype=torch.int32)
    src = tgt.clone()
    tgt[0], src[0] = 1, slots - 1
    tgt[-1], src[-1] = slots - 1, EDGE // width + 3
    pairs = [(1, slots - 1), (slots - 1, EDGE // width + 3)]
    tgt, src = tgt.to(on.device), src.to(on.device)
    far.moves(mover, lambda: mover.move(tgt, src), pairs, lambda slot: slot * width, width)
