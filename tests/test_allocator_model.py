"""Both allocators against a model of sets: whatever is asked in whatever order, nothing is lost."""

from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specpool.allocator import OutOfSlots, PagedSlotAllocator, SlotAllocator


class Allocators(RuleBasedStateMachine):
    """Requests as lists of slots; a page is in use while it has a slot of some request."""

    @initialize(page=st.sampled_from([1, 1, 2, 4, 7]), pages=st.integers(1, 12))
    def build(self, page, pages):
        self.page, self.total = page, page * pages
        if page == 1:
            self.allocator = SlotAllocator(self.total, "cpu")
        else:
            self.allocator = PagedSlotAllocator(self.total, page, "cpu")
        self.requests: list[list[int]] = []
        self.branches: list[list[int]] = []
        self.saved = None

    def in_use(self) -> list[int]:
        return [s for group in (*self.requests, *self.branches) for s in group]

    def used_pages(self) -> set[int]:
        return {s // self.page for s in self.in_use()}

    def free_pages(self) -> int:
        return self.total // self.page - len(self.used_pages())

    def pages_for(self, start: int, count: int) -> int:
        """New pages of positions [start, start + count), when the page of start - 1 is theirs."""
        page_of = {p // self.page for p in range(start, start + count)}
        return len(page_of - ({(start - 1) // self.page} if start else set()))

    def taken(self, call, pages: int, count: int) -> list[int]:
        """Call: all slots are new and in range, or pages were too few and nothing happened."""
        if pages > self.free_pages():
            with pytest.raises(OutOfSlots):
                call()
            return []
        slots = call().flatten().tolist()
        assert len(slots) == len(set(slots)) == count
        assert not set(slots) & set(self.in_use())
        assert all(self.page <= s < self.total + self.page for s in slots)
        return slots

    @rule(counts=st.lists(st.integers(0, 9), max_size=3))
    def start(self, counts):
        pages = sum(self.pages_for(0, c) for c in counts)
        none = [-1] * len(counts)
        slots = self.taken(
            lambda: self.allocator.alloc_extend([0] * len(counts), counts, none), pages, sum(counts)
        )
        while slots and counts:
            count = counts.pop(0)
            self.requests.append(slots[:count])
            del slots[:count]
        self.requests = [r for r in self.requests if r]

    @rule(count=st.integers(0, 9))
    def alloc(self, count):
        slots = self.taken(lambda: self.allocator.alloc(count), self.pages_for(0, count), count)
        if slots:
            self.requests.append(slots)

    @rule(counts=st.lists(st.integers(0, 9), min_size=1, max_size=4))
    def extend(self, counts):
        chosen = [r for r in self.requests if not self.is_branched(r)][: len(counts)]
        counts = counts[: len(chosen)]
        prefix = [len(r) for r in chosen]
        pages = sum(map(self.pages_for, prefix, counts))
        slots = self.taken(
            lambda: self.allocator.alloc_extend(
                prefix,
                [p + c for p, c in zip(prefix, counts, strict=True)],
                [r[-1] for r in chosen],
            ),
            pages,
            sum(counts),
        )
        if not slots:
            return
        for request, count in zip(chosen, counts, strict=True):
            request += slots[:count]
            del slots[:count]
            assert [s % self.page for s in request] == [p % self.page for p in range(len(request))]
            pages_of = [request[i : i + self.page] for i in range(0, len(request), self.page)]
            assert all(p == list(range(p[0], p[0] + len(p))) for p in pages_of)

    def is_branched(self, request) -> bool:
        return any(request[-1] // self.page in {s // self.page for s in b} for b in self.branches)

    @rule(topk=st.integers(1, 3), steps=st.integers(1, 5), which=st.integers(0, 9))
    def branch(self, topk, steps, which):
        free = [r for r in self.requests if not self.is_branched(r)]
        if not free:
            return
        request = free[which % len(free)]
        start = len(request)
        own = len({p // self.page for p in range(start, start + steps)})
        pages = self.pages_for(start, steps) + (topk - 1) * own
        last = torch.tensor([request[-1]])
        slots = self.taken(
            lambda: self.allocator.alloc_branches([start], last, topk, steps), pages, topk * steps
        )
        if slots:
            offsets = [p % self.page for p in range(start, start + steps)]
            assert [s % self.page for s in slots] == offsets * topk
            self.branches.append(slots)

    @rule(which=st.integers(0, 9))
    def end_branches(self, which):
        if self.branches:
            slots = self.branches.pop(which % len(self.branches))
            self.allocator.free(torch.tensor(slots))

    @rule(which=st.integers(0, 9), keep=st.integers(0, 9))
    def reject(self, which, keep):
        """Free a request's end, or all of it."""
        free = [r for r in self.requests if not self.is_branched(r)]
        if free:
            request = free[which % len(free)]
            self.allocator.free(torch.tensor(request[keep:], dtype=torch.int32))
            del request[keep:]
            self.requests = [r for r in self.requests if r]

    @rule(data=st.data())
    def refuse(self, data):
        """A free of something good and something bad frees neither."""
        used = self.in_use()
        good = used[:1]
        bad = data.draw(st.integers(-3, self.total + self.page + 3))
        with pytest.raises(ValueError, match=r"not of this allocator|not live|more than once"):
            self.allocator.free(torch.tensor([*good, bad, bad]))

    @rule()
    def save(self):
        copies = SimpleNamespace(
            requests=[list(r) for r in self.requests], branches=[list(b) for b in self.branches]
        )
        self.saved = (self.allocator.state(), copies)

    @rule()
    def roll_back(self):
        if self.saved is not None:
            self.allocator.restore(self.saved[0])
            self.requests = [list(r) for r in self.saved[1].requests]
            self.branches = [list(b) for b in self.saved[1].branches]

    @invariant()
    def adds_up(self):
        if not hasattr(self, "allocator"):
            return
        self.allocator.check_consistent()
        used, pages = self.in_use(), self.used_pages()
        assert self.allocator.live == len(used)
        assert self.allocator.available == self.total - len(pages) * self.page
        assert self.allocator.held == len(pages) * self.page - len(used)


Allocators.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, print_blob=True
)
TestAllocators = Allocators.TestCase
