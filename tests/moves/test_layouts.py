"""Paged layouts: head-major pages and split pages, moved within and across pages."""

import pytest
import torch

from tests.oracle import hnd, nhd, page_split

PAGE_SIZES = [1, 2, 3, 5, 16, 24, 64]


def _across(slots: int, on) -> tuple[torch.Tensor, torch.Tensor]:
    """A few pairs that stay in a page, cross pages and reach the last slot, as a cycle."""
    picks = sorted({0, 1, slots // 3, slots // 2, slots // 2 + 1, slots - 2, slots - 1})
    tgt = on.loc(picks)
    return tgt, tgt.roll(1)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dim", [5, 8, 64])
def test_head_major_pages(on, page_size, dim):
    buffer = hnd(4, 2, page_size, dim, torch.bfloat16, device=on.device)
    on.move(buffer, *_across(buffer.slots, on))


@pytest.mark.parametrize("gap", [1, 8])
def test_head_major_pages_with_gaps(on, gap):
    buffer = hnd(4, 3, 6, 8, torch.bfloat16, gap=gap, device=on.device)
    on.move(buffer, *_across(buffer.slots, on))


def test_one_head_and_one_page(on):
    """One head is a flat buffer, one page has no page stride."""
    for buffer in (hnd(4, 1, 6, 8, device=on.device), hnd(1, 2, 6, 8, device=on.device)):
        on.move(buffer, *_across(buffer.slots, on))


def test_heads_of_many_kinds_move_in_one_launch(on):
    buffers = [
        hnd(6, 2, 4, 16, torch.bfloat16, device=on.device, name="key"),
        hnd(6, 2, 4, 24, torch.bfloat16, device=on.device, name="value"),
        hnd(3, 1, 8, 4, torch.float32, device=on.device, name="index"),
        nhd(24, (2, 3), device=on.device, name="flat"),
        page_split(4, 6, (20, 4), device=on.device),
    ]
    mover = on.move(buffers, *_across(24, on))
    assert mover.launches == 1


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("widths", [(576, 8), (128, 4), (3, 1, 2)], ids=str)
def test_split_pages(on, page_size, widths):
    buffer = page_split(4, page_size, widths, device=on.device)
    on.move(buffer, *_across(buffer.slots, on))


@pytest.mark.parametrize("padding", [0, 8, 448])
@pytest.mark.parametrize("gap", [0, 64])
def test_padded_split_pages(on, padding, gap):
    """64 x 576 payload bytes, 64 x 8 scale bytes, padded to a multiple of 576 (and beyond)."""
    buffer = page_split(3, 64, (576, 8), padding=padding, gap=gap, device=on.device)
    on.move(buffer, *_across(buffer.slots, on))


def test_a_page_stride_below_page_size_token_strides(on):
    """Rows packed closer across a page's end than within it: the gap is negative."""
    buffer = page_split(5, 3, (4, 8), device=on.device)
    on.move(buffer, *_across(buffer.slots, on))


@pytest.mark.parametrize("step", [1, -1], ids=["down", "up"])
def test_slides_across_page_ends(on, step):
    buffer = page_split(9, 7, (16, 4), padding=4, device=on.device)
    places = torch.arange(buffer.slots - 1, device=on.device)
    on.move(buffer, *((places, places + 1) if step == 1 else (places + 1, places)))


@pytest.mark.parametrize("page_size", [7, 48])
def test_paged_slides_in_every_bucket(on, page_size):
    for count in (65, 257, 1025):
        buffer = hnd(count // page_size + 1, 2, page_size, 6, device=on.device)
        places = torch.arange(count, dtype=torch.int32, device=on.device) % buffer.slots
        on.move(buffer, (places + 1) % buffer.slots, places)


def test_pages_beyond_the_register_limit(on, register_limit):
    count = register_limit + 77
    buffer = page_split(count // 24 + 1, 24, (20, 4), padding=8, device=on.device)
    places = torch.arange(count, device=on.device)
    on.move(buffer, (places + 1) % buffer.slots, places)
