import importlib.util
import os
from pathlib import Path

import pytest

from specpool_kernels import aot, move


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("compiling needs a process without TRITON_INTERPRET")


@pytest.fixture
def without_barrier(monkeypatch, tmp_path):
    """The kernels with every barrier taken out."""
    source = Path(move.__file__).read_text()
    assert source.count("tl.debug_barrier()") == 2
    mutant = tmp_path / "move_without_barrier.py"
    mutant.write_text(source.replace("tl.debug_barrier()", "pass"))
    spec = importlib.util.spec_from_file_location(mutant.stem, mutant)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(aot, "move", module)
