"""``python -m tests.faults [WORD ...]``: plant the faults, and say which test caught each.

With words, only the faults whose file or name holds one of them.
"""

import sys
import tempfile
import time
from pathlib import Path

from tests.faults.planted import FAULTS
from tests.faults.suite import Suite


def main(words: list[str]) -> int:
    """Judge the faults one after another; 1 if any was not caught."""
    chosen = [f for f in FAULTS if not words or any(w in f"{f.file} {f.name}" for w in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(Path(folder))
        for fault in chosen:
            start = time.perf_counter()
            verdict = suite.judge(fault)
            missed += not verdict.caught
            mark = "caught" if verdict.caught else "MISSED"
            print(f"{mark}  {fault.file}: {fault.name}  [{time.perf_counter() - start:.1f} s]")
            print(f"        {verdict.what}", flush=True)
        suite.close()
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
