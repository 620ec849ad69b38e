"""EAGLE-2's dynamic draft trees: expand what is likely, then keep what is likeliest overall.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees" (2024), section
4: a node's value is the product of the draft's probabilities along its path. Each level's best
``topk`` nodes are expanded, and of all nodes the best ``num_draft_tokens`` become the tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specpool.spec.tree import DraftTree


class TreeExpansion:
    """Grows a batch of trees level by level, on the device, with shapes that depend on no value.

    The draft model's loop feeds ``tokens`` and scores what follows them, ``steps`` times:

        growing = TreeExpansion(roots, topk=8, steps=5, num_draft_tokens=64)
        while not growing.done:
            logits = draft(growing.tokens, growing.mask)        # [bs, n, V]
            growing.score(logits.log_softmax(-1))
        tree = growing.tree()

    Every fed node has a number in the order of feeding: the root is 0, the j-th token of level
    l >= 1 is ``1 + (l - 1) * topk + j``. ``fed_parents`` and ``mask`` count in it, so that a
    draft that keeps its KV (or hidden states) in that order finds a node's parent and ancestors.

    Args:
        roots: int64 ``[bs]``, each request's last decided token; -1 makes a padding row.
        topk: nodes expanded at each level, and children scored of each.
        steps: levels below the root, at least 1.
        num_draft_tokens: D, nodes kept with the root.

    Attributes:
        level: depth of the nodes to feed now; it is ``steps`` when all is scored.
        tokens: int64 ``[bs, n]`` to feed now: the roots (n = 1), then topk. 0 where there is
            nothing to feed, whose scores are ignored.
        fed_parents: int64 ``[bs, n]``, the number of each one's parent; -1 for the root.
        mask: bool ``[bs, n, fed]``, which fed nodes each sees: its ancestors and itself.

    Raises:
        ValueError: roots that are no int64 ``[bs]``, a number below 1, more
            ``num_draft_tokens`` than ``topk`` and ``steps`` can propose.
    """

    def __init__(self, roots: Tensor, *, topk: int, steps: int, num_draft_tokens: int) -> None:
        if roots.dim() != 1 or roots.dtype != torch.int64:
            raise ValueError(f"roots must be int64 [bs], got {roots.dtype} {list(roots.shape)}")
        if min(topk, steps, num_draft_tokens) < 1:
            raise ValueError(
                f"topk, steps and num_draft_tokens must be at least 1, got {topk}, {steps} and "
                f"{num_draft_tokens}"
            )
        most = 1 + topk + (steps - 1) * topk * topk
        if num_draft_tokens > most:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}, but topk {topk} and steps {steps} "
                f"propose at most {most} nodes with the root"
            )
        self.topk, self.steps, self.num_draft_tokens = topk, steps, num_draft_tokens
        self._roots = roots
        self.level = 0
        self.tokens = roots.clamp(min=0)[:, None]
        self.fed_parents = torch.full_like(self.tokens, -1)
        self.mask = torch.ones_like(self.tokens, dtype=torch.bool)[..., None]
        # Candidates are numbered from 1 in the order they are scored, which is level order; the
        # root is 0. A value of -inf marks one that does not exist.
        self._values = torch.where(roots[:, None] >= 0, 0.0, -torch.inf)  # of the nodes to feed
        self._numbers = torch.zeros_like(self.tokens)  # of the nodes to feed, as candidates
        self._candidates: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, values

    @property
    def done(self) -> bool:
        """Whether every level is scored."""
        return self.level == self.steps

    def score(self, log_probs: Tensor) -> None:
        """Take the draft's view of what follows the nodes just fed.

        Args:
            log_probs: floating ``[bs, n, V]``, normalised log-probabilities; V >= topk. -inf (or
                NaN) is a token that cannot follow and is never proposed.

        Raises:
            RuntimeError: every level is scored already.
            ValueError: another shape, dtype or device.
        """
        if self.done:
            raise RuntimeError(f"all {self.steps} levels are scored; take the tree()")
        bs, nodes = self.tokens.shape
        if log_probs.dim() != 3 or log_probs.shape[:2] != (bs, nodes):
            raise ValueError(f"log_probs must be [{bs}, {nodes}, V], got {list(log_probs.shape)}")
        if log_probs.shape[2] < self.topk or not log_probs.is_floating_point():
            raise ValueError(
                f"log_probs must be floating with V >= topk = {self.topk}, got {log_probs.dtype} "
                f"with V = {log_probs.shape[2]}"
            )
        if log_probs.device != self.tokens.device:
            raise ValueError(f"log_probs is on {log_probs.device}, roots on {self.tokens.device}")
        # NaN would win a top-k; a value above its parent's could be kept without its parent.
        scores = log_probs.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0)
        best = scores.topk(self.topk)
        values = (self._values[..., None] + best.values).view(bs, -1)
        tokens = best.indices.view(bs, -1)
        parents = self._numbers.repeat_interleave(self.topk, dim=1)
        first = 1 + sum(known.shape[1] for known, _, _ in self._candidates)
        self._candidates.append((tokens, parents, values))
        self.level += 1
        if self.done:
            return
        order = values.sort(dim=1, descending=True, stable=True).indices[:, : self.topk]
        within = order // self.topk
        fed = self.mask.shape[2]
        seen = self.mask.gather(1, within[..., None].expand(-1, -1, fed))
        itself = torch.eye(self.topk, dtype=torch.bool, device=order.device).expand(bs, -1, -1)
        self._values = values.gather(1, order)
        self._numbers = first + order
        alive = self._values > -torch.inf
        self.tokens = torch.where(alive, tokens.gather(1, order), 0)
        self.fed_parents = within + (fed - nodes)
        self.mask = torch.cat([seen, itself], dim=2)

    def tree(self) -> DraftTree:
        """The root and the best ``num_draft_tokens - 1`` nodes, parents before their children.

        Of equal values the shallower node is kept, then the one whose parent was better, so a
        node's ancestors are always kept with it. Rows with fewer nodes are padded.

        Raises:
            RuntimeError: levels are left to score.
        """
        if not self.done:
            raise RuntimeError(f"{self.level} of {self.steps} levels are scored; score the rest")
        tokens, parents, values = (
            torch.cat(parts, dim=1) for parts in zip(*self._candidates, strict=True)
        )
        bs, count = tokens.shape
        best = values.sort(dim=1, descending=True, stable=True)
        kept = self.num_draft_tokens - 1
        exists = best.values[:, :kept] > -torch.inf
        # Back into level order, with what does not exist behind the last candidate.
        picked = torch.where(exists, best.indices[:, :kept], count).sort(dim=1).values
        inside = picked < count
        at = picked.clamp(max=count - 1)
        # Where each candidate stands in the tree, by its number; number count + 1 takes padding.
        place = torch.zeros(bs, count + 2, dtype=torch.int64, device=tokens.device)
        node = torch.arange(1, kept + 1, device=tokens.device).expand(bs, -1)
        place.scatter_(1, picked + 1, node)
        above = place.gather(1, parents.gather(1, at))
        roots = self._roots[:, None].clamp(min=-1)
        sizes = (self._roots >= 0).int() + exists.sum(1, dtype=torch.int32)
        return DraftTree(
            tokens=torch.cat([roots, torch.where(inside, tokens.gather(1, at), -1)], dim=1),
            parents=torch.cat(
                [torch.full_like(roots, -1), torch.where(inside, above, -1)], dim=1
            ).int(),
            sizes=sizes,
            steps=self.steps,
        )
