"""A step under ``torch.compile``: verify, move and read on, in one graph without a break."""

import pytest
import torch

from specpool.spec import DraftTree, verify_greedy
from tests.pools import pool_cases as cases

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
BS, DRAFTS, VOCAB = 2, 4, 8


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def compiler(on):
    """What compiles on a GPU; on a CPU, where it takes half a minute, what stands before it."""
    return "aot_eager" if on.device == "cpu" else "inductor"


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("mha-hnd", "minimax", "single")]


@pytest.mark.parametrize("kind", ["mha-bf16", *SLOW])
def test_a_step(on, kind, compiler):
    pool, theirs = cases.POOLS[kind](device=on.device), cases.POOLS[kind](device="cpu")
    for made in (pool, theirs):
        cases.fill(made)
    pool.mover.reserve(16)
    window = on.loc([[4, 6, 5, 9], [12, 11, 15, 14]])
    table = torch.randn(BS, DRAFTS, 16, device=on.device)
    head = torch.randn(16, VOCAB, device=on.device)

    def step(hidden, index, length):
        scores = (hidden @ head).softmax(-1)
        pool.move_accepted(window, index, length)
        return scores.argmax(-1), window.gather(1, length[:, None].long() - 1) + 1

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    for paths, lengths, tgt, src in (
        ([[0, 2, 3], [4, 7, -1]], [3, 2], [6, 5, 11], [5, 9, 14]),
        ([[0, 3, -1], [4, 6, 7]], [2, 3], [6, 11, 15], [9, 15, 14]),
    ):
        for storage, after in zip(
            cases.storages(theirs), cases.moved(theirs, tgt, src), strict=True
        ):
            storage.copy_(after)
        given = on.loc(paths, torch.int32), on.loc(lengths, torch.int32)
        best, last = compiled(table, *given)
        for got, wanted in zip(cases.storages(pool), cases.storages(theirs), strict=True):
            assert torch.equal(got.cpu(), wanted)
        assert torch.equal(best, (table @ head).argmax(-1))
        slots = window.tolist()
        assert last.flatten().tolist() == [slots[r][n - 1] + 1 for r, n in enumerate(lengths)]
    assert pool.mover.launches == 2
    pool.mover.check()


def test_a_move_reads_what_the_step_stored(on, compiler):
    """The store, the move and the read stay in this order."""
    pool = cases.mha(dtype=torch.float32, layer_num=2, device=on.device)
    pool.mover.reserve(4)
    key = pool.k_buffer[1]

    def step(values, slots, tgt):
        key[slots] = values
        pool.move_kv_cache(tgt, slots)
        key[slots] = values * 2
        return key[tgt] + 1

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    values = torch.randn(2, 2, 6, device=on.device)
    read = compiled(values, on.loc([5, 6]), on.loc([1, 2]))
    assert torch.equal(key[[1, 2]], values)
    assert torch.equal(key[[5, 6]], values * 2)
    assert torch.equal(read, values + 1)
    assert pool.mover.launches == 1


@pytest.mark.slow
def test_a_verified_step(on, compiler):
    """The verifier's own operations compile too; what it accepts is what moves."""
    chains = [[[5, 6], [7]], [[3], [4]]]  # nodes in level order: 5, 7, 6 and 3, 4
    drafted = DraftTree.from_chains([1, 2], chains, DRAFTS, device=on.device)
    pool = cases.mha(dtype=torch.float32, layer_num=2, device=on.device)
    buffers = [*pool.k_buffer, *pool.v_buffer]
    for number, buffer in enumerate(buffers):
        rows = torch.arange(buffer.shape[0], device=on.device) + 100.0 * number
        buffer.copy_(rows.view(-1, 1, 1).expand(buffer.shape))
    pool.mover.reserve(BS * DRAFTS)
    window = on.loc([[4, 9, 5, 6], [12, 11, 15, 14]])

    def step(logits):
        accept = verify_greedy(drafted, logits)
        pool.move_accepted(window, accept.accept_index, accept.accept_len)
        return accept.bonus

    logits = torch.zeros(BS, DRAFTS, VOCAB, device=on.device)
    logits[0, 0, 5] = logits[0, 1, 6] = logits[1, 0, 4] = logits[1, 2, 7] = 1
    bonus = torch.compile(step, backend=compiler)(logits)
    assert bonus.tolist() == [0, 7]
    for number, buffer in enumerate(buffers):
        front = buffer[[4, 9, 5, 6, 12, 11, 15], 0, 0] - 100 * number
        assert front.tolist() == [4, 9, 6, 6, 12, 15, 15]
