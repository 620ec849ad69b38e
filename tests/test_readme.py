import doctest
import importlib
import re
from pathlib import Path

import pytest

from benchmarks import report

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope = {}
    exec(example, scope)
    pool = scope["pool"]
    assert pool.mover.launches == 2
    assert len(pool.mover.rows) == 177 + 1


def test_no_placeholder_is_left():
    assert not re.findall(r"\b(?:TODO|TBD|[A-Z]+_TABLE)\b", README)


@pytest.mark.parametrize("module", ["specpool.rows", "specpool.mover"])
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_speeds_are_the_measured_ones():
    """`make bench` measures anew, and writes the table; the words around it name the versions."""
    measured = report.load(report.HERE / "results")["move-minimax-m3-cpu"]
    assert "\n".join(report.readme_table(measured)) in README
    for name in ("python", "torch", "numpy"):
        assert measured["machine"][name] in README


def test_the_report_is_of_the_results_that_are_there():
    results = report.HERE / "results"
    found = report.load(results)
    plots = [name for name in found if (results / f"{name}.png").exists()]
    assert report.report(found, plots) == (report.HERE / "RESULTS.md").read_text()
