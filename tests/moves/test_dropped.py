"""Bad slots on a GPU: their pairs are dropped and counted once a call, the others move.

CPU tensors are validated first; here that is switched off, so that what a GPU does shows anywhere.
"""

import pytest
import torch

from specpool.mover import RowMover
from tests import oracle
from tests.moves.conftest import PLACES, On, params, same_bytes
from tests.oracle import hnd, nhd, page_split


@pytest.fixture(params=params([place for place in PLACES if place[1] != "cpu"]))
def on(request, monkeypatch) -> On:
    """The backends that can drop; the cpu backend always validates."""
    serve = RowMover._serve
    monkeypatch.setattr(RowMover, "_serve", lambda *args: serve(*args)._replace(judge=None))
    return On(*request.param)


def _dropped(mover) -> int:
    """What ``check`` reports, which then starts again from 0."""
    with pytest.raises(IndexError, match="SPECPOOL_CHECK=1") as raised:
        mover.check()
    mover.check()
    count, words = str(raised.value).split(maxsplit=1)
    assert words.startswith("pairs named slots outside the rows and were not moved")
    return int(count)


def _moves(on, buffers, tgt, src, good, dropped):
    """Only the pairs ``good`` move, and ``dropped`` are counted."""
    mover = on.mover(*buffers)
    expected = [oracle.moved(b, good) for b in buffers]
    mover.move(on.loc(tgt), on.loc(src))
    for buffer, memory in zip(buffers, expected, strict=True):
        same_bytes(buffer, memory)
    assert mover.rows_moved == oracle.rows_that_move(buffers, good)
    assert _dropped(mover) == dropped


