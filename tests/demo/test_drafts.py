"""The demo's own drafters: what the oracle proposes, and the model without some of its layers."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.demo.drafts import MODEL_FED, Oracle, model_drafter, random_order, without_a_sixth
from specpool.demo.target import LlamaTarget
from specpool.spec import DraftTree
from tests.demo.tiny import CPU, new_attention, tiny_model

CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8)


class Batch:
    """What the oracle reads of a `DraftBatch`."""

    def __init__(self, *contexts, room=9):
        self.contexts, self.room = contexts, [room] * len(contexts)
        self.roots = [context[-1] for context in contexts]
        self.window = torch.zeros(len(contexts), 1, dtype=torch.int64)


def paths(tree, row=0):
    """The token paths from the root to every node."""
    found = []
    for node in range(int(tree.sizes[row])):
        path = []
        while node >= 0:
            path.insert(0, int(tree.tokens[row, node]))
            node = int(tree.parents[row, node])
        found.append(tuple(path))
    return found


@given(chains=st.lists(CHAINS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_a_random_order_keeps_the_trees(chains, seed):
    tree = DraftTree.from_chains([9, -1, 8][: len(chains)], chains, 20)
    mixed = random_order(tree, random.Random(seed), CPU)  # which refuses a child before its parent
    for row in range(len(chains)):
        assert sorted(paths(mixed, row)) == sorted(paths(tree, row))


def test_orders_differ():
    tree = DraftTree.from_chains([9], [[[1, 2], [3, 4], [5]]], 20)
    orders = {tuple(paths(random_order(tree, random.Random(seed), CPU))) for seed in range(20)}
    assert len(orders) > 5


def test_the_oracle_hides_the_continuation_among_decoys():
    prompt, continuation = [1, 2, 3], list(range(100, 130))
    oracle = Oracle([([1, 2], [7]), (prompt, continuation)], window=64, vocab=50)
    accepted = []
    for done in range(20):
        tree = oracle.draft(Batch([*prompt, *continuation[:done]]))
        left = continuation[done:]
        true = [path for path in paths(tree) if list(path[1:]) == left[: len(path) - 1]]
        accepted.append(max(map(len, true)) - 1)
        assert int(tree.sizes) > max(map(len, true))  # there is a decoy
    assert 0 < sum(accepted) / len(accepted) <= 6


@pytest.mark.parametrize(("window", "room", "deepest"), [(1, 9, 0), (3, 9, 2), (24, 2, 2)])
def test_the_oracle_keeps_to_its_window_and_the_room(window, room, deepest):
    oracle = Oracle([([1], [5] * 30)], window, vocab=50)
    for _ in range(10):
        tree = oracle.draft(Batch([1], [1, 5], room=room))
        assert int(tree.sizes.max()) <= window
        assert int(tree.depths.max()) <= deepest


def test_a_sixth_of_the_layers_is_left_out_from_the_middle_on():
    weights = tiny_model().weights
    kept = without_a_sixth(weights)
    assert kept.config.layers == len(kept.layers) == 7
    assert [id(layer) for layer in kept.layers] == [
        id(layer) for i, layer in enumerate(weights.layers) if i != 4
    ]


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("nodes", [1, 3, 24, 99])
def test_a_draft_models_trees_have_no_more_nodes_than_asked_for(nodes, chain):
    model = LlamaTarget(tiny_model(), new_attention("mha", 10))
    drafter = model_drafter(model, nodes, chain=chain, sampled=True)
    assert drafter.num_draft_tokens == min(nodes, 5 if chain else 31)
    assert drafter.window <= max(nodes, MODEL_FED)
    assert drafter.sampled == chain
