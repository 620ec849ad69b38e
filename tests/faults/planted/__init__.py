"""All faults, by the part of the product that they are planted in."""

from tests.faults.planted import (
    backends,
    commit,
    kernel_accept,
    kernel_pairs,
    kernel_rows,
    launches,
    loop,
    mover,
    pools,
    stores,
    trees,
)

FAULTS = [
    *kernel_rows.FAULTS,
    *kernel_pairs.FAULTS,
    *kernel_accept.FAULTS,
    *launches.FAULTS,
    *backends.FAULTS,
    *mover.FAULTS,
    *pools.FAULTS,
    *stores.FAULTS,
    *commit.FAULTS,
    *trees.FAULTS,
    *loop.FAULTS,
]
