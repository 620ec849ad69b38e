"""The pools that a step moves: what they must be, told before any of them moves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from specpool.disjoint import check_disjoint
from specpool.mover import RowMover
from specpool.rows import Rows


class HasMover(Protocol):
    """A pool: its mover, and moves that wait for what the pool must wait for."""

    @property
    def mover(self) -> RowMover:
        """The mover over all of the pool's rows."""

    def move_kv_cache(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """As ``RowMover.move``."""

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """As ``RowMover.move_accepted``."""


def mover_of(pool: HasMover | RowMover) -> RowMover:
    """A pool's mover, or the mover itself."""
    return pool if isinstance(pool, RowMover) else pool.mover


def check_pools(
    pools: Sequence[HasMover | RowMover], slot_limit: int, device: torch.device
) -> None:
    """Refuse pools that cannot all move.

    Args:
        pools: what is to move.
        slot_limit: rows that each of their buffers must have.
        device: where each of them must lie.

    Raises:
        ValueError: none is given, one is given twice, two share memory, or one has fewer slots
            or another device.
        RuntimeError: memory of a pool was freed.
    """
    if not pools:
        raise ValueError("moving needs the pools that move, and none is given")
    movers = [mover_of(pool) for pool in pools]
    rows = tuple(row for mover in movers for row in mover.rows)
    seen = _Checked(rows, [row.tensor.data_ptr() for row in rows], slot_limit, device)
    if _checked.get(movers[0]) == seen:
        return
    if len(pools) > 1:
        check_disjoint(rows)  # a buffer in two movers would move twice
    for row in rows:
        row.check_memory()
        if row.tensor.device != device:
            raise ValueError(f"{row.name} is on {row.tensor.device}, the slots are on {device}")
        if row.loc_limit < slot_limit:
            raise ValueError(
                f"{row.name} has {row.loc_limit} slots, the allocator hands out slots up to "
                f"{slot_limit - 1}; build pools and allocator of one size"
            )
    _checked[movers[0]] = seen


class _Checked(NamedTuple):
    """What was found right; Rows compare by identity, and never change."""

    rows: tuple[Rows, ...]
    addresses: list[int]
    slot_limit: int
    device: torch.device


# The same pools move at every step, and checking hundreds of buffers takes longer than moving them.
_checked: weakref.WeakKeyDictionary[RowMover, _Checked] = weakref.WeakKeyDictionary()
