"""What a store does to values, scales and locs; written bytes, and everything that is refused."""

from types import SimpleNamespace

import pool_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.pools.store import FP8_DTYPES, cast

LAYOUTS = ["nhd", "hnd"]


def pool_of(dtype, layout="nhd"):
    return cases.mha(dtype=dtype, layer_num=2, v_head_dim=3, kv_cache_layout=layout, start_layer=4)


def values(n=3, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(n, 2, 6, generator=generator).to(dtype)
    v = torch.randn(n, 2, 3, generator=generator).to(dtype)
    return k, v


def stored(pool, layer_id, slot):
    k, v = pool.get_kv_buffer(layer_id)
    if pool.use_hnd:
        page, offset = divmod(slot, pool.page_size)
        return k[page, :, offset], v[page, :, offset]
    return k[slot], v[slot]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, *FP8_DTYPES], ids=str
)
def test_values_land_in_their_slots_and_nowhere_else(dtype, layout):
    pool = pool_of(dtype, layout)
    cases.fill(pool)
    others = [slot for slot in range(pool.slots) if slot not in (9, 0, 31)]
    before = [cases.rows_at(pool, slot) for slot in others]
    first = [cases.raw(pool.k_buffer[0]).clone(), cases.raw(pool.v_buffer[0]).clone()]
    k, v = values()
    pool.set_kv_buffer(cases.layer(5), cases.loc(9, 0, 31, dtype=torch.int32), k, v)
    for i, slot in enumerate((9, 0, 31)):
        got_k, got_v = stored(pool, 5, slot)
        assert torch.equal(got_k.float(), k[i].to(dtype).float())
        assert torch.equal(got_v.float(), v[i].to(dtype).float())
    for slot, rows in zip(others, before, strict=True):
        assert all(map(torch.equal, cases.rows_at(pool, slot), rows))
    assert torch.equal(cases.raw(pool.k_buffer[0]), first[0])
    assert torch.equal(cases.raw(pool.v_buffer[0]), first[1])


def test_flat_values_wrapped_locs_and_an_override_write_the_same():
    one, other = pool_of(torch.float16), pool_of(torch.float16)
    k, v = values()
    one.set_kv_buffer(cases.layer(4), cases.loc(3, 2, 1), k, v)
    wrapped = SimpleNamespace(loc=cases.loc(3, 2, 1), swa_loc=None)
    other.set_kv_buffer(None, wrapped, k.flatten(1), v.flatten(1), layer_id_override=4)
    assert cases.unchanged(other, cases.snapshot(one))
    assert stored(one, 4, 2)[0].any()


