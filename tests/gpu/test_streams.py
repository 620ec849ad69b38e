"""Moves run on the current stream, and what they use stays as it is until they have run."""

import pytest
import torch

from tests import oracle
from tests.gpu.gpu import busy, other_stream
from tests.moves.places import same_bytes
from tests.oracle import nhd

COUNT = 2000


def _expected(buffer, steps):
    """The buffer's bytes after moves in order, as the oracle sees them."""
    before = buffer.bytes()
    for pairs in steps:
        buffer.memory.copy_(torch.from_numpy(oracle.moved(buffer, pairs)))
    after = buffer.bytes()
    buffer.memory.copy_(torch.from_numpy(before))
    return after


def test_moves_follow_the_current_stream(on):
    """Each move stands between two writes of its stream, which another stream would overtake."""
    buffer = nhd(4096, (256,), torch.float32, device=on.device)
    key = buffer.tensor
    mover = on.mover(buffer)
    mover.reserve(1)
    tgt, src = on.loc([0]), on.loc([5])
    with other_stream(on):
        for step in range(20):
            busy(on, 1_000_000)
            key.fill_(step)
            key[5].fill_(100 + step)
            mover.move(tgt, src)
    assert key[:7, 0].tolist() == [119, 19, 19, 19, 19, 119, 19]


def test_locs_freed_while_the_move_is_in_flight(on):
    """Their memory is handed out again at once, to what is queued behind the move."""
    buffer = nhd(COUNT, (16,), device=on.device)
    mover = on.mover(buffer)
    orders = [torch.randperm(COUNT) for _ in range(6)]
    expected = _expected(buffer, [oracle.given(o, o.roll(1)) for o in orders])
    mover.move(on.loc([0]).expand(COUNT), on.loc([0]).expand(COUNT))  # compiles; moves nothing
    with other_stream(on):
        on_device = [order.to(on.device) for order in orders]
        busy(on)
        for order in on_device:
            tgt = order + 0
            src = tgt.roll(1)
            mover.move(tgt, src)
            del tgt, src
            torch.full((COUNT,), 7, device=on.device)
    same_bytes(buffer, expected)


def test_copies_that_the_mover_makes_itself(on):
    """Locs of three dimensions are flattened into a tensor that nobody but the mover holds."""
    buffer = nhd(COUNT, (16,), device=on.device)
    mover = on.mover(buffer)
    orders = [torch.randperm(COUNT).view(10, 20, 10) for _ in range(4)]
    turned = [(o.transpose(0, 2), o.roll(1).transpose(0, 2)) for o in orders]
    expected = _expected(buffer, [oracle.given(t, s) for t, s in turned])
    mover.move(on.loc([0]).expand(COUNT), on.loc([0]).expand(COUNT))
    with other_stream(on):
        on_device = [(t.to(on.device), s.to(on.device)) for t, s in turned]
        busy(on)
        for tgt, src in on_device:
            mover.move(tgt, src)
            torch.full((COUNT,), 7, device=on.device)
    same_bytes(buffer, expected)


@pytest.mark.parametrize("reserved", [False, True], ids=["grown", "reserved"])
def test_streams_share_no_scratch(on, register_limit, reserved):
    """Two streams move more pairs than registers hold through one mover, at the same time."""
    count = register_limit + 50
    buffer = nhd(2 * count, (16,), device=on.device)
    mover = on.mover(buffer)
    low = torch.arange(count, device=on.device)
    halves = (low, low.roll(1)), (low + count, (low + count).roll(1))
    rounds = on.size(30, 2)
    steps = [oracle.given(*half) for half in halves] * rounds
    expected = _expected(buffer, steps)
    if reserved:
        mover.reserve(count)
    for half in halves:  # compiles, and moves nothing
        mover.move(torch.full_like(half[0], -1), half[1])
    with other_stream(on):
        busy(on)
        for _ in range(rounds):
            mover.move(*halves[0])
        first_is_queued = on.device == "cpu" or not torch.cuda.current_stream().query()
        _beside(on, lambda: [mover.move(*halves[1]) for _ in range(rounds)])
    assert first_is_queued
    same_bytes(buffer, expected)


def _beside(on, call):
    """Run on a third stream, which waits for nothing but its own start."""
    if on.device == "cpu":
        call()
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy(on)  # so that both begin together
        call()
    torch.cuda.default_stream().wait_stream(stream)
