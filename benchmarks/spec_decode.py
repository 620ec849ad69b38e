"""What do drafts gain on a real model, and what do move, verification and drafting cost?

SmolLM2-135M answers five questions, greedily, through ``DraftVerifyLoop``: plainly (a window of the
root alone), with prompt-lookup chains, and with prompt-lookup trees, whose accepted entries are
committed by moving rows or by rewriting the slot table. All answers must be the plain ones.
Configurations take turns, so that a machine's drift hits all alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import write
from specpool.allocator import SlotAllocator
from specpool.demo import parts
from specpool.demo.llama import DenseAttention, Llama
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.target import LlamaTarget
from specpool.demo.weights import load_gguf
from specpool.request_table import RequestTable
from specpool.spec.drafters import PromptLookup
from specpool.spec.forward import ForwardStep
from specpool.spec.loop import DraftVerifyLoop

CHAIN, TREE = 8, 24


@dataclass(frozen=True)
class Config:
    """One way to decode: how many requests at once, what is drafted, how it is committed."""

    batch: int
    draft: str
    mode: str

    @property
    def name(self) -> str:
        """For tables and plots."""
        return self.draft if self.draft == "plain" else f"{self.draft}, {self.mode}"

    def drafter(self) -> PromptLookup:
        """Prompt lookup of this shape; a window of one node drafts nothing."""
        if self.draft == "tree":
            return PromptLookup(TREE)
        return PromptLookup(CHAIN, candidates=1) if self.draft == "chain" else PromptLookup(1)


CONFIGS = [
    Config(batch, draft, mode)
    for batch in (1, 4)
    for draft, mode in (
        ("plain", "remap"),
        ("chain", "remap"),
        ("tree", "remap"),
        ("tree", "move"),
    )
]


class TimedTarget(LlamaTarget):
    """Tells the model's own time from the verifier's."""

    seconds = 0.0

    def forward(self, step: ForwardStep) -> torch.Tensor:
        began = time.perf_counter()
        logits = super().forward(step)
        self.seconds += time.perf_counter() - began
        return logits


def run(
    model: Llama, prompts: dict[str, list[int]], config: Config, max_new: int
) -> dict[str, Any]:
    """Answer every prompt once; tokens, forwards, and where the time went."""
    longest = max(map(len, prompts.values())) + max_new
    size = config.batch * (longest + TREE)
    device, dtype = model.device, torch.float32
    attention = DenseAttention(model.config, size, dtype, device)
    target = TimedTarget(model, attention)
    loop = DraftVerifyLoop(
        target,
        config.drafter(),
        SlotAllocator(size, device),
        RequestTable(config.batch, longest, device),
        eos=[model.config.eos],
        mode=config.mode,  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    names = {loop.submit(prompt, max_new): name for name, prompt in prompts.items()}
    answers: dict[str, list[int]] = {name: [] for name in prompts}
    for event in loop.stream():
        answers[names[event.request]] += event.tokens
    seconds = time.perf_counter() - began
    stats = loop.stats
    forward = target.seconds - stats.prefill_seconds
    verify = max(0.0, stats.verify_seconds - forward)
    step_seconds = stats.draft_seconds + stats.verify_seconds + stats.move_seconds
    return {
        "answers": answers,
        "tokens": stats.tokens,
        "forwards": stats.steps,
        "tokens_a_step": stats.tokens_a_step,
        "relocating_steps": stats.relocating_steps,
        "tokens_a_second": stats.tokens / seconds,
        "share_draft": stats.draft_seconds / step_seconds,
        "share_verify": verify / step_seconds,
        "share_commit": stats.move_seconds / step_seconds,
    }


def summary(
    config: Config, runs: list[dict[str, Any]], plain: list[dict[str, Any]]
) -> dict[str, Any]:
    """Medians over the repeats, and ratios to plain decoding taken repeat by repeat."""
    figures = {key: statistics.median(r[key] for r in runs) for key in runs[0] if key != "answers"}
    rates = [r["tokens_a_second"] for r in runs]
    ratios = [r["tokens_a_second"] / p["tokens_a_second"] for r, p in zip(runs, plain, strict=True)]
    return {
        "batch": config.batch,
        "draft": config.draft,
        "mode": config.mode,
        **figures,
        "tokens_a_second_all": rates,
        "speedup": statistics.median(ratios),
        "speedup_all": ratios,
        "equal_to_plain": all(
            r["answers"] == p["answers"] for r, p in zip(runs, plain, strict=True)
        ),
    }


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Tokens a second, and where a step's time goes beside the model."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (rate, share) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    labels = [f"{r['draft']}\n{r['mode']}\nbatch {r['batch']}" for r in results]
    colours = ["#7f7f7f" if r["draft"] == "plain" else "#1f77b4" for r in results]
    rate.bar(labels, [r["tokens_a_second"] for r in results], color=colours)
    for place, r in enumerate(results):
        low, high = min(r["tokens_a_second_all"]), max(r["tokens_a_second_all"])
        rate.vlines(place, low, high, color="black")
        rate.text(place, high, f"{r['speedup']:.2f}x", ha="center", va="bottom")
    rate.set_ylabel("tokens a second (median, range)")
    rate.set_title("SmolLM2-135M, five questions, against plain decoding")
    below = [0.0] * len(results)
    for key in ("draft", "verify", "commit"):
        values = [100 * r[f"share_{key}"] for r in results]
        share.bar(labels, values, bottom=below, label=key)
        below = [a + b for a, b in zip(below, values, strict=True)]
    share.set_ylabel("% of a step's time")
    share.set_title("A step's time beside the model's forward")
    share.set_ylim(0, 1.25 * max(below))
    share.legend(loc="upper right", ncols=3)
    for axes in (rate, share):
        axes.tick_params(axis="x", labelsize=7)
    figure.savefig(path, dpi=150)
    print(f"plotted to {path}")


def main() -> None:
    """Measure, print, write, plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/spec_decode.json"))
    args = parser.parse_args()
    device = torch.device(args.device)
    weights, tokenizer = load_gguf(parts.packaged_model(), torch.float32, device)
    model = Llama(weights)
    prompts = {name: tokenizer.encode(chat(question)) for name, question in PROMPTS.items()}
    run(model, prompts, CONFIGS[0], 4)  # warm-up
    runs: dict[Config, list[dict[str, Any]]] = {config: [] for config in CONFIGS}
    code: dict[Config, dict[str, Any]] = {}
    for _ in range(args.repeats):
        for config in CONFIGS:
            runs[config].append(run(model, prompts, config, args.max_new))
    for config in CONFIGS[:4]:
        code[config] = run(model, {"code": prompts["code"]}, config, args.max_new)
    results = [summary(c, runs[c], runs[Config(c.batch, "plain", "remap")]) for c in CONFIGS]
    print(f"{'batch':>5} {'draft':>13} {'tokens/s':>9} {'x plain':>8} {'tokens/step':>12} "
          f"{'draft %':>8} {'verify %':>9} {'commit %':>9}  equal")  # fmt: skip
    for c, r in zip(CONFIGS, results, strict=True):
        print(f"{c.batch:>5} {c.name:>13} {r['tokens_a_second']:>9.1f} {r['speedup']:>7.2f}x "
              f"{r['tokens_a_step']:>12.2f} {100 * r['share_draft']:>8.2f} "
              f"{100 * r['share_verify']:>9.2f} {100 * r['share_commit']:>9.2f}  "
              f"{'yes' if r['equal_to_plain'] else 'NO'}")  # fmt: skip
    for c, r in code.items():
        print(f"code prompt, {c.name}: {r['tokens']} tokens in {r['forwards']} forwards, "
              f"{r['tokens'] / r['forwards']:.2f} tokens a forward")  # fmt: skip
    code_rows = [
        {"draft": c.draft, "mode": c.mode, "tokens": r["tokens"], "forwards": r["forwards"]}
        for c, r in code.items()
    ]
    write(str(args.out), [*results, {"code_prompt": code_rows}])
    plot(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
