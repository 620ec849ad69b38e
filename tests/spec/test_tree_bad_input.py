"""What is refused as no tree, by name and before anything is built."""

import pytest
import torch

from specpool.spec import DraftTree, TreeExpansion, TreeLayout

LONG, INT = torch.int64, torch.int32


def _tree(tokens=((7, 1, 2, -1),), parents=((-1, 0, 1, -1),), sizes=(3,), steps=3, **rest):
    return DraftTree(
        torch.as_tensor(tokens, dtype=LONG),
        torch.as_tensor(parents, dtype=INT),
        torch.as_tensor(sizes, dtype=INT),
        steps,
        **rest,
    )


def test_the_tree_that_the_others_spoil_is_right():
    assert _tree().depths.tolist() == [[0, 1, 2, 0]]
    q = torch.full((1, 2, 4), 0.25)
    assert _tree(proposal="sampled", q=q).q is q


@pytest.mark.parametrize(
    ("spoilt", "says"),
    [
        ({"parents": [[-1, 2, 0, -1]]}, r"parents\[0, 1\] is 2: a parent stands before its child"),
        ({"parents": [[-1, 1, 0, -1]]}, r"parents\[0, 1\] is 1: .*no cycles"),
        ({"parents": [[-1, 0, 3, -1]]}, r"parents\[0, 2\] is 3, out of range"),
        ({"parents": [[-1, 0, 99, -1]]}, r"parents\[0, 2\] is 99, out of range"),
        ({"parents": [[-1, 0, -1, -1]]}, r"parents\[0, 2\] is -1, out of range"),
        ({"parents": [[0, 0, 1, -1]]}, r"parents\[0, 0\] is 0; node 0 is the root"),
        ({"parents": [[-1, 0, 1, 0]]}, "node 3 is padding"),
        ({"tokens": [[7, 1, 2, 4]]}, "node 3 is padding"),
        ({"tokens": [[7, -2, 2, -1]]}, r"tokens\[0, 1\] is -2"),
        (
            {"tokens": [[7, 2, 2, -1]], "parents": [[-1, 0, 0, -1]]},
            "nodes 1 and 2 of row 0 are sib",
        ),
        ({"sizes": [5]}, r"sizes\[0\] is 5; a row has 0 to D = 4"),
        ({"sizes": [-1]}, r"sizes\[0\] is -1"),
        ({"sizes": [0]}, "row 0 has 0 nodes, so node 0 is padding"),
        ({"steps": 1}, "node 2 of row 0 has depth 2, but steps is 1"),
        ({"steps": -1}, "steps is -1"),
        ({"tokens": [7, 1, 2, -1]}, r"tokens must be \[bs, D\]"),
        ({"parents": [[-1, 0, 1]]}, r"parents must be \[1, 4\] as tokens, got \[1, 3\]"),
        ({"sizes": [3, 3]}, r"sizes must be \[bs\] = \[1\], got \[2\]"),
        ({"proposal": "topk"}, "'deterministic' or 'sampled', got 'topk'"),
        ({"proposal": "sampled"}, "a sampled tree needs q"),
        ({"q": torch.full((1, 2, 4), 0.25)}, "a deterministic tree has no q"),
    ],
)
def test_refused(spoilt, says):
    with pytest.raises(ValueError, match=says):
        _tree(**spoilt)


@pytest.mark.parametrize(
    ("q", "says"),
    [
        (torch.full((2, 2, 4), 0.25), r"q must be floating \[bs, Q, V\] with bs = 1"),
        (torch.full((1, 5, 4), 0.25), r"1 <= Q <= D = 4, got torch.float32 \[1, 5, 4\]"),
        (torch.full((1, 0, 4), 0.25), r"got torch.float32 \[1, 0, 4\]"),
        (torch.ones(1, 2, 4, dtype=INT), "got torch.int32"),
        (torch.full((1, 2, 4), 0.25, device="meta"), "q is on meta"),
        (torch.full((1, 1, 4), 0.25), "child of node 1, but q covers nodes 0 to 0"),
        (torch.full((1, 2, 4), 0.5), r"q\[0, 0\] is no distribution \(sum 2"),
        (torch.tensor([[[0.5, 0.5], [1.5, -0.5]]]), r"q\[0, 1\] is no distribution"),
        (torch.tensor([[[0.5, 0.5], [float("nan"), 0.5]]]), r"q\[0, 1\] is no distribution"),
    ],
)
def test_refused_q(q, says):
    with pytest.raises(ValueError, match=says):
        _tree(proposal="sampled", q=q)


