"""Many steps of random company: no slot is lost, and no row of another request ever changes.

``SPECPOOL_SOAK_STEPS`` makes it longer: thousands take a minute.
"""

import gc
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specpool.request_table import RequestTable
from specpool.spec import DraftModel, DraftVerifyLoop, PromptLookup
from tests.spec.serving import Oracle, Sums, scattered

ROOT = Path(__file__).parents[2]
STEPS = int(os.environ.get("SPECPOOL_SOAK_STEPS", "300"))


class Knowing(Oracle):
    """An oracle that works answers out, and forgets whom it is told to."""

    def __init__(self, target, seed):
        super().__init__([], window=10, seed=seed, vocab=50)
        self.target = target

    def known(self, context):
        return self.target.continuation(context, 6)


class Company:
    """Requests that come, go and are thrown out at random."""

    def __init__(self, page, mode, drafts, seed):
        self.random = random.Random(seed)
        self.target = Sums(640 + page)
        self.draft = Guess(640 + page)
        drafter = {
            "oracle": lambda: Knowing(self.target, seed),
            "lookup": lambda: PromptLookup(8),
            "tree": lambda: DraftModel(self.draft, steps=3, topk=2, num_draft_tokens=6),
        }[drafts]()
        self.allocator = scattered(640, page, seed)
        self.table = RequestTable(6, 64, "cpu")
        self.loop = DraftVerifyLoop(
            self.target, drafter, self.allocator, self.table, mode=mode, prefill_chunk=12, eos=[49]
        )
        self.prompts, self.answers, self.reasons = {}, {}, {}

    def turn(self):
        rng, loop = self.random, self.loop
        while len(loop.waiting) < 2 and rng.random() < 0.5:
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, 40))]
            new = rng.randint(1, 24)
            request = loop.submit(prompt, new, stop=[rng.randrange(50)])
            self.prompts[request], self.answers[request] = prompt, []
        if rng.random() < 0.1 and loop.running:
            loop.cancel(rng.choice([*loop.running, *loop.waiting]))
        before = {i: self.table.row(row).tolist() for i, row in loop.running.items()}
        for event in loop.step():
            self.answers[event.request] += event.tokens
            if event.finished:
                self.finish(event)
        loop.check()
        self.check_rows(before)

    def finish(self, event):
        prompt, answer = self.prompts.pop(event.request), self.answers.pop(event.request)
        assert answer == self.target.continuation(prompt, len(answer))
        self.reasons[event.finished] = self.reasons.get(event.finished, 0) + 1

    def check_rows(self, before):
        for request, row in self.loop.running.items():
            slots = self.table.row(row)
            kept = before.get(request, [])
            assert slots[: len(kept)].tolist() == kept
            tokens = torch.tensor([*self.prompts[request], *self.answers[request]][: len(slots)])
            expected = Sums.value(tokens, torch.arange(len(slots)))
            assert torch.equal(self.target.kv[slots.long(), 0], expected)
            if request in getattr(self.loop.drafter, "_known", []):
                seen = slots.long()[:-1]
                assert torch.equal(self.draft.kv[seen, 0], expected[:-1])


class Guess(Sums):
    """A draft model that is right two times in three."""

    def next(self, total):
        return total // 7 % self.vocab_size + (total % 3 == 0) * (total // 7 % 50 < 49)


@pytest.mark.parametrize("drafts", ["oracle", "lookup", "tree"])
@pytest.mark.parametrize(("page", "mode"), [(1, "remap"), (1, "move"), (16, "move")])
def test_soak(page, mode, drafts):
    company = Company(page, mode, drafts, seed=page)
    for _ in range(STEPS):
        company.turn()
    assert company.reasons.keys() == {"length", "stop", "eos", "cancelled"}
    stats = company.loop.stats
    assert stats.row_steps > 2 * stats.steps
    if mode == "remap" or drafts != "lookup":  # lookup seldom finds anything in these texts
        assert (stats.relocating_steps > 0) == (mode == "move")
    assert stats.tokens_a_step > (1 if drafts == "lookup" else 1.5)
    for request in [*company.loop.running, *company.loop.waiting]:
        company.loop.cancel(request)
    company.loop.check()
    assert company.allocator.available == company.allocator.size
    if drafts == "lookup":
        assert not company.loop.drafter._tries
    if drafts == "tree":
        assert not company.loop.drafter._known


def keep_busy(company, count):
    """``count`` steps with three requests or so, which join, finish and are cancelled."""
    loop, rng = company.loop, company.random
    for _ in range(count):
        while len(loop.running) + len(loop.waiting) < 3:
            loop.submit([rng.randrange(50) for _ in range(rng.randint(1, 30))], 20)
        if rng.random() < 0.1 and loop.running:
            loop.cancel(rng.choice(list(loop.running)))
        loop.step()


def test_memory_is_flat():
    company = Company(1, "move", "lookup", seed=3)
    loop = company.loop

    def steps(count):
        keep_busy(company, count)
        for request in [*loop.running, *loop.waiting]:
            loop.cancel(request)
        loop.step()
        gc.collect()
        tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
        return tensors, sys.getallocatedblocks()

    tensors, blocks = steps(400)  # caches have filled
    more_tensors, more_blocks = steps(1000)
    assert more_tensors == tensors
    assert more_blocks - blocks < 500  # one object lost a step would be 1,000


_PEAKS = """
import re, torch
from tests.spec.test_loop_soak import Company, keep_busy
torch.set_num_threads(1)
company, lost, peaks = Company(1, "move", "lookup", seed=3), [], []
for steps in (300, 1000):
    for _ in range(steps // 10):
        keep_busy(company, 10)
        if {leak} and steps == 1000:
            lost.append(bytearray(b"x" * 81920))  # 8 kB a step
    # of this program alone; getrusage would count the process that it was forked from
    peaks.append(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)))
print(peaks[1] - peaks[0])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells a peak of RSS")
@pytest.mark.parametrize("leak", [False, True])
def test_the_peak_of_memory_is_flat(leak):
    """Native memory too, in a process of its own; a leak of 8 kB a step would show."""
    script = _PEAKS.format(leak=leak)
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])},
    )
    grown = int(run.stdout)
    assert (grown > 4096) == leak, f"{grown} kB in 1,000 steps"
