"""``benchmarks/gpu_check.sh``: its exit status, with a Python that only says what it was asked."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = r"""#!/bin/sh
echo "$@" >> "$OUT/asked"
case "$*" in
    "-m pytest"*) exit "$TESTS" ;;
    *benchmarks.move*) exit "$MOVE" ;;
    *is_available*) exit "$NO_GPU" ;;
    *"import pytest"*) exit "$NO_PYTEST" ;;
    *"pip install"*) exit 1 ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Run the script; its exit status, what it printed, and what its Python was asked."""
    if shutil.which("bash") is None or shutil.which("timeout") is None:
        pytest.skip("needs bash and coreutils' timeout")
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    out = tmp_path / "results"

    def run(**settings):
        answers = {"TESTS": "0", "MOVE": "0", "NO_GPU": "0", "NO_PYTEST": "0"}
        answers |= {"WORKERS": "3", "DEVICE": "cuda"}
        done = subprocess.run(
            [str(ROOT / "benchmarks" / "gpu_check.sh")],
            env={**os.environ, **answers, "OUT": str(out), "PYTHON": str(python), **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout, (out / "asked").read_text()

    return run


def test_all_is_well(check, tmp_path):
    status, shown, asked = check()
    assert status == 0, shown
    assert [line.split()[0] for line in shown.splitlines()[:-1]][-4:] == [
        "tests",
        "move",
        "scaling",
        "launch",
    ]
    out = tmp_path / "results"
    assert f"--junitxml {out}/tests.xml -m gpu and not slow tests/gpu tests/moves" in asked
    assert "-n 3 --dist loadfile" in asked
    for name in ("move", "scaling", "launch"):
        assert f"-m benchmarks.{name} --device cuda --quick --out {out}/{name}.json" in asked
        assert (out / f"{name}.log").exists()
    assert len((out / "summary.txt").read_text().splitlines()) == 4


@pytest.mark.parametrize("failing", ["TESTS", "MOVE"])
def test_a_failure_is_the_exit_status_and_the_rest_still_runs(check, failing):
    status, shown, asked = check(**{failing: "3"})
    assert status == 1
    assert "FAILED (3)" in shown
    assert "benchmarks.launch" in asked


def test_no_gpu_is_no_success(check):
    status, shown, asked = check(NO_GPU="1")
    assert status == 2
    assert "no GPU" in shown
    assert "benchmarks" not in asked


def test_without_a_gpu_the_steps_run_on_a_cpu_when_asked(check):
    status, _, asked = check(NO_GPU="1", DEVICE="cpu")
    assert status == 0
    assert "-m not gpu and not slow tests/gpu" in asked
    assert "benchmarks.move --device cpu" in asked


def test_without_pytest_a_program_checks_instead(check, tmp_path):
    status, shown, asked = check(NO_PYTEST="1")
    assert status == 0, shown
    assert f"--target {tmp_path}/results/python pytest pytest-xdist hypothesis" in asked
    assert "could not be fetched" in shown
    assert "-m tests.gpu.exercise cuda" in asked
    assert "-m pytest" not in asked
