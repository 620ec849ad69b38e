"""Each worker has its own GPU, and ``-m gpu -n auto`` starts as many workers as there are GPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.workers import EVERY, every_gpu, needs_gpus, pin, visibility

CUDA, HIP = visibility(False), visibility(True)


def _not_asked():
    raise AssertionError("a worker need not count")


def _worker(number, gpus, hip=False, **environment):
    """The environment of a worker, as its conftest leaves it."""
    environment |= {EVERY: ",".join(gpus), "PYTEST_XDIST_WORKER": f"gw{number}"}
    pin(environment, hip, every_gpu(environment, hip, _not_asked))
    return environment


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
def test_gpus_are_counted_once_and_handed_on(hip):
    environment = {}
    assert every_gpu(environment, hip, lambda: 3) == ["0", "1", "2"]
    assert every_gpu(environment, hip, _not_asked) == ["0", "1", "2"]
    assert environment == {EVERY: "0,1,2"}


def test_no_gpu_is_no_name():
    assert every_gpu({}, False, lambda: 0) == []
    environment = {CUDA: ""}
    assert every_gpu(environment, False, lambda: 0) == []
    assert every_gpu(environment, False, _not_asked) == []


@pytest.mark.parametrize("names", ["2,5", "GPU-1a2b,GPU-3c4d", "MIG-a,MIG-b"])
def test_gpus_that_were_chosen_are_all_there_are(names):
    assert every_gpu({CUDA: names}, False, lambda: 2) == names.split(",")


def test_names_behind_an_invalid_one_are_not_visible():
    """CUDA stops at the first name that it does not know; the count says how many it took."""
    assert every_gpu({CUDA: "3,-1,4"}, False, lambda: 1) == ["3"]


def test_hip_listens_to_its_own_variable_first():
    assert every_gpu({HIP: "4,6", CUDA: "0"}, True, lambda: 2) == ["4", "6"]
    assert every_gpu({CUDA: "1,3"}, True, lambda: 2) == ["1", "3"]
    assert every_gpu({HIP: "4,6", CUDA: "2"}, False, lambda: 1) == ["2"]


@pytest.mark.parametrize("hip", [False, True], ids=["cuda", "hip"])
def test_each_worker_sees_its_own(hip):
    seen = [_worker(n, ["2", "5", "7"], hip)[visibility(hip)] for n in range(3)]
    assert seen == ["2", "5", "7"]


def test_more_workers_than_gpus_share_them():
    assert [_worker(n, ["0", "1"])[CUDA] for n in range(5)] == ["0", "1", "0", "1", "0"]
    assert [_worker(n, ["GPU-1a2b"])[CUDA] for n in range(3)] == ["GPU-1a2b"] * 3


def test_a_worker_s_own_choice_is_replaced_by_its_share():
    """It inherited what the first process saw."""
    assert _worker(1, ["2", "5"], **{CUDA: "2,5"})[CUDA] == "5"


def test_without_a_gpu_or_a_worker_nothing_is_set():
    assert CUDA not in _worker(0, [])
    environment = {}
    pin(environment, False, ["0", "1"])
    assert environment == {}


@pytest.mark.parametrize(
    ("markexpr", "wanted"),
    [
        ("gpu", True),
        ("gpu and not slow", True),
        ("not slow and gpu", True),
        ("not gpu", False),
        ("slow and not gpu", False),
        ("not  gpu", False),
        ("slow", False),
        ("gpus", False),
        ("", False),
    ],
)
def test_which_selections_need_gpus(markexpr, wanted):
    assert needs_gpus(markexpr) == wanted


FILES = {
    "conftest.py": "from tests.conftest import *",
    "torch.py": """
from types import SimpleNamespace
cuda = SimpleNamespace(device_count=lambda: 2, is_available=lambda: True)
version = SimpleNamespace(hip=None)
set_num_threads = print
""",
    "test_where.py": """
import os
import pytest

@pytest.mark.gpu
def test_where():
    with open("seen", "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], os.environ["CUDA_VISIBLE_DEVICES"], file=file)
""",
}


@pytest.mark.parametrize(
    ("visible", "seen"),
    [(None, {"gw0 0", "gw1 1"}), ("7,GPU-1a2b,3", {"gw0 7", "gw1 GPU-1a2b"})],
)
def test_workers_of_a_real_run(tmp_path, visible, seen):
    """The suite's own conftest under pytest-xdist; only torch is another, which sees two GPUs."""
    pytest.importorskip("xdist")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "CUDA_"))}
    kept.pop(EVERY, None)
    root = str(Path(__file__).parents[2])
    kept |= {"PYTHONPATH": os.pathsep.join((".", root)), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    kept |= {} if visible is None else {CUDA: visible}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-n", "auto", "--dist", "each", "-m", "gpu", "."],
        cwd=tmp_path,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set((tmp_path / "seen").read_text().splitlines()) == seen
