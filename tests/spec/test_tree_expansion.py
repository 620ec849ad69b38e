"""EAGLE-2 expansion against the paper's own words, done one request and one node at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool.spec import TreeExpansion
from tests.spec.tree_oracle import rows_of, words

VOCAB = 7


def _draft(seed: int):
    """log q(next | words so far), any words, as a deterministic function of them."""

    def log_probs(word: tuple[int, ...]) -> list[float]:
        generator = torch.Generator().manual_seed(hash((seed, *word)) % 2**31)
        return torch.randn(VOCAB, generator=generator).mul(2).log_softmax(0).tolist()

    return log_probs


def _grow(drafts, roots, topk, steps, nodes):
    """The documented loop, with what is fed followed by its number as a draft's cache would."""
    growing = TreeExpansion(torch.tensor(roots), topk=topk, steps=steps, num_draft_tokens=nodes)
    fed = [[] for _ in roots]  # the word of each fed node, by its number
    while not growing.done:
        scores = []
        for r, root in enumerate(roots):
            new = []
            for j, token in enumerate(growing.tokens[r].tolist()):
                above = int(growing.fed_parents[r, j])
                word = () if above < 0 else (*fed[r][above], token)
                new.append(word)
            fed[r] += new
            if root >= 0:
                for j, word in enumerate(new):
                    seen = [fed[r][n] for n in growing.mask[r, j].nonzero().flatten().tolist()]
                    assert seen == [word[:n] for n in range(len(word) + 1)]
            scores.append([drafts[r](word) for word in new])
        growing.score(torch.tensor(scores))
    return growing.tree()


def _paper(draft, topk, steps, nodes):
    """Section 4: expansion phase, then reranking phase."""
    value = {(): 0.0}
    frontier = [()]
    for _ in range(steps):
        level = []
        for word in frontier:
            scores = draft(word)
            for token in sorted(range(VOCAB), key=lambda t: -scores[t])[:topk]:
                value[(*word, token)] = value[word] + scores[token]
                level.append((*word, token))
        frontier = sorted(level, key=lambda word: -value[word])[:topk]
    ranked = sorted(value, key=lambda word: (-value[word], len(word)))
    return set(ranked[:nodes])


@pytest.mark.parametrize(
    ("topk", "steps", "nodes"), [(1, 4, 5), (2, 3, 7), (3, 3, 12), (4, 2, 21), (7, 2, 30)]
)
@pytest.mark.parametrize("seed", range(4))
def test_as_the_paper(topk, steps, nodes, seed):
    drafts = [_draft(seed), _draft(seed + 50), _draft(seed + 100)]
    tree = _grow(drafts, [3, -1, 5], topk, steps, nodes)
    assert tree.sizes.tolist() == [nodes, 0, nodes]
    assert (tree.steps, tree.num_draft_tokens, tree.proposal) == (steps, nodes, "deterministic")
    rows = rows_of(tree)
    for r in (0, 2):
        assert set(words(rows[r])) == _paper(drafts[r], topk, steps, nodes)
        assert rows[r][0][0] == (3, -1, 5)[r]
        depths = [len(word) for word in words(rows[r])]
        assert depths == sorted(depths)


def test_of_equal_values_the_shallower_is_kept():
    """Certain children have their parent's value: without the tie's rule they could outrank it."""
    growing = TreeExpansion(torch.tensor([0]), topk=2, steps=3, num_draft_tokens=4)
    half = math.log(0.5)
    growing.score(torch.tensor([[[half, half, -9.0]]]))
    growing.score(torch.tensor([[[0.0, -9.0, -9.0], [0.0, -9.0, -9.0]]]))
    growing.score(torch.tensor([[[0.0, -9.0, -9.0], [0.0, -9.0, -9.0]]]))
    kept = words(rows_of(growing.tree())[0])
    assert {word[:1] for word in kept[1:3]} == {(0,), (1,)}
    assert len(kept[3]) == 2


def test_tokens_that_cannot_follow_are_never_proposed():
    """Fewer possible tokens than topk leave padding; a NaN is one of the impossible."""
    growing = TreeExpansion(torch.tensor([4, 4]), topk=3, steps=2, num_draft_tokens=6)
    impossible, nan = -math.inf, math.nan
    growing.score(
        torch.tensor([[[0.0, impossible, nan, impossible]], [[nan, nan, nan, impossible]]])
    )
    assert growing.tokens.tolist() == [[0, 0, 0], [0, 0, 0]]
    lines = torch.full((2, 3, 4), math.log(0.25))
    growing.score(lines)
    tree = growing.tree()
    assert tree.sizes.tolist() == [5, 1]
    assert words(rows_of(tree)[0])[:2] == [(), (0,)]
    assert all(word[:1] == (0,) for word in words(rows_of(tree)[0])[1:])
    assert tree.tokens.tolist()[1] == [4, -1, -1, -1, -1, -1]


@given(
    seed=st.integers(0, 2**31),
    topk=st.integers(1, 5),
    steps=st.integers(1, 4),
    data=st.data(),
)
def test_any_scores_make_a_tree(seed, topk, steps, data):
    """Coarse scores, full of ties, of tokens that cannot follow and of values above 0: the
    constructor's checks, which run on the CPU, find nothing to refuse."""
    nodes = data.draw(st.integers(1, 1 + topk + (steps - 1) * topk * topk))
    generator = torch.Generator().manual_seed(seed)
    growing = TreeExpansion(
        torch.tensor([3, -1, 0]), topk=topk, steps=steps, num_draft_tokens=nodes
    )
    while not growing.done:
        shape = (*growing.tokens.shape, 6)
        scores = torch.randint(-3, 2, shape, generator=generator).float()
        scores[scores == -3] = -math.inf
        growing.score(scores)
    assert growing.tree().sizes[1] == 0
