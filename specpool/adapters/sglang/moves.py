"""Moves of SGLang's own pools: a mover over the engine's tensors, kept a pool, and what calls it.

The mover is built at a pool's first move, over the tensors that are there (no copy, no second
allocation), and given new rows whenever the pool's tensors are no longer the same.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch

from specpool.adapters.sglang.layouts import (
    Group,
    LeftToSGLangError,
    awaited_layers,
    class_name,
    groups_of,
    is_described,
    parts_of,
)
from specpool.adapters.sglang.patch import is_replacement
from specpool.adapters.sglang.watch import DroppedPairs
from specpool.errors import UnsupportedAccess
from specpool.mover import RowMover
from specpool_kernels.device import is_capturing

logger = logging.getLogger("specpool.sglang")


class _Served:
    """A pool's mover and the tensors that it was built over."""

    def __init__(self, groups: list[Group]) -> None:
        self._tensors = _tensors(groups)
        self.mover = RowMover(_rows(groups))
        self.dropped = DroppedPairs(self.mover)

    def follow(self, groups: list[Group]) -> None:
        """Have the mover move these groups, if their tensors are others than before."""
        tensors = _tensors(groups)
        if len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors)):
            return
        self.mover.replace_rows(_rows(groups))
        self._tensors = tensors


_SERVED: WeakKeyDictionary[Any, _Served] = WeakKeyDictionary()
_LEFT: set[str] = set()
_LEFT_ALONE: ContextVar[bool] = ContextVar("_LEFT_ALONE", default=False)


def mover_of(pool: Any) -> RowMover:
    """The mover over a pool's tensors, as they are now.

    Args:
        pool: a KV pool of SGLang 0.5.23.

    Raises:
        UnsupportedAccess: rows cannot express what the pool stores.
        RuntimeError: its tensors were replaced after a move was captured into a graph.
    """
    return _served(pool).mover