BAD = [-2, -7, 12, 13, 10**6, 2**31 - 1, 2**31, 2**32 + 3, 2**62, -(2**62), -(2**31)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", ["tgt", "src"])
def test_one_bad_pair_among_good_ones(on, bad, side):
    """A slot that wraps to a good one in 32 bits is as bad as any."""
    buffers = [nhd(12, (w,), device=on.device) for w in (5, 16, 300)]
    good, wrong = [0, 1, 2], [5, bad, 7]
    tgt, src = (wrong, good) if side == "tgt" else (good, wrong)
    pairs = [(t, s) for t, s in zip(tgt, src, strict=True) if bad not in (t, s)]
    _moves(on, buffers, tgt, src, pairs, dropped=1)


def test_a_pair_is_counted_once_however_bad_it_is(on):
    _moves(on, [nhd(12, device=on.device)], [-2, 1, 99], [99, 2, -5], [(1, 2)], dropped=2)


def test_a_skipped_pair_is_not_counted(on):
    _moves(on, [nhd(12, device=on.device)], [-1, 99, 0, 3], [99, -1, 99, 4], [(3, 4)], dropped=1)


def test_counts_add_up_over_calls(on):
    buffer = nhd(12, device=on.device)
    mover = on.mover(buffer)
    for _ in range(3):
        mover.move(on.loc([0, 1]), on.loc([50, 60]))
    assert _dropped(mover) == 6


def test_many_buffers_count_a_pair_once(on):
    """More blocks and parts than one: only one program counts."""
    buffers = [nhd(12, (w,), device=on.device) for w in [1024] * 9 + [20, 3]]
    _moves(on, buffers, [0, 1], [50, 2], [(1, 2)], dropped=1)


@pytest.mark.parametrize("count", [17, 65, 257, 1025])
def test_every_bucket(on, count):
    buffers = [nhd(count, (16,), device=on.device), nhd(count, (5,), device=on.device)]
    tgt = torch.randperm(count)
    src = tgt.roll(1)
    src[::10] = count
    good = [(t, s) for t, s in zip(tgt.tolist(), src.tolist(), strict=True) if s < count]
    _moves(on, buffers, tgt.tolist(), src.tolist(), good, dropped=len(range(0, count, 10)))


def test_beyond_the_register_limit(on, register_limit):
    """Both passes see a pair, one counts it."""
    count = register_limit + 50
    tgt = torch.randperm(count)
    src = tgt.roll(1)
    src[::10], tgt[3] = count, -9
    pairs = zip(tgt.tolist(), src.tolist(), strict=True)
    good = [(t, s) for t, s in pairs if s < count and t >= 0]
    buffers = [nhd(count, (w,), device=on.device) for w in (16, 5)]
    _moves(on, buffers, tgt.tolist(), src.tolist(), good, dropped=count - len(good))


def test_pages(on):
    buffers = [
        page_split(3, 4, (20, 4), padding=8, device=on.device),
        hnd(2, 2, 6, 8, device=on.device),
    ]
    _moves(on, buffers, [11, 12, -5], [0, 1, 2], [(11, 0)], dropped=2)


def test_bad_entries_of_a_mapping(on):
    """Counted once for each kind of mapped rows; rows that are not mapped still move."""
    mapping = on.loc([0, 1, 2, 6, 2**40])
    plain = nhd(8, device=on.device, name="plain")
    narrow = [nhd(6, (w,), device=on.device, mapping=mapping) for w in (16, 20)]
    mover = on.mover(plain, *narrow)
    expected = [oracle.moved(plain, [(1, 3), (2, 1), (4, 2)])]
    expected += [oracle.moved(b, [(2, 1)]) for b in narrow]
    mover.move(on.loc([1, 2, 4]), on.loc([3, 1, 2]))
    for buffer, memory in zip([plain, *narrow], expected, strict=True):
        same_bytes(buffer, memory)
    assert mover.rows_moved == 3 + 2
    assert _dropped(mover) == 2


def test_the_smallest_rows_limit_the_slots(on):
    """A pair that only some buffers have rows for moves in none of them."""
    buffers = [nhd(slots, device=on.device) for slots in (20, 12, 30)]
    _moves(on, buffers, [12, 11, 3, 0], [1, 12, 19, 11], [(0, 11)], dropped=3)


def test_the_smallest_rows_limit_the_slots_of_a_copy(on):
    mine = [nhd(slots, device=on.device) for slots in (9, 20)]
    theirs = [nhd(slots, device=on.device) for slots in (30, 12)]
    expected = [oracle.moved(b, [(8, 11)], s) for b, s in zip(mine, theirs, strict=True)]
    mover = on.mover(*mine)
    mover.copy_from(on.mover(*theirs), on.loc([9, 1, 8]), on.loc([2, 12, 11]))
    for buffer, memory in zip(mine, expected, strict=True):
        same_bytes(buffer, memory)
    assert mover.rows_moved == 2
    assert _dropped(mover) == 2


def test_locs_behind_the_mapping(on):
    mapping = on.loc([0, 1, 2, 5])
    buffer = nhd(6, device=on.device, mapping=mapping)
    _moves(on, [buffer], [1, 2, -3], [4, 3, 1], [(2, 3)], dropped=2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("entries", [3, 20])
def test_accept_entries(on, dtype, entries):
    """Bad entries are dropped one by one: below, beyond, in a neighbour's window."""
    window = torch.arange(24, device=on.device).view(3, 8)
    index = torch.full((3, entries), -1, dtype=torch.int64)
    index[0, :3] = torch.tensor([0, 8, 5])
    index[1, :3] = torch.tensor([7, 10**9, -7])
    index[2, :3] = torch.tensor([16, 23, -(2**31)])
    buffers = [nhd(24, (w,), device=on.device) for w in (16, 3)]
    mover = on.mover(*buffers)
    good = [(2, 5), (17, 23)]
    expected = [oracle.moved(b, good) for b in buffers]
    mover.move_accepted(window, index.to(dtype).to(on.device), on.loc([3, 3, 3], dtype))
    for buffer, memory in zip(buffers, expected, strict=True):
        same_bytes(buffer, memory)
    assert mover.rows_moved == 4
    assert _dropped(mover) == 5


@pytest.mark.parametrize("length", [4, 10**6, -1, -(2**31)])
def test_accept_lengths(on, length):
    """A length that no row can have drops the whole row, and counts once."""
    window = torch.arange(12, device=on.device).view(2, 6)
    buffer = nhd(12, device=on.device)
    expected = oracle.moved(buffer, [(7, 8)])
    mover = on.mover(buffer)
    index = on.loc([[0, 2, 5], [6, 8, -1]])
    mover.move_accepted(window, index, on.loc([length, 2], torch.int32))
    same_bytes(buffer, expected)
    assert _dropped(mover) == 1


def test_accepted_entries_beyond_the_window(on):
    """S > D: an entry without a target is dropped."""
    window = torch.arange(4, device=on.device).view(2, 2)
    buffer = nhd(8, device=on.device)
    expected = oracle.moved(buffer, [(0, 1)])
    mover = on.mover(buffer)
    mover.move_accepted(window, on.loc([[1, -1, 0], [2, -1, -1]]), on.loc([3, 1]))
    same_bytes(buffer, expected)
    assert _dropped(mover) == 1


def test_accepted_slots_outside(on):
    window = on.loc([[0, 1, 99, 3], [4, -2, 6, 7]])
    buffer = nhd(8, device=on.device)
    expected = oracle.moved(buffer, [(1, 3)])
    mover = on.mover(buffer)
    mover.move_accepted(window, on.loc([[0, 3, 1], [4, 6, -1]]), on.loc([3, 2]))
    same_bytes(buffer, expected)
    assert _dropped(mover) == 2


def test_copies(on):
    mine, theirs = nhd(8, device=on.device), nhd(20, device=on.device)
    mover, other = on.mover(mine), on.mover(theirs)
    expected = oracle.moved(mine, [(7, 19), (3, 3)], theirs)
    untouched = theirs.bytes()
    mover.copy_from(other, on.loc([7, 8, 1, 3, -1]), on.loc([19, 1, 20, 3, 4]))
    same_bytes(mine, expected)
    same_bytes(theirs, untouched)
    assert mover.rows_moved == 2
    assert _dropped(mover) == 2
    other.check()


def test_all_bad_moves_nothing(on):
    _moves(on, [nhd(8, device=on.device)], [50, -3], [1, 2], [], dropped=2)
