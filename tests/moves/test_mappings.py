"""Rows behind a mapping: `mapping[loc]` is the slot, 0 or less means that there is none."""

import pytest
import torch

from specpool.mover import RowMover
from tests.moves.conftest import same_bytes
from tests.oracle import hnd, moved, nhd, page_split


def _mapping(on, locs: int, slots: int, dead: int) -> torch.Tensor:
    """A random mapping onto slots 1 to ``slots - 1`` without repeats; ``dead`` entries are 0."""
    mapping = torch.zeros(locs, dtype=torch.int64)
    alive = torch.randperm(locs)[: min(locs - dead, slots - 1)]
    mapping[alive] = torch.randperm(slots - 1)[: len(alive)] + 1
    return mapping.to(on.device)


def test_both_locs_are_translated(on):
    """By hand, without the oracle."""
    mapping = on.loc([0, 5, 4, 1, 0, 2])
    buffer = nhd(6, (16,), device=on.device, mapping=mapping)
    was = [buffer.row(slot) for slot in range(6)]
    mover = on.mover(buffer)
    mover.move(on.loc([1, 3, 4, 2]), on.loc([3, 1, 2, 4]))
    was[5], was[1] = was[1], was[5]
    assert [buffer.row(slot) for slot in range(6)] == was
    assert mover.rows_moved == 2


@pytest.mark.parametrize("locs", [12, 40])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "page_split"])
def test_mapped_layouts(on, layout, locs):
    mapping = _mapping(on, locs, 12, dead=3)
    make = {
        "nhd": lambda: nhd(12, (20,), device=on.device, mapping=mapping),
        "hnd": lambda: hnd(3, 2, 4, 8, device=on.device, mapping=mapping),
        "page_split": lambda: page_split(
            2, 6, (24, 4), padding=4, device=on.device, mapping=mapping
        ),
    }
    tgt = torch.randperm(locs, device=on.device)
    on.move(make[layout](), tgt, tgt.roll(1))


@pytest.mark.parametrize("dead", [0, -1, -(2**40)])
def test_entries_of_0_or_less_skip_their_pair(on, dead):
    buffer = nhd(6, device=on.device, mapping=on.loc([dead, 1, dead, 3, 4]))
    on.move(buffer, [0, 1, 2, 3], [1, 2, 2, 4])


def test_slot_0_behind_a_mapping_never_moves(on):
    """A plain buffer moves slot 0; behind a mapping an entry of 0 means freed."""
    mapped = nhd(4, device=on.device, mapping=on.loc([0, 1, 2, 3]), name="mapped")
    plain = nhd(4, device=on.device, name="plain")
    mover = on.move([mapped, plain], [0, 2], [1, 0])
    assert mover.rows_moved == 2


def test_different_mappings_in_one_launch(on):
    """Sub-pools differ in size and in what is live: each skips by its own mapping."""
    first, second = _mapping(on, 20, 8, dead=10), _mapping(on, 20, 14, dead=4)
    buffers = [
        nhd(20, (16,), device=on.device, name="full"),
        nhd(8, (16,), device=on.device, mapping=first, name="first"),
        nhd(8, (24,), device=on.device, mapping=first, name="first too"),
        nhd(14, (16,), device=on.device, mapping=second, name="second"),
        page_split(2, 7, (5, 2), device=on.device, mapping=second),
    ]
    tgt = torch.randperm(20, device=on.device)
    mover = on.move(buffers, tgt, tgt.roll(1))
    assert mover.launches == 1


def test_same_mapping_over_pools_of_different_size(on):
    mapping = _mapping(on, 10, 6, dead=2)
    buffers = [nhd(slots, device=on.device, mapping=mapping) for slots in (6, 30)]
    tgt = torch.randperm(10, device=on.device)
    on.move(buffers, tgt, tgt.roll(1))


def test_a_mapping_changed_in_place_is_honoured(on):
    mapping = on.loc([0, 1, 2, 3, 4])
    buffer = nhd(6, device=on.device, mapping=mapping)
    mover = on.mover(buffer)
    on.move_with(mover, [buffer], [1], [2])
    mapping.copy_(on.loc([0, 5, 3, 0, 1]))
    on.move_with(mover, [buffer], [1, 3, 4], [2, 1, 1])


def test_a_mapping_given_other_memory_is_followed(on):
    """The entries were replaced as a whole: neither the old ones nor freed memory are read."""
    mapping = on.loc([0, 1, 2, 3, 4])
    buffer = nhd(6, device=on.device, mapping=mapping)
    mover = on.mover(buffer)
    on.move_with(mover, [buffer], [1], [2])
    mapping.set_(on.loc([0, 5, 3, 0, 1]))
    on.move_with(mover, [buffer], [1, 3, 4], [2, 1, 1])


def test_a_mapping_that_was_freed_is_refused(on):
    mapping = on.loc([0, 1, 2, 3, 4])
    buffer = nhd(6, device=on.device, mapping=mapping)
    mover = on.mover(buffer)
    before = buffer.bytes()
    mapping.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="mapping"):
        mover.move(on.loc([1]), on.loc([2]))
    same_bytes(buffer, before)


def test_identity_behind_a_mapping(on):
    """Two locs of one slot: nothing to move, nothing to count."""
    buffer = nhd(6, device=on.device, mapping=on.loc([0, 3, 3, 4]))
    mover = on.move(buffer, [1, 2], [2, 1])
    assert mover.rows_moved == 0


def test_mapped_rows_beyond_the_register_limit(on, register_limit):
    count = register_limit + 77
    mapping = _mapping(on, count, count // 2, dead=count // 5)
    buffer = nhd(count // 2, (4,), device=on.device, mapping=mapping)
    tgt = torch.randperm(count, device=on.device)
    on.move(buffer, tgt, tgt.roll(1))


def test_accept_behind_a_mapping(on):
    mapping = _mapping(on, 24, 20, dead=6)
    buffers = [nhd(24, device=on.device), nhd(20, device=on.device, mapping=mapping)]
    window = torch.randperm(24, device=on.device).view(3, 8)
    index = on.loc([[0, 2, 5], [8, 12, 15], [16, 17, 23]], torch.int32)
    on.accept(buffers, window, index, on.loc([3, 2, 3], torch.int32))


def test_bad_entries_raise_before_anything_moves(checked):
    """An entry at or beyond the rows is judged behind the mapping, for every set of rows."""
    on = checked
    mapping = on.loc([0, 1, 2, 6])
    buffers = [nhd(8, device=on.device, name="full"), nhd(6, device=on.device, mapping=mapping)]
    mover = on.mover(*buffers)
    before = [b.bytes() for b in buffers]
    for tgt, src in (([1, 2], [3, 1]), ([1, 3], [2, 1])):
        with pytest.raises(IndexError, match="mapping of buffer holds slot 6"):
            mover.move(on.loc(tgt), on.loc(src))
    with pytest.raises(IndexError, match=r"slot 4; slots lie in \[0, 4\)"):
        mover.move(on.loc([1, 2]), on.loc([4, 1]))
    for buffer, expected in zip(buffers, before, strict=True):
        same_bytes(buffer, expected)


def test_locs_beyond_int32_slots(on):
    """Locs index the mapping, which may be longer than the rows."""
    mapping = torch.zeros(1000, dtype=torch.int64, device=on.device)
    mapping[990], mapping[999] = 2, 4
    buffer = nhd(6, device=on.device, mapping=mapping)
    expected = moved(buffer, [(990, 999)])
    RowMover(buffer.rows(), backend=on.backend).move(on.loc([990]), on.loc([999]))
    same_bytes(buffer, expected)
