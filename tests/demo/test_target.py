"""The batched target: ragged and padded batches are what one request at a time is, and SmolLM2
serves a batch without loss.
"""

import pytest
import torch

from specpool.allocator import PagedSlotAllocator
from specpool.demo.llama import DenseAttention, Llama, Step
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.target import LlamaTarget
from specpool.demo.weights import load_gguf
from specpool.request_table import RequestTable
from specpool.spec import DraftTree, DraftVerifyLoop, ForwardStep, PromptLookup
from specpool.spec.feed import feed
from tests.demo import test_smollm2
from tests.demo.tiny import CONFIG, CPU, new_attention, tiny_model
from tests.spec.serving import decoded, kv_error

smollm2_path = test_smollm2.path


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


@pytest.mark.model
def test_smollm2_serves_a_batch(smollm2_path):
    weights, tokenizer = load_gguf(smollm2_path, torch.float32, CPU)
    model = Llama(weights)
    prompts = [tokenizer.encode(chat(PROMPTS[name])) for name in ("code", "sky")]
    prompts += [prompts[0][:25], prompts[1][:9]]
    new, page = 16, 16
    expected = []
    for prompt in prompts:
        plain = DenseAttention(model.config, len(prompt) + new, torch.float32, CPU)
        expected.append(decoded(model, plain, prompt, new, margin=1e-3))

    attention = DenseAttention(model.config, 640, torch.float32, CPU, page_size=page)
    target, errors = LlamaTarget(model, attention), []
    loop = DraftVerifyLoop(
        target,
        PromptLookup(8),
        PagedSlotAllocator(640, page, "cpu"),
        RequestTable(4, 200, "cpu"),
        on_finish=lambda request, tokens, slots: errors.append(
            kv_error(target, tokens[: len(slots)], slots)
        ),
    )
    answers = {loop.submit(prompt, new): [] for prompt in prompts[:3]}
    for step, event in enumerate(loop.stream()):
        answers[event.request] += event.tokens
        if step == 3:
            answers[loop.submit(prompts[3], new)] = []
        loop.check()
    assert list(answers.values()) == expected
    assert len(errors) == 4
    assert max(errors) < 1e-3
    assert loop.stats.tokens_a_step > 1
