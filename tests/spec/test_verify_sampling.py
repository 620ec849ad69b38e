"""Sampled verification emits what the target itself would draw: chi-square over many rows.

The target and the draft are tables: logits after each token. Each of 24,000 rows is one request;
the first two tokens it emits are counted (where it emits one, the second is drawn plainly) and
compared with the exact probabilities, worked out in plain Python.
"""

import dataclasses
import math

import pytest
import torch

from specpool.spec import (
    DraftTree,
    TreeExpansion,
    TreeLayout,
    probabilities,
    sample,
    sample_children,
    verify_sampling,
)

VOCAB, ROWS, ROOT = 6, 24_000, 0
_TABLES = torch.randn(2, VOCAB, VOCAB, generator=torch.Generator().manual_seed(5)) * 1.3
TARGET, DRAFT = _TABLES[0], (_TABLES[1] + _TABLES[0] * 0.5).softmax(-1)

OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.6}, id="cool"),
    pytest.param({"temperature": 1.7, "top_k": 4}, id="hot, top-k"),
    pytest.param({"top_p": 0.8}, id="top-p"),
    pytest.param({"temperature": 1.2, "top_p": 0.7, "top_k": 4}, id="all"),
]


def exact(scores: list[float], temperature=1.0, top_p=1.0, top_k=None) -> list[float]:
    """The target's distribution, by the words of its documentation."""
    weights = {t: math.exp(s / temperature) for t, s in enumerate(scores)}
    ranked = sorted(weights, key=lambda t: -weights[t])[:top_k]
    total = sum(weights[t] for t in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weights[token] / total
        if top_p < 1 and mass >= top_p:
            break
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(scores))]


def roots() -> torch.Tensor:
    return torch.full((ROWS, 1), ROOT)


def top_tree(widths) -> DraftTree:
    """The draft's best tokens, in a fixed shape."""
    shape = TreeLayout.expansion(widths)
    levels = [roots()]
    for level in range(shape.steps):
        best = DRAFT[levels[-1]].topk(shape.width(level)).indices
        levels.append(shape.pick(level, best))
    return DraftTree.from_topk(levels, shape)


def grown_tree(topk, steps, nodes) -> DraftTree:
    growing = TreeExpansion(roots()[:, 0], topk=topk, steps=steps, num_draft_tokens=nodes)
    while not growing.done:
        growing.score(DRAFT[growing.tokens].log())
    return growing.tree()


def drawn_tree(widths, generator, q=DRAFT) -> DraftTree:
    """The draft's draws without replacement; q is carried for nodes that have children."""
    shape = TreeLayout.expansion(widths)
    levels = [roots()]
    for level in range(shape.steps):
        drawn = sample_children(q[levels[-1]], shape.width(level), generator)
        levels.append(shape.pick(level, drawn))
    return DraftTree.from_topk(levels, shape, q[torch.cat(levels[:-1], dim=1)])


