"""Where does the host's time go in one call on a GPU, before the kernel runs?

The call is ``RowMover.move_accepted`` of one request over MiniMax-M3's 177 buffers, taken apart.
On CUDA it runs as it is, beside an empty launch and its peers. On a machine without a GPU Triton's
own launcher runs over a driver that launches nothing (``stub_driver``): the driver's launch, the
queries of device, stream and capture, and the peers are then not measured.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.cases import Input, tree_windows
from benchmarks.empty_kernel import empty_launch, public_empty_launch
from benchmarks.measure import host_seconds, spread, write
from benchmarks.peers import everyone
from benchmarks.shapes import SHAPES, rows_of
from specpool import RowMover
from specpool.checks import check_accept
from specpool_kernels.device import is_capturing, on_device
from specpool_kernels.prepared import Prepared
from specpool_kernels.shapes import TREES

SHAPE, SLOTS = "minimax-m3", 1024
NOT_ON_A_CPU = [
    "the driver's own launch",
    "the current device, its stream, and whether it captures",
    "an empty launch, and peers",
]


class Part(NamedTuple):
    """A piece of the call, or the call in another way.

    Attributes:
        name: what tables call it.
        call: what is timed.
        within: what must be replaced meanwhile.
        of: ``"call"`` for the whole, ``"part"`` for a piece of it, ``"peer"`` for others.
    """

    name: str
    call: Callable[[], object]
    within: AbstractContextManager[Any] = nullcontext()
    of: str = "part"


@contextmanager
def without_gpu() -> Iterator[None]:
    """A mover's Triton backend over the stub driver, on CPU tensors, whose values are not read."""
    from benchmarks.stub_driver import no_gpu

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(no_gpu(Path(folder)))
        stack.enter_context(mock.patch("specpool.backends.why_not", return_value=None))
        yield


def parts(mover: RowMover, given: Input) -> list[Part]:
    """The call and its pieces."""
    window, index, length = given.case[:3]
    backend: Any = mover._service.moves  # type: ignore[union-attr]
    device = window.device
    mover.move_accepted(window, index, length)
    (kept,) = [p for key, p in backend._prepared.items() if key[0].kernel == "move_accepted"]
    if kept is None:
        raise SystemExit("this Triton or this device is not served by prepared launches")
    head, constants = kept._head, kept._constants
    launched: list[Any] = []
    with mock.patch.object(Prepared, "launch", lambda self, *call: not launched.append(call)):
        mover.move_accepted(window, index, length)
    grid, pointers, numbers = launched[0]

    def watch() -> bool:
        return list(map(torch.Tensor.data_ptr, mover._watched)) != mover._addresses

    def replaced(answer: bool) -> AbstractContextManager[Any]:
        def launch(*call: Any) -> bool:  # a mock would take its own time
            return answer

        return mock.patch.object(Prepared, "launch", launch)

    def run(*call: Any) -> None:
        return None

    def whole() -> None:
        mover.move_accepted(window, index, length)

    stream = kept._stream(kept._device)
    return [
        Part("the call", whole, of="call"),
        Part("the call, launched by Triton's public call", whole, replaced(False), "call"),
        Part("argument checks", lambda: check_accept(window, index, length, device)),
        Part("memory watch, 177 tensors", watch),
        Part("capture query", lambda: is_capturing(device)),
        Part("plan, strides and pointers",
             lambda: backend.move_accepted(window, index, length), replaced(True)),
        Part("current device, in it", lambda: on_device(device)),
        Part("what a prepared launch checks, and the stream",
             lambda: kept.launch(grid, pointers, numbers),
             mock.patch.object(kept, "_run", run)),
        Part("Triton's launcher and the driver",
             lambda: kept._run(*grid, 1, stream, *head, *pointers, *numbers, *constants)),
    ]  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="fewer readings")
    parser.add_argument("--out", metavar="FILE", help="results/launch-DEVICE.json when not given")
    args = parser.parse_args()
    rounds = 10 if args.quick else 60
    buffers = SHAPES[SHAPE].build(SLOTS, args.device)
    generator = torch.Generator().manual_seed(0)
    given = Input.of(tree_windows(TREES[0], 1, SLOTS, args.device, generator))
    results = []
    with without_gpu() if args.device == "cpu" else nullcontext():
        mover = RowMover(rows_of(buffers), "triton")
        mover._service = mover._service._replace(judge=None)  # type: ignore[union-attr]
        measured = parts(mover, given)
        if args.device == "cuda":
            measured += [
                Part("an empty kernel by its handle", empty_launch(), of="peer"),
                Part("an empty kernel by Triton's public call", public_empty_launch, of="peer"),
            ]
            measured += [
                Part(m.name, lambda m=m: m.move(given), of="peer")  # type: ignore[misc]
                for m in everyone(buffers, SLOTS, args.device)
            ]
        for part in measured:
            with part.within:
                times = host_seconds({"": part.call}, args.device, rounds)[""]
            results.append({"name": part.name, "of": part.of, "seconds": spread(times)})
            print(f"{part.of:>5}  {spread(times)['median'] * 1e6:8.2f} us  {part.name}", flush=True)
    missing = NOT_ON_A_CPU if args.device == "cpu" else []
    for what in missing:
        print(f"not measured without a GPU: {what}")
    write(
        args.out or f"benchmarks/results/launch-{args.device}.json",
        results,
        device=args.device,
        shape=SHAPE,
        not_measured=missing,
    )


if __name__ == "__main__":
    main()
