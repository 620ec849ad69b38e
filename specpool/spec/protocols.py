"""What a loop asks of a model and of a drafter: two small protocols, met by having the members.

A ``Target`` is any model whose KV is addressed by slot. A ``Drafter`` is any rule or model that
proposes trees. Neither is subclassed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specpool.mover import RowMover
from specpool.request_table import RequestTable
from specpool.spec.forward import ForwardStep
from specpool.spec.movers import HasMover
from specpool.spec.sampling import probabilities
from specpool.spec.tree import DraftTree

Pools = Sequence[HasMover | RowMover]


class Target(Protocol):
    """A model over slot-addressed KV. Prefill, verification and drafting are one call.

    Example: a model whose KV is a number a token, and whose next token follows from the sum of all
    that it sees.

        >>> import torch
        >>> from specpool import RowMover, rows_from
        >>> class Sums:
        ...     vocab_size = 50
        ...     def __init__(self, size):
        ...         self.kv = torch.zeros(size + 1, 1, dtype=torch.int64)
        ...         self.pools = [RowMover(rows_from(self.kv, "nhd"))]
        ...     def forward(self, step):
        ...         live = step.out_cache_loc >= 0
        ...         value = step.tokens * (step.positions + 1)
        ...         self.kv[step.out_cache_loc[live], 0] = value[live]
        ...         seen = self.kv[step.context_loc, 0]  # [bs, P + W]
        ...         total = (seen[:, None] * step.visible).sum(-1)  # [bs, D]
        ...         return torch.nn.functional.one_hot(total % 50, 50).float()
    """

    @property
    def vocab_size(self) -> int:
        """V; tokens are 0 to V - 1."""

    @property
    def pools(self) -> Pools:
        """Every pool that ``forward`` writes."""

    def forward(self, step: ForwardStep) -> Tensor:
        """Write the new tokens' KV and return their logits, floating ``[bs, D, V]``.

        Padding must write nothing that a request reads (slot 0, the dummy slot, may be written),
        and its logits may be anything. Sequence lengths here are of prefix *and* window.
        """


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn; see ``probabilities``. The default is greedy.

    Attributes:
        temperature: at least 0; 0 is greedy, exactly.
        top_p: in (0, 1].
        top_k: at least 1; None keeps all.

    Raises:
        ValueError: an option outside its range.
        TypeError: a ``top_k`` that is no integer.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None

    def __post_init__(self) -> None:
        probabilities(torch.zeros(1, 1), self.temperature, self.top_p, self.top_k)


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """The requests to draft for.

    Attributes:
        requests: ids, one a request, never used again for another.
        contexts: each request's tokens so far; the last one is the root. Not to be changed.
        room: the deepest node that each may have; 0 leaves the root alone.
        vocab_size: the target's V.
        window: int64 ``[bs, W]``, W the drafter's own ``window``: slots of this step. Node i's KV
            goes to ``window[r, i]``, in the target's pool and in a draft model's own.
        rows: rows of the table.
        table: the slots of each row's ``len(contexts[r]) - 1`` tokens before the root.
        sampling: how each request's tokens are drawn.
        generator: for draws; None is the device's default.
    """

    requests: Sequence[int]
    contexts: Sequence[Sequence[int]]
    room: Sequence[int]
    vocab_size: int
    window: Tensor
    rows: Sequence[int]
    table: RequestTable
    sampling: Sequence[Sampling]
    generator: torch.Generator | None

    @property
    def roots(self) -> list[int]:
        """Each request's last decided token."""
        return [context[-1] for context in self.contexts]


class Drafter(Protocol):
    """Proposes trees.

    Example: a drafter that proposes the token that followed this one the last time.

        >>> from specpool.spec import DraftTree
        >>> class Again:
        ...     window, pools = 2, ()
        ...     def draft(self, batch):
        ...         chains = []
        ...         for context, room in zip(batch.contexts, batch.room):
        ...             before = [i for i, t in enumerate(context[:-1]) if t == context[-1]]
        ...             chains.append([[context[i + 1]] for i in before[-1:] if room > 0])
        ...         device = batch.window.device
        ...         return DraftTree.from_chains(batch.roots, chains, self.window, device=device)
        ...     def leave(self, request):
        ...         pass
    """

    @property
    def window(self) -> int:
        """W, slots that a step needs for a request, at least as many as its trees have nodes."""

    @property
    def pools(self) -> Pools:
        """Pools of its own that are keyed by the same slots; () where there are none."""

    def draft(self, batch: DraftBatch) -> DraftTree:
        """One tree a request, in the batch's order and on the window's device.

        Row r's root is ``contexts[r][-1]``, no node is deeper than ``room[r]``, and no tree has
        more than W nodes.
        """

    def leave(self, request: int) -> None:
        """Forget a request; also called for one that was never drafted for."""
