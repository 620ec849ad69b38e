"""Greedy verification against a walk in plain Python, and what it hands to the mover."""

import doctest

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specpool import RowMover, rows_from
from specpool.spec import Accept, DraftTree, verify, verify_greedy, verify_sampling
from tests.spec.tree_oracle import greedy_walk, rows_of, tree_of, tree_rows

NAN, INF = float("nan"), float("inf")
WIDTH, VOCAB = 9, 4


def logits_of(seed: int, bs: int, width: int = WIDTH, vocab: int = VOCAB) -> torch.Tensor:
    """Coarse logits, so that the greatest is often shared."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 2, (bs, width, vocab), generator=generator).float()


def test_documented_example():
    assert doctest.testmod(verify).failed == 0


@given(rows=st.lists(tree_rows(width=WIDTH, vocab=VOCAB), max_size=4), seed=st.integers(0, 2**31))
def test_as_a_walk(rows, seed):
    tree = tree_of(rows, WIDTH)
    logits = logits_of(seed, len(rows))
    accept = verify_greedy(tree, logits)
    _has_the_contract(accept, len(rows), WIDTH)
    for r, row in enumerate(rows):
        path, bonus = greedy_walk(row, logits[r].tolist()) if row[0] else ([], -1)
        assert accept.accept_len[r] == len(path)
        entries = [r * WIDTH + node for node in path]
        assert accept.accept_index[r].tolist() == entries + [-1] * (WIDTH - len(path))
        assert accept.bonus[r] == bonus
    assert not accept.nan.any()


@given(rows=st.lists(tree_rows(width=WIDTH, vocab=VOCAB), max_size=4), seed=st.integers(0, 2**31))
def test_temperature_0_is_greedy_whatever_the_proposal(rows, seed):
    tree = tree_of(rows, WIDTH)
    logits = logits_of(seed, len(rows))
    q = logits_of(seed + 1, len(rows)).softmax(-1)
    drawn = DraftTree(tree.tokens, tree.parents, tree.sizes, tree.steps, "sampled", q)
    expected = verify_greedy(tree, logits)
    zeros = torch.zeros(len(rows))
    for judged in (tree, drawn):
        for temperature, top_p, top_k in ((0, 1.0, None), (0.0, 0.5, 2), (zeros, 1.0, None)):
            accept = verify_sampling(judged, logits, temperature, top_p, top_k)
            assert all(map(torch.equal, accept, expected))


@given(
    chains=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5),
    more=st.lists(st.integers(0, 2), max_size=4),
    nodes=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
def test_a_further_branch_never_shortens_what_is_accepted(chains, more, nodes, seed):
    """Both trees are judged by one target, a function of the words so far."""

    def accepted(candidates):
        tree = DraftTree.from_chains([1], [candidates], nodes)
        (row,) = rows_of(tree)
        logits = torch.zeros(1, nodes, 3)
        history = [()]
        for node in range(1, len(row[0])):
            history.append((*history[row[1][node]], row[0][node]))
        for node, words in enumerate(history):
            logits[0, node, hash((seed, *words)) % 3] = 1.0
        return int(verify_greedy(tree, logits).accept_len)

    assert accepted(chains) <= accepted([*chains, more])


def test_the_mover_takes_the_answer():
    """Ragged rows, one of them padding: every accepted path comes to its window's front."""
    rows = [([5, 1, 2, 3], [-1, 0, 0, 2]), ([], []), ([6, 2, 0], [-1, 0, 1]), ([7], [-1])]
    tree = tree_of(rows, 5, steps=2)
    logits = torch.nn.functional.one_hot(
        torch.tensor([[2, 0, 3, 1, 0], [0] * 5, [2, 3, 0, 0, 0], [1, 0, 0, 0, 0]]), 4
    ).float()
    accept = verify_greedy(tree, logits)
    assert accept.accept_index.tolist() == [[0, 2, 3], [-1] * 3, [10, 11, -1], [15, -1, -1]]
    assert accept.accept_len.tolist() == [3, 0, 2, 1]
    assert accept.bonus.tolist() == [1, -1, 3, 1]
    buffer = torch.arange(20)[:, None].clone()
    window = torch.arange(20).view(4, 5)
    RowMover(rows_from(buffer)).move_accepted(window, accept.accept_index, accept.accept_len)
    assert buffer.flatten().tolist() == [0, 2, 3, *range(3, 20)]


def test_a_token_outside_the_targets_vocabulary_is_never_accepted():
    tree = tree_of([([3, 9, 1], [-1, 0, 0])], 3)
    logits = torch.tensor([[[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]]])
    for accept in (verify_greedy(tree, logits), verify_sampling(tree, logits, 1e-3)):
        assert accept.accept_index.tolist() == [[0, 2, -1]]
        assert accept.bonus.tolist() == [0]


