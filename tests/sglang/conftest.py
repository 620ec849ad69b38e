"""Tests in the real SGLang, on a CPU: `make test-sglang` installs it and runs them.

Elsewhere every file here is reported as skipped, and with SPECPOOL_REQUIRE_SGLANG=1, which the make
target sets, a missing SGLang is an error. No test loads the plugin into pytest's own process, so
SGLang's classes are as they are installed there; `engines` has processes with the plugin.
"""

import os
from importlib.metadata import PackageNotFoundError, version

import pytest

REASON = "needs SGLang: make test-sglang"


def _missing() -> bool:
    try:
        version("sglang")
    except PackageNotFoundError:
        return True
    return os.environ.get("TRITON_INTERPRET") != "1"


MISSING = _missing()
if MISSING and os.environ.get("SPECPOOL_REQUIRE_SGLANG") == "1":
    raise RuntimeError("SGLang is not installed, or TRITON_INTERPRET is not 1: make test-sglang")


class Skipped(pytest.Module):
    """A file that is not imported."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return Skipped.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(autouse=True)
def no_sglang_settings(monkeypatch):
    """A test that wants one of the plugin's variables sets it itself."""
    for name in [name for name in os.environ if name.startswith("SPECPOOL_SGLANG")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def without():
    """A process of SGLang that has no plugin."""
    from tests.sglang.engines import Engine

    with Engine(plugins=False) as engine:
        yield engine


@pytest.fixture(scope="session")
def default():
    """A process that loaded its plugins, with nothing configured."""
    from tests.sglang.engines import Engine

    with Engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def everything():
    """A process that loaded its plugins with SPECPOOL_SGLANG=all."""
    from tests.sglang.engines import Engine

    with Engine(SPECPOOL_SGLANG="all") as engine:
        yield engine
