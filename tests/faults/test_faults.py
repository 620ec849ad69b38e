"""Each planted fault is caught by the test named for it, which passes where there is none."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fault import ROOT, Fault
from tests.faults.planted import FAULTS
from tests.faults.suite import Suite

CHECKS = "specpool/checks.py"
TEST = "tests/test_checks.py::test_live_pairs_of_a_move"


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Iterator[Suite]:
    """One copy of the tree a worker, which is as it was after each test."""
    suite = Suite(tmp_path_factory.mktemp("tree"))
    yield suite
    suite.close()


def needs_triton(interpreted: bool) -> None:
    if interpreted and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton's interpreter needs Triton: pip install triton")


@pytest.mark.parametrize(
    "fault", FAULTS, ids=lambda fault: f"{Path(fault.file).stem}: {fault.name}"
)
def test_the_suite_catches(suite, fault):
    needs_triton(fault.interpreted)
    verdict = suite.judge(fault)
    assert verdict.caught, verdict.what


@pytest.mark.parametrize("interpreted", [False, True], ids=["plain", "interpreted"])
def test_without_a_fault_they_pass(suite, interpreted):
    """Else a test that always fails would catch everything."""
    needs_triton(interpreted)
    tests = {f.test for f in FAULTS if f.interpreted == interpreted}
    assert suite.run(sorted(tests), interpreted, "specpool")["code"] == 0, suite.log()


def test_names_are_all_different():
    assert len({(fault.file, fault.name) for fault in FAULTS}) == len(FAULTS)


# What the harness itself must not take for a catch


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("Nothing here moves a byte.", "Nothing moves.", "it survived"),
        ("given = (tgt != -1)", "given = (tgtt != -1)", "NameError is none of"),
        ("given = (tgt != -1)", "given = (tgt != -1", "no test failed: .*'stage': 'collect'"),
        ("given = (tgt != -1)", "__import__('os').abort(); given = (tgt != -1)", "'code': -6"),
    ],
    ids=["no fault", "a wrong name", "no Python", "a crash"],
)
def test_what_shows_no_fault(suite, was, becomes, says):
    before = (suite.tree / CHECKS).read_text()
    verdict = suite.judge(Fault("a fault", CHECKS, was, becomes, TEST))
    assert not verdict.caught
    assert re.search(says, verdict.what), verdict.what
    assert (suite.tree / CHECKS).read_text() == before


def test_another_copy_of_the_product_shows_nothing(suite, monkeypatch):
    """As where an installed one came first."""
    found = {"code": 1, "stage": "call", "error": "AssertionError", "test": TEST}
    monkeypatch.setattr(suite, "run", lambda *args: found | {"imported": "/elsewhere/checks.py"})
    verdict = suite.judge(Fault("a fault", CHECKS, "to != at", "to == at", TEST))
    assert verdict == (False, "the faulty file was not imported, but /elsewhere/checks.py")


def test_a_test_that_is_not_there_shows_nothing(suite):
    verdict = suite.judge(Fault("a fault", CHECKS, "to != at", "to == at", f"{TEST}_"))
    assert not verdict.caught
    assert "no test failed" in verdict.what


def test_what_shows_a_fault(suite):
    verdict = suite.judge(Fault("a fault", CHECKS, "to != at", "to == at", TEST))
    assert verdict == (True, f"{TEST} (AssertionError)")


@pytest.mark.parametrize(("was", "times"), [("no such line", 0), ("IndexError", "several")])
def test_a_snippet_must_occur_once(was, times):
    source = (ROOT / CHECKS).read_text()
    times = source.count(was) if times else 0
    with pytest.raises(ValueError, match=f"occurs {times} times in {CHECKS}, not once"):
        Fault("a fault", CHECKS, was, "", TEST).planted_in(source)


def test_a_fault_must_change_something():
    with pytest.raises(ValueError, match="'a fault' changes nothing"):
        Fault("a fault", CHECKS, "x", "x", TEST).planted_in("x")
