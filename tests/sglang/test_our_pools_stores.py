"""Differential: the same calls to SGLang's pools and to ours leave the same bytes.

Where SGLang has no move (K-only, MiniMax, DeepSeek-V4), its pool's rows are gathered and scattered
by the test, buffer by buffer.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.test.kernels.deepseek_v4.k_cache_reference import (
    quant_to_nope_fp8_rope_bf16_pack_triton,
)

from tests.sglang.our_pools import (
    CASES,
    FP8,
    PAGE,
    SIZE,
    Pair,
    buffers,
    layer,
    pair,
    raw,
    rows,
)

WITH_VALUES = [name for name in CASES if name.startswith(("mha", "hnd", "minimax"))]
MINIMAX = [name for name in CASES if name.startswith("minimax")]
K_ONLY = [name for name in CASES if name.startswith("k-only")]
SINGLE = [name for name in CASES if name.startswith("single")]
SCALES = [None, 1.0, 0.37, torch.tensor(2.5)]

slot_lists = st.lists(st.integers(0, SIZE + PAGE - 1), max_size=9, unique=True)
stores = st.tuples(
    slot_lists,
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**31),
    st.integers(0, 2),
    st.booleans(),
)
fuzz = settings(max_examples=12, deadline=None, derandomize=True)


def values(n, *shape, seed, dtype=torch.bfloat16):
    """Values that every dtype of a pool holds: what overflows fp8 is `test_base`'s."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((n, *shape), generator=generator).mul(8).clamp(-99, 99).to(dtype)


def each(both: Pair, call) -> None:
    """The same call, with arguments of its own each: SGLang divides the caller's in place."""
    for pool in both:
        call(pool)
    assert both.same()


@pytest.mark.parametrize("scale", SCALES, ids=str)
@pytest.mark.parametrize("name", WITH_VALUES)
def test_keys_and_values(name, scale):
    both = pair(name)
    ids = range(both.ours.start_layer, both.ours.start_layer + both.ours.layer_num)

    @fuzz
    @given(stores)
    def run(store):
        slots, dtype, seed, at, wrapped = store
        loc = torch.tensor(slots, dtype=dtype)
        k_shape, v_shape = (2, 16), (2, both.ours.v_head_dim)

        def call(pool):
            pool.set_kv_buffer(
                layer(ids[at % len(ids)]),
                KVWriteLoc(loc) if wrapped else loc,
                values(len(slots), *k_shape, seed=seed),
                values(len(slots), *v_shape, seed=seed + 1),
                scale,
                scale,
            )

        each(both, call)

    run()
    for layer_id in ids:
        for method in ("get_key_buffer", "get_value_buffer"):
            ours, theirs = (
                getattr(both.ours, method)(layer_id),
                getattr(both.theirs, method)(layer_id),
            )
            assert ours.dtype == theirs.dtype
            assert torch.equal(raw(ours), raw(theirs))


@pytest.mark.parametrize("scale", [None, 0.37], ids=str)
@pytest.mark.parametrize("name", MINIMAX)
def test_index_keys_and_values(name, scale):
    both = pair(name)

    @fuzz
    @given(stores)
    def run(store):
        slots, dtype, seed, at, fused = store
        loc = torch.tensor(slots, dtype=dtype)
        sparse = list(both.ours.sparse_layer_id_mapping)
        layer_id = sparse[at % len(sparse)]
        with_value = layer_id in both.ours.index_kv_layer_id_mapping
        where = layer(layer_id)

        def call(pool):
            main = [values(len(slots), 2, 16, seed=seed + i) for i in range(2)]
            index = [values(len(slots), 1, 16, seed=seed + 2 + i) for i in range(2)]
            if fused:
                pool.set_fused_kv_index_buffer(
                    where,
                    loc,
                    *main,
                    index[0],
                    index[1] if with_value else None,
                    idx_k_scale=scale,
                    idx_v_scale=scale if with_value else None,
                )
            elif with_value:
                pool.set_index_kv_buffer(where, loc, *index, scale, scale)
            else:
                pool.set_index_k_buffer(where, loc, index[0], scale)

        each(both, call)

    run()
    for layer_id in both.ours.sparse_layer_id_mapping:
        ours, theirs = (pool.get_index_k_buffer(layer_id) for pool in (both.ours, both.theirs))
        assert torch.equal(raw(ours), raw(theirs))


@pytest.mark.parametrize("name", K_ONLY)
def test_keys_alone(name):
    both = pair(name)

    @fuzz
    @given(stores)
    def run(store):
        slots, dtype, seed, at, _ = store
        loc = torch.tensor(slots, dtype=dtype)
        each(both, lambda pool: pool.set_k_buffer(at, loc, values(len(slots), 1, 16, seed=seed)))

    run()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", SINGLE)
