"""The K-only pool: one id rule for its getter and its setter, and what it cannot serve."""

import pool_cases as cases
import pytest
import torch

from specpool.errors import UnsupportedAccess


def test_set_and_get_take_the_same_id():
    pool = cases.k_only(dtype=torch.float16, start_layer=7)
    k = torch.randn(2, 1, 5)
    pool.set_k_buffer(9, cases.loc(4, 2), k)
    assert torch.equal(pool.get_key_buffer(9)[[4, 2]], k.half())
    assert pool.get_key_buffer(9).data_ptr() == pool.k_buffer[2].data_ptr()
    assert not pool.k_buffer[0].any()
    assert not pool.k_buffer[1].any()
    for wrong in (2, 6, 10):
        with pytest.raises(ValueError, match=rf"no layer {wrong}; it has \[7, 8, 9\]"):
            pool.set_k_buffer(wrong, cases.loc(4, 2), k)


def test_fp8_scale_and_flat_input():
    pool = cases.k_only(dtype=torch.float8_e4m3fn)
    k = torch.tensor([[1.0, 2.0, 3.0, 1e9, float("nan")]])
    pool.set_k_buffer(0, cases.loc(3), k, 0.5)
    got = pool.get_key_buffer(0)[3, 0].float()
    assert got[:4].tolist() == [2, 4, 6, 448]
    assert got[4].isnan()
    assert k[0, 0] == 1


def test_shapes_and_sizes():
    pool = cases.k_only(dtype=torch.float16)
    assert [tuple(k.shape) for k in pool.k_buffer] == [(32, 1, 5)] * 3
    assert pool.get_kv_size_bytes() == (3 * 32 * 5 * 2, 0)
    assert not pool.has_value


def test_a_refused_store_leaves_every_byte():
    pool = cases.k_only(dtype=torch.float16)
    cases.fill(pool)
    before = cases.snapshot(pool)
    with pytest.raises(IndexError):
        pool.set_k_buffer(0, cases.loc(3, 32), torch.randn(2, 1, 5))
    with pytest.raises(ValueError, match=r"cache_k must be \[1, 1, 5\]"):
        pool.set_k_buffer(0, cases.loc(3), torch.randn(1, 1, 6))
    assert cases.unchanged(pool, before)


def test_set_kv_buffer_names_the_parents_method():
    pool = cases.k_only(dtype=torch.float16)
    with pytest.raises(UnsupportedAccess, match="set_index_k_buffer on the parent"):
        pool.set_kv_buffer(cases.layer(0), cases.loc(1), torch.ones(1, 1, 5), torch.ones(1, 1, 5))
