"""SGLang's own functions that move: what a verifier accepted, a prefix's tail to its branches."""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from sglang.srt.speculative import spec_utils

from tests.sglang.driving import accept, duplicate, environment
from tests.sglang.pools import cases

CASES = cases()
BACKENDS = ("cpu", "triton")
SERVED = [name for name, case in CASES.items() if case.served in ("default", "all")]
few = hypothesis.settings(max_examples=8, derandomize=True)

# two requests of 6 nodes: root, 2, 5 of the first; root and 4 of the second
WINDOW = [3, 4, 6, 7, 8, 9, 11, 12, 13, 14, 16, 17]
ACCEPT = (WINDOW, [[0, 2, 5, -1], [6, 10, -1, -1]], [3, 2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SERVED)
def test_what_was_accepted_moves_in_one_launch(everything, name, backend):
    result = everything(accept, name, *ACCEPT, backend)
    assert result.right, result
    assert result.launches == 1


@pytest.mark.parametrize("name", CASES)
def test_with_nothing_configured(default, without, name):
    result = default(accept, name, *ACCEPT)
    if CASES[name].served in ("default", "parts"):
        assert result.right, result
        assert result.launches == (1 if CASES[name].served == "default" else None)
    elif name == "minimax-hisparse":
        assert result.refused, result
        assert "--enable-hisparse" in result.error
    else:
        assert result == without(accept, name, *ACCEPT)


@st.composite
def an_accept(draw, name):
    """Windows of one length, a path through each tree, some of it accepted."""
    among = [loc for loc in range(1, 24) if loc % 5] if name == "swa" else range(1, 25)
    bs, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    window = draw(st.permutations(among))[: bs * size]
    if draw(st.booleans()):
        window = sorted(window)
    steps = draw(st.integers(1, size))
    index, length = [], []
    for r in range(bs):
        nodes = draw(st.lists(st.integers(1, max(1, size - 1)), max_size=steps - 1, unique=True))
        path = [r * size + node for node in [0, *sorted(nodes)] if node < size]
        length.append(len(path))
        index.append(path + [-1] * (steps - len(path)))
    return window, index, length


@few
@hypothesis.given(data=st.data(), backend=st.sampled_from(BACKENDS))
@pytest.mark.parametrize("name", ["mha", "mha-hnd", "mla", "dsa", "swa", "minimax", "k-only"])
def test_any_accept(everything, without, name, data, backend):
    given = data.draw(an_accept(name))
    ours = everything(accept, name, *given, backend)
    assert (ours.error, ours.wrong, ours.launches) == (None, 0, 1)
    if CASES[name].own_is_right:
        theirs = without(accept, name, *given)
        assert theirs.error is None
        assert ours.digest == theirs.digest


@pytest.mark.parametrize("backend", BACKENDS)
def test_ngram_s_answer_is_as_wide_as_its_window(everything, backend):
    """Breadth 1 moves too; entries behind what was accepted are -1."""
    index = [[0, 1, 2, -1, -1, -1], [6, 7, 10, 11, -1, -1]]
    for name in ("mha", "minimax"):
        result = everything(accept, name, WINDOW, index, [3, 4], backend)
        assert result.right, result
        assert result.launches == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_request_moves_nothing(everything, backend):
    """accept_len 0, all -1: neither its window nor slot 0 is touched."""
    index = [[-1, -1, -1], [6, 10, -1]]
    result = everything(accept, "minimax", WINDOW, index, [0, 2], backend)
    assert result.right, result


def test_bad_entries_are_refused_before_anything_moves(everything):
    """SGLang's own reads the window of another request, or behind the tensor."""
    for index in ([[0, 7, -1], [6, 10, -1]], [[0, 99, -1], [6, 10, -1]]):
        call = partial(accept, bad=True)
        result = everything(call, "minimax", WINDOW, index, [2, 2])
        assert result.refused, result
        assert result.error.startswith("IndexError")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mha-large", "minimax-large"])
@pytest.mark.parametrize(
    ("prefixes", "topk", "steps", "page"),
    [([7], 8, 3, 4), ([5, 2], 2, 5, 4), ([6, 4, 9], 3, 1, 8), ([8, 8], 4, 2, 4), ([3], 1, 3, 4)],
    ids=str,
)
def test_a_prefix_s_tail_reaches_every_branch(
    everything, without, name, prefixes, topk, steps, page, backend
):
    given = (name, prefixes, topk, steps, page)
    ours = everything(duplicate, *given, backend)
    assert (ours.error, ours.wrong) == (None, 0)
    moves = topk > 1 and any(prefix % page for prefix in prefixes)
    assert bool(ours.changed) == moves
    assert ours.launches == (1 if moves else None)
    if CASES[name].own_is_right:
        assert ours.digest == without(duplicate, *given).digest


def test_the_case_of_the_field_copies_21_rows():
    """Prefix 7, page 4, topk 8: three rows of the last page, to seven other branches."""
    assert (7 % 4) * (8 - 1) == 21


def test_whoever_imported_the_function_by_name_has_ours(everything):
    """A module imported before the plugin was loaded, and what is imported after it."""
    assert everything(_bindings) == [True, True]


def _bindings():
    from sglang.srt.speculative import eagle_worker_common
    from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache as late

    early = eagle_worker_common.move_accept_tokens_to_target_kvcache
    return [hasattr(function, "_specpool_original") for function in (early, late)]


@pytest.mark.parametrize("module", ["speculative/ngram_worker", "managers/scheduler_pp_mixin"])
def test_the_other_callers_take_it_from_there(module):
    """They import only beside a GPU's packages; their source says where the name is from."""
    source = Path(spec_utils.__file__).parents[1] / f"{module}.py"
    imported = [
        node.module
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.ImportFrom)
        if "move_accept_tokens_to_target_kvcache" in [alias.name for alias in node.names]
    ]
    assert imported == ["sglang.srt.speculative.spec_utils"]


def test_the_engine_s_pool_of_deepseek_v4_is_refused_by_name(default):
    error = default(_move_deepseek_v4)
    assert error.startswith("UnsupportedAccess")
    for said in ("DeepSeekV4TokenToKVPool", "per position", "--speculative-eagle-topk 1"):
        assert said in error


def _move_deepseek_v4():
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    pool = object.__new__(DeepSeekV4TokenToKVPool)
    try:
        pool.move_kv_cache(torch.tensor([1]), torch.tensor([2]))
    except NotImplementedError as error:
        return f"{type(error).__name__}: {error}"


def test_checked_calls_are_checked_here_too(everything):
    """SPECPOOL_CHECK=1 reaches the movers of SGLang's pools."""
    assert everything(_checked, "minimax").right


def _checked(name):
    with environment(SPECPOOL_CHECK="1"):
        return accept(name, *ACCEPT)
