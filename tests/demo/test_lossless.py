"""Draft and verify against plain greedy decoding, on text and on every kind of buffer, and the
faults that these checks must catch.

Float64 throughout, so that what is equal is equal to rounding and no near tie hides a fault.
"""

import pytest
import torch

from specpool.demo.drafts import Oracle
from specpool.demo.generate import kv_errors
from specpool.demo.serve import TimedTarget, serve, slots_needed
from tests.demo.tiny import (
    ATTENTIONS,
    CONFIG,
    CPU,
    NEW,
    PROMPTS,
    Watched,
    new_attention,
    reference,
    tiny_model,
)
from tests.spec.serving import scattered

NODES = 24
EXACT = 1e-9
BROKEN = 0.1  # what a fault leaves at the least; values are near 1
KINDS = {
    "mha": ["main K", "main V"],
    "minimax": ["main K", "main V", "index K of K-only layers", "index K", "index V"],
}
LEFT_OUT = [(kind, buffer) for kind, buffers in KINDS.items() for buffer in buffers]


def decode(kind, prompt, plant=lambda attention: None, attention_class=None):
    """One answer with oracle drafts; returns figures, KV errors and whether the text is right."""
    tokens, expected = PROMPTS[prompt], reference(kind, prompt)[0].tokens
    size = slots_needed([tokens], NEW, NODES, 1, 1)
    attention = (attention_class or ATTENTIONS[kind])(CONFIG, size, torch.float64, CPU)
    plant(attention)
    allocator = scattered(size, 1, seed=prompt)
    draft = Oracle([(tokens, expected)], NODES, CONFIG.vocab, seed=prompt)
    target = TimedTarget(tiny_model(), attention)
    (answer,), figures = serve(target, draft, allocator, [tokens], NEW)
    assert allocator.available == size  # none leaked
    assert answer.stored == (tokens + answer.tokens)[:-1]
    plain = new_attention(kind, len(answer.stored))
    errors = kv_errors(tiny_model(), plain, answer.stored, answer.kept)
    return figures, errors, answer.tokens == expected


def moved_pairs(out_cache_loc, accept_index, accept_len):
    """Source and target slots of a batch of one."""
    count = int(accept_len[0])
    window = out_cache_loc[0]
    return window[accept_index[0, :count].long()], window[:count]


def move_without(left_out):
    """A right move in plain torch of every kind of buffer but one."""

    def plant(attention):
        def move(*accepted):
            source, target = moved_pairs(*accepted)
            for kind, buffers in attention.buffers().items():
                if kind != left_out:
                    for buffer in buffers:
                        buffer[target] = buffer[source].clone()

        attention.pool.move_accepted = move

    return plant


def move_nothing(attention):
    attention.pool.move_accepted = lambda *accepted: None


def move_descending(attention):
    """In place, the last pair first: a later target is overwritten before it is read."""

    def move(*accepted):
        pairs = list(zip(*moved_pairs(*accepted), strict=True))
        for buffers in attention.buffers().values():
            for buffer in buffers:
                for source, target in reversed(pairs):
                    buffer[target] = buffer[source]

    attention.pool.move_accepted = move


class BlockByPlace(Watched):
    """Takes a node's place in the context for its position."""

    def blocks(self, step):
        place = torch.arange(len(step.context_loc))
        return place[-len(step.loc) :] // self.sparsity.block, place // self.sparsity.block


class MaskAfterMaximum(Watched):
    """Lets a node of a tree choose blocks by its siblings' tokens."""

    def block_scores(self, scores, visible, key_blocks):
        if scores.shape[0] < scores.shape[-1]:  # a tree; text alone fills its context
            visible = torch.ones_like(visible)
        return super().block_scores(scores, visible, key_blocks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", range(3))
def test_plain_decoding_is_far_from_ties(kind, prompt):
    answer, attention = reference(kind, prompt)
    assert len(answer.tokens) == NEW
    assert min(answer.margins) > 1e-6
    if kind == "minimax":
        assert attention.margin > 1e-9
        assert attention.dropped > 1000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", range(3))
def test_speculation_is_lossless(kind, prompt):
    calls = []

    def count_pairs(attention):
        move = attention.pool.move_accepted

        def counted(*accepted):
            source, target = moved_pairs(*accepted)
            moving = source != target
            sources, targets = set(source[moving].tolist()), set(target[moving].tolist())
            calls.append((len(sources), not sources.isdisjoint(targets)))
            move(*accepted)

        attention.pool.move_accepted = counted

    figures, errors, same_text = decode(kind, prompt, count_pairs)
    assert same_text
    assert list(errors) == KINDS[kind]
    assert max(errors.values()) < EXACT
    assert figures.tokens == NEW
    assert figures.relocating_steps == len(calls) > 5
    assert all(pairs for pairs, _ in calls)  # none is made where nothing lies elsewhere
    assert any(overlap for _, overlap in calls)
    assert figures.launches == figures.relocating_steps  # one each, whatever the buffers
    assert figures.relocating_steps <= figures.target_forwards < NEW
    buffers = sum(map(len, new_attention(kind, 1).buffers().values()))
    assert figures.rows_moved == sum(pairs for pairs, _ in calls) * buffers


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_move_is_right_when_nothing_is_left_out(kind):
    _, errors, same_text = decode(kind, 0, move_without(None))
    assert same_text
    assert max(errors.values()) < EXACT


@pytest.mark.parametrize(
    ("kind", "left_out"), LEFT_OUT, ids=[f"{kind}: {left}" for kind, left in LEFT_OUT]
)
def test_a_buffer_left_out_is_caught(kind, left_out):
    outcomes = [decode(kind, prompt, move_without(left_out)) for prompt in range(3)]
    assert all(errors[left_out] > BROKEN for _, errors, _ in outcomes)
    assert not all(same_text for _, _, same_text in outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_no_relocation_is_caught(kind):
    outcomes = [decode(kind, prompt, move_nothing) for prompt in range(3)]
    assert all(min(errors.values()) > BROKEN for _, errors, _ in outcomes)
    assert not all(same_text for _, _, same_text in outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_that_overwrites_its_sources_is_caught(kind):
    outcomes = [decode(kind, prompt, move_descending) for prompt in range(3)]
    # Text may stay right all the same, which is why KV is compared.
    assert all(min(errors.values()) > BROKEN for _, errors, _ in outcomes)


@pytest.mark.parametrize("mistaken", [BlockByPlace, MaskAfterMaximum])
def test_a_mistake_in_tree_selection_is_caught(mistaken):
    outcomes = [decode("minimax", prompt, attention_class=mistaken) for prompt in range(3)]
    assert all(max(errors.values()) > BROKEN for _, errors, _ in outcomes)
    assert not all(same_text for _, _, same_text in outcomes)
