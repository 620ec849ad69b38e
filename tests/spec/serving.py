"""Tiny targets, an oracle drafter, and a loop whose every row's KV is held against a plain forward.

The oracle of text is the demo's plain greedy decoding, one request at a time; the oracle of KV is
one plain forward of a row's own tokens on a pool of its own. Neither knows a slot of the loop's.
"""

import dataclasses
import functools
import random

import torch

from specpool import RowMover, rows_from
from specpool.allocator import PagedSlotAllocator
from specpool.demo.llama import DenseAttention, Llama, Step
from specpool.demo.minimax import BlockSparseAttention, Sparsity
from specpool.demo.target import LlamaTarget
from specpool.demo.weights import Config
from specpool.request_table import RequestTable
from specpool.spec import DraftModel, DraftTree, DraftVerifyLoop, PromptLookup
from tests.demo.tiny import random_weights

CPU = torch.device("cpu")
VOCAB = 61
CONFIG = Config(3, 32, 64, 4, 2, 8, VOCAB, 4096, 1e4, 1e-5, None)
SPARSITY = Sparsity(dense_layers=1, block=4, topk=3, alpha=1.0)  # selects from 12 tokens on
NEW = 20
EXACT = 1e-9
LENGTHS = [1, 2, 7, 16, 17, 30, 33, 48]
PROMPTS = [
    torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in LENGTHS
]


class Selecting(BlockSparseAttention):
    """Counts the blocks that it leaves out, and how near it came to other ones."""

    def __init__(self, config, size, dtype, device, page_size=1):
        super().__init__(config, size, dtype, device, SPARSITY, page_size=page_size)
        self.dropped = 0

    def keep_blocks(self, best, query_blocks):
        keep = super().keep_blocks(best, query_blocks)
        self.dropped += int(((best > float("-inf")) & ~keep).sum())
        return keep


ATTENTIONS = {"mha": DenseAttention, "minimax": Selecting}


@functools.cache
def model():
    return Llama(random_weights(CONFIG, dtype=torch.float64, seed=3))


@functools.cache
def draft_model():
    """The same model with noise in its head: often right, and never for sure."""
    weights = random_weights(CONFIG, dtype=torch.float64, seed=3)
    noise = torch.randn(weights.head.shape, generator=torch.Generator().manual_seed(5))
    return Llama(dataclasses.replace(weights, head=weights.head + 0.1 * noise.double()))


def attention(kind, size, page=1):
    return ATTENTIONS[kind](CONFIG, size, torch.float64, CPU, page_size=page)


@functools.cache
def plain(kind, prompt):
    """The answer of plain greedy decoding, far from ties."""
    return decoded(model(), attention(kind, len(PROMPTS[prompt]) + NEW), PROMPTS[prompt], NEW, 1e-6)


def decoded(model, fresh, prompt, new, margin):
    """Greedy decoding one token at a time, on an unused pool, no choice nearer than ``margin``."""
    tokens, slots, fed = list(prompt), [], prompt
    for _ in range(new):
        loc = list(range(len(slots) + 1, len(slots) + 1 + len(fed)))
        logits = model.forward(Step.run(fed, slots, loc, CPU), fresh)[-1]
        first, second = logits.topk(2).values.tolist()
        assert first - second > margin
        slots, fed = slots + loc, [int(logits.argmax())]
        tokens += fed
    return tokens[len(prompt) :]


def kv_error(target, tokens, slots):
    """How far the KV in ``slots`` is from one plain forward of ``tokens``."""
    if not tokens:
        return 0.0
    model, kind = target.model, type(target.attention)
    fresh = kind(model.config, len(tokens), model.dtype, CPU)
    own = list(range(1, len(tokens) + 1))
    model.forward(Step.run(tokens, [], own, CPU), fresh)
    expected = fresh.buffers()
    return max(
        float((found[slots.long()] - wanted[own]).abs().max())
        for name, layers in target.attention.buffers().items()
        for found, wanted in zip(layers, expected[name], strict=True)
    )


class Oracle:
    """Knows each prompt's answer and hides some of it among decoys, in a random order of nodes."""

    pools = ()

    def __init__(self, answers, window=12, seed=0, vocab=VOCAB):
        self.answers = answers  # by prompt
        self.window, self.vocab = window, vocab
        self.random = random.Random(seed)
        self.left = []

    def draft(self, batch):
        trees = [
            self.tree(list(context), room)
            for context, room in zip(batch.contexts, batch.room, strict=True)
        ]
        return DraftTree(
            self.column([tokens for tokens, _ in trees], torch.int64),
            self.column([parents for _, parents in trees], torch.int32),
            torch.tensor([len(tokens) for tokens, _ in trees], dtype=torch.int32),
            self.window - 1,
        )

    def column(self, lists, dtype):
        padding = [-1] * self.window
        return torch.tensor([[*v, *padding][: self.window] for v in lists], dtype=dtype)

    def tree(self, context, room):
        """Tokens and parents, each node behind its parent and in no other order."""
        rng = self.random
        known = self.known(context)[: rng.randint(0, 6)]
        chains = [known]
        for _ in range(3):
            decoy = [rng.randrange(self.vocab) for _ in range(rng.randint(1, 3))]
            chains.append(known[: rng.randint(0, len(known))] + decoy)
        rng.shuffle(chains)
        paths = [tuple(c[: depth + 1]) for c in chains for depth in range(len(c[:room]))]
        children = list(dict.fromkeys(paths))[: self.window - 1]
        tokens, parents, place = [context[-1]], [-1], {(): 0}
        while len(tokens) <= len(children):
            ready = [p for p in children if p not in place and p[:-1] in place]
            path = rng.choice(ready)
            place[path] = len(tokens)
            tokens.append(path[-1])
            parents.append(place[path[:-1]])
        return tokens, parents

    def known(self, context):
        """What follows; a text gone wrong is drafted for by place, since its prompt is known."""
        prompt, answer = max(
            (pair for pair in self.answers if pair[0] == context[: len(pair[0])]),
            key=lambda pair: len(pair[0]),
        )
        return answer[len(context) - len(prompt) :]

    def leave(self, request):
        self.left.append(request)


