"""Copies between two movers' rows: the target side changes, the source side never."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests import oracle
from tests.moves.conftest import same_bytes
from tests.oracle import hnd, nhd, page_split


def _copy(on, mine, theirs, tgt, src):
    """Copy, and compare every byte of both sides."""
    mine, theirs = ([b] if isinstance(b, oracle.Buffer) else b for b in (mine, theirs))
    tgt, src = (s if isinstance(s, torch.Tensor) else on.loc(s) for s in (tgt, src))
    pairs = oracle.given(tgt, src)
    expected = [oracle.moved(b, pairs, s) for b, s in zip(mine, theirs, strict=True)]
    untouched = [b.bytes() for b in theirs]
    mover, other = on.mover(*mine), on.mover(*theirs)
    mover.copy_from(other, tgt, src)
    for buffer, memory in zip([*mine, *theirs], [*expected, *untouched], strict=True):
        same_bytes(buffer, memory)
    live = sum(len(oracle.behind(pairs, b, s)) for b, s in zip(mine, theirs, strict=True))
    assert (mover.launches, mover.rows_moved) == (1, live)
    assert (other.launches, other.rows_moved) == (0, 0)
    return mover, other


CASES = {
    "one": ([3], [9]),
    "same_slots": ([0, 1, 2, 5], [0, 1, 2, 5]),
    "permutation": (range(12), [*range(1, 12), 0]),
    "one_to_many": ([1, 4, 5], [7, 7, 7]),
    "skips": ([1, -1, 5], [-1, 7, 11]),
    "all_skipped": ([-1, 3], [2, -1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [7, 12, 64, 300], ids="{}B".format)
def test_copies(on, case, width):
    """Equal slot numbers are no identity here: the row comes from elsewhere."""
    tgt, src = CASES[case]
    mine, theirs = (nhd(12, (width,), device=on.device) for _ in range(2))
    _copy(on, mine, theirs, list(tgt), list(src))


def test_pools_of_different_sizes_strides_and_layouts(on):
    mine = [
        nhd(9, (16,), gap=3, device=on.device),
        page_split(2, 5, (8, 4), padding=4, device=on.device),
        nhd(30, (6,), torch.bfloat16, device=on.device),
    ]
    theirs = [
        nhd(50, (4,), torch.float32, lead=oracle.GUARD + 4, device=on.device),
        page_split(20, 3, (8, 4), device=on.device),
        nhd(40, (12,), gap=1, device=on.device),
    ]
    _copy(on, mine, theirs, [0, 8, 3, 4], [39, 0, 3, 22])
    _copy(on, theirs, mine, [39, 0, 3, 22], [0, 8, 3, 4])


def test_head_major_from_flat_heads(on):
    mine = hnd(3, 2, 4, 8, device=on.device)
    theirs = [nhd(20, (8,), device=on.device) for _ in range(2)]
    tgt, src = on.loc([0, 5, 11, 2]), on.loc([19, 2, 7, 0])
    expected = mine.bytes()
    for head, source in enumerate(theirs):
        for t, s in zip(tgt.tolist(), src.tolist(), strict=True):
            start = int(mine.starts[head](t))
            expected[start : start + 8] = source.row(s)
    on.mover(mine).copy_from(on.mover(*theirs), tgt, src)
    same_bytes(mine, expected)


def test_mappings_of_both_sides(on):
    mine = nhd(8, device=on.device, mapping=on.loc([0, 7, 2, 0, 1, 3]))
    theirs = nhd(6, device=on.device, mapping=on.loc([5, 0, 2, 1]))
    _copy(on, mine, theirs, [1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 2, 0])
    plain = nhd(8, device=on.device)
    _copy(on, plain, theirs, [0, 1, 2], [0, 1, 2])
    _copy(on, theirs, plain, [0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize("count", [17, 65, 300, 4097])
def test_many_pairs(on, count):
    """A copy may be split anywhere: its sides share no byte."""
    count = min(count, on.size(count, 300))
    mine, theirs = (nhd(count, (20,), device=on.device) for _ in range(2))
    _copy(on, mine, theirs, torch.randperm(count, device=on.device), on.loc([3]).expand(count))


def test_strided_locs(on):
    mine, theirs = (nhd(40, (20,), device=on.device) for _ in range(2))
    locs = torch.randperm(40, device=on.device).view(5, 8)
    _copy(on, mine, theirs, locs[:, ::2], locs.t()[::2].t())


def test_attached_tensors_are_copied_too(on):
    mine, theirs, mine_too, theirs_too = (nhd(8, device=on.device) for _ in range(4))
    mover, other = on.mover(mine), on.mover(theirs)
    mover.attach("experts", mine_too.tensor)
    other.attach("experts", theirs_too.tensor)
    mover.copy_from(other, on.loc([1]), on.loc([6]))
    assert mine.row(1) == theirs.row(6)
    assert mine_too.row(1) == theirs_too.row(6)
    assert mover.launches == 1


def test_a_source_that_changed_its_rows_is_followed(on):
    mine, theirs, later = (nhd(8, device=on.device) for _ in range(3))
    mover, other = on.mover(mine), on.mover(theirs)
    mover.copy_from(other, on.loc([1]), on.loc([6]))
    other.replace_rows(later.rows())
    mover.copy_from(other, on.loc([2]), on.loc([6]))
    assert mine.row(1) == theirs.row(6)
    assert mine.row(2) == later.row(6)


@pytest.mark.parametrize("side", ["mine", "theirs"])
def test_replaced_memory_is_followed(on, side):
    mine, theirs, later = (nhd(8, device=on.device) for _ in range(3))
    mover, other = on.mover(mine), on.mover(theirs)
    mover.copy_from(other, on.loc([1]), on.loc([6]))
    if side == "mine":
        mine.tensor.set_(later.tensor)
        mover.copy_from(other, on.loc([2]), on.loc([6]))
        assert later.row(2) == theirs.row(6)
    else:
        theirs.tensor.set_(later.tensor)
        mover.copy_from(other, on.loc([2]), on.loc([6]))
        assert mine.row(2) == later.row(6)


def test_empty_copies_launch_nothing(on):
    mine, theirs = (nhd(8, device=on.device) for _ in range(2))
    mover = on.mover(mine)
    none = torch.empty(0, dtype=torch.int64, device=on.device)
    mover.copy_from(on.mover(theirs), none, none)
    assert mover.launches == 0


def _refused(on, mine, theirs, tgt, src, error, match):
    memories = [b.bytes() for b in (mine, theirs)]
    mover = on.mover(mine)
    other = mover if theirs is mine else on.mover(theirs)
    with pytest.raises(error, match=match):
        mover.copy_from(other, tgt, src)
    for buffer, memory in zip((mine, theirs), memories, strict=True):
        same_bytes(buffer, memory)
    assert mover.launches == 0


def test_other_widths_are_refused(on):
    mine, theirs = nhd(8, (16,), device=on.device), nhd(8, (20,), device=on.device)
    _refused(on, mine, theirs, on.loc([1]), on.loc([2]), ValueError, "of 16 bytes here, 1 of 20")


def test_another_number_of_rows_is_refused(on):
    mine, theirs = nhd(8, (8,), device=on.device), hnd(2, 2, 4, 8, device=on.device)
    _refused(
        on, mine, theirs, on.loc([1]), on.loc([2]), ValueError, "1 rows of 8 bytes here, 2 of 8"
    )
    with pytest.raises(ValueError, match="1 rows of 8 bytes here, 0 of"):
        on.mover(mine).copy_from(RowMover([]), on.loc([1]), on.loc([2]))


def test_itself_is_refused(on):
    mine = nhd(8, device=on.device)
    _refused(on, mine, mine, on.loc([1]), on.loc([2]), ValueError, "share memory")


def test_sharing_memory_is_refused(on):
    mine = nhd(8, device=on.device)
    before = mine.bytes()
    other = RowMover(rows_from(mine.tensor[4:], name="tail"), backend=on.backend)
    with pytest.raises(ValueError, match="buffer and tail share memory"):
        on.mover(mine).copy_from(other, on.loc([1]), on.loc([2]))
    same_bytes(mine, before)


def test_counts_that_differ_are_refused(on):
    mine, theirs = (nhd(8, device=on.device) for _ in range(2))
    _refused(on, mine, theirs, on.loc([1, 2]), on.loc([2]), ValueError, "has 2 locs and src_loc 1")


def test_bad_slots_of_either_side_are_refused(checked):
    """The sides differ in size: each loc is judged by its own side's rows."""
    on = checked
    mine, theirs = nhd(8, device=on.device), nhd(20, device=on.device)
    _refused(on, mine, theirs, on.loc([8]), on.loc([2]), IndexError, r"tgt_loc holds slot 8.*0, 8")
    _refused(on, mine, theirs, on.loc([7]), on.loc([20]), IndexError, r"src_loc holds slot 20")
    same = [on.loc([1, 1]), on.loc([2, 3])]
    _refused(on, mine, theirs, *same, ValueError, "target 1 is given with sources 2 and 3")
    _copy(on, mine, theirs, [7], [19])
