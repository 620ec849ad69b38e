"""All faults, by the part of the product that they are planted in."""

from tests.faults import kernels, moves, pools

FAULTS = [*kernels.FAULTS, *moves.FAULTS, *pools.FAULTS]
