"""Every pool on a GPU: what it stores, moves, saves and loads is, byte for byte, as on a CPU."""

import pytest
import torch

from specpool import (
    DeepSeekV4SingleKVPool,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
)
from tests.gpu.gpu import captured
from tests.pools import pool_cases as cases

E4M3 = torch.float8_e4m3fn


@pytest.fixture(params=cases.POOLS, ids=str)
def pools(request, on):
    """The same pool twice with the same bytes: where these tests run, and on a CPU."""
    made = cases.POOLS[request.param](device=on.device), cases.POOLS[request.param](device="cpu")
    for pool in made:
        cases.fill(pool)
    assert made[0].mover.backend == on.backend
    return made


def _same(mine, theirs) -> None:
    for got, wanted in zip(cases.storages(mine), cases.storages(theirs), strict=True):
        assert torch.equal(got.cpu(), wanted)


def _expect(pool, tgt, src) -> None:
    """Make the CPU's pool what the oracle says."""
    for storage, after in zip(cases.storages(pool), cases.moved(pool, tgt, src), strict=True):
        storage.copy_(after)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_moves(on, pools, dtype):
    mine, theirs = pools
    mine.mover.reserve(16)
    for tgt, src in (([1, 2, 3, 4], [2, 5, 1, -1]), ([20, -1, 9], [3, 2, 22])):
        _expect(theirs, tgt, src)
        mine.move_kv_cache(on.loc(tgt, dtype), on.loc(src, dtype))
        _same(mine, theirs)
    assert mine.mover.launches == 2
    mine.mover.check()


def test_accepted_moves_in_a_graph(on, pools):
    mine, theirs = pools
    mine.mover.reserve(16)
    window = on.loc([[4, 6, 5, 9], [12, 11, 15, 14], [2, 1, 3, 7]])
    index = on.loc([[0, 2, 3], [4, 7, -1], [8, 9, 11]], torch.int32)
    length = on.loc([3, 2, 0], torch.int32)
    replay = captured(on, lambda: mine.move_accepted(window, index, length))
    for lengths, tgt, src in (
        ([3, 2, 0], [6, 5, 11], [5, 9, 14]),
        ([0, 2, 3], [11, 3], [14, 7]),
        ([0, 0, 0], [], []),
    ):
        length.copy_(torch.tensor(lengths))
        _expect(theirs, tgt, src)
        replay()
        _same(mine, theirs)


def test_bad_slots_are_dropped_and_counted(on, pools):
    mine, theirs = pools
    _expect(theirs, [3], [4])
    mine.move_kv_cache(on.loc([3, 10**6, -5]), on.loc([4, 2, 3]))
    _same(mine, theirs)
    with pytest.raises(IndexError, match="2 pairs named slots outside"):
        mine.mover.check()


def test_validated_moves_change_nothing_when_they_raise(on, pools, monkeypatch):
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    mine, theirs = pools
    checked = type(mine.mover)(mine.rows(), on.backend)
    with pytest.raises(IndexError, match="src_loc holds slot 1000000"):
        checked.move(on.loc([3, 5]), on.loc([4, 10**6]))
    _same(mine, theirs)
    checked.check()


def test_host_copies_load_into_other_slots(on, pools):
    mine, theirs = pools
    saved = mine.get_cpu_copy(on.loc([2, 9, 5]))
    wanted = theirs.get_cpu_copy(cases.loc(2, 9, 5))
    _same_copies(saved, wanted)
    mine.load_cpu_copy(saved, on.loc([11, 3, 20], torch.int32))
    theirs.load_cpu_copy(wanted, cases.loc(11, 3, 20))
    _same(mine, theirs)


def _same_copies(mine, theirs) -> None:
    """Nests of lists, dicts and host tensors."""
    if isinstance(mine, torch.Tensor):
        assert mine.device.type == "cpu"
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    elif mine is not None:
        keys = mine if isinstance(mine, dict) else range(len(mine))
        assert len(mine) == len(theirs)
        for key in keys:
            _same_copies(mine[key], theirs[key])