def scattered(size, page, seed=0):
    """An allocator whose free pages lie in no order, as a busy pool's do."""
    allocator = PagedSlotAllocator(size, page, "cpu")
    pages = allocator.alloc(size).view(-1, page)
    for i in torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed)).tolist():
        allocator.free(pages[i])
    return allocator


class World:
    """A loop over a tiny Llama; ``finished`` is what each request's row held when it left.

    Attributes:
        answers: tokens of each request, as events told them.
        reasons: why each request ended.
    """

    def __init__(
        self,
        kind="mha",
        page=1,
        mode="auto",
        drafts="oracle",
        *,
        answers=None,
        slots=1200,
        **options,
    ):
        size = -(-slots // page) * page
        self.target = LlamaTarget(model(), attention(kind, size, page))
        self.draft = None
        if drafts in ("chain", "tree", "sampled"):
            self.draft = LlamaTarget(draft_model(), attention("mha", size, page))
        made = {
            "oracle": lambda: Oracle(
                answers or [(p, plain(kind, i)) for i, p in enumerate(PROMPTS)]
            ),
            "lookup": lambda: PromptLookup(8),
            "lookup chain": lambda: PromptLookup(5, candidates=1),
            "chain": lambda: DraftModel(self.draft, steps=3),
            "tree": lambda: DraftModel(self.draft, steps=3, topk=3, num_draft_tokens=6),
            "sampled": lambda: DraftModel(self.draft, steps=3, sampled=True),
        }
        self.drafter = made[drafts]() if isinstance(drafts, str) else drafts
        self.allocator = scattered(size, page)
        self.table = RequestTable(8, 200, "cpu")
        self.attached = torch.zeros(size + page, 1, dtype=torch.int64)
        self.target.attention.pool.mover.attach("tokens", self.attached)
        self.loop = DraftVerifyLoop(
            self.target,
            self.drafter,
            self.allocator,
            self.table,
            mode=mode,
            on_finish=self.left,
            **{"prefill_chunk": 16, **options},
        )
        self.answers, self.reasons, self.errors, self.draft_errors = {}, {}, {}, {}
        self.kept = {}
        self._attach_tokens()

    def _attach_tokens(self):
        forward = self.target.forward

        def writing(step):
            live = step.out_cache_loc >= 0
            self.attached[step.out_cache_loc[live], 0] = step.tokens[live]
            return forward(step)

        self.target.forward = writing

    def left(self, request, tokens, slots):
        """Compare all KV that a row holds as it leaves."""
        self.kept[request] = len(slots)
        self.errors[request] = kv_error(self.target, tokens[: len(slots)], slots)
        assert len(slots) <= len(tokens) - 1, "a row holds no more than all but the last token"
        if self.attached[slots.long(), 0].tolist() != tokens[: len(slots)]:
            self.errors[request] = float("inf")  # what was attached did not move along
        if self.draft and request in self.drafter._known:
            seen = len(slots) - 1  # the last token of a path may be fed with the next root
            self.draft_errors[request] = kv_error(self.draft, tokens[:seen], slots[:seen])

    def step(self):
        events = self.loop.step()
        self.loop.check()
        self.take(events)
        return events

    def take(self, events):
        for event in events:
            self.answers.setdefault(event.request, []).extend(event.tokens)
            if event.finished:
                assert event.request not in self.reasons
                self.reasons[event.request] = event.finished

    def run(self):
        while self.loop.running or self.loop.waiting:
            self.step()

    def assert_kv(self):
        assert self.errors
        assert max(self.errors.values()) < EXACT
        assert max(self.draft_errors.values(), default=0.0) < EXACT
        assert self.allocator.live == 0


class Sums:
    """A target whose KV is one number a token, and whose next token follows from all it sees."""

    vocab_size = 50

    def __init__(self, size, vocab=50):
        self.vocab_size = vocab
        self.kv = torch.zeros(size, 1, dtype=torch.int64)
        self.pools = [RowMover(rows_from(self.kv))]

    def forward(self, step):
        live = step.out_cache_loc >= 0
        self.kv[step.out_cache_loc[live], 0] = self.value(step.tokens, step.positions)[live]
        seen = self.kv[step.context_loc, 0]
        total = (seen[:, None] * step.visible).sum(-1)
        return torch.nn.functional.one_hot(self.next(total), self.vocab_size).float()

    def next(self, total):
        return total // 7 % self.vocab_size

    @staticmethod
    def value(tokens, positions):
        return (tokens + 3) * (positions + 1)

    def continuation(self, tokens, count):
        """Plain decoding, by the formula alone."""
        tokens, begin = list(tokens), len(tokens)
        for _ in range(count):
            total = sum((t + 3) * (p + 1) for p, t in enumerate(tokens))
            tokens.append(total // 7 % self.vocab_size)
        return tokens[begin:]
