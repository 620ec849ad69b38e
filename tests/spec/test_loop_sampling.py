"""Sampled requests: their tokens are distributed as the target's own draws, whatever is drafted."""

import itertools

import pytest
import torch

from specpool.allocator import SlotAllocator
from specpool.request_table import RequestTable
from specpool.spec import (
    DraftModel,
    DraftVerifyLoop,
    PromptLookup,
    Sampling,
    draft_model,
    probabilities,
)
from tests.spec.serving import NEW, PROMPTS, Sums, World, plain

VOCAB = 4
PROMPT = [0, 1, 2, 0, 1, 3, 0, 1]
COUNT = 3
REQUESTS = 3000
WARM = Sampling(temperature=0.8, top_p=0.9, top_k=3)


class Soft(Sums):
    """``Sums`` with logits that leave every token a chance."""

    def __init__(self, size, phase):
        super().__init__(size, VOCAB)
        self.phase = phase

    def next(self, total):
        return total

    def forward(self, step):
        live = step.out_cache_loc >= 0
        self.kv[step.out_cache_loc[live], 0] = self.value(step.tokens, step.positions)[live]
        seen = self.kv[step.context_loc, 0]
        return self.logits((seen[:, None] * step.visible).sum(-1))

    def logits(self, total):
        token = torch.arange(VOCAB)
        return torch.sin((total[..., None] % 97) * (token + 1.0) + self.phase + token) * 1.5

    def of(self, tokens):
        """Logits after some text, by the formula alone."""
        total = sum((t + 3) * (p + 1) for p, t in enumerate(tokens))
        return self.logits(torch.tensor([total]))[0]


def drafts(kind):
    if kind == "lookup":
        return PromptLookup(6, ngram=2)
    model = Soft(2000, 0.4)
    if kind == "tree":
        return DraftModel(model, steps=2, topk=2, num_draft_tokens=5)
    return DraftModel(model, steps=3, sampled=True)


def chi_square(sampling, drafter):
    """The statistic and its degrees of freedom, over the first COUNT tokens of many requests."""
    target = Soft(2000, 0.0)
    loop = DraftVerifyLoop(
        target,
        drafter,
        SlotAllocator(1999, "cpu"),
        RequestTable(100, 20, "cpu"),
        generator=torch.Generator().manual_seed(11),
    )
    for _ in range(REQUESTS):
        loop.submit(PROMPT, COUNT, sampling=sampling)
    texts = {}
    for event in loop.stream():
        texts.setdefault(event.request, []).extend(event.tokens)
    loop.check()
    statistic, cells = 0.0, 0
    given = (sampling.temperature, sampling.top_p, sampling.top_k)
    for text in itertools.product(range(VOCAB), repeat=COUNT):
        expected = float(REQUESTS)
        for i, token in enumerate(text):
            expected *= float(
                probabilities(target.of([*PROMPT, *text[:i]])[None], *given)[0, token]
            )
        found = sum(tuple(t) == text for t in texts.values())
        if expected == 0:
            assert found == 0
        else:
            statistic += (found - expected) ** 2 / max(expected, 1.0)
            cells += 1
    return statistic, cells - 1


def limit(freedom):
    return freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations above the mean


@pytest.mark.parametrize("sampling", [Sampling(1.0), WARM], ids=["plain", "top-p and top-k"])
@pytest.mark.parametrize("kind", ["lookup", "tree", "sampled"])
def test_tokens_follow_the_targets_distribution(kind, sampling):
    statistic, freedom = chi_square(sampling, drafts(kind))
    assert freedom > 5
    assert statistic < limit(freedom)


def test_the_likeliest_drafts_that_pass_for_drawn_ones_are_caught(monkeypatch):
    monkeypatch.setattr(
        draft_model, "sample_children", lambda q, k, generator: q.topk(k, dim=-1).indices
    )
    statistic, freedom = chi_square(Sampling(1.0), drafts("sampled"))
    assert statistic > 2 * limit(freedom)


@pytest.mark.parametrize("drafts", ["oracle", "sampled"])
def test_greedy_and_sampled_requests_share_a_batch(drafts):
    world = World(drafts=drafts, generator=torch.Generator().manual_seed(0))
    sure = [Sampling(), Sampling(2.0, top_k=1), Sampling(2.0, top_p=1e-6), Sampling(1e-6)]
    for sampling in sure:
        world.loop.submit(PROMPTS[4], NEW, sampling=sampling)
    for seed in range(4):
        world.loop.submit(PROMPTS[seed], NEW, sampling=Sampling(1.5, 0.9, 20))
    world.run()
    for request in range(len(sure)):
        assert world.answers[request] == plain("mha", 4)
    assert world.answers[7] != plain("mha", 3)
    world.assert_kv()


def test_a_seed_repeats_the_answers():
    def answers(seed):
        world = World(drafts="sampled", generator=torch.Generator().manual_seed(seed))
        for prompt in PROMPTS[:3]:
            world.loop.submit(prompt, NEW, sampling=Sampling(1.0))
        world.run()
        world.assert_kv()
        return world.answers

    assert answers(1) == answers(1) != answers(2)


def test_options_outside_their_range_are_refused():
    for bad in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": 0}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)
