"""DeepSeek-V4's single KV: the packed page, the quantising store, and what is refused."""

import enum
import math
from types import SimpleNamespace

import pool_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.errors import UnsupportedAccess
from specpool.pools import NopeFp8RopeBf16Pack


def latents(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 512, generator=generator).bfloat16()


def pack(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return NopeFp8RopeBf16Pack(
        torch.randn(n, 448, generator=generator).to(torch.float8_e4m3fn),
        torch.randn(n, 64, generator=generator).bfloat16(),
        torch.randint(100, 140, (n, 7), generator=generator, dtype=torch.uint8),
    )


def test_pages_and_sizes():
    pool = cases.single()
    assert pool.bytes_per_page_padded == math.ceil(4 * 584 / 576) * 576
    assert [tuple(b.shape) for b in pool.kv_buffer] == [(8, pool.bytes_per_page_padded)] * 2
    assert (pool.kv_cache_total_dim, pool.get_bytes_per_token()) == (584, 584)
    assert pool.get_kv_size_bytes() == (2 * 8 * pool.bytes_per_page_padded, 0)
    assert pool.get_key_buffer(0).dtype == torch.float8_e4m3fn
    assert (
        cases.single.func(64, 64, torch.uint8, 448, 64, 1, "cpu", False).bytes_per_page_padded
        == (64 * 584 + 575) // 576 * 576
    )
    coarse = cases.single(global_page_size=18)
    assert coarse.kv_buffer[0].shape[0] == 12  # ceil((28 + 18) / 4)
    assert not pool.has_value


def test_a_pack_lands_as_payload_and_scales_and_the_pad_byte_stays():
    pool = cases.single(start_layer=3)
    cases.fill(pool)
    before = cases.snapshot(pool)
    given_pack = pack(2)
    pool.set_key_buffer(4, cases.loc(9, 30), given_pack)
    for i, slot in enumerate((9, 30)):
        page, offset = divmod(slot, 4)
        bytes_of = before[1].view(8, -1)[page]
        start, scales = offset * 576, 4 * 576 + offset * 8
        bytes_of[start : start + 448] = given_pack.k_nope_fp8[i].view(torch.uint8)
        bytes_of[start + 448 : start + 576] = given_pack.k_rope_bf16[i].view(torch.uint8)
        bytes_of[scales : scales + 7] = given_pack.scale_k_nope_ue8m0[i]
    assert cases.unchanged(pool, before)


def test_any_object_with_the_three_fields_will_do():
    one, other = cases.single(), cases.single()
    fields = pack(1)
    one.set_key_buffer(0, cases.loc(3), fields)
    other.set_key_buffer(0, SimpleNamespace(loc=cases.loc(3)), SimpleNamespace(**vars(fields)))
    assert cases.unchanged(one, cases.snapshot(other))


@given(
    tile=st.lists(
        st.floats(width=16, allow_nan=False, allow_infinity=False), min_size=64, max_size=64
    ),
    power=st.integers(-40, 40),
)
def test_scales_are_the_formula_and_values_the_nearest(tile, power):
    # Independent of the product: Python floats, math.log2 on exact powers of two only.
    row = torch.zeros(1, 512)
    row[0, 64:128] = torch.tensor(tile) * 2.0**power
    row = row.bfloat16()
    values = row[0, 64:128].double()
    amax = max(float(values.abs().max()), 1e-4)
    wanted = torch.tensor(amax, dtype=torch.float32) / 448
    mantissa, exponent = math.frexp(float(wanted))
    exponent = exponent - 1 if mantissa == 0.5 else exponent
    pool = cases.single()
    pool.set_key_buffer_fused(0, cases.loc(5), row)
    page = pool.kv_buffer[0][1]
    scales = page[4 * 576 + 8 : 4 * 576 + 16]
    assert scales[1] == exponent + 127
    assert scales[0] == 127 - 22  # of zeros: 1e-4 / 448 lies below 2^-22
    stored = page[576 + 64 : 576 + 128].view(torch.float8_e4m3fn)
    assert torch.equal(stored.float(), (values / 2.0**exponent).to(torch.float8_e4m3fn).float())
    assert stored.float().abs().max() <= 448


def test_a_quantised_latent_reads_back_within_its_step():
    pool = cases.single()
    values = latents(5)
    was = values.clone()
    slots = cases.loc(1, 4, 7, 30, 31)
    pool.set_key_buffer_fused(1, slots, values)
    got = pool.get_dequantized(1, slots)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got[:, 448:], values[:, 448:])
    error = (got[:, :448].float() - values[:, :448].float()).abs()
    assert (error <= values[:, :448].float().abs() / 16 + 2**-9).all()
    assert error.any()
    assert torch.equal(values, was)
    # What was read back is representable, so storing it again changes nothing.
    before = cases.snapshot(pool)
    pool.set_key_buffer_fused(1, slots, got)
    assert torch.equal(pool.get_dequantized(1, slots), got)
    assert torch.equal(cases.raw(pool.kv_buffer[0]), before[0])


