"""Captured graphs: counts, padding and locs come from the device, at every replay."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from specpool.spec import DraftTree, verify_greedy
from tests import oracle
from tests.gpu.gpu import allocations, captured, other_stream
from tests.moves.places import On, same_bytes
from tests.oracle import hnd, nhd

BS, ENTRIES, WINDOW, SLOTS = 4, 4, 8, 48
GARBAGE = (-7, 10**9, -(2**31), 2**31 - 1)


class Batch:
    """The static tensors of a captured batch, which a replay refreshes."""

    def __init__(self, on: On, loc=torch.int64, index=torch.int32, length=torch.int32) -> None:
        self.on = on
        self.window = on.loc([[0] * WINDOW] * BS, loc)
        self.index = on.loc([[-1] * ENTRIES] * BS, index)
        self.length = on.loc([0] * BS, length)

    def refresh(self, paths: list[list[int]], lengths: list[int] | None = None) -> oracle.Pairs:
        """New windows with these paths of nodes, garbage wherever nothing may be read.

        Returns:
            The pairs that a move of them means.
        """
        window = torch.randperm(SLOTS)[: BS * WINDOW].view(BS, WINDOW)
        index = torch.tensor(GARBAGE).repeat(BS, 1)
        for r, path in enumerate(paths):
            index[r, : len(path)] = torch.tensor(path, dtype=torch.int64) + r * WINDOW
            if not path:
                window[r] = torch.tensor(GARBAGE).repeat(WINDOW // len(GARBAGE))
        given = [len(path) for path in paths]
        pairs = oracle.accepted(window, index, given)
        values = (window, index, torch.tensor(given if lengths is None else lengths))
        for tensor, value in zip((self.window, self.index, self.length), values, strict=True):
            tensor.copy_(value)
        return pairs

    def move_with(self, mover: RowMover):
        return lambda: mover.move_accepted(self.window, self.index, self.length)


def _buffers(on):
    return [
        nhd(SLOTS, (40,), device=on.device, name="key"),
        nhd(SLOTS, (3,), torch.bfloat16, device=on.device, name="value"),
        hnd(SLOTS // 4, 2, 4, 8, device=on.device, name="index"),
    ]


def _replayed(replay, buffers, pairs):
    """Replay once; every byte must be the oracle's."""
    expected = [oracle.moved(b, pairs) for b in buffers]
    replay()
    for buffer, memory in zip(buffers, expected, strict=True):
        same_bytes(buffer, memory)


def _capture(on, batch, buffers):
    mover = on.mover(*buffers)
    mover.reserve(BS * ENTRIES)
    before = [b.bytes() for b in buffers]
    replay = captured(on, batch.move_with(mover))
    for buffer, memory in zip(buffers, before, strict=True):
        same_bytes(buffer, memory)  # a capture moves nothing
    return mover, replay


PATHS = {
    "ragged": [[0, 2, 5], [0], [], [0, 1, 4, 7]],
    "full": [[0, 2, 5, 6], [0, 3, 4, 7], [0, 1, 2, 3], [0, 5, 6, 7]],
    "nothing": [[], [], [], []],
    "smaller": [[0, 7], [], [], []],
    "roots": [[0], [0], [0], [0]],
}


def test_counts_and_padding_change_between_replays(on):
    """sglang#10892, #31364: a smaller real batch; vllm#43810: padded rows full of garbage."""
    batch, buffers = Batch(on), _buffers(on)
    mover, replay = _capture(on, batch, buffers)
    for name in (*PATHS, *reversed(PATHS)):
        _replayed(replay, buffers, batch.refresh(PATHS[name]))
    mover.check()


def test_a_length_of_minus_1_moves_nothing_and_is_counted(on):
    """No engine means a length by it: its row is dropped, the others move."""
    batch, buffers = Batch(on), _buffers(on)
    mover, replay = _capture(on, batch, buffers)
    pairs = batch.refresh([[0, 3], [], [0, 2, 6], []], [2, -1, 3, 0])
    for _ in range(2):
        _replayed(replay, buffers, pairs)
    with pytest.raises(IndexError, match="2 pairs named slots outside"):
        mover.check()


