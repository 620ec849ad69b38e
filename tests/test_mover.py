"""RowMover's own part: which backend serves, what is attached, and what stays after a refusal."""

import doctest
import importlib.util
import subprocess
import sys

import pytest
import torch

from specpool import mover as mover_module
from specpool.backends import backend_for
from specpool.mover import RowMover
from specpool.rows import rows_from

TGT, SRC = torch.tensor([0]), torch.tensor([2])


def _tensor(first: int = 0, width: int = 4) -> torch.Tensor:
    return torch.arange(first, first + 6 * width, dtype=torch.float32).view(6, width)


def test_backends_by_device():
    assert backend_for("cpu")[0] == "cpu"
    assert backend_for(torch.device("cuda:1"))[0] == "triton"
    for device in ("xpu", "mps", "meta"):
        backend, why = backend_for(device)
        assert backend == "torch"
        assert device in why


def test_cuda_without_triton_is_served_by_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backend, why = backend_for("cuda")
    assert backend == "torch"
    assert "pip install triton" in why


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_environment_chooses_a_backend(monkeypatch, backend):
    monkeypatch.setenv("SPECPOOL_BACKEND", backend)
    assert backend_for("cpu") == (backend, "SPECPOOL_BACKEND says so")
    assert RowMover(rows_from(_tensor())).backend == backend


def test_the_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("SPECPOOL_BACKEND", "torch")
    assert RowMover(rows_from(_tensor()), backend="cpu").backend == "cpu"


def test_an_empty_environment_variable_chooses_nothing(monkeypatch):
    monkeypatch.setenv("SPECPOOL_BACKEND", "")
    assert RowMover(rows_from(_tensor())).backend == "cpu"


def test_unknown_backends_are_refused_by_name(monkeypatch):
    message = "unknown backend 'numpy'; backends are cpu, torch, triton"
    with pytest.raises(ValueError, match=message):
        RowMover(rows_from(_tensor()), backend="numpy")
    with pytest.raises(ValueError, match=message):
        RowMover([], backend="numpy")
    monkeypatch.setenv("SPECPOOL_BACKEND", "numpy")
    with pytest.raises(ValueError, match="SPECPOOL_BACKEND is 'numpy'; unset it, or make it one"):
        RowMover(rows_from(_tensor()))


def test_triton_without_a_gpu_says_what_it_serves():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match=r"triton backend serves CUDA.*not cpu.*TRITON_INTERPRET"):
        RowMover(rows_from(_tensor()), backend="triton")


def test_the_cpu_backend_serves_cpu_tensors_alone():
    with pytest.raises(ValueError, match="cpu backend serves CPU tensors, not meta"):
        RowMover(rows_from(torch.zeros(4, 4, device="meta")), backend="cpu")


