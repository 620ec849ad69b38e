"""Slots: which are handed out, what is refused, and that a refusal changes nothing."""

import numpy as np
import pytest
import torch

from specpool.allocator import OutOfSlots, PagedSlotAllocator, SlotAllocator

PAGES = pytest.mark.parametrize("page", [1, 4, 16, 64], ids="page{}".format)


def same_state(a, b) -> bool:
    return np.array_equal(a._live, b._live) and np.array_equal(a._free_pages, b._free_pages)


def refuses(allocator, error, match, call) -> None:
    """The call raises, and the allocator is what it was."""
    before = allocator.state()
    counts = allocator.live, allocator.held, allocator.available
    with pytest.raises(error, match=match):
        call()
    assert same_state(before, allocator.state())
    assert counts == (allocator.live, allocator.held, allocator.available)
    allocator.check_consistent()


def test_slot_0_is_never_handed_out():
    allocator = SlotAllocator(5, "cpu")
    slots = allocator.alloc(5)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [1, 2, 3, 4, 5]
    assert (allocator.live, allocator.available, allocator.size) == (5, 0, 5)


def test_page_0_is_never_handed_out():
    allocator = PagedSlotAllocator(8, 4, "cpu")
    assert allocator.alloc(8).tolist() == list(range(4, 12))


def test_nothing_is_an_empty_tensor():
    slots = SlotAllocator(5, "cpu").alloc(0)
    assert slots.tolist() == []
    assert slots.dtype == torch.int64


def test_what_was_freed_last_is_reused_first_in_ascending_order():
    allocator = SlotAllocator(9, "cpu")
    allocator.alloc(9)
    allocator.free(torch.tensor([8, 2]))
    allocator.free(torch.tensor([7, 5, 6]))
    assert allocator.alloc(5).tolist() == [5, 6, 7, 2, 8]


def test_alloc_takes_whole_pages_and_holds_the_tail():
    allocator = PagedSlotAllocator(16, 4, "cpu")
    assert allocator.alloc(5).tolist() == [4, 5, 6, 7, 8]
    assert (allocator.live, allocator.held, allocator.available) == (5, 3, 8)
    assert allocator.alloc(1).tolist() == [12]  # not 9, which belongs to the first caller


def test_extend_fills_the_partial_page_first():
    allocator = PagedSlotAllocator(32, 4, "cpu")
    assert allocator.alloc_extend([0, 0], [6, 3], [-1, -1]).tolist() == [*range(4, 10), 12, 13, 14]
    more = allocator.alloc_extend([6, 3], [11, 4], [9, 14])
    assert more.tolist() == [10, 11, 16, 17, 18, 15]
    # At the end of a page the last slot is not read.
    assert allocator.alloc_extend([4], [5], [-1]).tolist() == [20]


def test_extend_of_ragged_requests_some_of_them_empty():
    allocator = PagedSlotAllocator(64, 4, "cpu")
    first = allocator.alloc_extend(torch.tensor([0, 0, 0]), [2, 0, 9], [-1, -1, -1])
    assert first.tolist() == [4, 5, *range(8, 17)]
    assert allocator.alloc_extend([2, 0, 9], [2, 4, 9], [5, -1, 16]).tolist() == [20, 21, 22, 23]
    assert allocator.alloc_extend([], [], []).tolist() == []


def test_a_freed_window_comes_back_behind_the_kept_slots():
    """sglang-jax#1147, sglang#31616: a verify window's rejected tail neither leaks nor strays."""
    allocator = PagedSlotAllocator(16, 4, "cpu")
    prefix = allocator.alloc_extend([0], [3], [-1])
    window = allocator.alloc_extend([3], [10], prefix[-1:])
    assert window.tolist() == [7, *range(8, 14)]
    allocator.free(window[2:])
    assert (allocator.live, allocator.held, allocator.available) == (5, 3, 8)
    assert allocator.alloc_extend([5], [7], window[1:2]).tolist() == [9, 10]


