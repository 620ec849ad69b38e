"""A pool on a device that is not the current one; a program, since a worker sees one GPU alone.

``python -m tests.gpu.two_devices`` exits with 0 when the pool's bytes are right and the current
device is what it was.
"""

from __future__ import annotations

import torch

from specpool import MHATokenToKVPool, RowMover, rows_from

SLOTS = 64


def check(current: str, away: str) -> None:
    """Every call of a pool and a mover on ``away`` while ``current`` is the current device."""
    if current != "cpu":
        torch.cuda.set_device(current)
    pool = MHATokenToKVPool(SLOTS, 4, torch.bfloat16, 2, 8, 3, away, False)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for number, buffer in enumerate(buffers):
        values = torch.arange(buffer.shape[0]) + number
        buffer.copy_(values.view(-1, 1, 1).expand(buffer.shape))
    here = [buffer.cpu() for buffer in buffers]
    pool.mover.reserve(16)

    def moved(call, tgt: list[int], src: list[int]) -> None:
        call()
        for mine, buffer in zip(here, buffers, strict=True):
            mine[tgt] = mine[src]
            assert torch.equal(mine, buffer.cpu())

    def loc(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=away)

    moved(lambda: pool.move_kv_cache(loc(0, 1, 2), loc(0, 2, 5)), [1, 2], [2, 5])
    index = loc(0, 2, 5, -1, dtype=torch.int32).view(1, 4)
    window, length = torch.arange(20, 28, device=away), loc(3, dtype=torch.int32)
    moved(lambda: pool.move_accepted(window, index, length), [21, 22], [22, 25])
    many = torch.arange(5000, device=away)
    long = torch.arange(5001, dtype=torch.int16, device=away)
    RowMover(rows_from(long)).move(many, many + 1)
    assert torch.equal(long[:5000].cpu(), torch.arange(1, 5001, dtype=torch.int16))
    saved = pool.get_cpu_copy(loc(5, 9))
    pool.load_cpu_copy(saved, loc(30, 31))
    moved(lambda: None, [30, 31], [5, 9])
    if current != "cpu":
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(away)
        with torch.cuda.graph(graph, stream=stream):
            pool.move_accepted(window, index, length)
        moved(graph.replay, [21, 22], [22, 25])
        assert torch.cuda.current_device() == torch.device(current).index
    pool.mover.check()


if __name__ == "__main__":
    check("cuda:0", "cuda:1")
