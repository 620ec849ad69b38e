"""What every pool has in common: construction, layers, the mover, moves, the transfer counter."""

import inspect
import sys
from types import SimpleNamespace

import pool_cases as cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.errors import UnsupportedAccess
from specpool.pools import (
    DeepSeekV4SingleKVPool,
    HiSparseC4DevicePool,
    KVCache,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    base,
    store,
)


@pytest.fixture(params=cases.POOLS, ids=str)
def pool(request):
    made = cases.POOLS[request.param]()
    cases.fill(made)
    return made


class Recorder:
    def __init__(self):
        self.waits = []

    def wait_until(self, threshold):
        self.waits.append(threshold)


# Moves


@given(
    kind=st.sampled_from(list(cases.POOLS)),
    data=st.data(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_move_is_gather_then_scatter_and_touches_nothing_else(kind, data, dtype):
    pool = cases.POOLS[kind]()
    cases.fill(pool)
    slot = st.integers(-1, cases.SIZE - 5)
    tgt = data.draw(st.lists(slot, max_size=12, unique=True), label="tgt")
    src = data.draw(st.lists(slot, min_size=len(tgt), max_size=len(tgt)), label="src")
    expected = cases.moved(pool, tgt, src)
    pool.move_kv_cache(torch.tensor(tgt, dtype=dtype), torch.tensor(src, dtype=dtype))
    assert cases.unchanged(pool, expected)


def test_a_move_is_one_launch(pool):
    pool.move_kv_cache(cases.loc(1, 2, 3), cases.loc(2, 3, 1))
    pool.move_kv_cache(cases.loc(9), cases.loc(8))
    assert pool.mover.launches == 2


def test_move_accepted_brings_each_path_to_the_front_of_its_window(pool):
    window = [[4, 6, 5, 9], [12, 11, 15, 14], [2, 1, 3, 7]]
    accept = torch.tensor([[0, 2, 3], [4, 7, -1], [8, 9, 11]], dtype=torch.int32)
    length = torch.tensor([3, 2, 0], dtype=torch.int32)
    expected = cases.moved(pool, [6, 5, 11], [5, 9, 14])
    pool.move_accepted(torch.tensor(window), accept, length)
    assert cases.unchanged(pool, expected)
    assert pool.mover.launches == 1


@pytest.mark.parametrize(
    ("tgt", "src", "error"),
    [
        ([1, 2], [3], ValueError),
        ([1, 2], [3, 99], IndexError),
        ([-2], [3], IndexError),
        ([1.0], [3.0], TypeError),
    ],
)
def test_a_refused_move_leaves_every_byte(pool, tgt, src, error):
    before = cases.snapshot(pool)
    with pytest.raises(error):
        pool.move_kv_cache(torch.tensor(tgt), torch.tensor(src))
    assert cases.unchanged(pool, before)


def test_no_layers_move_nothing_and_launch_nothing():
    no_layers = MiniMaxSparseKVPool(
        8, 4, torch.bfloat16, 1, 8, 8, dense_layer_ids=[], sparse_layer_ids=[9], device="cpu",
        end_layer=5,
    )  # fmt: skip
    for pool in (
        cases.mha(dtype=torch.float16, layer_num=0),
        cases.single(layer_num=0),
        no_layers,
    ):
        pool.move_kv_cache(cases.loc(1), cases.loc(2))
        assert (pool.rows(), pool.mover.launches, pool.mem_usage) == ([], 0, 0)
        with pytest.raises(ValueError, match=r"no layer 0; it has \[\]"):
            pool.get_key_buffer(0)


# The mover notices other memory


def test_a_replaced_buffer_is_noticed_and_the_mover_stays(pool):
    mover = pool.mover
    pool.move_kv_cache(cases.loc(1), cases.loc(2))
    first = pool.main_pool if isinstance(pool, MiniMaxSparseKVPool) else pool
    buffers = first.kv_buffer if isinstance(pool, DeepSeekV4SingleKVPool) else first.k_buffer
    old = buffers[0]
    buffers[0] = old.clone()
    was = old.view(torch.uint8).clone()
    expected = cases.moved(pool, [3, 4], [4, 5])
    pool.move_kv_cache(cases.loc(3, 4), cases.loc(4, 5))
    assert cases.unchanged(pool, expected)
    assert torch.equal(old.view(torch.uint8), was)
    assert pool.mover is mover
    assert mover.launches == 2


def test_a_mover_that_is_kept_has_the_old_buffers_until_the_pool_is_asked_again():
    pool = cases.k_only(dtype=torch.float32)
    mover, old = pool.mover, pool.k_buffer[0]
    pool.k_buffer[0] = torch.zeros_like(old)
    old[2] = 7
    mover.move(cases.loc(1), cases.loc(2))
    assert (old[1] == 7).all()
    pool.k_buffer[0][2] = 5
    assert pool.mover is mover
    mover.move(cases.loc(1), cases.loc(2))
    assert (pool.k_buffer[0][1] == 5).all()
    assert (old[1] == 7).all()


def test_a_mover_on_the_cpu_pins_the_buffers_storage():
    pool = cases.k_only(dtype=torch.float32)
    assert pool.mover.backend == "cpu"
    with pytest.raises(RuntimeError, match="not resizable"):
        pool.k_buffer[0].untyped_storage().resize_(0)


def test_memory_given_to_the_same_tensor_is_noticed():
    pool = cases.k_only(dtype=torch.float32)
    pool.move_kv_cache(cases.loc(1), cases.loc(2))
    other = torch.randn_like(pool.k_buffer[1])
    pool.k_buffer[1].set_(other)
    pool.move_kv_cache(cases.loc(3), cases.loc(4))
    assert torch.equal(other[3], other[4])


def test_compiled_moves_are_one_graph_and_notice_a_replaced_buffer():
    pool = cases.minimax()
    cases.fill(pool)
    assert pool.mover.launches == 0
    whole = torch.compile(pool.move_kv_cache, backend="eager", fullgraph=True)
    expected = cases.moved(pool, [3, 4], [4, 5])
    whole(cases.loc(3, 4), cases.loc(4, 5))
    assert cases.unchanged(pool, expected)
    pool.main_pool.k_buffer[0] = pool.main_pool.k_buffer[0].clone()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ask for pool\.mover once before"):
        whole(cases.loc(3, 4), cases.loc(4, 5))
    expected = cases.moved(pool, [3, 4], [4, 5])
    torch.compile(pool.move_kv_cache, backend="eager")(cases.loc(3, 4), cases.loc(4, 5))
    assert cases.unchanged(pool, expected)
    assert pool.mover.launches == 2


def test_a_freed_buffer_is_refused():
    pool = cases.mha(dtype=torch.float16, layer_num=2, v_head_dim=9)
    pool.v_buffer[1].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"v_buffer\[1\]: the tensor's memory was freed"):
        pool.move_kv_cache(cases.loc(1), cases.loc(2))


@pytest.mark.parametrize(
    "other", [torch.zeros(8, 1, 5), torch.zeros(32, 1, 5, dtype=torch.float64)], ids=str
)
def test_a_buffer_of_another_kind_is_refused_and_nothing_moves(other):
    pool = cases.k_only(dtype=torch.float32)
    pool.move_kv_cache(cases.loc(1), cases.loc(2))
    pool.k_buffer[2] = other
    before = cases.snapshot(pool)
    with pytest.raises(ValueError, match=r"k_buffer\[2\] is .* now; replace a buffer only by"):
        pool.move_kv_cache(cases.loc(3), cases.loc(4))
    assert cases.unchanged(pool, before)
    pool.k_buffer[2:] = []
    with pytest.raises(ValueError, match="has 2 buffers for 3 layers"):
        pool.move_kv_cache(cases.loc(3), cases.loc(4))


# The layer-transfer counter


def test_a_move_waits_for_every_local_layer_first(pool):
    local = [layer_id - pool.start_layer for layer_id in pool.layer_ids]

    class Loads:
        """Loads slot 9 of all buffers when the last layer is waited for."""

        def __init__(self):
            self.waits = []

        def wait_until(self, threshold):
            self.waits.append(threshold)
            if threshold == local[-1]:
                for buffer, place in cases.places(pool):
                    buffer.view(torch.uint8)[place(9)] = 7

    counter = Loads()
    pool.register_layer_transfer_counter(counter)
    pool.move_kv_cache(cases.loc(3), cases.loc(9))
    assert counter.waits == local
    assert all((value == 7).all() for value in cases.rows_at(pool, 3))
    pool.move_accepted(cases.loc(3, 4), torch.tensor([[0]], dtype=torch.int32), cases.loc(1))
    assert counter.waits == 2 * local


def test_a_move_does_not_wait_while_a_graph_is_captured(pool, monkeypatch):
    counter = Recorder()
    pool.register_layer_transfer_counter(counter)
    monkeypatch.setattr(base, "is_capturing", lambda device: True)
    pool.move_kv_cache(cases.loc(3), cases.loc(9))
    assert counter.waits == []


def test_getters_wait_for_their_layer_and_a_wrong_id_waits_for_nothing(pool):
    counter = Recorder()
    pool.register_layer_transfer_counter(counter)
    last = pool.layer_ids[-1]
    pool.get_key_buffer(last)
    assert counter.waits == [last - pool.start_layer]
    with pytest.raises(ValueError, match="has no layer 77; it has"):
        pool.get_key_buffer(77)
    assert counter.waits == [last - pool.start_layer]
    if pool.has_value:
        counter.waits.clear()
        pool.get_value_buffer(last)
        pool.get_kv_buffer(last)
        assert set(counter.waits) == {last - pool.start_layer}
    pool.register_layer_transfer_counter(None)
    pool.get_key_buffer(last)


# Construction


def make(**changes):
    arguments = {"dtype": torch.float16, "layer_num": 2} | changes
    return cases.mha(**arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": 2.5}, TypeError, "size must be an integer, got 2.5"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"dtype": torch.int8}, ValueError, "does not serve dtype torch.int8"),
        ({"layer_num": -1}, ValueError, "layer_num must be at least 0, got -1"),
        ({"start_layer": -1}, ValueError, "start_layer must be at least 0, got -1"),
        ({"start_layer": 3, "end_layer": 4}, ValueError, r"\[3, 4\) hold fewer than layer_num=2"),
        ({"layer_ids": [1]}, ValueError, r"must be 2 different ids .* got \[1\]"),
        ({"layer_ids": [1, 1]}, ValueError, "must be 2 different ids"),
        ({"layer_ids": [1, 9], "end_layer": 9}, ValueError, r"\[9\] are outside \[0, 9\)"),
        ({"head_num": 0}, ValueError, "head_num must be at least 1, got 0"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_by_name(change, error, message):
    sizes = {"size": change.pop("size", 28), "page_size": change.pop("page_size", 4)}
    with pytest.raises(error, match=message):
        cases.mha.func(
            **sizes,
            **{
                "dtype": torch.float16,
                "head_num": 2,
                "head_dim": 6,
                "layer_num": 2,
                "device": "cpu",
                "enable_memory_saver": False,
            }
            | change,
        )


COMMON = "size page_size dtype"
PLACE = "layer_num device enable_memory_saver"
RANGE = "start_layer end_layer"
KEYWORDS = {
    MHATokenToKVPool: f"{COMMON} head_num head_dim {PLACE} v_head_dim swa_head_num swa_head_dim "
    f"swa_v_head_dim {RANGE} enable_alt_stream enable_kv_cache_copy kv_cache_layout quant_method "
    "post_capture_active allocation_label",
    MHATokenToKOnlyPool: f"{COMMON} head_num head_dim {PLACE} {RANGE}",
    MiniMaxSparseKVPool: f"{COMMON} head_num head_dim idx_head_dim dense_layer_ids "
    "sparse_layer_ids device disable_value_sparse_layer_ids enable_memory_saver index_dtype "
    f"{RANGE} main_pool_cls index_kv_pool_cls index_k_pool_cls enable_hisparse "
    "host_to_device_ratio",
    DeepSeekV4SingleKVPool: f"{COMMON} qk_nope_head_dim qk_rope_head_dim {PLACE} {RANGE} "
    "kv_layout global_page_size",
}
KEYWORDS[HiSparseC4DevicePool] = KEYWORDS[DeepSeekV4SingleKVPool]


@pytest.mark.parametrize("kind", KEYWORDS, ids=lambda kind: kind.__name__)
def test_constructors_take_sglangs_arguments_in_their_order(kind):
    names = KEYWORDS[kind].split()
    assert list(inspect.signature(kind).parameters)[: len(names)] == names


def test_layer_range_is_exclusive_and_defaults_to_all():
    assert (make().start_layer, make().end_layer, make().layer_ids) == (0, 2, (0, 1))
    stage = make(start_layer=5)
    assert (stage.end_layer, stage.layer_ids, stage.model_layer_ids) == (7, (5, 6), (5, 6))
    assert make(start_layer=5, end_layer=20).end_layer == 20
    gaps = make(layer_ids=[3, 8])
    assert (gaps.start_layer, gaps.end_layer) == (0, 9)
    assert gaps.get_key_buffer(8).data_ptr() == gaps.k_buffer[1].data_ptr()


def test_mem_usage_is_in_gib(pool):
    assert isinstance(pool, KVCache)
    assert pool.mem_usage == sum(pool.get_kv_size_bytes()) / 2**30 > 0
    assert pool.cpu_offloading_chunk_size == 8192
    assert pool.enable_kv_cache_copy
    assert pool.maybe_get_custom_mem_pool() is None


def test_every_pool_accepts_enable_kv_cache_copy():
    for build in (make, cases.minimax, cases.single, lambda **k: cases.k_only(torch.float16, **k)):
        assert build(enable_kv_cache_copy=False).enable_kv_cache_copy


def test_a_pool_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        pool = make()
    pool.set_kv_buffer(cases.layer(0), cases.loc(1), torch.ones(1, 2, 6), torch.ones(1, 2, 6))
    assert (pool.k_buffer[0][1] == 1).all()


def test_unsupported_access_says_what_to_call_instead(pool):
    if pool.has_value:
        pool.get_value_buffer(pool.layer_ids[0])
        return
    for accessor in (pool.get_value_buffer, pool.get_kv_buffer):
        with pytest.raises(UnsupportedAccess, match=f"{accessor.__name__}: use get_key_buffer"):
            accessor(pool.layer_ids[0])


# The memory saver


def test_memory_saver_absent_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_memory_saver", None)
    wanted = "pip install torch-memory-saver, or pass enable_memory_saver=False"
    for build in (cases.mha, cases.minimax, cases.single, cases.k_only):
        extra = {} if build in (cases.minimax, cases.single) else {"dtype": torch.float16}
        extra |= {"layer_num": 1} if build is cases.mha else {}
        with pytest.raises(ImportError, match=wanted):
            build(enable_memory_saver=True, **extra)


def test_memory_saver_region_holds_every_allocation(monkeypatch):
    regions, inside, made = [], [], []

    class Region:
        def __init__(self, tag):
            regions.append(tag)

        def __enter__(self):
            inside.append(True)

        def __exit__(self, *exc):
            inside.pop()

    saver = SimpleNamespace(torch_memory_saver=SimpleNamespace(region=Region))
    monkeypatch.setitem(sys.modules, "torch_memory_saver", saver)
    zeros = torch.zeros

    def recorded(*args, **kwargs):
        made.append(bool(inside))
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", recorded)
    cases.minimax(enable_memory_saver=True)
    assert set(regions) == {"kv_cache"}
    assert made
    assert all(made)
    made.clear()
    cases.minimax()
    assert not any(made)


# What the setters' helpers do on a device that they may not wait for


def test_locs_are_not_read_off_the_host_unless_asked(monkeypatch):
    meta = torch.empty(3, dtype=torch.int64, device="meta")  # its values cannot be read
    monkeypatch.delenv("SPECPOOL_CHECK", raising=False)
    assert store.within("loc", meta, 4).shape == (3,)
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    with pytest.raises(RuntimeError):
        store.within("loc", meta, 4)
