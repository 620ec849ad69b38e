"""The order of a program's accesses: loads of rows, a barrier, stores of rows.

Results cannot show a missing barrier, since the interpreter runs a program's threads as one. So
its accesses to the pool's memory and its barriers are recorded. (That the compiled code keeps
this order is for tests/aot to show.)
"""

from itertools import groupby

import pytest
import torch

from tests.moves.conftest import INTERPRETED
from tests.oracle import hnd, nhd

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="records Triton's interpreter")


@pytest.fixture
def programs(monkeypatch):
    """Calls a move; returns each program's accesses: L, B and S, repeats as one letter."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    builder = interpreter.InterpreterBuilder
    spans, seen = [], []

    def recorded(name, letter):
        original = getattr(builder, name)

        def access(self, pointers, *args):
            mask = args[1] if letter == "S" else args[0]
            places = pointers.data[mask.data.astype(bool)]
            if any(((places >= low) & (places < high)).any() for low, high in spans):
                seen[-1] += letter
            return original(self, pointers, *args)

        monkeypatch.setattr(builder, name, access)

    recorded("create_masked_load", "L")
    recorded("create_masked_store", "S")
    begin = builder.set_grid_idx
    monkeypatch.setattr(builder, "set_grid_idx", lambda *a: (seen.append(""), begin(*a))[1])
    barrier = lambda self: seen.__setitem__(-1, seen[-1] + "B")  # noqa: E731
    monkeypatch.setattr(builder, "create_barrier", barrier)

    def record(buffers, call):
        memories = [b.memory for b in buffers]
        spans[:] = [(m.data_ptr(), m.data_ptr() + m.numel()) for m in memories]
        seen.clear()
        call()
        return ["".join(letter for letter, _ in groupby(program)) for program in seen]

    return record


def _buffers(on, slots):
    """All three access classes, with pages and several chunks a block."""
    return [
        nhd(slots, (1100,), device=on.device),
        nhd(slots, (4,), torch.float32, device=on.device),
        hnd(slots // 4, 2, 4, 5, device=on.device),
    ]


@pytest.mark.parametrize("count", [12, 60, 200, 1000, 2000])
def test_moves_load_then_wait_then_store(on, programs, count):
    buffers = _buffers(on, count) if count < 1000 else _buffers(on, count)[1:]
    mover = on.mover(*buffers)
    places = torch.arange(count, device=on.device)
    orders = programs(buffers, lambda: mover.move(places, places.roll(1)))
    assert "LBS" in orders
    assert set(orders) <= {"LBS", "B"}


@pytest.mark.parametrize("entries", [4, 20])
def test_accepts_load_then_wait_then_store(on, programs, entries):
    buffers = _buffers(on, 4 * (entries + 2))
    mover = on.mover(*buffers)
    window = torch.randperm(3 * (entries + 1), device=on.device).view(3, -1)
    index = torch.arange(3)[:, None] * (entries + 1) + torch.arange(1, entries + 1)
    length = on.loc([entries] * 3)
    orders = programs(buffers, lambda: mover.move_accepted(window, index.to(on.device), length))
    assert "LBS" in orders
    assert set(orders) <= {"LBS", "B"}


def test_moves_through_scratch_wait_after_every_pass(on, programs, register_limit):
    """A program's next tile neither reads scratch too early nor overwrites it too early."""
    count = register_limit + 36
    buffers = _buffers(on, count)
    mover = on.mover(*buffers)
    places = torch.arange(count, device=on.device)
    orders = programs(buffers, lambda: mover.move(places, places.roll(1)))
    assert any(order.count("LBSB") > 1 for order in orders)
    assert all(not order.replace("LBSB", "").strip("B") for order in orders)


def test_programs_share_no_scratch(on, monkeypatch, register_limit):
    """Here one program runs after another; on a GPU they would overwrite each other's rows."""
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    count = register_limit + 36
    buffers = _buffers(on, count)
    mover = on.mover(*buffers)
    mover.reserve(count)
    moves = mover._service.moves
    scratch = moves._scratch[moves._stream()]
    used, store, begin = [], builder.create_masked_store, builder.set_grid_idx

    def recorded(self, pointers, value, mask, *args):
        places = pointers.data[mask.data.astype(bool)].astype("int64") - scratch.data_ptr()
        used[-1].update(places[(places >= 0) & (places < scratch.numel())].tolist())
        return store(self, pointers, value, mask, *args)

    monkeypatch.setattr(builder, "create_masked_store", recorded)
    monkeypatch.setattr(builder, "set_grid_idx", lambda *a: (used.append(set()), begin(*a))[1])
    places = torch.arange(count, device=on.device)
    mover.move(places, places.roll(1))
    assert len([program for program in used if program]) > 1
    assert len(set().union(*used)) == sum(map(len, used))
