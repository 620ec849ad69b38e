"""Fixed tree shapes: the same tree for every request and step, known before anything is drafted.

EAGLE-1 and Medusa search such a shape offline; SpecInfer writes one as an expansion
configuration. Dynamic shapes are ``TreeExpansion``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TreeLayout:
    """The shape of a draft tree: the parent of each node, in level order.

    A node that is its parent's j-th child (in node order) takes its parent's j-th candidate. The
    draft's loop feeds a level, takes ``width(level)`` candidates of each node (top-k, or
    ``sample_children``), and picks the next level:

        levels = [roots[:, None]]                                # int64 [bs, 1]
        for level in range(layout.steps):
            logits = draft(levels[-1])                           # [bs, n, V]
            best = logits.topk(layout.width(level)).indices      # [bs, n, width]
            levels.append(layout.pick(level, best))
        tree = DraftTree.from_topk(levels, layout)

    Args:
        parents: the root's is -1; depths do not decrease along the list.
        device: where the trees are built.

    Attributes:
        parents: int32 ``[D]`` on the device.
        level_sizes: nodes of each level; the first is 1, the root.
        steps: the deepest level.

    Raises:
        ValueError: parents that are no tree in level order.

    Example:
        >>> TreeLayout([-1, 0, 0, 1]).level_sizes
        (1, 2, 1)
        >>> TreeLayout.expansion([2, 1]).parents.tolist()  # two chains of two
        [-1, 0, 0, 1, 2]
    """

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu") -> None:
        if not parents or parents[0] != -1:
            raise ValueError(f"a layout's node 0 is the root, with parent -1; got {list(parents)}")
        depths = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents[{node}] is {parent}; a parent stands before its child, in [0, {node})"
                )
            depths.append(depths[parent] + 1)
            if depths[node] < depths[node - 1]:
                raise ValueError(
                    f"node {node} has depth {depths[node]} behind depth {depths[node - 1]}; a "
                    "layout stands in level order"
                )
        self.steps = depths[-1]
        self.level_sizes = tuple(depths.count(level) for level in range(self.steps + 1))
        self.parents = torch.tensor(parents, dtype=torch.int32, device=device)
        self._picks: list[tuple[Tensor, Tensor]] = []
        self._widths: list[int] = []
        for level in range(self.steps):
            first = depths.index(level)
            nodes = [node for node, depth in enumerate(depths) if depth == level + 1]
            ranks = [list(parents[:node]).count(parents[node]) for node in nodes]
            within = torch.tensor([parents[node] - first for node in nodes], device=device)
            self._picks.append((within, torch.tensor(ranks, device=device)))
            self._widths.append(max(ranks) + 1)

    @classmethod
    def expansion(cls, widths: Sequence[int], device: torch.device | str = "cpu") -> TreeLayout:
        """Every node of level l has ``widths[l]`` children (SpecInfer's expansion configuration).

        ``[topk] + [1] * (steps - 1)`` are topk chains, ``[topk] * steps`` the full tree.

        Raises:
            ValueError: a width below 1.
        """
        if any(width < 1 for width in widths):
            raise ValueError(f"a level's nodes have at least 1 child each, got {list(widths)}")
        parents, level = [-1], [0]
        for width in widths:
            following = [node for node in level for _ in range(width)]
            level = list(range(len(parents), len(parents) + len(following)))
            parents += following
        return cls(parents, device)

    def __len__(self) -> int:
        return self.parents.shape[0]

    def width(self, level: int) -> int:
        """How many candidates the level's nodes need at most."""
        return self._widths[level]

    def pick(self, level: int, candidates: Tensor) -> Tensor:
        """The tokens of the level below.

        Args:
            level: the level that was fed, from 0 to steps - 1.
            candidates: ``[bs, level_sizes[level], k]`` tokens, the best (or first drawn) first,
                with k >= ``width(level)``; different ones of a node.

        Returns:
            ``[bs, level_sizes[level + 1]]`` of the candidates' dtype.

        Raises:
            ValueError: another shape.
        """
        size, width = self.level_sizes[level], self.width(level)
        if candidates.dim() != 3 or candidates.shape[1] != size or candidates.shape[2] < width:
            raise ValueError(
                f"candidates of level {level} must be [bs, {size}, k] with k >= {width}, got "
                f"{list(candidates.shape)}"
            )
        within, ranks = self._picks[level]
        return candidates[:, within, ranks]
