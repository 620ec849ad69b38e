"""Patches on modules that stand for an engine's: found, compared, set, read back, rebound."""

import functools
import sys
import types

import pytest

from specpool.adapters.sglang.patch import Patch, apply, examine, is_replacement

PARAMETERS = ("self", "tgt_loc", "src_loc")


class Base:
    def inherited(self):
        return "base"


class Pool(Base):
    def move(self, tgt_loc, src_loc):
        return "engine's"

    value = property(lambda self: None)


def function(batch):
    return "engine's"


@pytest.fixture(autouse=True)
def engine(monkeypatch):
    """Two modules of an engine, the second of which imported the first's function by name."""
    pools, worker = types.ModuleType("sglang.pools"), types.ModuleType("sglang.worker")
    pools.Pool = type("Pool", (Pool,), {"move": Pool.move, "value": Pool.value})
    pools.function = worker.function = function
    for module in (pools, worker):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return pools


def wrap(original):
    return lambda *args: ("ours", original and original(*args))


def test_a_method_is_replaced_and_its_original_kept(engine):
    assert apply(Patch("sglang.pools:Pool.move", PARAMETERS, wrap)).reason is None
    assert engine.Pool().move(1, 2) == ("ours", "engine's")
    assert Pool().move(1, 2) == "engine's"


def test_a_second_time_changes_nothing(engine):
    patch = Patch("sglang.pools:Pool.move", PARAMETERS, wrap)
    apply(patch)
    assert apply(patch).reason is None
    assert engine.Pool().move(1, 2) == ("ours", "engine's")


def test_an_absent_method_is_added(engine):
    assert apply(Patch("sglang.pools:Pool.added", None, wrap)).reason is None
    assert engine.Pool().added() == ("ours", None)


def test_an_inherited_method_is_replaced_on_the_class_alone(engine):
    assert apply(Patch("sglang.pools:Pool.inherited", ("self",), wrap)).reason is None
    assert engine.Pool().inherited() == ("ours", "base")
    assert Base().inherited() == "base"


def test_a_function_is_replaced_where_it_was_imported_by_name(engine):
    assert apply(Patch("sglang.pools:function", ("batch",), wrap)).reason is None
    assert engine.function(1) == ("ours", "engine's")
    assert sys.modules["sglang.worker"].function is engine.function
    assert function(1) == "engine's"


@pytest.mark.parametrize(
    ("target", "parameters", "reason"),
    [
        ("sglang.pools:Pool.move", ("self", "src_loc", "tgt_loc"), "its parameters are"),
        ("sglang.pools:Pool.move", None, "of its own by now"),
        ("sglang.pools:Pool.gone", PARAMETERS, "has no gone"),
        ("sglang.pools:Pool.value", ("self",), "is no function"),
        ("sglang.pools:Other.move", PARAMETERS, "was not found"),
        ("sglang.gone:Pool.move", PARAMETERS, "was not found"),
    ],
)
def test_drift_is_told_and_nothing_is_replaced(engine, target, parameters, reason):
    before = dict(vars(engine.Pool))
    patch = Patch(target, parameters, wrap)
    assert reason in apply(patch).reason
    assert examine(patch) == apply(patch)
    assert dict(vars(engine.Pool)) == before


def test_what_cannot_be_read_back_is_told(engine):
    class Stubborn(type):
        def __setattr__(cls, name, value):
            pass

    engine.Pool = Stubborn("Pool", (), {"move": Pool.move})
    assert "read back" in apply(Patch("sglang.pools:Pool.move", PARAMETERS, wrap)).reason


def test_what_cannot_be_wrapped_is_told(engine):
    def fails(original):
        raise KeyError("what it needs is gone")

    reason = apply(Patch("sglang.pools:Pool.move", PARAMETERS, fails)).reason
    assert "could not be set" in reason
    assert "what it needs is gone" in reason
    assert engine.Pool().move(1, 2) == "engine's"


def test_another_plugin_s_function_around_ours_is_not_ours(engine):
    apply(Patch("sglang.pools:Pool.move", PARAMETERS, wrap))
    ours = engine.Pool.move
    assert is_replacement(ours)
    assert not is_replacement(functools.wraps(ours)(lambda *args: ours(*args)))
    assert not is_replacement(Pool.move)
    assert not is_replacement(None)
