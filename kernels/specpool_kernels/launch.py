"""Moves on a GPU: rows become a device table once, a call becomes one launch.

``TritonMove`` has the methods of ``move_reference.TorchMove``. Under ``TRITON_INTERPRET=1`` it
also serves CPU tensors, which is how its kernels are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from specpool_kernels import move, plan
from specpool_kernels.device import is_capturing, on_device
from specpool_kernels.prepared import Prepared, prepare
from specpool_kernels.table import RowSet, build_table

_INTERPRETED_PROCESSORS = 2
_LOC_DTYPES = {"i32": torch.int32, "i64": torch.int64}  # as ``plan`` names them
_CAPTURE = -1  # whose scratch graphs use, on whatever stream they replay


class TritonMove:
    """Moves within ``rows``, or copies from ``sources`` to ``rows``, by Triton kernels.

    Args:
        rows: at least one set of rows, all on one device, disjoint.
        counters: int64 ``[2]`` on that device: bad pairs and rows moved are added to it.
        sources: rows of the same widths on the same device, sharing no bytes with ``rows``.
    """

    def __init__(
        self,
        rows: Sequence[RowSet],
        counters: torch.Tensor,
        sources: Sequence[RowSet] | None = None,
    ) -> None:
        self._table = build_table(rows, sources)
        self._counters = counters
        self._device = rows[0].tensor.device
        self._warp_size, self._wait, self._processors = _target(self._device)
        self._addresses = self._table.words.data_ptr(), counters.data_ptr()
        # by what Triton compiles anew for: the variant, and the dtypes of scratch and locs
        self._prepared: dict[tuple[Any, ...], Prepared | None] = {}
        self._scratch: dict[int, torch.Tensor] = {}
        self._reserved = 0

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """``row[tgt] = row[src]`` in every buffer, all sources read first.

        Args:
            tgt_loc: n int32 or int64 locs on the rows' device; -1 skips a pair.
            src_loc: as many locs.
        """
        pairs = tgt_loc.numel()
        variant = plan.copy_variant(pairs) if self._table.copy else plan.move_variant(pairs)
        self._move(variant, tgt_loc, src_loc)

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Move every request's accepted entries to the front of its window.

        Args:
            out_cache_loc: ``[bs, D]`` int32 or int64 locs that the verify step wrote.
            accept_index: ``[bs, S]`` int32 or int64, flat into ``[bs * D]``; -1 skips.
            accept_len: ``[bs]`` int32 or int64, entries of each row that count.
        """
        bs, entries = accept_index.shape
        variant = plan.accept_variant(entries, bs)
        self._move_accepted(variant, out_cache_loc, accept_index, accept_len)

    def reserve(self, max_pairs: int) -> None:
        """Allocate scratch for moves of up to ``max_pairs`` pairs and compile what they launch."""
        self._reserved = max(self._reserved, max_pairs)
        variants = plan.variants(self._reserved, self._table.copy)
        if any(v.kernel == "move_staged" for v in variants):
            for stream in (_CAPTURE, self._stream()):
                self._grown(stream, self._scratch_bytes())
        if move_is_interpreted():
            return
        skipped = {
            name: torch.full((1, 1), -1, dtype=dtype, device=self._device)
            for name, dtype in _LOC_DTYPES.items()
        }
        nothing = {name: torch.zeros_like(loc[0]) for name, loc in skipped.items()}
        for variant in variants:
            for types in plan.loc_types(variant.kernel):
                if variant.kernel == "move_accepted":
                    window, index, length = types
                    self._move_accepted(variant, skipped[window], skipped[index], nothing[length])
                else:
                    src, tgt = types
                    self._move(variant, skipped[tgt], skipped[src])

    def _move(self, variant: plan.Variant, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        (src, *src_shape), (tgt, *tgt_shape) = _as_read(src_loc), _as_read(tgt_loc)
        locs, shapes, pairs = (src, tgt), (*src_shape, *tgt_shape), tgt_loc.numel()
        if variant.kernel == "move_staged":
            programs = plan.staged_programs(pairs, self._table.blocks, self._processors)
            scratch = self._scratch_of(programs * pairs * plan.STAGED_BYTES)
            tiles = self._table.blocks * variant.split
            self._launch(variant, (programs,), (scratch, *locs), (pairs, tiles, *shapes))
        else:
            grid = (self._table.blocks * variant.split, -(-pairs // variant.rows))
            self._launch(variant, grid, locs, (pairs, *shapes))

    def _move_accepted(
        self,
        variant: plan.Variant,
        out_cache_loc: torch.Tensor,
        accept_index: torch.Tensor,
        accept_len: torch.Tensor,
    ) -> None:
        (bs, window), entries = out_cache_loc.shape, accept_index.shape[1]
        tensors = (out_cache_loc, accept_index, accept_len)
        for tensor in tensors:
            _check_reach(tensor)
        width = plan.padded(entries)
        grid = (self._table.blocks * variant.split, -(-bs // (variant.rows // width)))
        strides = (*out_cache_loc.stride(), *accept_index.stride(), *accept_len.stride())
        self._launch(
            variant, grid, tensors, (bs, window, entries, width.bit_length() - 1, *strides)
        )

    def _scratch_bytes(self) -> int:
        return plan.scratch_bytes(self._reserved, self._table.blocks, self._processors)

    def _scratch_of(self, size: int) -> torch.Tensor:
        stream = _CAPTURE if is_capturing(self._device) else self._stream()
        return self._grown(stream, size)

    def _grown(self, stream: int, size: int) -> torch.Tensor:
        """A stream's scratch, kept while it is large enough: graphs hold on to theirs."""
        scratch = self._scratch.get(stream)
        if scratch is None or scratch.numel() < size:
            size = max(size, self._scratch_bytes())
            scratch = torch.empty(size, dtype=torch.int8, device=self._device)
            self._scratch[stream] = scratch
        return scratch

    def _stream(self) -> int:
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def _launch(
        self,
        variant: plan.Variant,
        grid: tuple[int, ...],
        tensors: tuple[torch.Tensor, ...],
        numbers: tuple[int, ...],
    ) -> None:
        """Once through Triton's public call; from then on past the work that it does every time."""
        table, counters = self._addresses
        pointers = (table, *[tensor.data_ptr() for tensor in tensors], counters)
        key = (variant, *[tensor.dtype for tensor in tensors])
        with on_device(self._device):
            prepared = self._prepared.get(key)
            if prepared is not None and prepared.launch(grid, pointers, numbers):
                return
            kernel, constants = getattr(move, variant.kernel), self._constants(variant)
            compiled = kernel[grid](
                self._table.words,
                *tensors,
                self._counters,
                *numbers,
                num_warps=variant.num_warps(self._warp_size),
                **constants,
            )
            if prepared is None:
                self._prepared[key] = prepare(kernel, compiled, pointers, numbers, constants)

    def _constants(self, variant: plan.Variant) -> dict[str, int | bool]:
        table = self._table  # types of locs are no constants
        key = plan.Key(variant, table.classes, table.paged, table.mapped, table.copy, locs=())
        return {**key.constants(), "WAIT": self._wait}


def move_is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def _target(device: torch.device) -> tuple[int, bool, int]:
    """Warp size, whether loads must be waited for before a barrier, processors."""
    if move_is_interpreted():
        return 32, False, _INTERPRETED_PROCESSORS
    if device.type != "cuda":
        raise ValueError(
            f"the triton backend serves CUDA and HIP devices, got {device}; CPU tensors only "
            "under TRITON_INTERPRET=1"
        )
    with on_device(device):
        target = triton.runtime.driver.active.get_current_target()
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return target.warp_size, target.backend == "hip", processors


def _as_read(loc: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """A loc tensor as the kernels read it, then locs a row, row stride, stride in a row.

    1-D and 2-D locs are read with their own strides; others are flattened, by a copy at worst.
    """
    if loc.dim() != 2:
        loc = loc.reshape(-1)
    _check_reach(loc)
    if loc.dim() == 1:
        return loc, loc.numel(), 0, loc.stride(0)
    row_stride, col_stride = loc.stride()
    return loc, loc.shape[1], row_stride, col_stride


def _check_reach(tensor: torch.Tensor) -> None:
    """Kernels index locs in 32 bits."""
    if tensor.is_contiguous() and tensor.numel() < 2**31:
        return
    reach = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    if max(reach, tensor.numel()) >= 2**31:
        raise ValueError(
            f"a loc tensor reaches {reach} elements from its first; at most 2^31 - 1 are supported"
        )