def move(pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """``buffer[tgt] = buffer[src]`` in every buffer of ``pool``, in one launch.

    Args:
        pool: a KV pool of SGLang 0.5.23.
        tgt_loc: int32 or int64, in the slots that the pool's own setter takes; -1 skips a pair.
        src_loc: as many.

    Raises:
        UnsupportedAccess: as ``mover_of``; also where a sub-pool cannot be moved.
        TypeError, ValueError, IndexError: as ``RowMover.move``; nothing has moved then.
    """
    served = _served(pool)
    _wait_for_layers(pool)
    served.mover.move(tgt_loc, src_loc)
    served.dropped.look()


def move_accepted(
    pool: Any, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
) -> None:
    """Move a verify step's accepted entries to the front of their windows, in one launch.

    Args:
        pool: a KV pool of SGLang 0.5.23.
        out_cache_loc: ``[bs, D]`` slots that the verify step wrote.
        accept_index: int32 or int64 ``[bs, S]``, flat into ``[bs * D]``, -1 padded.
        accept_len: ``[bs]``, the root included.

    Raises:
        As ``move``.
    """
    served = _served(pool)
    _wait_for_layers(pool)
    served.mover.move_accepted(out_cache_loc, accept_index, accept_len)
    served.dropped.look()


def serving(original: Callable[..., None] | None) -> Callable[..., None]:
    """What replaces a pool class's ``move_kv_cache``.

    Args:
        original: SGLang's own, which goes on serving subclasses whose storage is unknown here and
            storage that is no rows; None where there is none, and such pools are refused.
    """

    def move_kv_cache(self: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        if original is not None and (_LEFT_ALONE.get() or not is_described(self)):
            _leave_alone(original, self, tgt_loc, src_loc)
            return
        try:
            move(self, tgt_loc, src_loc)
        except LeftToSGLangError as left:
            _leave_alone(_leave(self, original, left), self, tgt_loc, src_loc)

    return move_kv_cache


def serving_minimax(original: Callable[..., None]) -> Callable[..., None]:
    """As ``serving``, for the MiniMax pool, whose sub-pools may bring movers of their own."""
    serve = serving(None)

    def move_kv_cache(self: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        own = _own_movers(self)
        if not own:
            serve(self, tgt_loc, src_loc)
            return
        _wait_for_layers(self)
        for move_slots in own:
            move_slots(tgt_loc, src_loc)

    return move_kv_cache


def accepting(original: Callable[..., None]) -> Callable[..., None]:
    """What replaces ``move_accept_tokens_to_target_kvcache``.

    Args:
        original: SGLang's own, which goes on serving every pool whose ``move_kv_cache`` is not
            ``serving``'s, or that is left to SGLang.
    """

    def move_accept_tokens_to_target_kvcache(
        batch: Any,
        accept_index: torch.Tensor,
        num_correct_drafts: torch.Tensor,
        token_to_kv_pool_allocator: Any,
    ) -> None:
        pool = token_to_kv_pool_allocator.get_kvcache()
        bs = len(batch.seq_lens)
        if bs and is_described(pool) and is_replacement(getattr(type(pool), "move_kv_cache", None)):
            window = batch.out_cache_loc.view(bs, -1)
            try:
                # SGLang's count excludes the root
                move_accepted(pool, window, accept_index, num_correct_drafts + 1)
                return
            except LeftToSGLangError:
                pass  # its move_kv_cache says so once
        original(batch, accept_index, num_correct_drafts, token_to_kv_pool_allocator)

    return move_accept_tokens_to_target_kvcache


def refusing(why: str) -> Callable[[Any], Callable[..., None]]:
    """What gives a pool class that nothing can move a ``move_kv_cache`` that says so."""

    def wrap(original: None) -> Callable[..., None]:
        def move_kv_cache(self: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
            raise UnsupportedAccess(f"specpool does not move {class_name(self)}: {why}")

        return move_kv_cache

    return wrap


def _served(pool: Any) -> _Served:
    groups = groups_of(pool)
    served = _SERVED.get(pool)
    if served is None:
        served = _SERVED[pool] = _Served(groups)
        logger.info(
            "specpool moves %s: %d rows a slot on %s, by the %s backend",
            class_name(pool),
            len(served.mover.rows),
            served.mover.device,
            served.mover.backend,
        )
    else:
        served.follow(groups)
    return served


def _tensors(groups: list[Group]) -> list[torch.Tensor]:
    tensors = [tensor for group in groups for tensor in group.tensors]
    return tensors + [group.mapping for group in groups if group.mapping is not None]


def _rows(groups: list[Group]) -> list[Any]:
    return [row for group in groups for row in group.rows()]


def _wait_for_layers(pool: Any) -> None:
    """Wait until every layer that is being loaded is there, as the pool's getters do."""
    for part in parts_of(pool):
        counter = getattr(part, "layer_transfer_counter", None)
        # a graph replays without the counter; the engine drains transfers before a replay
        if counter is None or is_capturing(torch.device(part.device)):
            continue
        for layer in awaited_layers(part):
            counter.wait_until(layer)


def _own_movers(pool: Any) -> list[Callable[..., None]]:
    """The moves of the sub-pools that bring their own; none unless all do."""
    parts = [part for part in parts_of(pool) if part is not pool]
    moves = [getattr(part, "move_slots", None) for part in parts]
    return [m for m in moves if m is not None] if None not in moves else []


def _leave(pool: Any, original: Callable[..., None] | None, left: LeftToSGLangError) -> Any:
    if original is None:
        raise UnsupportedAccess(str(left)) from left
    if str(left) not in _LEFT:
        _LEFT.add(str(left))
        logger.warning("%s", left)
    return original


def _leave_alone(
    original: Callable[..., None], pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """SGLang's own move of a pool and of its parts.

    A sliding-window pool sends what has no slot there to slot 0, many pairs to one target, which a
    part's move of ours would refuse when the other part has moved.
    """
    before = _LEFT_ALONE.set(True)
    try:
        original(pool, tgt_loc, src_loc)
    finally:
        _LEFT_ALONE.reset(before)
