"""Draft trees: what is derived from them, and the builders of fixed shapes and of chains."""

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.spec import DraftTree, TreeLayout, layout, tree
from tests.spec.tree_oracle import path_to, rows_of, tree_of, tree_rows, words

CHAINS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6)


@pytest.mark.parametrize("module", [tree, layout])
def test_documented_examples(module):
    assert doctest.testmod(module).failed == 0


@given(rows=st.lists(tree_rows(width=9, vocab=4), max_size=4))
def test_derived_tensors(rows):
    """Depths, ancestors and positions of any ragged batch, against a walk up each path."""
    deepest = max((len(path_to(row, n)) - 1 for row in rows for n in range(len(row[0]))), default=0)
    built = tree_of(rows, 9, steps=deepest)
    assert built.live.tolist() == [[n < len(row[0]) for n in range(9)] for row in rows]
    for r, row in enumerate(rows):
        for node in range(9):
            path = path_to(row, node) if node < len(row[0]) else ()
            assert built.ancestors[r, node].nonzero().flatten().tolist() == list(path)
            depth = max(len(path) - 1, 0)
            assert built.depths[r, node] == depth
            assert built.positions(torch.arange(10, 10 + len(rows)))[r, node] == 10 + r + depth
    assert built.depths.dtype == torch.int32
    assert built.positions(torch.zeros(len(rows), dtype=torch.int32)).dtype == torch.int64


@pytest.mark.parametrize("nodes", range(1, 18))
def test_long_chains_are_followed_to_the_root(nodes):
    chain = DraftTree.from_chains([5], [[list(range(1, nodes))]], nodes)
    assert chain.depths.tolist() == [list(range(nodes))]
    assert torch.equal(chain.ancestors[0], torch.ones(nodes, nodes).tril().bool())


def test_chains_merge_into_a_trie_in_level_order():
    chains = [[1, 2, 3], [1, 2, 4], [1], [5, 2], [1, 2, 3, 6]]
    built = DraftTree.from_chains([9, -1, 7], [chains, [[1]], []], num_draft_tokens=9)
    assert built.tokens.tolist() == [[9, 1, 5, 2, 2, 3, 4, 6, -1], [-1] * 9, [7] + [-1] * 8]
    assert built.parents.tolist()[0] == [-1, 0, 0, 1, 2, 3, 3, 5, -1]
    assert built.sizes.tolist() == [8, 0, 1]
    assert (built.steps, built.batch_size, built.num_draft_tokens) == (8, 3, 9)


def test_chains_are_cut_at_steps_and_at_nodes():
    cut = DraftTree.from_chains([9], [[[1, 2, 3], [4, 5, 6]]], 5, steps=2)
    assert words(rows_of(cut)[0]) == [(), (1,), (4,), (1, 2), (4, 5)]
    full = DraftTree.from_chains([9], [[[1, 2, 3], [4, 5, 6]]], 5)
    assert words(rows_of(full)[0]) == [(), (1,), (4,), (1, 2), (1, 2, 3)]
    assert DraftTree.from_chains([], [], 4).tokens.shape == (0, 4)


@given(chains=CHAINS, more=st.lists(st.integers(0, 3), max_size=5), nodes=st.integers(1, 12))
def test_another_chain_takes_no_node_away(chains, more, nodes):
    few, many = (
        set(words(rows_of(DraftTree.from_chains([0], [c], nodes))[0]))
        for c in (chains, [*chains, more])
    )
    assert few <= many
    prefixes = {tuple(c[:n]) for c in chains for n in range(len(c) + 1)} | {()}
    assert few <= prefixes
    assert len(few) == min(nodes, len(prefixes))


def test_expansion_layouts():
    assert TreeLayout.expansion([2, 1, 1]).parents.tolist() == [-1, 0, 0, 1, 2, 3, 4]
    full = TreeLayout.expansion([2, 2])
    assert full.parents.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert (full.level_sizes, full.steps, len(full)) == ((1, 2, 4), 2, 7)
    assert TreeLayout.expansion([]).level_sizes == (1,)


def test_a_layout_picks_each_childs_rank():
    """Node 5 is the second child of node 2, so it takes node 2's second candidate."""
    shape = TreeLayout([-1, 0, 0, 2, 1, 2])
    roots = torch.tensor([[50], [-1]])
    first = shape.pick(0, torch.tensor([[[11, 12, 13]], [[21, 22, 23]]]))
    assert first.tolist() == [[11, 12], [21, 22]]
    second = shape.pick(1, torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]))
    assert second.tolist() == [[3, 1, 4], [7, 5, 8]]
    assert (shape.width(0), shape.width(1)) == (2, 2)
    built = DraftTree.from_topk([roots, first, second], shape)
    assert built.tokens.tolist() == [[50, 11, 12, 3, 1, 4], [-1] * 6]
    assert built.parents.tolist() == [[-1, 0, 0, 2, 1, 2], [-1] * 6]
    assert built.sizes.tolist() == [6, 0]
    assert (built.steps, built.proposal) == (2, "deterministic")


def test_a_tree_that_was_drawn_carries_q():
    shape = TreeLayout.expansion([2])
    q = torch.full((1, 1, 4), 0.25)
    built = DraftTree.from_topk([torch.tensor([[3]]), torch.tensor([[1, 2]])], shape, q)
    assert built.proposal == "sampled"
    assert built.q is q
