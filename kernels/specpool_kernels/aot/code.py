"""Compiled code as a graph of instructions, whichever compiler wrote the text.

Only what the gate asks about is kept: which registers an instruction reads and writes, which
memory it touches, and where control may go next. Control that is not understood is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED = "shared"
"""All of shared and local memory, as one register that is only ever added to."""


@dataclass
class Instruction:
    """One instruction.

    Attributes:
        text: as the compiler printed it.
        kind: ``"load"``, ``"store"``, ``"atomic"`` (of global memory), ``"barrier"``, ``"wait"``
            (until global accesses have returned) or ``""``.
        size: bytes that a thread accesses.
        address: registers that make up the address.
        writes: registers written.
        reads: registers that written pointers come from; ``arg:x`` is argument x. The factors of a
            product and what is shifted are no pointers and are left out.
        arguments: where the address is that of the arguments: the argument in each written
            register.
        conditional: it may do nothing.
        follows: indices of the instructions that may run next.
    """

    text: str
    kind: str = ""
    size: int = 0
    address: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    conditional: bool = False
    follows: tuple[int, ...] = ()


@dataclass
class Code:
    """A kernel's instructions; the first one is the entry.

    Attributes:
        kind: ``"ptx"``, ``"sass"`` or ``"amdgcn"``.
        instructions: in text order.
        entry: registers that hold something at the entry, and what.
        waits: loads return only at a wait, not at a barrier.
    """

    kind: str
    instructions: list[Instruction]
    entry: dict[str, str]
    waits: bool


@dataclass
class Jump:
    """Where an instruction sends control, by label.

    Attributes:
        labels: where it may go.
        falls: it may also go on to the next instruction.
    """

    labels: tuple[str, ...]
    falls: bool


ON = Jump((), True)
STOP = Jump((), False)


def linked(
    instructions: list[Instruction], jumps: list[Jump], places: dict[str, int]
) -> list[Instruction]:
    """Fill in ``follows``.

    Args:
        instructions: in text order.
        jumps: of each instruction.
        places: index of the first instruction behind each label.
    """
    for i, (instruction, jump) in enumerate(zip(instructions, jumps, strict=True)):
        follows = [places[label] for label in jump.labels]
        if jump.falls:
            follows.append(i + 1)
        instruction.follows = tuple(follows)
    return instructions


def argument_at(arguments: dict[str, int]) -> dict[int, str]:
    """The argument that each 4-byte word of the argument block belongs to, by its offset."""
    words, offset = {}, 0
    for name, size in arguments.items():
        offset = -(-offset // size) * size
        for word in range(offset, offset + size, 4):
            words[word] = name
        offset += size
    return words
