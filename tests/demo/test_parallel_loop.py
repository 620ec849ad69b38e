"""The loop itself over several processes: each rank runs one, and one rank's answers count."""

import itertools

import pytest
import torch
import torch.distributed as dist

from specpool.request_table import RequestTable
from specpool.spec import (
    DraftVerifyLoop,
    PromptLookup,
    RanksDisagree,
    Sampling,
    broadcast_accept,
)
from tests.spec import parallel_world as world
from tests.spec.parallel_ranks import Ranks

GRIDS = {"tp2": (2, 1), "pp2": (2, 2)}  # ranks, pipeline stages


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def serve(rank, count, task, sampling, relay, window):
    """A rank's job: every prompt through a loop of its own. Returns answers and the KV error."""
    target = world.rank_target(rank, count, task)
    steps = itertools.count()

    def decide(accept, tree, rows, window):
        if not relay:
            return accept
        return broadcast_accept(accept, tree, rows, window, step=next(steps), src=count - 1)

    loop = DraftVerifyLoop(
        target,
        PromptLookup(window[rank]),
        world.scattered(world.SLOTS, task.page),
        RequestTable(2, 200, "cpu"),  # the third prompt joins when another leaves
        mode="move",
        generator=torch.Generator().manual_seed(rank),  # only one rank's draws count
        decide=decide,
    )
    ids = [loop.submit(prompt, task.new, sampling=sampling) for prompt in task.prompts]
    answers = {request: [] for request in ids}
    for event in loop.stream():
        answers[event.request] += event.tokens
    loop.check()
    dist.barrier()
    return list(answers.values()), loop.stats.relocating_steps


def _task(kind, stages):
    page = 16 if kind == "mha" else 1
    answers = world.tiny_plain(kind)
    return world.Task(kind, page, world.PROMPTS, answers, world.NEW, stages)


@pytest.mark.parametrize("kind", ["mha", "minimax"])
@pytest.mark.parametrize("grid", GRIDS)
def test_greedy_answers_are_those_of_one_process(ranks, grid, kind):
    count, stages = GRIDS[grid]
    task = _task(kind, stages)
    results = ranks.run(count, serve, task, Sampling(), True, (8, 8))
    for answers, _ in results:
        assert answers == task.answers


@pytest.mark.parametrize("grid", GRIDS)
def test_sampled_answers_are_one_ranks(ranks, grid):
    """Each rank draws with a generator of its own; without the relay they part ways."""
    count, stages = GRIDS[grid]
    sampling = Sampling(temperature=1.0)
    first, second = ranks.run(count, serve, _task("mha", stages), sampling, True, (8, 8))
    assert first == second


def test_ranks_with_other_windows_end_at_once(ranks):
    outcomes = ranks.outcomes(2, serve, _task("mha", 2), Sampling(), True, (8, 6))
    assert all(RanksDisagree.__name__ in (outcome.error or "") for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < 20
