"""What every test shares: one thread and one GPU a process, quiet hypothesis settings, skips."""

import functools
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests.gpu import workers

HIP = bool(torch.version.hip)
# before any test is imported, so before anything initialises CUDA
GPUS = workers.every_gpu(os.environ, HIP, torch.cuda.device_count)
workers.pin(os.environ, HIP, GPUS)
torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """As many workers as GPUs, where tests that need one are asked for; else xdist's own number."""
    return max(1, len(GPUS)) if workers.needs_gpus(config.option.markexpr) else None


@functools.cache
def _gpu_is_here() -> bool:
    return torch.cuda.is_available()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Here and not by a mark, so that one line of the report says it for all."""
    if item.get_closest_marker("gpu") and not _gpu_is_here():
        pytest.skip("needs a CUDA or HIP device, and there is none")


@pytest.fixture(autouse=True)
def no_specpool_settings(monkeypatch):
    """A test that wants one of specpool's environment variables sets it itself."""
    for name in ("SPECPOOL_BACKEND", "SPECPOOL_CHECK"):
        monkeypatch.delenv(name, raising=False)
