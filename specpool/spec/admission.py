"""Who may join a loop, and when: by what a request can ever hold, so that it never runs out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from specpool.allocator import PagedSlotAllocator
from specpool.request_table import RequestTable
from specpool.spec.serving import Request


class Admission:
    """Rows and pages of a loop's requests.

    Args:
        allocator: where their slots come from.
        table: where their rows come from.
        window: slots that a step gives a request besides those of its row.
    """

    def __init__(self, allocator: PagedSlotAllocator, table: RequestTable, window: int) -> None:
        self.allocator, self.table, self.window = allocator, table, window

    def pages(self, request: Request) -> int:
        """Pages that the request holds at its worst: a page is never shared."""
        return -(-(request.most_slots + self.window) // self.allocator.page_size)

    def refuse(self, request: Request, vocab_size: int) -> None:
        """Refuse what is no request, or one that no waiting gives room to.

        Raises:
            ValueError: see ``DraftVerifyLoop.submit``.
        """
        bad = [token for token in request.tokens if not 0 <= token < vocab_size]
        if bad or not request.tokens:
            raise ValueError(
                f"a prompt is at least one token, each in [0, {vocab_size}); got "
                f"{f'a {bad[0]}' if bad else 'none'}"
            )
        if request.max_new < 1:
            raise ValueError(f"max_new is {request.max_new}; it is at least 1")
        given = f"a prompt of {request.prompt_len} and max_new={request.max_new}"
        if request.most_slots > self.table.max_context:
            raise ValueError(
                f"{given} grow a row to {request.most_slots}, past "
                f"max_context={self.table.max_context}; shorten one of them"
            )
        if self.pages(request) * self.allocator.page_size > self.allocator.size:
            raise ValueError(
                f"{given} take {request.most_slots} slots and a window of {self.window}, in whole "
                f"pages of {self.allocator.page_size}, and the pool has {self.allocator.size} in "
                "all; shorten one, or build a larger pool"
            )

    def join(self, waiting: deque[Request], running: Iterable[Request]) -> Iterator[Request]:
        """Take from ``waiting`` whom there is room for, and give each a row.

        First come, first served: a large request is not overtaken for ever by small ones.
        """
        free = self.allocator.size // self.allocator.page_size - sum(map(self.pages, running))
        while waiting and self.table.available:
            free -= self.pages(waiting[0])
            if free < 0:
                return
            request = waiting.popleft()
            (request.row,) = self.table.alloc()
            yield request

    def check(self, running: Iterable[Request]) -> None:
        """Recount, between steps: every slot is free or of one of the requests.

        Raises:
            RuntimeError: what does not add up.
        """
        self.allocator.check_consistent()
        requests, page = list(running), self.allocator.page_size
        lengths = [int(self.table.lengths[request.row]) for request in requests]
        for what, found, right in (
            ("live slots", self.allocator.live, sum(lengths)),
            ("held slots", self.allocator.held, sum(-n % page for n in lengths)),
            ("rows in use", self.table.requests - self.table.available, len(lengths)),
        ):
            if found != right:
                raise RuntimeError(f"{what}: {found}, but running requests account for {right}")
        for request, length in zip(requests, lengths, strict=True):
            prefilled = length == len(request.tokens) - 1
            if not (prefilled or length < request.prompt_len - 1):
                raise RuntimeError(
                    f"request {request.id} has {len(request.tokens)} tokens, and its row {length}"
                )
