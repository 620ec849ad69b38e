"""What each load and store of compiled code touches, told by where its address comes from.

Labels flow from the kernel's arguments through registers along every path: an address to which a
word of the table adds is a row's (or, where tables have mappings and 8 bytes are loaded, a
mapping's), one that comes from the scratch argument is scratch, any other the table's, a loc's or a
counter's. An address that would be both, or that comes from nowhere, is an error. Paths that no run
takes only add labels: what is taken for a row's by them is held to more, never to less.
"""

from __future__ import annotations

from typing import NamedTuple

from specpool_kernels.aot.code import Code, Instruction

POINTERS = frozenset(
    (
        "table",
        "scratch",
        "src_loc",
        "tgt_loc",
        "out_cache_loc",
        "accept_index",
        "accept_len",
        "counters",
    )
)
"""Arguments that are addresses."""
_ROW = "row"
_SCRATCH = "scratch"
_ARGUMENTS = "arguments"
_MAPPING_BYTES = 8
_Labels = frozenset[str]
_NONE: _Labels = frozenset()


class Access(NamedTuple):
    """A load or store of global memory.

    Attributes:
        at: index of the instruction.
        kind: ``"load"`` or ``"store"``.
        memory: ``"pool"``, ``"scratch"``, ``"mapping"`` or ``"other"``.
        size: bytes a thread.
    """

    at: int
    kind: str
    memory: str
    size: int


def accesses(code: Code, mapped: bool) -> list[Access]:
    """All accesses of the code, in text order.

    Args:
        code: a kernel.
        mapped: its table may have mappings.
    """
    found = []
    for at, labels in sorted(_address_labels(code).items()):
        instruction = code.instructions[at]
        memory = _memory(labels, instruction)
        loads_slot = instruction.kind == "load" and instruction.size == _MAPPING_BYTES
        if memory == "pool" and mapped and loads_slot:
            memory = "mapping"
        found.append(Access(at, instruction.kind, memory, instruction.size))
    return found


def _memory(labels: _Labels, instruction: Instruction) -> str:
    if not labels or labels >= {_ROW, _SCRATCH}:
        raise ValueError(
            f"the address of {instruction.text!r} comes from {sorted(labels) or 'nowhere'}: rows "
            "and scratch cannot be told apart"
        )
    if _ROW in labels:
        return "pool"
    return "scratch" if _SCRATCH in labels else "other"


def _address_labels(code: Code) -> dict[int, _Labels]:
    """Labels of every access's address, over all paths that lead to it."""
    instructions = code.instructions
    heads = {
        f for i, ins in enumerate(instructions) for f in ins.follows if ins.follows != (i + 1,)
    }
    states: dict[int, dict[str, _Labels]] = {0: {r: frozenset({v}) for r, v in code.entry.items()}}
    found: dict[int, _Labels] = {}
    work = [0]
    while work:
        i = work.pop()
        state = dict(states[i])
        while True:
            instruction = instructions[i]
            if instruction.kind in ("load", "store"):
                labels = _labels(state, instruction.address)
                found[i] = found.get(i, _NONE) | labels
            _step(state, instruction)
            if instruction.follows == (i + 1,) and i + 1 not in heads:
                i += 1
                continue
            work += [f for f in instruction.follows if _merge(states, f, state)]
            break
    return found


def _step(state: dict[str, _Labels], instruction: Instruction) -> None:
    """What the registers hold behind an instruction."""
    if instruction.kind == "load":
        come_from = _labels(state, instruction.address)
        if come_from == {_ARGUMENTS}:
            for register, name in zip(instruction.writes, instruction.arguments, strict=True):
                state[register] = _pointer(name)
            return
        labels = frozenset({_ROW}) if come_from & {"table", _ROW} else _NONE
    else:
        labels = _labels(state, instruction.reads)
    for register in instruction.writes:
        kept = state.get(register, _NONE) if instruction.conditional else _NONE
        state[register] = labels | kept


def _labels(state: dict[str, _Labels], registers: tuple[str, ...]) -> _Labels:
    out = _NONE
    for register in registers:
        if register.startswith("arg:"):
            out |= _pointer(register[4:])
        else:
            out |= state.get(register, _NONE)
    return out


def _pointer(argument: str) -> _Labels:
    """The label of an argument; counts and strides have none."""
    return frozenset({argument}) if argument in POINTERS else _NONE


def _merge(states: dict[int, dict[str, _Labels]], at: int, state: dict[str, _Labels]) -> bool:
    """Add a state to what is known at an instruction; whether that was news."""
    known = states.get(at)
    if known is None:
        states[at] = dict(state)
        return True
    news = False
    for register, labels in state.items():
        if not labels <= known.get(register, _NONE):
            known[register] = known.get(register, _NONE) | labels
            news = True
    return news
