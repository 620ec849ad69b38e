"""The composite pool: who owns which layer, stores that write all or nothing, one launch."""

from functools import partial

import pool_cases as cases
import pytest
import torch

from specpool.pools import MHATokenToKOnlyPool, MHATokenToKVPool


def kv(n=2, heads=2, dim=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, n, heads, dim, generator=generator).bfloat16().unbind()


def test_layers_of_the_sub_pools():
    pool = cases.minimax()
    assert pool.layer_ids == pool.main_pool.layer_ids == (0, 1, 2, 3, 4, 5)
    assert pool.sparse_layer_id_mapping == {2: 0, 3: 1, 4: 2, 5: 3}
    assert pool.index_kv_layer_id_mapping == {2: 0, 4: 1}
    assert pool.index_k_layer_id_mapping == {3: 0, 5: 1}
    assert (pool.index_kv_pool.layer_ids, pool.index_kv_pool.model_layer_ids) == ((0, 1), (2, 4))
    assert (pool.index_k_pool.layer_ids, pool.index_k_pool.model_layer_ids) == ((0, 1), (3, 5))
    assert (pool.layer_num, pool.start_layer, pool.end_layer) == (6, 0, 6)
    assert pool.dense_pool is None
    assert pool.has_index
    for part in (pool, pool.main_pool, pool.index_kv_pool, pool.index_k_pool):
        assert part.enable_kv_cache_copy


def test_a_pipeline_stage_drops_the_layers_of_others():
    pool = cases.minimax(start_layer=1, end_layer=4)
    assert pool.layer_ids == (1, 2, 3)
    assert pool.index_kv_layer_id_mapping == {2: 0}
    assert pool.index_k_layer_id_mapping == {3: 0}
    assert (pool.start_layer, pool.end_layer, pool.main_pool.start_layer) == (1, 4, 1)
    assert pool.get_key_buffer(1).data_ptr() == pool.main_pool.k_buffer[0].data_ptr()
    with pytest.raises(ValueError, match=r"no layer 4; it has \[1, 2, 3\]"):
        pool.get_key_buffer(4)
    dense_only = cases.minimax(end_layer=2)
    assert dense_only.index_kv_pool is None
    assert dense_only.index_k_pool is None


