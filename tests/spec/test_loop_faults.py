"""Faults planted in the loop's parts, each of which the checks of the other tests must catch."""

import dataclasses

import pytest
import torch

from specpool.spec import loop as loop_module
from tests.spec.serving import NEW, PROMPTS, World, plain

BROKEN = 0.1  # values are near 1


def run(world, kind="mha"):
    """Serve all prompts; the greatest error of KV, of the draft's KV, and whether text is right."""
    ids = {world.loop.submit(prompt, NEW): i for i, prompt in enumerate(PROMPTS)}
    world.run()
    text = all(world.answers[request] == plain(kind, i) for request, i in ids.items())
    return max(world.errors.values()), max(world.draft_errors.values(), default=0.0), text


@pytest.mark.parametrize("kind", ["mha", "minimax"])
def test_relocation_skipped(kind):
    world = World(kind, mode="move")
    world.target.attention.pool.move_accepted = lambda *accepted: None
    error, _, text = run(world, kind)
    assert error > BROKEN
    assert not text


@pytest.mark.parametrize("page", [1, 16])
def test_the_drafts_pool_not_moved(page):
    world = World("mha", page, "move", "tree")
    world.loop.pools.remove(world.draft.attention.pool)
    error, draft_error, text = run(world)
    assert error < BROKEN  # the answer is right all the same: the target decides
    assert text
    assert draft_error > BROKEN


def test_rejected_slots_not_freed():
    world = World(mode="move")
    free = world.allocator.free
    world.loop.submit(PROMPTS[3], NEW)
    world.step()
    world.allocator.free = lambda slots: None
    with pytest.raises(RuntimeError, match=r"live slots: \d+, but running requests account for"):
        world.run()
    world.allocator.free = free


def test_windows_of_failed_requests_not_freed(monkeypatch):
    world = World()
    monkeypatch.setattr(world.loop, "_free_rest", lambda slots, done: None)
    world.target.model = NaN(world.target.model)
    world.loop.submit(PROMPTS[3], NEW)
    with pytest.raises(RuntimeError, match="live slots"):
        world.run()


class NaN:
    """A model that has lost its mind."""

    def __init__(self, model):
        self.inner, self.config = model, model.config

    def forward(self, step, attention):
        return torch.full_like(self.inner.forward(step, attention), float("nan"))


def test_the_bonus_tokens_kv_forgotten():
    world = World()
    forward, pool = world.target.forward, world.target.attention.pool

    def forgetful(step):
        logits = forward(step)
        pool.get_key_buffer(0)[step.out_cache_loc[:, 0]] = 0  # the root of each tree
        return logits

    world.target.forward = forgetful
    error, _, text = run(world)
    assert error > BROKEN
    assert not text


def test_tree_positions_off_by_one():
    world = World()
    forward = world.target.forward

    def shifted(step):
        return forward(dataclasses.replace(step, positions=step.positions + (step.positions > 40)))

    world.target.forward = shifted
    assert run(world)[0] > BROKEN


def test_one_entry_too_many_kept_at_a_stop(monkeypatch):
    right = loop_module.judge

    def generous(*args):
        answer = right(*args)
        more = torch.tensor([why is not None for why in answer.finished]).int()
        more *= answer.host.accept_index.gather(1, answer.host.accept_len[:, None].long())[:, 0] > 0
        host = answer.host._replace(accept_len=answer.host.accept_len + more)
        return dataclasses.replace(answer, host=host, accept_len=answer.accept_len + more)

    monkeypatch.setattr(loop_module, "judge", generous)
    world = World()
    for i, prompt in enumerate(PROMPTS):
        world.loop.submit(prompt, NEW, stop=[plain("mha", i)[-3]])
    with pytest.raises(AssertionError, match="all but the last"):
        world.run()


def test_one_entry_too_few_kept():
    world = World()
    world.loop.submit(PROMPTS[4], NEW)
    world.step()
    world.loop._running[0].tokens.append(1)
    with pytest.raises(RuntimeError, match=r"request 0 has \d+ tokens, and its row \d+"):
        world.loop.check()
