"""A tiny Llama whose heads and layers divide, and a loop of draft, verify, relay and commit.

The oracle is one process: plain greedy decoding for the text, one plain forward of a row's tokens
for the KV, of which each rank must hold its share.
"""

import functools
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from specpool import RowMover, rows_from
from specpool.demo.llama import DenseAttention, Llama, Step
from specpool.demo.minimax import BlockSparseAttention, Sparsity
from specpool.demo.parallel import (
    BlockSparsePart,
    DensePart,
    ParallelLlama,
    Place,
    head_share,
    stage_layers,
    stage_share,
)
from specpool.demo.target import LlamaTarget
from specpool.demo.weights import Config
from specpool.request_table import RequestTable
from specpool.spec import DraftBatch, DraftTree, ForwardStep, Sampling, commit, verify_greedy
from specpool.spec.feed import feed
from specpool.spec.parallel import broadcast_accept, check_agreement
from tests.demo.tiny import CPU, random_weights
from tests.spec.serving import scattered

CONFIG = Config(5, 32, 64, 8, 4, 8, 61, 4096, 1e4, 1e-5, None)
SPARSITY = Sparsity(dense_layers=1, block=4, topk=3, alpha=1.0)  # selects from 12 tokens on
NEW = 24
SLOTS = 640
PROMPTS = [
    torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (7, 17, 33)
]


@functools.cache
def weights():
    return random_weights(CONFIG, seed=3)


def whole(kind, config, size, dtype):
    """One process' attention."""
    if kind == "mha":
        return DenseAttention(config, size, dtype, CPU)
    return BlockSparseAttention(config, size, dtype, CPU, SPARSITY)


def part(kind, config, place, page, dtype):
    """A rank's attention."""
    if kind == "mha":
        return DensePart(config, SLOTS, dtype, CPU, place, page_size=page)
    return BlockSparsePart(config, SLOTS, dtype, CPU, place, SPARSITY, page_size=page)


def plain(model, kind, prompts, new, margin):
    """Each prompt's answer by plain greedy decoding in one process, far from ties."""
    return [_plain(model, kind, prompt, new, margin) for prompt in prompts]


def _plain(model, kind, prompt, new, margin):
    attention = whole(kind, model.config, len(prompt) + new, model.dtype)
    loc = list(range(1, len(prompt)))
    model.forward(Step.run(prompt[:-1], [], loc, CPU), attention)
    tokens = prompt[-1:]
    for _ in range(new):
        slot = len(loc) + 1
        logits = model.forward(Step.run(tokens[-1:], loc, [slot], CPU), attention)[0]
        best = logits.topk(2)
        assert best.values[0] - best.values[1] > margin
        tokens.append(int(best.indices[0]))
        loc.append(slot)
    return tokens[1:]


@functools.cache
def tiny_plain(kind):
    return plain(Llama(weights()), kind, PROMPTS, NEW, 1e-6)


class Oracle:
    """Hides some of each request's answer among decoys; the answer is known by its place."""

    window, pools = 10, ()

    def __init__(self, task, seed):
        self.task, self.random = task, random.Random(seed)

    def draft(self, batch):
        each = zip(batch.rows, batch.contexts, batch.room, strict=True)
        chains = [self.chains(*request) for request in each]
        return DraftTree.from_chains(batch.roots, chains, self.window)

    def chains(self, row, context, room):
        rng = self.random
        told = len(context) - len(self.task.prompts[row])
        known = self.task.answers[row][told:][: rng.randint(0, 5)]
        chains = [known]
        for _ in range(3):
            decoy = [rng.randrange(61) for _ in range(rng.randint(1, 3))]
            chains.append(known[: rng.randint(0, len(known))] + decoy)
        rng.shuffle(chains)
        return [chain[:room] for chain in chains]


@dataclass
class Task:
    """What all ranks are to do; ``stay`` are ranks whose pools do not move, ``seeds`` drafts'."""

    kind: str
    page: int
    prompts: list
    answers: list
    new: int
    stages: int
    stay: tuple = ()
    seeds: tuple = (0, 0, 0, 0)
    file: str | None = None  # the weights, where they are not the tiny model's


def places(world, stages):
    """The ranks of a grid: neighbours share heads, and stages are ``world / stages`` apart."""
    shares = world // stages
    mine = dist.get_rank()
    tensor = pipeline = None
    for s in range(stages if shares > 1 else 0):  # every rank takes part in making every group
        group = dist.new_group([s * shares + i for i in range(shares)])
        tensor = group if mine // shares == s else tensor
    for i in range(shares if stages > 1 else 0):
        group = dist.new_group([s * shares + i for s in range(stages)])
        pipeline = group if mine % shares == i else pipeline
    return tensor, pipeline


