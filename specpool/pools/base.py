"""The base of every pool: layers, devices, the mover, and the moves.

A pool says what its rows are (``rows``) and never how rows move: ``move_kv_cache`` and
``move_accepted`` hand the locs to one ``RowMover`` over all of them, so a pool of any kind moves in
one launch. Constructor keywords, method and attribute names are those of SGLang 0.5.23's classes.
"""

from __future__ import annotations

import abc
import importlib
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from specpool.errors import UnsupportedAccess
from specpool.mover import RowMover
from specpool.pools import described
from specpool.pools.store import FP8_DTYPES, HasLayerId, HasLoc, checked_int
from specpool.rows import Rows
from specpool_kernels.device import is_capturing

GIB = 1024**3
_MEMORY_SAVER_TAG = "kv_cache"  # SGLang's GPU_MEMORY_TYPE_KV_CACHE, which engines pause by


class LayerTransferCounter(Protocol):
    """What tells when a layer has been loaded (SGLang's ``LayerDoneCounter``)."""

    def wait_until(self, threshold: int) -> Any:
        """Return when the layer at ``threshold``, counted from ``start_layer``, is loaded."""


class KVCache(abc.ABC):
    """Slot-addressed storage of some layers of a model.

    Args:
        size: slots to serve, at least 1; buffers hold a page more, whose slot 0 is the dummy slot.
        page_size: slots a page, at least 1.
        dtype: what the values are: bfloat16, float16, float32, float64 or an fp8 kind, which is
            stored as uint8.
        layer_num: layers stored here; 0 is a pool that moves nothing.
        device: where the buffers lie.
        enable_memory_saver: allocate in a ``torch_memory_saver`` region tagged ``kv_cache``.
        start_layer: first absolute layer id of this pipeline stage; None is 0.
        end_layer: end of that range, exclusive; None is as far as the layers go.
        allocation_label: what the engine calls this pool.
        layer_ids: the ids that accessors take, in buffer order, where they have gaps;
            ``start_layer`` and up when not given.

    Raises:
        TypeError: a size, page size or layer number that is no integer.
        ValueError: one that is too small, a dtype that is not served, or layers that do not fit
            the range.
        ImportError: the memory saver is asked for and not installed.
    """

    has_value: bool = True
    """Whether ``get_value_buffer``, ``get_kv_buffer`` and ``set_kv_buffer`` work."""
    has_index: bool = False
    """Whether there are index buffers (``get_index_k_buffer`` and its kin)."""
    enable_kv_cache_copy: bool = True
    """Every pool moves, whatever its constructor was given."""

    # What SGLang's schedulers and host caches ask every pool before they do anything with it.
    post_capture_active: bool = False
    """Buffers are allocated at construction, not when graphs have been captured."""
    layer_shard_enabled: bool = False
    """Every layer of the stage is stored here; none is left to another rank."""
    cpu_copy_carries_mamba: bool = False
    """Host copies hold no recurrent state."""
    host_capacity_tokens: int | None = None
    """Slots to size a host cache by; None is ``size``."""

    _dtypes: tuple[torch.dtype, ...] = (
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        *FP8_DTYPES,
    )

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        start_layer: int | None = None,
        end_layer: int | None = None,
        allocation_label: str | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        self.size = checked_int("size", size, 1)
        self.page_size = checked_int("page_size", page_size, 1)
        if dtype not in self._dtypes:
            raise ValueError(
                f"{type(self).__name__} does not serve dtype {dtype}; it serves "
                f"{', '.join(map(str, self._dtypes))}"
            )
        self.dtype = dtype
        self.store_dtype = torch.uint8 if dtype in FP8_DTYPES else dtype
        self.device = device
        # 'cuda' becomes 'cuda:0', as tensors say it; a device that is absent fails here.
        self._device = torch.empty(0, device=device).device
        self.allocation_label = allocation_label
        self._enable_memory_saver = enable_memory_saver
        self._set_layers(layer_num, start_layer, end_layer, layer_ids)
        self.cpu_offloading_chunk_size = 8192
        self.layer_transfer_counter: LayerTransferCounter | None = None
        self._mover: RowMover | None = None
        self._known: list[torch.Tensor] = []

    def _set_layers(
        self,
        layer_num: int,
        start_layer: int | None,
        end_layer: int | None,
        layer_ids: Sequence[int] | None,
    ) -> None:
        self.layer_num = checked_int("layer_num", layer_num, 0)
        self.start_layer = checked_int("start_layer", start_layer or 0, 0)
        if layer_ids is None:
            layer_ids = range(self.start_layer, self.start_layer + self.layer_num)
        self.layer_ids = tuple(layer_ids)
        self.model_layer_ids = self.layer_ids
        if end_layer is None:
            end_layer = max(self.layer_ids, default=self.start_layer - 1) + 1
        self.end_layer = checked_int("end_layer", end_layer, 0)
        if self.end_layer - self.start_layer < self.layer_num:
            raise ValueError(
                f"layers [{self.start_layer}, {self.end_layer}) hold fewer than layer_num="
                f"{self.layer_num}; end_layer is exclusive"
            )
        if len(self.layer_ids) != self.layer_num or len(set(self.layer_ids)) != self.layer_num:
            raise ValueError(
                f"layer_ids must be {self.layer_num} different ids (layer_num), got "
                f"{list(self.layer_ids)}"
            )
        outside = [i for i in self.layer_ids if not self.start_layer <= i < self.end_layer]
        if outside:
            raise ValueError(
                f"layer_ids {outside} are outside [{self.start_layer}, {self.end_layer})"
            )
        self._layer_index = {layer_id: i for i, layer_id in enumerate(self.layer_ids)}

    # What a pool stores

    @abc.abstractmethod
    def rows(self) -> list[Rows]:
        """The rows of every buffer, as they are now.

        Raises:
            ValueError: a buffer was replaced by one of another shape or dtype.
            RuntimeError: the memory of a buffer was freed.
        """

    @abc.abstractmethod
    def _tensors(self) -> list[torch.Tensor]:
        """Every tensor whose address ``rows`` depends on, in a fixed order."""

    @abc.abstractmethod
    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of keys and bytes of values."""

    @property
    def mem_usage(self) -> float:
        """Size of all buffers in GiB."""
        return sum(self.get_kv_size_bytes()) / GIB

    def maybe_get_custom_mem_pool(self) -> None:
        """None: buffers come from torch's own allocator."""
        return None

    def host_pool_decls(self) -> tuple[Any, ...]:
        """What SGLang's host cache is to keep for this pool: one ``HostPoolDecl``.

        Raises:
            ImportError: SGLang, which alone asks, is not installed.
        """
        return (described.host_pool_decl(self),)

    # How it is read and written

    @abc.abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The keys of a layer, viewed as ``dtype``."""

    @abc.abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The values of a layer, viewed as ``dtype``."""

    @abc.abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and the values of a layer."""

    @abc.abstractmethod
    def set_kv_buffer(
        self,
        layer: HasLayerId,
        loc_info: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write keys and values of a layer at ``loc_info``."""

    @abc.abstractmethod
    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> Any:
        """The bytes of some slots, on the host."""

    @abc.abstractmethod
    def load_cpu_copy(
        self,
        kv_cache_cpu: Any,
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write what ``get_cpu_copy`` returned into ``indices``, which may be other slots."""

    def register_layer_transfer_counter(
        self, layer_transfer_counter: LayerTransferCounter | None
    ) -> None:
        """Have getters and moves wait until their layers are loaded; None ends it."""
        self.layer_transfer_counter = layer_transfer_counter

    def _index(self, layer_id: int) -> int:
        """The buffer of a layer.

        Raises:
            ValueError: the pool does not hold it.
        """
        try:
            return self._layer_index[layer_id]
        except (KeyError, TypeError):
            raise ValueError(
                f"{type(self).__name__} has no layer {layer_id!r}; it has {list(self.layer_ids)}"
            ) from None

    def _wait_for_layer(self, layer_id: int) -> None:
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_id - self.start_layer)

    def _refuse(self, method: str, instead: str) -> UnsupportedAccess:
        """What to raise where this pool's storage cannot serve ``method``."""
        return UnsupportedAccess(f"{type(self).__name__} cannot serve {method}: use {instead}")

    # How it moves

    @property
    def mover(self) -> RowMover:
        """The mover over all rows of this pool, built when first asked for.

        Buffers that were replaced since are noticed here, and the mover is given their rows;
        attachments, reserved scratch and counters stay. A mover that is kept while a buffer is
        replaced moves, and keeps alive, the old tensor until this is asked for again, which every
        move of the pool does. On the CPU backend its numpy views pin the buffers: their storage
        cannot be resized from then on (a tensor may still be given other memory by ``set_``).

        Raises:
            ValueError: as ``rows``.
            RuntimeError: as ``rows``; or buffers changed after moves were captured into a graph.
        """
        tensors = self._tensors()
        # Tensors that were given other memory (set_, resize_) are the mover's to notice.
        if (
            self._mover is not None
            and len(tensors) == len(self._known)
            and all(map(operator.is_, tensors, self._known))
        ):
            return self._mover
        return self._built_mover(tensors)

    def _built_mover(self, tensors: list[torch.Tensor]) -> RowMover:
        if self._mover is None:
            self._mover = RowMover(self.rows())
        else:
            self._mover.replace_rows(self.rows())
        self._known = tensors
        return self._mover

    # What ``torch.compiler.disable`` would set, but that imports the compiler, and Triton with it.
    _built_mover._torchdynamo_disable = True  # type: ignore[attr-defined]
    _built_mover._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "ask for pool.mover once before compiling its moves"
    )

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """``buffer[tgt] = buffer[src]`` for every buffer of every layer, in one launch.

        Args:
            tgt_loc: int32 or int64, as many as ``src_loc``; -1 skips the pair.
            src_loc: likewise. Any overlap is right: sources are read before targets are written.

        Raises:
            TypeError, ValueError, IndexError: as ``RowMover.move``; nothing has moved then.
        """
        mover = self.mover
        self._wait_for_all_layers()
        mover.move(tgt_loc, src_loc)

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Move each request's accepted entries to the front of its window, in one launch.

        Args:
            out_cache_loc: ``[bs, D]`` or ``[bs * D]``, the slots that the verify step wrote.
            accept_index: int32 ``[bs, S]``, flat into ``[bs * D]``, -1 padded.
            accept_len: ``[bs]``, entries of a row that count, the root included; 0 is padding.

        Raises:
            TypeError, ValueError, IndexError: as ``RowMover.move_accepted``; nothing has moved
                then.
        """
        mover = self.mover
        self._wait_for_all_layers()
        mover.move_accepted(out_cache_loc, accept_index, accept_len)

    def _wait_for_all_layers(self) -> None:
        # A graph replays without the counter; the engine drains transfers before a replay.
        if self.layer_transfer_counter is None or is_capturing(self._device):
            return
        for layer_id in self.layer_ids:
            self._wait_for_layer(layer_id)

    @contextmanager
    def _allocation(self) -> Iterator[None]:
        """Where buffers are made."""
        # A buffer made in inference mode could not be written outside of it.
        with torch.inference_mode(False), _memory_saver_region(self._enable_memory_saver):
            yield


def _memory_saver_region(enable: bool) -> AbstractContextManager[Any]:
    if not enable:
        return nullcontext()
    try:
        saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    except ImportError as error:
        raise ImportError(
            "enable_memory_saver=True needs the torch_memory_saver package: pip install "
            "torch-memory-saver, or pass enable_memory_saver=False"
        ) from error
    region: AbstractContextManager[Any] = saver.region(tag=_MEMORY_SAVER_TAG)
    return region
