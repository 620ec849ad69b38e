import doctest
import importlib
import re
from pathlib import Path

import pytest

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
