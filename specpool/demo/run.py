"""One run of the demo: answer questions by draft and verify, then hold the answers against plain
greedy decoding of the same questions, on a pool of its own, and report both.

Nothing is taken on trust: the verdict comes from that second decoding, in this very run, and the
accepted KV is compared with one plain forward of the same tokens, which text alone cannot replace.
"""

from __future__ import annotations

import codecs
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specpool.demo import parts
from specpool.demo.drafts import Draft, Oracle, PromptLookup
from specpool.demo.generate import FreeSlots, Greedy, Speculative, greedy, kv_errors, speculate
from specpool.demo.llama import Attention, DenseAttention, Llama
from specpool.demo.minimax import BlockSparseAttention
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.report import Answer, Report
from specpool.demo.screen import Screen
from specpool.demo.tokenizer import Tokenizer
from specpool.demo.weights import Config, load_gguf
from specpool.mover import RowMover

ATTENTIONS: dict[str, type[DenseAttention] | type[BlockSparseAttention]] = {
    "minimax": BlockSparseAttention,
    "mha": DenseAttention,
}
# Block selection needs float64 (see minimax.py); dense attention is exact enough in float32.
DTYPES = {"minimax": torch.float64, "mha": torch.float32}
KV_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
TREES = ("lookup", "chain", "oracle")


@dataclass(frozen=True)
class Options:
    """What to run; see `specpool demo --help`. `prompts` maps a name to a question."""

    pool: str = "minimax"
    prompts: Mapping[str, str] | None = None
    max_new: int = 48
    tree: str = "lookup"
    nodes: int = 24
    device: str = "cpu"
    model: Path | None = None


class Demo:
    """A loaded model and what to ask it.

    Raises ValueError for options that make no sense, FileNotFoundError for a model file that is not
    there, and MissingPartError for a package that is not installed.
    """

    def __init__(self, options: Options, screen: Screen) -> None:
        _check(options)
        self.options = options
        self.screen = screen
        parts.require(parts.GGUF, parts.TQDM, *([] if options.model else [parts.SMOLLM2]))
        path = options.model or parts.packaged_model()
        device, self.dtype = torch.device(options.device), DTYPES[options.pool]
        self.prompts: dict[str, list[int]] = {}
        self.model, self.tokenizer = load_model(path, self.dtype, device, screen, self._prepare)

    def run(self) -> Report:
        """Answer every question twice and compare."""
        answers = [self._answer(name, prompt) for name, prompt in self.prompts.items()]
        options = self.options
        return Report(
            pool=options.pool,
            tree=options.tree,
            nodes=options.nodes,
            device=options.device,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_tolerance=KV_TOLERANCE[self.dtype],
            answers=answers,
        )

    def _prepare(self, config: Config, tokenizer: Tokenizer) -> None:
        """Refuse what the model or the backend cannot do, before the weights are read."""
        options = self.options
        questions = PROMPTS if options.prompts is None else options.prompts
        for name, question in questions.items():
            prompt = tokenizer.encode(chat(question))
            if len(prompt) + options.max_new > config.context:
                raise ValueError(
                    f"the prompt {name!r} has {len(prompt)} tokens with its template and --max-new "
                    f"asks for {options.max_new} more; the model takes {config.context} in all"
                )
            self.prompts[name] = prompt
        kind = ATTENTIONS[options.pool]
        smallest = kind(config, 1, self.dtype, torch.device(options.device))
        RowMover(smallest.pool.rows())  # refuses a backend that does not serve the device

    def _answer(self, name: str, prompt: list[int]) -> Answer:
        self.screen.heading(name)
        if self.options.tree == "oracle":  # it drafts the plain answer, which must be known first
            plain, plain_seconds = self._plain(prompt)
            result, attention, seconds = self._speculate(prompt, self._oracle(prompt, plain))
        else:
            drafts = PromptLookup(
                self.options.nodes, candidates=1 if self.options.tree == "chain" else 6
            )
            result, attention, seconds = self._speculate(prompt, drafts)
            plain, plain_seconds = self._plain(prompt)
        errors = kv_errors(self.model, attention, self._attention(len(result.loc)), result)
        return Answer(
            name=name,
            text=self.tokenizer.decode(result.tokens),
            stats=result.stats,
            seconds=seconds,
            plain_seconds=plain_seconds,
            first_difference=_first_difference(result.tokens, plain.tokens),
            smallest_margin=min(plain.margins),
            kv_errors=errors,
        )

    def _oracle(self, prompt: list[int], plain: Greedy) -> Oracle:
        return Oracle(len(prompt), plain.tokens, self.model.config.vocab, self.options.nodes)

    def _attention(self, size: int) -> Attention:
        kind = ATTENTIONS[self.options.pool]
        return kind(self.model.config, size, self.dtype, self.model.device)

    def _speculate(self, prompt: list[int], draft: Draft) -> tuple[Speculative, Attention, float]:
        # Accepted entries and one window are all that ever lives.
        size = len(prompt) + self.options.max_new + self.options.nodes
        attention, show = self._attention(size), self._streamer()
        began = time.perf_counter()
        result = speculate(
            self.model, attention, FreeSlots(size), prompt, self.options.max_new, draft, show
        )
        seconds = time.perf_counter() - began
        stats = result.stats
        self.screen.write(
            f"\n[{stats.tokens} tokens in {stats.steps} forwards, "
            f"{stats.relocating_steps} of which relocated]\n"
        )
        return result, attention, seconds

    def _plain(self, prompt: list[int]) -> tuple[Greedy, float]:
        size = len(prompt) + self.options.max_new
        with self.screen.bar("plain greedy decoding") as show:
            done = itertools.count(1)
            began = time.perf_counter()
            result = greedy(
                self.model,
                self._attention(size),
                FreeSlots(size, seed=1),
                prompt,
                self.options.max_new,
                lambda tokens: show(next(done), self.options.max_new),
            )
            return result, time.perf_counter() - began

    def _streamer(self) -> Callable[[list[int]], None]:
        """Shows tokens as they come; a character may end in a later step than it begins in."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")

        def show(tokens: list[int]) -> None:
            shown = (t for t in tokens if t != self.model.config.eos)
            self.screen.write(decoder.decode(b"".join(map(self.tokenizer.token_bytes, shown))))

        return show


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    screen: Screen,
    prepare: Callable[[Config, Tokenizer], None],
) -> tuple[Llama, Tokenizer]:
    """Read the model at `path`, showing progress; `prepare` is called before the weights are."""
    with screen.bar(f"reading {path.name}") as show:
        weights, tokenizer = load_gguf(path, dtype, device, show, prepare)
    return Llama(weights), tokenizer


def _check(options: Options) -> None:
    for name, value, known in (
        ("--pool", options.pool, ATTENTIONS),
        ("--tree", options.tree, TREES),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    for name, count in (("--max-new", options.max_new), ("--nodes", options.nodes)):
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
    if options.prompts is not None and not options.prompts:
        raise ValueError("no prompt was given; give at least one")
    for name, question in (options.prompts or {}).items():
        if not question.strip():
            raise ValueError(f"the prompt {name!r} is empty; give --prompt some text")
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device is {options.device!r}, but torch sees no CUDA device here; "
            "use --device cpu, or see `specpool doctor`"
        )


def _first_difference(tokens: list[int], plain: list[int]) -> int | None:
    """The first place where two answers differ, None where they are equal."""
    if tokens == plain:
        return None
    pairs = zip(tokens, plain, strict=False)
    shorter = min(len(tokens), len(plain))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
