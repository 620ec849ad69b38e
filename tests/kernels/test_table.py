"""The device table, word by word, and the division that stands for ``slot // page_size``."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from specpool.rows import rows_from
from specpool_kernels.table import (
    CHUNKS,
    CLASS_ALIGNMENT,
    CLASS_CHUNK_BYTES,
    WORDS,
    build_table,
    page_division,
)


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
@example(1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 1)
@example(2**31 - 1, 2**31 - 2)
@example(2**30 + 1, 2**31 - 1)
@example(3, 2**31 - 1)
def test_page_division_is_exact(page_size, slot):
    multiplier, shift = page_division(page_size)
    assert slot * multiplier >> shift == slot // page_size
    assert 0 < multiplier < 2**32
    assert slot * multiplier < 2**63


@given(st.integers(1, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_page_division_is_exact_at_page_ends(page_size, page):
    multiplier, shift = page_division(page_size)
    first = page % (2**31 // page_size) * page_size
    for slot in (first, first + page_size - 1, first - 1):
        if 0 <= slot < 2**31:
            assert slot * multiplier >> shift == slot // page_size


@pytest.mark.parametrize("page_size", [*range(1, 130), 192, 256, 1000, 4096])
def test_page_division_is_exact_for_every_small_slot(page_size):
    multiplier, shift = page_division(page_size)
    slots = torch.arange(5000)
    assert torch.equal(slots * multiplier >> shift, slots // page_size)


def _chunks(words: list[int], first: int = 16) -> list[tuple[int, int]]:
    """(address, bytes) of a block's chunks, without padding."""
    parts = [(w & (2**56 - 1), w >> 56 & 255) for w in words[first : first + CHUNKS]]
    return [(address, size) for address, size in parts if size]


def _covered(table) -> list[tuple[int, int]]:
    return sorted(c for block in table.words.tolist() for c in _chunks(block))


def test_a_block_is_256_bytes():
    table = build_table(rows_from(torch.zeros(4, 16)))
    assert table.words.shape == (1, WORDS)
    assert table.words.dtype == torch.int64
    assert WORDS * 8 == 256


def test_words_of_a_flat_row():
    key = torch.zeros(10, 64, dtype=torch.uint8)
    (block,) = build_table(rows_from(key)).words.tolist()
    access, flags, weight = block[0] & 255, block[0] >> 8 & 0xFFFFFF, block[0] >> 32
    assert (access, flags, weight) == (0, 3, 1)
    assert block[1:4] == [10, 10, 0]
    assert block[4:6] == [64, 0]
    assert _chunks(block) == [(key.data_ptr(), 64)]


def test_words_of_pages_and_a_mapping():
    pages = torch.zeros(4, 6 * 20 + 8, dtype=torch.uint8)
    mapping = torch.zeros(100, dtype=torch.int64)
    rows = rows_from(pages, "page_split", page_size=6, widths=(16, 4), mapping=mapping)
    table = build_table(rows)
    assert (table.paged, table.mapped, table.copy) == (True, True, False)
    for block, row in zip(table.words.tolist(), rows, strict=True):
        assert block[1:4] == [100, 24, mapping.data_ptr()]
        assert block[4:6] == [row.width, 128 - 6 * row.width]
        assert tuple(block[6:8]) == page_division(6)
        assert _chunks(block) == [(row.address, row.width)]


def test_pages_without_gaps_are_flat():
    table = build_table(rows_from(torch.zeros(4, 1, 6, 16), "hnd"))
    assert not table.paged


@pytest.mark.parametrize("width", [1, 7, 8, 9, 12, 32, 36, 100, 128, 132, 1000, 1024, 8191, 8192])
def test_chunks_cover_each_row_once(width):
    buffers = [torch.zeros(4, width, dtype=torch.uint8) for _ in range(3)]
    table = build_table([r for b in buffers for r in rows_from(b)])
    covered = [byte for at, size in _covered(table) for byte in range(at, at + size)]
    expected = [b.data_ptr() + i for b in buffers for i in range(width)]
    assert sorted(covered) == sorted(expected)


