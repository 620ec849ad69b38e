"""The loop gives what plain greedy decoding gives, in text and in KV, whatever pool, pages, drafts
and company a request has.
"""

import doctest

import pytest

from specpool.spec import loop as loop_module
from specpool.spec import protocols
from tests.spec.serving import NEW, PROMPTS, World, plain

REMAP, MOVE, PAGES_16, PAGES_64 = (1, "remap"), (1, "move"), (16, "move"), (64, "auto")
SERVED = [
    *(
        (drafts, pages)
        for drafts in ("oracle", "tree")
        for pages in (REMAP, MOVE, PAGES_16, PAGES_64)
    ),
    *((drafts, pages) for drafts in ("lookup", "chain") for pages in (REMAP, PAGES_16)),
    ("lookup chain", PAGES_64),
]


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


@pytest.mark.parametrize(
    ("drafts", "pages"), SERVED, ids=[f"{drafts}-{page}-{mode}" for drafts, (page, mode) in SERVED]
)
@pytest.mark.parametrize("kind", ["mha", "minimax"])
def test_batches_are_lossless(kind, drafts, pages):
    page, mode = pages
    world = World(kind, page, mode, drafts)
    ids = serve(world, range(len(PROMPTS)))
    for request, prompt in ids.items():
        assert world.answers[request] == plain(kind, prompt)
        assert world.reasons[request] == "length"
    world.assert_kv()
    if kind == "minimax":
        assert world.target.attention.dropped > 1000
    stats = world.loop.stats
    assert stats.tokens == NEW * len(PROMPTS)
    assert stats.target_forwards == world.target.forwards
    if drafts in ("oracle", "tree"):
        assert stats.tokens_a_step > 1.5
        assert (stats.relocating_steps > 5) == (mode != "remap")
    if drafts in ("chain", "tree"):
        assert world.draft_errors.keys() == ids.keys()


@pytest.mark.parametrize("drafts", ["oracle", "lookup", "chain"])
@pytest.mark.parametrize("prompt", [0, 7])
def test_a_batch_of_one_is_lossless(prompt, drafts):
    world = World("minimax", 16, "move", drafts)
    world.loop.submit(PROMPTS[prompt], NEW)
    assert [t for event in world.loop.stream() for t in event.tokens] == plain("minimax", prompt)
    world.loop.check()
    world.assert_kv()


def test_a_moved_row_is_one_launch_a_pool():
    world = World("minimax", 16, "move", "tree")
    movers = [pool.mover for pool in world.loop.pools]
    before = [mover.launches for mover in movers]
    serve(world, range(4))
    launches = [m.launches - n for m, n in zip(movers, before, strict=True)]
    steps = world.loop.stats.relocating_steps
    assert launches[0] == steps
    assert launches[1] <= 2 * world.loop.stats.steps  # and one a step, to the order of the tree
