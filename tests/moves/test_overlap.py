"""A move is parallel: however sources and targets overlap, every source is read as it was."""

import pytest
import torch

from tests.oracle import nhd

KINDS = {
    "one": ([3], [9]),
    "path_0_2_5": ([0, 1, 2], [0, 2, 5]),
    "compaction": ([0, 1, 2, 3, 4], [0, 2, 3, 7, 11]),
    "slide_down_by_1": (range(11), range(1, 12)),
    "slide_up_by_1": (range(1, 12), range(11)),
    "slide_down_by_5": (range(7), range(5, 12)),
    "slide_up_by_5": (range(5, 12), range(7)),
    "slide_up_backwards": (range(11, 0, -1), range(10, -1, -1)),
    "swap": ([2, 8], [8, 2]),
    "swaps": ([0, 1, 2, 3], [1, 0, 3, 2]),
    "cycle": (range(12), [*range(1, 12), 0]),
    "cycle_back": (range(12), [11, *range(11)]),
    "reversal": (range(12), range(11, -1, -1)),
    "one_to_many": ([1, 4, 5, 6], [4, 9, 9, 9]),
    "one_to_many_of_a_target": ([3, 5, 6], [7, 3, 3]),
    "repeated_pair": ([3, 3, 4], [7, 7, 3]),
    "identity": (range(12), range(12)),
    "identity_among_others": ([0, 1, 2, 5], [0, 2, 2, 1]),
    "skipped_source": ([3, 4, 5], [-1, 7, 3]),
    "skipped_target": ([3, -1, 5], [6, 7, 3]),
    "skipped_both": ([-1, 4], [-1, 7]),
    "all_skipped": ([-1, -1, 3], [-1, 4, -1]),
    "last_slot": ([0, 11], [11, 0]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_overlap(on, kind):
    tgt, src = KINDS[kind]
    buffers = [nhd(12, (40,), device=on.device), nhd(12, (3,), torch.bfloat16, device=on.device)]
    on.move(buffers, list(tgt), list(src))


def test_a_chain_reads_the_rows_as_they_were(on):
    """By hand, without the oracle: 0 <- 1 <- 2 <- 3 in one call."""
    key = torch.arange(10, 14, dtype=torch.uint8, device=on.device)[:, None].contiguous()
    buffer = nhd(4, (1,), device=on.device)
    buffer.tensor.copy_(key)
    on.mover(buffer).move(on.loc([0, 1, 2]), on.loc([1, 2, 3]))
    assert buffer.tensor.flatten().tolist() == [11, 12, 13, 13]


def test_empty_calls_launch_nothing(on):
    buffer = nhd(4, device=on.device)
    before = buffer.bytes()
    mover = on.mover(buffer)
    for shape in ((0,), (0, 3), (3, 0)):
        none = torch.empty(shape, dtype=torch.int32, device=on.device)
        mover.move(none, none)
    assert (buffer.bytes() == before).all()
    assert mover.launches == 0
    assert mover.rows_moved == 0


def test_nothing_to_move_is_still_one_launch(on):
    buffer = nhd(4, device=on.device)
    mover = on.move(buffer, [-1, 2], [1, 2])
    assert (mover.launches, mover.rows_moved) == (1, 0)


@pytest.mark.parametrize("count", [15, 16, 17, 64, 65, 256, 257, 1024, 1025])
@pytest.mark.parametrize("step", [1, -1], ids=["down", "up"])
def test_slides_by_one_across_every_bucket(on, count, step):
    """A chunk boundary anywhere inside the pairs would lose the row that crosses it."""
    places = torch.arange(count, device=on.device)
    tgt, src = (places, places + 1) if step == 1 else (places + 1, places)
    on.move(nhd(count + 1, (24,), device=on.device), tgt, src)


@pytest.mark.parametrize("count", [4095, 4096, 4097])
def test_slides_across_4096_pairs(on, count):
    places = torch.arange(count, dtype=torch.int32, device=on.device)
    on.move(nhd(count + 1, (8,), device=on.device), places + 1, places)


@pytest.mark.parametrize("more", [1, 200, 4904], ids="{}_more".format)
@pytest.mark.parametrize("step", [1, -1], ids=["down", "up"])
def test_slides_across_the_register_limit(on, register_limit, more, step):
    count = register_limit + min(more, on.size(more, 200))
    places = torch.arange(count, device=on.device)
    tgt, src = (places, places + 1) if step == 1 else (places + 1, places)
    on.move(nhd(count + 1, (20,), device=on.device), tgt, src)


@pytest.mark.parametrize("width", [3, 12, 16, 260], ids="{}B".format)
def test_cycles_beyond_the_register_limit(on, register_limit, width):
    count = 2 * register_limit + 9
    tgt = torch.randperm(count, device=on.device)
    on.move(nhd(count, (width,), device=on.device), tgt, tgt.roll(1))


def test_many_buffers_and_skips_beyond_the_register_limit(on, register_limit):
    """More tiles than programs: a program's scratch is used again for its next tile."""
    count = register_limit + 77
    buffers = [nhd(count, (width,), device=on.device) for width in (5, 36, 144, 5, 16)]
    tgt, src = torch.randperm(count), torch.randperm(count)
    tgt[::7] = -1
    src[::5] = -1
    on.move(buffers, tgt.to(on.device), src.to(on.device))


def test_strided_locs_beyond_the_register_limit(on, register_limit):
    count = register_limit + 100
    grid = torch.randperm(2 * count, device=on.device).to(torch.int32).view(4, -1)
    on.move(nhd(2 * count, (8,), device=on.device), grid[:, ::2], grid[:, 1::2])


@pytest.mark.parametrize("far", [257, 1030, 4095])
def test_swaps_across_any_chunk(on, far):
    """Pair 0 and pair ``far`` swap their rows; all the pairs between are identity."""
    tgt = torch.arange(far + 1)
    src = tgt.clone()
    src[0], src[far] = far, 0
    on.move(nhd(far + 1, (8,), device=on.device), tgt.to(on.device), src.to(on.device))


def test_swaps_from_end_to_end_beyond_the_register_limit(on, register_limit):
    far = 2 * register_limit
    on.move(
        nhd(far + 1, (8,), device=on.device), [0, *range(1, far), far], [far, *range(1, far), 0]
    )
