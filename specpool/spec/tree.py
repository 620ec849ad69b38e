"""Draft trees: what a drafter proposes for a batch of requests, as tensors on one device.

Node 0 of a row is the root, the last token already decided; every other node proposes a token to
follow its parent's. Parents stand before their children and no two siblings carry one token, so
at most one path of a tree is accepted, and its nodes stand in increasing order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from specpool.spec.layout import TreeLayout
from specpool.spec.tree_checks import check_shapes, check_values, values_are_read

Proposal = Literal["deterministic", "sampled"]


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A batch of draft trees; D nodes a row at most, the root included.

    The tensors must not be changed afterwards: what is derived from them is kept. (So a captured
    graph builds its trees inside the capture, from tensors that its replays refresh.)

    Args:
        tokens: int64 ``[bs, D]``, -1 behind a row's last node.
        parents: int32 ``[bs, D]``, each node's parent as an index into its row; -1 for the root
            and for padding.
        sizes: int32 ``[bs]``, nodes of each row with the root; 0 is a padding row.
        steps: no node is deeper (the root's depth is 0); n-gram trees give D - 1. The verifier's
            ``accept_index`` has ``steps + 1`` columns, whatever the tree's real depth.
        proposal: how children are judged when sampling. ``"deterministic"``: each as a point
            mass, which is right for the top-k or a lookup, and keeps the target's distribution
            whatever the rule. ``"sampled"``: against ``q``, which accepts more, and is right only
            if node n's children were drawn from ``q[:, n]`` without replacement and stand in
            draw order (``sample_children``); which draws are kept may not depend on what they are.
        q: for sampled trees, floating ``[bs, Q, V]`` with Q <= D: each node's draft
            distribution, rows summing to 1. Nodes from Q on have no children, so trees in level
            order need not carry their last level's.

    Raises:
        TypeError: something that is no tensor.
        ValueError: shapes, dtypes or devices that differ, an unknown proposal, a sampled tree
            without ``q`` or another with it. And by value (on the CPU, elsewhere only under
            ``SPECPOOL_CHECK=1``, since it synchronises): a size outside [0, D], a negative
            token, a parent out of range or not before its child (a cycle has one), equal sibling
            tokens, a node deeper than ``steps``, padding that is not -1, a ``q`` that is no
            distribution where children were drawn.

    Example:
        >>> tree = DraftTree.from_chains([7], [[[1, 2], [1, 3], [4]]], num_draft_tokens=6)
        >>> tree.tokens.tolist(), tree.parents.tolist()
        ([[7, 1, 4, 2, 3, -1]], [[-1, 0, 0, 1, 1, -1]])
        >>> tree.depths.tolist(), tree.ancestors[0, 3].tolist()
        ([[0, 1, 1, 2, 2, 0]], [True, True, False, True, False, False])
    """

    tokens: Tensor
    parents: Tensor
    sizes: Tensor
    steps: int
    proposal: Proposal = "deterministic"
    q: Tensor | None = None

    def __post_init__(self) -> None:
        check_shapes(self.tokens, self.parents, self.sizes, self.steps, self.proposal, self.q)
        if values_are_read(self.tokens.device):
            check_values(self.tokens, self.parents, self.sizes, self.steps, self.q)

    @property
    def batch_size(self) -> int:
        """Rows, padding rows included."""
        return self.tokens.shape[0]

    @property
    def num_draft_tokens(self) -> int:
        """D, the nodes a row has room for."""
        return self.tokens.shape[1]

    @cached_property
    def live(self) -> Tensor:
        """Bool ``[bs, D]``: True at nodes, False at padding."""
        node = torch.arange(self.num_draft_tokens, device=self.tokens.device)
        return node < self.sizes[:, None]

    @cached_property
    def ancestors(self) -> Tensor:
        """Bool ``[bs, D, D]``: row i is True at node i and at its ancestors; padding sees nothing.

        It is the mask of tree attention within the window; all of the prefix is seen besides.
        """
        width = self.num_draft_tokens
        seen = torch.eye(width, dtype=torch.bool, device=self.tokens.device) & self.live[..., None]
        jump = self.parents.long()  # each node's 2^k-th ancestor, -1 where there is none
        for _ in range(self.steps.bit_length()):  # until paths of steps + 1 nodes are whole
            at, inside = jump.clamp(min=0), jump >= 0
            beyond = seen.gather(1, at[..., None].expand_as(seen))
            seen = seen | (beyond & inside[..., None])
            jump = torch.where(inside, jump.gather(1, at), -1)
        return seen

    @cached_property
    def depths(self) -> Tensor:
        """Int32 ``[bs, D]``: how far each node is from the root; 0 at padding."""
        return (self.ancestors.sum(-1, dtype=torch.int32) - 1).clamp(min=0)

    def positions(self, prefix_len: Tensor) -> Tensor:
        """Each node's position in its sequence: ``prefix_len + depth``, int64 ``[bs, D]``.

        Args:
            prefix_len: integers ``[bs]``, the tokens before the root. Padding gets it too.

        Raises:
            ValueError: another shape or device.
        """
        if prefix_len.shape != self.sizes.shape or prefix_len.device != self.sizes.device:
            raise ValueError(
                f"prefix_len must be [bs] = {list(self.sizes.shape)} on {self.sizes.device}, got "
                f"{list(prefix_len.shape)} on {prefix_len.device}"
            )
        return prefix_len.long()[:, None] + self.depths

    @classmethod
    def from_topk(
        cls, levels: Sequence[Tensor], layout: TreeLayout, q: Tensor | None = None
    ) -> DraftTree:
        """Trees of one fixed shape, as EAGLE-1 and SpecInfer draft them. No value is read.

        Args:
            levels: int64 tokens of each level in the layout's order: ``[bs, 1]``, the roots (-1
                makes a padding row), then ``[bs, layout.level_sizes[l]]`` (see
                ``TreeLayout.pick``).
            layout: the shape, on the tokens' device.
            q: ``[bs, Q, V]`` if children were drawn from it (see the class), else None: top-k.

        Raises:
            ValueError: levels that do not fit the layout; as the class.
        """
        bs = levels[0].shape[0] if levels else 0
        given = [list(level.shape) for level in levels]
        if given != [[bs, size] for size in layout.level_sizes]:
            raise ValueError(
                f"levels must be [bs, n] with n = {list(layout.level_sizes)}, got shapes {given}"
            )
        if levels[0].device != layout.parents.device:
            raise ValueError(
                f"levels are on {levels[0].device}, the layout on {layout.parents.device}"
            )
        live = levels[0] >= 0
        tokens = torch.where(live, torch.cat(list(levels), dim=1), -1)
        parents = torch.where(live, layout.parents, -1)
        sizes = torch.where(live[:, 0], len(layout), 0).int()
        return cls(
            tokens, parents, sizes, layout.steps, "deterministic" if q is None else "sampled", q
        )

    @classmethod
    def from_chains(
        cls,
        roots: Sequence[int],
        chains: Sequence[Sequence[Sequence[int]]],
        num_draft_tokens: int,
        *,
        steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> DraftTree:
        """Trees of candidate continuations, common beginnings merged, in level order.

        Args:
            roots: each request's last decided token; -1 makes a padding row.
            chains: for each request its candidates, the best first; each a list of tokens. When
                nodes run out, the first chains have theirs: a further chain takes none away.
            num_draft_tokens: D.
            steps: longer chains are cut; None is D - 1.
            device: where the tensors go.

        Raises:
            ValueError: as many roots as lists of chains are needed; ``num_draft_tokens`` < 1; as
                the class.
        """
        if len(roots) != len(chains):
            raise ValueError(f"{len(roots)} roots and chains of {len(chains)} requests are given")
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}; the root alone needs 1")
        steps = num_draft_tokens - 1 if steps is None else steps
        tokens, parents, sizes = [], [], []
        for root, candidates in zip(roots, chains, strict=True):
            row = [] if root == -1 else _merge(root, candidates, num_draft_tokens, steps)
            padding = [-1] * (num_draft_tokens - len(row))
            tokens.append([token for token, _ in row] + padding)
            parents.append([parent for _, parent in row] + padding)
            sizes.append(len(row))
        shape = (len(roots), num_draft_tokens)
        return cls(
            torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
            torch.tensor(parents, dtype=torch.int32, device=device).view(shape),
            torch.tensor(sizes, dtype=torch.int32, device=device),
            steps,
        )


def _merge(
    root: int, chains: Sequence[Sequence[int]], nodes: int, steps: int
) -> list[tuple[int, int]]:
    """(token, parent) of each node of the chains' trie in level order, at most ``nodes``."""
    trie = [(root, -1, 0)]  # token, parent, depth, in the order of insertion
    children: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        for depth, token in enumerate(chain[:steps], start=1):
            child = children.get((node, token))
            if child is None:
                if len(trie) == nodes:
                    break
                child = children[node, token] = len(trie)
                trie.append((token, node, depth))
            node = child
    order = sorted(range(len(trie)), key=lambda node: trie[node][2])  # stable: parents stay first
    place = {node: at for at, node in enumerate(order)} | {-1: -1}
    return [(trie[node][0], place[trie[node][1]]) for node in order]
