"""What a run of the demo found: figures for each answer, their sum, a table and a verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from specpool.demo.serve import Figures


@dataclass(frozen=True)
class Answer:
    """One answer by draft and verify, held against plain greedy decoding.

    `first_difference` is the place of the first token that differs from the plain answer, None
    where all are equal; `smallest_margin` is how near the plain answer came to a tie between two
    tokens (logits), None where nothing was compared; `kv_errors` is the largest absolute error of
    each kind of buffer.
    """

    name: str
    text: str
    tokens: int
    steps: int
    first_difference: int | None
    smallest_margin: float | None
    kv_errors: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All answers of one run, and the figures of the loop that gave them.

    `plain_seconds` is what plain greedy decoding took, one question after another, None where the
    answers were sampled and nothing was compared.
    """

    pool: str
    tree: str
    draft: str
    nodes: int
    batch: int
    page_size: int
    temperature: float
    device: str
    dtype: str
    kv_tolerance: float
    figures: Figures
    plain_seconds: float | None
    answers: list[Answer]

    @property
    def equal_to_greedy(self) -> bool | None:
        """Whether every token is plain greedy decoding's; None where they were sampled."""
        if self.plain_seconds is None:
            return None
        return all(answer.first_difference is None for answer in self.answers)

    @property
    def kv_error(self) -> float:
        """The largest KV error of any answer, in any kind of buffer; NaN if any is."""
        errors = [error for answer in self.answers for error in answer.kv_errors.values()]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def kv_equal(self) -> bool:
        """Whether the accepted KV is that of one plain forward, but for rounding."""
        return self.kv_error <= self.kv_tolerance

    @property
    def lossless(self) -> bool:
        """Whether KV, and text where it was compared, are what they should be."""
        return self.equal_to_greedy is not False and self.kv_equal

    @property
    def launches_per_relocating_step(self) -> float | None:
        """Of the target's pool; None where no step relocated."""
        steps = self.figures.relocating_steps
        return self.figures.launches / steps if steps else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        mine = asdict(self)
        figures = mine.pop("figures")
        return {
            **mine,
            **figures,
            "answers": [_answer(answer) for answer in self.answers],
            "launches_per_relocating_step": self.launches_per_relocating_step,
            "equal_to_greedy": self.equal_to_greedy,
            "kv_error": _number(self.kv_error),
            "kv_equal": self.kv_equal,
        }

    def table(self) -> str:
        """The figures for a reader, the verdict last."""
        found, launches = self.figures, self.launches_per_relocating_step
        plain = self.plain_seconds
        rows = [
            ("pool", f"{self.pool} ({self.dtype}), pages of {self.page_size}, {self.device}"),
            ("drafts", f"{self._drafts()}, {self.batch} at once"),
            ("tokens", f"{found.tokens}"),
            ("target forwards", f"{found.target_forwards}"),
            ("  and for prompts", f"{found.prompt_forwards}"),
            ("tokens a step", f"{found.tokens_per_step:.2f}"),
            ("steps that relocated", f"{found.relocating_steps}"),
            ("rows moved", f"{found.rows_moved}"),
            ("launches a relocating step", "-" if launches is None else f"{launches:g}"),
            ("time in the move", f"{found.move_seconds * 1e3:.1f} ms"),
            ("time in the model", f"{found.model_seconds * 1e3:.1f} ms"),
            ("time in drafts", f"{found.draft_seconds * 1e3:.1f} ms"),
            ("tokens a second", f"{found.tokens / found.seconds:.1f}"),
            ("  plain greedy decoding", "-" if plain is None else f"{found.tokens / plain:.1f}"),
            (
                "KV equal to one plain forward",
                f"{_yes(self.kv_equal)} (largest error {self.kv_error:.1e})",
            ),
        ]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}" for label, value in rows]
        equal = self.equal_to_greedy
        verdict = "sampled; not compared" if equal is None else _yes(equal)
        return "\n".join([*lines, *self._faults(), f"equal to plain greedy decoding: {verdict}"])

    def _drafts(self) -> str:
        if self.tree == "oracle":
            return "oracle"
        return f"{self.draft}, {'chains' if self.tree == 'chain' else 'trees'}"

    def _faults(self) -> list[str]:
        return [
            f"{answer.name}: token {answer.first_difference} differs; the smallest gap between the "
            f"two best tokens was {answer.smallest_margin:.1e}"
            for answer in self.answers
            if answer.first_difference is not None
        ]


def _answer(answer: Answer) -> dict[str, Any]:
    errors = {kind: _number(error) for kind, error in answer.kv_errors.items()}
    return {**asdict(answer), "kv_errors": errors}


def _number(value: float) -> float | None:
    """`value` for JSON, which has no NaN."""
    return None if math.isnan(value) else value


def _yes(value: bool) -> str:
    return "yes" if value else "no"
