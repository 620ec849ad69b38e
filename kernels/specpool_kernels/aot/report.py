"""The report: what was compiled, what it is like, what the gate says, and what a GPU could do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import triton

from specpool_kernels.aot.compile import compile_key
from specpool_kernels.aot.cover import ALL_CLASSES, SINGLE_CLASSES, forms
from specpool_kernels.aot.gate import Reading, faults, read
from specpool_kernels.aot.roofline import ACCEPTED, LAUNCH_SECONDS, costs
from specpool_kernels.plan import Key, all_keys, loc_types


class Line(NamedTuple):
    """One compiled kernel.

    Attributes:
        key: what it was compiled for.
        target: the GPU.
        registers, shared_bytes, local_bytes: of a thread, a program, a thread.
        widths: bytes of the accesses to rows, in words.
        instructions: in all; then loads and stores of rows and scratch, and barriers.
        faults: what the gate says.
    """

    key: Key
    target: str
    registers: int
    shared_bytes: int
    local_bytes: int
    widths: str
    instructions: tuple[int, int, int, int]
    faults: list[str]


def longest_keys() -> list[Key]:
    """Of each form the wide class alone with flat rows, and all that a table can ask for."""
    return [
        Key(variant, classes, full, full, copy, loc_types(variant.kernel)[-1])
        for variant, copy in forms()
        for classes, full in ((SINGLE_CLASSES[0], False), (ALL_CLASSES, True))
    ]


def line(case: tuple[Key, str]) -> Line:
    """Compile and judge one key for one target."""
    key, target = case
    compiled = compile_key(key, target)
    found = faults(key, compiled)
    try:
        machine = read(key, compiled)[-1]  # what the GPU runs: SASS or AMDGCN
        widths, counts = _widths(machine), _counts(machine)
    except ValueError:
        widths, counts = "?", (0, 0, 0, 0)
    return Line(
        key,
        target,
        compiled.registers,
        compiled.shared_bytes,
        compiled.local_bytes,
        widths,
        counts,
        found,
    )


def _widths(reading: Reading) -> str:
    sizes = {a.size for a in reading.accesses if a.memory == "pool"}
    return "+".join(str(size) for size in sorted(sizes, reverse=True))


def _counts(reading: Reading) -> tuple[int, int, int, int]:
    moved = [a for a in reading.accesses if a.memory in ("pool", "scratch")]
    loads = sum(a.kind == "load" for a in moved)
    barriers = sum(i.kind == "barrier" for i in reading.code.instructions)
    return len(reading.code.instructions), loads, len(moved) - loads, barriers


def print_report(targets: Iterable[str], every: bool, rate: float) -> int:
    """Print all of it; how many compiled kernels have a fault.

    Args:
        targets: names in ``TARGETS``.
        every: every key that can be launched, not only ``longest_keys``.
        rate: bytes a second that the GPU of the roofline copies.
    """
    keys, targets = all_keys() if every else longest_keys(), list(targets)
    print(
        f"Any table and any call can ask for {len(all_keys()):,} kernels a GPU. Compiled here with "
        f"triton {triton.__version__}: {len(keys):,} for each of {', '.join(targets)}.\n"
    )
    print(_HEAD)
    wrong = 0
    for found in _lines([(key, target) for key in keys for target in targets]):
        print(_text(found), flush=True)
        for fault in found.faults:
            print(f"    {fault}")
        wrong += bool(found.faults)
    print(f"\n{wrong} of {len(keys) * len(targets):,} have a fault.\n")
    _print_roofline(rate)
    return wrong


def _lines(cases: list[tuple[Key, str]]) -> Iterator[Line]:
    """Compiled on all cores, in order."""
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        yield from pool.map(line, cases)


_COLUMNS = "{:<19} {:>4} {:<6} {:>3} {:<17} {:<8} {:>4} {:>6} {:>6} {:<7} {:>5} {:>5} {:>6} {:>8}"
_HEAD = _COLUMNS.format(
    "kernel", "rows", "target", "cls", "table", "locs", "regs", "shared", "spills", "widths",
    "instr", "loads", "stores", "barriers",
)  # fmt: skip


def _text(found: Line) -> str:
    key = found.key
    flags = [name for name in ("paged", "mapped", "copy") if getattr(key, name)]
    return _COLUMNS.format(
        key.variant.kernel,
        key.variant.rows,
        found.target,
        key.classes,
        "+".join(flags) or "flat",
        "+".join(kind[1:] for kind in key.locs),
        found.registers,
        found.shared_bytes,
        found.local_bytes,
        found.widths,
        *found.instructions,
    )


def _print_roofline(rate: float) -> None:
    low, high = (round(seconds * 1e6) for seconds in LAUNCH_SECONDS)
    print(
        f"One accept of each model, {ACCEPTED} entries a request accepted of which the root stays, "
        f"reckoned at {rate / 1e12:g} TB/s read and written (a launch takes {low}-{high} us):\n"
    )
    columns = "{:<15} {:>8} {:>10} {:>10} {:>9} {:>6}"
    print(columns.format("model", "requests", "MB moved", "us", "programs", "lanes"))
    for cost in costs(rate):
        print(
            columns.format(
                cost.model,
                cost.requests,
                f"{cost.traffic / 1e6:.2f}",
                f"{cost.seconds * 1e6:.1f}",
                cost.programs,
                f"{cost.lanes:.0%}",
            )
        )
