"""SGLang's MiniMax attention backend over our pool: a step stores and reads as over its own.

Kernels run in Triton's interpreter, in fp16, a step in ten seconds: one layer of one request.
"""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MiniMaxSparseKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

import specpool
from tests.sglang import verify_engine as engine
from tests.sglang.our_pools import standing_in


def decoded(pool_class, monkeypatch, spoil=None):
    """A decode step of a request of 60 tokens, of which 3 blocks of 4 are read."""
    monkeypatch.setattr(engine, "MiniMaxSparseKVPool", pool_class)
    monkeypatch.setattr(engine, "CONTEXT", 128)
    with standing_in(), engine.Server(engine.Shape(drafts=1)) as server:
        assert type(server.pool) is pool_class
        made = engine.step(server, [60], [[-1]])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=1,
            input_ids=torch.zeros(1, dtype=torch.long),
            req_pool_indices=torch.tensor([1]),
            seq_lens=torch.tensor([61]),
            out_cache_loc=made.slots,
            seq_lens_sum=61,
        )
        batch.seq_lens_cpu, batch.positions = torch.tensor([61]), made.positions()
        if spoil:
            spoil(server.pool)
        server.backend.init_forward_metadata(batch)
        _, attention = engine.attend(server, batch, made.inputs[engine.SPARSE], engine.SPARSE)
        return attention, [buffer.clone() for buffer in server.buffers()]


def test_a_decode_step_is_the_same_over_our_pool(monkeypatch):
    wanted, held = decoded(MiniMaxSparseKVPool, monkeypatch)
    attention, ours = decoded(specpool.MiniMaxSparseKVPool, monkeypatch)
    assert torch.equal(attention, wanted)
    assert all(map(torch.equal, ours, held))

    def other_index(pool):
        keys = pool.index_k_pool.k_buffer[0]
        keys.neg_()

    spoiled, _ = decoded(specpool.MiniMaxSparseKVPool, monkeypatch, other_index)
    assert not torch.equal(spoiled, wanted)
