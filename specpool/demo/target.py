"""The demo's Llama as a `Target`: any number of requests in one forward, of any lengths.

All requests' tokens go through the matrices as one run of T tokens, without padding; only
attention, where requests differ, is done request by request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.demo.llama import Attention, Llama, Step
from specpool.spec.forward import ForwardStep
from specpool.spec.movers import HasMover


@dataclass(frozen=True)
class _Part:
    """One request of a packed step: its tokens are [begin, end) of the T, `step` its own."""

    begin: int
    end: int
    step: Step


@dataclass(frozen=True)
class _PackedStep(Step):
    """All requests' tokens in one run; the context's fields are the parts' to tell, and empty."""

    parts: Sequence[_Part]


class _PerRequest(Attention):
    """Attends each request of a packed step by itself."""

    def __init__(self, inner: Attention) -> None:
        self.inner = inner
        self.pool = inner.pool

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        assert isinstance(step, _PackedStep)
        out = [
            self.inner.attend(
                layer, q[p.begin : p.end], k[p.begin : p.end], v[p.begin : p.end], p.step
            )
            for p in step.parts
        ]
        return torch.cat(out)

    def buffers(self) -> dict[str, list[Tensor]]:
        return self.inner.buffers()


class LlamaTarget:
    """A `Target` of the demo's model and one of its attentions, which owns the pool.

    `pools` may be extended by what else is keyed by the same slots. `forwards` counts calls.
    """

    def __init__(self, model: Llama, attention: Attention) -> None:
        self.model = model
        self.attention = attention
        self.vocab_size = model.config.vocab
        self.pools: list[HasMover] = [attention.pool]
        self.forwards = 0
        self._per_request = _PerRequest(attention)

    def forward(self, step: ForwardStep) -> Tensor:
        """Logits [bs, D, V] of the model's dtype; 0 at padding, which is not computed at all."""
        self.forwards += 1
        live = step.out_cache_loc >= 0
        packed = self.model.forward(_pack(step, live), self._per_request)
        logits = packed.new_zeros(*live.shape, self.vocab_size)
        logits[live] = packed
        return logits


def _pack(step: ForwardStep, live: Tensor) -> _PackedStep:
    visible, loc, positions = step.visible, step.context_loc, step.context_positions
    parts, begin = [], 0
    for r in live.any(1).nonzero().flatten().tolist():
        new = live[r]
        seen = visible[r, new].any(0)  # what no token of the request sees is not read
        own = Step(
            tokens=step.tokens[r, new],
            positions=step.positions[r, new],
            loc=step.out_cache_loc[r, new],
            context_loc=loc[r, seen],
            context_positions=positions[r, seen],
            visible=visible[r][new][:, seen],
        )
        parts.append(_Part(begin, begin + len(own.tokens), own))
        begin += len(own.tokens)
    none = step.tokens.new_empty(0)
    return _PackedStep(
        tokens=step.tokens[live],
        positions=step.positions[live],
        loc=step.out_cache_loc[live],
        context_loc=none,
        context_positions=none,
        visible=none,
        parts=parts,
    )