def test_ids_with_gaps_and_in_any_order():
    pool = cases.minimax(dense_layer_ids=[7], sparse_layer_ids=[40, 12])
    assert pool.main_pool.layer_ids == (7, 12, 40)
    assert pool.end_layer == 41
    assert pool.sparse_layer_id_mapping == {40: 0, 12: 1}
    pool.set_kv_buffer(cases.layer(12), cases.loc(3, 5), *kv())
    assert torch.equal(pool.main_pool.k_buffer[1][[3, 5]], kv()[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dense_layer_ids": [0, 2]}, ValueError, r"\[2\] are in dense_layer_ids and in sparse"),
        ({"dense_layer_ids": [1, 1]}, ValueError, r"dense_layer_ids must be different .*\[1, 1\]"),
        ({"sparse_layer_ids": [4, 4]}, ValueError, "sparse_layer_ids must be different"),
        ({"dense_layer_ids": [-1]}, ValueError, r"dense_layer_ids must be .* got \[-1\]"),
        ({"enable_hisparse": True}, NotImplementedError, "enable_hisparse=True is not supported"),
        ({"index_dtype": torch.int8}, ValueError, "does not serve dtype torch.int8"),
        ({"idx_head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"main_pool_cls": lambda **kw: object()}, TypeError, "must be a MHATokenToKVPool"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, error, message):
    with pytest.raises(error, match=message):
        cases.minimax(**change)


def test_sub_pool_classes_and_what_they_are_given():
    given = []

    class Main(MHATokenToKVPool):
        def __init__(self, *args, **kwargs):
            given.append(kwargs)
            super().__init__(*args, **kwargs)

    class Keys(MHATokenToKOnlyPool):
        def __init__(self, *args, **kwargs):
            given.append(kwargs)
            super().__init__(*args, **kwargs)

    pool = cases.minimax(main_pool_cls=Main, index_kv_pool_cls=Main, index_k_pool_cls=Keys)
    assert [type(p) for p in (pool.main_pool, pool.index_kv_pool, pool.index_k_pool)] == [
        Main,
        Main,
        Keys,
    ]
    assert all(kwargs["enable_kv_cache_copy"] for kwargs in given)
    assert "layer_ids" not in given[0]  # SGLang's keywords only, where ids have no gaps


def test_one_launch_moves_main_index_kv_and_index_k():
    pool = cases.minimax(index_dtype=torch.float32)
    cases.fill(pool)
    names = [row.name.split()[0] for row in pool.rows()]
    assert [names.count(part) for part in ("main", "index_kv", "index_k")] == [12, 4, 2]
    expected = cases.moved(pool, [1, 2, 3], [2, 3, 1])
    pool.move_kv_cache(cases.loc(1, 2, 3), cases.loc(2, 3, 1))
    assert cases.unchanged(pool, expected)
    assert pool.mover.launches == 1


def test_a_main_pool_in_head_major_pages_moves_with_the_others():
    pool = cases.minimax(main_pool_cls=partial(MHATokenToKVPool, kv_cache_layout="hnd"))
    cases.fill(pool)
    expected = cases.moved(pool, [1, 2, 9], [2, 13, 1])
    pool.move_kv_cache(cases.loc(1, 2, 9), cases.loc(2, 13, 1))
    assert cases.unchanged(pool, expected)
    assert pool.mover.launches == 1


@pytest.mark.parametrize("part", ["index_kv_pool", "index_k_pool"])
def test_a_replaced_index_buffer_is_noticed(part):
    pool = cases.minimax()
    cases.fill(pool)
    pool.move_kv_cache(cases.loc(1), cases.loc(2))
    buffers = getattr(pool, part).k_buffer
    old = buffers[0]
    buffers[0] = old.clone()
    was = old.view(torch.uint8).clone()
    expected = cases.moved(pool, [3, 4], [4, 5])
    pool.move_kv_cache(cases.loc(3, 4), cases.loc(4, 5))
    assert cases.unchanged(pool, expected)
    assert torch.equal(old.view(torch.uint8), was)


def test_index_stores_go_to_their_own_layer():
    pool = cases.minimax(index_dtype=torch.float32)
    k, v = (x.float() for x in kv(heads=1, dim=5))
    slots = cases.loc(3, 9)
    pool.set_index_kv_buffer(cases.layer(4), slots, k, v)
    got_k, got_v = pool.get_index_kv_buffer(4)
    assert torch.equal(got_k[slots], k)
    assert torch.equal(got_v[slots], v)
    assert torch.equal(pool.get_index_k_buffer(4)[slots], k)
    pool.set_index_k_buffer(cases.layer(5), slots, 2 * k.flatten(1))
    assert torch.equal(pool.get_index_k_buffer(5)[slots], 2 * k)
    assert not pool.get_index_k_buffer(2).any()
    assert not pool.get_index_k_buffer(3).any()
    assert not any(buffer.any() for buffer in pool._tensors()[:12])


def test_index_scales():
    pool = cases.minimax(index_dtype=torch.float8_e4m3fn)
    k, v = kv(n=1, heads=1, dim=5)
    was = k.clone()
    pool.set_index_k_buffer(cases.layer(3), cases.loc(3), k, 0.5)
    pool.set_index_kv_buffer(cases.layer(2), cases.loc(3), k, v, 0.5, 2.0)
    assert torch.equal(k, was)
    for got in (pool.get_index_k_buffer(3), pool.get_index_k_buffer(2)):
        assert torch.equal(got[3].float(), (k[0] / 0.5).to(torch.float8_e4m3fn).float())
    got_v = pool.get_index_kv_buffer(2)[1][3]
    assert torch.equal(got_v.float(), (v[0] / 2).to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("with_value", [False, True])
def test_the_fused_store_equals_the_separate_ones(with_value):
    layer = cases.layer(2 if with_value else 3)
    fused, apart = cases.minimax(), cases.minimax()
    (k, v), (ik, iv) = kv(), kv(heads=1, dim=5, seed=1)
    slots = cases.loc(8, 1)
    fused.set_fused_kv_index_buffer(layer, slots, k, v, ik, iv if with_value else None)
    apart.set_kv_buffer(layer, slots, k, v)
    if with_value:
        apart.set_index_kv_buffer(layer, slots, ik, iv)
    else:
        apart.set_index_k_buffer(layer, slots, ik)
    assert cases.unchanged(fused, cases.snapshot(apart))
    assert fused.get_index_k_buffer(layer.layer_id).any()
    assert fused.get_value_buffer(layer.layer_id).any()


def test_the_fused_store_passes_every_scale():
    pool = cases.minimax(dtype=torch.float8_e5m2)
    (k, v), (ik, iv) = kv(n=1), kv(n=1, heads=1, dim=5)
    scales = (2.0, 4.0, 8.0, 16.0)
    pool.set_fused_kv_index_buffer(cases.layer(2), cases.loc(8), k, v, ik, iv, *scales)
    got = (*pool.get_kv_buffer(2), *pool.get_index_kv_buffer(2))
    for buffer, value, scale in zip(got, (k, v, ik, iv), scales, strict=True):
        expected = (value[0] / scale).to(torch.float8_e5m2).float()
        assert torch.equal(buffer[8].float(), expected)


(FK, FV), (FIK, FIV) = kv(), kv(heads=1, dim=5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache_idx_k": FIK[:1]}, ValueError, "cache_k must be"),
        ({"cache_idx_v": FIV[..., :4]}, ValueError, "cache_v must be"),
        ({"cache_v": FV[:1]}, ValueError, "cache_v must be"),
        ({"cache_idx_v": None}, ValueError, r"layer 2 has no index K alone .*\[3, 5\]"),
        ({"layer": cases.layer(3)}, ValueError, r"layer 3 has no index V .*\[2, 4\]"),
        ({"layer": cases.layer(0)}, ValueError, "layer 0 has no index V"),
        ({"layer": cases.layer(6)}, ValueError, r"no layer 6; it has \[0, 1, 2, 3, 4, 5\]"),
        ({"loc": cases.loc(1, 32)}, IndexError, "outside"),
        ({"idx_v_scale": 0}, ValueError, "must be positive"),
    ],
)
def test_a_refused_fused_store_leaves_every_byte(change, error, message):
    pool = cases.minimax()
    cases.fill(pool)
    before = cases.snapshot(pool)
    good = {
        "layer": cases.layer(2),
        "loc": cases.loc(8, 1),
        "cache_k": FK,
        "cache_v": FV,
        "cache_idx_k": FIK,
        "cache_idx_v": FIV,
    }
    with pytest.raises(error, match=message):
        pool.set_fused_kv_index_buffer(**good | change)
    assert cases.unchanged(pool, before)


def test_index_accessors_name_the_layers_that_have_what_was_asked_for():
    pool = cases.minimax()
    with pytest.raises(ValueError, match=r"layer 3 has no index V .* \[2, 4\]"):
        pool.get_index_kv_buffer(3)
    with pytest.raises(ValueError, match=r"layer 1 is not a sparse layer .* \[2, 3, 4, 5\]"):
        pool.get_index_k_buffer(1)
    with pytest.raises(ValueError, match=r"layer 4 has no index K alone .* \[3, 5\]"):
        pool.set_index_k_buffer(cases.layer(4), cases.loc(1), torch.ones(1, 1, 5))
    with pytest.raises(ValueError, match="layer 2 has no index V"):
        cases.minimax(disable_value_sparse_layer_ids=[2, 3, 4, 5]).get_index_kv_buffer(2)


def test_index_getters_wait_for_their_absolute_layer():
    waits = []
    pool = cases.minimax(start_layer=1)

    class Counter:
        def wait_until(self, threshold):
            waits.append(threshold)

    pool.register_layer_transfer_counter(Counter())
    pool.get_index_kv_buffer(4)
    pool.get_index_k_buffer(5)
    pool.get_index_k_buffer(4)
    assert waits == [3, 4, 3]


def test_sizes_and_buffer_infos():
    pool = cases.minimax(index_dtype=torch.float32)
    main = 6 * 32 * 12 * 2
    index = 32 * 5 * 4
    assert pool.get_kv_size_bytes() == (main + 2 * index + 2 * index, main + 2 * index)
    assert pool.get_contiguous_buf_infos() == pool.main_pool.get_contiguous_buf_infos()
    addresses, sizes, items = pool.get_index_k_state_buf_infos()
    assert addresses == [b.data_ptr() for b in pool.index_k_pool.k_buffer]
    assert (sizes, items) == ([index] * 2, [4 * 5 * 4] * 2)
    assert cases.minimax(end_layer=2).get_index_k_state_buf_infos() == ([], [], [])
    assert (pool.head_num, pool.head_dim, pool.v_head_dim, pool.get_v_head_dim()) == (2, 6, 6, 6)
    assert pool.get_kv_buffer_shape() == ((32, 2, 6), (32, 2, 6))


def test_buffer_infos_of_the_sparse_and_of_the_dense_layers():
    pool = cases.minimax()
    k, v = pool.main_pool.k_buffer, pool.main_pool.v_buffer
    sparse, dense = pool.get_sparse_kv_buf_infos(), pool.get_dense_kv_state_buf_infos()
    assert sparse[0] == [b.data_ptr() for b in (*k[2:], *v[2:])]
    assert dense[0] == [b.data_ptr() for b in (*k[:2], *v[:2])]
    assert (dense[1], dense[2]) == ([32 * 12 * 2] * 4, [4 * 12 * 2] * 4)
    assert sorted(sparse[0] + dense[0]) == sorted(pool.get_contiguous_buf_infos()[0])
    assert cases.minimax(start_layer=2).get_dense_kv_state_buf_infos() == ([], [], [])
