"""Draft trees: their shape whatever the chains, and what each rule proposes."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.demo.drafts import (
    Oracle,
    PromptLookup,
    Tree,
    level_order,
    merge_chains,
    random_order,
)

CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=8)


def paths(tree):
    """The token paths from the root to every node."""
    found = []
    for node in range(len(tree)):
        path = []
        while node >= 0:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        found.append(tuple(reversed(path)))
    return found


def prefixes(root, chains):
    return {(root, *chain[:n]) for chain in chains for n in range(len(chain) + 1)} | {(root,)}


@given(chains=CHAINS, nodes=st.integers(1, 20))
def test_a_tree_shares_beginnings_and_keeps_its_size(chains, nodes):
    tree = merge_chains(9, chains, nodes)
    found = paths(tree)
    assert len(set(found)) == len(found)  # no two siblings are equal
    assert set(found) <= prefixes(9, chains)
    assert len(tree) == min(nodes, len(prefixes(9, chains)))
    assert all(parent < node for node, parent in enumerate(tree.parents))


@given(chains=CHAINS, seed=st.integers(0, 99))
def test_orders_keep_the_tree(chains, seed):
    tree = merge_chains(9, chains, 20)
    levels = level_order(tree)
    mixed = random_order(tree, random.Random(seed))
    for ordered in (levels, mixed):
        assert sorted(paths(ordered)) == sorted(paths(tree))
        assert ordered.parents[0] == -1
        assert all(parent < node for node, parent in enumerate(ordered.parents))
    assert levels.depths() == sorted(levels.depths())


def test_a_node_sees_itself_and_its_ancestors():
    tree = Tree([5, 6, 7, 8], [-1, 0, 0, 1])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert torch.equal(tree.mask(), torch.tensor(expected, dtype=torch.bool))
    assert tree.depths() == [0, 1, 1, 2]


def test_lookup_prefers_longer_matches_and_then_later_ones():
    #           the 2-gram (1, 2) twice, then 2 alone
    sequence = [1, 2, 7, 1, 2, 8, 3, 2, 9, 1, 2]
    tree = PromptLookup(24, candidates=2, depth=1)(sequence)
    assert tree.tokens == [2, 8, 7]
    assert tree.parents == [-1, 0, 0]


def test_lookup_lays_nodes_in_level_order():
    sequence = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    tree = PromptLookup(24, depth=2)(sequence)
    assert tree.depths() == sorted(tree.depths())
    assert {(2, 8, 8), (2, 7, 7)} <= set(paths(tree))


def test_lookup_without_a_match_is_the_root_alone():
    assert PromptLookup(24)([1, 2, 3]) == Tree([3], [-1])


def test_a_chain_is_one_candidate():
    tree = PromptLookup(24, candidates=1, depth=4)([1, 2, 3, 4, 5, 1, 2])
    assert tree == Tree([2, 3, 4, 5, 1], [-1, 0, 1, 2, 3])


@pytest.mark.parametrize("nodes", [1, 3, 24])
def test_lookup_keeps_to_its_nodes(nodes):
    assert len(PromptLookup(nodes)([1, 2, 3, 4, 5, 6, 7, 8, 9] * 3)) <= nodes


def test_the_oracle_hides_the_continuation_among_decoys():
    prompt, continuation = [1, 2, 3], list(range(100, 130))
    draft = Oracle(len(prompt), continuation, vocab=50, nodes=64)
    accepted = []
    for done in range(20):
        tree = draft([*prompt, *continuation[:done]])
        left = continuation[done:]
        true = [path for path in paths(tree) if list(path[1:]) == left[: len(path) - 1]]
        accepted.append(max(map(len, true)) - 1)
        assert len(tree) > max(map(len, true))  # there is a decoy
    assert 0 < sum(accepted) / len(accepted) <= 6
