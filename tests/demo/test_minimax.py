"""Block selection against a naive version, and the rules it must keep."""

import pytest
import torch

from specpool.demo.minimax import Sparsity
from tests.demo.tiny import CONFIG, CPU, Watched

INFINITY = float("inf")


def naive(scores, visible, query_blocks, key_blocks, topk):
    """Kept blocks of one query and one head, as a set, in plain Python."""
    best = {}
    for score, seen, block in zip(scores, visible, key_blocks, strict=True):
        if seen:
            best[block] = max(best.get(block, -INFINITY), score)
    forced = {0, query_blocks}
    ranked = sorted(best, key=lambda block: (block not in forced, -best[block], block))
    return set(ranked[:topk])


@pytest.fixture
def attention():
    return Watched(CONFIG, 8, torch.float64, CPU)


@pytest.mark.parametrize("seed", range(20))
def test_selection_is_the_naive_one(attention, seed):
    generator = torch.Generator().manual_seed(seed)
    queries, heads, keys = 5, 2, 60
    scores = torch.randn(queries, heads, keys, generator=generator, dtype=torch.float64)
    scores = scores.round(decimals=1)  # so that there are ties
    visible = torch.rand(queries, keys, generator=generator) < 0.3
    visible[:, -1] = visible[:, 0] = True
    key_blocks = torch.randint(0, 12, (keys,), generator=generator)
    key_blocks[0] = 0
    query_blocks = key_blocks[-1:].expand(queries)
    keep = attention.keep_blocks(attention.block_scores(scores, visible, key_blocks), query_blocks)
    for q in range(queries):
        for g in range(heads):
            expected = naive(
                scores[q, g].tolist(),
                visible[q].tolist(),
                int(query_blocks[q]),
                key_blocks.tolist(),
                attention.sparsity.topk,
            )
            assert set(keep[q, g].nonzero().flatten().tolist()) == expected


def test_a_block_without_a_visible_token_is_never_kept(attention):
    best = torch.full((1, 1, 9), -INFINITY)
    best[..., 2] = 1.0
    best[..., 8] = -5.0
    keep = attention.keep_blocks(best, torch.tensor([8]))
    assert keep.nonzero()[:, 2].tolist() == [2, 8]  # not even the first, where it is unseen


def test_of_equal_scores_the_earlier_block_wins(attention):
    best = torch.zeros(1, 1, 12)
    keep = attention.keep_blocks(best, torch.tensor([11]))
    assert keep.nonzero()[:, 2].tolist() == [0, 1, 2, 3, 4, 11]


def test_layers_are_dense_then_alternate(attention):
    assert list(attention.index_kv_layers) == [3, 5, 7]
    assert list(attention.index_k_layers) == [4, 6]
    assert len(attention.pool.rows()) == 2 * 8 + 2 * 3 + 2


def test_smollm2_selects_from_96_tokens_on():
    sparsity = Sparsity()
    assert sparsity.block * sparsity.topk == 96
