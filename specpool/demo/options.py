"""What the demo can be asked to do, and what it refuses before anything is read or built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specpool.demo.llama import DenseAttention
from specpool.demo.minimax import BlockSparseAttention

ATTENTIONS: dict[str, type[DenseAttention] | type[BlockSparseAttention]] = {
    "minimax": BlockSparseAttention,
    "mha": DenseAttention,
}
TREES = ("lookup", "chain", "oracle")
DRAFTS = ("lookup", "model")
PAGE_SIZES = (1, 16, 64, 128)


@dataclass(frozen=True)
class Options:
    """What to run; see `specpool demo --help`. `prompts` maps a name to a question."""

    pool: str = "minimax"
    prompts: Mapping[str, str] | None = None
    max_new: int = 48
    tree: str = "lookup"
    draft: str = "lookup"
    nodes: int = 24
    batch: int = 1
    page_size: int = 1
    temperature: float = 0.0
    device: str = "cpu"
    model: Path | None = None

    def check(self) -> None:
        """Raise ValueError for options that make no sense, by themselves or together."""
        for name, value, known in (
            ("--pool", self.pool, ATTENTIONS),
            ("--tree", self.tree, TREES),
            ("--draft", self.draft, DRAFTS),
            ("--page-size", self.page_size, PAGE_SIZES),
        ):
            if value not in known:
                listed = ", ".join(map(str, known))
                raise ValueError(f"{name} is {value!r}; it must be one of {listed}")
        for name, count in (
            ("--max-new", self.max_new),
            ("--nodes", self.nodes),
            ("--batch", self.batch),
        ):
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"--temperature is {self.temperature}; it must be 0, which is greedy, or a number "
                "above"
            )
        if self.tree == "oracle" and (self.temperature or self.draft != "lookup"):
            other = "--temperature" if self.temperature else f"--draft {self.draft}"
            raise ValueError(
                f"--tree oracle drafts the plain greedy answer, so {other} has no place beside it; "
                "leave one of them out"
            )
        self._check_prompts()
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device is {self.device!r}, but torch sees no CUDA device here; "
                "use --device cpu, or see `specpool doctor`"
            )

    def _check_prompts(self) -> None:
        if self.prompts is not None and not self.prompts:
            raise ValueError("no prompt was given; give at least one")
        for name, question in (self.prompts or {}).items():
            if not question.strip():
                raise ValueError(f"the prompt {name!r} is empty; give --prompt some text")
