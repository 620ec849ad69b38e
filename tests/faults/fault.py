"""What a planted fault is, and how it gets into a copy of the tree."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

ROOT = Path(__file__).parents[2]
TREES = ("specpool", "kernels", "tests")
NOTICED = ("AssertionError", "Failed", "ExceptionGroup")
"""What a test that notices raises: ``Failed`` is pytest's, the group hypothesis'."""


@dataclass(frozen=True)
class Fault:
    """One mistake.

    Attributes:
        name: what is wrong.
        file: where, from the root of the tree.
        was: source that occurs exactly once in the file.
        becomes: what takes its place.
        test: a quick one that must catch it, as pytest's node id.
        error: the exception that it must fail with, where it sees the product refuse what is
            right; None is one of ``NOTICED``.
    """

    name: str
    file: str
    was: str
    becomes: str
    test: str
    error: str | None = None

    @property
    def interpreted(self) -> bool:
        """Whether the test runs in Triton's interpreter."""
        return "[triton-on-cpu" in self.test

    def planted_in(self, source: str) -> str:
        """The source with the fault.

        Raises:
            ValueError: the snippet is not there exactly once, or what takes its place is the same.
        """
        found = source.count(self.was)
        if found != 1:
            raise ValueError(
                f"the snippet of {self.name!r} occurs {found} times in {self.file}, not once; the "
                f"code has changed, so the fault must be planted anew:\n{self.was}"
            )
        if self.was == self.becomes:
            raise ValueError(f"{self.name!r} changes nothing")
        return source.replace(self.was, self.becomes)


def planter(file: str, tests: str) -> Callable[..., Fault]:
    """What makes a file's faults, whose tests' ids all begin with ``tests``."""

    def fault(name: str, was: str, becomes: str, test: str, error: str | None = None) -> Fault:
        return Fault(name, file, was, becomes, tests + test, error)

    return fault


def copied_tree(folder: Path) -> Path:
    """A copy of all that the tests run on, into ``folder``."""
    for name in TREES:
        hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, ignore=hidden)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """The copy has the fault, and is as it was afterwards."""
    file = tree / fault.file
    before = file.read_text()
    try:
        _write(file, fault.planted_in(before))
        yield
    finally:
        _write(file, before)


def _write(file: Path, source: str) -> None:
    """Without bytecode of another source: Python tells them apart by seconds and sizes alone."""
    Path(cache_from_source(str(file))).unlink(missing_ok=True)
    file.write_text(source)
