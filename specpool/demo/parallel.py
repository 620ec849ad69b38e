"""The demo's Llama over several processes: heads split (tensor parallel) or layers (pipeline).

Each rank has a pool of its own, of its heads or its layers. MiniMax's index keys and values are
means over *all* KV heads, so tensor parallel ranks sum their parts and each pool holds them whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from specpool.demo.llama import Attention, DenseAttention, Layer, Llama, Step, rotate
from specpool.demo.minimax import BlockSparseAttention, Sparsity
from specpool.demo.weights import Config, LayerWeights, Weights
from specpool.pools import MHATokenToKVPool, MiniMaxSparseKVPool


def head_share(weights: Weights, rank: int, world: int) -> Weights:
    """What rank `rank` of `world` has of a model: a share of the heads and of the FFN's width.

    Q, K, V, gate and up matrices are split by rows, O and down by columns, so that the ranks'
    outputs add up to the model's. Raises ValueError where something does not divide.
    """
    config = weights.config
    for name in ("heads", "kv_heads", "ffn_dim"):
        if getattr(config, name) % world:
            raise ValueError(
                f"{name}={getattr(config, name)} does not divide among {world} ranks; use a number "
                "of ranks that divides it, or split the layers"
            )

    def rows(matrix: Tensor) -> Tensor:
        return matrix.chunk(world, dim=0)[rank]

    def columns(matrix: Tensor) -> Tensor:
        return matrix.chunk(world, dim=1)[rank].contiguous()

    layers = [
        LayerWeights(
            attn_norm=layer.attn_norm,
            q=rows(layer.q),
            k=rows(layer.k),
            v=rows(layer.v),
            o=columns(layer.o),
            ffn_norm=layer.ffn_norm,
            gate=rows(layer.gate),
            up=rows(layer.up),
            down=columns(layer.down),
        )
        for layer in weights.layers
    ]
    share = replace(
        config,
        heads=config.heads // world,
        kv_heads=config.kv_heads // world,
        ffn_dim=config.ffn_dim // world,
    )
    return replace(weights, config=share, layers=layers)


def stage_layers(layers: int, rank: int, world: int) -> range:
    """The layers of stage `rank` of `world`: neighbours, and as many as others or one more."""
    size, more = divmod(layers, world)
    begin = rank * size + min(rank, more)
    return range(begin, begin + size + (rank < more))


def stage_share(weights: Weights, layers: range) -> Weights:
    """The weights of some layers; the rest of the model, and `config`, stay what they are."""
    return replace(weights, layers=weights.layers[layers.start : layers.stop])


@dataclass(frozen=True)
class Place:
    """Where this process stands: the layers that it has, and the groups that it works with.

    `tensor` are the ranks that share these layers' heads, `pipeline` the stages in order; None
    where there is no other.
    """

    layers: range
    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None

    def add_up(self, part: Tensor) -> Tensor:
        """The sum of the tensor parallel ranks' parts."""
        if self.tensor is not None:
            dist.all_reduce(part, group=self.tensor)
        return part

    @property
    def shares(self) -> int:
        """How many tensor parallel ranks there are."""
        return 1 if self.tensor is None else dist.get_world_size(self.tensor)

    @property
    def stage(self) -> int:
        """Which of the stages this is, from 0."""
        return 0 if self.pipeline is None else dist.get_rank(self.pipeline)

    @property
    def stages(self) -> int:
        """How many there are."""
        return 1 if self.pipeline is None else dist.get_world_size(self.pipeline)


