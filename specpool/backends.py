"""Which backend serves a device, and what every backend can do.

There are three with the same methods: Triton's kernels, the same in PyTorch, and numpy on the CPU.
Each is imported when a mover first needs it.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Protocol

import torch

from specpool.rows import Rows

BACKENDS = ("cpu", "torch", "triton")


class Backend(Protocol):
    """What serves a mover's calls, for one list of rows (and one to copy from)."""

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """``row[tgt] = row[src]`` in every buffer, all sources read first."""

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Every request's accepted entries to the front of its window."""

    def reserve(self, max_pairs: int) -> None:
        """Allocate and compile whatever calls of up to ``max_pairs`` pairs need."""


def backend_for(device: torch.device | str) -> tuple[str, str]:
    """The backend that serves a device by default, and why.

    ``SPECPOOL_BACKEND`` overrides it.

    Returns:
        ``"cpu"``, ``"torch"`` or ``"triton"``, and the reason in words.
    """
    device = torch.device(device)
    chosen = os.environ.get("SPECPOOL_BACKEND")
    if chosen:
        if chosen not in BACKENDS:
            raise ValueError(
                f"SPECPOOL_BACKEND is {chosen!r}; unset it, or make it one of {', '.join(BACKENDS)}"
            )
        return chosen, "SPECPOOL_BACKEND says so"
    if device.type == "cpu":
        return "cpu", "numpy views of the tensors' own memory"
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is not None:
            return "triton", "one Triton launch for all buffers"
        return "torch", "Triton is not installed; pip install triton makes it one launch"
    return "torch", f"Triton does not serve {device.type} devices"


def known_backend(backend: str) -> str:
    """The name itself; ValueError if there is no such backend."""
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; backends are {', '.join(BACKENDS)}")
    return backend


def why_not(backend: str, device: torch.device) -> str | None:
    """Why a backend does not serve a device; None where it does."""
    if backend == "cpu" and device.type != "cpu":
        return f"the cpu backend serves CPU tensors, not {device}"
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "the triton backend needs Triton: pip install triton"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return (
                f"the triton backend serves CUDA and HIP devices, not {device}; CPU tensors only "
                "under TRITON_INTERPRET=1"
            )
    return None


def build_backend(
    name: str, rows: list[Rows], counters: torch.Tensor, sources: list[Rows] | None = None
) -> Backend:
    """The named backend over ``rows``, or over copies from ``sources`` to them."""
    refusal = why_not(name, rows[0].tensor.device)
    if refusal:
        raise ValueError(refusal)
    if name == "cpu":
        from specpool.cpu import CpuMove

        return CpuMove(rows, counters, sources)
    if name == "torch":
        from specpool_kernels.move_reference import TorchMove

        return TorchMove(rows, counters, sources)
    from specpool_kernels.launch import TritonMove

    return TritonMove(rows, counters, sources)
