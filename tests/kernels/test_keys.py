"""What Triton compiles for: whatever a call brings, ``reserve`` has compiled its kernel before.

The kernels are replaced by recorders, so this runs the launcher itself, on CPU tensors. A recorded
key holds what Triton's JIT tells kernels apart by; on a GPU its own cache is counted in tests/gpu.
"""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from specpool.rows import rows_from
from specpool_kernels import launch, move, plan

MAX_PAIRS = 6000
STEPS = 200
TYPES = {torch.int32: "i32", torch.int64: "i64"}
TABLES = {
    "flat, wide": lambda: rows_from(torch.zeros(64, 32)),
    "pages, all classes": lambda: rows_from(
        torch.zeros(4, 720, dtype=torch.int8), "page_split", page_size=16, widths=(32, 4, 3)
    ),
    "mapped": lambda: rows_from(torch.zeros(64, 32), mapping=torch.arange(100)),
}


@pytest.fixture
def asked(monkeypatch):
    """The keys that the launcher has asked for so far."""
    keys = set()

    def recorder(name):
        kernel = getattr(move, name)

        def record(*args, num_warps, **constants):
            given = dict(zip(kernel.arg_names, args, strict=False)) | constants
            assert set(given) == set(kernel.arg_names)
            keys.add((name, num_warps, *(_told_apart(p, given[p.name]) for p in kernel.params)))

        return _Launchable(record)

    names = ("move_rows", "move_accepted", "move_staged")
    monkeypatch.setattr(launch, "move", SimpleNamespace(**{n: recorder(n) for n in names}))
    monkeypatch.setattr(launch, "_target", lambda device: (32, False, 132))
    monkeypatch.setattr(launch, "move_is_interpreted", lambda: False)
    return keys


class _Launchable:
    """``kernel[grid](...)`` of a function."""

    def __init__(self, run):
        self._run = run

    def __getitem__(self, grid):
        assert 1 <= len(grid) <= 2
        assert all(0 < size < 2**31 for size in grid)
        return self._run


def _told_apart(param, value):
    """What of an argument the JIT compiles anew for."""
    if param.is_constexpr:
        return value
    if isinstance(value, torch.Tensor):
        looks = not param.do_not_specialize_on_alignment
        return value.dtype, looks and value.data_ptr() % 16 == 0
    assert param.do_not_specialize, param.name
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _mover(rows, copy=False):
    sources = [type(r)(r.tensor.clone(), **_geometry(r)) for r in rows] if copy else None
    return launch.TritonMove(rows, torch.zeros(2, dtype=torch.int64), sources)


def _geometry(rows):
    names = ("offset", "width", "slots", "token_stride", "page_size", "page_stride", "mapping")
    return {name: getattr(rows, name) for name in names}


def _loc(rng, *shape):
    """Locs of either type, with strides of their own."""
    dtype = rng.choice(list(TYPES))
    spread = rng.choice((1, 2, 3))
    return torch.zeros(*shape[:-1], shape[-1] * spread, dtype=dtype)[..., ::spread]


def _steps(mover, copy, seed=0):
    """200 steps of a serving loop: batches, windows, entries and pairs change from call to call."""
    rng = random.Random(seed)
    for step in range(STEPS):
        if copy or step % 2:
            pairs = round(2 ** rng.uniform(0, 12.55))
            mover.move(_loc(rng, pairs), _loc(rng, pairs))
        else:
            entries = round(2 ** rng.uniform(0, 12))
            bs = rng.randint(1, max(1, min(300, MAX_PAIRS // entries)))
            window = entries + rng.randint(0, 60)
            length = torch.zeros(bs, dtype=rng.choice(list(TYPES)))
            mover.move_accepted(_loc(rng, bs, window), _loc(rng, bs, entries), length)


@pytest.mark.parametrize("copy", [False, True], ids=["move", "copy"])
@pytest.mark.parametrize("table", TABLES)
def test_200_steps_ask_for_nothing_that_reserve_did_not(asked, table, copy):
    mover = _mover(TABLES[table](), copy)
    mover.reserve(MAX_PAIRS)
    reserved = set(asked)
    _steps(mover, copy)
    assert asked == reserved


@pytest.mark.parametrize("copy", [False, True], ids=["move", "copy"])
@pytest.mark.parametrize("table", TABLES)
def test_reserve_asks_for_the_keys_of_the_plan(asked, table, copy):
    """The enumeration that the gate compiles is what the launcher launches."""
    mover = _mover(TABLES[table](), copy)
    mover.reserve(MAX_PAIRS)
    kind = mover._table
    planned = plan.keys(MAX_PAIRS, kind.classes, kind.paged, kind.mapped, copy)
    assert len(asked) == len(planned) == (4 if copy else 64)
    assert set(planned) <= set(plan.all_keys())
    assert {_planned(key) for key in planned} == asked


def _planned(key):
    """A key of the plan as it is recorded."""
    kernel = getattr(move, key.variant.kernel)
    constants = {**key.constants(), "WAIT": False}
    locs = dict(zip(key.loc_names(), key.locs, strict=True))
    dtypes = {name: dtype for dtype, name in TYPES.items()}

    def told(param):
        if param.is_constexpr:
            return constants[param.name]
        if param.name in locs:
            return dtypes[locs[param.name]], False
        if param.name == "scratch":
            return torch.int8, True
        return (torch.int64, True) if param.name in ("table", "counters") else "i32"

    warps = key.variant.num_warps(32)
    return (key.variant.kernel, warps, *(told(param) for param in kernel.params))


def _without_first(variants):
    return lambda *args: variants(*args)[1:]


def _without_mixed(loc_types):
    return lambda kernel: [t for t in loc_types(kernel) if len(set(t)) == 1]


@pytest.mark.parametrize(
    ("name", "fault"), [("variants", _without_first), ("loc_types", _without_mixed)]
)
def test_a_form_that_reserve_forgets_is_found(asked, monkeypatch, name, fault):
    monkeypatch.setattr(plan, name, fault(getattr(plan, name)))
    mover = _mover(TABLES["mapped"]())
    mover.reserve(MAX_PAIRS)
    reserved = set(asked)
    _steps(mover, copy=False)
    assert asked > reserved


def test_the_number_of_keys_is_bounded():
    """28 kinds of tables (7 sets of classes, paged, mapped), 64 keys of moves and 20 of copies."""
    every = plan.all_keys()
    assert len(every) == len(set(every)) == 28 * (64 + 20) == 2352
