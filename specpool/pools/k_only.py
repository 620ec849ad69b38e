"""Keys without values: the index cache of sparse layers whose index attention reads no V.

Its setter and its getter take the same layer ids.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from specpool.pools.layer_buffers import LayerBufferPool
from specpool.pools.store import HasLoc, Staged, checked_int, write
from specpool.rows import Rows


class MHATokenToKOnlyPool(LayerBufferPool):
    """One K buffer ``[size + page_size, head_num, head_dim]`` a layer.

    See ``KVCache`` for the arguments not named here.

    Args:
        head_num: heads a token.
        head_dim: elements of a head.
        enable_kv_cache_copy: accepted and not needed: every pool moves.
    """

    has_value = False

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
        start_layer: int | None = None,
        end_layer: int | None = None,
        enable_kv_cache_copy: bool = True,
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
        )
        self.head_num = checked_int("head_num", head_num, 1)
        self.head_dim = checked_int("head_dim", head_dim, 1)
        with self._allocation():
            self.k_buffer = [
                torch.zeros(self._shape(), dtype=self.store_dtype, device=self._device)
                for _ in range(self.layer_num)
            ]

    def _shape(self) -> tuple[int, int, int]:
        return self.slots, self.head_num, self.head_dim

    @property
    def slots(self) -> int:
        """``size + page_size``."""
        return self.size + self.page_size

    def rows(self) -> list[Rows]:
        """K rows of every layer; see ``KVCache.rows``."""
        return self._rows_of("k_buffer", self.k_buffer, self._shape())

    def _tensors(self) -> list[torch.Tensor]:
        return list(self.k_buffer)

    def _slot_views(self, index: int) -> list[torch.Tensor]:
        return [self.k_buffer[index]]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K, all layers, and 0."""
        return sum(k.nbytes for k in self.k_buffer), 0

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """The K buffer of a layer as ``dtype``, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        index = self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.k_buffer[index].view(self.dtype)

    def set_k_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
    ) -> None:
        """Write K of ``n`` tokens, ``[n, head_num, head_dim]`` or flat.

        ``layer_id`` is the id that ``get_key_buffer`` takes. Locs, scale and errors are those of
        ``MHATokenToKVPool.set_kv_buffer``.
        """
        write(self.stage_k_buffer(layer_id, loc, cache_k, k_scale))

    def stage_k_buffer(
        self,
        layer_id: int,
        loc: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        k_scale: float | torch.Tensor | None = None,
    ) -> Staged:
        """Check and convert a store without doing it; ``store.write`` does it."""
        index = self._index(layer_id)
        slots = self._checked_slots(loc)
        k = self._stored("cache_k", cache_k, k_scale, slots, (self.head_num, self.head_dim))
        return self._staged(index, slots, [k])

    def get_value_buffer(self, layer_id: int) -> NoReturn:
        """Refused: no values are stored.

        Raises:
            UnsupportedAccess: always; ``get_key_buffer`` is what there is.
        """
        raise self._refuse("get_value_buffer", "get_key_buffer (it stores no values)")

    def get_kv_buffer(self, layer_id: int) -> NoReturn:
        """Refused: no values are stored.

        Raises:
            UnsupportedAccess: always; ``get_key_buffer`` is what there is.
        """
        raise self._refuse("get_kv_buffer", "get_key_buffer (it stores no values)")

    def set_kv_buffer(self, *args: object, **kwargs: object) -> NoReturn:
        """Refused: no values are stored.

        Raises:
            UnsupportedAccess: always; the parent's ``set_index_k_buffer`` is what to call.
        """
        raise self._refuse(
            "set_kv_buffer",
            "set_index_k_buffer on the parent MiniMaxSparseKVPool, or set_k_buffer here",
        )
