"""The gate's own test: kernels in which one thing is wrong, each of which it must find."""

import pytest

pytest.importorskip("triton")

from specpool_kernels import plan
from specpool_kernels.aot.compile import TARGETS, compile_key
from specpool_kernels.aot.gate import lean_faults, read, width_faults
from specpool_kernels.aot.order import order_faults
from tests.aot.conftest import key_id

BARRIER = "tl.debug_barrier()  # no thread"
END_PASS = "            _end_pass(WAIT)\n"
REGISTERS = [plan.move_variant(16), plan.move_variant(256), plan.accept_variant(16, 1)]
STAGED = plan.move_variant(9000)


def key_of(variant, classes):
    locs = plan.loc_types(variant.kernel)[-1]
    return plan.Key(variant, classes, paged=True, mapped=True, copy=False, locs=locs)


def order_of(key, target, kernels):
    """Each text's faults of order."""
    return {
        reading.code.kind: order_faults(key.variant.kernel, reading.code, reading.accesses)
        for reading in read(key, compile_key(key, target, kernels))
    }


def texts(target):
    return {"ptx", "sass"} if TARGETS[target].backend == "cuda" else {"amdgcn"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("key", [key_of(v, c) for v in REGISTERS for c in (1, 2, 4)], ids=key_id)
def test_a_missing_barrier_is_found_in_every_text(key, target, mutant):
    found = order_of(key, target, mutant(BARRIER, "pass  # no thread"))
    assert set(found) == texts(target)
    for faults in found.values():
        assert len(faults) == 1
        assert "from a pool load a pool store is reached without a barrier" in faults[0]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("key", [key_of(STAGED, c) for c in (1, 2, 4)], ids=key_id)
def test_a_missing_barrier_after_gathering_is_found_in_every_text(key, target, mutant):
    kernels = mutant(END_PASS, f"            if store == 1:\n    {END_PASS}")
    found = order_of(key, target, kernels)
    assert set(found) == texts(target)
    for faults in found.values():
        assert len(faults) == 2
        assert "from a pool load a pool store" in faults[0]
        assert "from a scratch store a scratch load" in faults[1]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("key", [key_of(STAGED, c) for c in (1, 2, 4)], ids=key_id)
def test_a_missing_barrier_before_the_next_tile_is_found_in_every_text(key, target, mutant):
    kernels = mutant(END_PASS, f"            if store == 0:\n    {END_PASS}")
    found = order_of(key, target, kernels)
    assert set(found) == texts(target)
    for faults in found.values():
        assert len(faults) == 1
        assert "from a scratch load a scratch store" in faults[0]


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [(key_of(v, c), "value = _loaded(value)", "pass") for v in REGISTERS for c in (1, 2, 4)]
    + [(key_of(STAGED, c), '"s_waitcnt vmcnt(0)"', '""') for c in (1, 2, 4)],
    ids=key_id,
)
def test_a_barrier_that_loads_outlast_is_found(key, old, new, mutant):
    """Only AMD's loads do; without the wait its compiler puts none before the barrier."""
    assert order_of(key, "gfx942", mutant(old, new))["amdgcn"]


@pytest.mark.parametrize("target", TARGETS)
def test_loads_after_stores_are_found(target, mutant):
    """Each chunk stored before the next is loaded: a barrier between them would not help."""
    kernels = mutant(
        "        values = values + (value,)\n",
        "        values = values + (value,)\n"
        "        tl.debug_barrier()\n"
        "        to = _pointers(chunk, to_offset, col, ELEMENT, ALIGN)\n"
        "        tl.store(to, value, mask=mask)\n",
    )
    for faults in order_of(key_of(REGISTERS[0], 1), target, kernels).values():
        assert any("a load follows a store" in fault for fault in faults)


@pytest.mark.parametrize("target", TARGETS)
def test_narrow_accesses_are_found(target, mutant):
    """Without the alignment hint rows move in narrower pieces than their class's."""
    kernels = mutant(
        "tl.multiple_of(base + offset[:, None], [ALIGN, ALIGN])", "base + offset[:, None]"
    )
    key = key_of(REGISTERS[0], 1)
    for reading in read(key, compile_key(key, target, kernels)):
        assert width_faults(key, reading)


@pytest.mark.parametrize("target", TARGETS)
def test_spills_and_too_many_registers_are_found(target):
    """128 threads do not hold 256 rows, and 64 rows only in many registers."""
    key = key_of(plan.Variant("move_rows", 256, 1, 128), 1)
    compiled = compile_key(key, target)
    assert any("spills" in fault for fault in lean_faults(key, compiled))
    small = key._replace(variant=plan.Variant("move_rows", 64, 1, 128))
    assert any("registers" in f for f in lean_faults(small, compile_key(small, target)))


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_program_of_another_size_than_planned_is_found(target):
    key = key_of(REGISTERS[0], 1)
    compiled = compile_key(key, target)
    assert lean_faults(key, compiled) == []
    assert lean_faults(key, compiled._replace(threads=2 * compiled.threads))
