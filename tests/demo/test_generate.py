"""Plain decoding: what ends it, what it refuses, and what its comparison of KV notices."""

import dataclasses

import pytest
import torch

from specpool.demo.generate import greedy, kv_errors, shuffled_slots
from specpool.demo.llama import Llama, Step
from tests.demo.tiny import CPU, NEW, PROMPTS, new_attention, reference, tiny_model


def plain(prompt, max_new, size=100):
    return greedy(tiny_model(), new_attention("mha", size), shuffled_slots(size), prompt, max_new)


def test_slots_are_in_no_order_and_never_the_dummy():
    slots = shuffled_slots(8)
    assert sorted(slots) == [1, 2, 3, 4, 5, 6, 7, 8] != slots


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="the prompt holds no token"):
        plain([], 5)
    with pytest.raises(ValueError, match="max_new is 0; it must be at least 1"):
        plain([1, 2], 0)
    with pytest.raises(ValueError, match="10 slots are too few for a prompt of 64 and 5 new"):
        plain(PROMPTS[0], 5, size=10)


def test_a_prompt_of_one_token_is_enough():
    assert len(plain([7], 4, size=4).tokens) == 4


def test_each_token_is_the_best_of_one_forward_of_all_before():
    answer, told = reference("mha", 0)[0], []
    size = len(PROMPTS[0]) + 9
    again = greedy(
        tiny_model(),
        new_attention("mha", size),
        range(1, size),
        PROMPTS[0],
        9,
        lambda: told.append(1),
    )
    assert again.tokens == answer.tokens[:9]
    assert len(told) == 9
    text = [*PROMPTS[0], *answer.tokens]
    loc = shuffled_slots(len(text))
    logits = tiny_model().forward(Step.run(text, [], loc, CPU), new_attention("mha", len(text)))
    assert logits.argmax(-1)[len(PROMPTS[0]) - 1 : -1].tolist() == answer.tokens


def test_the_end_token_ends_an_answer():
    expected = reference("mha", 0)[0].tokens
    weights = tiny_model().weights
    config = dataclasses.replace(weights.config, eos=expected[20])
    model = Llama(dataclasses.replace(weights, config=config))
    size = len(PROMPTS[0]) + NEW
    answer = greedy(model, new_attention("mha", size), shuffled_slots(size), PROMPTS[0], NEW)
    assert answer.tokens == expected[: expected.index(expected[20]) + 1]


def test_kv_that_is_not_a_number_is_no_small_error():
    text = PROMPTS[0]
    attention, loc = new_attention("mha", 100), shuffled_slots(100, seed=1)[: len(text)]
    tiny_model().forward(Step.run(text, [], loc, CPU), attention)
    kept = {kind: [b[loc] for b in layers] for kind, layers in attention.buffers().items()}
    kept["main V"][3][5] = torch.nan
    errors = kv_errors(tiny_model(), new_attention("mha", 100), text, kept)
    assert errors["main K"] < 1e-9
    assert not errors["main V"] < 1e-9
