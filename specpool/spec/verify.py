"""Verification: which path of each draft tree the target accepts, and the token that follows it.

Everything is worked out on the device, for the whole batch at once, with shapes that depend on no
value: nothing waits for the host, so the pool can move what is accepted without a pause.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specpool.spec.sampling import probabilities, sample
from specpool.spec.tree import DraftTree
from specpool.spec.tree_checks import checks_asked_for


class Accept(NamedTuple):
    """The verifier's answer, as ``RowMover.move_accepted`` takes it.

    Attributes:
        accept_index: int32 ``[bs, S]`` with S = steps + 1: the accepted nodes from the root down,
            flat into ``[bs * D]``; -1 behind them.
        accept_len: int32 ``[bs]``, accepted nodes **including the root**; 0 for a padding row.
        bonus: int64 ``[bs]``, the target's token after the last accepted node; -1 for a padding
            row and where ``nan`` is set.
        nan: bool ``[bs]``: the target's logits (or the draft's ``q``) at a node on the accepted
            path are no distribution: a NaN, an infinity, or nothing but -inf. Such a row accepts
            its root alone and has no bonus: nothing follows from it. Read it with the rest.
    """

    accept_index: Tensor
    accept_len: Tensor
    bonus: Tensor
    nan: Tensor


def verify_greedy(tree: DraftTree, logits: Tensor) -> Accept:
    """Accept the path on which each node's token is the argmax after its parent.

    Args:
        tree: of either proposal.
        logits: the target's, floating ``[bs, D, V]`` on the tree's device; padding's are not read.

    Raises:
        ValueError: logits of another shape, dtype or device; with ``SPECPOOL_CHECK=1`` (which
            synchronises) rows whose ``nan`` would be set.

    Example:
        >>> tree = DraftTree.from_chains([7], [[[1, 2], [3]]], num_draft_tokens=4)
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[1, 4, 0, 0]]), 5).float()
        >>> accept = verify_greedy(tree, logits)  # after the root 1, after that 4
        >>> accept.accept_index.tolist(), accept.accept_len.tolist(), accept.bonus.tolist()
        ([[0, 1, -1, -1]], [2], [4])
    """
    _check_logits(tree, logits)
    choice = logits.argmax(-1)
    passes = tree.tokens == choice.gather(1, _parents(tree))
    accepted = _first_passing_path(tree, passes)
    bonus = choice.gather(1, _last(accepted)).squeeze(1)
    return _answer(tree, accepted, bonus, _no_distribution(logits, choice))


def verify_sampling(
    tree: DraftTree,
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    top_p: Tensor | float = 1.0,
    top_k: Tensor | int | None = None,
    *,
    generator: torch.Generator | None = None,
) -> Accept:
    """Accept a path by chance, so that what is emitted is distributed as the target's own draws.

    With p the target's distribution at a node (``probabilities``), its children are tried in node
    order. A child x of a *deterministic* tree is accepted with probability p(x); else p(x) := 0
    and p is renormalised. A child of a *sampled* tree is accepted with min(1, p(x) / q(x)); else
    p := norm(max(p - q, 0)), and q loses x and is renormalised (recursive rejection sampling:
    SpecInfer, Miao et al. 2024; without replacement: Sequoia, Chen et al. 2024). The bonus is
    drawn from what is left of p where no child is accepted.

    The two rules are one: a deterministic child's q is a point mass at it. A child whose q(x) is 0
    (drawn when q was used up) is judged as one too. Rounding can leave nothing of p after a
    rejection that all but cannot happen; p then stays as it was before it.

    Args:
        tree: as drafted; its ``proposal`` must be true of it.
        logits: the target's, floating ``[bs, D, V]`` on the tree's device; padding's are not read.
        temperature: one number or ``[bs]``, at least 0; rows with 0 are greedy, exactly.
        top_p: one number or ``[bs]``, in (0, 1].
        top_k: one number or ``[bs]``, at least 1; None keeps all.
        generator: of the tree's device; None is the device's default.

    Raises:
        ValueError: an option outside its range; a ``q`` of another vocabulary; as
            ``verify_greedy``.
    """
    _check_logits(tree, logits)
    if tree.q is not None and tree.q.shape[2] != logits.shape[2]:
        raise ValueError(
            f"q has a vocabulary of {tree.q.shape[2]}, the logits one of {logits.shape[2]}"
        )
    probs = probabilities(logits, temperature, top_p, top_k)
    # In double precision: a draw of 24 bits is 0, and accepts anything, 6e-8 of the time.
    draws = torch.rand(
        tree.tokens.shape, dtype=torch.float64, device=probs.device, generator=generator
    )
    bad = probs[..., 0].isnan()
    if tree.q is None:
        accepted, left = _judge_point_masses(tree, probs, draws)
    else:
        accepted, left = _judge_drawn(tree, tree.q, probs, draws)
        bad = bad | _draft_is_bad(tree, tree.q)
    return _answer(tree, accepted, sample(left, generator), bad)


def _judge_point_masses(tree: DraftTree, probs: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted nodes ``[bs, D]`` and what is left of p at the last of them ``[bs, V]``.

    p renormalised after rejections is p over what the rejected siblings left of 1, so every node
    can be judged at once, as if its parent were accepted and its earlier siblings were not.
    """
    bs, _, vocab = probs.shape
    tokens, known = _tokens(tree, vocab)
    chance = probs.flatten(1).gather(1, _parents(tree) * vocab + tokens)
    chance = torch.where(known, chance, 0.0)
    spent = torch.where(_earlier_siblings(tree), chance[:, None], 0.0).sum(-1)
    passes = (draws * (1 - spent).clamp(min=0) < chance) & (chance > 0)
    accepted = _first_passing_path(tree, passes)
    last = _last(accepted)
    own = probs.gather(1, last[..., None].expand(-1, -1, vocab)).squeeze(1)
    rejected = known & (tree.parents == last)
    tried = torch.zeros(bs, vocab + 1, dtype=torch.bool, device=probs.device)
    tried.scatter_(1, torch.where(rejected, tokens, vocab), True)  # column V takes the others
    left = own.masked_fill(tried[:, :vocab], 0.0)
    return accepted, torch.where(left.sum(-1, keepdim=True) > 0, left, own)