def test_nan_and_infinity_spare_their_neighbours():
    pool = cases.single()
    values = torch.ones(1, 512).bfloat16()
    values[0, 0] = float("nan")
    values[0, 64] = float("inf")
    pool.set_key_buffer_fused(0, cases.loc(2), values)
    got = pool.get_dequantized(0, cases.loc(2))[0].float()
    assert got[0].isnan()
    assert (got[1:64] == 1).all()
    assert got[64] > 3e38
    assert (got[65:128] == 0).all()  # too small beside it, but no NaN
    assert (got[128:] == 1).all()
    before = cases.snapshot(pool)
    values[0, 64] = torch.finfo(torch.bfloat16).max
    pool.set_key_buffer_fused(0, cases.loc(2), values)
    assert cases.unchanged(pool, before)


PACK = pack(2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer_id": 2}, ValueError, r"no layer 2; it has \[0, 1\]"),
        ({"loc": cases.loc(3)}, ValueError, r"k_nope_fp8 must be .* \[1, 448\], got .*\[2, 448\]"),
        ({"loc": cases.loc(3, 32)}, IndexError, r"loc holds 32, outside \[0, 32\)"),
        ({"loc": cases.loc(3, -1)}, IndexError, "loc holds -1"),
        ({"loc": torch.ones(2)}, TypeError, "int32 or int64"),
        ({"k_nope_fp8": torch.zeros(2, 448)}, ValueError, "k_nope_fp8 must be torch.float8_e4m3fn"),
        ({"k_rope_bf16": PACK.k_rope_bf16.half()}, ValueError, "k_rope_bf16 must be torch.bfloat"),
        ({"scale_k_nope_ue8m0": PACK.scale_k_nope_ue8m0[:, :6]}, ValueError, r"\[2, 7\], got"),
        (
            {"scale_k_nope_ue8m0": PACK.scale_k_nope_ue8m0.to("meta")},
            ValueError,
            "scale_k_nope_ue8m0 is on meta",
        ),
    ],
)
def test_a_refused_pack_leaves_every_byte(change, error, message):
    pool = cases.single()
    cases.fill(pool)
    before = cases.snapshot(pool)
    layer_id, loc = change.pop("layer_id", 0), change.pop("loc", cases.loc(3, 5))
    with pytest.raises(error, match=message):
        pool.set_key_buffer(layer_id, loc, SimpleNamespace(**vars(PACK) | change))
    assert cases.unchanged(pool, before)


@pytest.mark.parametrize(
    ("pack", "message"),
    [
        (None, "must have k_nope_fp8, k_rope_bf16 and scale_k_nope_ue8m0, .* got NoneType"),
        (SimpleNamespace(k_nope_fp8=PACK.k_nope_fp8), "must have .* got SimpleNamespace"),
        (NopeFp8RopeBf16Pack(PACK.k_nope_fp8, None, None), "k_rope_bf16 must be a tensor, got N"),
    ],
    ids=["None", "one part", "no rope"],
)
def test_what_is_no_pack_is_refused(pack, message):
    pool = cases.single()
    cases.fill(pool)
    before = cases.snapshot(pool)
    with pytest.raises(TypeError, match=message):
        pool.set_key_buffer(0, cases.loc(3, 5), pack)
    assert cases.unchanged(pool, before)


def test_a_refused_fused_store_leaves_every_byte():
    pool = cases.single()
    cases.fill(pool)
    before = cases.snapshot(pool)
    slots = cases.loc(3, 5)
    with pytest.raises(ValueError, match=r"cache_k must be \[2, 512\]"):
        pool.set_key_buffer_fused(0, slots, latents(1))
    with pytest.raises(TypeError, match=r"must be bfloat16, got torch\.float16"):
        pool.set_key_buffer_fused(0, slots, latents(2).half())
    with pytest.raises(IndexError):
        pool.set_key_buffer_fused(0, cases.loc(3, 99), latents(2))
    with pytest.raises(UnsupportedAccess, match="cannot serve freqs_cis: use cache_k that is"):
        pool.set_key_buffer_fused(0, slots, latents(2), torch.ones(2, 64))
    with pytest.raises(UnsupportedAccess, match="set_kv_buffer: use set_key_buffer"):
        pool.set_kv_buffer(cases.layer(0), slots, latents(2), latents(2))
    assert cases.unchanged(pool, before)


class Layout(str, enum.Enum):
    V4 = "v4"
    V41 = "v41"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_layout": "v41_fp4"}, "kv_layout 'v41_fp4' is not supported"),
        ({"kv_layout": Layout.V41}, "is not supported; the layout here is 'v4'"),
        ({"global_page_size": 0}, "global_page_size must be at least 1"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        cases.single(**change)


def test_other_dims_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="qk_nope_head_dim=448 and qk_rope_head_dim=64, got 512"):
        cases.single.func(8, 4, torch.uint8, 512, 64, 1, "cpu", False)
    with pytest.raises(ValueError, match=r"does not serve dtype torch\.bfloat16"):
        cases.single.func(8, 4, torch.bfloat16, 448, 64, 1, "cpu", False)
    assert cases.single(kv_layout=Layout.V4).kv_layout is Layout.V4
