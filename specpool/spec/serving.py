"""What a loop keeps of a request, tells of it, and counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from specpool.spec.protocols import Sampling

if TYPE_CHECKING:
    from specpool.spec.judge import Answer

Finish = Literal["eos", "stop", "length", "cancelled", "nan"]


class Event(NamedTuple):
    """What a step brought a request.

    Attributes:
        request: its id.
        tokens: new tokens, in order; an end or stop token is the last of them.
        finished: None while it goes on; ``"eos"`` and ``"stop"`` by token, ``"length"`` at its
            ``max_new``, ``"cancelled"``, or ``"nan"``: the target's logits (or the draft's
            distribution) were NaN or infinite where its next token was to come from.
    """

    request: int
    tokens: list[int]
    finished: Finish | None


@dataclass(eq=False)
class Request:
    """A request. Its row of the table holds every token but the last, the next window's root."""

    id: int
    tokens: list[int]
    prompt_len: int
    max_new: int
    eos: frozenset[int]
    stop: frozenset[int]
    sampling: Sampling
    row: int = -1

    @property
    def left(self) -> int:
        """Tokens that it may still be given."""
        return self.prompt_len + self.max_new - len(self.tokens)

    @property
    def most_slots(self) -> int:
        """Entries that its row has at its longest."""
        return self.prompt_len + self.max_new - 1

    def prompt_chunk(self, begin: int, most: int) -> list[int]:
        """The prompt's tokens to feed from ``begin`` on; its last one is the first root."""
        return self.tokens[begin : min(begin + most, self.prompt_len - 1)]

    def cut(self, new: Sequence[int]) -> tuple[list[int], Finish | None]:
        """What of ``new`` belongs to the answer, and why it ends there."""
        for count, token in enumerate(new, start=1):
            if token in self.eos:
                return list(new[:count]), "eos"
            if token in self.stop:
                return list(new[:count]), "stop"
            if count == self.left:
                return list(new[:count]), "length"
        return list(new), None


@dataclass
class Stats:
    """What a loop did.

    Times are seconds on the host. On a GPU, work is counted where the host waits for it: the one
    read of a step, which is in ``verify_seconds``.

    Attributes:
        tokens: emitted.
        steps: verify steps, each one forward of the target.
        prefill_forwards: forwards of the target for prompts.
        row_steps: requests verified, summed over steps.
        relocating_steps: steps after which some accepted entry lay elsewhere than at its place in
            the window's front, and rows moved.
    """

    tokens: int = 0
    steps: int = 0
    prefill_forwards: int = 0
    row_steps: int = 0
    relocating_steps: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    move_seconds: float = 0.0

    def count(self, answer: Answer, relocates: bool, clock: Sequence[float]) -> None:
        """Add a step; ``clock`` is when it began, had drafted, had verified, had committed."""
        self.tokens += sum(map(len, answer.tokens))
        self.steps += 1
        self.row_steps += len(answer.tokens)
        self.relocating_steps += relocates
        draft, verify, move = (b - a for a, b in itertools.pairwise(clock))
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.move_seconds += move

    @property
    def target_forwards(self) -> int:
        """Forwards of the target, prompts included."""
        return self.steps + self.prefill_forwards

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a request was given by a step, in the mean."""
        return self.tokens / self.row_steps if self.row_steps else 0.0
