"""Moves as PyTorch ops: what ``torch.compile`` sees of them, opaque, with the buffers they write.

A mover travels through a graph as a number. Outside of compiled code nothing here runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specpool.mover import RowMover

_HANDLES = itertools.count()
_MOVERS: weakref.WeakValueDictionary[int, RowMover] = weakref.WeakValueDictionary()


def register(mover: RowMover) -> int:
    """The number by which compiled code names a mover; it does not keep the mover alive."""
    handle = next(_HANDLES)
    _MOVERS[handle] = mover
    return handle


@contextmanager
def _mover_over(buffers: list[torch.Tensor], handle: int) -> Iterator[RowMover]:
    """The mover behind a handle, over the buffers that the compiled code gives.

    A compiler that functionalises gives copies of the mover's tensors, and writes them back.
    """
    mover = _MOVERS[handle]
    given = {id(own): buffer for own, buffer in zip(mover._tensors, buffers, strict=False)}
    if all(own.data_ptr() == given[id(own)].data_ptr() for own in mover._tensors[: len(given)]):
        yield mover
        return
    rows = [replace(r, tensor=given.get(id(r.tensor), r.tensor)) for r in mover.rows]
    twin = type(mover)(rows, mover.backend)
    yield twin
    mover.launches += twin.launches
    if mover._counters is not None and twin._counters is not None:
        mover._counters += twin._counters


def _move_op(
    buffers: list[torch.Tensor], mover: int, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    with _mover_over(buffers, mover) as moves:
        moves.move(tgt_loc, src_loc)


def _move_accepted_op(
    buffers: list[torch.Tensor],
    mover: int,
    out_cache_loc: torch.Tensor,
    accept_index: torch.Tensor,
    accept_len: torch.Tensor,
) -> None:
    with _mover_over(buffers, mover) as moves:
        moves.move_accepted(out_cache_loc, accept_index, accept_len)


def _register_ops() -> torch.library.Library:
    """By hand: ``torch.library.custom_op`` would import the compiler, and Triton with it."""
    library = torch.library.Library("specpool", "DEF")  # type: ignore[no-untyped-call]
    head = "(Tensor(a!)[] buffers, int mover, Tensor "
    for schema, run in (
        (f"move{head}tgt_loc, Tensor src_loc) -> ()", _move_op),
        (
            f"move_accepted{head}out_cache_loc, Tensor accept_index, Tensor accept_len) -> ()",
            _move_accepted_op,
        ),
    ):
        name = library.define(schema)  # type: ignore[no-untyped-call]
        library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"specpool::{name}", lambda *args: None, lib=library)
    return library


_OPS = _register_ops()
