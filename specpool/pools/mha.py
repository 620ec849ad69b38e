"""Keys and values of multi-head (or grouped-query) attention, a buffer of each a layer.

Two layouts: NHD ``[slots, heads, dim]``, and HND ``[pages, heads, page_size, dim]``. Both have
``size + page_size`` slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from specpool.pools import described
from specpool.pools.addresses import BufInfos, address_tensor, buf_infos
from specpool.pools.layer_buffers import LayerBufferPool
from specpool.pools.store import (
    HasLayerId,
    HasLoc,
    Staged,
    check_list,
    checked_int,
    layer_id_of,
    write,
)
from specpool.rows import Rows


class MHATokenToKVPool(LayerBufferPool):
    """Keys and values that may differ in width; see ``KVCache`` for the arguments not named here.

    Where K and V have one shape they are the halves of one allocation a layer, each padded to whole
    pages, so that a paged kernel with one base address reaches both (as in SGLang 0.5.23).

    Args:
        head_num: heads a token, in K and in V.
        head_dim: elements of a key head.
        v_head_dim: elements of a value head; ``head_dim`` when not given.
        swa_head_num: overrides ``head_num`` (the pool of a model's sliding-window layers).
        swa_head_dim: overrides ``head_dim``.
        swa_v_head_dim: overrides ``v_head_dim``; it does not follow ``swa_head_dim``.
        enable_alt_stream: accepted and not needed: K and V are stored in stream order.
        enable_kv_cache_copy: accepted and not needed: every pool moves.
        kv_cache_layout: ``"nhd"`` (None is this) or ``"hnd"``.
        quant_method: None, or SGLang's method named ``unquantized``.
        post_capture_active: only False.

    Raises:
        ValueError: also another layout, or HND slots that do not fill pages.
        NotImplementedError: a quantisation method or post-capture backing.
    """

    k_scale_buffer = None
    v_scale_buffer = None
    native_k_scale_buffer = None
    native_v_scale_buffer = None
    alt_stream = None
    hicache_write_back_staging: tuple[torch.Tensor, torch.Tensor] | None = None
    """Where SGLang's host cache keeps its staging buffers, once it has made them."""

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        swa_head_num: int | None = None,
        swa_head_dim: int | None = None,
        swa_v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_alt_stream: bool = True,
        enable_kv_cache_copy: bool = True,
        kv_cache_layout: str | None = None,
        quant_method: Any = None,
        post_capture_active: bool = False,
        allocation_label: str | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            size,
            page_size,
            dtype,
            layer_num,
            device,
            enable_memory_saver,
            start_layer,
            end_layer,
            allocation_label,
            layer_ids,
        )
        if quant_method is not None and getattr(quant_method, "name", None) != "unquantized":
            raise NotImplementedError(
                f"quant_method={quant_method!r} is not supported; store fp8 by dtype, or pass None"
            )
        if post_capture_active:
            raise NotImplementedError(
                "post_capture_active=True is not supported: buffers are allocated at construction"
            )
        self.quant_method = quant_method
        self.head_num = checked_int(
            "head_num", head_num if swa_head_num is None else swa_head_num, 1
        )
        self.head_dim = checked_int(
            "head_dim", head_dim if swa_head_dim is None else swa_head_dim, 1
        )
        v_dims = (swa_v_head_dim, v_head_dim, head_dim)
        self.v_head_dim = checked_int("v_head_dim", next(d for d in v_dims if d is not None), 1)
        self.row_dim = self.head_num * self.head_dim
        self.v_row_dim = self.head_num * self.v_head_dim
        self.kv_cache_layout = "nhd" if kv_cache_layout is None else kv_cache_layout
        if self.kv_cache_layout not in ("nhd", "hnd"):
            raise ValueError(f"kv_cache_layout must be 'nhd' or 'hnd', got {kv_cache_layout!r}")
        self.use_hnd = self.kv_cache_layout == "hnd"
        self.num_pages = self.slots // self.page_size
        if self.use_hnd and self.slots % self.page_size:
            raise ValueError(
                f"'hnd' needs slots that fill pages: size + page_size is {self.slots}, no multiple "
                f"of page_size={self.page_size}"
            )
        self.k_buffer: list[torch.Tensor]
        self.v_buffer: list[torch.Tensor]
        with self._allocation():
            self._create_buffers()

    def _create_buffers(self) -> None:
        k_shape, v_shape = self._shapes()
        options: dict[str, Any] = {"dtype": self.store_dtype, "device": self._device}
        layers = range(self.layer_num)
        if k_shape != v_shape:
            self.k_buffer = [torch.zeros(k_shape, **options) for _ in layers]
            self.v_buffer = [torch.zeros(v_shape, **options) for _ in layers]
            return
        first = k_shape[0]
        padded = first if self.use_hnd else math.ceil(first / self.page_size) * self.page_size
        both = [torch.zeros((2, padded, *k_shape[1:]), **options) for _ in layers]
        self.k_buffer = [pair[0, :first] for pair in both]
        self.v_buffer = [pair[1, :first] for pair in both]

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self.use_hnd:
            page = (self.num_pages, self.head_num, self.page_size)
            return (*page, self.head_dim), (*page, self.v_head_dim)
        flat = (self.slots, self.head_num)
        return (*flat, self.head_dim), (*flat, self.v_head_dim)

    # What is stored

    @property
    def slots(self) -> int:
        """``size + page_size``."""
        return self.size + self.page_size

    def rows(self) -> list[Rows]:
        """K rows of every layer, then V rows; see ``KVCache.rows``."""
        k_shape, v_shape = self._shapes()
        layout = self.kv_cache_layout
        return [
            *self._rows_of("k_buffer", self.k_buffer, k_shape, layout),
            *self._rows_of("v_buffer", self.v_buffer, v_shape, layout),
        ]

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.k_buffer, *self.v_buffer]

    def _slot_views(self, index: int) -> list[torch.Tensor]:
        buffers = [self.k_buffer[index], self.v_buffer[index]]
        return [buffer.transpose(1, 2) for buffer in buffers] if self.use_hnd else buffers

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self.use_hnd:
            return (slots,)
        return slots // self.page_size, slots % self.page_size

    def _join(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return parts

    def _split(self, where: str, chunk: Any) -> list[Any]:
        check_list(where, chunk, "of K and V")
        return list(chunk)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and bytes of V, all layers, without padding."""
        return sum(k.nbytes for k in self.k_buffer), sum(v.nbytes for v in self.v_buffer)

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes of one layer's K and V buffer."""
        k_shape, v_shape = self._shapes()
        return torch.Size(k_shape), torch.Size(v_shape)

    def get_v_head_dim(self) -> int:
        """Elements of a value head."""
        return self.v_head_dim

    def get_contiguous_buf_infos(self) -> BufInfos:
        """Addresses, bytes, and bytes a page: K of every layer, then V.

        Raises:
            UnsupportedAccess: the layout is HND, which the receiver cannot tell from NHD.
        """
        return self.layer_buf_infos(self.layer_ids)

    def layer_buf_infos(self, layer_ids: Sequence[int]) -> BufInfos:
        """``get_contiguous_buf_infos`` of some layers: their K, then their V.

        Raises:
            ValueError: the pool has no such layer.
            UnsupportedAccess: as ``get_contiguous_buf_infos``.
        """
        if self.use_hnd:
            raise self._refuse("buf infos", "a pool of kv_cache_layout='nhd'")
        at = [self._index(layer_id) for layer_id in layer_ids]
        buffers = [side[index] for side in (self.k_buffer, self.v_buffer) for index in at]
        return buf_infos(buffers, self.page_size)

    def get_device_pool_infos(self) -> tuple[Any, ...]:
        """The buffers as SGLang's host cache reads them: one ``DevicePoolInfo``.

        Raises:
            ImportError: SGLang, which alone asks, is not installed.
        """
        return (described.device_pool_info(self),)

    def get_kv_cache_quant_method(self) -> Any:
        """``quant_method`` where it was given, SGLang's ``UnquantizedKVCacheMethod`` elsewhere.

        Raises:
            ImportError: SGLang, which alone asks, is not installed.
        """
        return described.unquantized() if self.quant_method is None else self.quant_method

    @property
    def k_data_ptrs(self) -> torch.Tensor:
        """Addresses of the K buffers, uint64 ``[layer_num]``."""
        return address_tensor(self.k_buffer, self._device)

    @property
    def v_data_ptrs(self) -> torch.Tensor:
        """Addresses of the V buffers, uint64 ``[layer_num]``."""
        return address_tensor(self.v_buffer, self._device)

    @property
    def data_ptrs(self) -> torch.Tensor:
        """Addresses of the K, then of the V buffers, uint64 ``[2 * layer_num]``."""
        return address_tensor(self._tensors(), self._device)

    @property
    def data_strides(self) -> torch.Tensor:
        """Bytes from one slot (HND: page) to the next in each of ``data_ptrs``, int64."""
        strides = [buffer.stride(0) * buffer.element_size() for buffer in self._tensors()]
        return torch.tensor(strides, dtype=torch.int64, device=self._device)

    # How it is read and written

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The K buffer of a layer as ``dtype``, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        index = self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.k_buffer[index].view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """The V buffer of a layer as ``dtype``, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        index = self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.v_buffer[index].view(self.dtype)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``get_key_buffer`` and ``get_value_buffer``."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def set_kv_buffer(
        self,
        layer: HasLayerId | None,
        loc_info: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: torch.Tensor | None = None,
    ) -> None:
        """Write K and V of ``n`` tokens. The caller's tensors stay as they are.

        Args:
            layer: anything with a ``layer_id``; may be None where ``layer_id_override`` is given.
            loc_info: int32 or int64 slots ``[n]``, or an object whose ``loc`` they are. A slot
                named twice ends up with one of its values.
            cache_k: ``[n, head_num, head_dim]`` or ``[n, head_num * head_dim]``, floating.
            cache_v: ``[n, head_num, v_head_dim]`` or flat, floating.
            k_scale: divides ``cache_k`` where its dtype differs from the pool's; a positive number
                or a tensor of one element. fp8 pools then clamp to their range and keep NaN.
            v_scale: likewise for ``cache_v``.
            layer_id_override: the layer id to use instead of the layer's.
            dcp_kv_mask: only None.

        Raises:
            TypeError: no layer id; locs, values or scales of a wrong type or dtype.
            ValueError: a layer the pool lacks; wrong shapes or devices.
            IndexError: a slot outside the pool (on a CPU, or with ``SPECPOOL_CHECK=1``).
            UnsupportedAccess: a mask. Nothing has been written in any of these cases.
        """
        if dcp_kv_mask is not None:
            raise self._refuse("dcp_kv_mask", "loc, cache_k and cache_v of the masked tokens only")
        layer_id = layer_id_of(layer, layer_id_override)
        write(self.stage_kv_buffer(layer_id, loc_info, cache_k, cache_v, k_scale, v_scale))

    def stage_kv_buffer(
        self,
        layer_id: int,
        loc_info: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
    ) -> Staged:
        """Check and convert a store without doing it; ``store.write`` does it.

        Arguments and errors are those of ``set_kv_buffer``.
        """
        index = self._index(layer_id)
        slots = self._checked_slots(loc_info)
        k = self._stored("cache_k", cache_k, k_scale, slots, (self.head_num, self.head_dim))
        v = self._stored("cache_v", cache_v, v_scale, slots, (self.head_num, self.v_head_dim))
        return self._staged(index, slots, [k, v])

    def set_kv_buffer_prefix_valid(
        self,
        layer: HasLayerId | None,
        loc_2d: torch.Tensor,
        commit_lens: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write the first ``commit_lens[r]`` tokens of each row ``r`` of ``loc_2d``.

        The others go to the dummy slot 0, so that nothing here waits for the device; their locs
        may be anything. See ``set_kv_buffer`` for what is not named here.

        Args:
            loc_2d: int32 or int64 slots ``[bs, D]``.
            commit_lens: ``[bs]``, integers from 0 to ``D``.
            cache_k: ``[bs * D, head_num, head_dim]`` or flat.
            cache_v: ``[bs * D, head_num, v_head_dim]`` or flat.

        Raises:
            TypeError, ValueError, IndexError: as ``set_kv_buffer``; also where ``loc_2d`` is not
                ``[bs, D]`` or ``commit_lens`` not ``[bs]``.
        """
        if loc_2d.dim() != 2 or commit_lens.shape != loc_2d.shape[:1]:
            raise ValueError(
                "loc_2d must be [bs, D] and commit_lens [bs], got "
                f"{list(loc_2d.shape)} and {list(commit_lens.shape)}"
            )
        place = torch.arange(loc_2d.shape[1], device=loc_2d.device)
        committed = place < commit_lens.to(loc_2d.device).unsqueeze(1)
        loc = loc_2d.where(committed, 0)
        layer_id = layer_id_of(layer, layer_id_override)
        write(self.stage_kv_buffer(layer_id, loc, cache_k, cache_v, k_scale, v_scale))
