"""Who moves: specpool, and what others do or could do, each on buffers of the same bytes.

Peers get the pairs ready made; specpool, from a verifier's answer, works them out. SGLang's
``MHATokenToKVPool`` has MiniMax-M3's main K and V alone (its MiniMax pool moves nothing), so beside
the whole there is a comparison over these buffers only.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.cases import Accept, Input
from benchmarks.empty_kernel import empty_launch
from benchmarks.shapes import Buffer, rows_of
from specpool import RowMover, Rows, rows_from
from specpool_kernels.shapes import Flat

_MAIN = ("main K", "main V", "K", "V")  # buffers that SGLang's MHA pool has


class Mover(NamedTuple):
    """One way to move.

    Attributes:
        name: what tables call it.
        move: moves an input's pairs.
        rows: what it moves, to be verified.
        launches: backend invocations so far, where they are counted.
    """

    name: str
    move: Callable[[Input], object]
    rows: list[Rows]
    launches: Callable[[], int] | None = None


def everyone(buffers: list[Buffer], slots: int, device: str) -> list[Mover]:
    """All who can move these buffers here; those of specpool come first.

    Args:
        buffers: of one shape, as ``Shape.build`` returns them.
        slots: of the buffers.
        device: ``"cpu"`` or ``"cuda"``.
    """
    rows = rows_of(buffers)
    mover = RowMover(rows)

    movers = [
        Mover("specpool", _fused(mover), rows, lambda: mover.launches),
        Mover(
            "specpool, pairs given",
            lambda x: mover.move(x.case.tgt, x.case.src),
            rows,
            lambda: mover.launches,
        ),
        Mover("torch indexing", lambda x: index_rows(buffers, x.case.tgt, x.case.src), rows),
        Mover("torch indexing, moving pairs", lambda x: index_rows(buffers, x.tgt, x.src), rows),
        _slab(buffers, slots),
    ]
    main = [b for b in buffers if isinstance(b.kind, Flat) and b.kind.name in _MAIN]
    if main and importlib.util.find_spec("sglang") is not None:
        others = [b for b in buffers if b.kind not in {m.kind for m in main}]
        movers += _sglang(main, others, slots, device)
    if device == "cuda":
        empty = empty_launch()
        movers.append(Mover("empty launch", lambda _: empty(), []))
    return movers


def _fused(mover: RowMover) -> Callable[[Input], None]:
    """From the verifier's answer where there is one."""

    def move(given: Input) -> None:
        if isinstance(given.case, Accept):
            mover.move_accepted(*given.case[:3])
        else:
            mover.move(given.case.tgt, given.case.src)

    return move


def index_buffers(buffers: list[torch.Tensor], tgt: torch.Tensor, src: torch.Tensor) -> None:
    """One gather and one scatter a buffer."""
    for buffer in buffers:
        buffer[tgt] = buffer[src]


def index_rows(buffers: list[Buffer], tgt: torch.Tensor, src: torch.Tensor) -> None:
    """The same where pages hold a slot's parts: one gather and one scatter a part."""
    for buffer in buffers:
        if isinstance(buffer.kind, Flat):
            buffer.tensor[tgt] = buffer.tensor[src]
            continue
        size, start = buffer.kind.page_size, 0
        to, at = (tgt // size, tgt % size), (src // size, src % size)
        for width in buffer.kind.widths:
            part = buffer.tensor[:, start : start + size * width].unflatten(1, (size, width))
            part[to] = part[at]
            start += size * width


def _slab(buffers: list[Buffer], slots: int) -> Mover:
    """What an engine could do whose layers share one tensor: one gather, one scatter."""
    width = sum(sum(buffer.kind.widths) for buffer in buffers)
    device = buffers[0].tensor.device
    slab = torch.empty(slots, width // 8, dtype=torch.int64, device=device)
    generator = torch.Generator(device).manual_seed(1)
    slab.view(torch.uint8).random_(256, generator=generator)
    return Mover(
        "one slab, moving pairs",
        lambda x: index_buffers([slab], x.tgt, x.src),
        rows_from(slab, name="slab"),
    )


def _sglang(main: list[Buffer], others: list[Buffer], slots: int, device: str) -> list[Mover]:
    """SGLang's pool over the main buffers, beside specpool over the same."""
    os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    kind = main[0].kind
    assert isinstance(kind, Flat)
    pool = MHATokenToKVPool(
        size=slots - 1,
        page_size=1,
        dtype=kind.dtype,
        head_num=kind.row[0],
        head_dim=kind.row[1],
        layer_num=len(main) // 2,
        device=device,
        enable_memory_saver=False,
        enable_kv_cache_copy=device == "cuda",
    )
    theirs = [*pool.k_buffer, *pool.v_buffer]
    for buffer, given in zip(theirs, main, strict=True):
        buffer.copy_(given.tensor)
    ours = RowMover(rows_of(main))

    def sglang(native: bool, rest: list[Buffer]) -> Callable[[Input], None]:
        def move(given: Input) -> None:
            pool.use_native_move_kv_cache = native
            pool.move_kv_cache(given.case.tgt, given.case.src)
            index_rows(rest, given.case.tgt, given.case.src)

        return move

    rows: list[Any] = [r for i, b in enumerate(theirs) for r in rows_from(b, name=f"SGLang {i}")]
    movers = [
        Mover("specpool, main K/V", _fused(ours), rows_of(main), lambda: ours.launches),
        Mover("SGLang indexing, main K/V", sglang(True, []), rows),
    ]
    if device == "cuda":
        movers.append(Mover("SGLang tiled kernel, main K/V", sglang(False, []), rows))
    if others:
        movers.append(
            Mover("SGLang indexing, and the index K alike", sglang(True, others),
                  rows + rows_of(others))
        )  # fmt: skip
    return movers
