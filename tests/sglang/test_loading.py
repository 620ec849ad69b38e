"""How the plugin comes into SGLang's processes, what it says, and what it does not touch."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.sglang.driving import move
from tests.sglang.engines import Engine

ROOT = Path(__file__).parents[2]
MOVE = ([1, 2, 3], [2, 3, 9])


def test_a_fresh_process_and_those_it_spawns():
    """Nothing but the installed package brings the plugin, and each process says what it did.

    It says so on standard error, as SGLang loads plugins before it has set up its logs.
    """
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.sglang.launched"],
        env={k: v for k, v in os.environ.items() if not k.startswith("SPECPOOL_")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    states = json.loads(ran.stdout.splitlines()[-1])
    launches = {
        process: {pool: moved["launches"] for pool, moved in state.items()}
        for process, state in states.items()
    }
    assert launches == {
        "fresh": {"minimax": 1, "mha": None},
        "default": {"minimax": 1, "mha": None},
        "all": {"minimax": 1, "mha": 1},
        "off": {"minimax": None, "mha": None},
    }
    assert states["off"]["minimax"].pop("error").startswith("NotImplementedError")
    assert not states["off"]["minimax"].pop("right")
    assert all(moved.get("right", True) for state in states.values() for moved in state.values())
    said = [line for line in ran.stderr.splitlines() if "in SGLang 0.5.23, mode" in line]
    modes = [line.split("mode ")[1].split(",")[0] for line in said]
    assert modes == ["default", "default", "all", "off"], ran.stderr


def test_it_says_what_it_replaced(default, everything):
    for engine, mode in ((default, "default"), (everything, "all")):
        first, *others = engine.log()
        assert first.startswith("INFO specpool ")
        for part in (f"mode {mode}", "MiniMaxSparseKVPool.move_kv_cache", "backend cpu"):
            assert part in first
        assert ("MLATokenToKVPool.move_kv_cache" in first) == (mode == "all")
        assert not [line for line in others if line.startswith("ERROR")]


@pytest.mark.parametrize(("named", "loads"), [("other", False), ("other,specpool", True)])
def test_sglang_s_list_of_plugins(named, loads):
    with Engine(SGLANG_PLUGINS=named) as engine:
        assert engine(move, "minimax", *MOVE).right == loads
        assert bool(engine.log()) == loads


def test_a_setting_that_is_none_is_an_error_and_the_default():
    with Engine(SPECPOOL_SGLANG="al") as engine:
        assert engine(move, "minimax", *MOVE).right
        assert engine(move, "mha", *MOVE).launches is None
        (error,) = [line for line in engine.log() if line.startswith("ERROR")]
        for part in ("SPECPOOL_SGLANG='al'", "default", "all", "off"):
            assert part in error


def test_loading_twice_changes_nothing_more():
    with Engine(SPECPOOL_SGLANG="all") as engine:
        before = engine(_functions)
        engine(_register)
        assert engine(_functions) == before
        assert engine(move, "mha", *MOVE).launches == 1


def _register():
    from specpool.adapters.sglang import register

    register()


def _functions():
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.speculative import spec_utils

    return [
        id(memory_pool.MHATokenToKVPool.move_kv_cache),
        id(memory_pool.MiniMaxSparseKVPool.move_kv_cache),
        id(spec_utils.move_accept_tokens_to_target_kvcache),
    ]


def other_parameters():
    """Another version's MiniMax pool: its move takes one argument more."""
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    def move_kv_cache(self, tgt_loc, src_loc, stream):
        raise NotImplementedError("a later version's own")

    MiniMaxSparseKVPool.move_kv_cache = move_kv_cache


def a_move_of_its_own():
    """Another version's K-only pool: it has a move by now."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKOnlyPool

    MHATokenToKOnlyPool.move_kv_cache = lambda self, tgt_loc, src_loc: None


def a_class_less():
    """Another version: the class is called something else."""
    from sglang.srt.mem_cache import deepseek_v4_memory_pool

    del deepseek_v4_memory_pool.DeepSeekV4SingleKVPool


@pytest.mark.parametrize(
    ("drift", "target", "reason"),
    [
        (other_parameters, "MiniMaxSparseKVPool.move_kv_cache", "'stream'"),
        (a_move_of_its_own, "MHATokenToKOnlyPool.move_kv_cache", "of its own"),
        (a_class_less, "DeepSeekV4SingleKVPool.move_kv_cache", "not found"),
    ],
)
def test_what_drifted_is_an_error_and_stays_as_it_is(drift, target, reason):
    with Engine(before=drift) as engine:
        (error,) = [line for line in engine.log() if line.startswith("ERROR")]
        assert target in error
        assert reason in error
        (said,) = [line for line in engine.log() if line.startswith("INFO specpool ")]
        assert target not in said
        assert "move_accept_tokens_to_target_kvcache" in said
        if drift is other_parameters:
            assert "a later version" in engine(_call_with_three)
            assert engine(move, "k-only", *MOVE).right


def _call_with_three():
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    try:
        MiniMaxSparseKVPool.move_kv_cache(None, None, None, None)
    except NotImplementedError as error:
        return str(error)


def test_another_version_is_said_not_to_be_tested():
    with Engine(before=another_version) as engine:
        assert any(line.startswith("WARNING") and "0.6.0" in line for line in engine.log())


def another_version():
    from specpool.adapters.sglang import plugin

    plugin.sglang_version = lambda: "0.6.0"


def test_doctor_says_the_same(everything):
    text = everything(_doctor)
    for part in ("0.5.23 (tested)", "mode all", " 0 not", "Ray", "DeepSeek-V4"):
        assert part in text


def test_doctor_says_why_the_plugin_would_not_load():
    with Engine(SGLANG_PLUGINS="other") as engine:
        assert "SGLANG_PLUGINS=other" in engine(_doctor)


def _doctor():
    from specpool.cli import main

    said = io.StringIO()
    with redirect_stdout(said):
        main(["doctor"])
    return said.getvalue()


def test_doctor_names_what_drifted_and_replaces_nothing():
    with Engine(plugins=False, before=other_parameters) as engine:
        targets = engine(_examine)
        (broken,) = [target for target in targets if target["reason"]]
        assert "MiniMaxSparseKVPool.move_kv_cache" in broken["target"]
        assert engine(move, "k-only", *MOVE).error.startswith("AttributeError")


def _examine():
    from specpool.adapters.sglang import diagnosis

    return diagnosis.examine()["targets"]
