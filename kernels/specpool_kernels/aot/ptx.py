"""Read PTX. Its registers are virtual and whole; arguments are named by their place."""

from __future__ import annotations

import re

from specpool_kernels.aot.code import ON, SHARED, STOP, Code, Instruction, Jump, linked

_LINE = re.compile(r"\s*(?:@(!?%\w+)\s+)?([a-z][\w.:]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"(\$\w+):")
_REGISTER = re.compile(r"%(?!p\d)[a-z]+\d+|_param_\d+")
_ACCESS = re.compile(r"(ld|st|atom|red)\.(?:\w+\.)*?global\b")


def parse_ptx(text: str, arguments: dict[str, int]) -> Code:
    """The kernel in a PTX text."""
    names = [f"arg:{name}" for name in arguments]
    instructions: list[Instruction] = []
    jumps: list[Jump] = []
    places: dict[str, int] = {}
    body = text[text.index("\n{") : text.index("\n}")]
    for line in body[2:].splitlines():
        line = line.split("//")[0].strip()
        label = _LABEL.fullmatch(line)
        if label:
            places[label[1]] = len(instructions)
        elif line and not line.startswith("."):
            found = _LINE.fullmatch(line)
            if not found:
                raise ValueError(f"no PTX instruction: {line!r}")
            condition, op, rest = found.groups()
            instructions.append(_instruction(line, op, rest, bool(condition), names))
            jumps.append(_jump(op, rest, bool(condition)))
    return Code("ptx", linked(instructions, jumps, places), {}, waits=False)


def _jump(op: str, rest: str, conditional: bool) -> Jump:
    if op.startswith("bra"):
        return Jump((rest,), conditional)
    if op in ("ret", "exit"):
        return Jump((), True) if conditional else STOP
    if op.startswith(("call", "brx", "trap")):
        raise ValueError(f"control by {op} is not understood")
    return ON


def _instruction(line: str, op: str, rest: str, conditional: bool, names: list[str]) -> Instruction:
    if op.startswith(("bar.sync", "barrier.sync")):
        return Instruction(line, "barrier", conditional=conditional)
    if op.startswith(("bra", "ret", "exit", "setp", "bar", "membar", "fence")):
        return Instruction(line, conditional=conditional)
    inside = re.search(r"\[(.*?)\]", rest)
    address = _registers(inside[1], names) if inside else ()
    found = _ACCESS.match(op)
    if found:
        kind = {"ld": "load", "st": "store"}.get(found[1], "atomic")
        writes = _registers(rest.split("[")[0], names) if kind == "load" else ()
        return Instruction(line, kind, _size(op), address, writes, conditional=conditional)
    if op.startswith("st.shared"):
        stored = _registers(rest.split("]")[1], names)
        return Instruction(line, writes=(SHARED,), reads=stored, conditional=True)
    if op.startswith("ld.shared"):
        writes = _registers(rest.split("[")[0], names)
        return Instruction(line, writes=writes, reads=(SHARED,), conditional=conditional)
    if op.startswith(("ld.param", "mov", "ld.const")) or not op.startswith(("ld", "st")):
        if rest.startswith("{"):  # a register, taken apart
            first, _, others = rest.partition("}")
        else:
            first, _, others = rest.partition(",")
        if op.startswith(("mul", "shl", "shr", "bfe", "div", "rem")):
            others = ""
        elif op.startswith("mad"):
            others = others.rpartition(",")[2]
        writes, reads = _registers(first, names), _registers(others, names)
        return Instruction(line, writes=writes, reads=reads, conditional=conditional)
    raise ValueError(f"a memory access that is not understood: {line!r}")


def _registers(text: str, names: list[str]) -> tuple[str, ...]:
    """The registers and arguments that a text names."""
    found = _REGISTER.findall(text)
    return tuple(
        names[int(f[7:])] if f.startswith("_param_") and int(f[7:]) < len(names) else f
        for f in found
    )


def _size(op: str) -> int:
    vector = re.search(r"\.v(\d)\b", op)
    bits = re.search(r"\.[busf](\d+)$", op)
    if bits is None:
        raise ValueError(f"an access of unknown width: {op}")
    return int(bits[1]) // 8 * (int(vector[1]) if vector else 1)
