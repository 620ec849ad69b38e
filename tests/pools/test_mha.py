"""The main pool: buffer shapes and strides, sizes, layouts, what it refuses at construction."""

from types import SimpleNamespace

import pool_cases as cases
import pytest
import torch

from specpool.errors import UnsupportedAccess


def make(**changes):
    return cases.mha(**{"dtype": torch.float16, "layer_num": 2} | changes)


def test_nhd_shapes():
    pool = make(v_head_dim=9)
    assert [tuple(k.shape) for k in pool.k_buffer] == [(32, 2, 6)] * 2
    assert [tuple(v.shape) for v in pool.v_buffer] == [(32, 2, 9)] * 2
    assert pool.get_kv_buffer_shape() == ((32, 2, 6), (32, 2, 9))
    assert (pool.get_v_head_dim(), pool.row_dim, pool.v_row_dim) == (9, 12, 18)
    assert pool.get_kv_size_bytes() == (2 * 32 * 12 * 2, 2 * 32 * 18 * 2)


def test_hnd_shapes():
    pool = make(v_head_dim=9, kv_cache_layout="hnd")
    assert pool.use_hnd
    assert pool.num_pages == 8
    assert pool.get_kv_buffer_shape() == ((8, 2, 4, 6), (8, 2, 4, 9))
    assert pool.get_key_buffer(0).shape == (8, 2, 4, 6)
    assert pool.get_value_buffer(0).shape == (8, 2, 4, 9)


@pytest.mark.parametrize(("layout", "pages"), [("nhd", 9), ("hnd", 8)])
def test_equal_k_and_v_are_page_aligned_halves_of_one_allocation(layout, pages):
    size = 28 if layout == "hnd" else 29  # 33 slots end inside the ninth page
    pool = cases.mha.func(size, 4, torch.float16, 2, 6, 1, "cpu", False, kv_cache_layout=layout)
    k, v = pool.k_buffer[0], pool.v_buffer[0]
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert v.data_ptr() - k.data_ptr() == pages * 4 * 2 * 6 * 2
    assert k.is_contiguous()
    assert pool.get_kv_size_bytes() == (k.nbytes, v.nbytes)
    assert len(pool.k_buffer) == 1


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str
)
def test_fp8_is_kept_as_bytes_and_read_as_fp8(dtype):
    pool = make(dtype=dtype)
    assert pool.store_dtype == pool.k_buffer[0].dtype == torch.uint8
    assert pool.get_key_buffer(0).dtype == pool.get_value_buffer(1).dtype == dtype
    assert pool.get_key_buffer(0).data_ptr() == pool.k_buffer[0].data_ptr()


def test_sliding_window_dims_override_the_others():
    swa = make(swa_head_num=1, swa_head_dim=4, swa_v_head_dim=3, v_head_dim=9)
    assert (swa.head_num, swa.head_dim, swa.v_head_dim) == (1, 4, 3)
    assert make(swa_head_dim=4).v_head_dim == 6  # as in SGLang: V does not follow swa_head_dim
    assert make(v_head_dim=9, swa_head_dim=4).v_head_dim == 9


def test_buffer_infos():
    pool = make(v_head_dim=9)
    addresses, sizes, items = pool.get_contiguous_buf_infos()
    assert addresses == [b.data_ptr() for b in (*pool.k_buffer, *pool.v_buffer)]
    assert sizes == [32 * 12 * 2] * 2 + [32 * 18 * 2] * 2
    assert items == [4 * 12 * 2] * 2 + [4 * 18 * 2] * 2
    with pytest.raises(UnsupportedAccess, match="use a pool of kv_cache_layout='nhd'"):
        make(kv_cache_layout="hnd").get_contiguous_buf_infos()


def test_addresses_follow_the_buffers():
    pool = make(v_head_dim=9)
    pool.v_buffer[0] = pool.v_buffer[0].clone()
    addresses = pool.get_contiguous_buf_infos()[0]
    assert pool.data_ptrs.tolist() == addresses
    assert pool.k_data_ptrs.tolist() + pool.v_data_ptrs.tolist() == addresses
    assert pool.data_ptrs.dtype == torch.uint64
    assert pool.data_strides.tolist() == [24, 24, 36, 36]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv_cache_layout": "page_major"}, ValueError, "'nhd' or 'hnd', got 'page_major'"),
        ({"quant_method": SimpleNamespace(name="nvfp4")}, NotImplementedError, "quant_method=.*"),
        ({"post_capture_active": True}, NotImplementedError, "post_capture_active=True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        make(**change)


def test_hnd_slots_must_fill_pages():
    with pytest.raises(ValueError, match=r"size \+ page_size is 34, no multiple of page_size=4"):
        cases.mha.func(30, 4, torch.float16, 2, 6, 1, "cpu", False, kv_cache_layout="hnd")


def test_what_sglang_passes_by_default_is_accepted():
    method = SimpleNamespace(name="unquantized")
    pool = make(quant_method=method, enable_alt_stream=False, allocation_label="draft")
    assert pool.quant_method is method
    assert pool.allocation_label == "draft"


def test_rows_name_their_buffer():
    assert [r.name for r in make(layer_num=1).rows()] == [
        "MHATokenToKVPool.k_buffer[0]",
        "MHATokenToKVPool.v_buffer[0]",
    ]
    assert [r.width for r in make(layer_num=1, v_head_dim=9).rows()] == [24, 36]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_committed_part_of_each_row_is_written(dtype):
    pool, plain = make(v_head_dim=9), make(v_head_dim=9)
    loc = torch.tensor([[3, 9, 4], [7, 99, -1], [12, 13, 14]], dtype=dtype)
    k, v = torch.randn(9, 2, 6).bfloat16(), torch.randn(9, 2, 9).bfloat16()
    commit_lens = torch.tensor([2, 1, 0], dtype=torch.int32)
    pool.set_kv_buffer_prefix_valid(cases.layer(1), loc, commit_lens, k, v)
    kept = [0, 1, 3]
    plain.set_kv_buffer(cases.layer(1), loc.flatten()[kept], k[kept], v[kept])
    for side in ("k_buffer", "v_buffer"):
        for ours, wanted in zip(getattr(pool, side), getattr(plain, side), strict=True):
            assert torch.equal(ours[1:], wanted[1:])  # the rest went to the dummy slot 0


def test_a_committed_slot_outside_the_pool_is_refused():
    pool = make()
    cases.fill(pool)
    before = cases.snapshot(pool)
    k = torch.randn(2, 12).bfloat16()
    with pytest.raises(IndexError, match="loc holds 99"):
        pool.set_kv_buffer_prefix_valid(
            cases.layer(1), torch.tensor([[3, 99]]), torch.tensor([2]), k, k
        )
    with pytest.raises(ValueError, match=r"commit_lens \[bs\], got \[1, 2\] and \[2\]"):
        pool.set_kv_buffer_prefix_valid(
            cases.layer(1), torch.tensor([[3, 4]]), torch.tensor([2, 2]), k, k
        )
    assert cases.unchanged(pool, before)
