"""Drafts on MiniMax's sparse layers, verified on CUDA: every draft node is a decode row.

SGLang 0.5.23 sends a verify step to its prefill kernels, without the metadata they read, and they
know no tree. Its decode kernels need neither: a node that is given a row of its own (the prefix and
its ancestors, each at its position) is a request like any other. So a verify step builds those
rows, out of graph, and runs the unmodified ``forward_decode`` over them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from specpool.adapters.sglang.patch import Patch, apply
from specpool.adapters.sglang.verify_checks import is_enabled, largest_batch
from specpool.adapters.sglang.verify_rows import Bucket, TreeBatch, TreeRows
from specpool.errors import UnsupportedAccess

logger = logging.getLogger("specpool.sglang")
_BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend:MiniMaxSparseAttnBackend"
_INPUTS = ("EAGLE_VERIFY", "NGRAM_VERIFY")


class _Prepared(NamedTuple):
    """A batch shape's rows, and the backend as its decode sees it."""

    bucket: Bucket
    backend: Any


class _Verifier:
    """What one attention backend's verify steps run on.

    Args:
        backend: a ``MiniMaxSparseAttnBackend``; it is copied, never changed, since captured graphs
            and plain decode go on with it.
    """

    def __init__(self, backend: Any) -> None:
        requests, drafts = largest_batch(backend)
        self.rows = TreeRows(backend.req_to_token, requests, drafts)
        self._shapes: dict[tuple[int, int], _Prepared] = {}
        self._prepared: _Prepared | None = None
        logger.info(
            "specpool verifies drafts on MiniMax's sparse layers: rows of %d nodes and %d slots, "
            "%.0f MiB on %s",
            self.rows.count,
            self.rows.width,
            self.rows.nbytes / (1 << 20),
            backend.req_to_token.device,
        )

    def prepare(self, backend: Any, batch: Any, in_capture: bool) -> None:
        """Build the rows of a verify step's nodes, outside of any graph.

        Args:
            backend: whose verifier this is.
            batch: a ``ForwardBatch``, or SGLang's view of the batch that a graph is replayed for.
            in_capture: the batch stands for every later one of its shape.

        Raises:
            UnsupportedAccess: drafts come in a form that is not known here.
        """
        spec, requests = batch.spec_info, batch.seq_lens.shape[0]
        drafts = spec.draft_token_num
        prepared = self._shape(backend, requests, drafts)
        lengths = batch.seq_lens_cpu.tolist()
        # what a graph bakes in must hold for the longest batch that it is replayed for
        limit = self.rows.width if in_capture else min(max(lengths) + drafts, self.rows.width)
        slots = batch.out_cache_loc
        tree = TreeBatch(
            batch.req_pool_indices,
            batch.seq_lens,
            spec.custom_mask,
            batch.positions,
            batch.positions[:0] if slots is None else slots,
        )
        _check_mask(spec, tree, lengths, drafts)
        self.rows.write(prepared.bucket, tree, limit)
        prepared.backend._max_seqlen_k = limit
        self._prepared = prepared

    def prepared_for(self, tokens: int) -> _Prepared:
        """What the last ``prepare`` made, for a forward of as many tokens."""
        prepared = self._prepared
        if prepared is None or prepared.bucket.lens.shape[0] != tokens:
            made = "none" if prepared is None else prepared.bucket.lens.shape[0]
            raise RuntimeError(
                f"a verify step of {tokens} tokens, and rows were built for {made}: "
                "init_forward_metadata_out_graph was not called for this batch"
            )
        return prepared

    def _shape(self, backend: Any, requests: int, drafts: int) -> _Prepared:
        prepared = self._shapes.get((requests, drafts))
        if prepared is None:
            bucket = self.rows.bucket(requests, drafts)
            told = copy.copy(backend)
            told.req_to_token = bucket.slots
            # a node's row is contiguous within no page: kernels must look up every slot
            told.page_size = 1
            told.use_dense_sparse_decode = False
            told._use_msa_decode = False
            prepared = self._shapes[(requests, drafts)] = _Prepared(bucket, told)
        return prepared


_VERIFIERS: WeakKeyDictionary[Any, _Verifier] = WeakKeyDictionary()


def serve(backend: Any) -> None:
    """Have a backend's verify steps run on decode rows; allocates the rows.

    Args:
        backend: a ``MiniMaxSparseAttnBackend`` for which ``why_not`` has no reason.

    Raises:
        UnsupportedAccess: something else has taken the place of what ``patches`` replaced.
    """
    for outcome in map(apply, patches()):
        if outcome.reason is not None:
            raise UnsupportedAccess(
                f"specpool could not replace {outcome.target}: {outcome.reason}"
            )
    _VERIFIERS[backend] = _Verifier(backend)


def patches() -> list[Patch]:
    """What is replaced when it is turned on; a backend that is not served is left as it is."""
    if not is_enabled():
        return []
    extend = ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache")
    return [
        Patch(
            f"{_BACKEND}.init_forward_metadata_out_graph",
            ("self", "forward_batch", "in_capture"),
            _preparing,
        ),
        Patch(f"{_BACKEND}.forward_extend", (*extend, "idx_q", "idx_k", "idx_v"), _verifying),
    ]


def _preparing(original: Callable[..., None]) -> Callable[..., None]:
    def init_forward_metadata_out_graph(
        self: Any, forward_batch: Any, in_capture: bool = False
    ) -> None:
        original(self, forward_batch, in_capture)
        verifier = _VERIFIERS.get(self)
        if verifier is not None and forward_batch.forward_mode.is_target_verify():
            verifier.prepare(self, forward_batch, in_capture)

    return init_forward_metadata_out_graph


def _verifying(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward_extend(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        idx_q: torch.Tensor,
        idx_k: torch.Tensor,
        idx_v: torch.Tensor | None,
    ) -> Any:
        index = {"idx_q": idx_q, "idx_k": idx_k, "idx_v": idx_v}
        verifier = _VERIFIERS.get(self)
        if verifier is None or not forward_batch.forward_mode.is_target_verify():
            return original(self, q, k, v, layer, forward_batch, save_kv_cache, **index)
        bucket, told = verifier.prepared_for(q.shape[0])
        rows = copy.copy(forward_batch)
        rows.seq_lens, rows.req_pool_indices = bucket.lens, bucket.numbers
        return told.forward_decode(q, k, v, layer, rows, save_kv_cache, **index)

    return forward_extend


def _check_mask(spec: Any, tree: TreeBatch, lengths: list[int], drafts: int) -> None:
    """Refuse whatever is no mask in the FULL_MASK layout, by what the host knows of it."""
    kind = spec.spec_input_type.name
    if kind not in _INPUTS:
        raise UnsupportedAccess(f"specpool verifies {' and '.join(_INPUTS)}, not {kind}")
    live = tree.out_cache_loc.shape[0] // drafts
    if live == 0:
        return
    least = (sum(lengths[:live]) + live * drafts) * drafts
    mask = tree.mask
    if mask is None or mask.dtype != torch.bool or mask.dim() != 1 or mask.shape[0] < least:
        given = "None" if mask is None else f"{mask.dtype} {list(mask.shape)}"
        raise UnsupportedAccess(
            f"specpool reads a tree in SGLang's FULL_MASK layout, bool, flat, here of {least} "
            f"entries at least; the mask is {given}"
        )
