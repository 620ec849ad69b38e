"""What every test shares: one thread a process, quiet hypothesis settings, skips for no GPU."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("suite", deadline=None, print_blob=True)
hypothesis.settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA or HIP device, and there is none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def no_specpool_settings(monkeypatch):
    """A test that wants one of specpool's environment variables sets it itself."""
    for name in ("SPECPOOL_BACKEND", "SPECPOOL_CHECK"):
        monkeypatch.delenv(name, raising=False)
