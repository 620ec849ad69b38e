"""Requests that stop, fill up, wait, are cancelled or fail, and what the others notice: nothing."""

import pytest
import torch

from specpool.allocator import OutOfSlots
from specpool.spec import PromptLookup, judge
from tests.spec.serving import NEW, PROMPTS, World, plain


def first_at(tokens, place):
    """A place at or behind ``place`` whose token stands there for the first time."""
    return next(i for i in range(place, len(tokens)) if tokens[i] not in tokens[:i])


@pytest.mark.parametrize(("page", "mode"), [(1, "remap"), (1, "move"), (16, "move")])
def test_stop_tokens_inside_an_accepted_run(monkeypatch, page, mode):
    accepted, verify = [], judge._verify

    def spy(tree, logits, batch):
        answer = verify(tree, logits, batch)
        accepted.append(dict(zip(batch.requests, answer.accept_len.tolist(), strict=True)))
        return answer

    monkeypatch.setattr(judge, "_verify", spy)
    world = World(page=page, mode=mode)
    ends, cut = {}, 0
    for i, prompt in enumerate(PROMPTS):
        answer = plain("mha", i)
        place = first_at(answer, 3 + i % 5)
        request = world.loop.submit(prompt, NEW, stop=[answer[place]])
        ends[request] = answer[: place + 1]
    while world.loop.running or world.loop.waiting:
        for event in world.step():
            if event.finished:
                cut += len(event.tokens) < accepted[-1][event.request]
    assert world.answers == ends
    assert set(world.reasons.values()) == {"stop"}
    assert cut > 0, "no run went on behind a stop token"
    for request, prompt in enumerate(PROMPTS):
        assert world.kept[request] == len(prompt) + len(ends[request]) - 1
    world.assert_kv()


def test_eos_ends_every_answer_and_a_stop_token_its_own():
    answer = plain("mha", 5)
    eos, stop = answer[first_at(answer, 6)], answer[first_at(answer, 2)]
    world = World(eos=[eos])
    world.loop.submit(PROMPTS[5], NEW)
    world.loop.submit(PROMPTS[5], NEW, stop=[stop])
    world.loop.submit(PROMPTS[5], 2)
    world.run()
    assert world.reasons == {0: "eos", 1: "stop", 2: "length"}
    assert world.answers[0] == answer[: answer.index(eos) + 1]
    assert world.answers[1] == answer[: answer.index(stop) + 1]
    assert world.answers[2] == answer[:2]
    world.assert_kv()


@pytest.mark.parametrize("drafts", ["oracle", "tree"])
@pytest.mark.parametrize("max_new", [1, 2, 5])
def test_max_new_inside_a_window_and_a_row_filled_to_its_last_entry(max_new, drafts):
    world = World(drafts=drafts)
    world.table.max_context = len(PROMPTS[6]) + max_new - 1
    world.loop.submit(PROMPTS[6], max_new)
    with pytest.raises(ValueError, match="past max_context="):
        world.loop.submit(PROMPTS[6], max_new + 1)
    world.run()
    assert world.answers[0] == plain("mha", 6)[:max_new]
    world.assert_kv()


def test_requests_wait_for_slots_in_order_and_never_forever():
    world = World(page=16, slots=7 * 16)
    order = [7, 6, 0, 3]  # 5 pages, 4, 2 and 3, their windows included
    for prompt in order:
        world.loop.submit(PROMPTS[prompt], NEW)
    ended = []
    while world.loop.running or world.loop.waiting:
        events = world.step()
        if 0 not in world.reasons:
            assert list(world.loop.running) == [0]  # 2 has room, and 1 is not overtaken
        ended += [event.request for event in events if event.finished]
        assert sum(map(world.loop._admission.pages, world.loop._running.values())) <= 7
    assert ended[0] == 0
    for request, prompt in enumerate(order):
        assert world.answers[request] == plain("mha", prompt)
    world.assert_kv()


def test_slots_taken_by_others_are_an_error_and_nothing_is_lost():
    world = World()
    world.loop.submit(PROMPTS[4], NEW)
    world.step()
    taken = world.allocator.alloc(world.allocator.available - 3)
    with pytest.raises(OutOfSlots):
        world.loop.step()
    world.allocator.free(taken)
    world.run()
    assert world.answers[0] == plain("mha", 4)
    world.assert_kv()


def test_cancel_waiting_prefilling_and_decoding_requests():
    world = World(prefill_chunk=8)
    ids = [world.loop.submit(PROMPTS[i], NEW) for i in (3, 7, 5, 6)]
    world.step()
    assert int(world.table.lengths[world.loop.running[ids[1]]]) == 8  # of 47
    world.loop.cancel(ids[1])
    world.loop.check()
    world.step()
    world.step()
    world.loop.cancel(ids[2])
    waiting = world.loop.submit(PROMPTS[0], NEW)
    assert world.loop.waiting == [waiting]
    world.loop.cancel(waiting)
    world.run()
    assert world.answers[ids[0]] == plain("mha", 3)
    assert world.answers[ids[3]] == plain("mha", 6)
    assert world.answers[ids[1]] == world.answers[waiting] == []
    assert world.answers[ids[2]] == plain("mha", 5)[: len(world.answers[ids[2]])]
    assert [world.reasons[i] for i in (ids[1], ids[2], waiting)] == ["cancelled"] * 3
    assert sorted(world.drafter.left) == ids
    world.assert_kv()
    for unknown in (ids[0], waiting, 99):
        with pytest.raises(ValueError, match=f"request {unknown} is not waiting or running"):
            world.loop.cancel(unknown)


