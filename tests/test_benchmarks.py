"""The benchmarks' own correctness: inputs, what they refuse to time, and what their report says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import measure, move, report, scaling
from benchmarks.peers import Mover, everyone, index_buffers
from benchmarks.shapes import SHAPES, Buffer
from benchmarks.targets import TARGETS, checks
from specpool import rows_from
from specpool_kernels.shapes import TREES, Flat

SLOTS = 1024


def small(widths=((4, 8), (3,))):
    kinds = [Flat("main K", 1, row, torch.bfloat16) for row in widths]
    tensors = [torch.randn(SLOTS, *kind.row).to(kind.dtype) for kind in kinds]
    return [Buffer(kind, tensor) for kind, tensor in zip(kinds, tensors, strict=True)]


def inputs(kind="accept", n=8, tree=None):
    return move.inputs_of(kind, n, tree, SLOTS, "cpu")


@pytest.mark.parametrize("tree", [*TREES, None], ids=str)
def test_accepts_are_valid_and_say_what_their_pairs_say(tree):
    given = inputs("tree" if tree else "accept", 12, tree)[0].case
    bs, window = given.out_cache_loc.shape
    assert window == (tree.drafts if tree else 16)
    tgt, src = [], []
    for r in range(bs):
        path = given.accept_index[r, : given.accept_len[r]]
        assert path[0] == r * window  # the root
        assert (path.diff() > 0).all()
        assert r * window <= path.min()
        assert path.max() < (r + 1) * window
        tgt.append(given.out_cache_loc[r, : len(path)])
        src.append(given.out_cache_loc.reshape(-1)[path.long()])
    assert torch.equal(given.tgt, torch.cat(tgt))
    assert torch.equal(given.src, torch.cat(src))
    if tree and tree.topk == 1:
        assert torch.equal(given.tgt, given.src)


@pytest.mark.parametrize("shape", ["deepseek-v3.2", "deepseek-v4"])
def test_everyone_moves_pages_alike(shape):
    buffers = SHAPES[shape].build(256, "cpu")
    given = move.inputs_of("random", 20, None, 256, "cpu")[0]
    for mover in everyone(buffers, 256, "cpu"):
        move.verify(mover, given)


@pytest.mark.parametrize(
    "fault",
    [
        lambda tensors, x: index_buffers(tensors[:-1], x.tgt, x.src),
        lambda tensors, x: index_buffers(tensors, x.src, x.tgt),
        lambda tensors, x: index_buffers(tensors, x.tgt + 1, x.src),
        lambda tensors, x: None,
        lambda tensors, x: [t.zero_() for t in tensors],
    ],
    ids=["a buffer left out", "backwards", "beside", "nothing", "everything"],
)
def test_who_moves_wrongly_is_not_timed(fault):
    tensors = [b.tensor for b in small()]
    rows = [r for t in tensors for r in rows_from(t)]
    given = inputs()[0]
    move.verify(Mover("right", lambda x: index_buffers(tensors, x.tgt, x.src), rows), given)
    with pytest.raises(AssertionError, match="wrong moved wrongly"):
        move.verify(Mover("wrong", lambda x: fault(tensors, x), rows), given)


def test_extra_memory_is_seen_in_numpy_and_in_torch():
    size = 1 << 20
    kept = torch.zeros(size)
    assert measure.extra_bytes(lambda: kept.add_(1), "cpu") < 10_000
    assert measure.extra_bytes(lambda: (kept + 1) + 1, "cpu") >= 8 * size
    in_numpy = kept.numpy()
    assert 4 * size <= measure.extra_bytes(lambda: in_numpy + 1, "cpu") < 5 * size


def test_operators_are_counted():
    tensor = torch.zeros(4)
    assert measure.launches(lambda: tensor.add_(1).mul_(2), "cpu") == 2


@pytest.fixture(scope="module")
def measured():
    buffers = small()
    facts = {
        "shape": "minimax-m3",
        "device": "cpu",
        "slots": SLOTS,
        "buffers": 2,
        "bytes_per_slot": 70,
        "widest_row": 64,
        "copy_bytes_per_second": {"median": 1e9},
    }
    movers = everyone(buffers, SLOTS, "cpu")
    wanted = [("accept", 16, None), ("random", 64, None), ("tree", 8, TREES[1])]
    results = [move.measure(*case, movers, facts, quick=True) for case in wanted]
    told = {"machine": {**measure.machine(), "command": "python -m x"}, **facts}
    return json.loads(json.dumps({**told, "results": results}))


def test_a_measurement_has_all_it_reports(measured):
    accept, random, chain = measured["results"]
    assert accept["bytes"] == 2 * 70 * accept["moving_pairs"]
    assert accept["launches"]["specpool"] == 1
    assert accept["launches"]["torch indexing"] == 4
    assert "specpool, pairs given" not in random["seconds"]
    assert chain["moving_pairs"] == 0
    assert chain["copy_rate_share"] is None
    for result in measured["results"]:
        for times in result["seconds"].values():
            assert 0 < times["q1"] <= times["median"] <= times["q3"]


def test_targets_are_judged(measured):
    result = json.loads(json.dumps(measured["results"][0]))
    time = result["seconds"]
    for ours, met in ((1.0, True), (1.1, False)):
        time["specpool"]["median"], time["torch indexing"]["median"] = ours, 3.0
        ratio, memory = checks(result, measured)
        assert (ratio.met, ratio.wanted, ratio.got) == (met, 3.0, 3.0 / ours)
        assert memory.met
    result["extra_bytes"]["specpool"] += 1 << 20
    assert not checks(result, measured)[1].met
    assert checks(result, {**measured, "shape": "llama-3.1-8b"}) == []
    assert checks(measured["results"][2], measured) == []


def test_targets_on_a_gpu():
    def told(n, time, gpu, rate=100.0):
        seconds = {"seconds": {}, "gpu_seconds": {}}
        for key, values in (("seconds", time), ("gpu_seconds", gpu)):
            seconds[key] = {name: {"median": value} for name, value in values.items()}
        facts = {"shape": "minimax-m3", "device": "cuda", "copy_bytes_per_second": {"median": rate}}
        return checks({"kind": "accept", "n": n, "bytes": 160, **seconds}, facts)

    tiled = "SGLang tiled kernel, main K/V"
    for gpu, met in ((2.0, True), (2.1, False)):
        (rate,) = told(64, {"specpool": 9}, {"specpool": gpu})
        assert rate.met is met
    for time, met in ((1.5, True), (1.6, False)):
        (small,) = told(1, {"specpool": time, "empty launch": 1.0}, {"specpool": 9})
        assert small.met is met
    for peer, met in ((3.0, True), (2.9, False)):
        times = {"specpool": 9, "specpool, main K/V": 1.0, tiled: peer}
        (ratio,) = told(16, times, times)
        assert ratio.met is met


def test_the_report_says_what_was_run_and_what_was_not(measured):
    text = report.report({"move-minimax-m3-cpu": measured}, ["move-minimax-m3-cpu"])
    assert "`python -m x`" in text
    assert "| accept windows, bs 16 |" in text
    assert "| tree (3, 1, 4), bs 8 |" in text
    assert "(results/move-minimax-m3-cpu.png)" in text
    assert text.count("ot run: no GPU was at hand") == 5
    on_gpu = {**measured, "device": "cuda", "results": []}
    assert "| 80% |" not in report.report({"move-minimax-m3-cuda": on_gpu}, [])


@pytest.mark.parametrize("quick", [True, False])
def test_every_case_fits_its_slots(quick):
    for kind, n, tree in move.all_cases(8192, quick):
        (given, *others) = move.inputs_of(kind, n, tree, 8192, "cpu")
        assert len(others) == move.INPUTS - 1
        assert given.case.tgt.unique().numel() == given.case.tgt.numel()
    if not quick:
        assert {(k, n) for k, n, t in move.all_cases(8192, False) if t is None} >= set(TARGETS)


def test_pairs_of_a_sweep_are_distinct():
    tgt, src = scaling.pairs(64, 128, "cpu")
    assert torch.cat((tgt, src)).unique().numel() == 128


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the stub is not for it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, cc")
def test_the_host_path_is_taken_apart_without_a_gpu(tmp_path):
    pytest.importorskip("triton")
    out = tmp_path / "launch-cpu.json"
    command = [sys.executable, "-m", "benchmarks.launch", "--quick", "--out", str(out)]
    paths = {"PYTHONPATH": os.pathsep.join((".", "kernels"))}
    here = Path(__file__).parents[1]
    subprocess.run(command, check=True, capture_output=True, cwd=here, env=os.environ | paths)
    told = json.loads(out.read_text())
    assert {r["of"] for r in told["results"]} == {"call", "part"}
    assert "the driver's own launch" in told["not_measured"]
    assert "| memory watch, 177 tensors | a part |" in report.report({out.stem: told}, [])
