"""A place where moves run, a device and a backend, and calls that are compared with the oracle's.

A process with TRITON_INTERPRET=1 runs the Triton kernels on CPU tensors, slowly, and nothing else;
any other runs the rest, GPUs included. Nothing here needs pytest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specpool.mover import RowMover
from tests import oracle
from tests.oracle import Buffer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    PLACES = [("cpu", "triton")]
else:
    PLACES = [("cpu", "cpu"), ("cpu", "torch"), ("cuda", "triton"), ("cuda", "torch")]


@dataclass(frozen=True)
class On:
    """A device and the backend that serves it."""

    device: str
    backend: str

    @property
    def validates(self) -> bool:
        """Whether bad values raise before anything moves."""
        return self.device == "cpu"

    @property
    def interpreted(self) -> bool:
        return INTERPRETED

    def size(self, usual: int, interpreted: int) -> int:
        """A size for this run: the interpreter takes milliseconds a program."""
        return interpreted if INTERPRETED else usual

    def loc(self, values, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def mover(self, *buffers: Buffer) -> RowMover:
        return RowMover([r for b in buffers for r in b.rows()], backend=self.backend)

    def move(self, buffers: Buffer | Sequence[Buffer], tgt, src, **dtype) -> RowMover:
        """Build a mover, move, and compare every byte and both counts with the oracle's."""
        buffers = [buffers] if isinstance(buffers, Buffer) else list(buffers)
        mover = self.mover(*buffers)
        self.move_with(mover, buffers, tgt, src, **dtype)
        return mover

    def move_with(
        self, mover: RowMover, buffers: Sequence[Buffer], tgt, src, dtype=torch.int64
    ) -> None:
        tgt, src = (
            loc if isinstance(loc, torch.Tensor) else self.loc(loc, dtype) for loc in (tgt, src)
        )
        pairs = oracle.given(tgt, src)
        self._compare(mover, buffers, pairs, lambda: mover.move(tgt, src), bool(tgt.numel()))

    def accept(self, buffers: Buffer | Sequence[Buffer], window, index, length) -> RowMover:
        """As ``move``, for a verifier's answer."""
        buffers = [buffers] if isinstance(buffers, Buffer) else list(buffers)
        mover = self.mover(*buffers)
        self.accept_with(mover, buffers, window, index, length)
        return mover

    def accept_with(self, mover, buffers: Sequence[Buffer], window, index, length) -> None:
        pairs = oracle.accepted(window, index, length)
        launches = bool(window.numel() and index.numel())
        self._compare(
            mover, buffers, pairs, lambda: mover.move_accepted(window, index, length), launches
        )

    @staticmethod
    def _compare(mover, buffers, pairs, call, launches) -> None:
        expected = [oracle.moved(b, pairs) for b in buffers]
        rows = mover.rows_moved + oracle.rows_that_move(buffers, pairs)
        count = mover.launches + launches
        call()
        for buffer, memory in zip(buffers, expected, strict=True):
            same_bytes(buffer, memory)
        assert mover.rows_moved == rows
        assert mover.launches == count
        mover.check()


def same_bytes(buffer: Buffer, expected: np.ndarray) -> None:
    """Every byte of the buffer's allocation, guard bytes included."""
    got = buffer.bytes()
    wrong = np.flatnonzero(got != expected)
    assert not wrong.size, f"{buffer.name}: {wrong.size} wrong bytes, first at {wrong[:5]}"
