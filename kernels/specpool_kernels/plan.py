"""How a call is launched: which kernel, how many pairs a program takes, how a block is split.

Nothing here depends on a call's exact counts beyond a few power-of-two buckets, so the variants
that can ever be launched for a table are few, and ``variants`` lists them all.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

MAX_PAIRS = 4096
"""Pairs of a move that fit registers; more go through scratch."""
STAGED_BYTES = 128
"""Bytes a pair takes in scratch, per program."""
MAX_SCRATCH = 64 << 20
"""Bytes of scratch at most, unless one program alone needs more."""
_GRID_Y = 65_535
# pairs a program takes: (programs a block, threads); 128 B of payload a thread
_BUCKETS = {16: (1, 128), 64: (2, 256), 256: (8, 256), 1024: (32, 256), 4096: (32, 1024)}
_STAGED = (64, 8, 256)
_LOC_TYPES = ("i32", "i64")
_LOCS = {
    "move_rows": ("src_loc", "tgt_loc"),
    "move_accepted": ("out_cache_loc", "accept_index", "accept_len"),
    "move_staged": ("src_loc", "tgt_loc"),
}


class Variant(NamedTuple):
    """The size constants of one compiled form of a kernel.

    Attributes:
        kernel: ``"move_rows"``, ``"move_accepted"`` or ``"move_staged"``.
        rows: pairs a program takes at once.
        split: programs a block.
        threads: threads a program.
    """

    kernel: str
    rows: int
    split: int
    threads: int

    def num_warps(self, warp_size: int) -> int:
        """Warps a program; a thread has the same payload on every device."""
        return max(1, self.threads // warp_size)


class Key(NamedTuple):
    """All that a compiled kernel depends on, the GPU apart.

    Attributes:
        variant: the form.
        classes: the table's access classes, bit c for class c.
        paged: the table has pages with gaps between them.
        mapped: the table has rows behind a mapping.
        copy: the table is one of copies between pools.
        locs: integer types of the kernel's loc arguments, ``"i32"`` or ``"i64"``, in order.
    """

    variant: Variant
    classes: int
    paged: bool
    mapped: bool
    copy: bool
    locs: tuple[str, ...]

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time constants, but the one that the GPU decides."""
        constants: dict[str, int | bool] = {
            "R": self.variant.rows,
            "SPLIT": self.variant.split,
            "CLASSES": self.classes,
            "PAGED": self.paged,
            "MAPPED": self.mapped,
        }
        if self.variant.kernel == "move_rows":
            constants["COPY"] = self.copy
        return constants

    def loc_names(self) -> tuple[str, ...]:
        """The kernel's loc arguments, in order."""
        return _LOCS[self.variant.kernel]


def move_variant(pairs: int) -> Variant:
    """The form that moves ``pairs`` pairs: a bucket of registers, or scratch."""
    for rows, (split, threads) in _BUCKETS.items():
        if pairs <= rows:
            return Variant("move_rows", rows, split, threads)
    return Variant("move_staged", *_STAGED)


def copy_variant(pairs: int) -> Variant:
    """The form that copies ``pairs`` pairs between pools; any split of them is right."""
    for rows, (split, threads) in _BUCKETS.items():
        if pairs <= rows * _GRID_Y:
            return Variant("move_rows", rows, split, threads)
    raise ValueError(f"a copy takes at most {MAX_PAIRS * _GRID_Y} pairs, got {pairs}")


def accept_variant(entries: int, requests: int) -> Variant:
    """The form that moves windows of ``entries`` accepted entries, each in one program."""
    for rows, (split, threads) in _BUCKETS.items():
        if entries <= rows and requests <= rows // padded(entries) * _GRID_Y:
            return Variant("move_accepted", rows, split, threads)
    raise ValueError(
        f"accept_index may have at most {MAX_PAIRS} entries a request and {_GRID_Y} programs of "
        f"requests, got [{requests}, {entries}]"
    )


def padded(entries: int) -> int:
    """``entries`` rounded up to a power of two: how a program lays windows out."""
    return 1 << max(0, entries - 1).bit_length()


def staged_programs(pairs: int, blocks: int, processors: int) -> int:
    """Programs of the form through scratch: fewer when pairs are many."""
    fit = MAX_SCRATCH // (pairs * STAGED_BYTES)
    return max(1, min(fit, 2 * processors, blocks * _STAGED[1]))


def scratch_bytes(max_pairs: int, blocks: int, processors: int) -> int:
    """Scratch that no move of up to ``max_pairs`` pairs outgrows."""
    one = max_pairs * STAGED_BYTES
    return max(one, min(MAX_SCRATCH, one * min(2 * processors, blocks * _STAGED[1])))


def variants(max_pairs: int, copy: bool = False) -> list[Variant]:
    """Every form that calls of up to ``max_pairs`` pairs can launch on one table.

    Args:
        max_pairs: pairs a call, at least 1.
        copy: the table is one of copies between pools.
    """
    if copy:
        counts = (min(max_pairs, bucket * _GRID_Y) for bucket in _BUCKETS)
        return list(dict.fromkeys(copy_variant(count) for count in counts))
    largest = move_variant(min(max_pairs, MAX_PAIRS)).rows
    rows = [bucket for bucket in _BUCKETS if bucket <= largest]
    moves = [move_variant(r) for r in rows]
    accepts = [accept_variant(r, 1) for r in rows]
    staged = [move_variant(max_pairs)] if max_pairs > MAX_PAIRS else []
    return moves + accepts + staged


def loc_types(kernel: str) -> list[tuple[str, ...]]:
    """The integer types that a kernel's loc arguments can have together."""
    return list(product(_LOC_TYPES, repeat=len(_LOCS[kernel])))


def keys(max_pairs: int, classes: int, paged: bool, mapped: bool, copy: bool) -> list[Key]:
    """Every key that calls of up to ``max_pairs`` pairs can launch on one kind of table."""
    return [
        Key(variant, classes, paged, mapped, copy, locs)
        for variant in variants(max_pairs, copy)
        for locs in loc_types(variant.kernel)
    ]


def all_keys() -> list[Key]:
    """Every key that any table can launch, whatever the number of pairs."""
    most = MAX_PAIRS * _GRID_Y
    return [
        key
        for classes, paged, mapped, copy in product(
            range(1, 8), (False, True), (False, True), (False, True)
        )
        for key in keys(most, classes, paged, mapped, copy)
    ]