def test_stream_tells_nothing_of_a_request_after_its_cancellation():
    world = World()
    first, second = (world.loop.submit(PROMPTS[i], NEW) for i in (3, 4))
    told, third = [], None
    for event in world.loop.stream():
        told.append(event)
        if third is None:
            world.loop.cancel(second)  # whose event of the same step is still to come
            third = world.loop.submit(PROMPTS[5], NEW)
    of = {i: [e for e in told if e.request == i] for i in (first, second, third)}
    assert of[second] == [(second, [], "cancelled")]
    for request, prompt in ((first, 3), (third, 5)):
        assert [t for e in of[request] for t in e.tokens] == plain("mha", prompt)
    assert [e.finished for e in of[third]][-1] == "length"
    assert world.loop.step() == []


def nan_at(world, request, call):
    """The target's logits for a request are NaN at the ``call``-th verification of its row."""
    forward, calls = world.target.forward, []

    def poisoned(step):
        logits = forward(step)
        row = world.loop.running.get(request)
        if row is not None and len(calls) >= 0 and step.out_cache_loc.shape[1] == 12:
            calls.append(None)
            if len(calls) == call:
                place = list(world.loop.running.values()).index(row)
                logits = logits.clone()
                logits[place] = float("nan")
        return logits

    world.target.forward = poisoned


@pytest.mark.parametrize(("page", "mode"), [(1, "remap"), (16, "move")])
def test_nan_fails_its_request_and_no_other(page, mode):
    world = World(page=page, mode=mode)
    nan_at(world, 1, 3)
    for i in (3, 4, 5):
        world.loop.submit(PROMPTS[i], NEW)
    world.run()
    assert world.reasons == {0: "length", 1: "nan", 2: "length"}
    assert world.answers[0] == plain("mha", 3)
    assert world.answers[2] == plain("mha", 5)
    got = world.answers[1]
    assert got == plain("mha", 4)[: len(got)]
    assert len(got) < NEW
    world.assert_kv()


def test_nan_raises_before_anything_is_committed_when_checks_are_on(monkeypatch):
    monkeypatch.setenv("SPECPOOL_CHECK", "1")
    world = World()
    nan_at(world, 0, 2)
    world.loop.submit(PROMPTS[3], NEW)
    with pytest.raises(ValueError, match="NaN"):
        world.run()
    world.loop.check()
    world.run()
    assert world.answers[0] == plain("mha", 3)
    world.assert_kv()


@pytest.mark.parametrize("culprit", ["target", "drafter", "leave", "finish"])
def test_whatever_raises_loses_nothing(culprit):
    world = World(page=16, mode="move", prefill_chunk=8)
    calls = []

    def failing(right):
        def wrapped(*args):
            calls.append(None)
            if len(calls) % 2:
                raise RuntimeError("of the user's own")
            return right(*args)

        return wrapped

    if culprit == "target":
        world.target.forward = failing(world.target.forward)
    elif culprit == "finish":
        world.loop.on_finish = failing(world.loop.on_finish)
    else:
        name = {"drafter": "draft"}.get(culprit, culprit)
        setattr(world.drafter, name, failing(getattr(world.drafter, name)))
    for prompt in PROMPTS[:5]:
        world.loop.submit(prompt, NEW)
    raised = 0
    while world.loop.running or world.loop.waiting:
        try:
            world.take(world.loop.step())
        except RuntimeError:
            raised += 1
        world.loop.check()
    world.take(world.loop.step())
    assert raised > 1
    assert [world.answers[i] for i in range(5)] == [plain("mha", i) for i in range(5)]
    world.assert_kv()


def test_bad_requests_are_refused():
    loop = World().loop
    for prompt, max_new, message in [
        ([], 3, "at least one token"),
        ([1, 61], 3, r"in \[0, 61\)"),
        ([-1], 3, r"in \[0, 61\)"),
        ([1], 0, "max_new is 0"),
        ([1] * 201, 1, "max_context=200"),
    ]:
        with pytest.raises(ValueError, match=message):
            loop.submit(prompt, max_new)
    with pytest.raises(TypeError):
        loop.submit([1.5], 3)
    with pytest.raises(TypeError):
        loop.submit([1], 3.0)
    assert not loop.waiting
    small = World(drafts=PromptLookup(1200))
    with pytest.raises(ValueError, match="the pool has 1200 in all"):
        small.loop.submit([1], 3)


def test_bad_loops_are_refused():
    with pytest.raises(ValueError, match="mode='remap' needs pages of one slot"):
        World(page=16, mode="remap")
    with pytest.raises(ValueError, match="'auto', 'remap' or 'move'"):
        World(mode="swap")
    with pytest.raises(ValueError, match="at least 1"):
        World(prefill_chunk=0)
    drafter = PromptLookup(4)
    drafter.pools = World().target.pools
    drafter.pools[0].mover  # noqa: B018
    world = World()
    drafter.pools = world.target.pools
    with pytest.raises(ValueError, match=r"twice|share|overlap|both"):
        type(world.loop)(world.target, drafter, world.allocator, world.table)
    assert torch.equal(world.table.lengths, torch.zeros(8, dtype=torch.int64))
