"""SGLang's real MiniMax attention backend on a CPU: one step of it, and what plain PyTorch says.

The backend, its pool and its verify inputs are SGLang's own; kernels run in Triton's interpreter,
in fp16. Stand-ins: the dense layers' backend, a model's configuration, a device that is named cuda,
and, unless asked for otherwise, the one kernel that is CUDA source.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("SGLANG_OPT_USE_MINIMAX_FUSED_KV_INDEX_STORE", "0")  # a CUDA kernel

import torch
from sglang.kernels.ops.attention import minimax_decode_topk
from sglang.kernels.ops.attention.minimax_sparse.decode import flash_with_topk_idx, topk_sparse
from sglang.srt.environ import envs
from sglang.srt.layers.attention.minimax_sparse_backend import (
    MiniMaxHybridAttnBackend,
    MiniMaxSparseAttnBackend,
)
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel, override_platform
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from triton import language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner, Heuristics

DIM, INDEX_DIM, HEADS = 16, 16, 2
SPARSE, VALUED = 1, 2
"""Sparse layers: one without index V, as every one of M3's, and one with it. Layer 0 is dense."""
REQUESTS, CONTEXT, SLOTS = 6, 640, 2048


class Shape(NamedTuple):
    """A configuration of the engine.

    Attributes:
        page: slots of a page of the pool.
        block: tokens of a block that attention selects.
        topk: blocks that it selects.
        init: first blocks that it always selects.
        drafts: nodes of a tree.
        sm90: whether kernels believe that they run on Hopper, where one reads a block by its page.
        triton_topk: blocks are selected by SGLang's Triton kernels, not by a stand-in of the CUDA
            kernel that serves fewer than 16,384 blocks.
    """

    page: int = 16
    block: int = 16
    topk: int = 3
    init: int = 0
    drafts: int = 8
    sm90: bool = False
    triton_topk: bool = False


def path(parents: list[int], node: int) -> list[int]:
    """A node's ancestors and itself, root first."""
    return ([] if parents[node] < 0 else path(parents, parents[node])) + [node]


