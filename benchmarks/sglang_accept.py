"""In SGLang: how long does an accept of MiniMax-M3's shape take, plugin against indexing?

The plugin answers SGLang's own ``move_accept_tokens_to_target_kvcache`` on SGLang's own
``MiniMaxSparseKVPool``. SGLang moves no such pool, so the peer is what its indexing path would do
for one: ``MHATokenToKVPool.move_kv_cache`` with ``SGLANG_NATIVE_MOVE_KV_CACHE=1`` on the main K and
V, and the same indexing on every index K. The peer is given the pairs ready; the plugin works them
out. Run where SGLang is installed, on a CPU (``make test-sglang`` makes such an environment).
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from typing import Any

os.environ["SGLANG_NATIVE_MOVE_KV_CACHE"] = "1"
os.environ.setdefault("TRITON_INTERPRET", "1")  # SGLang asks for a GPU's driver otherwise
os.environ.setdefault("SPECPOOL_BACKEND", "cpu")

import torch
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.speculative import spec_utils

from benchmarks.measure import interleaved, spread, write
from benchmarks.move import TARGETS, accept_windows, index_buffers
from specpool.adapters.sglang.plugin import install
from specpool.adapters.sglang.settings import Settings

LAYERS, DENSE, HEADS, DIM = 60, 3, 4, 128


def build_pool(slots: int) -> Any:
    """MiniMax-M3's pool at tensor parallel size 1, with random bytes."""
    sparse = list(range(DENSE, LAYERS))
    pool = MiniMaxSparseKVPool(
        size=slots - 1,
        page_size=1,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        idx_head_dim=DIM,
        dense_layer_ids=list(range(DENSE)),
        sparse_layer_ids=sparse,
        disable_value_sparse_layer_ids=sparse,
        device="cpu",
        start_layer=0,
        end_layer=LAYERS,
    )
    generator = torch.Generator().manual_seed(0)
    for buffer in buffers_of(pool):
        buffer.view(torch.uint8).random_(256, generator=generator)
    return pool


def buffers_of(pool: Any) -> list[torch.Tensor]:
    main = pool.main_pool
    return [*main.k_buffer, *main.v_buffer, *pool.index_k_pool.k_buffer]


def case(bs: int, served: Any, indexed: Any) -> dict[str, list[float]]:
    """Interleaved times on two pools of the same bytes, which must move alike."""
    slots = served.size + served.page_size
    given = accept_windows(bs, slots, "cpu", torch.Generator().manual_seed(bs))
    batch = SimpleNamespace(
        seq_lens=given.accept_len, out_cache_loc=given.out_cache_loc.reshape(-1)
    )
    allocator = SimpleNamespace(get_kvcache=lambda: served)
    correct = given.accept_len - 1

    def plugin() -> None:
        spec_utils.move_accept_tokens_to_target_kvcache(
            batch, given.accept_index, correct, allocator
        )

    def indexing() -> None:
        indexed.main_pool.move_kv_cache(given.tgt, given.src)
        index_buffers(indexed.index_k_pool.k_buffer, given.tgt, given.src)

    plugin()
    indexing()
    for ours, theirs in zip(buffers_of(served), buffers_of(indexed), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    return interleaved({"plugin": plugin, "SGLang's indexing": indexing}, "cpu")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=8192)
    parser.add_argument("--out", default="benchmarks/results/sglang_accept-cpu.json")
    args = parser.parse_args()
    report = install(Settings("default", False))
    assert not report.failed, report.failed
    served, indexed = build_pool(args.slots), build_pool(args.slots)
    results = []
    print(f"{'requests':>8}  {'plugin':>11}  {'indexing':>11}  ratio, target")
    for kind, bs in TARGETS:
        if kind != "accept":
            continue
        seconds = {name: spread(times) for name, times in case(bs, served, indexed).items()}
        ours, theirs = (seconds[name]["median"] for name in ("plugin", "SGLang's indexing"))
        results.append({"kind": kind, "n": bs, "seconds": seconds, "ratio": theirs / ours})
        print(f"{bs:>8}  {ours * 1e6:8.0f} us  {theirs * 1e6:8.0f} us  "
              f"{theirs / ours:5.2f}x  {TARGETS[kind, bs]}x", flush=True)  # fmt: skip
    write(args.out, results)


if __name__ == "__main__":
    main()
