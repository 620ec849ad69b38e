"""Plain greedy decoding and one plain forward: what draft and verify is held against.

They share the model's forward with it and nothing else: no loop, no allocator, no verifier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.demo.llama import Attention, Llama, Step


@dataclass(frozen=True)
class Greedy:
    """A plain answer: its tokens and, for each, how far the best logit was above the second."""

    tokens: list[int]
    margins: list[float]


def shuffled_slots(size: int, seed: int = 0) -> list[int]:
    """The slots 1..size of a pool (0 is the dummy slot) in a random order.

    Random, because a busy pool's free slots are scattered, and a fault that needs neighbouring
    slots to stay hidden should not stay hidden.
    """
    slots = list(range(1, size + 1))
    random.Random(seed).shuffle(slots)
    return slots


def greedy(
    model: Llama,
    attention: Attention,
    slots: Sequence[int],
    prompt: Sequence[int],
    max_new: int,
    on_token: Callable[[], None] = lambda: None,
) -> Greedy:
    """Decode up to `max_new` tokens (or to the end token, which is included), one at a time.

    Token after token goes to `slots`, of which there are at least `len(prompt) + max_new - 1`.
    Raises ValueError for an empty prompt, `max_new` below 1 or too few slots.
    """
    if not prompt:
        raise ValueError("the prompt holds no token; give at least one")
    if max_new < 1:
        raise ValueError(f"max_new is {max_new}; it must be at least 1")
    if len(slots) < len(prompt) + max_new - 1:
        raise ValueError(
            f"{len(slots)} slots are too few for a prompt of {len(prompt)} and {max_new} new tokens"
        )
    count, last = len(prompt) - 1, prompt[-1]
    if count:
        model.forward(Step.run(prompt[:-1], [], slots[:count], model.device), attention)
    tokens: list[int] = []
    margins: list[float] = []
    while len(tokens) < max_new and not (tokens and last == model.config.eos):
        step = Step.run([last], slots[:count], slots[count : count + 1], model.device)
        logits = model.forward(step, attention)[0]
        count += 1
        last = int(logits.argmax())
        first, second = logits.topk(2).values.tolist()
        tokens.append(last)
        margins.append(first - second)
        on_token()
    return Greedy(tokens, margins)


def kv_errors(
    model: Llama, plain: Attention, tokens: Sequence[int], kept: Mapping[str, Sequence[Tensor]]
) -> dict[str, float]:
    """How far `kept`, the KV of `tokens`, is from one plain forward of the same tokens.

    `kept` has, for each kind of `plain.buffers()`, each layer's rows in the order of the tokens;
    `plain` is an attention of the same kind with an unused pool. Returns the largest absolute
    difference for each kind of buffer; NaN where either holds one.
    """
    loc = shuffled_slots(len(tokens))
    model.forward(Step.run(tokens, [], loc, model.device), plain)
    expected = plain.buffers()
    return {
        # Torch's maximum keeps a NaN, Python's may pass over it.
        kind: float(
            torch.stack(
                [
                    (found - wanted[loc]).abs().max()
                    for found, wanted in zip(layers, expected[kind], strict=True)
                ]
            ).max()
        )
        for kind, layers in kept.items()
    }
