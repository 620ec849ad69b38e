"""Drafts on MiniMax's sparse layers, verified by the real backend: right, or refused."""

import importlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sglang.engines import Engine

ENABLE = "SPECPOOL_SGLANG_MINIMAX_VERIFY"
TREE = [-1, 0, 0, 1, 1, 2, 3, 5]  # depths 0 1 1 2 2 2 3 3
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]
FLAT = [-1, -1, 0, 1, -1, 4, 0, 3]  # NGRAM's padding may stand beside the root
# page, block, blocks selected; prefixes short, of one token, and up to a block's border
SHAPES = {
    "1/16": ({"page": 1}, [93, 1]),
    "16/16": ({"page": 16}, [93, 30]),
    "32/16": ({"page": 32}, [5, 94]),
    "128/128": ({"page": 128, "block": 128, "topk": 2}, [254, 383]),
}


def run(name, *arguments, **keywords):
    """Called in an engine's process, which alone imports what drives the backend."""
    return getattr(importlib.import_module("tests.sglang.verify_steps"), name)(
        *arguments, **keywords
    )


def settled(name, keywords):
    return run(name, **keywords)


@pytest.fixture(scope="module")
def verifying():
    """A process with the plugin and its verification turned on."""
    with Engine(**{ENABLE: "1"}) as engine:
        yield engine


