"""Questions answered by `DraftVerifyLoop`, with a stopwatch on the model and on the move.

All that is the demo's own here is measuring: the loop, its slots, its verifier and its drafters
are the library's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.allocator import PagedSlotAllocator
from specpool.demo.llama import Attention, Llama
from specpool.demo.target import LlamaTarget
from specpool.mover import RowMover
from specpool.pools import KVCache
from specpool.request_table import RequestTable
from specpool.spec import Drafter, DraftVerifyLoop, Event, ForwardStep, Sampling


class TimedPool:
    """A pool for a loop; how long its moves of accepted entries took, and how many launches."""

    def __init__(self, pool: KVCache) -> None:
        self.pool = pool
        self.seconds = 0.0
        self.launches = 0

    @property
    def mover(self) -> RowMover:
        """The pool's own."""
        return self.pool.mover

    def move_kv_cache(self, tgt_loc: Tensor, src_loc: Tensor) -> None:
        """The pool's own; not timed."""
        self.pool.move_kv_cache(tgt_loc, src_loc)

    def move_accepted(
        self, out_cache_loc: Tensor, accept_index: Tensor, accept_len: Tensor
    ) -> None:
        """The pool's own, timed."""
        launches, began = self.mover.launches, _now(out_cache_loc.device)
        self.pool.move_accepted(out_cache_loc, accept_index, accept_len)
        self.seconds += _now(out_cache_loc.device) - began
        self.launches += self.mover.launches - launches


class TimedTarget(LlamaTarget):
    """A `LlamaTarget` that knows how long its forwards and its pool's moves took."""

    def __init__(self, model: Llama, attention: Attention) -> None:
        super().__init__(model, attention)
        self.moves = TimedPool(attention.pool)
        self.pools = [self.moves]
        self.seconds = 0.0

    def forward(self, step: ForwardStep) -> Tensor:
        """As `LlamaTarget.forward`."""
        began = _now(self.model.device)
        logits = super().forward(step)
        self.seconds += _now(self.model.device) - began
        return logits


@dataclass(frozen=True)
class Served:
    """One answer.

    `kept[kind]` is each layer's KV, [n, heads, width], of the n tokens of `stored`: the prompt and
    the answer but its last token, as the pool had them when the request left.
    """

    tokens: list[int]
    steps: int
    stored: list[int]
    kept: dict[str, list[Tensor]]


@dataclass(frozen=True)
class Figures:
    """What a loop did for all answers.

    Forwards of the target are those that verified; `prompt_forwards` come besides.
    `tokens_per_step` is what a step gave a request, in the mean. `launches` are of moves of
    accepted entries, in the target's pool. Times are seconds; the model's includes the prompts.
    """

    tokens: int
    target_forwards: int
    prompt_forwards: int
    tokens_per_step: float
    relocating_steps: int
    launches: int
    rows_moved: int
    seconds: float
    model_seconds: float
    draft_seconds: float
    move_seconds: float


def slots_needed(
    prompts: Sequence[Sequence[int]], max_new: int, window: int, batch: int, page_size: int
) -> int:
    """Slots, in whole pages, with which `batch` requests at once never wait for one another."""
    longest = max(map(len, prompts)) + max_new + window
    return batch * -(-longest // page_size) * page_size


def serve(
    target: TimedTarget,
    drafter: Drafter,
    allocator: PagedSlotAllocator,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    *,
    batch: int = 1,
    temperature: float = 0.0,
    on_event: Callable[[Event], None] = lambda event: None,
) -> tuple[list[Served], Figures]:
    """Answer all prompts, at most `batch` at once; `Event.request` is a prompt's number.

    Accepted entries are relocated by moves, whatever the page size. Draws are seeded.
    """
    device, eos = target.model.device, target.model.config.eos
    buffers = target.attention.buffers()
    left: dict[int, tuple[list[int], dict[str, list[Tensor]]]] = {}

    def keep(request: int, tokens: list[int], slots: Tensor) -> None:
        loc = slots.long()
        kept = {kind: [buffer[loc] for buffer in layers] for kind, layers in buffers.items()}
        left[request] = tokens[: len(loc)], kept

    loop = DraftVerifyLoop(
        target,
        drafter,
        allocator,
        RequestTable(batch, max(map(len, prompts)) + max_new, device),
        eos=[] if eos is None else [eos],
        mode="move",
        generator=torch.Generator(device).manual_seed(0),
        on_finish=keep,
    )
    for prompt in prompts:
        loop.submit(prompt, max_new, sampling=Sampling(temperature))
    answers: list[list[int]] = [[] for _ in prompts]
    steps = [0 for _ in prompts]
    rows_before, began = target.moves.mover.rows_moved, _now(device)
    for event in loop.stream():
        answers[event.request] += event.tokens
        steps[event.request] += 1
        on_event(event)
    seconds, stats = _now(device) - began, loop.stats
    figures = Figures(
        tokens=stats.tokens,
        target_forwards=stats.steps,
        prompt_forwards=stats.prefill_forwards,
        tokens_per_step=stats.tokens_a_step,
        relocating_steps=stats.relocating_steps,
        launches=target.moves.launches,
        rows_moved=target.moves.mover.rows_moved - rows_before,
        seconds=seconds,
        model_seconds=target.seconds,
        draft_seconds=stats.draft_seconds,
        move_seconds=target.moves.seconds,
    )
    served = [
        Served(tokens, count, *left[request])
        for request, (tokens, count) in enumerate(zip(answers, steps, strict=True))
    ]
    return served, figures


def _now(device: torch.device) -> float:
    """The time in seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
