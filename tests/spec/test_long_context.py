"""Past top-k times block (2,048 tokens) short prompts no longer hide what a sparse pool lost.

MiniMax-M3's own block of 128 and top-k of 16, on tiny random weights: a request whose index keys do
not move reads other blocks than plain decoding does.
"""

import functools

import pytest
import torch

from specpool.demo.generate import greedy, shuffled_slots
from specpool.demo.minimax import BlockSparseAttention, Sparsity
from specpool.demo.target import LlamaTarget
from specpool.request_table import RequestTable
from specpool.spec import DraftVerifyLoop
from tests.spec import serving

LENGTH, ANSWER = 2304, 12
PROMPT = torch.randint(0, serving.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(9))


class LongSelecting(BlockSparseAttention):
    """Selects 16 blocks of 128, and counts what it leaves out."""

    def __init__(self, config, size, dtype, device, page_size=1):
        sparsity = Sparsity(dense_layers=1, block=128, topk=16, alpha=1.0)
        super().__init__(config, size, dtype, device, sparsity, page_size=page_size)
        self.dropped = 0

    def keep_blocks(self, best, query_blocks):
        keep = super().keep_blocks(best, query_blocks)
        self.dropped += int(((best > float("-inf")) & ~keep).sum())
        return keep


def _attention(size):
    return LongSelecting(serving.CONFIG, size, torch.float64, serving.CPU)


@functools.cache
def _plain():
    size = LENGTH + ANSWER
    return greedy(
        serving.model(), _attention(size), shuffled_slots(size), PROMPT.tolist(), ANSWER
    ).tokens


def _run(leave_out=None):
    """The answer by oracle drafts, the KV error of the row, and the attention that served it."""
    size = 2 * LENGTH
    target = LlamaTarget(serving.model(), _attention(size))
    if leave_out:
        _keep_back(target.attention.pool, leave_out)
    errors = {}
    loop = DraftVerifyLoop(
        target,
        serving.Oracle([(PROMPT.tolist(), _plain())]),
        serving.scattered(size, 1),
        RequestTable(1, LENGTH + ANSWER, "cpu"),
        mode="move",
        on_finish=lambda request, tokens, slots: errors.update(
            {request: serving.kv_error(target, tokens[: len(slots)], slots)}
        ),
    )
    loop.submit(PROMPT.tolist(), ANSWER)
    tokens = [token for event in loop.stream() for token in event.tokens]
    return tokens, errors[0], target.attention, loop.stats


def _keep_back(pool, part):
    """A move that forgets a sub-pool."""
    moves = pool.move_accepted

    def forgetful(*accept):
        kept = [t.clone() for t in getattr(pool, part).k_buffer]
        moves(*accept)
        for tensor, old in zip(getattr(pool, part).k_buffer, kept, strict=True):
            tensor.copy_(old)

    pool.move_accepted = forgetful


def test_past_2048_tokens():
    tokens, error, attention, stats = _run()
    assert attention.dropped > 0
    assert stats.relocating_steps > 0
    assert tokens == _plain()
    assert error < serving.EXACT


@pytest.mark.parametrize("part", ["index_k_pool", "index_kv_pool"])
def test_index_keys_that_do_not_move_are_caught(part):
    _, error, _, _ = _run(leave_out=part)
    assert error > 0.1
