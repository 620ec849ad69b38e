"""How fast is a move against what others do, in one run, on the same random data?

``accept``: windows of 16 slots, the root and three accepted entries in increasing positions;
``specpool`` works from the verifier's outputs, peers get the pairs already worked out (all of them
or, to their advantage, those that really move). ``tree``: windows of draft trees in use, a random
number of steps accepted. ``random``: N pairs of random slots. On a CPU everything is timed twice:
called at the same slots again and again, and at other slots every time, which caches do not hold;
on a GPU at other slots only. All who move are verified before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.cases import Accept, Input, Pairs, accept_windows, random_pairs, tree_windows
from benchmarks.measure import (
    copy_rate,
    extra_bytes,
    interleaved,
    launches,
    on_the_gpu,
    spread,
    write,
)
from benchmarks.peers import Mover, everyone, index_buffers
from benchmarks.shapes import SHAPES
from benchmarks.targets import SLOTS, TARGETS, checks
from specpool_kernels.shapes import TREES, Tree

__all__ = ["TARGETS", "Accept", "accept_windows", "index_buffers"]
INPUTS = 6
PART = "specpool, main K/V"
BATCHES = (1, 32, 512)
QUICK = [("accept", n, None) for n in (1, 16, 256)] + [("random", 64, None)]


def all_cases(slots: int, quick: bool) -> list[tuple[str, int, Tree | None]]:
    """Kind, requests or pairs, tree; what does not fit the slots is left out."""
    wanted: list[tuple[str, int, Tree | None]] = [(kind, n, None) for kind, n in TARGETS]
    wanted += [("accept", 512, None)]
    wanted += [("tree", bs, tree) for tree in TREES for bs in BATCHES]
    if quick:
        wanted = [*QUICK, ("tree", 16, TREES[0])]
    window = {"accept": 16, "random": 1}
    return [(k, n, t) for k, n, t in wanted if n * (t.drafts if t else window[k]) <= slots]


def inputs_of(kind: str, n: int, tree: Tree | None, slots: int, device: str) -> list[Input]:
    """Inputs of one kind, at different slots."""
    generator = torch.Generator().manual_seed(n)

    def one() -> Accept | Pairs:
        if kind == "random":
            return random_pairs(n, slots, device, generator)
        if tree is None:
            return accept_windows(n, slots, device, generator)
        return tree_windows(tree, n, slots, device, generator)

    return [Input.of(one()) for _ in range(INPUTS)]


def verify(mover: Mover, given: Input) -> None:
    """One call moves the right rows, in every buffer, and leaves others as they are."""
    views = [row.view() for row in mover.rows]
    if not views:
        return
    case, slots = given.case, views[0].shape[0] * views[0].shape[1]
    tgt, src = case.tgt[:200], case.src[:200]
    others = torch.arange(0, slots, max(1, slots // 100), device=tgt.device)
    others = others[~torch.isin(others, case.tgt)]

    def rows(slot: torch.Tensor) -> list[torch.Tensor]:
        return [v[slot // v.shape[1], slot % v.shape[1]] for v in views]

    wanted = rows(torch.cat((src, others)))
    mover.move(given)
    for before, after in zip(wanted, rows(torch.cat((tgt, others))), strict=True):
        if not torch.equal(before, after):
            raise AssertionError(f"{mover.name} moved wrongly")


def in_turn(mover: Mover, inputs: list[Input], first: int) -> Callable[[], object]:
    """A call that moves the next input each time, beginning with another one for each mover.

    All move the same inputs, and nobody finds the rows that the one before has just touched.
    """
    first %= len(inputs)
    turn = cycle(inputs[first:] + inputs[:first])
    return lambda: mover.move(next(turn))


def measure(
    kind: str, n: int, tree: Tree | None, movers: list[Mover], facts: dict[str, Any], quick: bool
) -> dict[str, Any]:
    """Times, memory, launches and ratios of one case."""
    device = facts["device"]
    inputs = inputs_of(kind, n, tree, facts["slots"], device)
    if kind == "random":
        movers = [m for m in movers if m.name != "specpool, pairs given"]
    for mover in movers:
        verify(mover, inputs[0])
    calls = {m.name: in_turn(m, inputs, i) for i, m in enumerate(movers)}
    time = 0.5 if quick else 1.5
    fresh = {name: spread(t) for name, t in interleaved(calls, device, time).items()}
    seconds = fresh
    if device == "cpu":
        again = {m.name: partial(m.move, inputs[0]) for m in movers}
        seconds = {name: spread(t) for name, t in interleaved(again, device, time).items()}
    result: dict[str, Any] = {"kind": kind, "n": n}
    if tree is not None:
        result["tree"] = list(tree)
    pairs = sum(len(x.tgt) for x in inputs) / len(inputs)
    result |= {
        "moving_pairs": pairs,
        "most_moving_pairs": max(len(x.tgt) for x in inputs),
        "bytes": 2 * pairs * facts["bytes_per_slot"],
        "seconds": seconds,
        "fresh_seconds": fresh,
    }
    if device == "cuda":
        result["gpu_seconds"] = {k: spread(v) for k, v in on_the_gpu(calls).items()}
    clock = result.get("gpu_seconds", result["seconds"])
    result["ratios"] = ratios_of(clock)
    result["fresh_ratios"] = ratios_of(result.get("gpu_seconds", fresh))
    ours = result.get("gpu_seconds", fresh)["specpool"]["median"]
    result["copy_rate_share"] = (
        result["bytes"] / ours / facts["copy_bytes_per_second"]["median"] if pairs else None
    )
    result["extra_bytes"] = {name: extra_bytes(call, device) for name, call in calls.items()}
    result["launches"] = {m.name: count(m, calls[m.name], device) for m in movers}
    return result


def ratios_of(seconds: dict[str, dict[str, float]]) -> dict[str, float]:
    """Each peer's time over specpool's, over the same buffers."""
    medians = {name: s["median"] for name, s in seconds.items()}
    return {
        name: time / medians[PART if PART in medians and name.endswith("main K/V") else "specpool"]
        for name, time in medians.items()
        if not name.startswith("specpool") and name != "empty launch"
    }


def count(mover: Mover, call: Callable[[], object], device: str) -> int | None:
    """CUDA: what the device was told to run. CPU: PyTorch operators; ours, backend invocations."""
    if device == "cuda" or mover.launches is None:
        return launches(call, device)
    before = mover.launches()
    call()
    return mover.launches() - before


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="minimax-m3")
    parser.add_argument("--slots", type=int, help="8,192, on CUDA 32,768 when not given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few cases, less time for each")
    parser.add_argument(
        "--out", metavar="FILE", help="results/move-SHAPE-DEVICE.json when not given"
    )
    args = parser.parse_args()
    slots = args.slots or (SLOTS if args.device == "cpu" else 4 * SLOTS)
    buffers = SHAPES[args.shape].build(slots, args.device)
    movers = everyone(buffers, slots, args.device)
    facts = {
        "shape": args.shape,
        "device": args.device,
        "slots": slots,
        "buffers": len(buffers),
        "bytes_per_slot": SHAPES[args.shape].model.bytes_per_slot,
        "widest_row": max(max(b.kind.widths) for b in buffers),
        "copy_bytes_per_second": copy_rate(args.device),
    }
    rate = facts["copy_bytes_per_second"]["median"] / 1e9
    print(f"{args.shape}: {len(buffers)} buffers of {slots:,} slots on {args.device}; a plain copy "
          f"reads and writes {rate:,.1f} GB/s")  # fmt: skip
    results = []
    for kind, n, tree in all_cases(slots, args.quick):
        result = measure(kind, n, tree, movers, facts, args.quick)
        results.append(result)
        name = kind if tree is None else f"tree {tree.steps},{tree.topk},{tree.drafts}"
        time = result.get("gpu_seconds", result["seconds"])["specpool"]["median"]
        print(f"{name:>14} {n:>5}  {time * 1e6:9,.0f} us  extra "
              f"{result['extra_bytes']['specpool']:>10,} B")  # fmt: skip
        for peer, ratio in result["ratios"].items():
            fresh = result["fresh_ratios"][peer]
            print(f"{'':>24}{ratio:7.2f}x  {peer} ({fresh:.2f}x at other slots every time)")
        for check in checks(result, facts):
            verdict = "met" if check.met else "NOT MET"
            print(f"{'':>24}{check.got:7,.2f}{check.unit}  {check.against}: wanted "
                  f"{check.wanted:,g}{check.unit}, {verdict}", flush=True)  # fmt: skip
    out = args.out or f"benchmarks/results/move-{args.shape}-{args.device}.json"
    write(out, results, **facts)


if __name__ == "__main__":
    main()
