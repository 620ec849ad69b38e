"""Several processes give what one gives, in text and in KV: heads split, layers split, and both."""

import numpy as np
import pytest
import torch

from specpool.demo.llama import Llama
from specpool.demo.parallel import head_share, stage_layers
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.weights import load_gguf
from tests.demo.tiny import CPU
from tests.spec import parallel_world as world
from tests.spec.parallel_ranks import Ranks

EXACT = 1e-9
WRONG = 1e-3
AT_ONCE = 20  # seconds; what waits for a timeout waits for 60
# ranks, pipeline stages
GRIDS = {"tp2": (2, 1), "tp4": (4, 1), "pp2": (2, 2), "pp4": (4, 4), "tp2 x pp2": (4, 2)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def tiny_task(kind, page, stages, **options):
    answers = world.tiny_plain(kind)
    return world.Task(kind, page, world.PROMPTS, answers, world.NEW, stages, **options)


def run(ranks, model, count, task):
    """Each rank's largest KV error and whether the texts are right; all ranks agree and move."""
    results = ranks.run(count, world.decode, task)
    contexts, _, steps, _ = results[0]
    assert all(result[0] == contexts and result[2] == steps for result in results)
    assert steps < task.new, "some drafts were accepted"
    expected = [p + a for p, a in zip(task.prompts, task.answers, strict=True)]
    moves = [result[3] for rank, result in enumerate(results) if rank not in task.stay]
    assert min(moves) > 1
    return world.kv_errors(model, task, count, results), contexts == expected


@pytest.mark.parametrize("kind", ["mha", "minimax"])
@pytest.mark.parametrize("grid", GRIDS)
def test_ranks_are_lossless(ranks, grid, kind):
    count, stages = GRIDS[grid]
    page = 16 if kind == "mha" else 1
    errors, right = run(ranks, Llama(world.weights()), count, tiny_task(kind, page, stages))
    assert right
    assert max(errors) < EXACT


@pytest.mark.parametrize(
    ("grid", "stay"), [("pp2", (0,)), ("pp4", (0, 1, 2)), ("pp4", (3,)), ("tp2", (0,))]
)
def test_a_rank_that_does_not_move_is_caught(ranks, grid, stay):
    """As where only the last stage compacted; the ranks that stay are wrong themselves."""
    count, stages = GRIDS[grid]
    errors, _ = run(
        ranks, Llama(world.weights()), count, tiny_task("minimax", 1, stages, stay=stay)
    )
    assert min(errors[rank] for rank in stay) > WRONG


@pytest.mark.parametrize("grid", ["tp2", "pp4"])
def test_ranks_that_draft_differently_end_at_once(ranks, grid):
    count, stages = GRIDS[grid]
    task = tiny_task("mha", 1, stages, seeds=(0, 1, 0, 0))
    for outcome in ranks.outcomes(count, world.decode, task):
        assert outcome.error.startswith("RanksDisagree: ranks are at different steps: rank 1 ")
        assert outcome.seconds < AT_ONCE


def test_index_rows_are_whole_on_every_rank(ranks):
    """Not a share each: equal on all ranks, to the bit, as one reduction made them."""
    results = ranks.run(4, world.decode, tiny_task("minimax", 1, 1))
    for name in ("index K of K-only layers", "index K", "index V"):
        first = results[0][1][name]
        assert len(first[0]) == 2
        for _, kv, _, _ in results[1:]:
            for rows, others in zip(first, kv[name], strict=True):
                assert all(map(np.array_equal, rows, others))


def test_shares():
    with pytest.raises(ValueError, match="kv_heads=4 does not divide among 8 ranks"):
        head_share(world.weights(), 0, 8)
    assert [list(stage_layers(5, rank, 3)) for rank in range(3)] == [[0, 1], [2, 3], [4]]


@pytest.mark.model
def test_stages_of_smollm2(ranks, path, tmp_path):
    """30 layers in 2 and in 4 stages, in float32."""
    weights, tokenizer = load_gguf(path, torch.float32, CPU)
    torch.save(weights, tmp_path / "weights")  # every stage reads its own layers of it
    model = Llama(weights)
    prompts = [tokenizer.encode(chat(PROMPTS["sky"]))]
    answers = world.plain(model, "mha", prompts, 10, 1e-3)
    for stages in (2, 4):
        file = str(tmp_path / "weights")
        task = world.Task("mha", 16, prompts, answers, 10, stages, file=file)
        errors, right = run(ranks, model, stages, task)
        assert right
        assert max(errors) < 1e-3