def test_q_is_not_judged_where_nothing_was_drawn():
    q = torch.full((1, 4, 4), 0.25)
    q[:, 2:] = float("nan")
    _tree(proposal="sampled", q=q)


def test_tensors_of_another_kind():
    right = (torch.tensor([[7]]), torch.tensor([[-1]], dtype=INT), torch.tensor([1], dtype=INT))
    for i, name in enumerate(("tokens", "parents", "sizes")):
        other = INT if name == "tokens" else LONG
        spoilt = [t.to(other) if j == i else t for j, t in enumerate(right)]
        with pytest.raises(ValueError, match=f"{name} must be torch.int"):
            DraftTree(*spoilt, 0)
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            DraftTree(*([7] if j == i else t for j, t in enumerate(right)), 0)
        if i:
            with pytest.raises(ValueError, match=f"{name} is on meta, tokens on cpu"):
                DraftTree(*(t.to("meta") if j == i else t for j, t in enumerate(right)), 0)


def test_positions_of_another_batch():
    with pytest.raises(ValueError, match=r"prefix_len must be \[bs\] = \[1\]"):
        _tree().positions(torch.zeros(2, dtype=LONG))


@pytest.mark.parametrize(
    ("parents", "says"),
    [
        ([], "node 0 is the root"),
        ([0, 0], "node 0 is the root"),
        ([-1, 1], r"parents\[1\] is 1; a parent stands before"),
        ([-1, -1], r"parents\[1\] is -1"),
        ([-1, 0, 1, 0], "node 3 has depth 1 behind depth 2"),
    ],
)
def test_layouts(parents, says):
    with pytest.raises(ValueError, match=says):
        TreeLayout(parents)


def test_builders():
    shape = TreeLayout.expansion([2])
    with pytest.raises(ValueError, match="at least 1 child"):
        TreeLayout.expansion([2, 0])
    with pytest.raises(ValueError, match=r"level 0 must be \[bs, 1, k\] with k >= 2"):
        shape.pick(0, torch.zeros(3, 1, 1, dtype=LONG))
    roots, level = torch.tensor([[5]]), torch.tensor([[1, 2]])
    for levels in ([], [roots], [roots, level[:, :1]], [roots[0], level]):
        with pytest.raises(ValueError, match=r"levels must be \[bs, n\] with n = \[1, 2\]"):
            DraftTree.from_topk(levels, shape)
    with pytest.raises(ValueError, match="levels are on cpu, the layout on meta"):
        DraftTree.from_topk([roots, level], TreeLayout.expansion([2], "meta"))
    with pytest.raises(ValueError, match="are siblings with the same token 2"):
        DraftTree.from_topk([roots, torch.tensor([[2, 2]])], shape)
    with pytest.raises(ValueError, match="2 roots and chains of 1 requests"):
        DraftTree.from_chains([1, 2], [[]], 4)
    with pytest.raises(ValueError, match="num_draft_tokens is 0"):
        DraftTree.from_chains([1], [[]], 0)
    with pytest.raises(ValueError, match="token is not negative"):
        DraftTree.from_chains([1], [[[3, -1]]], 4)


def test_expansions():
    roots = torch.tensor([5])
    for topk, steps, nodes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            TreeExpansion(roots, topk=topk, steps=steps, num_draft_tokens=nodes)
    with pytest.raises(ValueError, match="propose at most 7 nodes"):
        TreeExpansion(roots, topk=2, steps=2, num_draft_tokens=8)
    for wrong in (roots.int(), roots[None]):
        with pytest.raises(ValueError, match=r"roots must be int64 \[bs\]"):
            TreeExpansion(wrong, topk=2, steps=2, num_draft_tokens=4)
    growing = TreeExpansion(roots, topk=2, steps=1, num_draft_tokens=3)
    with pytest.raises(RuntimeError, match="0 of 1 levels are scored"):
        growing.tree()
    for shape, says in (
        ((1, 2, 4), r"\[1, 1, V\]"),
        ((1, 4), r"\[1, 1, V\]"),
        ((1, 1, 1), "topk = 2"),
    ):
        with pytest.raises(ValueError, match=says):
            growing.score(torch.zeros(shape))
    with pytest.raises(ValueError, match="must be floating"):
        growing.score(torch.zeros(1, 1, 4, dtype=LONG))
    with pytest.raises(ValueError, match="log_probs is on meta"):
        growing.score(torch.zeros(1, 1, 4, device="meta"))
    growing.score(torch.zeros(1, 1, 4))
    with pytest.raises(RuntimeError, match="all 1 levels are scored"):
        growing.score(torch.zeros(1, 2, 4))
