"""A drafter that is a model: any ``Target`` with a pool of its own, keyed by the target's slots.

Drafting writes the draft's KV of node i into the window's slot i, so whatever commits the window
commits the draft's KV with it, and drops what was rejected. What the draft has not been fed, the
prompt at first and then the token or two that end an accepted path, it is fed with the next root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specpool.mover import RowMover
from specpool.spec.expansion import TreeExpansion
from specpool.spec.feed import padded
from specpool.spec.forward import ForwardStep
from specpool.spec.judge import options
from specpool.spec.protocols import DraftBatch, Pools, Target
from specpool.spec.sampling import probabilities, sample_children
from specpool.spec.tree import DraftTree


class DraftModel:
    """Drafts with a smaller model: a chain, or the likeliest tree as EAGLE-2 grows it.

    Args:
        model: its vocabulary is the target's, token for token; its pools have as many slots as the
            target's, and no other user.
        steps: levels below the root at most; as many forwards of the model a step.
        topk: nodes expanded at each level, see ``TreeExpansion``; 1 is a chain.
        num_draft_tokens: nodes of a tree at most, the root included; None is all that are fed and
            the best one behind them.
        sampled: draw a chain's tokens from the draft's distribution, under each request's own
            ``Sampling``, in place of the likeliest ones. Accepts more at a temperature.
        prefill_chunk: tokens of each prompt that a forward feeds at most.

    Raises:
        ValueError: a number below 1, more ``num_draft_tokens`` than can be proposed, or
            ``sampled`` with a ``topk`` above 1.
    """

    def __init__(
        self,
        model: Target,
        *,
        steps: int,
        topk: int = 1,
        num_draft_tokens: int | None = None,
        sampled: bool = False,
        prefill_chunk: int = 512,
    ) -> None:
        if min(steps, topk, prefill_chunk) < 1:
            raise ValueError(
                f"steps, topk and prefill_chunk must be at least 1, got {steps}, {topk} and "
                f"{prefill_chunk}"
            )
        if sampled and topk > 1:
            raise ValueError(f"sampled drafts are chains; topk is {topk}")
        fed = 1 + (steps - 1) * topk
        self.model = model
        self.steps, self.topk, self.sampled = steps, topk, sampled
        self.num_draft_tokens = fed + 1 if num_draft_tokens is None else num_draft_tokens
        if not 1 <= self.num_draft_tokens <= _proposed(topk, steps):
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}; topk {topk} and steps {steps} propose "
                f"1 to {_proposed(topk, steps)} nodes with the root"
            )
        self.window = max(self.num_draft_tokens, fed)
        self.prefill_chunk = prefill_chunk
        self._known: set[int] = set()

    @property
    def pools(self) -> Pools:
        """The model's own."""
        return self.model.pools

    def draft(self, batch: DraftBatch) -> DraftTree:
        """One tree a request; see ``Drafter``.

        Raises:
            ValueError: the model's vocabulary is of another size than the target's.
        """
        if self.model.vocab_size != batch.vocab_size:
            raise ValueError(
                f"the draft model's vocabulary has {self.model.vocab_size} tokens, the target's "
                f"{batch.vocab_size}; they must be the same tokens"
            )
        steps = min(self.steps, max(batch.room))
        if steps == 0:
            chains: list[list[list[int]]] = [[] for _ in batch.requests]
            device = batch.window.device
            return DraftTree.from_chains(batch.roots, chains, 1, device=device)
        logits = self._feed_roots(batch)
        self._known.update(batch.requests)
        return (self._sample if self.sampled else self._expand)(batch, logits, steps)

    def leave(self, request: int) -> None:
        """Forget the request; its KV goes with its slots."""
        self._known.discard(request)

    def _feed_roots(self, batch: DraftBatch) -> Tensor:
        """Feed what the model has not seen, up to the roots; logits ``[bs, 1, V]`` after those."""
        begin = []
        for request, context in zip(batch.requests, batch.contexts, strict=True):
            # Of an accepted path, every node with a child was fed, so all but its last one.
            root = len(context) - 1
            begin.append(max(root - 1, 0) if request in self._known else 0)
        chunk = self.prefill_chunk
        while True:
            left = [len(c) - b for c, b in zip(batch.contexts, begin, strict=True)]
            long = [r for r, count in enumerate(left) if count > chunk]
            if not long:
                break
            self._feed(batch, long, begin, chunk)
            for r in long:
                begin[r] += chunk
        logits = self._feed(batch, list(range(len(left))), begin, chunk)
        place = torch.tensor(left).to(logits.device) - 1
        return logits[torch.arange(len(left), device=logits.device), place][:, None]

    def _feed(self, batch: DraftBatch, which: list[int], begin: list[int], chunk: int) -> Tensor:
        """One forward of up to ``chunk`` tokens from ``begin`` on, for some of the batch."""
        device = batch.window.device
        first = [begin[r] for r in which]
        tokens = padded(
            [batch.contexts[r][b : b + chunk] for r, b in zip(which, first, strict=True)], device
        )
        roots = [len(batch.contexts[r]) - 1 for r in which]
        start, end, rows = torch.tensor([first, roots, [batch.rows[r] for r in which]]).to(device)
        positions = start[:, None] + torch.arange(tokens.shape[1], device=device)
        at = positions.clamp(max=batch.table.max_context - 1)
        loc = batch.table.slots[rows].gather(1, at).long()
        window = batch.window[torch.tensor(which, device=device), :1]
        loc = torch.where(positions == end[:, None], window, loc)
        loc = torch.where(tokens >= 0, loc, -1)
        table_rows = [batch.rows[r] for r in which]
        return self.model.forward(ForwardStep.chain(batch.table, table_rows, first, tokens, loc))

    def _expand(self, batch: DraftBatch, logits: Tensor, steps: int) -> DraftTree:
        roots, room = torch.tensor([batch.roots, list(batch.room)]).to(logits.device)
        nodes = min(self.num_draft_tokens, _proposed(self.topk, steps))
        growing = TreeExpansion(roots, topk=self.topk, steps=steps, num_draft_tokens=nodes)
        fed = [(growing.tokens, growing.fed_parents)]
        while True:
            ended = room[:, None, None] <= growing.level
            growing.score(logits.log_softmax(-1).masked_fill(ended, -torch.inf))
            if growing.done:
                break
            fed.append((growing.tokens, growing.fed_parents))
            logits = self._feed_level(batch, growing.tokens, growing.mask)
        tree = growing.tree()
        if self.topk > 1 and len(fed) > 1:
            self._place(tree, fed, batch.window)
        return tree

    def _sample(self, batch: DraftBatch, logits: Tensor, steps: int) -> DraftTree:
        roots, room = torch.tensor([batch.roots, list(batch.room)]).to(logits.device)
        tokens, drawn_from = [roots], []
        for level in range(steps):
            if level:
                mask = torch.ones(len(roots), 1, level + 1, dtype=torch.bool, device=roots.device)
                logits = self._feed_level(batch, tokens[-1][:, None], mask)
            q = probabilities(logits, *options(batch.sampling, logits))[:, 0]
            # What is no distribution proposes token 0 for certain, and the target judges that.
            sure = torch.zeros_like(q)
            sure[:, 0] = 1
            q = torch.where(q.isfinite().all(-1, keepdim=True), q, sure)
            drawn_from.append(q)
            tokens.append(sample_children(q, 1, batch.generator)[:, 0])
        node = torch.arange(steps + 1, device=roots.device)
        live = node <= room[:, None]
        return DraftTree(
            tokens=torch.where(live, torch.stack(tokens, dim=1), -1),
            parents=torch.where(live, node - 1, -1).int(),
            sizes=live.sum(1, dtype=torch.int32),
            steps=steps,
            proposal="sampled",
            q=torch.stack(drawn_from, dim=1),
        )

    def _feed_level(self, batch: DraftBatch, tokens: Tensor, mask: Tensor) -> Tensor:
        """Feed the nodes of a level; ``mask [bs, n, fed]`` is over all fed nodes, in order."""
        fed = torch.arange(mask.shape[2], device=tokens.device)
        depths = (fed + self.topk - 1) // self.topk  # the root, then levels of topk
        window = batch.window[:, : len(fed)]
        return self.model.forward(
            ForwardStep.level(batch.table, batch.rows, tokens, window, depths, mask)
        )

    def _place(self, tree: DraftTree, fed: list[tuple[Tensor, Tensor]], window: Tensor) -> None:
        """Bring the KV of the tree's nodes from the order of feeding to the tree's own."""
        number = torch.full_like(tree.tokens, -1)  # in the order of feeding; -1 was not fed
        number[:, 0] = 0
        first = 1
        for tokens, parents in fed[1:]:  # level by level, so that a node's parent is numbered first
            above = number.gather(1, tree.parents.clamp(min=0).long())
            same = (tree.tokens[..., None] == tokens[:, None]) & (tree.parents >= 0)[..., None]
            same &= (above >= 0)[..., None] & (above[..., None] == parents[:, None])
            number = torch.where(same.any(-1), first + same.int().argmax(-1), number)
            first += tokens.shape[1]
        source = torch.where(number >= 0, window.gather(1, number.clamp(min=0)), -1)
        target = window[:, : number.shape[1]]
        for pool in self.pools:
            move = pool.move if isinstance(pool, RowMover) else pool.move_kv_cache
            move(target.reshape(-1), source.reshape(-1))


def _proposed(topk: int, steps: int) -> int:
    """Nodes that ``TreeExpansion`` can propose, the root included."""
    return 1 + topk + (steps - 1) * topk * topk
