"""Read AMDGCN, what an AMD GPU runs, as LLVM prints it.

A wave runs both sides of a branch that its threads take differently, with some of them masked; a
masked write counts here as a whole one. Of a value in several registers the first says where it
comes from.
"""

from __future__ import annotations

import re

from specpool_kernels.aot.code import ON, SHARED, STOP, Code, Instruction, Jump, argument_at, linked

_LINE = re.compile(r"\t([a-z]\w*)\s*(.*)")
_LABEL = re.compile(r"(\.L\w+):")
_OPERAND = re.compile(r"\b([vs])(?:(\d+)\b|\[(\d+):(\d+)\])")
_GLOBAL = re.compile(r"global_(load|store|atomic)_?(\w*)")
_SIZES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "short": 2, "byte": 1}
_WRITE_NOTHING = ("s_cmp", "s_bitcmp", "s_cbranch", "s_branch", "s_nop", "s_endpgm", "s_sleep",
                  "s_setprio", "s_waitcnt", "s_setreg")  # fmt: skip
_TWO_RESULTS = re.compile(r"v_(?:mad_[ui]64|div_scale|\w+_co_)")


def parse_amdgcn(text: str, arguments: dict[str, int]) -> Code:
    """The kernel in an AMDGCN text."""
    words = argument_at(arguments)
    instructions: list[Instruction] = []
    jumps: list[Jump] = []
    places: dict[str, int] = {}
    for line in text[: text.index(".Lfunc_end0")].splitlines():
        line = line.split(";")[0].rstrip()
        label, found = _LABEL.fullmatch(line), _LINE.fullmatch(line)
        if label:
            places[label[1]] = len(instructions)
        elif found:
            op, rest = found.groups()
            instructions.append(_instruction(line.strip(), op, rest, words))
            jumps.append(_jump(op, rest))
    pointer = {"s0": "arguments", "s1": "arguments"}
    return Code("amdgcn", linked(instructions, jumps, places), pointer, waits=True)


def _jump(op: str, rest: str) -> Jump:
    if op == "s_branch":
        return Jump((rest,), False)
    if op.startswith("s_cbranch"):
        return Jump((rest,), True)
    if op == "s_endpgm":
        return STOP
    if op.startswith(("s_setpc", "s_swappc", "s_call", "s_trap", "s_rfe")):
        raise ValueError(f"control by {op} is not understood")
    return ON


def _instruction(line: str, op: str, rest: str, words: dict[int, str]) -> Instruction:
    if op == "s_barrier":
        return Instruction(line, "barrier")
    if op == "s_waitcnt" and "vmcnt(0)" in rest:
        return Instruction(line, "wait")
    operands = rest.split(", ")
    found = _GLOBAL.match(op)
    if found:
        kind = found[1]
        if kind == "load":
            writes = _registers(operands[:1])
            return Instruction(line, kind, _size(op), _firsts(operands[1:]), writes)
        address = _firsts([operands[0], *operands[2:]])
        return Instruction(line, kind, 0 if kind == "atomic" else _size(op), address)
    if op.startswith("s_load"):
        writes, base = _registers(operands[:1]), _firsts(operands[1:2])
        at = int(operands[2].split()[0], 16) if operands[2].startswith("0x") else -1
        held = tuple(words.get(at + 4 * i, "") for i in range(len(writes)))
        return Instruction(line, "load", 4 * len(writes), base, writes, arguments=held)
    if op.startswith(("flat_", "buffer_", "s_store", "s_buffer", "s_atomic")):
        raise ValueError(f"a memory access that is not understood: {line}")
    if op.startswith(_WRITE_NOTHING):
        return Instruction(line)
    if op.startswith(("ds_write", "scratch_store")):
        stored = _firsts(operands[1:])
        return Instruction(line, writes=(SHARED,), reads=stored, conditional=True)
    if op.startswith(("ds_read", "scratch_load")):
        return Instruction(line, writes=_registers(operands[:1]), reads=(SHARED,))
    if op.startswith("v_cmp"):  # a mask
        return Instruction(line, writes=_registers(operands[:1]))
    results = 2 if _TWO_RESULTS.match(op) else 1
    reads = _firsts(_sources(op, operands[results:]))
    if op == "v_mov_b32_dpp":  # some threads keep what was there
        reads += _firsts(operands[:1])
    return Instruction(line, writes=_registers(operands[:1]), reads=reads)


def _sources(op: str, operands: list[str]) -> list[str]:
    """What a written pointer can come from: no mask, no factor, no 32-bit sum without carry,
    nothing that is shifted."""
    if op.startswith("v_cndmask"):
        return operands[:2]
    if "_lshl_add_" in op:
        return operands[2:] if operands[1] != "0" else operands
    if "_mad_" in op:
        return operands[2:]
    if re.match(r"v_(?:add|add3|sub|subrev)_u32|s_(?:add|sub)_i32", op):
        return []
    if re.search(r"_(?:mul|lshl|lshr|ashr|lshlrev|lshrrev|ashrrev|bfe)_", op):
        return []
    return operands


def _registers(operands: list[str]) -> tuple[str, ...]:
    out = []
    for file, one, low, high in _OPERAND.findall(", ".join(operands)):
        first, last = (one, one) if one else (low, high)
        out += [f"{file}{i}" for i in range(int(first), int(last) + 1)]
    return tuple(out)


def _firsts(operands: list[str]) -> tuple[str, ...]:
    """The first register of each operand."""
    return tuple(
        f"{file}{one or low}" for file, one, low, _ in _OPERAND.findall(", ".join(operands))
    )


def _size(op: str) -> int:
    return next(size for name, size in _SIZES.items() if name in op)
