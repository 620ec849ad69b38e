"""All faults, by the part of the product that they are planted in."""

from tests.faults import kernels, moves

FAULTS = [*kernels.FAULTS, *moves.FAULTS]
