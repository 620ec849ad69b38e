"""Stores of values that are views of the pool's own buffers: as if they were read first."""

import copy

import pool_cases as cases
import pytest
import torch

from specpool.pools import NopeFp8RopeBf16Pack

SLOTS = cases.loc(2, 3, 4)


def same_as_clones(pool, store):
    """Store views of the pool's buffers, and clones of them into a copy of the pool."""
    cases.fill(pool)
    twin = copy.deepcopy(pool)
    store(twin, lambda value: value.clone())
    store(pool, lambda value: value)
    assert cases.unchanged(pool, cases.snapshot(twin))


@pytest.mark.parametrize("k_from", ["k", "v", "other layer", "elsewhere"])
@pytest.mark.parametrize("v_from", ["k", "v", "other layer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("v_head_dim", [6, 7], ids=["one allocation", "two"])
def test_keys_and_values_from_the_pool_itself(k_from, v_from, dtype, v_head_dim):
    pool = cases.mha(dtype=dtype, layer_num=2, v_head_dim=v_head_dim)

    def view(pool, source, width):
        if source == "elsewhere":
            return torch.ones(3, 2, width).to(dtype)
        k, v = pool.get_kv_buffer(int(source == "other layer"))
        buffer = k if source in ("k", "other layer") else v
        if buffer.shape[2] != width:  # as many elements, of a buffer of other rows
            return buffer.view(-1)[5 : 5 + 3 * 2 * width].view(3, 2, width)
        return buffer[1:4]

    same_as_clones(
        pool,
        lambda pool, given: pool.set_kv_buffer(
            cases.layer(0),
            SLOTS,
            given(view(pool, k_from, 6)),
            given(view(pool, v_from, v_head_dim)),
        ),
    )


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_a_slide_by_one_slot(layout):
    pool = cases.mha(dtype=torch.float32, layer_num=1, kv_cache_layout=layout)

    def slide(pool, given):
        k, v = pool.get_kv_buffer(0)
        if layout == "hnd":
            pool.set_kv_buffer(
                cases.layer(0),
                cases.loc(5, 6),
                *(given(b[1, :, :2].transpose(0, 1)) for b in (v, k)),
            )
        else:
            pool.set_kv_buffer(cases.layer(0), SLOTS, given(k[1:4]), given(v[1:4]))

    same_as_clones(pool, slide)


def test_keys_alone():
    def slide(pool, given):
        pool.set_k_buffer(0, SLOTS, given(pool.get_key_buffer(0)[1:4]))

    same_as_clones(cases.k_only(dtype=torch.float16), slide)


@pytest.mark.parametrize("with_value", [True, False])
def test_the_fused_store_reads_index_values_before_main_is_written(with_value):
    pool = cases.minimax(head_num=1, idx_head_dim=6)
    layer_id = 2 if with_value else 3

    def store(pool, given):
        k, v = (buffer[1:4] for buffer in pool.get_kv_buffer(layer_id))
        index = pool.get_index_k_buffer(layer_id)[1:4]
        pool.set_fused_kv_index_buffer(
            cases.layer(layer_id),
            SLOTS,
            given(index),
            given(k),
            given(v),
            given(k) if with_value else None,
        )

    same_as_clones(pool, store)


@pytest.mark.parametrize("make", [cases.single, cases.hisparse], ids=["single", "hisparse"])
def test_latents_and_scales_from_the_pages_themselves(make):
    first = 0 if make is cases.single else 1

    def store(pool, given):
        page = pool.kv_buffer[0][1]
        pool.set_key_buffer(
            first,
            SLOTS,
            NopeFp8RopeBf16Pack(
                given(page[: 3 * 448].view(3, 448).view(torch.float8_e4m3fn)),
                given(page[: 3 * 128].view(3, 128).view(torch.bfloat16)),
                given(page.as_strided((3, 7), (1, 1), page.storage_offset() + 570)),
            ),
        )
        # In a page, the payloads are written first and lie where these scales are read.
        pool.set_key_buffer(
            first,
            cases.loc(5, 6),
            NopeFp8RopeBf16Pack(
                torch.ones(2, 448).to(torch.float8_e4m3fn),
                torch.ones(2, 64, dtype=torch.bfloat16),
                given(pool.kv_buffer[0][1, 600 : 600 + 14].view(2, 7)),
            ),
        )
        latents = page[: 2 * 1024].view(2, 1024).view(torch.bfloat16)
        pool.set_key_buffer_fused(first, cases.loc(5, 7), given(latents))

    same_as_clones(make(), store)


def test_a_compiled_store_is_one_graph():
    pool = cases.mha(dtype=torch.float16, layer_num=1, device="meta")
    k = torch.empty(3, 2, 6, dtype=torch.float16, device="meta")
    whole = torch.compile(pool.set_kv_buffer, backend="eager", fullgraph=True)
    whole(cases.layer(0), SLOTS.to("meta"), k, k)
