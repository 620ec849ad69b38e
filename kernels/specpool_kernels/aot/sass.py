"""Read SASS, what an NVIDIA GPU runs, as ``cuobjdump`` prints it.

A wide value lies in neighbouring registers; for where a value comes from its first one is enough.
A reconvergence (BSYNC) may go where a BSSY that leads to it said, or straight on.
"""

from __future__ import annotations

import re

from specpool_kernels.aot.code import (
    ON,
    SHARED,
    STOP,
    Code,
    Instruction,
    Jump,
    argument_at,
    linked,
)

_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_OPERAND = re.compile(r"\b(U?R\d+)\b|c\[0x0\]\[0x([0-9a-f]+)\]")
_PREDICATE = re.compile(r"!?U?P(?:\d|T)|B\d+|U?RZ")
_ARGUMENTS = {"sm_80": 0x160, "sm_90": 0x210, "sm_100": 0x380}
"""Where arguments begin in the constant bank."""
_WRITE_NOTHING = (
    "RED", "BAR", "BRA", "EXIT", "RET", "NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "DEPBAR",
    "ISETP", "UISETP", "FSETP", "DSETP", "PLOP3", "UPLOP3", "MEMBAR", "ERRBAR", "CCTL", "R2P",
    "YIELD", "LDGDEPBAR", "ACQBULK",
)  # fmt: skip
_SIZES = {".128": 16, ".64": 8, ".U8": 1, ".S8": 1, ".U16": 2, ".S16": 2}


def parse_sass(text: str, arguments: dict[str, int], target: str) -> Code:
    """The kernel in a SASS text for ``target``."""
    words = {_ARGUMENTS[target] + at: f"arg:{name}" for at, name in argument_at(arguments).items()}
    found = [m.groups() for m in map(_LINE.match, text.splitlines()) if m]
    places = {f"0x{int(at, 16):x}": i for i, (at, *_) in enumerate(found)}
    instructions, jumps = [], []
    for _, condition, op, rest in found:
        conditional = bool(condition) and condition not in ("PT", "UPT")
        line = f"{'@' + condition + ' ' if condition else ''}{op} {rest}"
        instructions.append(_instruction(line, op, rest, conditional, words))
        jumps.append(_jump(op, rest, conditional))
    _join(instructions, jumps, places)
    return Code("sass", linked(instructions, jumps, places), {}, waits=False)


def _join(instructions: list[Instruction], jumps: list[Jump], places: dict[str, int]) -> None:
    """Give every reconvergence the targets of what can have set its barrier register last."""
    for start, instruction in enumerate(instructions):
        begin = re.match(r"(?:@\S+ )?BSSY\S* (B\d+), (\w+)", instruction.text)
        if not begin:
            continue
        barrier, target = begin.groups()
        seen, work = set(), [start + 1]
        while work:
            i = work.pop()
            if i in seen or i >= len(instructions):
                continue
            seen.add(i)
            if re.search(rf"BSYNC\S* .*\b{barrier}$", instructions[i].text):
                jumps[i] = Jump((*jumps[i].labels, target), True)
            elif not re.search(rf"BSSY\S* {barrier},", instructions[i].text):
                work += [places[label] for label in jumps[i].labels]
                work += [i + 1] if jumps[i].falls else []


def _jump(op: str, rest: str, conditional: bool) -> Jump:
    base = op.split(".")[0]
    if base in ("BRA", "CALL"):  # a call is a jump: nothing here returns
        label = rest.split(", ")[-1]
        return Jump((label,), conditional or ", " in rest)
    if base == "EXIT":
        return Jump((), True) if conditional or rest else STOP
    if base in ("BRX", "BRXU", "JMP", "JMX", "JMXU", "RET", "KILL", "BPT", "BREAK"):
        raise ValueError(f"control by {op} is not understood")
    return ON


def _instruction(
    line: str, op: str, rest: str, conditional: bool, words: dict[int, str]
) -> Instruction:
    base = op.split(".")[0]
    if op.startswith("BAR.SYNC"):
        return Instruction(line, "barrier", conditional=conditional)
    if base in ("LD", "ST", "LDGSTS", "UBLKCP", "UTMALDG", "ATOM"):
        raise ValueError(f"a memory access that is not understood: {line}")
    operands = re.split(r", ", rest)
    if base in ("LDG", "STG", "ATOMG", "RED", "REDG"):
        kind = {"LDG": "load", "STG": "store"}.get(base, "atomic")
        inside = next(o for o in operands if "[" in o and not o.startswith("c["))
        address = _registers(re.sub(r"desc\[\w+\]", "", inside), words)
        writes = _written(op, operands) if base in ("LDG", "ATOMG") else ()
        size = next((s for name, s in _SIZES.items() if name in op), 4)
        return Instruction(line, kind, size, address, writes, conditional=conditional)
    if base.startswith(_WRITE_NOTHING):
        return Instruction(line, conditional=conditional)
    if base in ("STS", "STL"):
        stored = _registers(operands[-1], words)
        return Instruction(line, writes=(SHARED,), reads=stored, conditional=True)
    writes = _written(op, operands)
    reads = (SHARED,) if base in ("LDS", "LDL") else _read(op, operands, words)
    return Instruction(line, writes=writes, reads=reads, conditional=conditional)


def _read(op: str, operands: list[str], words: dict[int, str]) -> tuple[str, ...]:
    """What a written pointer can come from: no factor of a product, nothing that is shifted."""
    values = [o for o in operands if o in ("RZ", "URZ") or not _PREDICATE.fullmatch(o)][1:]
    base = op.removeprefix("U").split(".")[0]
    if base == "IMAD" and ".IADD" not in op and ".X" not in op:
        values = [] if ".SHL" in op else values[2:]
    elif base == "LEA":
        values = values[1:]
    elif base == "SHF":
        values = []
    return _registers(", ".join(values), words)


def _written(op: str, operands: list[str]) -> tuple[str, ...]:
    """The first operand that is no predicate, and its neighbours where the value is wide."""
    for operand in operands:
        found = re.fullmatch(r"(U?R)(\d+)", operand)
        if found:
            pair = op.startswith("CS2R") and not op.endswith(".32")
            pair = pair or bool(re.search(r"\.64\b|\.WIDE\b", op))
            count = 4 if ".128" in op else 2 if pair else 1
            return tuple(f"{found[1]}{int(found[2]) + i}" for i in range(count))
        if not _PREDICATE.fullmatch(operand):
            break
    return ()


def _registers(text: str, words: dict[int, str]) -> tuple[str, ...]:
    """The registers and arguments that a text names."""
    found = (
        register or words.get(int(word, 16) & ~3, "") for register, word in _OPERAND.findall(text)
    )
    return tuple(f for f in found if f)
