"""The loop gives what plain greedy decoding gives, in text and in KV, whatever pool, pages, drafts
and company a request has.
"""

import doctest

import pytest

from specpool.spec import loop as loop_module
from specpool.spec import protocols
from tests.spec.serving import NEW, PROMPTS, World, plain

PAGES = [(1, "remap"), (1, "move"), (16, "move"), (64, "auto")]
DRAFTS = ["oracle", "lookup", "lookup chain", "chain", "tree"]


def serve(world, prompts, joining=3):
    """The first prompts at once, the others one a step from the third step on."""
    prompts = list(prompts)
    ids = {}
    for prompt in prompts[:joining]:
        ids[world.loop.submit(PROMPTS[prompt], NEW)] = prompt
    world.step()
    world.step()
    for prompt in prompts[joining:]:
        ids[world.loop.submit(PROMPTS[prompt], NEW)] = prompt
        world.step()
    world.run()
    return ids


@pytest.mark.parametrize("module", [loop_module, protocols])
def test_documented_examples(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize(("page", "mode"), PAGES)
@pytest.mark.parametrize("kind", ["mha", "minimax"])
def test_batches_are_lossless(kind, page, mode, drafts):
    world = World(kind, page, mode, drafts)
    ids = serve(world, range(len(PROMPTS)))
    for request, prompt in ids.items():
        assert world.answers[request] == plain(kind, prompt)
        assert world.reasons[request] == "length"
    world.assert_kv()
    stats = world.loop.stats
    assert stats.tokens == NEW * len(PROMPTS)
    assert stats.target_forwards == world.target.forwards
    if drafts == "oracle":
        assert stats.tokens_a_step > 1.5
        assert (stats.relocating_steps > 5) == (mode != "remap")
    if drafts in ("chain", "tree"):
        assert world.draft_errors.keys() == ids.keys()
