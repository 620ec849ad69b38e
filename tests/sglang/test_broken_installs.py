"""The plugin in an SGLang other than it was written for: loud, whole in the rest, and safe."""

import json

import pytest

from tests.sglang.driving import accept, move
from tests.sglang.engines import Engine
from tests.sglang.test_accept import ACCEPT
from tests.sglang.test_refusals import CONFIG, NGRAM, resolve

MOVE = ([1, 2, 3], [2, 3, 9])


def a_move_that_is_no_function():
    from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool

    MiniMaxSparseKVPool.move_kv_cache = property(lambda self: None)


def a_backend_of_another_name():
    from sglang.srt.layers.attention import minimax_sparse_backend

    del minimax_sparse_backend.MiniMaxSparseAttnBackend


def a_registry_that_wants_more():
    from sglang.srt.arg_groups import resolution_hooks

    resolution_hooks.register_resolution_hook = lambda name, *, order: None


def a_name_that_the_hook_reads():
    """SGLang itself is not started by this test, and has imported the name where it needs it."""
    import sglang.srt.layers.attention.minimax_sparse_backend  # noqa: F401
    from sglang.srt.configs import model_config

    del model_config.uses_minimax_m3_nvfp4_native_stack


def errors(engine):
    return [line for line in engine.log() if line.startswith("ERROR")]


def test_one_target_that_cannot_be_examined_takes_no_other_with_it():
    with Engine(before=a_move_that_is_no_function) as engine:
        (error,) = errors(engine)
        assert "MiniMaxSparseKVPool.move_kv_cache: it is no function" in error
        assert engine(move, "k-only", *MOVE).right


def test_minimax_is_not_moved_where_it_cannot_be_refused():
    """A move alone would let a server answer whose verification nobody has checked."""
    with Engine(before=a_backend_of_another_name) as engine:
        backend, pool = errors(engine)
        assert "MiniMaxSparseAttnBackend.__init__: it was not found" in backend
        assert "MiniMaxSparseKVPool.move_kv_cache: the refusal" in pool
        for result in (engine(move, "minimax", *MOVE), engine(accept, "minimax", *ACCEPT)):
            assert result.refused, result
            assert result.error.startswith("NotImplementedError")
        assert engine(move, "k-only", *MOVE).right


def test_a_pool_whose_move_drifted_is_not_served_by_the_accept_path_either():
    with Engine(before=a_move_that_takes_more, SPECPOOL_SGLANG="all") as engine:
        assert len(errors(engine)) == 1
        result = engine(accept, "mla", *ACCEPT)
        assert result.launches is None
        assert result.right, result
        assert engine(accept, "mha", *ACCEPT).launches == 1


def a_move_that_takes_more():
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    original = MLATokenToKVPool.move_kv_cache

    def move_kv_cache(self, tgt_loc, src_loc, stream=None):
        original(self, tgt_loc, src_loc)

    MLATokenToKVPool.move_kv_cache = move_kv_cache


@pytest.mark.parametrize("drift", [a_registry_that_wants_more, a_name_that_the_hook_reads])
def test_arguments_that_cannot_be_checked_are_an_error_and_stop_no_server(tmp_path, drift):
    llama = {"architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | llama))
    with Engine(before=drift) as engine:
        (error,) = errors(engine)
        assert "resolution hook handle_speculative_decoding" in error
        assert engine(resolve, str(tmp_path), NGRAM) is None
        assert engine(move, "minimax", *MOVE).right


def test_registered_twice_it_checks_arguments_once():
    with Engine() as engine:
        assert engine(_hooks_after_another_register) == 1


def _hooks_after_another_register():
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS

    from specpool.adapters.sglang import register

    register()
    return len(_HOOKS["handle_speculative_decoding"])


SEEN = []


def a_plugin_around_the_move():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original, *args, **kwargs):
        SEEN.append(len(args))
        return original(*args, **kwargs)

    target = "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.move_kv_cache"
    HookRegistry.register(target, around, HookType.AROUND)


def a_plugin_instead_of_the_move():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.memory_pool.MiniMaxSparseKVPool.move_kv_cache"
    HookRegistry.register(target, lambda *args: SEEN.append(len(args)), HookType.REPLACE)


def _seen():
    return SEEN


def test_another_plugin_s_hook_around_the_move_is_called_by_both_paths():
    with Engine(before=a_plugin_around_the_move) as engine:
        assert engine(move, "minimax", *MOVE).right
        assert engine(accept, "minimax", *ACCEPT).right
        assert engine(_seen) == [3, 3]


def test_another_plugin_s_move_in_place_of_ours_is_called_by_both_paths():
    with Engine(before=a_plugin_instead_of_the_move) as engine:
        for result in (engine(move, "minimax", *MOVE), engine(accept, "minimax", *ACCEPT)):
            assert result.launches is None
            assert result.changed == 0
        assert engine(_seen) == [3, 3]
