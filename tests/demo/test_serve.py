"""Serving: what comes of each answer, what the figures count, and that no slot is lost."""

import dataclasses
import itertools

import pytest

from specpool.demo.drafts import Oracle
from specpool.demo.llama import Llama
from specpool.demo.serve import TimedTarget, serve, slots_needed
from specpool.spec import PromptLookup
from tests.demo.tiny import NEW, PROMPTS, new_attention, reference, tiny_model
from tests.spec.serving import scattered

NODES = 24


def world(prompts, *, page=1, batch=1, model=None):
    """A target and an allocator with room for a batch."""
    size = slots_needed(prompts, NEW, NODES, batch, page)
    attention = new_attention("mha", size, page=page)
    return TimedTarget(model or tiny_model(), attention), scattered(size, page)


def oracle(seed=0):
    answers = [(prompt, reference("mha", i)[0].tokens) for i, prompt in enumerate(PROMPTS)]
    return Oracle(answers, NODES, 257, seed)


@pytest.mark.parametrize("page", [1, 128])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_answers_come_in_parts_and_are_counted(batch, page):
    target, allocator = world(PROMPTS, page=page, batch=batch)
    events = []
    answers, figures = serve(
        target, oracle(), allocator, PROMPTS, NEW, batch=batch, on_event=events.append
    )
    for request, answer in enumerate(answers):
        mine = [event for event in events if event.request == request]
        assert answer.tokens == reference("mha", request)[0].tokens
        assert list(itertools.chain(*(event.tokens for event in mine))) == answer.tokens
        assert len(mine) == answer.steps < NEW
        assert mine[-1].finished == "length"
    steps = sum(answer.steps for answer in answers)
    assert figures.tokens == 3 * NEW
    assert figures.tokens_per_step == figures.tokens / steps
    assert (figures.target_forwards == steps) == (batch == 1)
    assert figures.prompt_forwards + figures.target_forwards == target.forwards
    assert figures.launches == figures.relocating_steps > 5
    assert figures.rows_moved > 0
    assert 0 < figures.move_seconds < figures.model_seconds < figures.seconds
    assert allocator.available == allocator.size


@pytest.mark.parametrize("seed", range(6))  # the end falls at different places of a step
def test_the_end_token_ends_an_answer_inside_a_step(seed):
    expected = reference("mha", 0)[0].tokens
    weights = tiny_model().weights
    config = dataclasses.replace(weights.config, eos=expected[20])
    model = Llama(dataclasses.replace(weights, config=config))
    target, allocator = world(PROMPTS[:1], model=model)
    (answer,), _ = serve(target, oracle(seed), allocator, PROMPTS[:1], NEW)
    assert answer.tokens == expected[: expected.index(expected[20]) + 1]
    assert answer.stored == (PROMPTS[0] + answer.tokens)[:-1]


def test_a_prompt_of_one_token_is_enough():
    target, allocator = world([[7]])
    (answer,), figures = serve(target, PromptLookup(8), allocator, [[7]], 4)
    assert len(answer.tokens) == 4
    assert figures.prompt_forwards == 0


def test_draws_are_seeded():
    def drawn(temperature):
        target, allocator = world(PROMPTS)
        answers, _ = serve(
            target, PromptLookup(8), allocator, PROMPTS, NEW, temperature=temperature
        )
        return [answer.tokens for answer in answers]

    assert drawn(0.8) == drawn(0.8) != drawn(0.9)


@pytest.mark.parametrize(("page", "slots"), [(1, 2 * 98), (16, 2 * 112), (128, 2 * 128)])
def test_slots_are_whole_pages_of_the_longest(page, slots):
    assert slots_needed([[0] * 10, [0] * 64], 10, 24, 2, page) == slots
