"""A process that has imported PyTorch, and forks a child for every run of pytest.

It runs as a script, so that it has imported nothing of the product or its tests: a child imports
those of the tree that it is given. A request is a line of JSON on standard input, an answer one on
standard output.
"""

import json
import os
import signal
import sys
from pathlib import Path

import hypothesis  # noqa: F401
import numpy as np  # noqa: F401
import pytest
import torch  # noqa: F401

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton  # noqa: F401

SECONDS = 240
"""A run that takes longer is killed, and has caught nothing."""


class FirstFailure:
    """What the first test that failed, failed with."""

    def __init__(self):
        self.seen = {}

    def pytest_exception_interact(self, call, report):
        if not self.seen:
            error = type(call.excinfo.value).__name__
            self.seen = {"test": report.nodeid, "stage": call.when, "error": error}


def child(tree: str, module: str, tests: list[str], answer: int) -> None:
    """Run the tests in the tree; the answer says where the module in question came from."""
    signal.alarm(SECONDS)
    os.chdir(tree)
    log = os.open("pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    first = FirstFailure()
    quiet = ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0"]
    code = pytest.main(["-x", "-q", *quiet, *tests], plugins=[first])
    imported = getattr(sys.modules.get(module), "__file__", None)
    found = {"code": int(code), "imported": imported, **first.seen}
    os.write(answer, json.dumps(found).encode())


def main() -> None:
    """Serve requests until standard input ends."""
    here = str(Path(__file__).parent)
    sys.path[:] = [place for place in sys.path if place not in ("", here)]
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child(*json.loads(line), write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            found = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(found or json.dumps({"code": status}), flush=True)


if __name__ == "__main__":
    main()
