"""Both ways of committing keep exactly the accepted path's KV, and lose no slot."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specpool import RowMover, rows_from
from specpool.allocator import SlotAllocator
from specpool.pools import HiSparseC4DevicePool
from specpool.request_table import RequestTable
from specpool.spec.commit import HostAccept, commit, read_together
from tests.spec.commit_world import POOLS, World

PAGES = pytest.mark.parametrize("page", [1, 4, 16, 64, 128], ids="page{}".format)
KINDS = pytest.mark.parametrize("pool", POOLS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_path_0_2_5_by_hand(device):
    """Window 10..17: remap names slots 10, 12 and 15; move brings their rows to 10, 11, 12."""
    index, length = (torch.tensor(v, device=device) for v in ([[0, 2, 5, -1]], [3]))
    for mode, slots, rows in (("remap", [10, 12, 15], [10, 11, 12]), ("move", [10, 11, 12], None)):
        buffer = torch.arange(20.0, device=device)
        mover = RowMover(rows_from(buffer))
        allocator, table = SlotAllocator(19, device), RequestTable(1, 20, device)
        (row,) = table.alloc()
        table.append(row, allocator.alloc(9))
        window = allocator.alloc(8)
        result = commit([mover], allocator, table, [row], window, index, length, mode)
        assert result.mode == mode
        assert result.kept.tolist() == slots
        assert result.freed.tolist() == sorted({*range(10, 18)} - {*slots})
        assert result.accept_len == [3]
        assert table.row(row).tolist() == [*range(1, 10), *slots]
        assert buffer[table.row(row).long()][-3:].tolist() == [10.0, 12.0, 15.0]
        assert buffer[10:13].tolist() == (rows or [10.0, 12.0, 15.0])
        assert allocator.live == 12


@KINDS
@pytest.mark.parametrize(
    ("mode", "page"),
    [("remap", 1), ("move", 1), *(("auto", page) for page in (1, 4, 16, 64, 128)), ("move", 16)],
)
def test_many_steps(mode, page, pool):
    """Ragged lengths, padding rows, a request beside the batch; batch rows in any order."""
    world = World(page, pool)
    for step in range(6):
        rows = [*world.random.sample(sorted(world.history), 2), -1]
        world.random.shuffle(rows)
        paths = [world.path(world.window) if row >= 0 else [] for row in rows]
        result = world.commit(rows, paths, mode)
        world.check()
        assert result.accept_len == [len(p) for p in paths]
        assert len(result.kept) == sum(map(len, paths))
        assert len(result.freed) == 2 * world.window - len(result.kept)
        assert result.mode == {"auto": "remap" if page == 1 else "move"}.get(mode, mode)
        if step == 3:
            world.leave(rows[0] if rows[0] >= 0 else rows[1])
            world.join(world.random.randrange(1, 2 * page + 4))
            world.check()


@given(
    page=st.sampled_from([1, 2, 3, 16]),
    pool=st.sampled_from(sorted(POOLS)),
    move=st.booleans(),
    seed=st.integers(0, 2**20),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    prefixes=st.lists(st.integers(1, 7), min_size=4, max_size=4),
)
@settings(max_examples=60)
def test_trees_of_any_size(page, pool, move, seed, sizes, prefixes):
    """Windows padded with -1 behind the nodes of a smaller tree; size 0 is a padding row."""
    world = World(page, pool, prefixes, window=6, capacity=80, seed=seed)
    for _ in range(2):
        rows = [row if size else -1 for row, size in enumerate(sizes)]
        paths = [world.path(size) if size else [] for size in sizes]
        world.commit(rows, paths, "move" if move else "auto", sizes)
        world.check()


@pytest.mark.parametrize("pool", ["mha", "minimax"])
def test_remap_and_move_give_the_same_logical_kv(pool):
    rows, paths = [2, -1, 0], [[0, 2, 5], [], [0, 1, 6, 7]]
    read = {}
    for mode in ("remap", "move"):
        world = World(1, pool)
        world.commit(rows, paths, mode)
        world.check()
        slots = [world.table.row(row).tolist() for row in sorted(world.history)]
        read[mode] = [
            world.at(part, slot).tolist() for part in world.parts for row in slots for slot in row
        ]
        read[mode, "slots"] = slots
    assert read["remap"] == read["move"]
    assert read["remap", "slots"] != read["move", "slots"]


@PAGES
def test_every_other_byte_stays(page):
    """Only rows of the batch's window fronts may change, and with remap none at all."""
    for mode in ("move", "remap") if page == 1 else ("move",):
        world = World(page, "minimax")
        loc, _ = world.draft_step([1, 0])
        index, length = world.accept([[0, 3, 4], [0, 7]], entries=5)
        before = [part.clone() for part in world.parts]
        given = (world.allocator, world.table, [1, 0], loc, index, length)
        commit(world.pools, *given, mode)
        changed = {int(s) for s in (*loc[0, 1:3], loc[1, 1])} if mode == "move" else set()
        for part, was in zip(world.parts, before, strict=True):
            for slot in range(world.allocator.slot_limit):
                same = torch.equal(world.at(part, slot), world.at(was, slot))
                assert same or slot in changed


def test_one_launch_each_and_none_where_nothing_relocates():
    world = World(4, "minimax")
    movers = [pool.mover for pool in world.pools]
    for path, launches in (([0, 2], 1), ([0, 1, 2], 1), ([0], 1), ([0, 1, 5], 2)):
        world.commit([0, 1], [path, [0]])
        world.check()
        assert [m.launches for m in movers] == [launches] * 2
    world = World(1, "minimax")
    world.commit([0, 1], [[0, 2], [0, 7]], "remap", pools=[])
    world.check()
    assert [pool.mover.launches for pool in world.pools] == [0, 0]


