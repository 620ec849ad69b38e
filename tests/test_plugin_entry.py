"""The entry point that SGLang finds: harmless where there is no SGLang, and cheap to load."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_pyproject_names_what_is_there():
    line = 'specpool = "specpool.adapters.sglang:register"'
    text = (ROOT / "pyproject.toml").read_text()
    assert text.split('[project.entry-points."sglang.srt.plugins"]')[1].split()[:3] == line.split()


def test_loading_it_imports_neither_sglang_nor_triton():
    """SGLang loads entry points first of all, in processes that may never move anything."""
    code = (
        "import sys; from specpool.adapters.sglang import register; assert callable(register); "
        "sys.exit(any(name in sys.modules for name in ('sglang', 'triton')))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
