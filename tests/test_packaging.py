import os
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import specpool

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_two_packages_and_no_more(tmp_path):
    build = [
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
    ]
    subprocess.run([sys.executable, *build, tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {n.split("/")[0] for n in names if ".dist-info/" not in n}
    assert packages == {"specpool", "specpool_kernels"}
    for needed in ("specpool/py.typed", "specpool/pools/mha.py", "specpool_kernels/move.py"):
        assert needed in names


def test_nothing_is_called_kernels():
    """A top-level package of that name would shadow a well-known one."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_types_are_shipped():
    assert files(specpool).joinpath("py.typed").is_file()


def test_the_version_is_the_metadata_s():
    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{specpool.__version__}"' in text


def test_importing_specpool_does_not_import_triton():
    code = "import sys, specpool; sys.exit('triton' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)
