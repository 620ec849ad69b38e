"""Plain greedy decoding, and greedy decoding by draft and verify, over the same model.

They share the forward and nothing else, so that one can be held against the other. Draft and
verify writes a whole tree into a window of slots, keeps the path that the model agrees with,
relocates its entries to the front of the window with one `move_accepted`, and frees the rest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specpool.demo.drafts import Draft, Tree
from specpool.demo.llama import Attention, Llama, Step

OnTokens = Callable[[list[int]], None]


class PoolFullError(RuntimeError):
    """More slots were asked for than the pool has free."""


class FreeSlots:
    """Hands out the slots 1..size of a pool (0 is the dummy slot), in a random order.

    Random, because a busy pool's free slots are scattered, and a fault that needs neighbouring
    slots to stay hidden should not stay hidden.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._free = list(range(1, size + 1))
        random.Random(seed).shuffle(self._free)

    def __len__(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` slots; raises PoolFullError when fewer are free, and then takes none."""
        if count > len(self._free):
            raise PoolFullError(
                f"{count} slots asked for, {len(self._free)} of {self.size} are free: "
                "give the pool a larger size, or a shorter prompt or answer"
            )
        taken = self._free[:count]
        del self._free[:count]
        return taken

    def give(self, slots: Sequence[int]) -> None:
        """Take `slots` back."""
        self._free += slots


@dataclass(frozen=True)
class Greedy:
    """A plain answer: its tokens and, for each, how far the best logit was above the second."""

    tokens: list[int]
    margins: list[float]


@dataclass
class Stats:
    """What draft and verify did. Times are seconds, after the prompt's own forward."""

    tokens: int = 0
    steps: int = 0
    relocating_steps: int = 0
    overlapping_steps: int = 0
    launches: int = 0
    rows_moved: int = 0
    model_seconds: float = 0.0
    move_seconds: float = 0.0


@dataclass(frozen=True)
class Speculative:
    """An answer by draft and verify.

    `loc[i]` is the slot that holds the KV of `stored_tokens[i]`: the prompt and all that was
    accepted, which in the last step may go past the answer's end.
    """

    tokens: list[int]
    stored_tokens: list[int]
    loc: list[int]
    stats: Stats


def greedy(
    model: Llama,
    attention: Attention,
    free: FreeSlots,
    prompt: Sequence[int],
    max_new: int,
    on_tokens: OnTokens = lambda tokens: None,
) -> Greedy:
    """Decode up to `max_new` tokens (or to the end token, which is included), one at a time.

    Raises ValueError for an empty prompt or `max_new` below 1, PoolFullError when the pool is
    too small.
    """
    loc = _prefill(model, attention, free, prompt, max_new)
    tokens: list[int] = []
    margins: list[float] = []
    last = prompt[-1]
    while len(tokens) < max_new and not (tokens and last == model.config.eos):
        new = free.take(1)
        logits = model.forward(Step.run([last], loc, new, model.device), attention)[0]
        loc += new
        last = int(logits.argmax())
        first, second = logits.topk(2).values.tolist()
        tokens.append(last)
        margins.append(first - second)
        on_tokens([last])
    return Greedy(tokens, margins)


def speculate(
    model: Llama,
    attention: Attention,
    free: FreeSlots,
    prompt: Sequence[int],
    max_new: int,
    draft: Draft,
    on_tokens: OnTokens = lambda tokens: None,
) -> Speculative:
    """Decode as `greedy` does, by draft and verify; `on_tokens` gets each step's new tokens.

    Raises as `greedy` does.
    """
    loc = _prefill(model, attention, free, prompt, max_new)
    sequence, answer = list(prompt), len(prompt)
    stats = Stats()
    mover = attention.pool.mover
    rows_before = mover.rows_moved
    while stats.tokens < max_new and not (stats.tokens and sequence[-1] == model.config.eos):
        tree = draft(sequence)
        window = free.take(len(tree))
        began = _now(model.device)
        logits = model.forward(Step.tree(tree, loc, window, model.device), attention)
        best = logits.argmax(-1).tolist()
        stats.model_seconds += _now(model.device) - began

        path = accepted_path(tree, best)
        launches, began = mover.launches, _now(model.device)
        _relocate(attention, window, path, model.device)
        stats.move_seconds += _now(model.device) - began
        _count(stats, path, mover.launches - launches)

        loc += window[: len(path)]
        free.give(window[len(path) :])
        new = [*(tree.tokens[node] for node in path[1:]), best[path[-1]]]
        sequence += new
        shown = _until_end(new, max_new - stats.tokens, model.config.eos)
        stats.tokens += len(shown)
        on_tokens(shown)
        if len(shown) < len(new):
            break
    stats.rows_moved = mover.rows_moved - rows_before
    tokens = sequence[answer : answer + stats.tokens]
    return Speculative(tokens, sequence[: len(loc)], loc, stats)


def accepted_path(tree: Tree, best: Sequence[int]) -> list[int]:
    """The nodes from the root down that the model itself would have chosen, the root first.

    `best[i]` is the model's choice after node i. Siblings differ in their tokens, so the path is
    the only one.
    """
    path = [0]
    for node in range(1, len(tree)):  # parents come first, so one pass meets the path in order
        if tree.parents[node] == path[-1] and tree.tokens[node] == best[path[-1]]:
            path.append(node)
    return path


def kv_errors(
    model: Llama, attention: Attention, plain: Attention, result: Speculative
) -> dict[str, float]:
    """How far the pool's accepted KV is from one plain forward of the same tokens.

    `plain` is an attention of the same kind with an unused pool. Returns the largest absolute
    difference for each kind of buffer; NaN where either holds one.
    """
    free = FreeSlots(len(result.loc))
    loc = free.take(len(result.loc))
    model.forward(Step.run(result.stored_tokens, [], loc, model.device), plain)
    expected = plain.buffers()
    return {
        # Torch's maximum keeps a NaN, Python's may pass over it.
        kind: float(
            torch.stack(
                [
                    (found[result.loc] - wanted[loc]).abs().max()
                    for found, wanted in zip(layers, expected[kind], strict=True)
                ]
            ).max()
        )
        for kind, layers in attention.buffers().items()
    }


def _prefill(
    model: Llama, attention: Attention, free: FreeSlots, prompt: Sequence[int], max_new: int
) -> list[int]:
    """Store all of the prompt but its last token, which the first step decodes from."""
    if not prompt:
        raise ValueError("the prompt holds no token; give at least one")
    if max_new < 1:
        raise ValueError(f"max_new is {max_new}; it must be at least 1")
    loc = free.take(len(prompt) - 1)
    if loc:
        model.forward(Step.run(prompt[:-1], [], loc, model.device), attention)
    return loc


def _relocate(
    attention: Attention, window: list[int], path: list[int], device: torch.device
) -> None:
    """Bring the accepted entries to the front of the window: one call, all buffers."""
    accept = torch.full((1, len(window)), -1, dtype=torch.int32)
    accept[0, : len(path)] = torch.tensor(path, dtype=torch.int32)
    attention.pool.move_accepted(
        torch.tensor([window], dtype=torch.int64, device=device),
        accept.to(device),
        torch.tensor([len(path)], dtype=torch.int32, device=device),
    )


def _count(stats: Stats, path: list[int], launches: int) -> None:
    moved = [(source, target) for target, source in enumerate(path) if source != target]
    stats.steps += 1
    if moved:
        sources, targets = zip(*moved, strict=True)
        stats.relocating_steps += 1
        stats.overlapping_steps += not set(sources).isdisjoint(targets)
        stats.launches += launches


def _until_end(tokens: list[int], room: int, eos: int | None) -> list[int]:
    """`tokens` cut to `room` and after the first end token."""
    cut = tokens[:room]
    return cut[: cut.index(eos) + 1] if eos in cut else cut


def _now(device: torch.device) -> float:
    """The time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
