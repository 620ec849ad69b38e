"""The real model, once: its tokenizer and template, and losslessness on both kinds of pool.

Where the file is required (CI=true or SPECPOOL_REQUIRE_MODEL=1) its absence is a failure.
"""

import os

import jinja2
import pytest
import torch

from specpool.demo.drafts import Oracle, PromptLookup
from specpool.demo.generate import FreeSlots, greedy, kv_errors, speculate
from specpool.demo.llama import DenseAttention, Llama
from specpool.demo.minimax import BlockSparseAttention
from specpool.demo.parts import SMOLLM2, packaged_model
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.weights import load_gguf
from tests.demo.tiny import CPU

pytestmark = pytest.mark.model
NODES = 16


class Watched(BlockSparseAttention):
    """Counts the blocks that it leaves out."""

    dropped = 0

    def keep_blocks(self, best, query_blocks):
        keep = super().keep_blocks(best, query_blocks)
        self.dropped += int(((best > float("-inf")) & ~keep).sum())
        return keep


@pytest.fixture(scope="module")
def path():
    if SMOLLM2.present():
        return packaged_model()
    message = f"SmolLM2 is not installed: {SMOLLM2.command}"
    if os.environ.get("CI") == "true" or os.environ.get("SPECPOOL_REQUIRE_MODEL") == "1":
        pytest.fail(message)
    pytest.skip(message)


def check(model, kind, prompt, new, draft_of, margin, tolerance):
    """Compare text and KV of one answer; returns its figures and the attention."""
    size = len(prompt) + new + NODES
    plain = greedy(
        model, kind(model.config, size, model.dtype, CPU), FreeSlots(size, seed=1), prompt, new
    )
    assert min(plain.margins) > margin
    attention = kind(model.config, size, model.dtype, CPU)
    result = speculate(
        model, attention, FreeSlots(size), prompt, new, draft_of(prompt, plain.tokens)
    )
    assert result.tokens == plain.tokens
    fresh = kind(model.config, size, model.dtype, CPU)
    assert max(kv_errors(model, attention, fresh, result).values()) < tolerance
    assert result.stats.launches == result.stats.relocating_steps
    return result.stats, attention


def oracle(prompt, tokens):
    return Oracle(len(prompt), tokens, 49152, NODES, seed=1)


def lookup(prompt, tokens):
    return PromptLookup(NODES)


def test_dense_attention_in_float32(path):
    weights, tokenizer = load_gguf(path, torch.float32, CPU)
    model = Llama(weights)
    for name, draft in (("sky", oracle), ("code", lookup)):
        prompt = tokenizer.encode(chat(PROMPTS[name]))
        stats, _ = check(model, DenseAttention, prompt, 32, draft, 1e-3, 1e-3)
        assert stats.steps < stats.tokens
        assert draft is lookup or stats.relocating_steps > 2

    text = "It's 2024: naïve café, 東京 ١٢½ \t\n  x_1 = f(10)  <|im_end|>\U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" 2024")] == [" ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    for question in PROMPTS.values():
        assert tokenizer.decode(tokenizer.encode(chat(question))) == chat(question)


def test_block_sparse_attention_in_float64(path):
    weights, tokenizer = load_gguf(path, torch.float64, CPU)
    prompt = tokenizer.encode(chat(PROMPTS["code"]))
    stats, attention = check(Llama(weights), Watched, prompt, 24, oracle, 1e-6, 1e-9)
    assert stats.relocating_steps > 2
    assert attention.dropped > 0


def test_the_template_is_the_files_own(path):
    from gguf import GGUFReader

    template = GGUFReader(path).fields["tokenizer.chat_template"].contents()
    question = PROMPTS["code"]
    messages = [{"role": "user", "content": question}]
    rendered = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert chat(question) == rendered
