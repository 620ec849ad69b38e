"""Compile the kernels for GPUs that are not there.

The Triton wheel ships all it takes. Works in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specpool_kernels import move
from specpool_kernels.plan import Key

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {"table": "*i64", "counters": "*i64", "scratch": "*i8"}
"""Allocated by the launcher and so aligned, as the JIT notices; locs are not looked at."""


class Compiled(NamedTuple):
    """A kernel compiled for one target.

    Attributes:
        target: a name in ``TARGETS``.
        texts: by kind: ``"ptx"`` and ``"sass"``, or ``"amdgcn"``.
        arguments: names of the kernel's runtime arguments, in order, and the bytes of each.
        registers: a thread's registers (VGPRs on AMD).
        local_bytes: local memory a thread uses: its spills and arrays.
        shared_bytes: shared memory of a program.
        threads: threads of a program, from the compiled metadata.
    """

    target: str
    texts: dict[str, str]
    arguments: dict[str, int]
    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int


def compile_key(key: Key, target: str, kernels: ModuleType = move) -> Compiled:
    """Compile what the launcher launches under a key.

    Args:
        key: from ``plan``.
        target: a name in ``TARGETS``.
        kernels: the module to take the kernel from.
    """
    gpu = TARGETS[target]
    kernel = getattr(kernels, key.variant.kernel)
    constants = {**key.constants(), "WAIT": gpu.backend == "hip"}
    locs = iter(key.locs)
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in key.loc_names():
            signature[name] = f"*{next(locs)}"
        else:
            signature[name] = _POINTERS.get(name, "i32")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name in _POINTERS
    }
    binary = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=gpu,
        options={"num_warps": key.variant.num_warps(gpu.warp_size)},
    )
    arguments = {
        name: 8 if kind.startswith("*") else 4
        for name, kind in signature.items()
        if kind != "constexpr"
    }
    read = _read_amdgcn if gpu.backend == "hip" else _read_cubin
    return read(target, binary.asm, arguments, binary.metadata.shared)


def _read_amdgcn(
    target: str, asm: dict[str, Any], arguments: dict[str, int], shared: int
) -> Compiled:
    text = str(asm["amdgcn"])

    def fact(name: str) -> int:
        return _number(rf"\.{name}:\s+(\d+)", text)

    local = fact("private_segment_fixed_size") + 4 * fact("vgpr_spill_count")
    return Compiled(
        target,
        {"amdgcn": text},
        arguments,
        registers=fact("vgpr_count"),
        local_bytes=local,
        shared_bytes=shared,
        threads=fact("max_flat_workgroup_size"),
    )


def _read_cubin(
    target: str, asm: dict[str, Any], arguments: dict[str, int], shared: int
) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "-sass", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    ptx = str(asm["ptx"])
    return Compiled(
        target,
        {"ptx": ptx, "sass": text},
        arguments,
        registers=_number(r"REG:(\d+)", text),
        local_bytes=_number(r"STACK:(\d+)", text) + _number(r"LOCAL:(\d+)", text),
        shared_bytes=shared,
        threads=_number(r"\.(?:req|max)ntid (\d+)", ptx),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiled text does not say {pattern!r}")
    return int(found.group(1))