def test_kernels_are_imported_only_when_a_mover_needs_them():
    """PyTorch may import Triton for itself; the product's own Triton code stays out."""
    code = (
        "import sys, torch; sys.path[:0] = ['.', 'kernels']\n"
        "from specpool import RowMover, rows_from\n"
        "for backend in (None, 'torch'):\n"
        "    mover = RowMover(rows_from(torch.zeros(4, 4)), backend=backend)\n"
        "    mover.move(torch.tensor([0]), torch.tensor([1]))\n"
        "print({'specpool_kernels.launch', 'specpool_kernels.move'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True)
    assert done.stdout.strip() == "set()"


def test_a_mover_without_rows_moves_and_launches_nothing():
    mover = RowMover([])
    mover.reserve(100)
    mover.move(TGT, SRC)
    mover.move_accepted(torch.zeros(1, 4, dtype=torch.int64), SRC[None], TGT)
    mover.copy_from(RowMover([]), TGT, SRC)
    mover.check()
    assert (mover.launches, mover.rows_moved) == (0, 0)
    assert (mover.device, mover.backend, mover.rows) == (None, None, ())


def test_a_mover_that_loses_its_rows():
    mover = RowMover(rows_from(_tensor()))
    mover.replace_rows([])
    mover.move(TGT, SRC)
    assert (mover.device, mover.backend, mover.launches) == (None, None, 0)


def test_what_a_mover_says_of_itself():
    rows = rows_from(_tensor(), name="key")
    mover = RowMover(rows)
    assert mover.rows == tuple(rows)
    assert mover.device == torch.device("cpu")
    assert mover.backend == "cpu"


def test_attached_tensors_move_in_the_same_launch():
    key, experts = _tensor(), _tensor(100, 3)
    mover = RowMover(rows_from(key))
    mover.attach("experts", experts)
    mover.move(TGT, SRC)
    assert key[0].tolist() == [8, 9, 10, 11]
    assert experts[0].tolist() == [106, 107, 108]
    assert (mover.launches, mover.rows_moved) == (1, 2)
    assert [r.name for r in mover.rows] == ["tensor", "experts"]


def test_attach_takes_every_layout_and_a_mapping():
    split = torch.arange(2 * 9, dtype=torch.uint8).view(2, 9)
    mapping = torch.tensor([0, 1, 3, 0, 0, 0])
    mover = RowMover(rows_from(_tensor()))
    mover.attach("scales", split, "page_split", page_size=2, widths=(3, 1), mapping=mapping)
    mover.move(torch.tensor([1]), torch.tensor([2]))
    assert split.tolist() == [[0, 1, 2, 12, 13, 14, 6, 16, 8], [*range(9, 18)]]


def test_attaching_a_name_again_replaces_its_tensor():
    first, second = _tensor(100), _tensor(200)
    mover = RowMover(rows_from(_tensor()))
    mover.attach("experts", first)
    mover.attach("experts", second)
    mover.move(TGT, SRC)
    assert first[0, 0] == 100
    assert second[0, 0] == 208


def test_attach_to_a_mover_without_rows():
    tensor = _tensor()
    mover = RowMover([])
    mover.attach("experts", tensor)
    mover.move(TGT, SRC)
    assert tensor[0, 0] == 8


def test_detached_tensors_stay():
    key, experts = _tensor(), _tensor(100)
    mover = RowMover(rows_from(key))
    mover.attach("experts", experts)
    mover.detach("experts")
    mover.move(TGT, SRC)
    assert key[0, 0] == 8
    assert experts[0, 0] == 100


def test_detaching_an_unknown_name_is_refused():
    mover = RowMover(rows_from(_tensor()))
    mover.attach("experts", _tensor(100))
    with pytest.raises(KeyError, match="no tensor is attached as 'expert'; attached: experts"):
        mover.detach("expert")


def test_replaced_rows_keep_what_is_attached_and_counted():
    old, new, experts = _tensor(), _tensor(50), _tensor(100)
    mover = RowMover(rows_from(old))
    mover.attach("experts", experts)
    mover.move(TGT, SRC)
    mover.replace_rows(rows_from(new))
    mover.move(torch.tensor([1]), SRC)
    assert old[1, 0] == 4
    assert new[1, 0] == 58
    assert experts[1, 0] == 108
    assert (mover.launches, mover.rows_moved) == (2, 4)


def test_a_refused_attach_leaves_the_mover_as_it_was():
    key = _tensor()
    mover = RowMover(rows_from(key, name="key"))
    with pytest.raises(ValueError, match="key and again share memory"):
        mover.attach("again", key[3:])
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); a mover serves one"):
        mover.attach("far", torch.zeros(6, 4, device="meta"))
    with pytest.raises(ValueError, match="layouts are nhd, hnd, page_split"):
        mover.attach("odd", _tensor(), "nhdc")
    with pytest.raises(ValueError, match="share memory"):
        mover.replace_rows(rows_from(key) + rows_from(key))
    assert [r.name for r in mover.rows] == ["key"]
    mover.move(TGT, SRC)
    assert key[0, 0] == 8


def test_rows_on_several_devices_are_refused():
    rows = rows_from(_tensor()) + rows_from(torch.zeros(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\); a mover serves one"):
        RowMover(rows)


@pytest.mark.parametrize("pairs", [0, -1])
def test_reserve_needs_pairs(pairs):
    with pytest.raises(ValueError, match=f"reserve needs at least 1 pair, got {pairs}"):
        RowMover(rows_from(_tensor())).reserve(pairs)


def test_check_without_bad_slots_says_nothing():
    mover = RowMover(rows_from(_tensor()))
    mover.check()
    mover.move(TGT, SRC)
    mover.check()


def test_the_example_in_the_documentation():
    assert doctest.testmod(mover_module) == (0, 4)
