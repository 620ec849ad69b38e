"""A drafter that needs no model: prompt lookup in a trie of n-grams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from specpool.spec.protocols import DraftBatch
from specpool.spec.tree import DraftTree

_Node = dict[int, Any]  # of _Node: the tokens that followed, the latest one last


class PromptLookup:
    """Proposes what followed the last tokens where they stood before, in prompt or answer.

    The longest n-grams are looked up first and of equal ones the latest; up to ``candidates``
    continuations that differ become a tree in level order, or a chain where ``candidates`` is 1.
    After "Prompt Lookup Decoding" (A. Saxena, 2023), which proposes one chain. A new token costs
    ``ngram + depth`` entries of a request's trie, whatever the context's length.

    Args:
        num_draft_tokens: nodes of a tree at most, the root included.
        candidates: continuations proposed at most.
        depth: tokens of a continuation at most; None is ``num_draft_tokens - 1``, at most 8.
        ngram: tokens of the longest n-gram looked up.

    Raises:
        ValueError: ``num_draft_tokens``, ``candidates`` or ``ngram`` below 1, ``depth`` below 0.
    """

    pools = ()

    def __init__(
        self,
        num_draft_tokens: int,
        *,
        candidates: int = 6,
        depth: int | None = None,
        ngram: int = 3,
    ) -> None:
        depth = min(num_draft_tokens - 1, 8) if depth is None else depth
        if min(num_draft_tokens, candidates, ngram) < 1 or depth < 0:
            raise ValueError(
                "num_draft_tokens, candidates and ngram must be at least 1 and depth at least 0, "
                f"got {num_draft_tokens}, {candidates}, {ngram} and {depth}"
            )
        self.window = num_draft_tokens
        self.candidates, self.depth, self.ngram = candidates, depth, ngram
        self._tries: dict[int, _Trie] = {}

    def draft(self, batch: DraftBatch) -> DraftTree:
        """One tree a request; see ``Drafter``."""
        chains = []
        for request, context, room in zip(batch.requests, batch.contexts, batch.room, strict=True):
            trie = self._tries.setdefault(request, _Trie(self.ngram + self.depth))
            trie.extend(context)
            chains.append(self._chains(trie, min(room, self.depth)))
        return DraftTree.from_chains(
            batch.roots, chains, self.window, steps=self.depth, device=batch.window.device
        )

    def leave(self, request: int) -> None:
        """Drop the request's trie."""
        self._tries.pop(request, None)

    def _chains(self, trie: _Trie, depth: int) -> list[list[int]]:
        chains: list[list[int]] = []
        for length in range(self.ngram, 0, -1):
            for chain in trie.continuations(length, depth):
                if len(chains) == self.candidates:
                    return chains
                if chain not in chains:
                    chains.append(chain)
        return chains


class _Trie:
    """All runs of up to ``span`` tokens of one request's context.

    ``_ends[k]`` is the node of the last k tokens; its children are what followed the same k tokens
    before, and the next token extends every one of them. So nothing is ever searched for.
    """

    def __init__(self, span: int) -> None:
        self._span = span
        self._seen = 0
        self._ends: list[_Node] = [{}]

    def extend(self, context: Sequence[int]) -> None:
        for token in context[self._seen :]:
            ends = [self._ends[0]]
            for node in self._ends[: self._span]:
                child = node.pop(token, {})
                node[token] = child  # put back behind the others: the latest is the last
                ends.append(child)
            self._ends = ends
        self._seen = len(context)

    def continuations(self, length: int, depth: int) -> Iterator[list[int]]:
        """What followed the last ``length`` tokens: a chain for each first token, latest first."""
        if length >= len(self._ends) or depth < 1:
            return
        for token, node in reversed(self._ends[length].items()):
            chain = [token]
            while node and len(chain) < depth:
                following = next(reversed(node))
                chain.append(following)
                node = node[following]
            yield chain
