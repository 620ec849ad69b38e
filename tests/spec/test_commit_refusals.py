"""What commit refuses: by name, and with nothing moved, freed or written."""

import pytest
import torch

from specpool import RowMover, rows_from
from specpool.allocator import PagedSlotAllocator
from specpool.pools import HiSparseC4DevicePool
from specpool.spec import movers
from specpool.spec.commit import HostAccept, commit
from tests.spec.commit_world import World, mha

I32 = torch.int32
ROWS = [1, 0, -1]
PATHS = [[0, 2, 5], [0, 3], []]


class Step:
    """A good step of a world of two requests in the batch and one beside it, to be spoilt."""

    def __init__(self, page=1, mode="move"):
        self.world = World(page)
        self.mode = mode
        self.pools = self.world.pools
        self.allocator, self.table = self.world.allocator, self.world.table
        self.rows = list(ROWS)
        self.loc, _ = self.world.draft_step(self.rows)
        self.index, self.length = self.world.accept(PATHS, 4)
        self.host = None

    def run(self):
        given = (self.allocator, self.table, self.rows, self.loc, self.index, self.length)
        return commit(self.pools, *given, self.mode, host=self.host)

    def refused(self, error, match):
        before = self.world.snapshot()
        launches = [pool.mover.launches for pool in self.world.pools]
        with pytest.raises(error, match=match):
            self.run()
        assert all(map(torch.equal, before, self.world.snapshot()))
        assert [pool.mover.launches for pool in self.world.pools] == launches


def _set(**values):
    return lambda step: [setattr(step, name, value) for name, value in values.items()]


def _entry(name, at, value):
    return lambda step: getattr(step, name).__setitem__(at, value)


def _overgrown(step):
    """sglang#26972: the draft outgrew the request's row."""
    step.world.leave(2)
    row = step.world.join(198)
    step.rows = [row, 0, -1]
    step.loc[0] = step.world.allocator.alloc_extend([198], [206], step.world.table.last_loc[[row]])


def _freed_window(step):
    step.world.allocator.free(step.loc[0, 7:])


def _window_of_a_row(step):
    step.loc[1, 4] = step.world.table.slots[2, 0]


def _swapped_windows(step):
    """Two requests' windows, in pages, under each other's rows."""
    step.loc[:2] = step.loc[:2].flip(0).clone()


BAD = {
    "an unknown mode": (_set(mode="swap"), ValueError, "'auto', 'remap' or 'move', got 'swap'"),
    "accept_len of another batch": (
        _set(length=torch.tensor([3, 2], dtype=I32)),
        ValueError,
        r"accept_len must be \[bs\] = \[3\]",
    ),
    "accept_index of another batch": (
        lambda s: setattr(s, "index", s.index[:2]),
        ValueError,
        r"accept_len must be \[bs\] = \[2\]",
    ),
    "windows of another batch": (
        lambda s: setattr(s, "loc", s.loc[:2]),
        ValueError,
        "out_cache_loc must be",
    ),
    "requests of another batch": (_set(rows=[1, 0]), ValueError, "requests has 2 rows"),
    "accept of wider windows": (
        _entry("index", (0, 1), 8),
        IndexError,
        r"accept_index\[0, 1\] is 8",
    ),
    "an entry of the row before": (
        _entry("index", (1, 1), 7),
        IndexError,
        r"\[1, 1\] is 7, outside",
    ),
    "an entry of -1 within": (_entry("index", (1, 1), -1), IndexError, r"\[1, 1\] is -1, outside"),
    "an entry twice": (
        _entry("index", (0, 2), 2),
        IndexError,
        r"\[0, 2\] is 2, a node that the path",
    ),
    "a length below 0": (_entry("length", 1, -1), ValueError, r"accept_len\[1\] is -1"),
    "a length past S": (_entry("length", 1, 5), ValueError, r"accept_len\[1\] is 5; .* \[0, 4\]"),
    "a padding row that counts": (_entry("length", 2, 1), ValueError, "row -1 is not in use"),
    "a free row": (_set(rows=[1, 4, -1]), ValueError, "row 4 is not in use"),
    "a row outside": (_set(rows=[1, 5, -1]), ValueError, "row 5 is not in use"),
    "a row twice": (_set(rows=[1, 1, -1]), ValueError, "a row is named twice"),
    "a row that would overgrow": (_overgrown, ValueError, "would get 3 more, past max_context=200"),
    "a node without a slot": (_entry("loc", (0, 5), -1), IndexError, "a node without a slot"),
    "the dummy slot": (_entry("loc", (0, 7), 0), ValueError, "not of this allocator"),
    "a slot outside": (_entry("loc", (0, 7), 10**6), ValueError, "not of this allocator"),
    "a slot below": (_entry("loc", (0, 7), -2), ValueError, "hold -2, which is not of this"),
    "a freed slot": (_freed_window, ValueError, "is not live"),
    "a slot of another row": (_window_of_a_row, ValueError, "is in a request's row already"),
    "a slot twice": (
        lambda s: s.loc[1, 6:].copy_(s.loc[0, 6:]),
        ValueError,
        "more than once",
    ),
    "floats": (lambda s: setattr(s, "index", s.index.float()), TypeError, "int32 or int64"),
    "float rows": (_set(rows=[1.0, 0.0, -1.0]), TypeError, "requests must be integers"),
    "values of another step": (
        lambda s: setattr(s, "host", HostAccept(s.loc[:2], s.index[:2], s.length[:2])),
        ValueError,
        "of different steps",
    ),
}
BAD_MOVES = {
    "no pools": (_set(pools=[]), ValueError, "none is given"),
    "a pool twice": (
        lambda s: setattr(s, "pools", [*s.pools, s.world.target.mover]),
        ValueError,
        "share memory",
    ),
    "a smaller pool, second": (
        lambda s: setattr(s, "pools", [s.world.target, mha(100, s.world.page)]),
        ValueError,
        "slots, the allocator hands out slots up to",
    ),
    "a hole at the window's front": (
        _entry("loc", (0, 1), -1),
        ValueError,
        "slot -1 is no slot",
    ),
}


