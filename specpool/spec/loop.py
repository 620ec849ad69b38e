"""``DraftVerifyLoop``: requests join, are drafted for and verified in batches, and leave.

Between steps a request's row of the table holds the KV of every token but its last one, which is
the root of its next tree. A step gives every request a window of slots, has it drafted for, lets
the target see all trees in one forward, reads the verifier's answer once, and commits it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from operator import index

import numpy as np
import torch
from torch import Tensor

from specpool.allocator import PagedSlotAllocator
from specpool.request_table import RequestTable
from specpool.spec.admission import Admission
from specpool.spec.commit import CommitResult, Mode, commit
from specpool.spec.feed import feed
from specpool.spec.forward import ForwardStep
from specpool.spec.judge import Answer, Decide, judge, own_answer, refuse_tree
from specpool.spec.movers import check_pools
from specpool.spec.protocols import DraftBatch, Drafter, Sampling, Target
from specpool.spec.serving import Event, Request, Stats

OnFinish = Callable[[int, list[int], Tensor], None]


class DraftVerifyLoop:
    """Continuous batching of draft and verify, greedy and sampled.

    Requests wait, in the order of ``submit``, until the table has a row and the pool has room for
    all that one can ever hold, its answer and a window included; so a window always fits, and
    none is ever turned out. The loop owns allocator and table: others take nothing from them
    while it runs. (Where one does and a window does not fit, ``step`` raises ``OutOfSlots``,
    nothing is lost, and the step can be made again.) Whatever a step raises before it commits, its
    windows are freed, and every request is as it was. It is not to be shared by threads.

    Args:
        target: the model that decides.
        drafter: what proposes.
        allocator: of the device where everything else lies.
        table: the requests' rows.
        eos: tokens that end any answer.
        mode: see ``commit``.
        prefill_chunk: tokens of each prompt that a step feeds at most.
        generator: of the device, for draws; None is its default.
        decide: what makes one answer of several ranks' (see ``Decide`` and ``broadcast_accept``);
            this rank's own counts when not given.
        on_finish: called with ``(request, tokens, slots)`` before a request's slots are freed:
            int32 ``slots[n]`` hold the KV of ``tokens[:n]``, prompt and answer but the last token
            (less, where it is cancelled before its prompt is done). Not called where it ends with
            ``"nan"``: nobody should keep that KV.

    Attributes:
        stats: what has been done so far.

    Raises:
        ValueError: an unknown mode, ``"remap"`` with pages of several slots, a window or a chunk
            below 1, or pools that cannot all move (see ``commit``).

    Example:
        >>> from specpool import RowMover, rows_from
        >>> from specpool.allocator import SlotAllocator
        >>> from specpool.spec.drafters import PromptLookup
        >>> class Counts:  # a target without KV: 7, 8, 9, 0, 1, ...
        ...     vocab_size, pools = 10, [RowMover(rows_from(torch.zeros(101, 1)))]
        ...     def forward(self, step):
        ...         return torch.nn.functional.one_hot((step.tokens + 1) % 10, 10).float()
        >>> loop = DraftVerifyLoop(
        ...     Counts(), PromptLookup(8), SlotAllocator(100, "cpu"), RequestTable(4, 50, "cpu")
        ... )
        >>> loop.submit([5, 6, 7, 8, 9, 0, 1, 5], max_new=4)
        0
        >>> list(loop.stream())
        [Event(request=0, tokens=[6, 7, 8, 9], finished='length')]
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        allocator: PagedSlotAllocator,
        table: RequestTable,
        *,
        eos: Collection[int] = (),
        mode: Mode = "auto",
        prefill_chunk: int = 512,
        generator: torch.Generator | None = None,
        decide: Decide = own_answer,
        on_finish: OnFinish = lambda request, tokens, slots: None,
    ) -> None:
        if min(drafter.window, prefill_chunk) < 1:
            raise ValueError(
                f"window and prefill_chunk must be at least 1, got {drafter.window} and "
                f"{prefill_chunk}"
            )
        self.target, self.drafter = target, drafter
        self.allocator, self.table = allocator, table
        self.pools = [*target.pools, *drafter.pools]
        self.eos = frozenset(eos)
        self.mode: Mode = mode
        self.prefill_chunk = prefill_chunk
        self.generator = generator
        self.decide = decide
        self.on_finish = on_finish
        self.stats = Stats()
        self._admission = Admission(allocator, table, drafter.window)
        self._next_id = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._events: deque[Event] = deque()
        check_pools(self.pools, allocator.slot_limit, allocator.device)
        none = torch.zeros(0, 1, dtype=torch.int64, device=allocator.device)
        commit(self.pools, allocator, table, [], none, none, none[:, 0], mode)  # refuses the mode

    @property
    def waiting(self) -> list[int]:
        """Ids of requests that have not joined yet, in order."""
        return [request.id for request in self._waiting]

    @property
    def running(self) -> dict[int, int]:
        """The row of each request that has joined, by id."""
        return {request.id: request.row for request in self._running.values()}

    def submit(
        self,
        prompt: Sequence[int],
        max_new: int,
        *,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
    ) -> int:
        """Queue a request; it joins at the next step that has room.

        Args:
            prompt: tokens, at least one.
            max_new: tokens of the answer at most, at least 1.
            stop: tokens that end this answer, besides ``eos``.
            sampling: None is greedy.

        Returns:
            The request's id.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, a ``max_new`` below 1,
                a request that would outgrow a table row or, with its window, the whole pool, or a
                sampling option outside its range.
            TypeError: tokens or a ``max_new`` that are no integers.
        """
        tokens = [index(token) for token in prompt]
        request = Request(
            *(self._next_id, tokens, len(tokens), index(max_new), self.eos, frozenset(stop)),
            sampling or Sampling(),
        )
        self._admission.refuse(request, self.target.vocab_size)
        self._next_id += 1
        self._waiting.append(request)
        return request.id

    def cancel(self, request: int) -> None:
        """End a request between steps; of its events only ``"cancelled"`` is still to come.

        Raises:
            ValueError: no such request is waiting or running: it may have finished.
        """
        if request in self._running:
            self._release(self._running[request])
        elif request in self.waiting:
            self._waiting = deque(r for r in self._waiting if r.id != request)
        else:
            raise ValueError(
                f"request {request!r} is not waiting or running; it finished, or never was"
            )
        self._events = deque(event for event in self._events if event.request != request)
        self._events.append(Event(request, [], "cancelled"))

    def step(self) -> list[Event]:
        """Let requests join, feed their prompts, and make one draft and verify step.

        Returns:
            What it brought, one event a request at most, and what was not taken from ``stream``.

        Raises:
            OutOfSlots: see the class.
            ValueError: a drafter's trees are of another batch, deeper than the room, or larger
                than the window; logits of another shape; and with ``SPECPOOL_CHECK=1`` rows of
                NaN, which else finish as ``"nan"``.
            Whatever target or drafter raise. Nothing has moved then, and nothing is freed.
        """
        self._advance()
        events = list(self._events)
        self._events.clear()
        return events

    def stream(self) -> Iterator[Event]:
        """Events as they come, until no request is left; requests may join and be cancelled
        meanwhile.
        """
        while self._events or self._waiting or self._running:
            if self._events:
                yield self._events.popleft()
            else:
                self._advance()

    def check(self) -> None:
        """Recount, between steps: every slot is free or of one request, and each row has its KV.

        Raises:
            RuntimeError: what does not add up.
        """
        self._admission.check(self._running.values())

    def _advance(self) -> None:
        for request in self._admission.join(self._waiting, self._running.values()):
            self._running[request.id] = request
        self._prefill()
        ready = [
            request
            for request in self._running.values()
            if self._length(request) == len(request.tokens) - 1
        ]
        if ready:
            self._draft_and_verify(ready)

    def _prefill(self) -> None:
        """Feed the next chunk of every prompt that is not in its row yet, but its last token."""
        chunks = {
            request.row: request.prompt_chunk(self._length(request), self.prefill_chunk)
            for request in self._running.values()
        }
        chunks = {row: chunk for row, chunk in chunks.items() if chunk}
        if not chunks:
            return
        began = time.perf_counter()
        feed(self.target, self.allocator, self.table, chunks)
        self.stats.prefill_forwards += 1
        self.stats.prefill_seconds += time.perf_counter() - began

    def _draft_and_verify(self, ready: list[Request]) -> None:
        rows = [request.row for request in ready]
        lengths = self.table.lengths[rows]
        ends = lengths + self.drafter.window
        slots = self.allocator.alloc_extend(lengths, ends, self.table.last_loc[rows])
        clock = [time.perf_counter()]
        try:
            batch = self._batch(ready, slots.view(len(ready), -1))
            tree = self.drafter.draft(batch)
            refuse_tree(tree, batch)
            clock.append(time.perf_counter())
            window = batch.window[:, : tree.num_draft_tokens]
            loc = torch.where(tree.live, window, -1)
            logits = self.target.forward(ForwardStep.tree(self.table, rows, tree, loc))
            answer = judge(tree, logits, batch, ready, self.decide)
            clock.append(time.perf_counter())
            accept = answer.accept_index, answer.accept_len
            done = commit(
                *(self.pools, self.allocator, self.table, rows, window, *accept, self.mode),
                host=answer.host,
            )
        except BaseException:
            self.allocator.free(slots)
            raise
        self._free_rest(answer, done)
        clock.append(time.perf_counter())
        self.stats.count(answer, done.mode == "move" and answer.relocates, clock)
        self._tell(ready, answer)

    def _batch(self, ready: list[Request], window: Tensor) -> DraftBatch:
        return DraftBatch(
            requests=[request.id for request in ready],
            contexts=[request.tokens for request in ready],
            room=[request.left - 1 for request in ready],
            vocab_size=self.target.vocab_size,
            window=window,
            rows=[request.row for request in ready],
            table=self.table,
            sampling=[request.sampling for request in ready],
            generator=self.generator,
        )

    def _free_rest(self, answer: Answer, done: CommitResult) -> None:
        """Free what commit had no say in: slots past the trees, windows of failed requests."""
        judged = torch.cat([done.kept, done.freed]).numpy()
        rest = np.setdiff1d(answer.window.numpy(), judged, assume_unique=True)
        self.allocator.free(torch.from_numpy(rest))

    def _tell(self, ready: list[Request], answer: Answer) -> None:
        # Everyone is served before anyone leaves; who leaves does so whatever another's raises.
        with ExitStack() as leaving:
            for request, tokens, why in zip(ready, answer.tokens, answer.finished, strict=True):
                request.tokens += tokens
                self._events.append(Event(request.id, tokens, why))
                if why is not None:
                    leaving.callback(self._release, request, failed=why == "nan")

    def _release(self, request: Request, failed: bool = False) -> None:
        with ExitStack() as last:
            last.callback(self.drafter.leave, request.id)
            last.callback(lambda: self.allocator.free(self.table.free(request.row)))
            del self._running[request.id]
            if not failed:
                slots = self.table.row(request.row).clone()  # the row itself is emptied
                self.on_finish(request.id, request.tokens, slots)

    def _length(self, request: Request) -> int:
        return int(self.table.lengths[request.row])
