"""Programs that tests start in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    module: str, *before: str, seconds: int = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module`` from the repository's root, behind the words ``before``."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    return subprocess.run(
        [*before, sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
