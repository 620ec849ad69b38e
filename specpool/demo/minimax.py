"""Block-sparse attention in MiniMax's manner over a plain Llama's weights, so that a
`MiniMaxSparseKVPool` holds real data and every one of its buffers decides about the text.

From MiniMax-M3: the first layers attend densely; each later layer has an index branch with one
index key a token and one index head a KV head, whose best score in a block of tokens decides
whether that head attends to the block; the first block and the query's own are always kept and
count among the top k; some of those layers keep an index value too, others do not.

Invented here, because a Llama has no index weights: the index query is the mean of a KV head's
group of rotated queries, the index key the mean of the rotated keys over the KV heads, and the
index value the mean of the values. The index values' attention is added to the output, times
`alpha`, so that a stale index value shows; layers with and without one alternate.

Selection is not continuous: the least rounding can turn one block into another. In float32 the
score of a block differs between a tree and a run of text by more than some scores differ from each
other, so the whole model runs in float64, where the least gap seen is 10^7 times the rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.demo.llama import Attention, Layer, Step, grouped_attention
from specpool.demo.weights import Config
from specpool.pools import MiniMaxSparseKVPool

_NEVER, _ALWAYS = float("-inf"), float("inf")


@dataclass(frozen=True)
class Sparsity:
    """`dense_layers` attend to all; after them `topk` blocks of `block` tokens; see `alpha` above.

    The defaults select from 96 tokens on and leave SmolLM2 fluent.
    """

    dense_layers: int = 3
    block: int = 16
    topk: int = 6
    alpha: float = 0.2


class BlockSparseAttention(Attention):
    """Dense, then block-sparse layers; all of it in a `MiniMaxSparseKVPool` of `size` slots."""

    def __init__(
        self,
        config: Config,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        sparsity: Sparsity | None = None,
        *,
        page_size: int = 1,
    ) -> None:
        self.sparsity = sparsity or Sparsity()
        self.kv_heads = config.kv_heads
        self.scale = 1 / math.sqrt(config.head_dim)
        self.layers = range(config.layers)
        sparse = self.layers[self.sparsity.dense_layers :]
        self.index_kv_layers = sparse[0::2]
        self.index_k_layers = sparse[1::2]
        self.pool: MiniMaxSparseKVPool = MiniMaxSparseKVPool(
            size=size,
            page_size=page_size,
            dtype=dtype,
            head_num=config.kv_heads,
            head_dim=config.head_dim,
            idx_head_dim=config.head_dim,
            dense_layer_ids=list(self.layers[: self.sparsity.dense_layers]),
            sparse_layer_ids=list(sparse),
            device=device,
            disable_value_sparse_layer_ids=list(self.index_k_layers),
        )

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        """Store main K and V, index K and (in some layers) index V; attend to the kept blocks."""
        self._store(layer, k, v, step)
        keys = self.pool.get_key_buffer(layer)[step.context_loc]
        values = self.pool.get_value_buffer(layer)[step.context_loc]
        if layer < self.sparsity.dense_layers:
            return grouped_attention(q, keys, values, step.visible)

        group = q.shape[1] // self.kv_heads
        index_q = q.view(len(q), self.kv_heads, group, -1).mean(2)
        index_k = self.pool.get_index_k_buffer(layer)[step.context_loc, 0]
        scores = torch.einsum("tgd,sd->tgs", index_q, index_k) * self.scale

        query_blocks, key_blocks = self.blocks(step)
        best = self.block_scores(scores, step.visible, key_blocks)
        keep = self.keep_blocks(best, query_blocks)
        mask = keep[..., key_blocks] & step.visible[:, None]  # [T, G, S]
        heads_mask = mask.repeat_interleave(group, dim=1).transpose(0, 1)
        out = grouped_attention(q, keys, values, heads_mask)
        if layer in self.index_kv_layers:
            index_v = self.pool.get_index_kv_buffer(layer)[1][step.context_loc, 0]
            weights = scores.masked_fill(~step.visible[:, None], _NEVER).softmax(-1)
            out = out + self.sparsity.alpha * (weights @ index_v).repeat_interleave(group, dim=1)
        return out

    def blocks(self, step: Step) -> tuple[Tensor, Tensor]:
        """The block of each new token, int64 [T], and of each token of the context, int64 [S].

        By position: siblings share a block, whatever their slots and places in the window.
        """
        return step.positions // self.sparsity.block, step.context_positions // self.sparsity.block

    def block_scores(self, scores: Tensor, visible: Tensor, key_blocks: Tensor) -> Tensor:
        """The best score of a visible token in each block: [T, G, S] to [T, G, blocks].

        A block without a visible token gets -inf. Masked before the maximum, not after: a branch
        must not pick blocks by its siblings' tokens.
        """
        seen = scores.masked_fill(~visible[:, None], _NEVER)
        best = seen.new_full((*seen.shape[:2], int(key_blocks.max()) + 1), _NEVER)
        return best.scatter_reduce(-1, key_blocks.expand_as(seen), seen, "amax")

    def keep_blocks(self, best: Tensor, query_blocks: Tensor) -> Tensor:
        """The top k blocks of [T, G, blocks] as bool, the first and the query's own among them.

        Of equal scores the earlier block wins; a block without a visible token is never kept.
        """
        own = query_blocks[:, None, None].expand(*best.shape[:2], 1)
        ranked = best.scatter(-1, own, _ALWAYS)
        ranked[..., 0] = _ALWAYS
        order = ranked.sort(dim=-1, descending=True, stable=True).indices
        chosen = order[..., : self.sparsity.topk]
        return torch.zeros_like(best, dtype=torch.bool).scatter(-1, chosen, True) & (best > _NEVER)

    def buffers(self) -> dict[str, list[Tensor]]:
        """Main K and V of every layer, index K by whether the layer has an index V, index V."""
        pool = self.pool
        return {
            "main K": [pool.get_key_buffer(i) for i in self.layers],
            "main V": [pool.get_value_buffer(i) for i in self.layers],
            "index K of K-only layers": [pool.get_index_k_buffer(i) for i in self.index_k_layers],
            "index K": [pool.get_index_kv_buffer(i)[0] for i in self.index_kv_layers],
            "index V": [pool.get_index_kv_buffer(i)[1] for i in self.index_kv_layers],
        }

    def _store(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        at, loc, pool = Layer(layer), step.loc, self.pool
        if layer < self.sparsity.dense_layers:
            pool.set_kv_buffer(at, loc, k, v)
        elif layer in self.index_kv_layers:
            index_k, index_v = k.mean(1, keepdim=True), v.mean(1, keepdim=True)
            pool.set_fused_kv_index_buffer(at, loc, k, v, index_k, index_v)
        else:
            pool.set_fused_kv_index_buffer(at, loc, k, v, k.mean(1, keepdim=True), None)