@PAGES
def test_a_page_is_free_when_its_last_live_slot_is(page):
    allocator = PagedSlotAllocator(4 * page, page, "cpu")
    slots = allocator.alloc(2 * page)
    order = torch.randperm(2 * page)
    for done, slot in enumerate(slots[order], 1):
        allocator.free(slot)
        allocator.check_consistent()
        pages_left = len({int(s) // page for s in slots[order[done:]]})
        assert allocator.available == (4 - pages_left) * page
    assert (allocator.live, allocator.held) == (0, 0)


@PAGES
def test_many_steps_leak_nothing(page):
    """One page's tail a step is what leaked in the field."""
    allocator = PagedSlotAllocator(8 * 64, page, "cpu")
    slots = [int(s) for s in allocator.alloc_extend([0], [7], [-1])]
    for step in range(300):
        length = len(slots)
        window = allocator.alloc_extend([length], [length + 5], [slots[-1]])
        keep = 1 + step % 5
        allocator.free(window[keep:])
        slots += window[:keep].tolist()
        allocator.check_consistent()
        assert allocator.live == len(slots)
        assert allocator.held == -len(slots) % page
        if len(slots) > 400:
            allocator.free(torch.tensor(slots))
            assert allocator.available == allocator.size
            slots = [int(s) for s in allocator.alloc_extend([0], [7], [-1])]


@pytest.mark.parametrize("prefix", [7, 8], ids="prefix{}".format)
def test_branches(prefix):
    """Branch 0 goes on in the request's page, the others at the same offset of their own."""
    allocator = PagedSlotAllocator(128, 4, "cpu")
    last = allocator.alloc(prefix)[-1:]
    branches = allocator.alloc_branches([prefix], last, topk=3, steps=6)
    assert branches.shape == (1, 3, 6)
    if prefix == 7:
        assert branches[0].tolist() == [
            [11, *range(12, 17)],
            [23, *range(24, 29)],
            [35, *range(36, 41)],
        ]
    assert len(branches.unique()) == 18
    allocator.free(branches)
    allocator.check_consistent()
    assert allocator.live == prefix
    assert allocator.available == 128 - 8


def test_branches_of_slots_are_slots():
    allocator = SlotAllocator(40, "cpu")
    branches = allocator.alloc_branches([3, 5], [-1, -1], topk=2, steps=3)
    assert branches.flatten().tolist() == list(range(1, 13))


@PAGES
def test_state_is_restored_any_number_of_times(page):
    allocator = PagedSlotAllocator(16 * page, page, "cpu")
    kept = allocator.alloc(3 * page + 1)
    allocator.free(kept[: page + 1])
    saved = allocator.state()
    for _ in range(2):
        expected = PagedSlotAllocator(16 * page, page, "cpu")
        expected.restore(saved)
        allocator.free(kept[-1:])
        drawn = allocator.alloc(5 * page)
        allocator.restore(saved)
        allocator.check_consistent()
        assert same_state(saved, allocator.state())
        assert allocator.live == 2 * page
        assert allocator.alloc(4 * page).tolist() == expected.alloc(4 * page).tolist()
        allocator.restore(saved)
        assert len(drawn) == 5 * page


def test_a_state_of_another_allocator_is_refused():
    allocator = PagedSlotAllocator(16, 4, "cpu")
    for other in (PagedSlotAllocator(20, 4, "cpu"), PagedSlotAllocator(16, 2, "cpu")):
        refuses(
            allocator, ValueError, "the state is of", lambda o=other: allocator.restore(o.state())
        )


@pytest.mark.parametrize("page", [1, 4], ids="page{}".format)
def test_frees_that_are_refused(page):
    allocator = PagedSlotAllocator(16, page, "cpu")
    slots = allocator.alloc(6)
    good = int(slots[0])
    allocator.free(slots[5:])
    for bad, match in (
        ([good, 0], "hold 0, which is not of this allocator"),
        ([good, page - 1], "not of this allocator"),
        ([good, 16 + page], "slots 1 to 16" if page == 1 else "slots 4 to 19"),
        ([good, -1], "hold -1, which is not of this allocator"),
        ([good, int(slots[5])], "which is not live: it was freed already"),
        ([good, good], f"hold {good} more than once"),
        ([good, 2**40], "not of this allocator"),
    ):
        refuses(allocator, ValueError, match, lambda b=bad: allocator.free(torch.tensor(b)))
    refuses(allocator, TypeError, "integers", lambda: allocator.free(torch.tensor([1.0])))
    refuses(allocator, TypeError, "integers", lambda: allocator.free(torch.tensor([True])))
    allocator.free(slots[:5].int().view(5, 1))
    assert allocator.available == 16


def test_a_double_free_is_refused():
    allocator = SlotAllocator(4, "cpu")
    slots = allocator.alloc(2)
    allocator.free(slots)
    refuses(allocator, ValueError, "freed already", lambda: allocator.free(slots))


def test_exhaustion_takes_nothing():
    allocator = SlotAllocator(4, "cpu")
    allocator.alloc(3)
    refuses(allocator, OutOfSlots, "2 slots take 2 free pages of 1", lambda: allocator.alloc(2))
    paged = PagedSlotAllocator(16, 4, "cpu")
    last = paged.alloc(9)[-1:]
    refuses(paged, OutOfSlots, "2 free pages of 4, and 1 are free", lambda: paged.alloc(5))
    refuses(
        paged,
        OutOfSlots,
        "take 2 free pages",
        lambda: paged.alloc_extend([9, 0], [13, 1], [last.item(), -1]),
    )
    refuses(paged, OutOfSlots, "take 7", lambda: paged.alloc_branches([9], last, 8, 1))
    assert len(paged.alloc_extend([9, 0], [12, 4], [last.item(), -1])) == 7


def test_a_last_slot_that_ends_no_request_is_refused():
    allocator = PagedSlotAllocator(32, 4, "cpu")
    allocator.alloc(7)  # slots 4..10
    freed = allocator.alloc(1)
    allocator.free(freed)
    for prefix, last, match in (
        (7, 9, "is at another offset"),
        (6, 9, "has live slots behind it"),
        (5, int(freed), "is not live"),
        (7, -1, "is not live"),
        (7, 2, "is not live"),
        (7, 10**12, "is not live"),
    ):
        refuses(
            allocator,
            ValueError,
            match,
            lambda p=prefix, at=last: allocator.alloc_extend([p], [p + 1], [at]),
        )
    refuses(
        allocator,
        ValueError,
        "for two requests",
        lambda: allocator.alloc_extend([7, 7], [8, 8], [10, 10]),
    )


def test_lengths_that_are_refused():
    allocator = PagedSlotAllocator(32, 4, "cpu")
    for call, match in (
        (lambda: allocator.alloc_extend([4], [3], [-1]), "from prefix_lens 4 to seq_lens 3"),
        (lambda: allocator.alloc_extend([-1], [3], [-1]), "0 <= prefix_lens"),
        (lambda: allocator.alloc_extend([0, 0], [3], [-1]), "2, 1 and 1 entries"),
        (lambda: allocator.alloc(-1), "count must be at least 0"),
        (lambda: allocator.alloc_branches([0], [-1], 0, 1), "topk must be at least 1"),
        (lambda: allocator.alloc_branches([0], [-1], 1, 0), "steps must be at least 1"),
        (lambda: allocator.alloc_branches([0], [-1, 2], 1, 1), "1 and 2 entries"),
        (lambda: allocator.alloc_branches([-4], [-1], 1, 1), "lengths of at least 0"),
    ):
        refuses(allocator, ValueError, match, call)
    refuses(allocator, TypeError, "integer", lambda: allocator.alloc(2.0))
    refuses(allocator, TypeError, "integers", lambda: allocator.alloc_extend([0.5], [1], [-1]))


def test_sizes_that_are_refused():
    with pytest.raises(ValueError, match="100 slots does not fill pages of 16; use 96 or 112"):
        PagedSlotAllocator(100, 16, "cpu")
    with pytest.raises(ValueError, match="use 16 or 16"):
        PagedSlotAllocator(3, 16, "cpu")
    with pytest.raises(ValueError, match="size must be at least 1"):
        SlotAllocator(0, "cpu")
    with pytest.raises(TypeError, match="page_size must be an integer"):
        PagedSlotAllocator(16, 4.0, "cpu")
    with pytest.raises(ValueError, match="too large"):
        SlotAllocator(2**31, "cpu")


def test_the_check_notices_what_is_off():
    """A check that nothing can fail would show nothing."""

    def broken(harm, match):
        allocator = PagedSlotAllocator(16, 4, "cpu")
        allocator.alloc(5)
        allocator.check_consistent()
        harm(allocator)
        with pytest.raises(RuntimeError, match=match):
            allocator.check_consistent()

    broken(lambda a: setattr(a, "live", 4), "counts of live slots")
    broken(lambda a: setattr(a, "_free_count", 1), "free pages differ")
    broken(lambda a: a._live.__setitem__(0, True), "page 0")
    broken(lambda a: a._free_pages.__setitem__(0, a._free_pages[1]), "free pages differ")
    broken(lambda a: a._live.__setitem__(4, False), "counts of live slots")