def test_bad_entries_are_dropped_and_counted_at_every_replay(on):
    batch, buffers = Batch(on), _buffers(on)
    mover, replay = _capture(on, batch, buffers)
    batch.refresh([[0, 3, 5], [], [], []])
    batch.index[0, 1] = WINDOW
    window = batch.window[0].tolist()
    for _ in range(3):
        _replayed(replay, buffers, [(window[2], window[5])])
    with pytest.raises(IndexError, match="3 pairs named slots outside"):
        mover.check()


@pytest.mark.parametrize("loc", [torch.int32, torch.int64], ids=str)
def test_integer_types(on, loc):
    """A reserve has compiled what is captured, whichever integers the locs are."""
    batch, buffers = Batch(on, loc=loc), _buffers(on)[:1]
    _, replay = _capture(on, batch, buffers)
    _replayed(replay, buffers, batch.refresh(PATHS["ragged"]))


def test_plain_moves(on):
    """A move of pairs has a fixed count; -1 pads it."""
    buffers = _buffers(on)
    mover = on.mover(*buffers)
    mover.reserve(6)
    tgt, src = on.loc([-1] * 6), on.loc([-1] * 6, torch.int32)
    replay = captured(on, lambda: mover.move(tgt, src))
    for count in (6, 0, 2, 5):
        tgt.fill_(-1)
        tgt[:count] = torch.randperm(SLOTS)[:count]
        src.copy_(torch.randperm(SLOTS)[:6])
        _replayed(replay, buffers, oracle.given(tgt, src))
    mover.check()


def test_copies(on):
    mine, theirs = (nhd(SLOTS, (40,), device=on.device) for _ in range(2))
    mover, other = on.mover(mine), on.mover(theirs)
    tgt, src = on.loc([1, 2]), on.loc([3, -1])
    mover.reserve(2)
    mover.copy_from(other, tgt, src)  # it builds the table that the graph holds on to
    replay = captured(on, lambda: mover.copy_from(other, tgt, src))
    tgt.copy_(on.loc([5, 9]))
    src.copy_(on.loc([11, 5]))
    expected = oracle.moved(mine, [(5, 11), (9, 5)], theirs)
    replay()
    same_bytes(mine, expected)


def test_mapped_rows(on):
    """The mapping's entries are the device's as well."""
    mapping = on.loc([0, *range(1, SLOTS)])
    buffer = nhd(SLOTS, (40,), device=on.device, mapping=mapping)
    mover = on.mover(buffer)
    mover.reserve(2)
    tgt, src = on.loc([1, 2]), on.loc([3, 4])
    replay = captured(on, lambda: mover.move(tgt, src))
    for first in (20, 0, 9):
        mapping[1], mapping[3] = first, 30
        _replayed(replay, [buffer], [(1, 3), (2, 4)])


def test_more_pairs_than_registers_hold(on, register_limit):
    """Graphs use the scratch that was reserved, and allocate none of their own."""
    count = register_limit + 50
    buffer = nhd(count + 1, (16,), device=on.device)
    mover = on.mover(buffer)
    mover.reserve(count)
    places = torch.arange(count, device=on.device)
    later = places + 1

    def move():
        before = allocations(on)
        mover.move(places, later)
        assert allocations(on) == before

    replay = captured(on, move)
    for _ in range(3):
        _replayed(replay, [buffer], oracle.given(places, later))


