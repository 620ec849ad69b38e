"""Runs tests on a copy of the tree, with a fault or without, and judges what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.fault import NOTICED, Fault, copied_tree, planted

NURSERY = Path(__file__).with_name("nursery.py")
FAILED = 1
"""pytest's exit code: tests ran, and some failed."""


class Verdict(NamedTuple):
    """What a run of a fault's tests showed.

    Attributes:
        caught: a test failed with an error that shows the fault.
        what: the test and its error; or why nothing was caught.
    """

    caught: bool
    what: str


class Suite:
    """A copy of the tree, and the two processes that run its tests: plain, and interpreted."""

    def __init__(self, folder: Path) -> None:
        self.tree = copied_tree(folder)
        self._nurseries: dict[bool, subprocess.Popen[str]] = {}

    def judge(self, fault: Fault) -> Verdict:
        """Plant the fault, and run the test that must catch it."""
        with planted(fault, self.tree):
            found = self.run([fault.test], fault.interpreted, _module(fault.file))
        if found["code"] == 0:
            return Verdict(False, "it survived: a test is missing")
        if found["code"] != FAILED or found["stage"] != "call":
            return Verdict(False, f"no test failed: {found}\n{self.log()}")
        if found["imported"] != str(self.tree / fault.file):
            return Verdict(False, f"the faulty file was not imported, but {found['imported']}")
        wanted = NOTICED if fault.error is None else (fault.error,)
        if found["error"] not in wanted:
            return Verdict(False, f"{found['error']} is none of {wanted}\n{self.log()}")
        return Verdict(True, f"{found['test']} ({found['error']})")

    def run(self, tests: list[str], interpreted: bool, module: str) -> dict[str, Any]:
        """pytest's exit code, the file that ``module`` came from, and the first failure if any.

        The code is negative where a signal ended the run.
        """
        nursery = self._nursery(interpreted)
        assert nursery.stdin
        assert nursery.stdout
        print(json.dumps([str(self.tree), module, tests]), file=nursery.stdin, flush=True)
        found = json.loads(nursery.stdout.readline())
        return {"imported": None, "stage": None, "error": None, **found}

    def log(self) -> str:
        """What pytest said in the last run."""
        return (self.tree / "pytest.log").read_text()

    def close(self) -> None:
        """End the processes."""
        for nursery in self._nurseries.values():
            nursery.communicate()
        self._nurseries.clear()

    def _nursery(self, interpreted: bool) -> subprocess.Popen[str]:
        if interpreted not in self._nurseries:
            hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
            mode = {"TRITON_INTERPRET": "1" if interpreted else "0", "OMP_NUM_THREADS": "1"}
            self._nurseries[interpreted] = subprocess.Popen(
                [sys.executable, str(NURSERY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.tree,
                env={**os.environ, **hidden, **mode},
            )
        return self._nurseries[interpreted]


def _module(file: str) -> str:
    return file.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
