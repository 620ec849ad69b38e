"""Rows from declared layouts, and what is refused as no layout at all."""

import doctest

import pytest
import torch

from specpool import rows as rows_module
from specpool.disjoint import check_disjoint
from specpool.rows import LAYOUTS, Rows, rows_from

U8 = torch.uint8


def _geometry(rows: Rows) -> tuple[int, ...]:
    """offset, width, slots, page_size, and the bytes to the next slot and the next page."""
    return (
        rows.offset,
        rows.width,
        rows.slots,
        rows.page_size,
        rows.token_stride,
        rows.page_stride,
    )


def _at(rows: Rows, slot: int) -> list[int]:
    """A slot's bytes, by the documented formula over the tensor's memory."""
    memory = torch.empty(0, dtype=U8).set_(rows.tensor.untyped_storage())
    start = rows.address - memory.data_ptr()
    start += slot // rows.page_size * rows.page_stride + slot % rows.page_size * rows.token_stride
    return memory[start : start + rows.width].tolist()


def _view_at(rows: Rows, slot: int) -> list[int]:
    view = rows.view()
    page_size = view.shape[1]
    return view[slot // page_size, slot % page_size].tolist()


def test_nhd():
    (rows,) = rows_from(torch.zeros(10, 2, 8, dtype=torch.bfloat16), name="key")
    assert _geometry(rows) == (0, 32, 10, 1, 32, 32)
    assert (rows.name, rows.pages, rows.page_gap, rows.loc_limit) == ("key", 10, 0, 10)


def test_nhd_strided():
    (rows,) = rows_from(torch.zeros(10, 3, 8)[:, 1])
    assert _geometry(rows)[1:4] == (32, 10, 1)
    assert rows.token_stride == 96


def test_nhd_of_one_slot_and_of_scalars():
    assert _geometry(rows_from(torch.zeros(1, 8))[0])[1:3] == (32, 1)
    assert _geometry(rows_from(torch.zeros(7, dtype=torch.int16))[0])[1:3] == (2, 7)


def test_nhd_permuted_back_is_dense():
    """Only the slot's own dimensions must be dense; sizes of 1 have no stride."""
    assert rows_from(torch.zeros(4, 6, 1, 8).transpose(1, 2))[0].width == 192


def test_hnd():
    rows = rows_from(torch.zeros(5, 2, 4, 8, dtype=torch.float16), "hnd", page_size=4, name="key")
    assert [_geometry(r) for r in rows] == [(h * 64, 16, 20, 4, 16, 128) for h in (0, 1)]
    assert [r.name for r in rows] == ["key, head 0", "key, head 1"]
    assert [r.page_gap for r in rows] == [64, 64]


def test_hnd_strides_are_free():
    """Heads of a [pages, page_size, heads, dim] tensor seen head-major."""
    tensor = torch.arange(5 * 4 * 2 * 8).to(U8).view(5, 4, 2, 8)
    for head, rows in enumerate(rows_from(tensor.transpose(1, 2), "hnd")):
        for slot in range(20):
            assert _at(rows, slot) == tensor[slot // 4, slot % 4, head].tolist()


def test_page_split():
    tensor = torch.zeros(3, 64 * 584 + 448, dtype=U8)
    rows = rows_from(tensor, "page_split", page_size=64, widths=(576, 8), name="kv")
    page = 64 * 584 + 448
    assert [_geometry(r) for r in rows] == [
        (0, 576, 192, 64, 576, page),
        (64 * 576, 8, 192, 64, 8, page),
    ]
    assert [r.name for r in rows] == ["kv, part 0", "kv, part 1"]


def test_page_split_counts_bytes_whatever_the_dtype():
    rows = rows_from(torch.zeros(3, 10), "page_split", page_size=4, widths=(8, 2))
    assert [_geometry(r) for r in rows] == [(0, 8, 12, 4, 8, 40), (32, 2, 12, 4, 2, 40)]


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_show_each_slot(layout, pages):
    tensor = torch.randint(0, 256, (pages, 2, 4, 6), dtype=U8)
    options = {}
    if layout == "page_split":
        tensor, options = tensor.view(pages, 48), {"page_size": 5, "widths": (6, 3)}
    for rows in rows_from(tensor, layout, **options):
        for slot in range(rows.slots):
            assert _view_at(rows, slot) == _at(rows, slot)


def test_views_share_memory_and_start_inside_a_storage():
    storage = torch.arange(100, dtype=U8)
    (rows,) = rows_from(storage[7:97].view(9, 10)[:, 2:8])
    assert _at(rows, 3) == _view_at(rows, 3) == [*range(39, 45)]
    rows.view()[0, 0, 0] = 255
    assert storage[9] == 255
    assert rows.start == 9
    assert rows.end - storage.data_ptr() == 7 + 8 * 10 + 8


def test_a_page_of_one_slot_has_one_stride():
    rows = Rows(torch.zeros(100, dtype=U8), 0, 4, 5, token_stride=4, page_size=1, page_stride=20)
    assert [_view_at(rows, s) == _at(rows, s) for s in range(5)] == [True] * 5
    assert rows.page_gap == 0


def test_rows_keep_the_mapping():
    mapping = torch.zeros(30, dtype=torch.int64)
    rows = rows_from(torch.zeros(4, 2, 4, 8), "hnd", mapping=mapping)
    assert all(r.mapping is mapping and r.loc_limit == 30 and r.slots == 16 for r in rows)


@pytest.mark.parametrize("layout", ["NHD", "nhdc", "", None])
def test_unknown_layouts(layout):
    with pytest.raises(ValueError, match=r"key: unknown layout .*layouts are nhd, hnd, page_split"):
        rows_from(torch.zeros(4, 4), layout, name="key")


@pytest.mark.parametrize("tensor", [None, [1, 2], torch.zeros(4, 4).to_sparse()], ids=type)
def test_what_is_no_strided_tensor(tensor):
    with pytest.raises(TypeError, match=r"key: rows need a strided torch\.Tensor, got"):
        rows_from(tensor, name="key")


BASE = torch.zeros(4, 2, 4, 8)
SPLIT = torch.zeros(3, 48, dtype=U8)


@pytest.mark.parametrize(
    ("tensor", "layout", "options", "words"),
    [
        (torch.zeros(0, 8), "nhd", {}, r"needs \[slots, ...\] with slots, got \[0, 8\]"),
        (torch.zeros(4, 0), "nhd", {}, r"with slots, got \[4, 0\]"),
        (torch.tensor(1.0), "nhd", {}, r"with slots, got \[\]"),
        (BASE.transpose(1, 2), "nhd", {}, r"must be dense in 'nhd', got shape .* strides"),
        (torch.zeros(4, 8)[:, ::2], "nhd", {}, r"dense in 'nhd', got shape \[4, 4\]"),
        (torch.zeros(1, 8).expand(4, 8), "nhd", {}, r"stride of 0 bytes is below .* width of 32"),
        (
            torch.zeros(20).as_strided((4, 8), (4, 1)),
            "nhd",
            {},
            r"stride of 16 bytes is below .* width of 32",
        ),
        (torch.zeros(4, 8), "hnd", {}, r"needs \[pages, heads, page_size, dim\], got \[4, 8\]"),
        (torch.zeros(0, 2, 4, 8), "hnd", {}, r"got \[0, 2, 4, 8\]"),
        (BASE, "hnd", {"page_size": 8}, r"pages of 8 slots do not fit \[4, 2, 4, 8\].* holds 4"),
        (BASE[..., ::2], "hnd", {}, r"last dimension must be dense in 'hnd'"),
        (BASE[:, :, :1].expand(4, 2, 4, 8), "hnd", {}, r"token stride of 0 bytes is below"),
        (BASE[:1].expand(4, 2, 4, 8), "hnd", {}, r"page stride of 0 bytes: all pages"),
        (
            torch.zeros(1, 480).expand(3, 480),
            "page_split",
            {"page_size": 4, "widths": (8,)},
            r"page stride of 0 bytes: all pages would share",
        ),
        (SPLIT, "page_split", {"widths": (8,)}, r"needs page_size and widths of at least 1"),
        (SPLIT, "page_split", {"page_size": 4}, r"needs page_size and widths .* got 4 and None"),
        (SPLIT, "page_split", {"page_size": 4, "widths": ()}, r"at least 1, got 4 and \(\)"),
        (SPLIT, "page_split", {"page_size": 0, "widths": (8,)}, r"at least 1, got 0"),
        (SPLIT, "page_split", {"page_size": 4, "widths": (8, 0)}, r"at least 1, got 4"),
        (
            SPLIT,
            "page_split",
            {"page_size": 4, "widths": (8, 5)},
            r"4 slots of \(8, 5\) bytes need 52 bytes a page, the tensor has 48",
        ),
        (SPLIT[None], "page_split", {"page_size": 4, "widths": (8,)}, r"dense \[pages, page_bytes"),
        (SPLIT[:, ::2], "page_split", {"page_size": 4, "widths": (4,)}, r"dense \[pages, page_b"),
        (
            SPLIT.view(-1).as_strided((4, 48), (32, 1)),
            "page_split",
            {"page_size": 4, "widths": (12,)},
            r"page stride of 32 bytes is below the 48 bytes",
        ),
    ],
)
def test_refused_layouts(tensor, layout, options, words):
    with pytest.raises(ValueError, match=f"^key.*{words}"):
        rows_from(tensor, layout, name="key", **options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 0}, "width 0, slots 12 and page_size 4 must be at least 1"),
        ({"slots": 0}, "slots 0"),
        ({"page_size": 0}, "page_size 0"),
        ({"offset": -1}, "offset -1 at least 0"),
        ({"slots": 10}, "10 slots do not fill pages of 4; make the slots a multiple"),
        ({"token_stride": 7}, "token stride of 7 bytes is below the row's width of 8"),
        ({"page_stride": 31}, "page stride of 31 bytes is below the 32 bytes"),
        ({"slots": 16}, "the rows end 128 bytes into a tensor of 100 bytes"),
        ({"offset": 5}, "the rows end 101 bytes into a tensor of 100 bytes"),
        ({"page_stride": 2**31}, r"must stay below 2\^31"),
        ({"mapping": torch.zeros(4, dtype=torch.int32)}, r"mapping is a contiguous int64 \[n\]"),
        ({"mapping": torch.zeros(2, 2, dtype=torch.int64)}, r"got torch.int64 \[2, 2\] on cpu"),
        ({"mapping": torch.zeros(8, dtype=torch.int64)[::2]}, "mapping is a contiguous"),
        ({"mapping": torch.zeros(0, dtype=torch.int64)}, "with entries on"),
        ({"mapping": torch.zeros(4, dtype=torch.int64, device="meta")}, "on cpu, got .* on meta"),
    ],
)
def test_refused_geometry(change, words):
    good = {"offset": 0, "width": 8, "slots": 12, "token_stride": 8, "page_size": 4}
    tensor = torch.zeros(100, dtype=U8)
    Rows(tensor, **good)
    with pytest.raises(ValueError, match=f"key.*{words}"):
        Rows(tensor, **{**good, **change}, name="key")


