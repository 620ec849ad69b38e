"""Compile the kernels for GPUs that are not there, and read what the compilers made of them.

The Triton wheel ships all it takes. Works in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specpool_kernels import move
from specpool_kernels.plan import Variant

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
_POINTERS = {
    "table": "*i64",
    "counters": "*i64",
    "scratch": "*i8",
    "accept_index": "*i32",
    "accept_len": "*i32",
}
_ALIGNED = ("table", "counters", "scratch")
# how a pool's bytes are loaded and stored, by access class (16, 4 and 1 bytes)
_ACCESSES = {
    "sass": (
        (r"LDG\.E\.128", r"STG\.E\.128"),
        (r"LDG\.E ", r"STG\.E "),
        (r"LDG\.E\.U8", r"STG\.E\.U8"),
    ),
    "amdgcn": (
        (r"global_load_dwordx4", r"global_store_dwordx4"),
        (r"global_load_dword ", r"global_store_dword "),
        (r"global_load_[us]byte", r"global_store_byte"),
    ),
}
_BARRIER = r"BAR\.SYNC|s_barrier"


class Table(NamedTuple):
    """What a table's rows ask of a kernel; see ``table.RowTable``."""

    classes: int
    paged: bool
    mapped: bool


class Compiled(NamedTuple):
    """A kernel compiled for one target.

    Attributes:
        text: SASS or AMDGCN.
        kind: ``"sass"`` or ``"amdgcn"``.
        registers: a thread's registers (VGPRs on AMD).
        local_bytes: local memory a thread uses: its spills and arrays.
        shared_bytes: shared memory of a program.
        threads: threads of a program.
    """

    text: str
    kind: str
    registers: int
    local_bytes: int
    shared_bytes: int
    threads: int

    def sequence(self, access: int) -> str:
        """The program's accesses in text order: pool loads L, barriers B, pool stores S.

        Args:
            access: the access class whose width the loads and stores have; other accesses (the
                table's, the locs') are left out where their width differs.
        """
        load, store = _ACCESSES[self.kind][access]
        found = re.findall(f"({_BARRIER})|({load})|({store})", self.text)
        return "".join("B" if b else "L" if ld else "S" for b, ld, _ in found)


def compile_variant(
    variant: Variant, table: Table, target: GPUTarget, *, copy: bool = False, locs: str = "i64"
) -> Compiled:
    """Compile one form of a kernel as the launcher would ask for it.

    Args:
        variant: size constants, from ``plan``.
        table: what the rows ask for.
        target: one of ``TARGETS``.
        copy: a copy between pools (``move_rows`` only).
        locs: ``"i32"`` or ``"i64"``.
    """
    kernel = getattr(move, variant.kernel)
    constants: dict[str, Any] = {
        "R": variant.rows,
        "SPLIT": variant.split,
        "CLASSES": table.classes,
        "PAGED": table.paged,
        "MAPPED": table.mapped,
        "WAIT": target.backend == "hip",
    }
    if variant.kernel == "move_rows":
        constants["COPY"] = copy
    signature = {name: _type_of(name, constants, locs) for name in kernel.arg_names}
    attributes = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if n in _ALIGNED
    }
    warps = variant.num_warps(target.warp_size)
    binary = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=target,
        options={"num_warps": warps},
    )
    read = _read_amdgcn if target.backend == "hip" else _read_cubin
    return read(binary.asm, binary.metadata.shared, warps * target.warp_size)


def _type_of(name: str, constants: dict[str, Any], locs: str) -> str:
    if name in constants:
        return "constexpr"
    if name in ("src_loc", "tgt_loc", "out_cache_loc"):
        return f"*{locs}"
    return _POINTERS.get(name, "i32")


def _read_amdgcn(asm: dict[str, Any], shared: int, threads: int) -> Compiled:
    text = str(asm["amdgcn"])

    def fact(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found is not None, f"no {name} in the metadata"
        return int(found.group(1))

    local = fact("private_segment_fixed_size") + 4 * fact("vgpr_spill_count")
    return Compiled(text, "amdgcn", fact("vgpr_count"), local, shared, threads)


def _read_cubin(asm: dict[str, Any], shared: int, threads: int) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        text, usage = (
            subprocess.run(
                [tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    return Compiled(text, "sass", registers, stack + local, shared, threads)
