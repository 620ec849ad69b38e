"""Faults that people met in public engines, each as its kind, in the part that moves rows."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests.moves.conftest import same_bytes
from tests.oracle import hnd, nhd


def test_element_types_that_indexing_cannot_copy(on):
    """sglang#15279: an fp4 cache. Bytes move as bytes."""
    on.move(nhd(8, (2, 16), torch.float4_e2m1fn_x2, device=on.device), [0, 1], [5, 0])


def test_a_partial_page_goes_to_every_branch(on):
    """sglang#7725: prefix 7, page 4, topk 8: 3 rows of the last page, to 7 more branches: 21."""
    buffer = nhd(64, (40,), device=on.device)
    tgt = [8 + 4 * branch + row for branch in range(7) for row in range(3)]
    mover = on.move(buffer, tgt, [4, 5, 6] * 7)
    assert mover.rows_moved == 21


def test_accept_index_is_steps_plus_1_wide_not_drafts(on):
    """sglang#26866: reading bs * num_draft_tokens entries runs past it."""
    bs, entries, drafts = 2, 4, 16
    memory = torch.full((bs * drafts,), 3, dtype=torch.int32, device=on.device)
    index = memory[: bs * entries].view(bs, entries)
    index.copy_(on.loc([[0, 3, 9, -1], [16, 17, 30, 31]]))
    window = torch.randperm(bs * drafts, device=on.device)
    on.accept(nhd(40, device=on.device), window, index, on.loc([3, 4]))


def test_an_accept_of_nothing_but_minus_1(on):
    """A TensorRT-LLM fork: every index is -1 in graph warm-up."""
    window = torch.zeros(32, dtype=torch.int64, device=on.device)
    index = torch.full((4, 6), -1, dtype=torch.int32, device=on.device)
    for length in (0, 6):
        mover = on.accept(nhd(8, device=on.device), window, index, on.loc([length] * 4))
        assert mover.rows_moved == 0


def test_strides_for_a_batch_of_more_than_one(on):
    """The same fork: a wrong stride only shows with several, ragged requests."""
    window = torch.randperm(64, device=on.device)[: 5 * 8].view(5, 8)
    index = torch.full((5, 6), -1, dtype=torch.int32)
    lengths = [4, 1, 0, 3, 6]
    for r, length in enumerate(lengths):
        for j in range(length):
            index[r, j] = r * 8 + min(j + j // 2, 7)
    on.accept(hnd(16, 2, 4, 8, device=on.device), window, index.to(on.device), on.loc(lengths))


def test_target_and_draft_move_alike(on):
    """EAGLE#336: only the target's KV was compacted. One mover holds both."""
    target = [nhd(32, (64,), device=on.device) for _ in range(3)]
    draft = nhd(32, (24,), device=on.device)
    window, index = torch.arange(8, 16, device=on.device), on.loc([[0, 2, 5]])
    mover = on.accept([*target, draft], window, index, on.loc([3]))
    assert mover.launches == 1


def test_other_captures_keyed_by_slot_move_in_the_same_launch(on):
    """sglang#37949: routed experts and indexer top-k stayed in tree order."""
    key = nhd(16, device=on.device)
    experts, top_k = nhd(16, (2,), torch.int16, device=on.device), nhd(16, (5,), device=on.device)
    mover = on.mover(key)
    mover.attach("routed experts", experts.tensor)
    mover.attach("indexer top-k", top_k.tensor)
    on.accept_with(
        mover, [key, experts, top_k], on.loc([4, 5, 6, 7]), on.loc([[0, 3]]), on.loc([2])
    )
    assert mover.launches == 1


@pytest.mark.parametrize("count", [256, 257, 300, 513])
def test_overlap_across_chunks(on, count):
    """sglang#40734: a forward slide in chunks of 256 writes row 257 before it is read."""
    places = torch.arange(count, device=on.device)
    on.move(nhd(count + 1, (16,), device=on.device), places + 1, places)


def test_padded_entries_of_a_captured_batch(on):
    """vllm#43810, #43682, tokenspeed#298: slots of -1, an accept_len of 0, garbage in its row."""
    window = on.loc([[8, 9, 10], [-1, -1, -1], [0, 0, 0]])
    index = on.loc([[0, 2, -1], [3, 5, 4], [99, -5, 10**9]])
    mover = on.accept(nhd(16, device=on.device), window, index, on.loc([2, 3, 0]))
    assert mover.rows_moved == 1


def test_a_smaller_batch_in_the_same_tensors(on):
    """sglang#10892, #31364: what an earlier, larger batch left behind is not replayed."""
    buffer = nhd(32, device=on.device)
    mover = on.mover(buffer)
    window = torch.arange(24, device=on.device).view(3, 8)
    index = on.loc([[0, 2, 5], [8, 9, 15], [16, 20, 23]], torch.int32)
    length = on.loc([3, 3, 3], torch.int32)
    on.accept_with(mover, [buffer], window, index, length)
    length.copy_(on.loc([2, 0, 0]))
    window[0] = on.loc([30, 29, 28, 27, 26, 25, 24, 23])
    on.accept_with(mover, [buffer], window, index, length)
    tgt, src = on.loc([1, 2, 3]), on.loc([4, 5, 6])
    on.move_with(mover, [buffer], tgt, src)
    tgt[1:] = -1
    on.move_with(mover, [buffer], tgt, src)


def test_layouts_are_declared_not_guessed(on):
    """vllm#48929: [4, 4, 4, 4] is four slots of 64 elements, or four pages of four."""
    for layout, moved in (("nhd", range(64)), ("hnd", [0, 1, 2, 3, 16, 17, 18, 19])):
        moved = [*moved, *(m + 32 for m in moved)] if layout == "hnd" else moved
        tensor = torch.arange(256, dtype=torch.uint8, device=on.device).view(4, 4, 4, 4)
        expected = tensor.flatten().clone()
        step = 64 if layout == "nhd" else 4
        expected[list(moved)] += step
        RowMover(rows_from(tensor, layout), backend=on.backend).move(on.loc([0]), on.loc([1]))
        assert torch.equal(tensor.flatten(), expected)


def test_the_first_width_is_not_everyones(on):
    """A 128-byte first buffer made a 512-byte one move 128 of its bytes."""
    on.move([nhd(8, (128,), device=on.device), nhd(8, (512,), device=on.device)], [0], [5])


def test_padding_pairs_touch_nothing(on):
    """A target of -1 wrote the row before the buffer; the guard bytes would show it."""
    buffer = nhd(8, device=on.device)
    before = buffer.bytes()
    on.mover(buffer).move(on.loc([-1, 0, -1]), on.loc([0, 0, -1]))
    same_bytes(buffer, before)