class ParallelLlama(Llama):
    """This process's part of a Llama: `weights` are of its share of the heads and its layers only.

    Every rank is called with the same steps. Only the last stage has logits; the others return
    NaN, so that no rank decides by what it does not know.
    """

    def __init__(self, weights: Weights, place: Place) -> None:
        super().__init__(weights)
        self.place = place

    @torch.inference_mode()
    def forward(self, step: Step, attention: Attention) -> Tensor:
        """As `Llama.forward`, [T, vocab]."""
        config, place, count = self.config, self.place, len(step.tokens)
        angle = step.positions.double()[:, None, None] * self._turn
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)
        if place.stage == 0:
            x = F.embedding(step.tokens, self.weights.embedding)
        else:
            x = torch.empty(count, config.dim, dtype=self.dtype, device=self.device)
            dist.recv(x, group=place.pipeline, group_src=place.stage - 1)
        for i, layer in zip(place.layers, self.weights.layers, strict=True):
            h = F.rms_norm(x, (config.dim,), layer.attn_norm, config.eps)
            q = F.linear(h, layer.q).view(count, config.heads, config.head_dim)
            k = F.linear(h, layer.k).view(count, config.kv_heads, config.head_dim)
            v = F.linear(h, layer.v).view(count, config.kv_heads, config.head_dim)
            o = attention.attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v, step)
            x = x + place.add_up(F.linear(o.reshape(count, -1), layer.o))
            h = F.rms_norm(x, (config.dim,), layer.ffn_norm, config.eps)
            inner = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up)
            x = x + place.add_up(F.linear(inner, layer.down))
        if place.stage < place.stages - 1:
            dist.send(x, group=place.pipeline, group_dst=place.stage + 1)
            return x.new_full((1, 1), torch.nan).expand(count, config.vocab)
        x = F.rms_norm(x, (config.dim,), self.weights.norm, config.eps)
        return F.linear(x, self.weights.head)


class DensePart(DenseAttention):
    """A `DenseAttention` whose pool has this process's heads (`config`'s) and layers."""

    def __init__(
        self,
        config: Config,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        place: Place,
        *,
        page_size: int = 1,
    ) -> None:
        self.place = place
        self.layers = len(place.layers)
        self.pool = MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            head_num=config.kv_heads,
            head_dim=config.head_dim,
            layer_num=len(place.layers),
            device=device,
            enable_memory_saver=False,
            start_layer=place.layers.start,
            end_layer=place.layers.stop,
        )

    def buffers(self) -> dict[str, list[Tensor]]:
        """Main K and main V of this process's layers."""
        return {
            "main K": [self.pool.get_key_buffer(i) for i in self.place.layers],
            "main V": [self.pool.get_value_buffer(i) for i in self.place.layers],
        }


class BlockSparsePart(BlockSparseAttention):
    """A `BlockSparseAttention` whose pool has this process's heads and layers, index rows whole."""

    def __init__(
        self,
        config: Config,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        place: Place,
        sparsity: Sparsity,
        *,
        page_size: int = 1,
    ) -> None:
        whole = range(config.layers)
        sparse = whole[sparsity.dense_layers :]
        self.place, self.sparsity = place, sparsity
        self.layers = place.layers
        self.kv_heads = config.kv_heads
        self.scale = 1 / math.sqrt(config.head_dim)
        self.index_kv_layers = sparse[0::2]
        self.index_k_layers = sparse[1::2]
        self.pool = MiniMaxSparseKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            head_num=config.kv_heads,
            head_dim=config.head_dim,
            idx_head_dim=config.head_dim,
            dense_layer_ids=list(whole[: sparsity.dense_layers]),
            sparse_layer_ids=list(sparse),
            device=device,
            disable_value_sparse_layer_ids=list(self.index_k_layers),
            start_layer=place.layers.start,
            end_layer=place.layers.stop,
        )

    def buffers(self) -> dict[str, list[Tensor]]:
        """Every kind of buffer of this process's layers; no layer of some kind is an empty list."""
        pool, mine = self.pool, self.layers
        with_value = [i for i in self.index_kv_layers if i in mine]
        return {
            "main K": [pool.get_key_buffer(i) for i in mine],
            "main V": [pool.get_value_buffer(i) for i in mine],
            "index K of K-only layers": [
                pool.get_index_k_buffer(i) for i in self.index_k_layers if i in mine
            ],
            "index K": [pool.get_index_kv_buffer(i)[0] for i in with_value],
            "index V": [pool.get_index_kv_buffer(i)[1] for i in with_value],
        }

    def _store(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        at, loc, pool = Layer(layer), step.loc, self.pool
        if layer < self.sparsity.dense_layers:
            pool.set_kv_buffer(at, loc, k, v)
        elif layer in self.index_kv_layers:
            pool.set_fused_kv_index_buffer(at, loc, k, v, self._mean(k), self._mean(v))
        else:
            pool.set_fused_kv_index_buffer(at, loc, k, v, self._mean(k), None)

    def _mean(self, own: Tensor) -> Tensor:
        """Over the KV heads of all ranks: [T, kv_heads, D] to [T, 1, D]."""
        return self.place.add_up(own.mean(1, keepdim=True)) / self.place.shares
