"""No row is lost in a thousand full cycles; without the barrier rows are, where a race shows."""

import pytest

from specpool.mover import RowMover
from specpool_kernels import launch
from tests.gpu.races import WIDTHS, lost_rows, without_barriers
from tests.moves.places import On

ROWS = [16, 64, 256, 1024, 4096, 6000]


def _size(on, rows, rounds):
    """The interpreter takes milliseconds a program, and has no race to show."""
    return (min(rows, on.size(rows, 64)), rounds if on.device != "cpu" else 3)


@pytest.mark.parametrize("access", WIDTHS)
@pytest.mark.parametrize("rows", ROWS, ids="{}rows".format)
def test_full_cycles(on, rows, access):
    """Every bucket of a move, and the form through scratch."""
    rows, rounds = _size(on, rows, 1000)
    assert lost_rows(on, rows, WIDTHS[access], rounds) == 0


@pytest.mark.parametrize("rows", ROWS[:-1], ids="{}rows".format)
def test_full_cycles_of_a_window(on, rows):
    rows, rounds = _size(on, rows, 1000)
    assert lost_rows(on, rows, WIDTHS["16-byte"], rounds, "accept") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1024, 4096, 6000], ids="{}rows".format)
def test_without_barriers_rows_are_lost(rows, tmp_path, monkeypatch):
    """The rounds above would notice: the same kernels without barriers."""
    monkeypatch.setattr(launch, "move", without_barriers(tmp_path))
    gpu = On("cuda", "triton")
    lost = [lost_rows(gpu, rows, width, 1000) for width in WIDTHS.values()]
    if not any(lost):
        pytest.skip("no race showed on this GPU without barriers: here the cycles prove nothing")


def test_a_lost_row_is_seen(on, monkeypatch):
    """The judge itself: a mover that leaves one pair out."""
    move = RowMover.move
    monkeypatch.setattr(RowMover, "move", lambda self, tgt, src: move(self, tgt[1:], src[1:]))
    assert lost_rows(on, 16, 128, 1) == 1


def test_the_kernels_without_barriers_are_the_kernels(tmp_path):
    triton = pytest.importorskip("triton")
    mutant = without_barriers(tmp_path)
    for name in ("move_rows", "move_accepted", "move_staged"):
        assert isinstance(getattr(mutant, name), triton.runtime.KernelInterface)
    assert "debug_barrier" not in (tmp_path / "move_without_barriers.py").read_text()


def test_the_launcher_takes_its_kernels_from_one_module(on, tmp_path, monkeypatch):
    """So that what replaces the module replaces what is launched."""
    if on.backend != "triton":
        pytest.skip("needs the triton backend: TRITON_INTERPRET=1, or a GPU")
    used = []
    monkeypatch.setattr(launch, "move", Recording(without_barriers(tmp_path), used))
    lost_rows(on, 16, 128, 1)
    assert used == ["move_rows"]


class Recording:
    """A module that says which of its names were asked for."""

    def __init__(self, module, used):
        self._module, self._used = module, used

    def __getattr__(self, name):
        self._used.append(name)
        return getattr(self._module, name)