class Server:
    """An engine's pool, request table and attention backend, the pool filled at random."""

    def __init__(self, shape: Shape, algorithm: str = "EAGLE", seed: int = 0, **given: Any) -> None:
        _one_configuration(shape.block)
        self.shape = shape
        arguments = {
            "speculative_algorithm": algorithm,
            "speculative_eagle_topk": 4,
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": shape.drafts,
            "attention_backend": "fa3",
        }
        self._overrides = [
            get_context().override_server_args(**arguments | given),
            get_parallel().override(
                tp_size=1, attn_tp_size=1, attn_cp_size=1, attn_dp_size=1, attn_dcp_size=1,
                attn_dcp_rank=0, pp_size=1, attn_dp_enabled=False,
            ),
            override_platform(is_sm90=shape.sm90),
            envs.SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX.override(not shape.triton_topk),
        ]  # fmt: skip
        for override in self._overrides:
            override.__enter__()
        torch.manual_seed(seed)
        self.pool = _pool(shape.page)
        self.req_to_token = torch.zeros((REQUESTS + 1, CONTEXT), dtype=torch.int32)
        runner = _runner(shape, self.pool, self.req_to_token)
        try:
            self.sparse = MiniMaxSparseAttnBackend(runner)
        except BaseException:
            self.close()
            raise
        self.backend = MiniMaxHybridAttnBackend(_Dense(), self.sparse, [SPARSE, VALUED])
        for buffer in self.buffers():
            buffer.copy_(torch.randn(buffer.shape))
        self._pages = torch.randperm(SLOTS // shape.page - 1) + 1

    def close(self) -> None:
        for override in reversed(self._overrides):
            override.__exit__(None, None, None)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def buffers(self) -> list[torch.Tensor]:
        pool = self.pool
        main, index = pool.main_pool, pool.index_kv_pool
        first = [*main.k_buffer, *main.v_buffer, *pool.index_k_pool.k_buffer]
        return [*first, *index.k_buffer, *index.v_buffer]

    def allocate(self, prefixes: list[int]) -> torch.Tensor:
        """Requests with shuffled pages for their prefix and drafts: the drafts' slots, in order."""
        page, drafts, slots, taken = self.shape.page, self.shape.drafts, [], 0
        for request, prefix in enumerate(prefixes, 1):
            pages = -(-(prefix + drafts) // page)
            first = self._pages[taken : taken + pages, None] * page
            taken += pages
            row = (first + torch.arange(page)).flatten()[: prefix + drafts]
            self.req_to_token[request, : prefix + drafts] = row
            slots.append(row[prefix:])
        return torch.cat(slots)


class Step(NamedTuple):
    """One verify step: a tree for every request.

    Attributes:
        prefixes: tokens of each request.
        parents: of each request's nodes, -1 for the root; further nodes with -1 are at depth 0.
        slots: int64, of all nodes.
        inputs: each layer's q, k, v, idx_q, idx_k, idx_v.
    """

    prefixes: list[int]
    parents: list[list[int]]
    slots: torch.Tensor
    inputs: dict[int, tuple[torch.Tensor, ...]]

    @property
    def nodes(self) -> list[tuple[int, int]]:
        return [(r, i) for r, tree in enumerate(self.parents) for i in range(len(tree))]

    def positions(self) -> torch.Tensor:
        depths = [len(path(self.parents[r], i)) - 1 + self.prefixes[r] for r, i in self.nodes]
        return torch.tensor(depths)

    def mask(self) -> torch.Tensor:
        rows = []
        for r, i in self.nodes:
            seen = path(self.parents[r], i)
            tree = [j in seen for j in range(len(self.parents[r]))]
            rows.append(torch.tensor([True] * self.prefixes[r] + tree))
        return torch.cat(rows)

    def rows(self, server: Server) -> list[torch.Tensor]:
        """The slots that each node sees, by position."""
        found = []
        for r, i in self.nodes:
            first = r * len(self.parents[r])
            prefix = server.req_to_token[r + 1, : self.prefixes[r]].long()
            own = self.slots[[first + node for node in path(self.parents[r], i)]]
            found.append(torch.cat((prefix, own)))
        return found


def step(server: Server, prefixes: list[int], parents: list[list[int]]) -> Step:
    slots = server.allocate(prefixes).long()
    count = len(slots)

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(count, heads, dim).half()

    inputs = {
        layer: (
            made(HEADS, DIM), made(1, DIM), made(1, DIM),
            made(1, INDEX_DIM), made(1, INDEX_DIM), made(1, INDEX_DIM) if layer == VALUED else None,
        )
        for layer in (SPARSE, VALUED)
    }  # fmt: skip
    return Step(prefixes, parents, slots, inputs)


def spec_input(made: Step, kind: str, **changed: Any) -> Any:
    drafts = len(made.parents[0])
    common = {
        "draft_token": None, "custom_mask": made.mask(), "positions": made.positions(),
        "retrieve_index": None, "retrieve_next_token": None, "retrieve_next_sibling": None,
        "draft_token_num": drafts,
    }  # fmt: skip
    if kind == "ngram":
        return NgramVerifyInput(**common | changed)
    eagle = {
        "retrieve_cum_len": None, "spec_steps": 3, "topk": 4, "capture_hidden_mode": None,
        "seq_lens_sum": sum(made.prefixes), "seq_lens_cpu": torch.tensor(made.prefixes),
    }  # fmt: skip
    return EagleVerifyInput(**common | eagle | changed)


def batch_of(made: Step, spec: Any) -> ForwardBatch:
    prefixes, count = torch.tensor(made.prefixes), len(made.slots)
    batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(prefixes),
        input_ids=torch.zeros(count, dtype=torch.long),
        req_pool_indices=torch.arange(1, len(prefixes) + 1),
        seq_lens=prefixes,
        out_cache_loc=made.slots,
        seq_lens_sum=sum(made.prefixes),
    )
    batch.seq_lens_cpu, batch.positions, batch.spec_info = prefixes.clone(), made.positions(), spec
    return batch


def attend(server: Server, batch: Any, inputs: tuple[torch.Tensor, ...], layer: int) -> tuple:
    """The hybrid backend's forward of a layer: index attention's output (or None), attention's."""
    q, k, v, idx_q, idx_k, idx_v = inputs
    index = {"idx_q": idx_q, "idx_k": idx_k, "idx_v": idx_v}
    return server.backend.forward(q, k, v, _layer(layer), batch, **index)


def verify(server: Server, made: Step, kind: str = "eagle", layer: int = SPARSE) -> tuple:
    """A whole eager verify step of one layer, as the engine runs it."""
    batch = batch_of(made, spec_input(made, kind))
    server.backend.init_forward_metadata(batch)
    return attend(server, batch, made.inputs[layer], layer)


def reference(server: Server, made: Step, layer: int = SPARSE) -> tuple:
    """The same in plain PyTorch, over what the pool holds: a softmax over each node's own path."""
    shape, pool = server.shape, server.pool
    q, _, _, idx_q, _, _ = made.inputs[layer]
    k, v = (buffer[:, 0].float() for buffer in pool.get_kv_buffer(layer))
    index_k = (
        pool.get_index_kv_buffer(layer)[0] if layer == VALUED else pool.get_index_k_buffer(layer)
    )
    outputs, indexed = [], []
    for t, row in enumerate(made.rows(server)):
        scores = index_k[row, 0].float() @ idx_q[t, 0].float() * INDEX_DIM**-0.5
        blocks = scores.split(shape.block)
        best = torch.stack([block.max() for block in blocks])
        best[: shape.init] = 1e30
        best[-1] = 1e29
        chosen = sorted(best.topk(min(shape.topk, len(blocks))).indices.tolist())
        seen = torch.cat([row.split(shape.block)[block] for block in chosen])
        weights = torch.softmax(q[t].float() @ k[seen].T * DIM**-0.5, -1)
        outputs.append((weights @ v[seen]).flatten())
        if layer == VALUED:
            index_v = pool.get_index_kv_buffer(layer)[1][row, 0].float()
            indexed.append(torch.softmax(scores, 0) @ index_v)
    return torch.stack(indexed) if indexed else None, torch.stack(outputs)


class _Dense:
    """Stands for fa3, triton or flashinfer, which mask a tree themselves."""

    kv_index_translator = None

    def init_forward_metadata(self, batch: Any) -> None:
        pass

    def init_forward_metadata_out_graph(self, batch: Any, in_capture: bool = False) -> None:
        pass


def _pool(page: int) -> MiniMaxSparseKVPool:
    return MiniMaxSparseKVPool(
        size=SLOTS - page, page_size=page, dtype=torch.float16, head_num=1, head_dim=DIM,
        idx_head_dim=INDEX_DIM, dense_layer_ids=[0], sparse_layer_ids=[SPARSE, VALUED],
        disable_value_sparse_layer_ids=[SPARSE], device="cpu", start_layer=0, end_layer=3,
    )  # fmt: skip


def _runner(shape: Shape, pool: Any, req_to_token: torch.Tensor) -> SimpleNamespace:
    sparse = {
        "sparse_index_dim": INDEX_DIM, "sparse_attention_freq": [0, 1, 1],
        "sparse_disable_index_value": [1, 1, 0], "sparse_score_type": "max",
        "sparse_block_size": shape.block, "sparse_init_block": shape.init, "sparse_local_block": 1,
        "sparse_topk_blocks": shape.topk, "sparse_num_index_heads": 1,
    }  # fmt: skip
    config = SimpleNamespace(
        architectures=["MiniMaxM3SparseForCausalLM"], sparse_attention_config=sparse
    )
    model = SimpleNamespace(
        context_len=CONTEXT - 32, hf_config=config, hf_text_config=config,
        num_attention_heads=HEADS, get_total_num_kv_heads=lambda: 1,
    )  # fmt: skip
    return SimpleNamespace(
        token_to_kv_pool=pool, hisparse_coordinator=None, model_config=model, device="cuda",
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
        server_args=get_context()._server_args,
    )  # fmt: skip


def _layer(layer: int) -> SimpleNamespace:
    scales = ("k_scale", "v_scale", "q_scale", "idx_k_scale", "idx_v_scale", "idx_q_scale")
    return SimpleNamespace(
        layer_id=layer, tp_q_head_num=HEADS, v_head_dim=DIM, scaling=DIM**-0.5, k_scale=None,
        v_scale=None, **{f"{name}_float": None for name in scales},
    )  # fmt: skip


def _select_blocks(score, seq_lens, block_size, topk, out):
    """Stands for the CUDA kernel: the best blocks by ascending number, then -1."""
    for row, length in enumerate(seq_lens.tolist()):
        blocks = -(-length // block_size)
        best = score[:, row, :blocks].topk(min(topk, blocks)).indices if blocks > topk else None
        chosen = torch.arange(blocks).expand(len(score), -1) if best is None else best.sort().values
        out[:, row] = -1
        out[:, row, : chosen.shape[1]] = chosen


minimax_decode_topk.minimax_decode_topk = _select_blocks


_CONFIGURATIONS: dict[Autotuner, list] = {}


def _one_configuration(block: int) -> None:
    """Keep one configuration of each tuned kernel, so that nothing is timed."""
    for module in (flash_with_topk_idx, topk_sparse):
        for kernel in vars(module).values():
            while isinstance(kernel, Heuristics):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner):
                every = _CONFIGURATIONS.setdefault(kernel, kernel.configs)
                wide = [c for c in every if c.kwargs.get("BLOCK_SIZE_N", block) >= block]
                kernel.configs, kernel.early_config_prune = (wide or every)[-1:], None


def _patch_a_kernel_once() -> None:
    """The interpreter patches its language, in milliseconds, at each call of a device function.

    Within one kernel once is enough.
    """
    patch_lang, patched = interpreter._patch_lang, set()

    def patch(function):
        key = frozenset(id(v) for v in function.__globals__.values() if v is tl or v is tl.core)
        if key in patched:
            return interpreter._LangPatchScope()
        outermost = not patched
        scope = patch_lang(function)
        patched.add(key)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch


def _start_fewer_programs() -> None:
    """The indexer starts programs enough to fill a GPU, most of them with nothing to do."""
    indexer = flash_with_topk_idx.flash_decode_with_topk_idx.__wrapped__
    fewer = {4096: 32, 64: 8}  # of scores; of their selection
    assert fewer.keys() <= set(indexer.__code__.co_consts)
    constants = tuple(fewer.get(c, c) for c in indexer.__code__.co_consts)
    indexer.__code__ = indexer.__code__.replace(co_consts=constants)


_patch_a_kernel_once()
_start_fewer_programs()
