"""Calls made in an engine's process, and what came of them, as plain values that travel back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_parallel

from tests.sglang import pools


class Result(NamedTuple):
    """What a call did to a pool.

    Attributes:
        error: class and message of what it raised; None where it returned.
        wrong: bytes that are not what the oracle says; those that a refusal left are right.
        changed: bytes that are not what they were.
        launches: launches of specpool's mover; None where the pool has none.
        backend: what made them.
        digest: of every allocation's bytes.
    """

    error: str | None
    wrong: int
    changed: int
    launches: int | None
    backend: str | None
    digest: str

    @property
    def right(self) -> bool:
        return self.error is None and self.wrong == 0 and self.changed > 0

    @property
    def refused(self) -> bool:
        return self.error is not None and self.changed == 0


def run(
    case: pools.Case,
    call: Callable[[Any], None],
    pairs: tuple[Sequence[int], Sequence[int]],
    *,
    pool: Any = None,
    backend: str | None = None,
) -> Result:
    """Call something with a filled pool, and compare every byte with what `pairs` must leave.

    SGLang's pools take their indexing path, which runs on a CPU, wherever they move themselves.
    """
    one_rank = get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, dcp_enabled=False)
    indexing = envs.SGLANG_NATIVE_MOVE_KV_CACHE.override(True)
    with environment(SPECPOOL_BACKEND=backend), one_rank, indexing:
        pool = case.filled() if pool is None else pool
        buffers = case.buffers(pool)
        before = pools.snapshot(buffers)
        expected = pools.moved(buffers, *map(list, pairs))
        error = None
        try:
            call(pool)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            expected = before
        kept = _mover(pool)
        return Result(
            error,
            pools.wrong(buffers, expected),
            pools.wrong(buffers, before),
            kept and kept.launches,
            kept and kept.backend,
            digest(pool, case),
        )


def move(
    name: str,
    tgt: Sequence[int],
    src: Sequence[int],
    dtype: torch.dtype = torch.int64,
    backend: str | None = None,
) -> Result:
    """`move_kv_cache` of a pool."""
    return run(pools.cases()[name], _moving(tgt, src, dtype), (tgt, src), backend=backend)


def move_badly(
    name: str,
    tgt: Sequence[int],
    src: Sequence[int],
    dtype: torch.dtype = torch.int64,
    backend: str | None = None,
) -> Result:
    """`move_kv_cache` of a pool with locs that it does not have: nothing may change."""
    return run(pools.cases()[name], _moving(tgt, src, dtype), ((), ()), backend=backend)


def accept(
    name: str,
    window: Sequence[int],
    accept_index: Sequence[Sequence[int]],
    accept_len: Sequence[int],
    backend: str | None = None,
    *,
    bad: bool = False,
) -> Result:
    """The engine's own function that moves what a verifier accepted, over a pool.

    Args:
        window: slots that the verify step wrote, `bs * num_draft_tokens`.
        accept_index: `[bs, steps + 1]`, flat into the window, -1 behind what was accepted.
        accept_len: accepted entries of each request, the root included.
        bad: it must be refused, so that no byte changes.
    """
    from sglang.srt.speculative import spec_utils

    bs = len(accept_len)
    size = len(window) // bs
    batch = SimpleNamespace(
        seq_lens=torch.full((bs,), 5), out_cache_loc=torch.tensor(window, dtype=torch.int64)
    )
    tgt, src = [], []
    for r, entries in enumerate(accept_index):
        for j in range(0 if bad else accept_len[r]):
            tgt.append(window[r * size + j])
            src.append(window[entries[j]])

    def call(pool: Any) -> None:
        spec_utils.move_accept_tokens_to_target_kvcache(
            batch,
            torch.tensor(accept_index, dtype=torch.int32),
            torch.tensor(accept_len, dtype=torch.int32) - 1,
            SimpleNamespace(get_kvcache=lambda: pool),
        )

    return run(pools.cases()[name], call, (tgt, src), backend=backend)


def duplicate(
    name: str,
    prefixes: Sequence[int],
    topk: int,
    steps: int,
    page_size: int,
    backend: str | None = None,
) -> Result:
    """The engine's own function that copies a prefix's last partial page to every branch."""
    from sglang.srt.speculative.eagle_worker_common import duplicate_prefix_tail_to_draft_branches

    case, bs = pools.cases()[name], len(prefixes)
    rows = torch.zeros((bs, 128), dtype=torch.int32)
    free = iter(range(page_size, case.locs))
    tgt, src, tails, pages = [], [], [], []
    for r, prefix in enumerate(prefixes):
        tail, base = prefix % page_size, prefix - prefix % page_size
        new = -(-(tail + steps) // page_size)
        for position in range(base + topk * new * page_size):
            rows[r, position] = next(free)
        for branch in range(1, topk):
            for offset in range(tail):
                tgt.append(int(rows[r, base + branch * new * page_size + offset]))
                src.append(int(rows[r, base + offset]))
        tails.append(tail)
        pages.append(new)

    def call(pool: Any) -> None:
        duplicate_prefix_tail_to_draft_branches(
            pool,
            rows,
            torch.tensor(prefixes) - torch.tensor(tails),
            torch.tensor(tails),
            torch.tensor(pages),
            topk,
            page_size,
        )

    return run(case, call, (tgt, src), backend=backend)


def _moving(tgt: Sequence[int], src: Sequence[int], dtype: torch.dtype) -> Callable[[Any], None]:
    locs = [torch.tensor(side, dtype=dtype) for side in (tgt, src)]
    return lambda pool: pool.move_kv_cache(*locs)


def digest(pool: Any, case: pools.Case) -> str:
    """One for the bytes of all allocations."""
    found = hashlib.sha256()
    for memory in pools.memories(case.buffers(pool)):
        found.update(memory.numpy().tobytes())
    return found.hexdigest()


@contextmanager
def environment(**variables: str | None):
    """Environment variables for a while; None leaves one unset."""
    kept = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(kept)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _mover(pool: Any) -> Any:
    """The mover that the plugin keeps for a pool; None where it made none."""
    from specpool.adapters.sglang import moves

    served = moves._SERVED.get(pool)
    return served and served.mover
