"""Pools that inherit a replaced method: a subclass may store something else than its parent.

A MiniMax or K-only pool of another class is refused by name, since SGLang moves none of them; any
other goes on with SGLang's own move.
"""

import pytest
import torch
from sglang.srt.hardware_backend.npu import memory_pool_npu as npu
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MiniMaxSparseKVPool

from tests.sglang import pools
from tests.sglang.driving import accept, run
from tests.sglang.pools import Case, build_mha, build_minimax, cases
from tests.sglang.test_accept import ACCEPT


class VendorMHA(MHATokenToKVPool):
    """A vendor's pool that stores as its parent does."""


class VendorMiniMax(MiniMaxSparseKVPool):
    """A vendor's pool that moves nothing of its own."""


def build_npu_minimax():
    return build_minimax(cls=npu.NPUMiniMaxSparseKVPool)


def build_npu_k_only():
    return npu.NPUMHATokenToKOnlyPool(
        **pools.common, dtype=torch.bfloat16, head_num=1, head_dim=16, layer_num=2
    )


def build_vendor_minimax():
    return build_minimax(cls=VendorMiniMax)


def move_of(build):
    """A move of a pool whose bytes the oracle does not know: `changed` is what counts."""
    call = lambda pool: pool.move_kv_cache(torch.tensor([1]), torch.tensor([2]))  # noqa: E731
    return run(Case(build, _tensors), call, ((), ()))


def _tensors(pool):
    found, pending = [], [pool]
    while pending:
        for value in vars(pending.pop()).values():
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, torch.Tensor) and part.numel() and part.data_ptr():
                    found.append(pools.Buffer(part, pools.token))
                elif hasattr(part, "k_buffer"):
                    pending.append(part)
    return found


@pytest.mark.parametrize("engine", ["default", "everything"])
@pytest.mark.parametrize(
    ("build", "name"),
    [
        (build_npu_minimax, "NPUMiniMaxSparseKVPool"),
        (build_npu_k_only, "NPUMHATokenToKOnlyPool"),
        (build_vendor_minimax, "VendorMiniMax"),
    ],
)
def test_what_sglang_moves_not_is_refused_by_name(request, engine, build, name):
    result = request.getfixturevalue(engine)(move_of, build)
    assert result.refused, result
    assert result.error.startswith("UnsupportedAccess")
    for part in (name, "--speculative-eagle-topk 1", "SPECPOOL_SGLANG=off"):
        assert part in result.error


def test_another_mha_pool_goes_on_with_sglang_s_own_move(everything):
    result = everything(_vendor_mha)
    assert result.right, result
    assert result.launches is None


def _vendor_mha():
    """Through the accept path, which must not take it for its parent."""
    kept = cases()["mha"]
    pools.cases()["vendor"] = Case(lambda: build_mha(cls=VendorMHA), kept.buffers)
    try:
        return accept("vendor", *ACCEPT)
    finally:
        del pools.cases()["vendor"]