def test_graphs_and_calls_of_one_mover_follow_each_other(on, register_limit):
    """They share its table and counters, on any stream."""
    count = register_limit + 50
    buffer = nhd(count + 1, (16,), device=on.device)
    mover = on.mover(buffer)
    mover.reserve(count)
    low = torch.arange(count, device=on.device)
    high = low + 1
    down = captured(on, lambda: mover.move(low, high))
    up = captured(on, lambda: mover.move(high, low))
    for replay, tgt, src in ((down, low, high), (up, high, low), (down, low, high)):
        pairs = oracle.given(tgt, src)
        _replayed(replay, [buffer], pairs)
        on.move_with(mover, [buffer], [0, 5, 9], [5, 9, 0])
        with other_stream(on):
            on.move_with(mover, [buffer], src, tgt)
            _replayed(replay, [buffer], pairs)
        _replayed(replay, [buffer], pairs)


CHAINS = [[[5, 6, 7], [5, 8]], [[9]], [[3, 4], [5, 4], [6, 4]]]
VOCAB = 12


def test_verification_and_move_in_one_graph(on):
    """Nothing runs between the two: the graph goes from logits to moved rows."""
    logits = torch.zeros(3, WINDOW, VOCAB, device=on.device)
    drafted = DraftTree.from_chains([1, 2, 3], CHAINS, WINDOW, device=on.device)
    buffers = _buffers(on)
    mover = on.mover(*buffers)
    mover.reserve(3 * WINDOW)
    window = torch.randperm(SLOTS)[: 3 * WINDOW].view(3, WINDOW)
    window, windows = window.to(on.device), window.tolist()

    def step():
        tree = DraftTree(drafted.tokens, drafted.parents, drafted.sizes, drafted.steps)
        accept = verify_greedy(tree, logits)
        mover.move_accepted(window, accept.accept_index, accept.accept_len)

    step()  # what PyTorch itself must have done once before a capture
    replay = captured(on, step)
    tokens, parents = drafted.tokens.tolist(), drafted.parents.tolist()
    for wanted in ([[5, 6, 7], [9], [6, 4]], [[5, 8], [], [3]], [[], [9], [5, 4]]):
        pairs, table = [], torch.zeros(3, WINDOW, VOCAB)
        for r, follows in enumerate(wanted):
            node, path = 0, [0]
            for token in follows:
                table[r, node, token] = 1
                children = [n for n, parent in enumerate(parents[r]) if parent == node]
                node = next(n for n in children if tokens[r][n] == token)
                path.append(node)
            table[r, node, VOCAB - 1] = 1  # nobody drafted this one
            pairs += [(windows[r][j], windows[r][n]) for j, n in enumerate(path)]
        logits.copy_(table)
        _replayed(replay, buffers, pairs)
    mover.check()


@pytest.mark.gpu
def test_a_captured_mover_keeps_its_rows_and_its_scratch():
    key = torch.arange(48.0, device="cuda").view(12, 4)
    mover = RowMover(rows_from(key))
    graph = torch.cuda.CUDAGraph()
    places = torch.arange(3, device="cuda")
    with pytest.raises(RuntimeError, match="but 0 are reserved"), torch.cuda.graph(graph):
        mover.move(places, places)
    mover.reserve(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mover.move(places, places)
    for change in (
        lambda: mover.reserve(4),
        lambda: mover.attach("more", torch.zeros(12, device="cuda")),
        lambda: mover.replace_rows(rows_from(key.clone())),
    ):
        with pytest.raises(RuntimeError, match="captured"):
            change()


@pytest.mark.gpu
def test_a_validated_mover_counts_during_a_capture(monkeypatch):
    """Values cannot be read then; outside of it they are judged as ever."""
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    key = torch.arange(48.0, device="cuda").view(12, 4)
    mover = RowMover(rows_from(key))
    mover.reserve(2)
    tgt, src = torch.tensor([0, 1], device="cuda"), torch.tensor([5, 12], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mover.move(tgt, src)
    graph.replay()
    assert key[:2, 0].tolist() == [20, 4]
    with pytest.raises(IndexError, match="1 pairs named slots outside"):
        mover.check()
    with pytest.raises(IndexError, match="src_loc holds slot 12"):
        mover.move(tgt, src)
