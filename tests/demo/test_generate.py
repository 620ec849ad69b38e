"""Decoding: what ends it, what it refuses, and that no slot is lost."""

import dataclasses
import itertools

import pytest
import torch

from specpool.demo.drafts import Oracle, PromptLookup, Tree
from specpool.demo.generate import (
    FreeSlots,
    PoolFullError,
    accepted_path,
    greedy,
    kv_errors,
    speculate,
)
from specpool.demo.llama import Llama
from tests.demo.tiny import NEW, PROMPTS, new_attention, reference, tiny_model


def plain(prompt, max_new, size=100):
    return greedy(tiny_model(), new_attention("mha", size), FreeSlots(size), prompt, max_new)


def drafted(prompt, max_new, size=100):
    attention = new_attention("mha", size)
    return speculate(tiny_model(), attention, FreeSlots(size), prompt, max_new, PromptLookup(8))


def test_slots_are_handed_out_once_and_never_the_dummy():
    free = FreeSlots(8)
    taken = free.take(8)
    assert sorted(taken) == [1, 2, 3, 4, 5, 6, 7, 8] != taken
    with pytest.raises(PoolFullError, match=r"1 slots asked for, 0 of 8 are free"):
        free.take(1)
    free.give(taken[:2])
    assert free.take(2) == taken[:2]


def test_the_accepted_path_follows_the_models_choices():
    tree = Tree([5, 6, 7, 8, 9], [-1, 0, 0, 2, 2])
    assert accepted_path(tree, [7, 0, 9, 0, 1]) == [0, 2, 4]
    assert accepted_path(tree, [1, 6, 7, 8, 9]) == [0]
    # The right token under another parent is not accepted.
    assert accepted_path(tree, [6, 9, 0, 0, 0]) == [0, 1]


@pytest.mark.parametrize("decode", [plain, drafted])
def test_bad_input_is_refused(decode):
    with pytest.raises(ValueError, match="the prompt holds no token"):
        decode([], 5)
    with pytest.raises(ValueError, match="max_new is 0; it must be at least 1"):
        decode([1, 2], 0)
    with pytest.raises(PoolFullError, match="63 slots asked for, 10 of 10 are free"):
        decode(PROMPTS[0], 5, size=10)


@pytest.mark.parametrize("decode", [plain, drafted])
def test_a_prompt_of_one_token_is_enough(decode):
    assert len(decode([7], 4).tokens) == 4


def test_on_tokens_gets_the_answer_in_parts():
    expected, shown = reference("mha", 0)[0].tokens, []
    size = len(PROMPTS[0]) + NEW + 24
    draft = Oracle(len(PROMPTS[0]), expected, 257, 24)
    attention, free = new_attention("mha", size), FreeSlots(size)
    result = speculate(tiny_model(), attention, free, PROMPTS[0], 50, draft, shown.append)
    assert list(itertools.chain(*shown)) == result.tokens == expected[:50]
    assert len(shown) == result.stats.steps < 50


def test_the_end_token_ends_both_answers_inside_a_step():
    expected = reference("mha", 0)[0].tokens
    eos = expected[20]
    end = expected.index(eos) + 1
    weights = tiny_model().weights
    config = dataclasses.replace(weights.config, eos=eos)
    model = Llama(dataclasses.replace(weights, config=config))
    size = len(PROMPTS[0]) + NEW + 24
    plain_answer = greedy(model, new_attention("mha", size), FreeSlots(size), PROMPTS[0], NEW)
    assert plain_answer.tokens == expected[:end]
    for seed in range(6):  # the end falls at different places of a step
        attention, free = new_attention("mha", size), FreeSlots(size)
        draft = Oracle(len(PROMPTS[0]), expected, 257, 24, seed)
        result = speculate(model, attention, free, PROMPTS[0], NEW, draft)
        assert result.tokens == expected[:end]
        assert len(free) + len(result.loc) == size
        assert len(result.stored_tokens) == len(result.loc)


def test_kv_that_is_not_a_number_is_no_small_error():
    size = 100
    attention, free = new_attention("mha", size), FreeSlots(size)
    result = speculate(tiny_model(), attention, free, PROMPTS[0], 4, PromptLookup(8))
    attention.buffers()["main V"][3][result.loc[5]] = torch.nan
    errors = kv_errors(tiny_model(), attention, new_attention("mha", size), result)
    assert errors["main K"] < 1e-9
    assert not errors["main V"] < 1e-9