@given(
    numbers=st.lists(
        st.floats(width=16, allow_nan=True, allow_infinity=True), min_size=1, max_size=20
    ),
    scale=st.sampled_from([None, 0.5, 2.0, 0.3]),
    source=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    dtype=st.sampled_from(FP8_DTYPES),
)
def test_fp8_is_the_nearest_value_in_range_and_nan_stays(numbers, scale, source, dtype):
    limit = {FP8_DTYPES[0]: 448, FP8_DTYPES[1]: 240, FP8_DTYPES[2]: 57344}[dtype]
    given_values = torch.tensor(numbers, dtype=torch.float32).to(source)
    before = given_values.clone()
    got = cast(given_values, scale, dtype).float()
    divided = given_values if scale is None else given_values.clone().div_(scale)
    expected = divided.float().clip(-limit, limit).to(dtype).float()
    assert torch.equal(got.isnan(), given_values.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert torch.equal(given_values.view(torch.uint8), before.view(torch.uint8))


def test_infinite_values_become_the_largest():
    pool = pool_of(torch.float8_e4m3fn)
    k, v = values(1)
    k[0, 0, :3] = torch.tensor([float("inf"), -1e30, float("nan")])
    pool.set_kv_buffer(cases.layer(4), cases.loc(1), k, v)
    got = stored(pool, 4, 1)[0].float()[0]
    assert got[:2].tolist() == [448, -448]
    assert got[2].isnan()


@pytest.mark.parametrize("scale", [2.0, torch.tensor(2.0), torch.tensor([2.0]), 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_divides_and_the_callers_tensors_stay(scale, layout):
    pool = pool_of(torch.float8_e5m2, layout)
    k, v = values(dtype=torch.bfloat16)
    was = k.clone(), v.clone()
    pool.set_kv_buffer(cases.layer(4), cases.loc(1, 2, 3), k, v, scale, 0.25)
    assert torch.equal(k, was[0])
    assert torch.equal(v, was[1])
    got_k, got_v = stored(pool, 4, 2)
    assert torch.equal(got_k.float(), (k[1] / 2).to(torch.float8_e5m2).float())
    assert torch.equal(got_v.float(), (v[1] / 0.25).to(torch.float8_e5m2).float())


def test_a_scale_is_left_out_where_dtypes_agree():
    pool = pool_of(torch.float16)
    k, v = values(dtype=torch.float16)
    pool.set_kv_buffer(cases.layer(4), cases.loc(1, 2, 3), k, v, 2.0, 2.0)
    assert torch.equal(stored(pool, 4, 1)[0], k[0])
    fp8 = pool_of(torch.float8_e4m3fn)
    k8, v8 = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    fp8.set_kv_buffer(cases.layer(4), cases.loc(1, 2, 3), k8, v8, 2.0, 2.0)
    assert torch.equal(stored(fp8, 4, 1)[0].float(), k8[0].float())


def test_another_fp8_kind_is_converted_by_value():
    values_in = torch.tensor([1.5, -57344, 0.25]).to(torch.float8_e5m2)
    assert cast(values_in, 0.5, torch.float8_e4m3fn).float().tolist() == [3, -448, 0.5]


def test_gradients_do_not_reach_the_pool():
    pool = pool_of(torch.float32)
    k, v = (x.requires_grad_() for x in values())
    pool.set_kv_buffer(cases.layer(4), cases.loc(1, 2, 3), k, v)
    assert not pool.k_buffer[0].requires_grad
    pool_of(torch.float16).set_kv_buffer(cases.layer(4), cases.loc(1, 2, 3), k, v, 2.0, 2.0)


def test_nothing_to_store_is_fine():
    pool = pool_of(torch.float16)
    pool.set_kv_buffer(cases.layer(4), cases.loc(), *values(0))


K, V = values()
GOOD = {
    "layer": cases.layer(4),
    "loc_info": cases.loc(1, 2, 3),
    "cache_k": K,
    "cache_v": V,
}
META = torch.device("meta")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": cases.layer(3)}, ValueError, r"no layer 3; it has \[4, 5\]"),
        ({"layer": 4}, TypeError, "layer must have a layer_id attribute, got int"),
        ({"layer_id_override": 0}, ValueError, r"no layer 0; it has \[4, 5\]"),
        ({"loc_info": [1, 2, 3]}, TypeError, "loc must be an int32 or int64 tensor .* got list"),
        ({"loc_info": torch.ones(3)}, TypeError, "int32 or int64 slots, got torch.float32"),
        ({"loc_info": torch.ones(3).bool()}, TypeError, "slots, got torch.bool"),
        ({"loc_info": cases.loc(1, 2, 3).to(META)}, ValueError, "loc is on meta and the pool on"),
        ({"loc_info": cases.loc(1, -1, 3)}, IndexError, r"loc holds -1, outside \[0, 32\)"),
        ({"loc_info": cases.loc(1, 32, 3)}, IndexError, r"loc holds 32, outside \[0, 32\)"),
        ({"loc_info": cases.loc(1, 2)}, ValueError, r"\[2, 2, 6\] or \[2, 12\] for 2 slots"),
        ({"cache_k": K[:, :1]}, ValueError, r"cache_k must be .* got \[3, 1, 6\]"),
        ({"cache_v": K}, ValueError, r"cache_v must be \[3, 2, 3\] .* got \[3, 2, 6\]"),
        ({"cache_v": V[:2]}, ValueError, r"cache_v must be .* got \[2, 2, 3\]"),
        ({"cache_v": V.int()}, TypeError, "cache_v must have a floating dtype, got torch.int32"),
        ({"cache_v": None}, TypeError, "cache_v must be a tensor, got NoneType"),
        ({"cache_v": V.to(META)}, ValueError, r"cache_v is on meta .* cache_v.to\('cpu'\)"),
        ({"k_scale": 0.0}, ValueError, "scale of cache_k must be positive and finite, got 0.0"),
        ({"v_scale": float("nan")}, ValueError, "scale of cache_v must be positive and finite"),
        ({"v_scale": torch.ones(2)}, ValueError, r"one floating value, got torch.float32 \[2\]"),
        ({"v_scale": torch.ones(1, device=META)}, ValueError, "scale of cache_v is on meta"),
        ({"k_scale": True}, TypeError, "must be a number or a tensor, got bool"),
        ({"v_scale": "1"}, TypeError, "scale of cache_v must be a number or a tensor, got str"),
        ({"dcp_kv_mask": torch.ones(3)}, NotImplementedError, "cannot serve dcp_kv_mask"),
    ],
)
def test_a_refused_store_leaves_every_byte(change, error, message, layout):
    pool = pool_of(torch.float16, layout)
    cases.fill(pool)
    before = cases.snapshot(pool)
    with pytest.raises(error, match=message):
        pool.set_kv_buffer(**GOOD | change)
    assert cases.unchanged(pool, before)