def chi_square(tree: DraftTree, generator, **options) -> tuple[float, float]:
    """The statistic of the first two tokens, and the value that it exceeds one time in 10,000.

    Cells expected fewer than 5 times are pooled; a cell of probability 0 must stay empty (its
    statistic is infinite otherwise). The critical value is Wilson and Hilferty's (1931): the cube
    root of chi-square / df is normal with mean 1 - 2 / (9 df) and variance 2 / (9 df).
    """
    logits = TARGET[tree.tokens.clamp(min=0)]
    accept = verify_sampling(tree, logits, **options, generator=generator)
    path = accept.accept_index.long()
    on_path = tree.tokens.flatten()[path.clamp(min=0)]
    emitted = torch.where(path >= 0, on_path, -1)[:, 1:3]
    emitted = torch.nn.functional.pad(emitted, (0, 2 - emitted.shape[1]), value=-1)
    accepted = accept.accept_len.long() - 1
    place = torch.arange(2)
    emitted = torch.where(place == accepted[:, None], accept.bonus[:, None], emitted)
    plain = probabilities(TARGET[emitted[:, 0]], **options)
    second = torch.where(emitted[:, 1] < 0, sample(plain, generator), emitted[:, 1])
    counts = torch.bincount(emitted[:, 0] * VOCAB + second, minlength=VOCAB**2).tolist()

    first = exact(TARGET[ROOT].tolist(), **options)
    then = [exact(TARGET[t].tolist(), **options) for t in range(VOCAB)]
    cells, rare = [], [0.0, 0]
    for cell, count in enumerate(counts):
        expected = len(accept.bonus) * first[cell // VOCAB] * then[cell // VOCAB][cell % VOCAB]
        if expected == 0 and count:
            return math.inf, 0.0
        if expected >= 5:
            cells.append((expected, count))
        else:
            rare = [rare[0] + expected, rare[1] + count]
    if rare[0] >= 5:
        cells.append(tuple(rare))
    df, z = len(cells) - 1, 3.719
    critical = df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3
    return sum((count - expected) ** 2 / expected for expected, count in cells), critical


TREES = [
    pytest.param(lambda g: top_tree([1, 1, 1]), id="top-1 chain"),
    pytest.param(lambda g: top_tree([3, 2]), id="top-k tree"),
    pytest.param(lambda g: grown_tree(3, 3, 9), id="EAGLE-2 tree"),
    pytest.param(lambda g: drawn_tree([1, 1, 1], g), id="drawn chain"),
    pytest.param(lambda g: drawn_tree([3, 2], g), id="drawn tree"),
    pytest.param(lambda g: drawn_tree([VOCAB], g), id="the whole vocabulary drawn"),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("build", TREES)
def test_what_is_emitted_is_the_targets(build, options):
    generator = torch.Generator().manual_seed(11)
    statistic, critical = chi_square(build(generator), generator, **options)
    assert statistic < critical


def _backwards(tree: DraftTree) -> DraftTree:
    """A drawn tree of one level with its draws in reverse."""
    tokens = torch.cat([tree.tokens[:, :1], tree.tokens[:, 1:].flip(1)], dim=1)
    return dataclasses.replace(tree, tokens=tokens)


FAULTS = [
    pytest.param(
        lambda g: dataclasses.replace(
            (tree := top_tree([1, 1, 1])), proposal="sampled", q=DRAFT[tree.tokens]
        ),
        id="a top-1 chain judged as drawn",
    ),
    pytest.param(
        lambda g: dataclasses.replace(
            (tree := top_tree([3, 2])), proposal="sampled", q=DRAFT[tree.tokens]
        ),
        id="a top-k tree judged as drawn",
    ),
    pytest.param(
        lambda g: dataclasses.replace(
            (tree := drawn_tree([2, 2], g)), q=DRAFT.roll(1, 0)[tree.tokens[:, :3]]
        ),
        id="another node's q",
    ),
    pytest.param(lambda g: _backwards(drawn_tree([3], g)), id="not in draw order"),
]


@pytest.mark.parametrize("build", FAULTS)
def test_the_same_test_fails_a_proposal_that_is_not_what_it_says(build):
    generator = torch.Generator().manual_seed(11)
    statistic, critical = chi_square(build(generator), generator)
    assert statistic > 2 * critical


def _acceptance(p: list[float], q: list[float], k: int) -> float:
    """How often one of k draws is accepted, by summing over every sequence of draws."""
    if k == 0 or sum(q) == 0:
        return 0.0
    q = [weight / sum(q) for weight in q]
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    left = [weight / (sum(left) or 1.0) for weight in left]
    total = 0.0
    for x, chance in enumerate(q):
        if chance:
            others = [0.0 if t == x else weight for t, weight in enumerate(q)]
            accepted = min(1.0, p[x] / chance)
            total += chance * (accepted + (1 - accepted) * _acceptance(left, others, k - 1))
    return total


@pytest.mark.parametrize("children", [1, 2, 3])
def test_draws_are_accepted_as_often_as_can_be(children):
    """Judged as point masses, draws keep the target's distribution (every token may be judged so)
    but are accepted less often: that fault shows here, and nowhere else."""
    p, q = exact(TARGET[ROOT].tolist()), DRAFT[ROOT].tolist()
    generator = torch.Generator().manual_seed(2)
    tree = drawn_tree([children], generator)
    logits = TARGET[tree.tokens]
    expected = _acceptance(p, q, children)
    if children == 1:
        assert expected == pytest.approx(sum(map(min, p, q)))
    deviation = math.sqrt(expected * (1 - expected) / ROWS)
    other = dataclasses.replace(tree, proposal="deterministic", q=None)
    rates = [
        float((verify_sampling(judged, logits, generator=generator).accept_len > 1).float().mean())
        for judged in (tree, other)
    ]
    assert abs(rates[0] - expected) < 4 * deviation
    assert rates[1] < expected - 8 * deviation


def test_draws_without_replacement():
    """Ordered pairs come as often as two draws in a row, the second from what the first left."""
    q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    drawn = sample_children(q.expand(ROWS, -1), 2, torch.Generator().manual_seed(3))
    counts = torch.bincount(drawn[:, 0] * 5 + drawn[:, 1], minlength=25).view(5, 5).tolist()
    for i, first in enumerate(q.tolist()):
        for j, second in enumerate(q.tolist()):
            chance = 0.0 if i == j else first * second / (1 - first)
            spread = math.sqrt(ROWS * chance * (1 - chance))
            assert abs(counts[i][j] - ROWS * chance) <= 4 * spread
    whole = sample_children(q, 5, torch.Generator().manual_seed(3))
    assert sorted(whole.tolist()) == [0, 1, 2, 3, 4]
    assert whole[-1] == 4


def test_a_generator_repeats_itself():
    def emitted(seed):
        generator = torch.Generator().manual_seed(seed)
        tree = drawn_tree([2, 1], generator)
        return verify_sampling(tree, TARGET[tree.tokens], generator=generator).bonus

    assert torch.equal(emitted(1), emitted(1))
    assert not torch.equal(emitted(1), emitted(2))
