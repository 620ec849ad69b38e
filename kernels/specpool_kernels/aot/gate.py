"""The gate: what every compiled kernel must be, and in words what it is not.

``faults`` asks for the order of ``order``, for rows that move in accesses of their class's whole
width, each loaded once and stored once, for no spills, and for a size that GPUs can launch.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from specpool_kernels.aot.amdgcn import parse_amdgcn
from specpool_kernels.aot.code import Code
from specpool_kernels.aot.compile import TARGETS, Compiled
from specpool_kernels.aot.order import order_faults
from specpool_kernels.aot.provenance import Access, accesses
from specpool_kernels.aot.ptx import parse_ptx
from specpool_kernels.aot.sass import parse_sass
from specpool_kernels.plan import Key

ACCESS_BYTES = (16, 4, 1)
"""Bytes a thread loads or stores at once, by access class."""
MAX_THREADS = 1024
SMALL_ROWS = 64
MAX_REGISTERS = {"cuda": 64, "hip": 96}
"""Registers a thread, where a program takes at most ``SMALL_ROWS`` pairs. 64 let 32 warps live on
an NVIDIA processor; on gfx942 96 of a lane's 512 VGPRs let 5 waves live on each SIMD."""


class Reading(NamedTuple):
    """One text of a compiled kernel, understood.

    Attributes:
        code: its instructions.
        accesses: its loads and stores of global memory.
    """

    code: Code
    accesses: list[Access]

    def counts(self) -> Counter[tuple[str, str, int]]:
        """How many accesses there are of each (memory, kind, size)."""
        return Counter((a.memory, a.kind, a.size) for a in self.accesses)


def read(key: Key, compiled: Compiled) -> list[Reading]:
    """Every text of a compiled kernel."""
    readings = []
    for kind, text in compiled.texts.items():
        if kind == "ptx":
            code = parse_ptx(text, compiled.arguments)
        elif kind == "sass":
            code = parse_sass(text, compiled.arguments, compiled.target)
        else:
            code = parse_amdgcn(text, compiled.arguments)
        readings.append(Reading(code, accesses(code, key.mapped)))
    return readings


def faults(key: Key, compiled: Compiled) -> list[str]:
    """What is wrong with a compiled kernel; empty if nothing is."""
    found = lean_faults(key, compiled)
    try:
        readings = read(key, compiled)
    except ValueError as error:
        return [*found, str(error)]
    for reading in readings:
        found += width_faults(key, reading)
        if not key.copy:
            found += order_faults(key.variant.kernel, reading.code, reading.accesses)
    return found


def width_faults(key: Key, reading: Reading) -> list[str]:
    """Accesses of rows or scratch that are missing, doubled, or not of their class's width."""
    counts, kind = reading.counts(), reading.code.kind
    expected = {size for c, size in enumerate(ACCESS_BYTES) if key.classes >> c & 1}
    memories = ("pool", "scratch") if key.variant.kernel == "move_staged" else ("pool",)
    found = []
    for memory in memories:
        for access in ("load", "store"):
            sizes = {s for m, a, s in counts if (m, a) == (memory, access)}
            if sizes != expected:
                found.append(
                    f"{kind}: {memory} {access}s of {sorted(sizes)} bytes, expected "
                    f"{sorted(expected)}"
                )
        for size in expected:
            loads, stores = counts[memory, "load", size], counts[memory, "store", size]
            if loads != stores:
                found.append(f"{kind}: {loads} {memory} loads and {stores} stores of {size} bytes")
    return found


def lean_faults(key: Key, compiled: Compiled) -> list[str]:
    """Spills, local memory, too many registers or threads."""
    found = []
    target = TARGETS[compiled.target]
    threads = key.variant.num_warps(target.warp_size) * target.warp_size
    if compiled.local_bytes:
        found.append(f"{compiled.local_bytes} bytes of spills or local memory a thread")
    if compiled.threads != threads or threads > MAX_THREADS:
        found.append(f"{compiled.threads} threads a program, planned {threads} of {MAX_THREADS}")
    if key.variant.rows <= SMALL_ROWS and compiled.registers > MAX_REGISTERS[target.backend]:
        found.append(f"{compiled.registers} registers of {MAX_REGISTERS[target.backend]}")
    return found
