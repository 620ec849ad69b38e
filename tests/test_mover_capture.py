"""Calls inside a captured graph: what must be reserved before, what is refused after.

The rules need no GPU: here a capture is only claimed. tests/gpu captures real graphs.
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
