"""Steps of any shape compile nothing that a reserve has not."""

import pytest
import torch

from specpool_kernels import move
from tests import oracle
from tests.gpu.gpu import compiled_kernels
from tests.moves.places import On, same_bytes
from tests.oracle import nhd

SLOTS = 3000
STEPS = 200


def _steps(on, mover, buffer, steps):
    """Calls whose batch, widths, lengths, strides and integer types change from step to step."""
    for step in range(steps):
        types = [(torch.int32, torch.int64)[step >> bit & 1] for bit in range(3)]
        bs, entries = 1 + step * 7 % 60, 1 + step * 5 % 16
        window = entries + step % 8
        slots = torch.randperm(SLOTS)[: bs * window].view(bs, window)
        lengths = torch.randint(0, entries + 1, (bs,))
        index = torch.rand(bs, window).argsort(1)[:, :entries].sort(1).values
        index += torch.arange(bs)[:, None] * window
        given = [t.to(on.device, d) for t, d in zip((slots, index, lengths), types, strict=True)]
        expected = oracle.moved(buffer, oracle.accepted(slots, index, lengths))
        mover.move_accepted(*given)
        same_bytes(buffer, expected)
        pairs = torch.randperm(SLOTS)[: 2 * (1 + step * 37 % 900)].view(2, -1)
        tgt, src = (p.to(on.device, d) for p, d in zip(pairs, types, strict=False))
        on.move_with(mover, [buffer], tgt[:: 1 + step % 2], src[:: 1 + step % 2])
    mover.check()


def test_steps_of_every_shape(on):
    buffer = nhd(SLOTS, (16,), device=on.device)
    _steps(on, on.mover(buffer), buffer, on.size(12, 2))


@pytest.mark.gpu
@pytest.mark.slow
def test_200_steps_compile_nothing_new():
    gpu = On("cuda", "triton")
    buffer = nhd(SLOTS, (16,), device="cuda")
    mover = gpu.mover(buffer)
    mover.reserve(1000)
    reserved = compiled_kernels()
    assert reserved > 0
    _steps(gpu, mover, buffer, STEPS)
    assert compiled_kernels() == reserved


@pytest.mark.gpu
def test_a_kernel_that_is_new_is_counted(monkeypatch):
    """The counter itself: caches that forget compile, or load, the next kernel anew."""
    gpu = On("cuda", "triton")
    move.move_rows.device_caches.clear()
    for index in range(2):
        before = compiled_kernels()
        buffer = nhd(13, (16,), device="cuda")
        gpu.mover(buffer).move(gpu.loc([1], (torch.int32, torch.int64)[index]), gpu.loc([2]))
        assert compiled_kernels() == before + 1
