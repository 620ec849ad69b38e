"""The batched target: ragged and padded batches are what one request at a time is."""

import pytest
import torch

from specpool.allocator import PagedSlotAllocator
from specpool.demo.llama import Step
from specpool.demo.target import LlamaTarget
from specpool.request_table import RequestTable
from specpool.spec import DraftTree, ForwardStep
from specpool.spec.feed import feed
from tests.demo.tiny import CONFIG, CPU, new_attention, tiny_model


@pytest.mark.parametrize("kind", ["mha", "minimax"])
def test_a_ragged_batch_is_what_each_request_is_alone(kind):
    target = LlamaTarget(tiny_model(), new_attention(kind, 200))
    allocator, table = PagedSlotAllocator(200, 1, "cpu"), RequestTable(4, 100, "cpu")
    rows = table.alloc(3)
    texts = [list(range(40)), [5], list(range(60, 90))]
    feed(target, allocator, table, dict(zip(rows, texts, strict=True)))

    chains = [[[1, 2], [1, 3]], [], [[4]]]
    tree = DraftTree.from_chains([7, 8, -1], chains, 5)  # the last row is padding
    window = allocator.alloc(15).view(3, 5)
    loc = torch.where(tree.live, window, -1)
    dummy = [layers[0][0].clone() for layers in target.attention.buffers().values()]
    logits = target.forward(ForwardStep.tree(table, rows, tree, loc))
    assert logits.shape == (3, 5, CONFIG.vocab)
    assert not logits[~tree.live].any()
    for r, node, path in [(0, 0, [7]), (0, 2, [7, 1, 2]), (0, 3, [7, 1, 3]), (1, 0, [8])]:
        text = [*texts[r], *path]
        own = list(range(1, len(text) + 1))
        alone = tiny_model().forward(Step.run(text, [], own, CPU), new_attention(kind, len(text)))
        assert (alone[-1] - logits[r, node]).abs().max() < 1e-10
    untouched = [layers[0][0] for layers in target.attention.buffers().values()]
    assert all(map(torch.equal, untouched, dummy))
