"""Sampling where formulas divide by nothing, options one row at a time, and bad options."""

import pytest
import torch

from specpool.spec import DraftTree, TreeLayout, probabilities, sample_children, verify_sampling
from specpool.spec.verify import _judge_drawn, _judge_point_masses

ROWS = 4_000


def _level(children, q=None, rows=ROWS) -> DraftTree:
    """One level of given children, the same in every row."""
    tokens = torch.tensor([children]).expand(rows, -1)
    q = None if q is None else torch.tensor(q).expand(rows, 1, -1)
    shape = TreeLayout.expansion([len(children)])
    return DraftTree.from_topk([torch.zeros(rows, 1, dtype=torch.int64), tokens], shape, q)


def _emitted(tree: DraftTree, p: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a child was accepted, and how often each token came first."""
    logits = torch.tensor(p).log().expand(*tree.tokens.shape, -1)
    accept = verify_sampling(tree, logits, generator=torch.Generator().manual_seed(4))
    assert not accept.nan.any()
    accepted = accept.accept_len > 1
    child = tree.tokens.flatten()[accept.accept_index[:, 1].clamp(min=0).long()]
    first = torch.where(accepted, child, accept.bonus)
    return accepted, torch.bincount(first, minlength=len(p)) / len(first)


def test_p_and_q_equal():
    p = [0.3, 0.2, 0.5]
    assert _emitted(_level([1], p), p)[0].all()


def test_p_and_q_apart():
    """Nothing can be accepted, and the bonus is p's."""
    accepted, rates = _emitted(_level([0, 1], [0.5, 0.5, 0.0, 0.0]), [0.0, 0.0, 0.25, 0.75])
    assert not accepted.any()
    assert rates.tolist() == pytest.approx([0, 0, 0.25, 0.75], abs=0.03)


def test_children_drawn_when_q_was_used_up():
    """The second child has no q left: a point mass. p(1) = 0.3 is met by it or not at all."""
    p = [0.4, 0.3, 0.3]
    accepted, rates = _emitted(_level([0, 1], [1.0, 0.0, 0.0]), p)
    assert rates.tolist() == pytest.approx(p, abs=0.03)
    assert float(accepted.float().mean()) == pytest.approx(0.7, abs=0.03)


def test_a_child_that_q_never_gave():
    p = [0.4, 0.3, 0.3]
    accepted, rates = _emitted(_level([2], [0.5, 0.5, 0.0]), p)
    assert rates.tolist() == pytest.approx(p, abs=0.03)
    assert float(accepted.float().mean()) == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("q", [None, [0.2, 0.5, 0.3]])
def test_children_that_are_all_p_has(q):
    accepted, _ = _emitted(_level([2, 0, 1], q), [0.7, 0.2, 0.1])
    assert accepted.all()


def test_a_q_of_half_precision_sums_to_1_again():
    """Rounded up to bfloat16 this q sums to 1.006; p is what it was meant to be."""
    q = torch.tensor([[[0.502, 0.302, 0.202]]]).bfloat16()
    assert float(q.float().sum()) > 1.004
    tree = _level([1], q[0, 0].float().tolist(), rows=1)
    tree = DraftTree(tree.tokens, tree.parents, tree.sizes, 1, "sampled", q)
    p = q.float() / q.float().sum()
    almost = torch.full((1, 2), 1 - 1e-6, dtype=torch.float64)
    accepted, _ = _judge_drawn(tree, q, p.expand(1, 2, -1).contiguous(), almost)
    assert accepted.all()


def test_rounding_leaves_nothing_of_p_drawn():
    """p lies under q everywhere by rounding, and the draw is so near 1 that x is rejected."""
    q = torch.tensor([[[0.5, 0.5]]])
    p = torch.tensor([[[0.5, 0.49999997], [0.5, 0.5]]])
    tree = DraftTree(*_two(), 1, "sampled", q)
    almost = torch.full((1, 2), 1 - 1e-12, dtype=torch.float64)
    accepted, left = _judge_drawn(tree, q, p, almost)
    assert accepted.tolist() == [[True, False]]
    assert torch.equal(left, p[:, 0])


def test_rounding_leaves_nothing_of_p_point_masses():
    """The children are all that p has, but they sum to a little less than 1."""
    p = torch.tensor([[0.5, 0.49999997]]).expand(1, 3, -1).contiguous()
    tree = _level([0, 1], rows=1)
    almost = torch.full((1, 3), 1 - 1e-12, dtype=torch.float64)
    accepted, left = _judge_point_masses(tree, p, almost)
    assert accepted.tolist() == [[True, False, False]]
    assert torch.equal(left, p[:, 0])


def test_a_draw_of_0_accepts_nothing_impossible():
    zero = torch.zeros(1, 2, dtype=torch.float64)
    p = torch.tensor([[1.0, 0.0]]).expand(1, 2, -1).contiguous()
    tree, q = _level([1], rows=1), torch.tensor([[[0.5, 0.5]]])
    drawn = DraftTree(tree.tokens, tree.parents, tree.sizes, 1, "sampled", q)
    for accepted, left in (_judge_point_masses(tree, p, zero), _judge_drawn(drawn, q, p, zero)):
        assert accepted.tolist() == [[True, False]]
        assert left.tolist() == [[1.0, 0.0]]


def _two() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tree = _level([1], rows=1)
    return tree.tokens, tree.parents, tree.sizes


def test_probabilities_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()

    def rounded(*options):
        return [round(p, 4) for p in probabilities(logits, *options)[0].tolist()]

    assert rounded() == [0.1, 0.4, 0.2, 0.3]
    assert rounded(0.5) == [0.0333, 0.5333, 0.1333, 0.3]  # squares over 0.30
    assert rounded(1.0, 1.0, 2) == [0, 0.5714, 0, 0.4286]
    assert rounded(1.0, 0.69) == [0, 0.5714, 0, 0.4286]
    assert rounded(1.0, 0.71) == [0, 0.4444, 0.2222, 0.3333]
    assert rounded(1.0, 0.5, 2) == [0, 1, 0, 0]  # 0.4 / 0.7 is over a half once renormalised
    assert rounded(1.0, 1e-6) == [0, 1, 0, 0]
    assert rounded(1.0, 1.0, 99) == [0.1, 0.4, 0.2, 0.3]
    assert rounded(0.0) == rounded(1e-30) == [0, 1, 0, 0]


def test_each_row_has_its_own_options():
    logits = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(6))
    heat = torch.tensor([0.0, 0.5, 1.0, 1.0, 2.0])
    nucleus = torch.tensor([1.0, 0.9, 0.4, 1.0, 0.8])
    most = torch.tensor([7, 3, 7, 1, 100], dtype=torch.int32)
    together = probabilities(logits, heat, nucleus, most)
    for r in range(5):
        alone = probabilities(logits[r : r + 1], float(heat[r]), float(nucleus[r]), int(most[r]))
        assert torch.allclose(together[r], alone[0])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -0.1}, "temperature is -0.1; it must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_p": 0.0}, r"top_p is 0.0; it must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature is between -1.0 and 1.0"),
        ({"top_p": torch.tensor([0.5, float("nan")])}, "top_p is nan"),
        ({"top_k": torch.tensor([0, 3])}, "top_k is between 0.0 and 3.0"),
        ({"temperature": torch.ones(3)}, r"temperature must be a number or \[bs\] = \[2\]"),
        ({"top_p": torch.ones(2, 1)}, r"top_p must be a number or \[bs\]"),
        ({"top_k": torch.ones(2, device="meta")}, r"top_k must be .* on cpu, got \[2\] on meta"),
    ],
)
def test_options_that_are_refused(options, says):
    tree = _level([0, 1], rows=2)
    with pytest.raises(ValueError, match=says):
        verify_sampling(tree, torch.zeros(2, 3, 4), **options)


def test_vocabularies_and_draws_that_are_refused():
    with pytest.raises(ValueError, match="q has a vocabulary of 2, the logits one of 4"):
        verify_sampling(_level([0], [0.5, 0.5], rows=2), torch.zeros(2, 2, 4))
    for k in (0, 3):
        with pytest.raises(ValueError, match=f"k is {k}; a vocabulary of 2"):
            sample_children(torch.tensor([0.5, 0.5]), k)
    with pytest.raises(TypeError):
        probabilities(torch.zeros(1, 3), top_k=2.5)
