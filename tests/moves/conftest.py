"""Where the move tests run: each backend on each device that this process can serve.

A process with TRITON_INTERPRET=1 runs the Triton kernels on CPU tensors, slowly, and nothing else;
any other runs the rest, GPUs included: without one, their tests are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specpool.mover import RowMover
from tests import oracle
from tests.oracle import Buffer

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    PLACES = [("cpu", "triton")]
else:
    PLACES = [("cpu", "cpu"), ("cpu", "torch"), ("cuda", "triton"), ("cuda", "torch")]


def params(places: Sequence[tuple[str, str]]) -> list:
    """Places as parameters of a fixture, those on a GPU with its mark."""
    return [
        pytest.param(
            (device, backend),
            id=f"{backend}-on-{device}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for device, backend in places
    ]


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


@pytest.fixture(params=params(PLACES))
def on(request) -> On:
    return On(*request.param)


@pytest.fixture
def checked(on, monkeypatch) -> On:
    """Movers that are built here judge every call by value before anything moves."""
    if not on.validates:
        monkeypatch.setenv("SPECPOOL_CHECK", "1")
    return on


@pytest.fixture
def register_limit(on, monkeypatch) -> int:
    """Pairs beyond which a move goes through scratch: fewer where that takes seconds."""
    if not on.interpreted:
        return 4096
    from specpool_kernels import plan

    monkeypatch.setattr(plan, "_BUCKETS", {16: plan._BUCKETS[16], 64: plan._BUCKETS[64]})
    monkeypatch.setattr(plan, "MAX_PAIRS", 64)
    return 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