@pytest.mark.parametrize(
    ("width", "stride", "lead", "access"),
    [
        (64, 64, 0, 0),
        (64, 64, 4, 1),
        (64, 64, 2, 2),
        (64, 68, 0, 1),
        (60, 64, 0, 1),
        (64, 66, 0, 2),
        (63, 64, 0, 2),
    ],
)
def test_the_widest_access_that_width_stride_and_base_allow(width, stride, lead, access):
    memory = torch.zeros(1000, dtype=torch.uint8)
    lead += -memory.data_ptr() % 16
    rows = rows_from(memory.as_strided((4, width), (stride, 1), lead))
    table = build_table(rows)
    assert table.classes == 1 << access
    assert all(block[0] & 255 == access for block in table.words.tolist())
    for at, size in _covered(table):
        assert at % CLASS_ALIGNMENT[access] == 0
        assert 0 < size <= CLASS_CHUNK_BYTES[access]


def test_the_access_of_a_copy_suits_both_sides():
    memory = torch.zeros(1000, dtype=torch.uint8)
    lead = -memory.data_ptr() % 16
    aligned = rows_from(memory[lead : lead + 256].view(4, 64))
    odd = rows_from(memory[lead + 401 : lead + 401 + 256].view(4, 64))
    assert build_table(aligned).classes == 1
    assert build_table(aligned, odd).classes == build_table(odd, aligned).classes == 4


def test_the_access_of_a_copy_suits_the_strides_of_both_sides():
    memory = torch.zeros(1000, dtype=torch.uint8)
    lead = -memory.data_ptr() % 16
    dense, apart = (
        rows_from(memory.as_strided((4, 64), (stride, 1), lead + first))
        for stride, first in ((64, 0), (68, 400))
    )
    assert build_table(dense).classes == 1
    assert build_table(dense, apart).classes == build_table(apart, dense).classes == 2


def test_words_of_a_copy():
    mine, theirs = torch.zeros(10, 64), torch.zeros(30, 2, 64)[:, 0]
    table = build_table(rows_from(mine), rows_from(theirs))
    assert table.copy
    for block in table.words.tolist():
        assert block[1:6] == [10, 10, 0, 256, 0]
        assert block[9:14] == [30, 30, 0, 512, 0]
        for (to, size), at in zip(_chunks(block), block[24:32], strict=False):
            assert to - mine.data_ptr() == at - theirs.data_ptr()
            assert size == 128


def test_chunks_of_several_layers_share_a_block():
    """Four 256-byte rows fill a program: no lane idles for narrow buffers."""
    table = build_table([r for _ in range(4) for r in rows_from(torch.zeros(8, 64))])
    assert table.blocks == 1


def test_minimax_m3_takes_135_blocks():
    """60 layers of K and V rows of 1,024 bytes, 57 index-K rows of 256 bytes."""
    wide = [torch.zeros(2, 1024, dtype=torch.uint8) for _ in range(120)]
    narrow = [torch.zeros(2, 256, dtype=torch.uint8) for _ in range(57)]
    assert build_table([r for t in wide + narrow for r in rows_from(t)]).blocks == 135


def test_one_block_counts_for_all_rows_of_the_same_bounds():
    mapping = torch.zeros(8, dtype=torch.int64)
    rows = [
        *rows_from(torch.zeros(8, 64)),
        *rows_from(torch.zeros(8, 300)),
        *rows_from(torch.zeros(4, 2, 2, 8), "hnd"),
        *rows_from(torch.zeros(6, 16), mapping=mapping),
    ]
    heads = [block[0] for block in build_table(rows).words.tolist()]
    assert sum(head >> 8 & 1 for head in heads) == 1  # bad locs, once for all
    assert sorted(head >> 32 for head in heads if head >> 9 & 1) == [1, 3]
    assert all(head >> 32 == 0 for head in heads if not head >> 9 & 1)