@pytest.mark.parametrize(("page", "mode"), [(1, "remap"), (1, "move"), (4, "auto")])
@pytest.mark.parametrize("what", BAD)
def test_bad_steps_are_refused(what, page, mode):
    spoil, error, match = BAD[what]
    step = Step(page, mode)
    spoil(step)
    step.refused(error, match)


@pytest.mark.parametrize("page", [1, 4], ids="page{}".format)
@pytest.mark.parametrize("what", BAD_MOVES)
def test_bad_moves_are_refused(what, page):
    spoil, error, match = BAD_MOVES[what]
    step = Step(page, "move")
    spoil(step)
    step.refused(error, match)


def test_the_step_is_good_when_nothing_is_spoilt():
    for page, mode in ((1, "remap"), (1, "move"), (4, "auto")):
        step = Step(page, mode)
        assert step.run().accept_len == [3, 2, 0]
        # What was committed is not committed again.
        step.refused(ValueError, "not live|in a request's row")


def test_a_window_that_was_accepted_whole_is_not_committed_twice():
    for mode in ("remap", "move"):
        step = Step(1, mode)
        step.index, step.length = step.world.accept([list(range(8)), list(range(8)), []], 8)
        step.run()
        step.refused(ValueError, "in a request's row")


@pytest.mark.parametrize("page", [2, 64], ids="page{}".format)
def test_remap_of_pages_is_refused_by_name(page):
    step = Step(page, "remap")
    step.refused(ValueError, f"needs pages of one slot, and page_size is {page}")


@pytest.mark.parametrize("page", [4, 16], ids="page{}".format)
def test_windows_that_do_not_continue_their_pages(page):
    step = Step(page)
    _swapped_windows(step)
    step.refused(ValueError, "does not continue slot")
    step = Step(page)
    step.loc[0] = step.world.allocator.alloc(8)
    step.refused(ValueError, f"in pages of {page}")


def test_a_pool_whose_memory_was_freed_stops_all_of_them():
    step = Step(1)
    gone = torch.zeros(1000, 4)
    mover = RowMover(rows_from(gone, name="gone"), backend="torch")  # numpy would pin its memory
    gone.untyped_storage().resize_(0)
    step.pools = [step.world.target, mover]
    step.refused(RuntimeError, "memory was freed")


def test_what_was_right_at_the_last_step_is_judged_again_when_it_changes():
    step = Step(1)
    kept = torch.zeros(1000, 4)
    mover = RowMover(rows_from(kept, name="kept"), backend="torch")
    step.pools = [step.world.target, mover]
    step.run()
    again = Step(1)
    again.world, again.pools = step.world, step.pools
    again.allocator, again.table = step.allocator, step.table
    again.loc, _ = step.world.draft_step(again.rows)
    mover.attach("too short", torch.zeros(9))
    again.refused(ValueError, "too short has 9 slots")
    mover.detach("too short")
    kept.untyped_storage().resize_(0)
    again.refused(RuntimeError, "memory was freed")


def test_pools_that_stay_are_checked_once(monkeypatch):
    """Hundreds of buffers take longer to check than to move."""
    calls = []
    monkeypatch.setattr(movers, "check_disjoint", lambda rows: calls.append(len(rows)))
    world = World(4)
    for _ in range(3):
        world.commit([0, 1], [[0, 2], [0, 3]])
    assert len(calls) == 1
    world.draft.mover.attach("more", torch.zeros(1000, 2))
    world.commit([0, 1], [[0, 2], [0, 3]])
    assert len(calls) == 2


def test_a_bad_mapping_of_the_second_pool_stops_the_first():
    step = Step(1)
    pool = HiSparseC4DevicePool(28, 4, torch.float8_e4m3fn, 448, 64, 1, "cpu", False)
    pool.register_mapping(torch.arange(900, 1300))
    step.pools = [step.world.target, pool]
    step.refused(IndexError, "the mapping of")


def test_a_pool_of_another_device():
    step = Step(1)
    meta = RowMover(rows_from(torch.zeros(1000, 4, device="meta"), name="far"), backend="torch")
    step.pools = [step.world.target, meta]
    step.refused(ValueError, "far is on meta, the slots are on cpu")


def test_a_pool_without_rows_is_fine():
    step = Step(1)
    step.pools = [*step.world.pools, RowMover([])]
    assert step.run().accept_len == [3, 2, 0]


def test_an_allocator_of_other_pages():
    """The windows are not of the allocator that is named."""
    step = Step(4)
    step.allocator = PagedSlotAllocator(step.allocator.size, 4, "cpu")
    step.refused(ValueError, "is not live")
