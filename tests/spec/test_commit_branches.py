"""Draft branches: each one's pages hold the prefix's tail and its own slots."""

import pytest
import torch

from specpool import RowMover, rows_from
from specpool.allocator import OutOfSlots
from specpool.pools import HiSparseC4DevicePool
from specpool.spec.branches import duplicate_tail
from tests.spec.commit_world import POOLS, World


def test_prefix_7_page_4_topk_8_copies_21_rows():
    """sglang#7725: 3 rows of the partial page, to each branch but the one that has them."""
    world = World(4, "mha", prefixes=[7])
    mover = world.target.mover
    branches = duplicate_tail(world.target, world.allocator, world.table, [0], topk=8, steps=3)
    assert mover.launches == 1
    assert mover.rows_moved == 21 * len(mover.rows)
    assert branches.shape == (1, 8, 3)
    assert branches.dtype == torch.int64
    prefix = world.table.row(0).tolist()
    assert branches[0, 0, 0] == prefix[-1] + 1
    for branch in branches[0].tolist():
        page = branch[0] // 4 * 4
        assert branch[0] == page + 3
        for offset, position in enumerate((4, 5, 6)):
            for part in world.parts[: len(mover.rows) - 1]:
                kv = world.kv(world.history[0][position], part)
                assert torch.equal(world.at(part, page + offset), kv)
    world.allocator.free(branches)
    world.check()


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("page", [1, 4, 16, 64, 128], ids="page{}".format)
def test_ragged_prefixes(page, pool):
    """A branch read by pages is the request's last page and then its own tokens."""
    prefixes = [1, page, page + 1, 2 * page - 1, 5]
    topk, steps = 3, page % 5 + 2
    world = World(page, pool, prefixes, capacity=30 * page + 60)
    before = [part.clone() for part in world.parts]
    rows = [4, 0, 1, 3, 2]
    branches = duplicate_tail(world.target, world.allocator, world.table, rows, topk, steps)
    target_parts = [*world.parts[:-3], world.hidden]  # what is between is the draft's K and V
    copied = set()
    for row, own in zip(rows, branches.tolist(), strict=True):
        ids = world.history[row]
        tail = len(ids) % page
        for branch in own:
            positions = range(len(ids), len(ids) + steps)
            assert [s % page for s in branch] == [p % page for p in positions]
            for back in range(1, tail + 1):
                slot = branch[0] - back
                assert slot // page == branch[0] // page
                for part in target_parts:
                    assert torch.equal(world.at(part, slot), world.kv(ids[-back], part))
                copied.add(slot)
    assert len(branches.unique()) == branches.numel()
    for part, was in zip(world.parts, before, strict=True):
        for slot in set(range(world.allocator.slot_limit)) - copied:
            assert torch.equal(world.at(part, slot), world.at(was, slot))
    assert world.target.mover.launches == (1 if page > 1 else 0)
    world.allocator.free(branches)
    world.check()


def test_a_state_takes_branches_back():
    world = World(4)
    saved = world.allocator.state()
    duplicate_tail(world.draft, world.allocator, world.table, [0, 2], 4, 5)
    world.allocator.restore(saved)
    world.check()


def test_one_branch_or_full_pages_launch_nothing():
    world = World(4, prefixes=[8, 5])
    world.allocator.free(duplicate_tail(world.draft, world.allocator, world.table, [0], 4, 5))
    world.allocator.free(duplicate_tail(world.draft, world.allocator, world.table, [1], 1, 5))
    assert duplicate_tail(world.draft, world.allocator, world.table, [], 4, 5).shape == (0, 4, 5)
    assert world.draft.mover.launches == 0
    world.check()


def test_what_is_refused_takes_no_slot():
    world = World(4)
    small = RowMover(rows_from(torch.zeros(8, 2), name="small"))
    hidden = HiSparseC4DevicePool(28, 4, torch.float8_e4m3fn, 448, 64, 1, "cpu", False)
    hidden.register_mapping(torch.arange(900, 1300))
    for error, match, pool, rows, topk, steps in (
        (ValueError, "row 4 is not in use", world.draft, [0, 4], 2, 2),
        (ValueError, "row -1 is not in use", world.draft, [0, -1], 2, 2),
        (ValueError, "a row is named twice", world.draft, [0, 0], 2, 2),
        (ValueError, "topk must be at least 1", world.draft, [0], 0, 2),
        (ValueError, "small has 8 slots", small, [0], 2, 2),
        (OutOfSlots, "free pages of 4", world.draft, [0], 80, 2),
        (IndexError, "the mapping of", hidden, [0], 2, 2),
    ):
        live = world.allocator.live, world.allocator.available
        with pytest.raises(error, match=match):
            duplicate_tail(pool, world.allocator, world.table, rows, topk, steps)
        assert (world.allocator.live, world.allocator.available) == live
        world.check()
