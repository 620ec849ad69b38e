"""The demo's own drafters: an oracle that knows the answers, and the model that drafts for itself.

What a user would draft with, prompt lookup and draft models, is the library's (`specpool.spec`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.demo.weights import Weights
from specpool.spec import DraftBatch, DraftModel, DraftTree, Target

Tokens = Sequence[int]

MODEL_STEPS, MODEL_TOPK = 4, 3
MODEL_FED = 1 + (MODEL_STEPS - 1) * MODEL_TOPK
"""Slots of a window that a draft model needs, however few nodes its tree keeps."""


class Oracle:
    """Knows each prompt's answer and hides up to 6 tokens of it among 4 decoys, in random order.

    No real drafter does this. It makes most steps accept several nodes from scattered places, so
    that sources and targets of the move overlap as often as can be. `answers` are pairs of a
    prompt and what follows it.
    """

    pools = ()

    def __init__(
        self, answers: Sequence[tuple[Tokens, Tokens]], window: int, vocab: int, seed: int = 0
    ) -> None:
        self.answers = answers
        self.window = window
        self.vocab = vocab
        self._rng = random.Random(seed)

    def draft(self, batch: DraftBatch) -> DraftTree:
        """One tree a request; see `Drafter`."""
        chains = [
            self.chains(context, room)
            for context, room in zip(batch.contexts, batch.room, strict=True)
        ]
        tree = DraftTree.from_chains(batch.roots, chains, self.window)
        return random_order(tree, self._rng, batch.window.device)

    def chains(self, context: Tokens, room: int) -> list[list[int]]:
        """Candidates to follow `context`, none longer than `room`."""
        rng = self._rng
        known = list(self.known(context))[: rng.randint(0, 6)]
        chains = [known]
        for _ in range(4):
            decoy = [rng.randrange(self.vocab) for _ in range(rng.randint(1, 4))]
            chains.append(known[: rng.randint(0, len(known))] + decoy)
        rng.shuffle(chains)
        return [chain[:room] for chain in chains]

    def known(self, context: Tokens) -> Tokens:
        """What follows; a text gone wrong is drafted for by place, since its prompt is known."""
        begun = list(context)
        prompt, answer = max(
            (pair for pair in self.answers if list(pair[0]) == begun[: len(pair[0])]),
            key=lambda pair: len(pair[0]),
        )
        return answer[len(begun) - len(prompt) :]

    def leave(self, request: int) -> None:
        """Nothing is kept of a request."""


def random_order(tree: DraftTree, rng: random.Random, device: torch.device) -> DraftTree:
    """The same trees on `device`, nodes in a random order that keeps parents before children."""
    tokens, parents = torch.full_like(tree.tokens, -1), torch.full_like(tree.parents, -1)
    for r, size in enumerate(tree.sizes.tolist()):
        above = tree.parents[r].tolist()
        place: dict[int, int] = {}
        ready = [0][:size]
        while ready:
            node = ready.pop(rng.randrange(len(ready)))
            tokens[r, len(place)] = tree.tokens[r, node]
            parents[r, len(place)] = place.get(above[node], -1)
            place[node] = len(place)
            ready += [child for child in range(1, size) if above[child] == node]
    return DraftTree(tokens.to(device), parents.to(device), tree.sizes.to(device), tree.steps)


def without_a_sixth(weights: Weights) -> Weights:
    """The same model without a sixth of its layers, from the middle on: SmolLM2's 15 to 19.

    There is no smaller model with its vocabulary at hand, and it was not trained to skip layers.
    Of what was tried this agrees best, with about 6 of 10 of its tokens (the first 25 layers: 4).
    """
    layers = weights.layers
    middle = len(layers) // 2
    kept = layers[:middle] + layers[middle + len(layers) // 6 :]
    return replace(weights, config=replace(weights.config, layers=len(kept)), layers=kept)


def model_drafter(model: Target, nodes: int, *, chain: bool, sampled: bool) -> DraftModel:
    """Drafts of `model` of up to `nodes` nodes; a chain's tokens are drawn where `sampled`."""
    topk = 1 if chain else MODEL_TOPK
    most = 1 + topk + (MODEL_STEPS - 1) * topk**2
    return DraftModel(
        model,
        steps=MODEL_STEPS,
        topk=topk,
        num_draft_tokens=min(nodes, most),
        sampled=sampled and chain,
    )
