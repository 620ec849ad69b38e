"""From a batch's trees and the target's logits to what each request is given, in one host read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specpool.spec.commit import HostAccept, read_together
from specpool.spec.protocols import DraftBatch, Sampling
from specpool.spec.serving import Finish, Request
from specpool.spec.tree import DraftTree
from specpool.spec.tree_checks import values_are_read
from specpool.spec.verify import Accept, verify_greedy, verify_sampling

Decide = Callable[[Accept, DraftTree, Sequence[int], Tensor], Accept]
"""``(accept, tree, rows, window [bs, D])`` to the accept that counts, before it is read: where
several ranks run one loop each, ``broadcast_accept`` from the rank that decides."""


def own_answer(accept: Accept, tree: DraftTree, rows: Sequence[int], window: Tensor) -> Accept:
    """This rank's own answer counts."""
    return accept


@dataclass(frozen=True, eq=False)
class Answer:
    """What to commit, and what to tell.

    Attributes:
        accept_index: int32 ``[bs, S]`` on the device.
        accept_len: int32 ``[bs]`` on the device, cut to what belongs to each answer; 0 where the
            request failed.
        host: their values, and those of the slots of the trees' nodes.
        window: int64 ``[bs, W]`` on the host, all slots of the step.
        tokens: each request's new tokens; as many as its accept_len.
        finished: why each request ends with them, None where it goes on.
    """

    accept_index: Tensor
    accept_len: Tensor
    host: HostAccept
    window: Tensor
    tokens: list[list[int]]
    finished: list[Finish | None]

    @property
    def relocates(self) -> bool:
        """Whether an accepted entry lies elsewhere than at its place in the window's front."""
        index, length = self.host.accept_index.numpy(), self.host.accept_len.numpy()
        first = np.arange(len(index))[:, None] * self.host.out_cache_loc.shape[1]
        place = np.arange(index.shape[1])
        return bool(((index != first + place) & (place < length[:, None])).any())


def refuse_tree(tree: DraftTree, batch: DraftBatch) -> None:
    """Refuse trees that are not the batch's. Values are read on the CPU, elsewhere by ``judge``.

    Raises:
        TypeError: no ``DraftTree``.
        ValueError: another batch size or device, more nodes than the window has slots, another
            root, a node deeper than the room or with a token outside the vocabulary.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"a drafter returns a DraftTree, got {type(tree).__name__}")
    bs, slots = batch.window.shape
    if tree.batch_size != bs:
        raise ValueError(f"the drafter returned {tree.batch_size} trees for {bs} requests")
    if tree.num_draft_tokens > slots:
        raise ValueError(
            f"the drafter's trees have room for {tree.num_draft_tokens} nodes, its window is "
            f"{slots} slots"
        )
    if tree.tokens.device != batch.window.device:
        raise ValueError(f"trees are on {tree.tokens.device}, slots on {batch.window.device}")
    if values_are_read(tree.tokens.device):
        _refuse_rows(_wrong(tree, batch).cpu(), batch)


def judge(
    tree: DraftTree,
    logits: Tensor,
    batch: DraftBatch,
    requests: Sequence[Request],
    decide: Decide,
) -> Answer:
    """Verify, read the answer with all that belongs to it in one synchronisation, and cut it.

    Args:
        tree: the batch's.
        logits: ``[bs, D, V]``.
        batch: what was drafted for.
        requests: the same, as the loop keeps them.
        decide: see ``Decide``.

    Raises:
        Whatever ``decide`` raises.
        ValueError: as ``verify_greedy``, ``verify_sampling`` and ``refuse_tree``.
    """
    window = batch.window[:, : tree.num_draft_tokens]
    accept = decide(_verify(tree, logits, batch), tree, batch.rows, window)
    flat = accept.accept_index.clamp(min=0).long()
    path = tree.tokens.flatten()[flat]
    window, index, length, bonus, nan, read, wrong = read_together(
        batch.window, accept.accept_index, accept.accept_len, accept.bonus, accept.nan, path,
        _wrong(tree, batch),
    )  # fmt: skip
    _refuse_rows(wrong, batch)
    tokens: list[list[int]] = []
    finished: list[Finish | None] = []
    for r, request in enumerate(requests):
        if nan[r]:
            tokens.append([])
            finished.append("nan")
            continue
        new, reason = request.cut([*read[r, 1 : int(length[r])].tolist(), int(bonus[r])])
        tokens.append(new)
        finished.append(reason)
    # The last new token's KV comes with the next window, so as many entries stay as there are
    # new tokens: the root, and all of them but the last.
    kept = torch.tensor([len(new) for new in tokens], dtype=torch.int32)
    changed = not torch.equal(kept, length.int())
    accept_len = kept.to(accept.accept_len.device) if changed else accept.accept_len
    host = HostAccept(window[:, : tree.num_draft_tokens], index, kept)
    return Answer(accept.accept_index, accept_len, host, window, tokens, finished)


def _verify(tree: DraftTree, logits: Tensor, batch: DraftBatch) -> Accept:
    sampling = batch.sampling
    if all(s.temperature == 0 for s in sampling):
        return verify_greedy(tree, logits)
    return verify_sampling(tree, logits, *options(sampling, logits), generator=batch.generator)


def options(
    sampling: Sequence[Sampling], logits: Tensor
) -> tuple[Tensor, Tensor | float, Tensor | None]:
    """Temperature, top-p and top-k of a batch, as ``probabilities`` takes them."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(logits.device)

    top_p: Tensor | float = 1.0  # nothing is sorted where no request asks for it
    if any(s.top_p < 1 for s in sampling):
        top_p = column([s.top_p for s in sampling], torch.float32)
    top_k = None
    if any(s.top_k is not None for s in sampling):
        most = logits.shape[-1]
        top_k = column([most if s.top_k is None else s.top_k for s in sampling], torch.int64)
    return column([s.temperature for s in sampling], torch.float32), top_p, top_k


def _wrong(tree: DraftTree, batch: DraftBatch) -> Tensor:
    """Int32 ``[bs]``: which of ``_PROBLEMS`` each row has, 0 for none."""
    host = torch.tensor([batch.roots, list(batch.room)], dtype=torch.int64)
    roots, room = host.to(tree.tokens.device)
    problems = (
        tree.tokens[:, 0] != roots,
        tree.depths.amax(1) > room,
        (tree.tokens >= batch.vocab_size).any(1),
    )
    wrong = torch.zeros_like(tree.sizes)
    for number, problem in enumerate(problems, start=1):
        wrong = torch.where((wrong == 0) & problem, number, wrong)
    return wrong


_PROBLEMS = (
    "",
    "another root than the request's last token: it is of another batch, or of another order",
    "a node deeper than the request's room",
    "a token outside the target's vocabulary",
)


def _refuse_rows(wrong: Tensor, batch: DraftBatch) -> None:
    for r in wrong.nonzero().flatten().tolist()[:1]:
        raise ValueError(
            f"the drafter's tree for request {batch.requests[r]} (row {r}) has "
            f"{_PROBLEMS[int(wrong[r])]} (root {batch.roots[r]}, room {batch.room[r]})"
        )
