"""compute-sanitizer finds nothing: no access outside an allocation, no hazard in shared memory."""

import shutil

import pytest

from tests.gpu import programs
from tests.gpu.exercise import exercise

FOUND = 86
"""The exit status that the sanitizer is asked for when it finds something."""
# every tensor an allocation of its own, or an access beside one would hit another
OWN_ALLOCATIONS = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_what_the_sanitizer_watches(on):
    exercise(on)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    words = (sanitizer, "--tool", tool, "--error-exitcode", str(FOUND))
    done = programs.run("tests.gpu.exercise", *words, seconds=900, **OWN_ALLOCATIONS)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "moved" in done.stdout