def _judge_drawn(tree: DraftTree, q: Tensor, probs: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """As ``_judge_point_masses``, for children drawn from ``q``.

    One pass over the nodes in order walks every row's path, since a node's children, and a
    rejected child's siblings, stand behind it. Only the walk's own p and q are kept, ``[bs, V]``.
    """
    vocab = probs.shape[2]
    tokens, known = _tokens(tree, vocab)
    at = torch.zeros_like(tree.sizes)  # the last accepted node
    p, rest = probs[:, 0], _draft(q, 0)
    accepted = [tree.live[:, 0]]
    token = torch.arange(vocab, device=probs.device)
    for node in range(1, tree.num_draft_tokens):
        x = tokens[:, node, None]
        tried = (tree.parents[:, node] == at) & known[:, node]
        drawn = rest.gather(1, x) > 0
        proposal = torch.where(drawn, rest, (token == x).float())
        passes = draws[:, node, None] * proposal.gather(1, x) < p.gather(1, x)
        passes = passes.squeeze(1) & tried
        fails = (tried & ~passes)[:, None]
        left = (p - proposal).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        p = torch.where(fails & (mass > 0), left / mass, p)
        rest = torch.where(fails & (token == x), 0.0, rest)
        rest = _normalised(rest)
        p = torch.where(passes[:, None], probs[:, node], p)
        rest = torch.where(passes[:, None], _draft(q, node), rest)
        at = torch.where(passes, node, at)
        accepted.append(passes)
    return torch.stack(accepted, dim=1), p


def _draft(q: Tensor, node: int) -> Tensor:
    """The draft's distribution at a node; none where ``q`` ends, since it has no children."""
    if node >= q.shape[1]:
        return torch.zeros_like(q[:, 0], dtype=torch.float32)
    return _normalised(q[:, node].float())  # half precision does not sum to 1


def _normalised(weights: Tensor) -> Tensor:
    """Weights that sum to 1; where all are 0 they stay 0."""
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def _draft_is_bad(tree: DraftTree, q: Tensor) -> Tensor:
    """Bool ``[bs, D]``: children were drawn from a ``q`` that holds a NaN or an infinity."""
    node = torch.arange(tree.num_draft_tokens, device=q.device)
    has_children = (tree.parents[:, None] == node[:, None]).any(-1)
    broken = torch.zeros_like(has_children)
    broken[:, : q.shape[1]] = ~q.float().sum(-1).isfinite()
    return broken & has_children


def _tokens(tree: DraftTree, vocab: int) -> tuple[Tensor, Tensor]:
    """Tokens that can index a vocabulary, and whether they are a child's and belong to it.

    A draft's vocabulary may be larger than the target's: such a token has probability 0.
    """
    known = (tree.parents >= 0) & (tree.tokens < vocab)
    return tree.tokens.clamp(0, vocab - 1), known


def _parents(tree: DraftTree) -> Tensor:
    """Parents as indices; the root's and padding's are 0."""
    return tree.parents.clamp(min=0).long()


def _earlier_siblings(tree: DraftTree) -> Tensor:
    """Bool ``[bs, D, D]``: row i is True at the siblings tried before node i."""
    same = tree.parents[:, :, None] == tree.parents[:, None, :]
    return same.tril(-1)  # padding is its own kind's sibling, and is never accepted


def _first_passing_path(tree: DraftTree, passes: Tensor) -> Tensor:
    """Bool ``[bs, D]``: the nodes whose whole path was chosen, each the first sibling to pass."""
    chosen = passes & ~(_earlier_siblings(tree) & passes[:, None]).any(-1)
    chosen = chosen | (tree.parents < 0)  # the root is decided already
    return tree.live & ~(tree.ancestors & ~chosen[:, None]).any(-1)


def _last(accepted: Tensor) -> Tensor:
    """The last accepted node, ``[bs, 1]``; the order of nodes is that of the path."""
    node = torch.arange(accepted.shape[1], device=accepted.device)
    return torch.where(accepted, node, 0).amax(1, keepdim=True)


def _no_distribution(logits: Tensor, choice: Tensor) -> Tensor:
    """Bool ``[bs, D]``: the greatest logit is NaN (argmax takes one for the greatest) or infinite.

    An infinite one leaves softmax nothing but NaN.
    """
    return ~logits.gather(-1, choice[..., None]).squeeze(-1).isfinite()


def _answer(tree: DraftTree, accepted: Tensor, bonus: Tensor, bad: Tensor) -> Accept:
    nan = (accepted & bad).any(1)
    bs, width = accepted.shape
    if checks_asked_for(nan.device) and bool(nan.any()):
        rows = nan.nonzero().flatten().tolist()
        raise ValueError(
            f"rows {rows}: logits (or q) on the accepted path are NaN or infinite; nothing is "
            "accepted"
        )
    root = torch.arange(width, device=nan.device) == 0
    accepted = accepted & (root | ~nan[:, None])
    flat = torch.arange(bs * width, dtype=torch.int32, device=nan.device).view(bs, width)
    index = torch.full((bs, tree.steps + 2), -1, dtype=torch.int32, device=nan.device)
    # The last column takes what is not accepted, and is cut off.
    index.scatter_(1, torch.where(accepted, tree.depths, tree.steps + 1).long(), flat)
    return Accept(
        accept_index=index[:, : tree.steps + 1].contiguous(),
        accept_len=accepted.sum(1, dtype=torch.int32),
        bonus=torch.where(nan | (tree.sizes == 0), -1, bonus),
        nan=nan,
    )


def _check_logits(tree: DraftTree, logits: Tensor) -> None:
    bs, width = tree.tokens.shape
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, got {type(logits).__name__}")
    if logits.dim() != 3 or logits.shape[:2] != (bs, width) or logits.shape[2] < 1:
        raise ValueError(
            f"logits must be [bs, D, V] = [{bs}, {width}, V] as the tree, got {list(logits.shape)}"
        )
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating, got {logits.dtype}")
    if logits.device != tree.tokens.device:
        raise ValueError(f"logits are on {logits.device}, the tree is on {tree.tokens.device}")
