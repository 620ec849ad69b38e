"""A pool's mover follows the pool: over buffers that were replaced, and no longer than the pool."""

import gc
import weakref

import pytest
import torch

from tests.sglang import pools
from tests.sglang.driving import Result, run
from tests.sglang.pools import cases

TGT, SRC = [1, 2, 3], [2, 3, 9]


def _move(pool):
    pool.move_kv_cache(torch.tensor(TGT), torch.tensor(SRC))


def replaced(name) -> Result:
    """A move, new buffers as after a pool was cleared and made again, and a second move."""
    case = cases()[name]
    pool = case.filled()
    run(case, _move, (TGT, SRC), pool=pool)
    parts = [getattr(pool, part, None) for part in ("main_pool", "index_k_pool")]
    for part in [part for part in parts if part is not None] or [pool]:
        for buffers in ("k_buffer", "v_buffer", "kv_buffer"):
            for i, buffer in enumerate(getattr(part, buffers, None) or ()):
                made = torch.empty_like(buffer.contiguous())
                made.view(torch.uint8).random_(0, 256)
                getattr(part, buffers)[i] = made
    return run(case, _move, (TGT, SRC), pool=pool)


@pytest.mark.parametrize("name", ["mha", "mla", "minimax", "single-v4"])
def test_new_buffers_are_moved(everything, name):
    result = everything(replaced, name)
    assert result.right, result
    assert result.launches == 2


def registered_anew() -> Result:
    """A second mapping, registered after a first move."""
    case = cases()["swa"]
    pool = case.filled()
    run(case, _move, (TGT, SRC), pool=pool)
    other = torch.roll(pool.full_to_swa_index_mapping[1:24], 1)
    pool.register_mapping(pools.mapping(32, 20))
    pool.full_to_swa_index_mapping[1:24] = other
    return run(case, _move, (TGT, SRC), pool=pool)


def test_a_new_mapping_is_read(everything):
    assert everything(registered_anew).right


def changed_in_place() -> Result:
    """Entries that the allocator wrote after a first move, into the mapping that it registered."""
    case = cases()["c4"]
    pool = case.filled()
    run(case, _move, (TGT, SRC), pool=pool)
    held = pool.kept_by_the_allocator
    held[1:4], held[9] = torch.tensor([5, 0, 6]), 7
    return run(case, _move, (TGT, SRC), pool=pool)


def test_a_mapping_s_new_entries_are_read(everything):
    assert everything(changed_in_place).right


def test_a_pool_is_not_kept_alive(everything):
    assert everything(_lives) == [False, False]


def _lives():
    """Whether a pool that moved, and its memory, live on after its last owner let go."""
    case = cases()["minimax"]
    pool = case.filled()
    _move(pool)
    kept = [weakref.ref(pool), weakref.ref(pool.main_pool.k_buffer[0].untyped_storage())]
    del pool
    gc.collect()
    return [ref() is not None for ref in kept]