def _spoilt(node: int, value: float) -> tuple[DraftTree, torch.Tensor]:
    """Three rows of root, 1, 2 and a branch 3; the path is root, 1. Row 1 is padding."""
    row = ([5, 1, 2, 3], [-1, 0, 1, 0])
    tree = tree_of([row, ([], []), row], 4)
    logits = torch.zeros(3, 4, 5)
    logits[:, 0, 1] = 9
    logits[:, 1, 4] = 9
    logits[0, node] = value
    logits[1] = NAN
    return tree, logits


VERIFIERS = [
    pytest.param(verify_greedy, id="greedy"),
    pytest.param(lambda t, x: verify_sampling(t, x, 0.0), id="temperature 0"),
    pytest.param(lambda t, x: verify_sampling(t, x, 0.01), id="sampling"),
    pytest.param(lambda t, x: verify_sampling(t, x, 0.01, 0.9, 3), id="top-k"),
    pytest.param(lambda t, x: verify_sampling(t, x, 0.01, 0.9), id="top-p"),
    pytest.param(lambda t, x: verify_sampling(_drawn(t), x, 0.01), id="sampled tree"),
]


def _drawn(tree: DraftTree) -> DraftTree:
    q = torch.full((*tree.tokens.shape, 5), 0.2)
    return DraftTree(tree.tokens, tree.parents, tree.sizes, tree.steps, "sampled", q)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("node", [0, 1])
def test_no_distribution_on_the_path(verifier, value, node, monkeypatch):
    """The row accepts its root alone; the others are as ever, a padding row's NaN is nobody's."""
    tree, logits = _spoilt(node, value)
    accept = verifier(tree, logits)
    assert accept.nan.tolist() == [True, False, False]
    assert accept.accept_len.tolist() == [1, 0, 2]
    assert accept.accept_index.tolist() == [[0, -1, -1, -1], [-1] * 4, [8, 9, -1, -1]]
    assert accept.bonus.tolist() == [-1, -1, 4]
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    with pytest.raises(ValueError, match=r"rows \[0\]: .* NaN or infinite; nothing is accepted"):
        verifier(tree, logits)


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("node", [2, 3])
def test_no_distribution_beside_the_path(verifier, node, monkeypatch):
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    tree, logits = _spoilt(node, NAN)
    accept = verifier(tree, logits)
    assert not accept.nan.any()
    assert accept.accept_len.tolist() == [2, 0, 2]


def test_one_nan_among_numbers_counts():
    tree, logits = _spoilt(0, 0.0)
    logits[0, 0, 2] = NAN
    for param in VERIFIERS:
        assert param.values[0](tree, logits).nan.tolist() == [True, False, False]


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_draft_distribution_that_broke(value):
    tree, logits = _spoilt(0, 0.0)
    logits[0, 0, 1] = 9
    logits[2, 0] = torch.tensor([0, 0, 0, 9.0, 0])  # this row's path is root, 3
    drawn = _drawn(tree)
    drawn.q[0, 1, 2] = value  # on the path, and node 2 was drawn from it
    drawn.q[2, 1] = value  # beside the path
    drawn.q[2, 3] = value  # on the path, but nothing was drawn from it
    accept = verify_sampling(drawn, logits, 0.01)
    assert accept.nan.tolist() == [True, False, False]
    assert accept.accept_len.tolist() == [1, 0, 2]


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    ("logits", "says"),
    [
        (torch.zeros(2, 4, 5), r"\[bs, D, V\] = \[3, 4, V\] as the tree, got \[2, 4, 5\]"),
        (torch.zeros(3, 5, 5), r"got \[3, 5, 5\]"),
        (torch.zeros(12, 5), r"got \[12, 5\]"),
        (torch.zeros(3, 4, 0), r"got \[3, 4, 0\]"),
        (torch.zeros(3, 4, 5, dtype=torch.int64), "must be floating, got torch.int64"),
        (torch.zeros(3, 4, 5, device="meta"), "logits are on meta, the tree is on cpu"),
    ],
)
def test_other_logits_are_refused(verifier, logits, says):
    with pytest.raises(ValueError, match=says):
        verifier(_spoilt(0, 0.0)[0], logits)


def test_logits_that_are_no_tensor():
    with pytest.raises(TypeError, match="logits must be a torch"):
        verify_greedy(_spoilt(0, 0.0)[0], [[0.0]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_and_strides(dtype):
    tree, logits = _spoilt(2, 0.0)
    turned = logits.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)
    for param in VERIFIERS:
        expected, accept = (param.values[0](tree, x) for x in (logits, turned))
        assert all(map(torch.equal, accept, expected))


def _has_the_contract(accept: Accept, bs: int, entries: int) -> None:
    assert accept.accept_index.shape == (bs, entries)
    assert accept.accept_index.is_contiguous()
    assert [t.dtype for t in accept] == [torch.int32, torch.int32, torch.int64, torch.bool]
    assert all(t.shape == (bs,) for t in accept[1:])
