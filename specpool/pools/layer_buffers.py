"""Pools that own buffers, a fixed number a layer: their rows, their stores, their host copies.

A subclass says how a layer's buffers look when indexed by slot (``_slot_views`` and ``_at``);
checking, staging and the chunks of host copies are here, once.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch

from specpool.pools.base import KVCache
from specpool.pools.store import (
    HasLoc,
    Staged,
    Write,
    cast,
    check_device,
    check_list,
    check_range,
    check_scale,
    check_values,
    slots_of,
    within,
    write,
)
from specpool.rows import Rows, rows_from


class LayerBufferPool(KVCache):
    """A pool with buffers of its own; see ``KVCache`` for the arguments."""

    @property
    @abc.abstractmethod
    def slots(self) -> int:
        """Slots that each buffer holds; locs lie in ``[0, slots)``."""

    @abc.abstractmethod
    def _slot_views(self, index: int) -> list[torch.Tensor]:
        """Views of the buffers of layer number ``index`` that take the indices of ``_at``."""

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What to index a slot view with to reach ``slots`` (int64 ``[n]``)."""
        return (slots,)

    def _rows_of(
        self,
        name: str,
        buffers: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        layout: str = "nhd",
        **geometry: Any,
    ) -> list[Rows]:
        """Rows of one buffer a layer, each of which must still be what the pool made."""
        rows: list[Rows] = []
        for index, tensor in enumerate(buffers):
            label = f"{type(self).__name__}.{name}[{index}]"
            if tuple(tensor.shape) != shape or tensor.dtype != self.store_dtype:
                raise ValueError(
                    f"{label} is {tensor.dtype} {list(tensor.shape)} now; replace a buffer only by "
                    f"{self.store_dtype} {list(shape)}"
                )
            rows += rows_from(tensor, layout, name=label, **geometry)
        if len(buffers) != self.layer_num:
            raise ValueError(
                f"{type(self).__name__}.{name} has {len(buffers)} buffers for {self.layer_num} "
                "layers"
            )
        return rows

    # Stores

    def _checked_slots(self, loc_info: torch.Tensor | HasLoc) -> torch.Tensor:
        """The slots that an accessor's locs lead to, int64 ``[n]``."""
        loc = slots_of("loc", loc_info)
        check_device("loc", loc, self._device)
        return within("loc", loc, self.slots)

    def _stored(
        self,
        name: str,
        values: torch.Tensor,
        scale: float | torch.Tensor | None,
        slots: torch.Tensor,
        shape: tuple[int, ...],
    ) -> torch.Tensor:
        """``values`` as this pool keeps them, ``[n, *shape]`` of ``store_dtype``."""
        values = check_values(name, values, slots.numel(), shape, self._device)
        scale = check_scale(f"the scale of {name}", scale, self._device)
        return cast(values, scale, self.dtype).view(self.store_dtype)

    def _staged(self, index: int, slots: torch.Tensor, values: Sequence[torch.Tensor]) -> Staged:
        """A store of ``values[i]`` into slot view i of layer number ``index``."""
        return Staged(self._slot_views(index), self._at(slots), values)

    # Host copies

    def _join(self, parts: list[torch.Tensor]) -> Any:
        """A chunk of a host copy, from one tensor a slot view."""
        (part,) = parts
        return part

    def _split(self, where: str, chunk: Any) -> list[Any]:
        """The inverse of ``_join``; ``where`` is what messages call the chunk.

        Raises:
            TypeError, ValueError: it is nothing that ``_join`` returns.
        """
        return [chunk]

    def _host_slots(self, indices: torch.Tensor) -> torch.Tensor:
        """The slots of a host copy, int64 ``[n]`` on the pool's device."""
        slots = slots_of("indices", indices)
        check_range("indices", slots, self.slots)
        return slots.to(self._device)

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> list[list[Any]]:
        """The bytes of some slots, on the host.

        Args:
            indices: int32 or int64 ``[n]``, on any device.
            mamba_indices: accepted for SGLang's callers; these pools keep no such state.
            req_pool_index: likewise.

        Returns:
            ``[layer][chunk]``, chunks of at most ``cpu_offloading_chunk_size`` rows of
            ``store_dtype``, in the order of ``indices``.

        Raises:
            TypeError: ``indices`` is no int32 or int64 tensor.
            IndexError: a slot that the pool does not have.
        """
        slots = self._host_slots(indices)
        chunks = torch.split(slots, self.cpu_offloading_chunk_size) if slots.numel() else ()
        self._synchronize()
        copies = [
            [
                self._join([view[self._at(chunk)].cpu() for view in self._slot_views(index)])
                for chunk in chunks
            ]
            for index in range(self.layer_num)
        ]
        self._synchronize()
        return copies

    def load_cpu_copy(
        self,
        kv_cache_cpu: Any,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write a host copy into ``indices``, which may be other slots than it was taken from.

        Args:
            kv_cache_cpu: what ``get_cpu_copy`` of an equal pool returned.
            indices: int32 or int64 ``[n]``, all different, one for each saved row, on any device.
            mamba_indices: accepted for SGLang's callers; these pools keep no such state.
            req_pool_index: likewise.

        Raises:
            TypeError: ``indices`` is no int32 or int64 tensor, or the copy is not made of lists of
                tensors as ``get_cpu_copy`` makes them.
            IndexError: a slot that the pool does not have.
            ValueError: a repeated slot, or a copy whose layers, chunks, shapes, dtypes or rows are
                not what these slots need. Nothing has been written then.
        """
        self.stage_cpu_copy(kv_cache_cpu, indices)()

    def stage_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor) -> Write:
        """Check a load without doing it; calling what is returned writes. See ``load_cpu_copy``."""
        check_list("the host copy", kv_cache_cpu, "of layers, as get_cpu_copy returns")
        slots = self._host_slots(indices)
        if torch.unique(slots).numel() != slots.numel():
            raise ValueError("indices name a slot twice; each saved row needs a slot of its own")
        if len(kv_cache_cpu) != self.layer_num:
            raise ValueError(
                f"the host copy has {len(kv_cache_cpu)} layers, the pool {self.layer_num}"
            )
        writes = [
            load_chunk
            for index, chunks in enumerate(kv_cache_cpu)
            for load_chunk in self._stage_layer(index, chunks, slots)
        ]

        def load() -> None:
            self._synchronize()
            for load_chunk in writes:
                load_chunk()
            self._synchronize()

        return load

    def _stage_layer(self, index: int, chunks: Sequence[Any], slots: torch.Tensor) -> list[Write]:
        at, views = self._at(slots[:0]), self._slot_views(index)
        writes, start = [], 0
        check_list(f"layer {index} of the host copy", chunks, "of chunks")
        for number, chunk in enumerate(chunks):
            where = f"layer {index}, chunk {number} of the host copy"
            parts = self._split(where, chunk)
            if len(parts) != len(views):
                raise ValueError(f"{where} has {len(parts)} tensors, expected {len(views)}")
            for part, view in zip(parts, views, strict=True):
                _check_part(where, part, view, len(at), parts[0])
            end = start + parts[0].shape[0]
            writes.append(self._load(index, slots[start:end], parts))
            start = end
        if start != slots.numel():
            raise ValueError(
                f"layer {index} of the host copy has {start} rows for {slots.numel()} indices"
            )
        return writes

    def _load(self, index: int, slots: torch.Tensor, parts: list[torch.Tensor]) -> Write:
        # Chunk by chunk, so that the device never holds the whole copy a second time.
        return lambda: write(self._staged(index, slots, [part.to(self._device) for part in parts]))

    def _synchronize(self) -> None:
        """Wait for every stream: a layer may still be in transfer on one of them."""
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)


def _check_part(where: str, part: Any, view: torch.Tensor, indexed: int, first: Any) -> None:
    wanted = tuple(view.shape[indexed:])
    needs = f"{where} needs {view.dtype} [n, {', '.join(map(str, wanted))}]"
    if not isinstance(part, torch.Tensor):
        raise TypeError(f"{needs}, got {type(part).__name__}")
    if (
        part.dtype != view.dtype
        or part.shape[:1] != first.shape[:1]
        or tuple(part.shape[1:]) != wanted
    ):
        raise ValueError(f"{needs} (n as in its first tensor), got {part.dtype} {list(part.shape)}")
