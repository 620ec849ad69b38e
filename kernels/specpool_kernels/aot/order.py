"""Does compiled code wait at a barrier between the accesses that must not meet?

Every path of the control-flow graph is walked, loops and branches of the access classes included,
so what holds here holds whatever the compilers made of the source's order.

In registers: from no load of rows can a store of rows be reached without a barrier, and from no
store of rows a load of its access class: classes follow one another, each its loads, a barrier, its
stores. Through scratch: no load of rows reaches a store of rows, no store to scratch
a load from it, and no load from scratch the next tile's store to it, without a barrier. Where loads
return only at a wait (AMD's ``s_waitcnt vmcnt(0)``), that wait must come before the barrier. A
barrier under a condition counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from specpool_kernels.aot.code import Code
from specpool_kernels.aot.provenance import Access

_APART = {
    "move_rows": [("pool", "load", "pool", "store")],
    "move_accepted": [("pool", "load", "pool", "store")],
    "move_staged": [
        ("pool", "load", "pool", "store"),
        ("scratch", "store", "scratch", "load"),
        ("scratch", "load", "scratch", "store"),
    ],
}


def order_faults(kernel: str, code: Code, accesses: list[Access]) -> list[str]:
    """What of the order does not hold, in words; empty if it all does.

    Args:
        kernel: name of the kernel; a copy between pools needs no order and is not asked about.
        code: compiled for it.
        accesses: what it touches.
    """
    faults = []
    for memory, kind, other, then in _APART[kernel]:
        starts, ends = _at(accesses, memory, kind), _at(accesses, other, then)
        met = _reached(code, starts, ends, barriers=True)
        if met is not None:
            faults.append(
                f"{code.kind}: from a {memory} {kind} a {other} {then} is reached without a "
                f"barrier: {code.instructions[met].text}"
            )
    if kernel != "move_staged":
        for size in {a.size for a in accesses if a.memory == "pool"}:
            of_class = [a for a in accesses if a.size == size]
            starts, ends = _at(of_class, "pool", "store"), _at(of_class, "pool", "load")
            met = _reached(code, starts, ends, barriers=False)
            if met is not None:
                faults.append(f"{code.kind}: a load follows a store: {code.instructions[met].text}")
    return faults


def _at(accesses: list[Access], memory: str, kind: str) -> set[int]:
    return {a.at for a in accesses if (a.memory, a.kind) == (memory, kind)}


def _reached(code: Code, starts: Iterable[int], ends: set[int], barriers: bool) -> int | None:
    """An instruction of ``ends`` that some path leads to from ``starts``, if there is one.

    Args:
        code: whose paths are walked.
        starts: instructions that paths begin behind.
        ends: instructions that must not be reached.
        barriers: a barrier ends a path, if what came before it has returned.
    """
    seen: set[tuple[int, bool]] = set()
    work = [(f, not code.waits) for s in starts for f in code.instructions[s].follows]
    while work:
        i, returned = work.pop()
        if (i, returned) in seen:
            continue
        seen.add((i, returned))
        if i in ends:
            return i
        instruction = code.instructions[i]
        is_barrier = instruction.kind == "barrier" and not instruction.conditional
        if barriers and returned and is_barrier:
            continue
        returned = returned or instruction.kind == "wait"
        work += [(f, returned) for f in instruction.follows]
    return None
