"""Calls inside a captured graph: what must be reserved before, what is refused after.

The rules need no GPU: here a capture is only claimed. The last tests capture real graphs.
"""

import pytest
import torch

from specpool import mover as mover_module
from specpool.mover import RowMover
from specpool.rows import rows_from


@pytest.fixture
def capturing(monkeypatch):
    """A switch that makes the mover believe that a graph is being captured."""
    state = {"on": False}
    monkeypatch.setattr(mover_module, "is_capturing", lambda device: state["on"])

    def switch(on: bool = True) -> None:
        state["on"] = on

    return switch


def _mover(backend="cpu"):
    key = torch.arange(48.0).view(12, 4)
    return key, RowMover(rows_from(key), backend=backend)


PAIRS = torch.tensor([0, 1]), torch.tensor([5, 0])


def test_a_capture_needs_a_reserve(capturing):
    key, mover = _mover()
    capturing()
    with pytest.raises(RuntimeError, match=r"of 2 pairs .* but 0 are reserved; call reserve\(2\)"):
        mover.move(*PAIRS)
    assert key[0, 0] == 0
    mover.attach("experts", torch.zeros(12))  # nothing was captured yet


def test_a_larger_call_than_reserved_is_refused(capturing):
    _, mover = _mover()
    mover.reserve(2)
    capturing()
    mover.move(*PAIRS)
    with pytest.raises(RuntimeError, match=r"of 3 pairs .* but 2 are reserved; call reserve\(3\)"):
        mover.move(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    window, length = torch.arange(8).view(2, 4), torch.tensor([1, 1])
    with pytest.raises(RuntimeError, match="of 4 pairs"):
        mover.move_accepted(window, torch.tensor([[0, 1], [4, 5]]), length)


def test_a_reserve_after_a_capture_grows_nothing(capturing):
    """The graph holds on to its scratch: an equal reserve keeps it, a larger one is refused."""
    _, mover = _mover()
    mover.reserve(2)
    capturing()
    mover.move(*PAIRS)
    capturing(False)
    mover.reserve(2)
    mover.reserve(1)
    with pytest.raises(RuntimeError, match="captured with 2 pairs reserved"):
        mover.reserve(3)


def test_outside_a_capture_any_size_goes(capturing):
    key, mover = _mover()
    mover.reserve(1)
    mover.move(*PAIRS)
    assert key[0, 0] == 20


def test_a_smaller_reserve_takes_nothing_away(capturing):
    _, mover = _mover()
    mover.reserve(8)
    mover.reserve(1)
    capturing()
    mover.move(*PAIRS)


def test_what_was_reserved_holds_for_rows_that_come_later(capturing):
    _, mover = _mover()
    mover.reserve(2)
    experts = torch.arange(12.0)
    mover.attach("experts", experts)
    capturing()
    mover.move(*PAIRS)
    assert experts[0] == 5


@pytest.mark.parametrize("still", [True, False], ids=["during", "after"])
def test_rows_stay_once_captured(capturing, still):
    """A graph holds on to the table: another one would leave it with stale addresses."""
    key, mover = _mover()
    mover.attach("experts", torch.zeros(12))
    mover.reserve(2)
    capturing()
    mover.move(*PAIRS)
    capturing(still)
    for change in (
        lambda: mover.attach("more", torch.zeros(12)),
        lambda: mover.detach("experts"),
        lambda: mover.replace_rows(rows_from(key.clone())),
    ):
        with pytest.raises(RuntimeError, match="captured into a graph, which holds on to its rows"):
            change()
    assert [r.name for r in mover.rows] == ["tensor", "experts"]


def test_replaced_memory_is_refused_once_captured(capturing):
    key, mover = _mover()
    mover.reserve(2)
    capturing()
    mover.move(*PAIRS)
    capturing(False)
    key.set_(key.clone())
    with pytest.raises(RuntimeError, match="captured into a graph"):
        mover.move(*PAIRS)


def test_values_are_not_read_during_a_capture(capturing, monkeypatch):
    """That would synchronise: a bad pair is dropped and counted instead."""
    key, mover = _mover("torch")
    mover.reserve(2)
    capturing()
    mover.move(torch.tensor([0, 1]), torch.tensor([5, 12]))
    assert key[:2, 0].tolist() == [20, 4]
    capturing(False)
    with pytest.raises(IndexError, match="1 pairs named slots outside"):
        mover.check()
    with pytest.raises(IndexError, match="src_loc holds slot 12"):
        mover.move(torch.tensor([0, 1]), torch.tensor([5, 12]))


def test_copies_under_capture_need_one_before(capturing):
    _, mover = _mover()
    key, other = _mover()
    key += 100
    mover.reserve(2)
    capturing()
    with pytest.raises(RuntimeError, match="copy once between these movers before the capture"):
        mover.copy_from(other, *PAIRS)
    capturing(False)
    mover.copy_from(other, *PAIRS)
    capturing()
    mover.copy_from(other, *PAIRS)
    with pytest.raises(RuntimeError, match="captured into a graph"):
        mover.attach("more", torch.zeros(12))


@pytest.mark.gpu
def test_a_graph_replays_with_new_locs():
    """Counts, padding and locs come from the device at every replay."""
    key = torch.arange(48.0, device="cuda").view(12, 4)
    mover = RowMover(rows_from(key))
    mover.reserve(4)
    window = torch.arange(4, 8, device="cuda")
    index = torch.tensor([[0, 2, -1]], dtype=torch.int32, device="cuda")
    length = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mover.move_accepted(window, index, length)
    graph.replay()
    torch.cuda.synchronize()
    assert key[:, 0].tolist() == [4.0 * slot for slot in range(12)]
    length.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert key[5, 0] == 24
    index[0, 1] = 3
    graph.replay()
    torch.cuda.synchronize()
    assert key[5, 0] == 28


@pytest.mark.gpu
def test_graphs_of_many_pairs_use_reserved_scratch():
    count = 5000
    key = torch.arange(count + 1, device="cuda")
    mover = RowMover(rows_from(key))
    mover.reserve(count)
    places = torch.arange(count, device="cuda")
    memory = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mover.move(places, places + 1)
    for replay in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert key[0] == replay + 1
    assert torch.cuda.memory_allocated() - memory < 2**20


@pytest.mark.gpu
def test_validated_calls_move_nothing_when_they_raise(monkeypatch):
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    key = torch.arange(48.0, device="cuda").view(12, 4)
    mover = RowMover(rows_from(key))
    with pytest.raises(IndexError, match="src_loc holds slot 12"):
        mover.move(torch.tensor([0, 1], device="cuda"), torch.tensor([5, 12], device="cuda"))
    assert key[0, 0] == 0
    mover.check()


@pytest.mark.gpu
def test_moves_follow_the_current_stream():
    key = torch.zeros(1 << 20, 64, device="cuda")
    mover = RowMover(rows_from(key))
    mover.reserve(1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(20):
            key.fill_(step)
            key[5] = 100 + step
            mover.move(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([5]).cuda())
    stream.synchronize()
    assert key[0, 0] == 119
    assert key[1, 0] == 19