def decode(rank, world, task):
    """A rank's job: all prompts to their end. Returns contexts, its KV by kind, steps and moves."""
    target = rank_target(rank, world, task)
    moved = [target.attention.pool]
    if rank in task.stay:
        moved = [RowMover(rows_from(torch.zeros(SLOTS + task.page, 1)))]  # planted
    drafter = Oracle(task, task.seeds[rank])
    return serve(task, target, moved, drafter, src=world - 1)


def rank_target(rank, world, task):
    """The rank's share of the model, over a pool of its own."""
    tensor, pipeline = places(world, task.stages)
    shares = world // task.stages
    model = torch.load(task.file, mmap=True, weights_only=False) if task.file else weights()
    layers = stage_layers(model.config.layers, rank // shares, task.stages)
    place = Place(layers, tensor, pipeline)
    share = stage_share(head_share(model, rank % shares, shares), layers)
    dtype = share.embedding.dtype
    attention = part(task.kind, share.config, place, task.page, dtype)
    return LlamaTarget(ParallelLlama(share, place), attention)


def serve(task, target, moved, drafter, src):
    allocator = scattered(SLOTS, task.page)
    table = RequestTable(len(task.prompts), 200, "cpu")
    rows = table.alloc(len(task.prompts))
    contexts = [list(prompt) for prompt in task.prompts]
    feed(target, allocator, table, {row: contexts[row][:-1] for row in rows})
    left = [task.new for _ in rows]
    step = 0
    while any(left):
        now = [row for row in rows if left[row]]
        lengths = table.lengths[now]
        ends = lengths + drafter.window
        window = allocator.alloc_extend(lengths, ends, table.last_loc[now]).view(len(now), -1)
        batch = DraftBatch(
            requests=now,
            contexts=[contexts[row] for row in now],
            room=[left[row] - 1 for row in now],
            vocab_size=target.vocab_size,
            window=window,
            rows=now,
            table=table,
            sampling=[Sampling()] * len(now),
            generator=None,
        )
        tree = drafter.draft(batch)
        check_agreement(tree, now, window, step=step)
        loc = torch.where(tree.live, window, -1)
        logits = target.forward(ForwardStep.tree(table, now, tree, loc))
        own = verify_greedy(tree, logits) if dist.get_rank() == src else None
        accept = broadcast_accept(own, tree, now, window, step=step, src=src)
        commit(moved, allocator, table, now, window, accept.accept_index, accept.accept_len, "move")
        allocator.check_consistent()
        for r, row in enumerate(now):
            path = accept.accept_index[r, 1 : int(accept.accept_len[r])].long()
            new = [*tree.tokens.flatten()[path].tolist(), int(accept.bonus[r])]
            contexts[row] += new
            left[row] -= len(new)
        step += 1
    kv = {
        name: [[buffer[table.row(row).long()].numpy() for buffer in buffers] for row in rows]
        for name, buffers in target.attention.buffers().items()
    }
    return contexts, kv, step, sum(mover.launches for mover in map(_mover, moved))


def _mover(pool):
    return pool if isinstance(pool, RowMover) else pool.mover


def kv_errors(model, task, world, results):
    """The largest difference of each rank's KV from its share of one plain forward, by rank."""
    shares = world // task.stages
    errors = []
    for rank, (contexts, kv, _, _) in enumerate(results):
        layers = stage_layers(model.config.layers, rank // shares, task.stages)
        worst = 0.0
        for row, context in enumerate(contexts):
            expected = _expected(model, task.kind, tuple(context[:-1]))
            for name, buffers in expected.items():
                wanted = [buffer for layer, buffer in buffers if layer in layers]
                if name.startswith("main"):
                    wanted = [np.split(w, shares, axis=1)[rank % shares] for w in wanted]
                for found, right in zip(kv[name][row], wanted, strict=True):
                    assert found.shape == right.shape
                    worst = max(worst, float(np.nan_to_num(abs(found - right), nan=np.inf).max()))
        errors.append(worst)
    return errors


def _expected(model, kind, tokens):
    """One plain forward's KV, ``(layer, [n, heads, width])`` by kind of buffer."""
    attention = whole(kind, model.config, len(tokens), model.dtype)
    loc = list(range(1, len(tokens) + 1))
    model.forward(Step.run(tokens, [], loc, CPU), attention)
    every = range(model.config.layers)
    by_kind = {
        "index K of K-only layers": getattr(attention, "index_k_layers", every),
        "index K": getattr(attention, "index_kv_layers", every),
        "index V": getattr(attention, "index_kv_layers", every),
    }
    return {
        name: [
            (layer, buffer[loc].numpy())
            for layer, buffer in zip(by_kind.get(name, every), buffers, strict=True)
        ]
        for name, buffers in attention.buffers().items()
    }