def test_latents(name, dtype):
    both = pair(name)
    loc = torch.tensor([9, 1, 30, 2], dtype=dtype)
    pack = NopeFp8RopeBf16Pack(
        values(4, 448, seed=1).to(FP8),
        values(4, 64, seed=2),
        torch.randint(0, 255, (4, 7), dtype=torch.uint8),
    )
    each(both, lambda pool: pool.set_key_buffer(1, loc, pack))
    ours, theirs = both.ours.get_key_buffer(1), both.theirs.get_key_buffer(1)
    assert ours.dtype == theirs.dtype
    assert torch.equal(raw(ours), raw(theirs))


def test_latents_that_are_quantised_here():
    """SGLang's own fused store is CUDA: its reference finds the scales, its store writes."""
    both = pair("single")
    loc, latent = torch.tensor([9, 1, 30, 2]), values(4, 512, seed=3)
    reference = quant_to_nope_fp8_rope_bf16_pack_triton(latent)
    # The interpreter's cast to fp8 loses the carry of a mantissa (31.75 becomes 16): torch casts.
    scale = torch.exp2(reference.scale_k_nope_ue8m0.double() - 127).repeat_interleave(64, dim=1)
    reference.k_nope_fp8 = (latent[:, :448].double() / scale).float().to(FP8)
    both.ours.set_key_buffer_fused(1, loc, latent)
    both.theirs.set_key_buffer(1, loc, reference)
    assert both.same()


def test_a_committed_prefix():
    both = pair("mha")
    loc, lens = torch.tensor([[3, 9, 4], [7, 8, 25], [12, 13, 14]]), torch.tensor([2, 3, 0])
    for pool in both:
        pool.set_kv_buffer_prefix_valid(
            layer(1), loc, lens, values(9, 2, 16, seed=1), values(9, 2, 16, seed=2)
        )
    for theirs, ours in zip(*map(buffers, both), strict=True):
        assert torch.equal(theirs[1:], ours[1:])
    assert both.theirs.k_buffer[1][25].equal(values(9, 2, 16, seed=1)[5])


# Moves


@pytest.mark.parametrize("name", ["mha", "mha-fp8-stage", "hnd"])
def test_moves_are_sglangs_own(name):
    both = pair(name)

    @fuzz
    @given(pairs_of_slots(), st.sampled_from([torch.int32, torch.int64]))
    def run(pairs, dtype):
        tgt, src = (torch.tensor(slots, dtype=dtype) for slots in pairs)
        each(both, lambda pool: pool.move_kv_cache(tgt, src))

    run()


@pytest.mark.parametrize("name", CASES)
def test_moves_where_sglang_has_none(name):
    both = pair(name)
    every = torch.arange(SIZE + PAGE)

    @fuzz
    @given(pairs_of_slots(), st.sampled_from([torch.int32, torch.int64]))
    def run(pairs, dtype):
        tgt, src = (torch.tensor(slots, dtype=dtype) for slots in pairs)
        expected = rows(both.theirs, every)
        for part in expected:
            part[tgt.long()] = part[src.long()]
        both.ours.move_kv_cache(tgt, src)
        assert all(map(torch.equal, rows(both.ours, every), expected))
        for theirs, ours in zip(*map(buffers, both), strict=True):
            raw(theirs).copy_(raw(ours))

    run()


@st.composite
def pairs_of_slots(draw):
    """Targets that differ, any sources: slides, swaps, one source to many."""
    tgt = draw(slot_lists)
    src = draw(st.lists(st.integers(0, SIZE + PAGE - 1), min_size=len(tgt), max_size=len(tgt)))
    return tgt, src


# What these comparisons can see


def test_one_byte_of_padding_is_seen():
    both = pair("single")
    assert both.same()
    raw(buffers(both.ours)[-1])[0, -1] += 1
    assert not both.same()


def test_a_store_that_leaves_out_values_is_seen(monkeypatch):
    both = pair("minimax")
    main = both.ours.main_pool
    staged = main.stage_kv_buffer
    monkeypatch.setattr(
        main,
        "stage_kv_buffer",
        lambda *arguments: (whole := staged(*arguments))._replace(
            views=whole.views[:1], values=whole.values[:1]
        ),
    )
    k = values(1, 2, 16, seed=1)
    with pytest.raises(AssertionError):
        each(both, lambda pool: pool.set_kv_buffer(layer(2), torch.tensor([3]), k, k))


def test_a_move_that_forgets_a_sub_pool_is_seen(monkeypatch):
    both = pair("minimax")
    everything = both.ours._parts()
    monkeypatch.setattr(both.ours, "_parts", lambda: everything | {"index_kv": None})
    before = rows(both.ours, torch.tensor([3]))
    wanted = rows(both.theirs, torch.tensor([4]))
    both.ours.move_kv_cache(torch.tensor([3]), torch.tensor([4]))
    after = rows(both.ours, torch.tensor([3]))
    forgotten = [torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    assert sum(forgotten) == len(buffers(everything["index_kv"]))
    assert not all(map(torch.equal, after, wanted))