def test_memory(on, pools):
    mine, theirs = pools
    assert mine.mem_usage == theirs.mem_usage
    assert {buffer.device.type for buffer, _ in cases.places(mine)} == {on.device}
    assert mine.mover.device.type == on.device


def _stores(pool):
    """Every setter of the pool as (name, a function of a loc and a source of random values)."""
    layer = cases.layer(pool.layer_ids[-1])
    if isinstance(pool, DeepSeekV4SingleKVPool):
        latent = lambda loc, values: pool.set_key_buffer_fused(  # noqa: E731
            layer.layer_id, loc, values(512).bfloat16()
        )
        return {"fused": latent}
    if isinstance(pool, MHATokenToKOnlyPool):
        store = lambda loc, values: pool.set_index_k_buffer(  # noqa: E731
            layer, loc, values(1, 5), 0.5
        )
        return {"k": store} if hasattr(pool, "set_index_k_buffer") else {}
    main = pool.main_pool if isinstance(pool, MiniMaxSparseKVPool) else pool
    assert isinstance(main, MHATokenToKVPool)
    heads, dim, wide = main.head_num, main.head_dim, main.v_head_dim
    stores = {
        "kv": lambda loc, values: pool.set_kv_buffer(
            layer, loc, values(heads, dim), values(heads, wide), 0.5, 2.0
        )
    }
    if isinstance(pool, MiniMaxSparseKVPool):
        stores["index_k"] = lambda loc, values: pool.set_index_k_buffer(
            layer, loc, values(1, 5), 0.25
        )
    return stores


def test_stores(on, pools):
    """Scaled, clamped, rounded and cast alike, infinities included (a NaN's bits may differ)."""
    special = torch.tensor([float("inf"), -float("inf"), 1e6, -1e-9, 448.0, 0.0])

    def fill(pool, device):
        for store in _stores(pool).values():
            generator = torch.Generator().manual_seed(7)

            def values(*shape, draw=generator):
                drawn = torch.randn(4, *shape, generator=draw) * 300
                if shape != (512,):  # a latent with an infinity has no scale
                    drawn.view(-1)[: len(special)] = special
                return drawn.bfloat16().float().to(device)

            store(torch.tensor([3, 20, 9, 1], dtype=torch.int32, device=device), values)

    mine, theirs = pools
    fill(mine, on.device)
    fill(theirs, "cpu")
    _same(mine, theirs)


def test_a_padding_slot_becomes_the_dummy_slot(on):
    """Indexing would take -1 for the last slot."""
    if on.device == "cpu":
        pytest.skip("a CPU refuses -1: tests/pools")
    pool = cases.mha(dtype=torch.float16, layer_num=1, device=on.device)
    last = pool.k_buffer[0][-1].clone()
    values = torch.ones(2, 2, 6, dtype=torch.float16, device=on.device)
    pool.set_kv_buffer(cases.layer(0), on.loc([3, -1]), values, values)
    assert torch.equal(pool.k_buffer[0][-1], last)
    assert (pool.k_buffer[0][3] == 1).all()
    assert (pool.k_buffer[0][0] == 1).all()


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e4m3fnuz, torch.float8_e5m2], ids=str)
def test_fp8_kinds(on, dtype):
    """Values come back as the nearest fp8 ones, also after they have moved."""
    pool = cases.mha(dtype=dtype, layer_num=1, device=on.device)
    values = torch.randn(3, 2, 6) * 3
    values[1, 0, 2] = float("nan")
    given = values.to(on.device)
    pool.set_kv_buffer(cases.layer(0), on.loc([4, 5, 6]), given, -given)
    pool.move_kv_cache(on.loc([5, 6, 4]), on.loc([4, 5, 6]))
    for buffer, stored in zip(pool.get_kv_buffer(0), (values, -values), strict=True):
        got = buffer.float().cpu()[[5, 6, 4]]
        assert torch.equal(got.nan_to_num(1e9), stored.to(dtype).float().nan_to_num(1e9))
