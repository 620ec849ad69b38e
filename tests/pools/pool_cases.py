"""Pools of every kind, small, and an oracle that knows their bytes without asking them for rows.

``places`` says by index arithmetic of its own where a slot lies in each buffer; ``moved`` gathers
and scatters there, buffer by buffer, on clones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from specpool.pools import (
    DeepSeekV4SingleKVPool,
    HiSparseC4DevicePool,
    MHATokenToKOnlyPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
)

Place = Callable[[int], tuple]
SIZE, PAGE = 28, 4

mha = partial(
    MHATokenToKVPool,
    SIZE,
    PAGE,
    head_num=2,
    head_dim=6,
    device="cpu",
    enable_memory_saver=False,
)
k_only = partial(
    MHATokenToKOnlyPool,
    SIZE,
    PAGE,
    head_num=1,
    head_dim=5,
    layer_num=3,
    device="cpu",
    enable_memory_saver=False,
)
minimax = partial(
    MiniMaxSparseKVPool,
    SIZE,
    PAGE,
    dtype=torch.bfloat16,
    head_num=2,
    head_dim=6,
    idx_head_dim=5,
    dense_layer_ids=[0, 1],
    sparse_layer_ids=[2, 3, 4, 5],
    disable_value_sparse_layer_ids=[3, 5],
    device="cpu",
)
single = partial(
    DeepSeekV4SingleKVPool,
    SIZE,
    PAGE,
    torch.float8_e4m3fn,
    448,
    64,
    layer_num=2,
    device="cpu",
    enable_memory_saver=False,
)


def hisparse(mapping: torch.Tensor | None = None, device: str = "cpu") -> HiSparseC4DevicePool:
    """Locs 1..23 lead to slots in descending order, other locs nowhere."""
    pool = HiSparseC4DevicePool(
        SIZE, PAGE, torch.float8_e4m3fn, 448, 64, 2, device, False, start_layer=1
    )
    if mapping is None:
        mapping = torch.zeros(40, dtype=torch.int64)
        mapping[1:24] = torch.arange(30, 7, -1)
        mapping[-1] = -1
    pool.register_mapping(mapping.to(device))
    return pool


POOLS = {
    "mha-bf16": lambda device="cpu": mha(dtype=torch.bfloat16, layer_num=3, device=device),
    "mha-wide-v": lambda device="cpu": mha(
        dtype=torch.float16, layer_num=2, v_head_dim=9, device=device
    ),
    "mha-hnd": lambda device="cpu": mha(
        dtype=torch.float32, layer_num=2, kv_cache_layout="hnd", device=device
    ),
    "mha-hnd-wide-v": lambda device="cpu": mha(
        dtype=torch.float8_e5m2,
        layer_num=2,
        v_head_dim=3,
        kv_cache_layout="hnd",
        device=device,
    ),
    "mha-fp8": lambda device="cpu": mha(dtype=torch.float8_e4m3fn, layer_num=2, device=device),
    "k-only": lambda device="cpu": k_only(dtype=torch.float8_e4m3fnuz, device=device),
    "minimax": minimax,
    "minimax-fp8-index": lambda device="cpu": minimax(
        index_dtype=torch.float8_e4m3fn, start_layer=1, device=device
    ),
    "single": single,
    "hisparse": lambda device="cpu": hisparse(device=device),
}


def layer(layer_id: int) -> SimpleNamespace:
    return SimpleNamespace(layer_id=layer_id)


def loc(*slots: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(slots, dtype=dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, padding included, sharing its memory."""
    nothing = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return nothing.set_(tensor.untyped_storage())


def places(pool) -> list[tuple[torch.Tensor, Place]]:
    """Each buffer of a pool with the index of a slot (of a loc, behind a mapping) in it."""
    if isinstance(pool, MiniMaxSparseKVPool):
        parts = (pool.main_pool, pool.index_kv_pool, pool.index_k_pool)
        return [place for part in parts if part is not None for place in places(part)]
    if isinstance(pool, DeepSeekV4SingleKVPool):
        lookup = getattr(pool, "full_to_hisparse_device_index_mapping", None)

        def packed(slot: int) -> tuple:
            slot = slot if lookup is None else int(lookup[slot])
            if slot <= 0 and lookup is not None:
                return (0, slice(0, 0))
            page, offset = divmod(slot, pool.page_size)
            scales = pool.page_size * 576 + offset * 8
            return page, [*range(offset * 576, offset * 576 + 576), *range(scales, scales + 8)]

        return [(buffer, packed) for buffer in pool.kv_buffer]
    buffers = [*pool.k_buffer, *getattr(pool, "v_buffer", [])]
    if getattr(pool, "kv_cache_layout", "nhd") == "hnd":
        return [
            (b, lambda s: (s // pool.page_size, slice(None), s % pool.page_size)) for b in buffers
        ]
    return [(b, lambda s: (s,)) for b in buffers]


def storages(pool) -> list[torch.Tensor]:
    return [raw(buffer) for buffer, _ in places(pool)]


def fill(pool, seed: int = 0) -> None:
    """Random bytes everywhere, padding included."""
    generator = torch.Generator().manual_seed(seed)
    for storage in storages(pool):
        values = torch.empty(storage.shape, dtype=torch.uint8).random_(0, 256, generator=generator)
        storage.copy_(values)


def snapshot(pool) -> list[torch.Tensor]:
    return [storage.clone() for storage in storages(pool)]


def unchanged(pool, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, storages(pool), before))


def row(pool_buffer: torch.Tensor, index: tuple) -> torch.Tensor:
    return pool_buffer.view(torch.uint8)[index].clone()


def rows_at(pool, slot: int) -> list[torch.Tensor]:
    """The bytes of a slot in every buffer."""
    return [row(buffer, place(slot)) for buffer, place in places(pool)]


def moved(pool, tgt: list[int], src: list[int]) -> list[torch.Tensor]:
    """What every storage must hold after a move; the pool stays as it is."""
    live = [(t, s) for t, s in zip(tgt, src, strict=True) if t != -1 and s != -1]
    return placed(pool, [(t, rows_at(pool, s)) for t, s in live])


def placed(pool, rows: list[tuple[int, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """What every storage must hold after rows were written; the pool stays as it is."""
    before = snapshot(pool)
    for slot, values in rows:
        for (buffer, place), value in zip(places(pool), values, strict=True):
            target = buffer.view(torch.uint8)
            if target[place(slot)].numel() and value.numel():
                target[place(slot)] = value
    after = snapshot(pool)
    for storage, was in zip(storages(pool), before, strict=True):
        storage.copy_(was)
    return after
