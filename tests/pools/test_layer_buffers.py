"""Host copies of every pool: their form, restoring elsewhere, and checks before the first byte."""

import copy as copying

import pool_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.pools import MiniMaxSparseKVPool


@given(
    kind=st.sampled_from(list(cases.POOLS)),
    data=st.data(),
    chunk=st.integers(1, 9),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_host_copy_restores_into_other_slots_and_nowhere_else(kind, data, chunk, dtype):
    pool = cases.POOLS[kind]()
    parts = [pool]
    if isinstance(pool, MiniMaxSparseKVPool):
        parts = [pool.main_pool, pool.index_kv_pool, pool.index_k_pool]
    for part in parts:
        part.cpu_offloading_chunk_size = chunk
    cases.fill(pool)
    slots = st.lists(st.integers(1, cases.SIZE - 5), max_size=15, unique=True)
    old = data.draw(slots, label="old")
    new = data.draw(
        st.lists(st.integers(1, cases.SIZE - 5), min_size=len(old), max_size=len(old), unique=True),
        label="new",
    )
    rows = [(to, cases.rows_at(pool, slot)) for to, slot in zip(new, old, strict=True)]
    saved = pool.get_cpu_copy(torch.tensor(old, dtype=dtype))
    cases.fill(pool, seed=1)
    expected = cases.placed(pool, rows)
    pool.load_cpu_copy(saved, torch.tensor(new, dtype=dtype))
    assert cases.unchanged(pool, expected)


def test_a_host_copy_is_no_view():
    pool = cases.mha(dtype=torch.float16, layer_num=1)
    saved = pool.get_cpu_copy(cases.loc(1, 2))
    pool.k_buffer[0].fill_(3)
    assert not saved[0][0][0].any()


def test_the_form_of_each_host_copy():
    indices = torch.arange(1, 11)
    pool = cases.mha(dtype=torch.float8_e4m3fn, layer_num=2, v_head_dim=9)
    pool.cpu_offloading_chunk_size = 4
    saved = pool.get_cpu_copy(indices, mamba_indices=None, req_pool_index=None)
    assert [len(chunks) for chunks in saved] == [3, 3]
    assert [[tuple(t.shape) for t in chunk] for chunk in saved[0]] == [
        [(4, 2, 6), (4, 2, 9)],
        [(4, 2, 6), (4, 2, 9)],
        [(2, 2, 6), (2, 2, 9)],
    ]
    assert saved[0][0][0].dtype == torch.uint8

    keys = cases.k_only(dtype=torch.float16).get_cpu_copy(indices)
    assert [[tuple(chunk.shape) for chunk in chunks] for chunks in keys] == [[(10, 1, 5)]] * 3

    packed = cases.single().get_cpu_copy(indices)
    assert [[(c.dtype, tuple(c.shape)) for c in chunks] for chunks in packed] == [
        [(torch.uint8, (10, 584))]
    ] * 2

    composite = cases.minimax(disable_value_sparse_layer_ids=None).get_cpu_copy(indices)
    assert list(composite) == ["main", "index_kv", "index_k"]
    assert (len(composite["main"]), len(composite["index_kv"])) == (6, 4)
    assert composite["index_k"] is None
    whole = cases.minimax().get_cpu_copy(indices)
    assert [layers and len(layers) for layers in whole.values()] == [6, 2, 2]
    assert cases.k_only(dtype=torch.float16).get_cpu_copy(indices[:0]) == [[], [], []]


@pytest.fixture(params=cases.POOLS, ids=str)
def pool(request):
    made = cases.POOLS[request.param]()
    cases.fill(made)
    return made


def layers_of(saved):
    """The [layer][chunk] lists in a copy, the last sub-pool's first."""
    if isinstance(saved, dict):
        return next(copy for copy in reversed(saved.values()) if copy is not None)
    return saved


def break_layers(saved):
    layers_of(saved).pop()


def break_rows(saved):
    layers_of(saved)[-1].pop()


def break_last(change):
    def apply(saved):
        chunks = layers_of(saved)[-1]
        chunk = chunks[-1]
        if isinstance(chunk, list):
            chunk[-1] = change(chunk[-1])
        else:
            chunks[-1] = change(chunk)

    return apply


def break_chunk(saved):
    layers_of(saved)[-1][-1] = None


def break_layer(saved):
    layers_of(saved)[-1] = None


FAULTS = {
    "layers": (break_layers, ValueError, "layers, the pool"),
    "rows": (break_rows, ValueError, "rows for 5 indices"),
    "dtype": (break_last(lambda t: t.to(torch.int16)), ValueError, "needs"),
    "width": (break_last(lambda t: t[..., 1:]), ValueError, "needs"),
    "a row": (break_last(lambda t: t[1:]), ValueError, "needs|rows for 5 indices"),
    "no tensor": (break_last(lambda t: None), TypeError, "chunk 0 .*needs torch.*got NoneType"),
    "no chunk": (break_chunk, TypeError, "chunk 0 .*(needs|a list of K and V).*got NoneType"),
    "no layer": (break_layer, TypeError, "layer . .*must be a list of chunks, got NoneType"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_host_copy_is_refused_before_the_first_byte(pool, fault):
    saved = copying.deepcopy(pool.get_cpu_copy(cases.loc(1, 2, 3, 4, 5)))
    damage, error, message = FAULTS[fault]
    damage(saved)
    before = cases.snapshot(pool)
    with pytest.raises(error, match=message):
        pool.load_cpu_copy(saved, cases.loc(11, 12, 13, 14, 15))
    assert cases.unchanged(pool, before)


@pytest.mark.parametrize("given", [None, 3, iter([])], ids=["None", "a number", "an iterator"])
def test_what_is_no_host_copy_is_refused(pool, given):
    wanted = rf"the host copy must be a (dict|list) of .* got {type(given).__name__}"
    with pytest.raises(TypeError, match=wanted):
        pool.load_cpu_copy(given, cases.loc(1))
    if isinstance(pool, MiniMaxSparseKVPool):
        copy = pool.get_cpu_copy(cases.loc(1)) | {"index_k": 3}
        with pytest.raises(TypeError, match=r"must be a list of layers, .* got int"):
            pool.load_cpu_copy(copy, cases.loc(2))


@pytest.mark.parametrize(
    ("indices", "error", "message"),
    [
        (cases.loc(1, 2, 3, 4, 99), IndexError, "indices holds 99, outside"),
        (cases.loc(1, 2, 3, 4, -1), IndexError, "indices holds -1, outside"),
        (cases.loc(1, 2, 3, 4, 1), ValueError, "indices name a slot twice"),
        (cases.loc(1, 2, 3, 4), ValueError, "rows for 4 indices"),
        (torch.ones(5), TypeError, "int32 or int64"),
        ([1, 2, 3, 4, 5], TypeError, "got list"),
    ],
)
def test_bad_indices_are_refused_before_the_first_byte(pool, indices, error, message):
    saved = pool.get_cpu_copy(cases.loc(1, 2, 3, 4, 5))
    before = cases.snapshot(pool)
    with pytest.raises(error, match=message):
        pool.load_cpu_copy(saved, indices)
    if error is not ValueError:
        with pytest.raises(error, match=message):
            pool.get_cpu_copy(indices)
    assert cases.unchanged(pool, before)


def test_keys_and_values_must_come_in_pairs():
    pool = cases.mha(dtype=torch.float16, layer_num=1)
    saved = pool.get_cpu_copy(cases.loc(1))
    saved[0][0].pop()
    with pytest.raises(ValueError, match="layer 0, chunk 0 of the host copy has 1 tensors"):
        pool.load_cpu_copy(saved, cases.loc(1))


def test_the_copy_of_another_kind_of_pool_is_refused():
    flat = cases.mha(dtype=torch.bfloat16, layer_num=6)
    with pytest.raises(TypeError, match=r"a dict of main, index_kv, index_k, .* got list"):
        cases.minimax().load_cpu_copy(flat.get_cpu_copy(cases.loc(1)), cases.loc(1))


def test_a_composite_copy_must_have_just_the_sub_pools_there_are():
    pool = cases.minimax()
    cases.fill(pool)
    saved = pool.get_cpu_copy(cases.loc(1, 2))
    before = cases.snapshot(pool)
    for broken in (saved | {"index_k": None}, {"main": saved["main"]}, saved | {"more": [[]]}):
        with pytest.raises(ValueError, match="this pool's sub-pools are"):
            pool.load_cpu_copy(broken, cases.loc(3, 4))
    assert cases.unchanged(pool, before)
