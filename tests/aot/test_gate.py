"""What a CPU cannot run, the compilers still show: order, width, registers, spills.

A race between a program's loads and stores is invisible to the interpreter, so the order loads,
barrier, stores is read from the code compiled for each GPU. What the gate must find is planted in
``test_mutants``.
"""

from itertools import product

import pytest

pytest.importorskip("triton")

from specpool_kernels import plan
from specpool_kernels.aot.compile import TARGETS, compile_key
from specpool_kernels.aot.cover import covering, forms
from specpool_kernels.aot.gate import faults
from tests.aot.conftest import key_id

COVERING = covering()


@pytest.mark.parametrize(("key", "target"), COVERING, ids=key_id)
def test_compiled_code_keeps_order_width_and_size(key, target):
    assert faults(key, compile_key(key, target)) == []


def test_the_keys_compiled_here_cover_all_choices():
    every = plan.all_keys()
    assert len(COVERING) == len(set(COVERING)) == 292
    assert {key for key, _ in COVERING} <= set(every)
    classes = {(k.variant, k.copy, k.classes, t) for k, t in COVERING if k.paged and k.mapped}
    flags = {(k.variant, k.copy, k.paged, k.mapped, TARGETS[t].backend) for k, t in COVERING}
    locs = {(k.variant, k.copy, k.locs) for k, _ in COVERING}
    for variant, copy in forms():
        alone = () if copy else (1, 2, 4)
        assert {(variant, copy, c, t) for c in (*alone, 7) for t in TARGETS} <= classes
        assert {
            (variant, copy, *f, b) for *f, b in product((0, 1), (0, 1), ("cuda", "hip"))
        } <= flags
    assert {(k.variant, k.copy, k.locs) for k in every} == locs
