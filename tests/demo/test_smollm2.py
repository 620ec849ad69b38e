"""The real model: its tokenizer and template, and that its answers lose nothing.

A few runs of few tokens cover what can come together in a loop; tests/spec has the full matrix, on
tiny random weights.
Where the file is required (CI=true or SPECPOOL_REQUIRE_MODEL=1) its absence is a failure.
"""

import jinja2
import pytest
import torch

from specpool.demo.drafts import Oracle, model_drafter, without_a_sixth
from specpool.demo.generate import greedy, shuffled_slots
from specpool.demo.llama import DenseAttention, Llama
from specpool.demo.minimax import BlockSparseAttention
from specpool.demo.prompts import PROMPTS, chat
from specpool.demo.serve import slots_needed
from specpool.demo.target import LlamaTarget
from specpool.demo.weights import load_gguf
from specpool.request_table import RequestTable
from specpool.spec import DraftVerifyLoop, PromptLookup
from tests.demo.tiny import CPU
from tests.spec.serving import kv_error, scattered

pytestmark = pytest.mark.model
NODES, NEW = 16, 6
# pool, dtype, smallest margin of text, error of KV
KINDS = {"mha": (torch.float32, 1e-3, 1e-3), "minimax": (torch.float64, 1e-6, 1e-9)}
# pool, page size, mode, drafts, requests at once
SERVED = [
    ("mha", 1, "remap", "oracle", 8),
    ("mha", 16, "move", "model", 8),
    ("mha", 64, "move", "lookup", 1),
    ("minimax", 64, "move", "oracle", 8),
    ("minimax", 1, "remap", "lookup", 8),
    ("minimax", 16, "move", "model", 1),
]


class Watched(BlockSparseAttention):
    """Counts the blocks that it leaves out."""

    dropped = 0

    def keep_blocks(self, best, query_blocks):
        keep = super().keep_blocks(best, query_blocks)
        self.dropped += int(((best > float("-inf")) & ~keep).sum())
        return keep


ATTENTIONS = {"mha": DenseAttention, "minimax": Watched}


@pytest.fixture(scope="module")
def loaded(path):
    """Each kind's model, and eight ragged prompts with their plain answers, worked out once."""
    made = {}

    def load(kind):
        if kind not in made:
            dtype, margin, _ = KINDS[kind]
            weights, tokenizer = load_gguf(path, dtype, CPU)
            model = Llama(weights)
            code, sky = (tokenizer.encode(chat(PROMPTS[name])) for name in ("code", "sky"))
            prompts = [code, sky, code[:1], sky[:9], code[40:56], sky[:17], code[30:95], sky[5:38]]
            answers = []
            for prompt in prompts:
                size = len(prompt) + NEW
                attention = ATTENTIONS[kind](model.config, size, dtype, CPU)
                plain = greedy(model, attention, shuffled_slots(size), prompt, NEW)
                assert min(plain.margins) > margin
                answers.append(plain.tokens)
            made[kind] = model, prompts, answers
        return made[kind]

    return load


def drafter_of(name, model, prompts, answers, size, page):
    if name == "lookup":
        return PromptLookup(NODES)
    if name == "oracle":
        return Oracle(list(zip(prompts, answers, strict=True)), NODES, model.config.vocab, seed=1)
    smaller = Llama(without_a_sixth(model.weights))
    attention = DenseAttention(smaller.config, size, model.dtype, CPU, page_size=page)
    return model_drafter(LlamaTarget(smaller, attention), NODES, chain=False, sampled=False)


@pytest.mark.parametrize(
    ("kind", "page", "mode", "drafts", "batch"), SERVED, ids=["-".join(map(str, s)) for s in SERVED]
)
def test_served_without_loss(loaded, kind, page, mode, drafts, batch):
    model, prompts, answers = loaded(kind)
    if batch == 1:
        prompts, answers = prompts[:2], answers[:2]
    size = slots_needed(prompts, NEW, NODES, batch, page)
    attention = ATTENTIONS[kind](model.config, size, model.dtype, CPU, page_size=page)
    target, allocator, errors = LlamaTarget(model, attention), scattered(size, page), []
    loop = DraftVerifyLoop(
        target,
        drafter_of(drafts, model, prompts, answers, size, page),
        allocator,
        RequestTable(batch, max(map(len, prompts)) + NEW, CPU),
        eos=[model.config.eos],
        mode=mode,
        on_finish=lambda request, tokens, slots: errors.append(
            kv_error(target, tokens[: len(slots)], slots)
        ),
    )
    found = {}
    launches = attention.pool.mover.launches
    for joining, prompt in enumerate(prompts):
        found[loop.submit(prompt, NEW)] = []
        if joining in (4, 5, 6):  # five at once, then one a step
            take(loop, found)
    while loop.running or loop.waiting:
        take(loop, found)
    assert list(found.values()) == answers
    assert len(errors) == len(prompts)
    assert max(errors) < KINDS[kind][2]
    assert allocator.available == size
    stats = loop.stats
    assert drafts == "lookup" or stats.tokens_a_step > 1
    assert attention.pool.mover.launches - launches == stats.relocating_steps
    if mode == "move":
        assert drafts == "lookup" or stats.relocating_steps > 1
    if kind == "minimax":
        assert attention.dropped > 0


def take(loop, found):
    for event in loop.step():
        found[event.request] += event.tokens
    loop.check()


def test_the_tokenizer_gives_back_what_it_was_given(path):
    tokenizer = tokenizer_of(path)
    text = "It's 2024: naïve café, 東京 ١٢½ \t\n  x_1 = f(10)  <|im_end|>\U0001f600"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokenizer.decode([i]) for i in tokenizer.encode(" 2024")] == [" ", "2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
    for question in PROMPTS.values():
        assert tokenizer.decode(tokenizer.encode(chat(question))) == chat(question)


def tokenizer_of(path):
    """The file's tokenizer, without reading the weights."""

    class Enough(Exception):
        pass

    def stop(config, tokenizer):
        raise Enough(tokenizer)

    with pytest.raises(Enough) as found:
        load_gguf(path, torch.float32, CPU, on_config=stop)
    return found.value.args[0]


def test_the_template_is_the_files_own(path):
    from gguf import GGUFReader

    template = GGUFReader(path).fields["tokenizer.chat_template"].contents()
    question = PROMPTS["code"]
    messages = [{"role": "user", "content": question}]
    rendered = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert chat(question) == rendered