def test_rows_may_end_with_the_tensor_but_not_with_its_storage():
    storage = torch.zeros(200, dtype=U8)
    Rows(storage[:96], offset=0, width=8, slots=12, token_stride=8)
    with pytest.raises(ValueError, match="tensor of 95 bytes"):
        Rows(storage[:95], offset=0, width=8, slots=12, token_stride=8)


def test_freed_tensors_are_refused():
    tensor = torch.zeros(4, 8)
    rows = rows_from(tensor, name="key")[0]
    rows.check_memory()
    tensor.untyped_storage().resize_(16)
    with pytest.raises(RuntimeError, match=r"key: .* freed or shrunk to 16 bytes; build the mover"):
        rows.check_memory()


def test_neighbours_are_disjoint():
    tensor = torch.zeros(8, 8)
    check_disjoint(rows_from(tensor[:4]) + rows_from(tensor[4:]))
    check_disjoint(rows_from(BASE, "hnd"))
    check_disjoint(rows_from(SPLIT, "page_split", page_size=4, widths=(4, 8)))
    check_disjoint([])


@pytest.mark.parametrize("order", [1, -1])
def test_shared_bytes_are_refused_by_name(order):
    tensor = torch.zeros(8, 8)
    a, b, c = (
        rows_from(tensor[s], name=n)[0]
        for s, n in ((slice(5), "a"), (slice(4, 8), "b"), (slice(6, 7), "c"))
    )
    with pytest.raises(ValueError, match="a and b share memory"):
        check_disjoint([a, b][::order])
    with pytest.raises(ValueError, match="b and c share memory"):
        check_disjoint([c, b][::order])
    with pytest.raises(ValueError, match="b and b share memory"):
        check_disjoint([b, b])


