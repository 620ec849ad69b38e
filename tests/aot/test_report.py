"""The report: what it prints, when its exit status says no, and the arithmetic of its roofline."""

import pytest

pytest.importorskip("triton")

from specpool_kernels import plan
from specpool_kernels.aot import report, roofline
from specpool_kernels.aot.__main__ import main
from specpool_kernels.shapes import MODELS

COPY = plan.Key(plan.copy_variant(1), 7, True, True, True, ("i64", "i32"))


def test_a_line_for_each_kernel_and_target(monkeypatch, capsys):
    monkeypatch.setattr(report, "longest_keys", lambda: [COPY])
    assert main(["--report", "--target", "sm_90", "--target", "gfx942"]) == 0
    out = capsys.readouterr().out
    assert "2,352 kernels a GPU" in out
    assert "0 of 2 have a fault" in out
    for target in ("sm_90", "gfx942"):
        (line,) = (words for words in map(str.split, out.splitlines()) if target in words[2:3])
        assert line[:2] == ["move_rows", "16"]
        assert line[3:6] == ["7", "paged+mapped+copy", "64+32"]
        assert line[8:10] == ["0", "16+4+1"], "spills and widths"
        assert line[11:] == ["24", "24", "0"], "8 chunks of each class; a copy needs no barrier"


def test_a_fault_is_printed_and_fails(monkeypatch, capsys):
    bad = report.Line(COPY, "sm_90", 255, 0, 96, "8", (9, 1, 1, 0), ["96 bytes of spills"])
    monkeypatch.setattr(report, "longest_keys", lambda: [COPY])
    monkeypatch.setattr(report, "_lines", lambda cases: [bad for _ in cases])
    assert main(["--report", "--target", "sm_90"]) == 1
    out = capsys.readouterr().out
    assert "    96 bytes of spills" in out
    assert "1 of 1 have a fault" in out


def test_every_kernel_is_there_for_the_asking(monkeypatch):
    seen = []
    monkeypatch.setattr(report, "_lines", lambda cases: seen.extend(cases) or [])
    assert main(["--report", "--all"]) == 0
    assert len(seen) == len(set(seen)) == 4 * 2352


def test_the_default_has_every_form_at_its_longest():
    keys = report.longest_keys()
    forms = {(key.variant, key.copy) for key in plan.all_keys()}
    longest = [key for key in keys if (key.classes, key.paged, key.mapped) == (7, True, True)]
    assert {(key.variant, key.copy) for key in longest} == forms
    assert set(keys) <= set(plan.all_keys())


def test_minimax_by_hand():
    """60 layers of K and V of 1,024 bytes, 57 index keys of 256; 3 of 4 entries move."""
    moved = 3 * (60 * 2 * 1024 + 57 * 256)
    costs = {c.requests: c for c in roofline.costs(1e12) if c.model == "minimax-m3"}
    assert [costs[n].traffic for n in (1, 64, 256)] == [2 * n * moved for n in (1, 64, 256)]
    assert costs[64].seconds == pytest.approx(2 * 64 * moved / 1e12)
    assert costs[1].programs == 120 + 15, "a program holds one K row, or four index keys"
    assert costs[64].programs == 16 * 135, "four windows of four entries a program"
    assert costs[1].lanes == pytest.approx((120 * 8 + 57 * 2) / (135 * 8))


@pytest.mark.parametrize("name", MODELS)
def test_imagined_tables_move_the_models_bytes(name):
    words = roofline.imagined_table(MODELS[name]).words
    assert int((words[:, 16:24] >> 56 & 255).sum()) == MODELS[name].bytes_per_slot
