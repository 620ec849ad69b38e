"""What a CPU cannot run, the compilers still show: order, width, registers, spills.

A race between a program's loads and stores is invisible to the interpreter, so the order loads,
barrier, stores is read from the code compiled for each GPU. The controls take the barrier away and
must be found out.
"""

import re

import pytest

pytest.importorskip("triton")

from specpool_kernels import aot, plan

MAX_PAIRS = 9000
LOADS_BARRIER_STORES = re.compile(r"[BL]*L+BS+")
VARIANTS = plan.variants(MAX_PAIRS)
IN_REGISTERS = [v for v in VARIANTS if v.kernel != "move_staged"]
# each access class alone with pages and a mapping, and all of them together
TABLES = [aot.Table(1 << c, True, True) for c in range(3)]
ALL = aot.Table(7, True, True)
STAGED = plan.move_variant(MAX_PAIRS)
PASSES = re.compile(r"L+S+BL+S+B")
# AMDGCN lays the blocks of the scratch form's loops out of order, so text order says nothing there
NVIDIA = [t for t in aot.TARGETS if t.startswith("sm_")]
COPIES = [plan.copy_variant(n) for n in (1, 16 * 65_535 + 1)]


def name(value):
    if isinstance(value, plan.Variant):
        return f"{value.kernel}-{value.rows}"
    if isinstance(value, aot.Table):
        return f"classes{value.classes}"
    return str(value)


def check_lean(compiled, rows):
    assert compiled.local_bytes == 0, "spills or local memory"
    assert compiled.threads <= 1024
    if rows <= 64:
        assert compiled.registers <= (64 if compiled.kind == "sass" else 96)


def check_width(compiled, access):
    """Pool accesses have the class's whole width; a wide class has no byte access at all."""
    sequence = compiled.sequence(access)
    assert "L" in sequence
    assert "S" in sequence
    if access == 0:
        assert not re.search(r"LDG\.E\.U8|STG\.E\.U8|_ubyte|store_byte", compiled.text)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("variant", IN_REGISTERS, ids=name)
@pytest.mark.parametrize("table", TABLES, ids=name)
def test_loads_barrier_stores(target, variant, table):
    compiled = aot.compile_variant(variant, table, aot.TARGETS[target])
    access = table.classes.bit_length() - 1
    assert LOADS_BARRIER_STORES.fullmatch(compiled.sequence(access)), compiled.sequence(access)
    check_width(compiled, access)
    check_lean(compiled, variant.rows)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_all_classes_together_do_not_spill(target, variant):
    compiled = aot.compile_variant(variant, ALL, aot.TARGETS[target])
    check_lean(compiled, variant.rows)


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("variant", COPIES, ids=name)
def test_copies_need_no_barrier(target, variant):
    compiled = aot.compile_variant(variant, TABLES[0], aot.TARGETS[target], copy=True)
    assert re.fullmatch(r"L+S+", compiled.sequence(0))
    check_width(compiled, 0)
    check_lean(compiled, variant.rows)


@pytest.mark.parametrize("target", NVIDIA)
def test_scratch_passes_are_apart(target):
    """A barrier stands between the last store of a pass and the first load of the next."""
    compiled = aot.compile_variant(STAGED, TABLES[0], aot.TARGETS[target])
    assert PASSES.fullmatch(compiled.sequence(0)), compiled.sequence(0)
    check_width(compiled, 0)


@pytest.mark.parametrize("target", NVIDIA)
def test_a_missing_barrier_between_passes_is_found(target, without_barrier):
    compiled = aot.compile_variant(STAGED, TABLES[0], aot.TARGETS[target])
    assert not PASSES.fullmatch(compiled.sequence(0))


@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("table", TABLES, ids=name)
@pytest.mark.parametrize("variant", IN_REGISTERS[:5], ids=name)
def test_a_missing_barrier_is_found(target, table, variant, without_barrier):
    compiled = aot.compile_variant(variant, table, aot.TARGETS[target])
    sequence = compiled.sequence(table.classes.bit_length() - 1)
    assert not LOADS_BARRIER_STORES.fullmatch(sequence), sequence
