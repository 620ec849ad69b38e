"""How fast is a move against per-buffer torch indexing, in one run, on the same random data?

``accept``: windows of 16 slots, the root and three accepted entries in increasing positions; ours
is ``move_accepted`` from the verifier's outputs, the peer indexes with the accepted pairs already
worked out (all of them, and, to its advantage, only those that really move). ``random``: N pairs
of distinct random slots.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from benchmarks.measure import interleaved, spread, write
from benchmarks.shapes import SHAPES, rows_of
from specpool import RowMover

WINDOW, ACCEPTED = 16, 4
# design targets on the CPU: the least ratio against torch indexing
TARGETS = {("accept", n): 3.0 for n in (1, 4, 16)} | {("accept", n): 1.3 for n in (64, 256)}
TARGETS |= {("random", n): 3.0 for n in (1, 4, 16)}
TARGETS |= {("random", n): 1.0 for n in (64, 256, 1024, 2048)}


class Accept(NamedTuple):
    """A verifier's answer and, for the peers, the pairs it stands for."""

    out_cache_loc: torch.Tensor
    accept_index: torch.Tensor
    accept_len: torch.Tensor
    tgt: torch.Tensor
    src: torch.Tensor


def accept_windows(bs: int, slots: int, device: str, generator: torch.Generator) -> Accept:
    """Windows of neighbouring slots at random places, every one with the root + 3 accepted."""
    starts = torch.randperm(slots // WINDOW, generator=generator)[:bs] * WINDOW
    window = starts[:, None] + torch.arange(WINDOW)
    order = torch.rand(bs, WINDOW - 1, generator=generator).argsort(1)[:, : ACCEPTED - 1]
    nodes = torch.cat((torch.zeros(bs, 1, dtype=torch.long), order.sort(1).values + 1), 1)
    index = nodes + torch.arange(bs)[:, None] * WINDOW
    src, tgt = window.gather(1, nodes), window[:, :ACCEPTED]
    length = torch.full((bs,), ACCEPTED, dtype=torch.int32)
    parts = (window, index.int(), length, tgt.reshape(-1), src.reshape(-1))
    return Accept(*(part.to(device) for part in parts))


def index_buffers(buffers: list[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor) -> None:
    """The peer: one gather and one scatter a buffer."""
    for buffer in buffers:
        buffer[tgt] = buffer[src]


def case(kind: str, n: int, mover: RowMover, buffers: list[torch.Tensor], device: str) -> Any:
    """Interleaved times of ours and the peers."""
    slots = buffers[0].shape[0]
    generator = torch.Generator().manual_seed(n)
    if kind == "accept":
        given = accept_windows(n, slots, device, generator)
        tgt, src = given.tgt, given.src
        moving = tgt != src
        live = tgt[moving], src[moving]
        calls = {
            "specpool": lambda: mover.move_accepted(*given[:3]),
            "torch indexing": lambda: index_buffers(buffers, tgt, src),
            "torch indexing, moving pairs": lambda: index_buffers(buffers, *live),
        }
    else:
        tgt = torch.randperm(slots, generator=generator)[:n].to(device)
        src = torch.randperm(slots, generator=generator)[:n].to(device)
        calls = {
            "specpool": lambda: mover.move(tgt, src),
            "torch indexing": lambda: index_buffers(buffers, tgt, src),
        }
    return interleaved(calls, device)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="minimax-m3")
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", default="benchmarks/results/move-{device}.json")
    args = parser.parse_args()
    built = SHAPES[args.shape].build(args.slots, args.device)
    buffers = [buffer.tensor for buffer in built]
    mover = RowMover(rows_of(built))
    print(f"{args.shape}: {len(buffers)} buffers of {args.slots} slots on {args.device}")
    print(
        f"{'case':>14}  {'specpool':>11}  ratio to torch indexing (all pairs, moving pairs), target"
    )
    results = []
    for kind, n in TARGETS:
        times = case(kind, n, mover, buffers, args.device)
        result = {"kind": kind, "n": n, "seconds": {k: spread(v) for k, v in times.items()}}
        ours = result["seconds"]["specpool"]["median"]
        result["ratios"] = {
            k: v["median"] / ours for k, v in result["seconds"].items() if k != "specpool"
        }
        results.append(result)
        ratios = "  ".join(f"{r:6.2f}x" for r in result["ratios"].values())
        target = f"{TARGETS[kind, n]}x" if args.device == "cpu" else ""
        print(f"{kind:>8} {n:>5}  {ours * 1e6:8.0f} us  {ratios:<16}  {target}", flush=True)
    write(args.out.format(device=args.device), results)


if __name__ == "__main__":
    main()