def test_buffers_interleaved_across_tensors_are_refused():
    fused = torch.zeros(4, 2, 8)
    rows = rows_from(fused[:, 0], name="key") + rows_from(fused[:, 1], name="value")
    with pytest.raises(ValueError, match=r"key and value share memory.* declared from the one"):
        check_disjoint(rows)
    check_disjoint(rows_from(fused[:, :, None], "hnd"))


def test_heads_that_share_bytes_are_refused():
    """Two heads on one memory, and heads that reach into the next page."""
    rows = rows_from(torch.zeros(4, 1, 4, 8).expand(4, 2, 4, 8), "hnd", name="key")
    with pytest.raises(ValueError, match="key, head 0 and key, head 1 share memory"):
        check_disjoint(rows)
    tensor = torch.zeros(200).as_strided((4, 2, 4, 8), (32, 16, 8, 1))
    with pytest.raises(ValueError, match="head 0 and tensor, head 1 share memory"):
        check_disjoint(rows_from(tensor, "hnd"))
    tensor = torch.zeros(300).as_strided((4, 2, 4, 8), (48, 32, 8, 1))
    with pytest.raises(ValueError, match="head 0 and tensor, head 1 share memory"):
        check_disjoint(rows_from(tensor, "hnd"))


def test_one_tensor_in_two_layouts_is_refused():
    tensor = torch.zeros(4, 2, 4, 8)
    with pytest.raises(ValueError, match="share memory"):
        check_disjoint(rows_from(tensor, "hnd") + rows_from(tensor, "nhd"))


def test_the_example_in_the_documentation():
    assert doctest.testmod(rows_module) == (0, 2)


def test_arguments_of_another_layout_are_refused():
    flat = torch.zeros(8, 4)
    with pytest.raises(ValueError, match="'nhd' has no pages"):
        rows_from(flat, "nhd", page_size=4)
    with pytest.raises(ValueError, match="widths describe 'page_split' pages, not 'nhd'"):
        rows_from(flat, "nhd", widths=(4, 12))


def test_heads_may_lie_outermost():
    """Each head is a run of its own there, further from the next than a page."""
    heads = torch.zeros(2, 3, 4, 5)
    rows = rows_from(heads.permute(1, 0, 2, 3), "hnd")
    check_disjoint(rows)
    with pytest.raises(ValueError, match="share memory"):
        check_disjoint([*rows, *rows_from(heads[1], "nhd", name="again")])
