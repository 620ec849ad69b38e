"""A Llama in plain PyTorch whose KV lives in a pool, addressed by slot.

The model knows nothing of pools: an `Attention` owns one, stores a step's K and V in it and reads
back the slots that the step attends to. A step may be a run of text or a whole draft tree; what
each token may see is a mask, and its position, not its slot, says where it stands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specpool.demo.weights import Config, Weights
from specpool.pools import KVCache, MHATokenToKVPool


class Layer(NamedTuple):
    """What a pool's setters want to know of a layer."""

    layer_id: int


@dataclass(frozen=True)
class Step:
    """One forward of T new tokens that attend to S slots: the accepted ones, then their own.

    `tokens`, `positions` and `loc` are int64 [T], `context_loc` and `context_positions` int64 [S],
    `visible` is bool [T, S]; all on one device.
    """

    tokens: Tensor
    positions: Tensor
    loc: Tensor
    context_loc: Tensor
    context_positions: Tensor
    visible: Tensor

    @staticmethod
    def run(
        tokens: Sequence[int], accepted: Sequence[int], loc: Sequence[int], device: torch.device
    ) -> Step:
        """Text: `tokens`, written to `loc`, follow the tokens in the slots `accepted`."""
        base, count = len(accepted), len(tokens)

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return Step(
            tokens=ints(tokens),
            positions=ints(range(base, base + count)),
            loc=ints(loc),
            context_loc=ints([*accepted, *loc]),
            context_positions=ints(range(base + count)),
            visible=torch.ones(count, base + count, dtype=torch.bool).tril(base).to(device),
        )


class Attention(ABC):
    """A pool and the way to attend to what it holds."""

    pool: KVCache

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store the step's `k` and `v` and attend.

        q is [T, heads, head_dim], k and v are [T, kv_heads, head_dim], q and k already rotated.
        Returns [T, heads, head_dim].
        """

    @abstractmethod
    def buffers(self) -> dict[str, list[Tensor]]:
        """The pool's buffers by kind, one a layer, each [slots, heads, width]; views, no copies."""


class DenseAttention(Attention):
    """Every token attends to all it may see; K and V in a `MHATokenToKVPool` of `size` slots."""

    def __init__(
        self,
        config: Config,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        page_size: int = 1,
    ) -> None:
        self.layers = config.layers
        self.pool: MHATokenToKVPool = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            head_num=config.kv_heads,
            head_dim=config.head_dim,
            layer_num=config.layers,
            device=device,
            enable_memory_saver=False,
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Attention over the whole context, masked by what each token may see."""
        self.pool.set_kv_buffer(Layer(layer), step.loc, k, v)
        keys = self.pool.get_key_buffer(layer)[step.context_loc]
        values = self.pool.get_value_buffer(layer)[step.context_loc]
        return grouped_attention(q, keys, values, step.visible)

    def buffers(self) -> dict[str, list[Tensor]]:
        """Main K and main V of every layer."""
        return {
            "main K": [self.pool.get_key_buffer(i) for i in range(self.layers)],
            "main V": [self.pool.get_value_buffer(i) for i in range(self.layers)],
        }


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention of q [T, heads, D] on k, v [S, kv_heads, D]; mask bool [(heads,) T, S]."""
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


class Llama:
    """The model's mathematics; `weights` say its sizes, dtype and device."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.config = weights.config
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        even = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64, device=self.device)
        # Radians a position, for each pair of a head's values (RoFormer, Su et al. 2021, eq. 15).
        self._turn = self.config.rope_base ** -(even / self.config.head_dim)

    @torch.inference_mode()
    def forward(self, step: Step, attention: Attention) -> Tensor:
        """Logits [T, vocab] of the step's tokens; their KV is then in the attention's pool."""
        config, count = self.config, len(step.tokens)
        # In float64 whatever the model's dtype: far positions lose digits in float32.
        angle = step.positions.double()[:, None, None] * self._turn
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        x = F.embedding(step.tokens, self.weights.embedding)
        for i, layer in enumerate(self.weights.layers):
            h = F.rms_norm(x, (config.dim,), layer.attn_norm, config.eps)
            q = F.linear(h, layer.q).view(count, config.heads, config.head_dim)
            k = F.linear(h, layer.k).view(count, config.kv_heads, config.head_dim)
            v = F.linear(h, layer.v).view(count, config.kv_heads, config.head_dim)
            o = attention.attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v, step)
            x = x + F.linear(o.reshape(count, -1), layer.o)
            h = F.rms_norm(x, (config.dim,), layer.ffn_norm, config.eps)
            x = x + F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)
        return F.linear(
            F.rms_norm(x, (config.dim,), self.weights.norm, config.eps), self.weights.head
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] in pairs of neighbours, as GGUF lays Q and K rows.

    cos and sin are [T, 1, D / 2].
    """
    first, second = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.flatten(-2)
