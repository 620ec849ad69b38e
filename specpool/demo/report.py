"""What a run of the demo found: figures for each answer, their sum, a table and a verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from specpool.demo.generate import Stats


@dataclass(frozen=True)
class Answer:
    """One answer by draft and verify, held against plain greedy decoding.

    `first_difference` is the place of the first token that differs from the plain answer, None
    where all are equal; `smallest_margin` is how near the plain answer came to a tie between two
    tokens (logits); `kv_errors` is the largest absolute error of each kind of buffer. Times are
    seconds and include the prompt's own forward.
    """

    name: str
    text: str
    stats: Stats
    seconds: float
    plain_seconds: float
    first_difference: int | None
    smallest_margin: float
    kv_errors: dict[str, float]


@dataclass(frozen=True)
class Report:
    """All answers of one run; sums are over them."""

    pool: str
    tree: str
    nodes: int
    device: str
    dtype: str
    kv_tolerance: float
    answers: list[Answer]

    @property
    def equal_to_greedy(self) -> bool:
        """Whether every token of every answer is plain greedy decoding's."""
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
        """Whether both text and KV are what they should be."""
        return self.equal_to_greedy and self.kv_equal

    def total(self) -> Stats:
        """The answers' figures, added up."""
        each = [asdict(answer.stats) for answer in self.answers]
        return Stats(**{name: sum(stats[name] for stats in each) for name in each[0]})

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        stats = self.total()
        sums = asdict(stats)
        del sums["steps"]  # which are the target forwards
        return {
            **asdict(self),
            **sums,
            "answers": [_answer(answer) for answer in self.answers],
            "target_forwards": stats.steps,
            "tokens_per_step": stats.tokens / stats.steps,
            "launches_per_relocating_step": _launches(stats),
            "equal_to_greedy": self.equal_to_greedy,
            "kv_error": _number(self.kv_error),
            "kv_equal": self.kv_equal,
        }

    def table(self) -> str:
        """The figures for a reader, the verdict last."""
        stats = self.total()
        seconds = sum(answer.seconds for answer in self.answers)
        plain = sum(answer.plain_seconds for answer in self.answers)
        launches = _launches(stats)
        rows = [
            ("pool, drafts, device", f"{self.pool} ({self.dtype}), {self.tree}, {self.device}"),
            ("tokens", f"{stats.tokens}"),
            ("target forwards", f"{stats.steps}"),
            ("tokens a step", f"{stats.tokens / stats.steps:.2f}"),
            ("steps that relocated", f"{stats.relocating_steps}"),
            ("  of them, sources and targets overlap", f"{stats.overlapping_steps}"),
            ("rows moved", f"{stats.rows_moved}"),
            ("launches a relocating step", "-" if launches is None else f"{launches:g}"),
            ("time in the move", f"{stats.move_seconds * 1e3:.1f} ms"),
            ("time in the model", f"{stats.model_seconds * 1e3:.1f} ms"),
            ("tokens a second", f"{stats.tokens / seconds:.1f}"),
            ("  plain greedy decoding", f"{stats.tokens / plain:.1f}"),
            (
                "KV equal to one plain forward",
                f"{_yes(self.kv_equal)} (largest error {self.kv_error:.1e})",
            ),
        ]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {value}" for label, value in rows]
        verdict = f"equal to plain greedy decoding: {_yes(self.equal_to_greedy)}"
        return "\n".join([*lines, *self._faults(), verdict])

    def _faults(self) -> list[str]:
        return [
            f"{answer.name}: token {answer.first_difference} differs; the smallest gap between the "
            f"two best tokens was {answer.smallest_margin:.1e}"
            for answer in self.answers
            if answer.first_difference is not None
        ]


def _launches(stats: Stats) -> float | None:
    return stats.launches / stats.relocating_steps if stats.relocating_steps else None


def _answer(answer: Answer) -> dict[str, Any]:
    errors = {kind: _number(error) for kind, error in answer.kv_errors.items()}
    return {**asdict(answer), "kv_errors": errors}


def _number(value: float) -> float | None:
    """`value` for JSON, which has no NaN."""
    return None if math.isnan(value) else value


def _yes(value: bool) -> str:
    return "yes" if value else "no"
