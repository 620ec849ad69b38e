"""Pairs that a GPU dropped, noticed without a synchronisation.

On a GPU a pair with a slot outside the pool is dropped and counted on the device. Nobody in the
engine would read that count, so it is copied to the host now and then and looked at later, when it
has arrived.
"""

from __future__ import annotations

import logging

import torch

from specpool.mover import RowMover
from specpool_kernels.device import is_capturing, on_device

logger = logging.getLogger("specpool.sglang")
EVERY = 64
"""Moves from one copy of the count to the next."""


class DroppedPairs:
    """Logs an ERROR when a mover on a GPU has dropped pairs.

    Args:
        mover: whose count is watched; on a CPU bad pairs raise, and there is nothing to watch.
    """

    def __init__(self, mover: RowMover) -> None:
        self._mover = mover
        self._moves = 0
        self._reported = 0
        self._count: torch.Tensor | None = None
        self._arrival: torch.cuda.Event | None = None

    def look(self) -> None:
        """Called after a move: report a count that has arrived, send for one now and then."""
        device = self._mover.device
        if device is None or device.type != "cuda" or is_capturing(device):
            return
        if self._arrival is not None and self._arrival.query():  # type: ignore[no-untyped-call]
            self._arrival = None
            self._report()
        self._moves += 1
        if self._arrival is None and self._moves % EVERY == 0:
            self._send(device)

    def _send(self, device: torch.device) -> None:
        if self._count is None:
            self._count = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        with on_device(device):
            self._mover.copy_dropped(self._count)
            self._arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrival.record()

    def _report(self) -> None:
        assert self._count is not None
        dropped = int(self._count)
        if dropped > self._reported:
            logger.error(
                "%d pairs named slots outside the pool and were not moved; SPECPOOL_CHECK=1 names "
                "the call",
                dropped - self._reported,
            )
        self._reported = dropped
