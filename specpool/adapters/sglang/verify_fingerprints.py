"""The source of SGLang that ``verify`` was shown with: what it hooks, and what it relies on.

Each part has a fingerprint, taken from the installed files without importing them.
"""

from __future__ import annotations

import ast
import hashlib
import logging
from functools import cache
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger("specpool.sglang")
_ATTENTION = "srt/layers/attention"
_BACKEND = f"{_ATTENTION}/minimax_sparse_backend.py"
_KERNELS = "kernels/ops/attention/minimax_sparse"
_RUNNER = "srt/model_executor/runner/decode_cuda_graph_runner.py"
_EAGLE = "srt/speculative/eagle_utils.py"
FINGERPRINTS = {
    f"{_BACKEND}:MiniMaxSparseAttnBackend": "789b8a5892d6",
    f"{_BACKEND}:MiniMaxHybridAttnBackend": "59dde4c586e4",
    f"{_ATTENTION}/minimax_sparse_ops/minimax_sparse.py:minimax_sparse_decode": "89ae85fb8122",
    f"{_KERNELS}/decode/flash_with_topk_idx.py": "01107108cabd",
    f"{_KERNELS}/decode/topk_sparse.py": "a7651d53ed5b",
    f"{_KERNELS}/common/index.py": "f7141f5d82e9",
    f"{_KERNELS}/common/tile_ptr.py": "a8131828a72f",
    f"{_KERNELS}/common/utils.py": "7dd6ffa28fcc",
    f"{_ATTENTION}/attention_registry.py:attn_backend_wrapper": "4a99e1cc7da4",
    f"{_ATTENTION}/base_attn_backend.py:AttentionBackend": "320b38bb83ca",
    f"{_RUNNER}:build_replay_fb_view": "864e9f3cd9a5",
    f"{_RUNNER}:DecodeCudaGraphRunner": "209271487b55",
    "srt/speculative/eagle_info.py:EagleVerifyInput": "144e7cf41ed1",
    f"{_EAGLE}:build_tree_kernel_efficient": "4663a0ad1870",
    f"{_EAGLE}:default_tree_mask_mode": "0fe418c93e3c",
    f"{_EAGLE}:eagle_prepare_for_verify": "4329be5470a7",
    "srt/speculative/eagle_worker_common.py:build_eagle_verify_input": "710372aeb309",
    "srt/speculative/ngram_info.py:NgramVerifyInput": "2f92afc3ac3c",
    "srt/speculative/ngram_worker.py:NGRAMWorker": "5ea6199ffdd8",
    "srt/speculative/spec_info.py:create_dummy_verify_input": "16746f4ab2bd",
}
"""Of SGLang 0.5.23: a file of the package, or ``file:name`` of a class or function in it, and the
first 12 digits of its source's SHA-256."""


def drifted() -> tuple[str, ...]:
    """Parts of the installed SGLang whose source is another; each is an ERROR in the log."""
    found = tuple(part for part, known in FINGERPRINTS.items() if fingerprint(part) != known)
    for part in found:
        logger.error("specpool does not know the source of SGLang's %s", part)
    return found


def fingerprint(part: str) -> str | None:
    """A part's fingerprint in the installed SGLang; None where there is no such part.

    Args:
        part: as the keys of ``FINGERPRINTS``; a method is ``file:Class.method``.
    """
    file, _, names = part.partition(":")
    source = _source(file)
    if source is None:
        return None
    if names:
        node: ast.AST | None = _parsed(source)
        for name in names.split("."):
            inside = getattr(node, "body", ())
            node = next((n for n in inside if getattr(n, "name", None) == name), None)
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            return None
        source = "".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _source(file: str) -> str | None:
    package = find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0], file)
    return path.read_text() if path.is_file() else None


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)
