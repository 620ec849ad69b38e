"""How does a move's time grow with rows, buffers, pool size and batch?

One thing changes a sweep; the others stay. The pool's size must not matter: the same slots move
in pools of any size.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.cases import tree_windows
from benchmarks.measure import interleaved, on_the_gpu, spread, write
from specpool import RowMover, rows_from
from specpool_kernels.shapes import TREES

WIDTH = 1024  # bytes a row
BUFFERS, SLOTS, PAIRS = 64, 8192, 64


def build(buffers: int, slots: int, device: str) -> RowMover:
    """A mover over buffers of random bytes."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = [torch.empty(slots, WIDTH, dtype=torch.uint8, device=device) for _ in range(buffers)]
    for tensor in tensors:
        tensor.random_(256, generator=generator)
    return RowMover([r for i, t in enumerate(tensors) for r in rows_from(t, name=f"buffer {i}")])


def pairs(n: int, slots: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct targets among the first ``slots`` slots, and other slots as sources."""
    generator = torch.Generator().manual_seed(n)
    order = torch.randperm(slots, generator=generator)
    return order[:n].to(device), order[n : 2 * n].to(device)


def sweeps(device: str, quick: bool) -> Iterator[tuple[str, list[int], Callable[[int], Any]]]:
    """Name, what it takes on, and what makes a call of one of these."""

    def moving(mover: RowMover, n: int, slots: int) -> Callable[[], None]:
        tgt, src = pairs(n, slots, device)
        return lambda: mover.move(tgt, src)

    def accepting(mover: RowMover, bs: int) -> Callable[[], None]:
        generator = torch.Generator().manual_seed(bs)
        given = tree_windows(TREES[0], bs, SLOTS, device, generator)
        return lambda: mover.move_accepted(*given[:3])

    whole = build(BUFFERS, SLOTS, device)
    step = 16 if quick else 4
    yield "rows", _powers(1, 4096, step), lambda n: moving(whole, n, SLOTS)
    yield "batch", _powers(1, 512, step), lambda n: accepting(whole, n)
    yield "buffers", _powers(1, 256, step), lambda n: moving(build(n, 1024, device), PAIRS, 1024)
    sizes = [1024, 16384] if quick else [1024, 4096, 16384, 65536]
    yield "pool size", sizes, lambda n: moving(build(8, n, device), PAIRS, 1024)


def _powers(first: int, last: int, step: int) -> list[int]:
    out = [first]
    while out[-1] * step <= last:
        out.append(out[-1] * step)
    return out if out[-1] == last else [*out, last]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer points, less time for each")
    parser.add_argument("--out", metavar="FILE", help="results/scaling-DEVICE.json when not given")
    args = parser.parse_args()
    seconds = 0.2 if args.quick else 0.6
    results = []
    for sweep, points, call_of in sweeps(args.device, args.quick):
        calls = {str(n): call_of(n) for n in points}
        # a small call right after a large one would find the caches full of other rows
        alike = [calls] if sweep == "pool size" else [{name: call} for name, call in calls.items()]
        times = {}
        for group in alike:
            times |= interleaved(group, args.device, seconds * len(group))
        gpu = on_the_gpu(calls) if args.device == "cuda" else {}
        for n in points:
            result: dict[str, Any] = {"sweep": sweep, "n": n, "seconds": spread(times[str(n)])}
            if gpu:
                result["gpu_seconds"] = spread(gpu[str(n)])
            results.append(result)
            time = result.get("gpu_seconds", result["seconds"])["median"]
            print(f"{sweep:>10} {n:>6,}  {time * 1e6:10,.1f} us", flush=True)
    write(
        args.out or f"benchmarks/results/scaling-{args.device}.json",
        results,
        device=args.device,
        fixed={"buffers": BUFFERS, "slots": SLOTS, "pairs": PAIRS, "row_bytes": WIDTH},
    )


if __name__ == "__main__":
    main()
