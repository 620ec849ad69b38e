"""The watch over dropped pairs, with a GPU's asynchrony played by hand."""

import logging

import pytest
import torch

from specpool.adapters.sglang import watch


class Mover:
    """A mover on a GPU that has dropped ``dropped`` pairs."""

    device = torch.device("cuda:0")
    dropped = 0

    def copy_dropped(self, count):
        count.fill_(self.dropped)


class Event:
    arrived = False

    def record(self):
        pass

    def query(self):
        return Event.arrived


@pytest.fixture
def mover(monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(watch, "is_capturing", lambda device: False)
    monkeypatch.setattr(watch, "on_device", lambda device: torch.inference_mode(False))
    monkeypatch.setattr(watch.torch.cuda, "Event", Event)
    monkeypatch.setattr(watch.torch, "zeros", lambda *a, pin_memory, **k: zeros(*a, **k))
    monkeypatch.setattr(Event, "arrived", False)
    return Mover()


def look(dropped, times):
    for _ in range(times):
        dropped.look()


def test_dropped_pairs_are_an_error_once_their_count_has_arrived(mover, caplog):
    dropped = watch.DroppedPairs(mover)
    mover.dropped = 3
    look(dropped, 2 * watch.EVERY)
    assert not caplog.records  # sent for, not there yet
    Event.arrived = True
    look(dropped, 1)
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "3 pairs" in caplog.text
    look(dropped, 3 * watch.EVERY)
    assert len(caplog.records) == 1  # the same count is no news
    mover.dropped = 5
    look(dropped, 3 * watch.EVERY)
    assert "2 pairs" in caplog.text


def test_nothing_dropped_is_not_mentioned(mover, caplog):
    Event.arrived = True
    look(watch.DroppedPairs(mover), 3 * watch.EVERY)
    assert not caplog.records


def test_nothing_is_looked_at_during_a_capture(mover, monkeypatch, caplog):
    monkeypatch.setattr(watch, "is_capturing", lambda device: True)
    Event.arrived, mover.dropped = True, 3
    look(watch.DroppedPairs(mover), 3 * watch.EVERY)
    assert not caplog.records
