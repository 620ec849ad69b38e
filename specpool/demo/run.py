"""One run of the demo: answer questions by draft and verify, then hold the answers against plain
greedy decoding of the same questions, on a pool of its own, and report both.

Nothing is taken on trust: the verdict comes from that second decoding, in this very run, and the
accepted KV is compared with one plain forward of the same tokens, which text alone cannot replace.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from specpool.allocator import PagedSlotAllocator
from specpool.demo import parts
from specpool.demo.drafts import MODEL_FED, Oracle, model_drafter, without_a_sixth
from specpool.demo.generate import Greedy, greedy, kv_errors, shuffled_slots
from specpool.demo.llama import Attention, DenseAttention, Llama
from specpool.demo.options import ATTENTIONS, Options
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.report import Answer, Report
from specpool.demo.screen import Screen, Transcript
from specpool.demo.serve import Figures, Served, TimedTarget, serve, slots_needed
from specpool.demo.target import LlamaTarget
from specpool.demo.tokenizer import Tokenizer
from specpool.demo.weights import Config, load_gguf
from specpool.mover import RowMover
from specpool.spec import Drafter, Event, PromptLookup

# Block selection needs float64 (see minimax.py); dense attention is exact enough in float32.
DTYPES = {"minimax": torch.float64, "mha": torch.float32}
KV_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}


class Demo:
    """A loaded model and what to ask it.

    Raises ValueError for options that make no sense, FileNotFoundError for a model file that is not
    there, and MissingPartError for a package that is not installed.
    """

    def __init__(self, options: Options, screen: Screen) -> None:
        options.check()
        self.options = options
        self.screen = screen
        parts.require(parts.GGUF, parts.TQDM, *([] if options.model else [parts.SMOLLM2]))
        path = options.model or parts.packaged_model()
        device, self.dtype = torch.device(options.device), DTYPES[options.pool]
        self.prompts: dict[str, list[int]] = {}
        self.model, self.tokenizer = load_model(path, self.dtype, device, screen, self._prepare)

    def run(self) -> Report:
        """Answer every question, decode each plainly too unless tokens are drawn, and compare."""
        options = self.options
        plain: list[Greedy] | None = None
        plain_seconds: float | None = None
        if options.tree == "oracle":  # it drafts the plain answers, which must be known first
            plain, plain_seconds = self._plain()
        served, figures = self._serve(plain)
        if plain is None and not options.temperature:
            plain, plain_seconds = self._plain()
        return Report(
            pool=options.pool,
            tree=options.tree,
            draft=options.draft,
            nodes=options.nodes,
            batch=min(options.batch, len(served)),
            page_size=options.page_size,
            temperature=options.temperature,
            device=options.device,
            dtype=str(self.dtype).removeprefix("torch."),
            kv_tolerance=KV_TOLERANCE[self.dtype],
            figures=figures,
            plain_seconds=plain_seconds,
            answers=[
                self._answer(*each)
                for each in zip(self.prompts, served, plain or itertools.repeat(None), strict=False)
            ],
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

    def _answer(self, name: str, served: Served, plain: Greedy | None) -> Answer:
        fresh = self._attention(len(served.stored))
        return Answer(
            name=name,
            text=self.tokenizer.decode(served.tokens),
            tokens=len(served.tokens),
            steps=served.steps,
            first_difference=None
            if plain is None
            else _first_difference(served.tokens, plain.tokens),
            smallest_margin=None if plain is None else min(plain.margins),
            kv_errors=kv_errors(self.model, fresh, served.stored, served.kept),
        )

    def _attention(self, size: int, page_size: int = 1) -> Attention:
        kind = ATTENTIONS[self.options.pool]
        return kind(self.model.config, size, self.dtype, self.model.device, page_size=page_size)

    def _serve(self, plain: list[Greedy] | None) -> tuple[list[Served], Figures]:
        options, prompts = self.options, list(self.prompts.values())
        batch = min(options.batch, len(prompts))
        # What a window takes is known before the drafter is: a draft model needs a pool first.
        window = max(options.nodes, MODEL_FED)
        size = slots_needed(prompts, options.max_new, window, batch, options.page_size)
        target = TimedTarget(self.model, self._attention(size, options.page_size))
        eos, names = self.model.config.eos, list(self.prompts)
        transcript = Transcript(self.screen, names, self.tokenizer, eos, streams=batch == 1)
        total, done = len(prompts) * options.max_new, itertools.count(1)
        with self._waiting(batch) as progress:

            def show(event: Event) -> None:
                for _ in event.tokens:
                    progress(next(done), total)
                transcript.show(event)

            return serve(
                target,
                self._drafter(plain, size),
                PagedSlotAllocator(size, options.page_size, self.model.device),
                prompts,
                options.max_new,
                batch=batch,
                temperature=options.temperature,
                on_event=show,
            )

    def _waiting(self, batch: int) -> AbstractContextManager[Callable[[int, int], None]]:
        """A bar while a batch shows nothing; one answer's text is its own progress."""
        if batch > 1:
            return self.screen.bar(f"answering {batch} questions at once")
        return nullcontext(lambda done, total: None)

    def _drafter(self, plain: list[Greedy] | None, size: int) -> Drafter:
        options, config = self.options, self.model.config
        if plain is not None:
            tokens = [answer.tokens for answer in plain]
            answers = list(zip(self.prompts.values(), tokens, strict=True))
            return Oracle(answers, options.nodes, config.vocab)
        if options.draft == "lookup":
            return PromptLookup(options.nodes, candidates=1 if options.tree == "chain" else 6)
        model = Llama(without_a_sixth(self.model.weights))
        page, device = options.page_size, self.model.device
        attention = DenseAttention(model.config, size, self.dtype, device, page_size=page)
        return model_drafter(
            LlamaTarget(model, attention),
            options.nodes,
            chain=options.tree == "chain",
            sampled=options.temperature > 0,
        )

    def _plain(self) -> tuple[list[Greedy], float]:
        options, done = self.options, itertools.count(1)
        total = len(self.prompts) * options.max_new
        began = time.perf_counter()
        with self.screen.bar("plain greedy decoding") as show:
            answers = [
                greedy(
                    self.model,
                    self._attention(len(prompt) + options.max_new),
                    shuffled_slots(len(prompt) + options.max_new),
                    prompt,
                    options.max_new,
                    lambda: show(next(done), total),
                )
                for prompt in self.prompts.values()
            ]
        return answers, time.perf_counter() - began


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


def _first_difference(tokens: list[int], plain: list[int]) -> int | None:
    """The first place where two answers differ, None where they are equal."""
    if tokens == plain:
        return None
    pairs = zip(tokens, plain, strict=False)
    shorter = min(len(tokens), len(plain))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), shorter)
