import importlib.util

import pytest
import torch

from specpool import RowMover, backends, rows_from


def test_what_a_backend_does_not_serve(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert backends.why_not("cpu", cpu) is None
    assert backends.why_not("torch", torch.device("meta")) is None
    assert "not cuda" in backends.why_not("cpu", cuda)
    assert "not cpu" in backends.why_not("triton", cpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in backends.why_not("triton", cuda)


def test_what_was_reserved_is_reserved_for_rows_attached_later(monkeypatch):
    """Else the first call after ``attach`` would allocate and compile."""
    reserved = []

    class Recording:
        def __init__(self, *args):
            pass

        def reserve(self, pairs):
            reserved.append(pairs)

    monkeypatch.setattr("specpool.mover.build_backend", lambda *args: Recording())
    mover = RowMover(rows_from(torch.zeros(4, 2)))
    mover.reserve(7)
    mover.attach("more", torch.zeros(4))
    assert reserved == [7, 7]


def test_shrunk_memory_is_noticed_where_values_are_read():
    rows = torch.zeros(64, 4)
    mover = RowMover(rows_from(rows), backend="torch")
    mover.move(torch.tensor([0]), torch.tensor([1]))
    rows.untyped_storage().resize_(63 * 16)
    if rows.data_ptr() == mover._addresses[0]:
        with pytest.raises(RuntimeError, match="freed or shrunk to 1008 bytes"):
            mover.move(torch.tensor([0]), torch.tensor([63]))
    else:  # the allocator moved it: the other check sees that
        with pytest.raises(RuntimeError, match="freed or shrunk"):
            mover.move(torch.tensor([0]), torch.tensor([1]))