def test_all_padding_and_no_rows_do_nothing():
    for page in (1, 4):
        world = World(page)
        before = world.snapshot()
        for rows in ([-1, -1], []):
            loc, _ = world.draft_step(rows)
            index, length = world.accept([[] for _ in rows], 4)
            given = (world.allocator, world.table, rows, loc, index, length)
            result = commit(world.pools, *given)
            assert (result.kept.tolist(), result.freed.tolist()) == ([], [])
            assert result.accept_len == [0] * len(rows)
        assert all(map(torch.equal, before, world.snapshot()))


@pytest.mark.parametrize("page", [1, 4], ids="page{}".format)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_flat_windows_of_either_dtype(dtype, page):
    world = World(page)
    loc, nodes = world.draft_step([1, 2])
    index, length = world.accept([[0, 4], [0, 2, 3]], 3, dtype)
    for row, r, path in ((1, 0, [0, 4]), (2, 1, [0, 2, 3])):
        world.history[row] += [nodes[r][n] for n in path]
    given = (world.allocator, world.table, torch.tensor([1, 2]), loc.to(dtype).flatten())
    commit(world.pools, *given, index, length)
    world.check()


def test_more_entries_than_nodes_and_fewer():
    """An n-gram verifier gives S = D, EAGLE S = steps + 1."""
    for entries in (2, 8, 12):
        world = World(1)
        world.commit([0], [[0, 6]], entries=entries)
        world.check()


def test_a_whole_window_may_be_accepted():
    for page in (1, 4):
        world = World(page)
        result = world.commit([2, 0], [list(range(8)), [0]])
        world.check()
        assert len(result.freed) == 7


def test_values_that_were_read_already_are_not_read_again():
    world = World(1)
    loc, nodes = world.draft_step([0])
    index, length = world.accept([[0, 3]], 2)
    world.history[0] += [nodes[0][0], nodes[0][3]]
    meta = [t.to("meta") for t in (loc, index, length)]  # reading one of these raises
    host = HostAccept(*read_together(loc, index, length))
    given = (world.allocator, world.table, [0], *meta)
    commit([], *given, host=host)
    world.check()


def test_a_pool_behind_a_mapping():
    """Slots are those of the table; what lies behind a mapping is the mover's."""
    mapping = torch.zeros(20, dtype=torch.int64)
    mapping[1:17] = torch.arange(27, 11, -1)
    pool = HiSparseC4DevicePool(28, 4, torch.float8_e4m3fn, 448, 64, 1, "cpu", False)
    pool.register_mapping(mapping)
    payload = pool.kv_buffer[0][:, : 4 * 576].unflatten(1, (4, 576))
    payload.copy_(torch.arange(payload.shape[0] * 4).view(-1, 4, 1).expand_as(payload))
    allocator, table = SlotAllocator(16, "cpu"), RequestTable(1, 20, "cpu")
    (row,) = table.alloc()
    window = allocator.alloc(6)
    index, length = torch.tensor([[0, 4]]), torch.tensor([2])
    commit([pool], allocator, table, [row], window, index, length, "move")
    after = payload[..., 0].flatten()
    assert after[mapping[table.row(row).long()]].tolist() == mapping[window[[0, 4]]].tolist()


# Each fault is one that a public engine had, or the obvious slip; the oracle notices all of them.


def _lose_rejected(world, monkeypatch):
    monkeypatch.setattr(world.allocator, "free", lambda slots: None)


def _free_accepted(world, monkeypatch):
    free = world.allocator.free
    kept = []
    append = world.table.append
    monkeypatch.setattr(world.allocator, "free", lambda slots: kept.append(slots))
    monkeypatch.setattr(
        world.table,
        "append",
        lambda rows, slots, counts: (append(rows, slots, counts), free(slots)),
    )


def _lose_one_length(world, monkeypatch):
    append = world.table.append

    def short(rows, slots, counts):
        append(rows, slots, counts)
        world.table.lengths[rows[0]] -= 1

    monkeypatch.setattr(world.table, "append", short)


def _leave_the_draft_s_pool(world, monkeypatch):
    """EAGLE#336."""
    world.pools.pop()


def _leave_what_is_attached(world, monkeypatch):
    """sglang#37949."""
    world.target.mover.detach("hidden states")


def _move_nothing(world, monkeypatch):
    monkeypatch.setattr(world.target, "move_accepted", lambda *given: None)


def _move_in_ascending_pairs_only(world, monkeypatch):
    """The last accepted entry of every row stays behind: an off-by-one length."""
    move = world.target.move_accepted
    monkeypatch.setattr(
        world.target, "move_accepted", lambda loc, index, length: move(loc, index, length - 1)
    )


FAULTS = [
    _lose_rejected,
    _free_accepted,
    _lose_one_length,
    _leave_the_draft_s_pool,
    _leave_what_is_attached,
    _move_nothing,
    _move_in_ascending_pairs_only,
]


@pytest.mark.parametrize("page", [1, 4], ids="page{}".format)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__.strip("_"))
def test_planted_faults_are_noticed(fault, page, monkeypatch):
    world = World(page)
    fault(world, monkeypatch)
    world.commit([0, 1], [[0, 2, 5], [0, 3]], "move")
    with pytest.raises((AssertionError, ValueError)):
        world.check()
