import importlib.util
import os
from pathlib import Path

import pytest

from specpool_kernels import move, plan


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise pytest.UsageError("compiling needs a process without TRITON_INTERPRET")


@pytest.fixture
def mutant(tmp_path):
    """The kernels with one thing changed: a module, given what stands there once and what then."""

    def build(old, new):
        source = Path(move.__file__).read_text()
        assert source.count(old) == 1, f"{source.count(old)} times in the kernels: {old!r}"
        path = tmp_path / f"mutant_{abs(hash((old, new)))}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return build


def key_id(value):
    """A test's name for a key."""
    if not isinstance(value, plan.Key):
        return None
    flags = "".join(f"-{name}" for name in ("paged", "mapped", "copy") if getattr(value, name))
    locs = "".join(t[1:] for t in value.locs)
    return f"{value.variant.kernel}-{value.variant.rows}-classes{value.classes}{flags}-{locs}"
