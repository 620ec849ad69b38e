"""What ``verify`` serves: facts of a server, and why it would not be verified rightly.

The same question is asked twice, from the arguments before any process is spawned and of the
attention backend that was built. Whatever was not shown right is refused, and so is an SGLang whose
source is not what it was shown with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specpool.adapters.sglang.installed import sglang_version
from specpool.adapters.sglang.verify_fingerprints import drifted
from specpool.adapters.sglang.verify_rows import row_bytes

ENABLE = "SPECPOOL_SGLANG_MINIMAX_VERIFY"
BUDGET = "SPECPOOL_SGLANG_VERIFY_MIB"
DEFAULT_BUDGET_MIB = 1024
TESTED = "0.5.23"
_ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM")
_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
_MIB = 1 << 20


class Memory(NamedTuple):
    """What the rows of the largest batch need, and what there is.

    Attributes:
        rows: nodes of the largest batch.
        width: slots of one row.
        budget: bytes that ``SPECPOOL_SGLANG_VERIFY_MIB`` allows.
        free: bytes free on the device; None where that is not known.
        slots: slots of the KV pool, by whose number SGLang's kernels reduce the number of a row.
    """

    rows: int
    width: int
    budget: int
    free: int | None
    slots: int

    @property
    def needed(self) -> int:
        """Bytes of all rows."""
        return row_bytes(self.rows, self.width)


@dataclass(frozen=True)
class Facts:
    """What decides whether a server's drafts are verified rightly.

    Attributes:
        setting: ``SPECPOOL_SGLANG_MINIMAX_VERIFY``.
        version: SGLang's; None where it is not installed.
        drifted: parts of SGLang whose source is not the one that was tested.
        device: ``"cuda"``, ``"hip"`` or another device's type.
        algorithm: the resolved ``--speculative-algorithm``.
        topk: ``--speculative-eagle-topk``, which is NGRAM's breadth too.
        dense: attention backends of the dense layers.
        adaptive: the number of drafts changes while serving.
        multi_layer: multi-layer EAGLE.
        fp8_attention: attention's matrix products run in fp8.
        hisparse: main K and V are kept on the host.
        two_batch_overlap: batches are split in two.
        padded_tokens: tokens are padded across ranks (DP attention, gathered buffers).
        pipeline: pipeline stages.
        context_parallel: ranks that share a context.
        msa_decode: plain decode runs MSA kernels; None while that is not known.
        memory: of the rows; None while that is not known.
    """

    setting: str
    version: str | None
    drifted: tuple[str, ...]
    device: str
    algorithm: str
    topk: int | None
    dense: tuple[str, ...]
    adaptive: bool
    multi_layer: bool
    fp8_attention: bool
    hisparse: bool
    two_batch_overlap: bool
    padded_tokens: bool
    pipeline: int
    context_parallel: int
    msa_decode: bool | None = None
    memory: Memory | None = None


def why_not(facts: Facts) -> str | None:
    """Why ``verify`` does not serve a server; None where it does."""
    return next(_reasons(facts), None)


def _reasons(facts: Facts) -> Iterator[str]:
    if facts.setting != "1":
        yield f"it is not turned on ({ENABLE}=1 does)"
    if facts.version != TESTED:
        yield f"it was tested with SGLang {TESTED}, and this is {facts.version}"
    if facts.drifted:
        yield f"this SGLang's source is not the one it was tested with: {', '.join(facts.drifted)}"
    if facts.device == "hip":
        yield "on ROCm SGLang verifies chains itself, and is left alone"
    elif facts.device != "cuda":
        yield f"the device is {facts.device}, not cuda"
    if facts.algorithm not in _ALGORITHMS:
        yield f"it knows the drafts of {', '.join(_ALGORITHMS)}, not of {facts.algorithm}"
    if (facts.topk or 1) > 1 and not set(facts.dense) <= set(_TREE_BACKENDS):
        yield (
            f"the dense layers' {' and '.join(sorted(set(facts.dense)))} attention is not known to "
            f"mask trees; --attention-backend {' or '.join(_TREE_BACKENDS)}, or "
            "--speculative-eagle-topk 1"
        )
    if facts.adaptive:
        yield "the number of drafts must not change; start without --speculative-adaptive"
    if facts.multi_layer and (facts.topk or 1) > 1:
        yield (
            "multi-layer EAGLE does not move what a tree's path accepted; "
            "--speculative-eagle-topk 1"
        )
    if facts.fp8_attention:
        yield "attention runs in fp8; SGLANG_DISABLE_M3_FP8_ATTN_GEMM=1"
    if facts.hisparse:
        yield "main K and V are on the host; start without --enable-hisparse"
    if facts.two_batch_overlap:
        yield "batches are split in two; start without --enable-two-batch-overlap"
    if facts.padded_tokens:
        yield (
            "tokens are padded across ranks; start without DP attention, --moe-a2a-backend and "
            "--moe-dense-tp-size"
        )
    if facts.pipeline > 1:
        yield "it was not shown with pipeline parallelism; --pp-size 1"
    if facts.context_parallel > 1:
        yield "it was not shown with context parallelism; one rank a context"
    if facts.msa_decode:
        yield "decode runs MSA kernels, which read whole pages; SGLANG_DISABLE_MSA=1"
    if facts.memory is not None:
        yield from _memory_reasons(facts.memory)


def _memory_reasons(memory: Memory) -> Iterator[str]:
    needed = (
        f"rows of {memory.rows} nodes and {memory.width} slots take {memory.needed / _MIB:,.0f} MiB"
    )
    less = "lower --max-running-requests, --context-length or --speculative-num-draft-tokens"
    if memory.needed > memory.budget:
        yield f"{needed}, and {BUDGET} allows {memory.budget / _MIB:,.0f}; raise it, or {less}"
    if memory.free is not None and memory.needed > memory.free:
        yield (
            f"{needed}, and {memory.free / _MIB:,.0f} are free; lower --mem-fraction-static, or "
            f"{less}"
        )
    if memory.rows > memory.slots:
        yield f"{memory.rows} nodes are more than the {memory.slots} slots of the KV pool; {less}"


def facts_of_arguments(view: Any, device: str) -> Facts:
    """The facts that resolved server arguments tell.

    Args:
        view: SGLang's resolved view of them.
        device: ``"cuda"``, ``"hip"`` or another device's type.
    """
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.runtime_context import attn_dp_enabled_of
    from sglang.srt.server_args import m3_fp8_attn_gemm_enabled

    return Facts(
        setting=_setting(),
        version=sglang_version(),
        drifted=drifted() if is_enabled() else (),
        device=device,
        algorithm=view.speculative_algorithm,
        topk=view.speculative_eagle_topk,
        dense=tuple(map(str, attention_backends_of(view))),
        adaptive=bool(view.speculative_adaptive),
        multi_layer=bool(view.enable_multi_layer_eagle),
        fp8_attention=m3_fp8_attn_gemm_enabled(view),
        hisparse=view.enable_hisparse,
        two_batch_overlap=view.enable_two_batch_overlap,
        padded_tokens=(
            attn_dp_enabled_of(view)
            or view.moe_a2a_backend not in (None, "none")
            or view.moe_dense_tp_size is not None
        ),
        pipeline=view.pp_size,
        context_parallel=max(view.attn_cp_size, view.dcp_size),
    )


def facts_of_backend(backend: Any, device: str, dense: tuple[str, ...]) -> Facts:
    """The facts that a sparse attention backend tells when it has been built.

    Args:
        backend: a ``MiniMaxSparseAttnBackend``.
        device: ``"cuda"``, ``"hip"`` or another device's type.
        dense: attention backends of the dense layers.
    """
    from sglang.srt.runtime_context import get_exec, get_parallel, get_spec
    from sglang.srt.utils.common import require_mlp_sync

    spec, parallel = get_spec(), get_parallel()
    return Facts(
        setting=_setting(),
        version=sglang_version(),
        drifted=drifted() if is_enabled() else (),
        device=device,
        algorithm=spec.speculative_algorithm,
        topk=spec.speculative_eagle_topk,
        dense=dense,
        adaptive=bool(spec.speculative_adaptive),
        multi_layer=bool(spec.enable_multi_layer_eagle),
        fp8_attention=backend.fp8_attn_gemm,
        hisparse=backend.hisparse_coordinator is not None,
        two_batch_overlap=get_exec().overlap.enable_two_batch_overlap,
        padded_tokens=require_mlp_sync(),
        pipeline=parallel.pp_size,
        context_parallel=max(parallel.attn_cp_size, parallel.attn_dcp_size),
        msa_decode=backend._use_msa_decode,
        memory=_memory_of(backend),
    )


def largest_batch(backend: Any) -> tuple[int, int]:
    """Requests and drafts of the largest verify batch of a backend."""
    return backend.req_to_token.shape[0], backend.speculative_num_draft_tokens


def is_enabled() -> bool:
    """Whether ``SPECPOOL_SGLANG_MINIMAX_VERIFY`` is 1."""
    return _setting() == "1"


def _setting() -> str:
    return os.environ.get(ENABLE, "")


def _memory_of(backend: Any) -> Memory:
    requests, drafts = largest_batch(backend)
    table = backend.req_to_token
    free = torch.cuda.mem_get_info(table.device)[0] if table.device.type == "cuda" else None
    slots = backend.kv_pool.size + backend.kv_pool.page_size
    return Memory(requests * drafts, table.shape[1], _budget(), free, slots)


def _budget() -> int:
    given = os.environ.get(BUDGET, "") or str(DEFAULT_BUDGET_MIB)
    if not given.isdecimal():
        raise ValueError(f"{BUDGET}={given!r} is no number of MiB")
    return int(given) * _MIB
