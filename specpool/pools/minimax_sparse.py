"""The cache of a model whose layers are dense or block-sparse (MiniMax-M3), of three sub-pools.

Main K and V of every layer; index K and index V of the sparse layers whose index attention reads
V; index K alone of the others. All of them hold the same slots, and one launch moves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from specpool.pools.addresses import BufInfos, buf_infos
from specpool.pools.base import KVCache
from specpool.pools.k_only import MHATokenToKOnlyPool
from specpool.pools.layer_buffers import LayerBufferPool
from specpool.pools.mha import MHATokenToKVPool
from specpool.pools.store import HasLayerId, HasLoc, Staged, layer_id_of, write
from specpool.pools.sub_pools import built, check_ids, copies_of, numbered, sub_layer
from specpool.rows import Rows

Scale = float | torch.Tensor | None


class MiniMaxSparseKVPool(KVCache):
    """Main, index-KV and index-K pools under one set of slots.

    Methods take the model's absolute layer ids. ``main_pool`` takes them too; ``index_kv_pool`` and
    ``index_k_pool`` number their layers 0..n-1 (``index_kv_layer_id_mapping`` and
    ``index_k_layer_id_mapping`` lead there), and are None where no layer needs them.

    Args:
        size: slots to serve; each buffer has ``size + page_size``.
        page_size: slots a page.
        dtype: of the main pool; see ``KVCache``.
        head_num: main heads a token.
        head_dim: elements of a main head, in K and in V.
        idx_head_dim: elements of the one index head.
        dense_layer_ids: absolute ids of the dense layers; gaps are fine.
        sparse_layer_ids: absolute ids of the sparse layers.
        device: where the buffers lie.
        disable_value_sparse_layer_ids: sparse layers without index V; ids that are not sparse are
            ignored, since a model's flags cover every layer.
        enable_memory_saver: see ``KVCache``.
        index_dtype: of the index pools; ``dtype`` when not given.
        start_layer: first layer of this pipeline stage; None is 0.
        end_layer: its end, exclusive; None is all. Ids outside the stage are dropped.
        main_pool_cls: builds the main pool, called with SGLang's keywords (and ``layer_ids`` where
            ids have gaps); must return a ``MHATokenToKVPool``.
        index_kv_pool_cls: likewise for the index-KV pool.
        index_k_pool_cls: likewise for the index-K pool; must return a ``MHATokenToKOnlyPool``.
        enable_hisparse: only False.
        host_to_device_ratio: accepted; only HiSparse reads it.
        enable_kv_cache_copy: accepted and not needed: every pool moves.

    Raises:
        ValueError: an id given twice, or as dense and as sparse; see also ``KVCache``.
        TypeError: a class that builds something else.
        NotImplementedError: ``enable_hisparse=True``.
    """

    has_index = True
    dense_pool = None

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        idx_head_dim: int,
        dense_layer_ids: Sequence[int],
        sparse_layer_ids: Sequence[int],
        device: str | torch.device,
        disable_value_sparse_layer_ids: Sequence[int] | None = None,
        enable_memory_saver: bool = False,
        index_dtype: torch.dtype | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        main_pool_cls: Callable[..., MHATokenToKVPool] = MHATokenToKVPool,
        index_kv_pool_cls: Callable[..., MHATokenToKVPool] = MHATokenToKVPool,
        index_k_pool_cls: Callable[..., MHATokenToKOnlyPool] = MHATokenToKOnlyPool,
        enable_hisparse: bool = False,
        host_to_device_ratio: int = 2,
        enable_kv_cache_copy: bool = True,
    ) -> None:
        if enable_hisparse:
            raise NotImplementedError(
                "enable_hisparse=True is not supported: the main pool would live in another slot "
                "space than the index pools; pass enable_hisparse=False"
            )
        check_ids(dense_layer_ids, sparse_layer_ids)
        start = start_layer or 0
        stage = range(
            start,
            max([start - 1, *dense_layer_ids, *sparse_layer_ids]) + 1
            if end_layer is None
            else end_layer,
        )
        sparse = [layer_id for layer_id in sparse_layer_ids if layer_id in stage]
        main = sorted([layer_id for layer_id in dense_layer_ids if layer_id in stage] + sparse)
        super().__init__(
            size,
            page_size,
            dtype,
            len(main),
            device,
            enable_memory_saver,
            start,
            stage.stop,
            layer_ids=main,
        )
        disabled = set(disable_value_sparse_layer_ids or ())
        with_value = [layer_id for layer_id in sparse if layer_id not in disabled]
        k_only = [layer_id for layer_id in sparse if layer_id in disabled]
        self.sparse_layer_id_mapping = numbered(sparse)
        self.index_kv_layer_id_mapping = numbered(with_value)
        self.index_k_layer_id_mapping = numbered(k_only)

        shared = {
            "size": size,
            "page_size": page_size,
            "device": device,
            "enable_memory_saver": enable_memory_saver,
            "enable_kv_cache_copy": True,
        }
        gaps = {} if main == list(range(start, start + len(main))) else {"layer_ids": main}
        self.main_pool = built(
            MHATokenToKVPool,
            main_pool_cls,
            **shared,
            dtype=dtype,
            head_num=head_num,
            head_dim=head_dim,
            layer_num=len(main),
            start_layer=start,
            end_layer=stage.stop,
            **gaps,
        )
        index = {
            **shared,
            "dtype": dtype if index_dtype is None else index_dtype,
            "head_num": 1,
            "head_dim": idx_head_dim,
        }
        self.index_kv_pool: MHATokenToKVPool | None = None
        self.index_k_pool: MHATokenToKOnlyPool | None = None
        if with_value:
            self.index_kv_pool = built(
                MHATokenToKVPool, index_kv_pool_cls, **index, layer_num=len(with_value)
            )
            self.index_kv_pool.model_layer_ids = tuple(with_value)
        if k_only:
            self.index_k_pool = built(
                MHATokenToKOnlyPool, index_k_pool_cls, **index, layer_num=len(k_only)
            )
            self.index_k_pool.model_layer_ids = tuple(k_only)
        self.head_num = self.main_pool.head_num
        self.head_dim = self.main_pool.head_dim
        self.v_head_dim = self.main_pool.v_head_dim
        self.store_dtype = self.main_pool.store_dtype

    # What is stored

    def _parts(self) -> dict[str, LayerBufferPool | None]:
        """The sub-pools by the keys of a host copy."""
        return {
            "main": self.main_pool,
            "index_kv": self.index_kv_pool,
            "index_k": self.index_k_pool,
        }

    def _pools(self) -> list[LayerBufferPool]:
        return [pool for pool in self._parts().values() if pool is not None]

    def rows(self) -> list[Rows]:
        """Main rows, then index-KV, then index-K; see ``KVCache.rows``."""
        return [
            replace(row, name=f"{part} {row.name}")
            for part, pool in self._parts().items()
            if pool is not None
            for row in pool.rows()
        ]

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for pool in self._pools() for tensor in pool._tensors()]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, summed over the sub-pools."""
        keys, values = zip(*(pool.get_kv_size_bytes() for pool in self._pools()), strict=True)
        return sum(keys), sum(values)

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        """Shapes of one layer's main K and V buffer."""
        return self.main_pool.get_kv_buffer_shape()

    def get_v_head_dim(self) -> int:
        """Elements of a main value head."""
        return self.main_pool.get_v_head_dim()

    def get_contiguous_buf_infos(self) -> BufInfos:
        """Of the main pool only: addresses, bytes, and bytes a page."""
        return self.main_pool.get_contiguous_buf_infos()

    def get_sparse_kv_buf_infos(self) -> BufInfos:
        """Of the sparse layers in the main pool: addresses, bytes, and bytes a page; K, then V."""
        return self.main_pool.layer_buf_infos(sorted(self.sparse_layer_id_mapping))

    def get_dense_kv_state_buf_infos(self) -> BufInfos:
        """Of the dense layers in the main pool, likewise; empty lists where there are none."""
        dense = [i for i in self.layer_ids if i not in self.sparse_layer_id_mapping]
        return self.main_pool.layer_buf_infos(dense)

    def get_index_k_state_buf_infos(self) -> BufInfos:
        """Of the index-K pool: addresses, bytes, and bytes a page; empty lists where it is None."""
        pool = self.index_k_pool
        return buf_infos(pool.k_buffer if pool else [], self.page_size)

    def get_kv_cache_quant_method(self) -> Any:
        """The main pool's; see ``MHATokenToKVPool.get_kv_cache_quant_method``."""
        return self.main_pool.get_kv_cache_quant_method()

    # How it is read

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Main K of a layer, dense or sparse, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.main_pool.get_key_buffer(layer_id)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Main V of a layer, dense or sparse, after the layer has been loaded.

        Raises:
            ValueError: the pool has no such layer.
        """
        self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.main_pool.get_value_buffer(layer_id)

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``get_key_buffer`` and ``get_value_buffer``."""
        self._index(layer_id)
        self._wait_for_layer(layer_id)
        return self.main_pool.get_kv_buffer(layer_id)

    def get_index_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Index K and index V of a sparse layer that has both.

        Raises:
            ValueError: the layer has no index V.
        """
        pool, local = self._index_kv(layer_id)
        self._wait_for_layer(layer_id)
        return pool.get_kv_buffer(local)

    def get_index_k_buffer(self, layer_id: int) -> torch.Tensor:
        """Index K of any sparse layer.

        Raises:
            ValueError: the layer is not sparse.
        """
        pool: LayerBufferPool
        if layer_id in self.index_k_layer_id_mapping:
            pool, local = self._index_k(layer_id)
        elif layer_id in self.index_kv_layer_id_mapping:
            pool, local = self._index_kv(layer_id)
        else:
            raise ValueError(
                f"layer {layer_id} is not a sparse layer of this pool; sparse layers are "
                f"{list(self.sparse_layer_id_mapping)}"
            )
        self._wait_for_layer(layer_id)
        return pool.get_key_buffer(local)

    def _index_kv(self, layer_id: int) -> tuple[MHATokenToKVPool, int]:
        return sub_layer(self.index_kv_pool, self.index_kv_layer_id_mapping, layer_id, "index V")

    def _index_k(self, layer_id: int) -> tuple[MHATokenToKOnlyPool, int]:
        return sub_layer(
            self.index_k_pool, self.index_k_layer_id_mapping, layer_id, "index K alone"
        )

    # How it is written; locs, scales and errors are those of MHATokenToKVPool.set_kv_buffer

    def set_kv_buffer(
        self,
        layer: HasLayerId,
        loc_info: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Write main K and V ``[n, head_num, head_dim]`` of a layer, dense or sparse."""
        layer_id = layer_id_of(layer)
        pool = self.main_pool
        write(pool.stage_kv_buffer(layer_id, loc_info, cache_k, cache_v, k_scale, v_scale))

    def set_index_kv_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor | HasLoc,
        cache_idx_k: torch.Tensor,
        cache_idx_v: torch.Tensor,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> None:
        """Write index K and V ``[n, 1, idx_head_dim]`` of a layer that has both."""
        pool, local = self._index_kv(layer_id_of(layer))
        write(pool.stage_kv_buffer(local, loc, cache_idx_k, cache_idx_v, k_scale, v_scale))

    def set_index_k_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor | HasLoc,
        cache_idx_k: torch.Tensor,
        k_scale: Scale = None,
    ) -> None:
        """Write index K ``[n, 1, idx_head_dim]`` of a layer without index V."""
        pool, local = self._index_k(layer_id_of(layer))
        write(pool.stage_k_buffer(local, loc, cache_idx_k, k_scale))

    def set_fused_kv_index_buffer(
        self,
        layer: HasLayerId,
        loc: torch.Tensor | HasLoc,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        cache_idx_k: torch.Tensor,
        cache_idx_v: torch.Tensor | None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        idx_k_scale: Scale = None,
        idx_v_scale: Scale = None,
    ) -> None:
        """Write main K and V, index K and, where it is given, index V of a sparse layer.

        ``cache_idx_v`` is None for layers without index V, and only for those. Everything is
        checked before anything is written.
        """
        layer_id = layer_id_of(layer)
        main = self.main_pool.stage_kv_buffer(layer_id, loc, cache_k, cache_v, k_scale, v_scale)
        index: Staged
        if cache_idx_v is None:
            k_pool, local = self._index_k(layer_id)
            index = k_pool.stage_k_buffer(local, loc, cache_idx_k, idx_k_scale)
        else:
            kv_pool, local = self._index_kv(layer_id)
            index = kv_pool.stage_kv_buffer(
                local, loc, cache_idx_k, cache_idx_v, idx_k_scale, idx_v_scale
            )
        write(main, index)

    # Host copies

    def get_cpu_copy(
        self, indices: torch.Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> dict[str, list[list[Any]] | None]:
        """The bytes of some slots in every sub-pool, on the host.

        Returns:
            ``main``, ``index_kv`` and ``index_k``, each as that pool's ``get_cpu_copy`` returns,
            and None where the sub-pool is absent. See ``LayerBufferPool.get_cpu_copy``.
        """
        return {
            part: None if pool is None else pool.get_cpu_copy(indices)
            for part, pool in self._parts().items()
        }

    def load_cpu_copy(
        self,
        kv_cache_cpu: Mapping[str, Any],
        indices: torch.Tensor,
        mamba_indices: Any = None,
        req_pool_index: Any = None,
    ) -> None:
        """Write a host copy into ``indices``; see ``LayerBufferPool.load_cpu_copy``.

        Raises:
            TypeError: also where the copy is no dict.
            ValueError: also where a sub-pool's copy is missing, or there is one too many. Nothing
                has been written then, in any sub-pool.
        """
        copies = copies_of(self._parts(), kv_cache_cpu)
        for load in [pool.stage_cpu_copy(copy, indices) for pool, copy in copies]:
            load()
