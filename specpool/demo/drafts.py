"""Draft trees and the rules that propose them: prompt lookup (a tree or a chain) and an oracle.

A tree's node 0 is the root, the last token already decided; every other node proposes a token to
follow its parent. No two siblings carry the same token, so at most one path can be accepted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """`tokens[i]` and `parents[i]` of each node; parents come before children, the root's is -1."""

    tokens: list[int]
    parents: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def depths(self) -> list[int]:
        """How far each node is from the root."""
        depths = [0] * len(self)
        for node in range(1, len(self)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def mask(self) -> Tensor:
        """Bool [nodes, nodes], on the CPU: row i is True at i and at its ancestors."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node in range(1, len(self)):
            mask[node] |= mask[self.parents[node]]
        return mask

    def reordered(self, order: Sequence[int]) -> Tree:
        """The same tree with node `order[i]` at place i; `order` keeps parents before children."""
        place = {node: i for i, node in enumerate(order)}
        parents = [-1, *(place[self.parents[node]] for node in order[1:])]
        return Tree([self.tokens[node] for node in order], parents)


# Given all tokens so far, the last of them the root: what might come next.
Draft = Callable[[Sequence[int]], Tree]


def merge_chains(root: int, chains: Iterable[Sequence[int]], nodes: int) -> Tree:
    """A tree of `chains`, their common beginnings shared, cut at `nodes` nodes with the root."""
    tokens, parents = [root], [-1]
    children: dict[tuple[int, int], int] = {}
    for chain in chains:
        node = 0
        for token in chain:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == nodes:
                    break
                child = children[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return Tree(tokens, parents)


def level_order(tree: Tree) -> Tree:
    """The same tree level by level, the order in which EAGLE-style drafters lay their nodes."""
    depths = tree.depths()
    return tree.reordered(sorted(range(len(tree)), key=depths.__getitem__))


def random_order(tree: Tree, rng: random.Random) -> Tree:
    """The same tree in a random order that keeps parents before children."""
    children: list[list[int]] = [[] for _ in range(len(tree))]
    for node in range(1, len(tree)):
        children[tree.parents[node]].append(node)
    order, ready = [], [0]
    while ready:
        node = ready.pop(rng.randrange(len(ready)))
        order.append(node)
        ready += children[node]
    return tree.reordered(order)


class PromptLookup:
    """Proposes what followed the last tokens where they stood before.

    The longest n-grams are looked up first (3, 2, then 1 token) and of equal ones the latest; up
    to `candidates` different continuations of at most `depth` tokens become a tree in level order,
    or a chain where `candidates` is 1. After "Prompt Lookup Decoding" (A. Saxena, 2023), which
    proposes one chain.
    """

    def __init__(self, nodes: int, *, candidates: int = 6, depth: int = 8) -> None:
        self.nodes = nodes
        self.candidates = candidates
        self.depth = depth

    def __call__(self, sequence: Sequence[int]) -> Tree:
        """The tree for `sequence`, whose last token is the root."""
        return level_order(merge_chains(sequence[-1], self._chains(list(sequence)), self.nodes))

    def _chains(self, sequence: list[int]) -> list[list[int]]:
        chains: list[list[int]] = []
        for length in (3, 2, 1):
            tail = sequence[-length:]
            for start in range(len(sequence) - length - 1, -1, -1):
                if sequence[start : start + length] != tail:
                    continue
                chain = sequence[start + length : start + length + self.depth]
                if chain not in chains:
                    chains.append(chain)
                if len(chains) == self.candidates:
                    return chains
        return chains


class Oracle:
    """Knows the true continuation and hides up to 6 tokens of it among 4 decoys, in random order.

    No real drafter does this. It makes most steps accept several nodes from scattered places, so
    that sources and targets of the move overlap as often as can be.
    """

    def __init__(
        self, prompt_length: int, continuation: Sequence[int], vocab: int, nodes: int, seed: int = 0
    ) -> None:
        self.prompt_length = prompt_length
        self.continuation = list(continuation)
        self.vocab = vocab
        self.nodes = nodes
        self._rng = random.Random(seed)

    def __call__(self, sequence: Sequence[int]) -> Tree:
        """The tree for `sequence`, whose last token is the root."""
        rng = self._rng
        known = self.continuation[len(sequence) - self.prompt_length :][: rng.randint(0, 6)]
        chains = [known]
        for _ in range(4):
            decoy = [rng.randrange(self.vocab) for _ in range(rng.randint(1, 4))]
            chains.append(known[: rng.randint(0, len(known))] + decoy)
        rng.shuffle(chains)
        return random_order(merge_chains(sequence[-1], chains, self.nodes), rng)