@pytest.mark.parametrize("kind", ["eagle", "ngram"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_node_attends_to_its_own_path(verifying, name, kind):
    """Against plain PyTorch, in layers without index V and with it; drafts are stored."""
    shape, prefixes = SHAPES[name]
    found = verifying(run, "wrong_rows", shape, prefixes, [TREE, FLAT], kind)
    assert found["wrong"] == 0, found
    assert found["stored"]


@pytest.mark.parametrize(
    "shape",
    [{"page": 16, "triton_topk": True}, {"page": 32, "sm90": True}, {"page": 16, "init": 1}],
    ids=["blocks selected by Triton", "on Hopper", "a first block always"],
)
def test_other_kernels_and_configurations(verifying, shape):
    found = verifying(run, "wrong_rows", shape | {"drafts": 4}, [93], [[-1, 0, 0, 2]])
    assert found["wrong"] == 0, found


@pytest.mark.parametrize(
    ("prefixes", "parents"),
    [
        ([61, 14, 1], [CHAIN] * 3),
        ([1], [[-1]]),
        ([47, 16, 3, 1], [[-1]] * 4),
        ([31], [[-1, 0]]),
    ],
    ids=["chains", "a node", "nodes", "two nodes over a border"],
)
def test_chains_and_single_nodes(verifying, prefixes, parents):
    shape = {"page": 16, "drafts": len(parents[0])}
    found = verifying(run, "wrong_rows", shape, prefixes, parents)
    assert found["wrong"] == 0, found


@st.composite
def steps(draw):
    drafts = draw(st.integers(2, 5))
    tree = st.tuples(*[st.integers(-1, node - 1) for node in range(drafts)]).map(list)
    prefixes = draw(st.lists(st.integers(1, 80), min_size=1, max_size=2))
    parents = [draw(tree) for _ in prefixes]
    page = draw(st.sampled_from([1, 16, 32]))
    return {"page": page, "drafts": drafts}, prefixes, parents, draw(st.sampled_from(KINDS))


KINDS = ["eagle", "ngram"]


@given(steps())
@settings(max_examples=12)
def test_any_tree_behind_any_prefix(verifying, case):
    shape, prefixes, parents, kind = case
    found = verifying(run, "wrong_rows", shape, prefixes, parents, kind)
    assert found["wrong"] == 0, found


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_accepted_moved_and_decoded_is_bit_for_bit_what_was_verified(verifying, name):
    shape, prefixes = SHAPES[name]
    arguments = (shape | {"drafts": 4}, prefixes, [[-1, 0, 0, 2]] * 2)
    found = verifying(run, "closed_loop", *arguments, [1, 3])
    # two nodes of two requests; attention of two layers and index attention of one
    assert found == {"compared": 2 * 2 * 3, "equal": 2 * 2 * 3, "launches": 2}


def test_without_the_move_it_is_not(verifying):
    """Node 3 lies off the chain, and so not where decode reads its path."""
    shape, prefixes = SHAPES["16/16"]
    arguments = (shape | {"drafts": 4}, prefixes, [[-1, 0, 0, 2]] * 2, [3], False)
    found = verifying(run, "closed_loop", *arguments)
    assert found == {"compared": 6, "equal": 0, "launches": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_is_captured_with_dummies_and_replayed_for_fewer_requests(verifying, kind):
    shape = {"page": 16, "drafts": 4}
    found = verifying(run, "graph", shape, 4, [61, 1], [[-1, 0, 0, 2], [-1, 0, 1, -1]], kind)
    assert found["baked"] >= found["context"]
    assert found["changed"] == 0
    assert found["wrong"] == 0
    assert found["finite"]
    assert found["padding"] == [1] * 8
    assert found["padding_slots"] == [0] * 8


def test_a_hundred_steps_of_changing_batches_allocate_nothing(verifying):
    found = verifying(run, "steady", 100)
    assert found == {"shapes": 5, "addresses": 5, "made": 0}


def test_plain_decode_s_backend_is_not_changed(verifying):
    assert verifying(run, "plain_decode_untouched") == [True, True]


@pytest.mark.parametrize("fault", [None, "sibling", "tree order", "page", "prefix for total"])
def test_planted_faults_are_caught(verifying, fault):
    found = verifying(run, "wrong_rows", {"page": 32}, [93], [TREE], "eagle", fault, [1])
    assert (found["wrong"] > 0) == (fault is not None), found


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("none", "the mask is None"),
        ("tree only", "FULL_MASK layout, bool, flat, here of 148 entries at least"),
        ("bits", "torch.uint8 [8]"),
        ("dflash", "not DFLASH_VERIFY"),
        ("not prepared", "rows were built for none"),
        ("as it is", None),
    ],
)
def test_a_step_in_another_form_is_refused(verifying, form, words):
    error = verifying(run, "other_form", form)
    assert error is None if words is None else words in error


def test_without_the_plugin_a_verify_step_crashes():
    """What SGLang 0.5.23 does: the first of its three failures."""
    with Engine(plugins=False) as engine:
        error = engine(run, "crash")
    assert error == "AttributeError: 'NoneType' object has no attribute 'device'"


def test_with_verification_off_the_backend_is_refused():
    with Engine() as engine:
        error = engine(run, "built")
    assert error.startswith("UnsupportedAccess: specpool refuses --speculative-algorithm EAGLE")
    assert f"it is not turned on ({ENABLE}=1 does)" in error


def test_unsafe_leaves_the_crash_as_it_is():
    """An override serves nothing: what is not verified rightly is not verified here."""
    with Engine(SPECPOOL_SGLANG_UNSAFE="1") as engine:
        assert engine(run, "crash").startswith("AttributeError: 'NoneType' object")


def test_the_installed_sglang_is_the_one_that_was_tested(verifying):
    assert verifying(run, "unknown_parts") == []
    assert verifying(run, "built") is None
    said = [line for line in verifying.log() if "verifies drafts" in line]
    assert said[-1].endswith("rows of 56 nodes and 640 slots, 0 MiB on cpu")


def test_another_source_is_refused(verifying):
    part = "srt/layers/attention/minimax_sparse_backend.py:MiniMaxSparseAttnBackend"
    assert f"source is not the one it was tested with: {part}" in verifying(run, "drifted", part)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"attention_backend": "fa4"}, "fa4 attention is not known to mask trees"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_backend_that_would_not_be_verified_rightly_is_refused(verifying, given, words):
    assert words in verifying(settled, "built", given)


def test_rows_beyond_their_budget_are_refused_with_the_numbers():
    with Engine(**{ENABLE: "1", "SPECPOOL_SGLANG_VERIFY_MIB": "0"}) as engine:
        error = engine(run, "built")
    assert "rows of 56 nodes and 640 slots take 0 MiB, and SPECPOOL_SGLANG_VERIFY_MIB" in error
