"""After a reserve a step neither waits for the device nor allocates; a commit reads once."""

import pytest
import torch

from specpool import RowMover, rows_from
from specpool.allocator import PagedSlotAllocator
from specpool.request_table import RequestTable
from specpool.spec import DraftTree, commit, verify_greedy, verify_sampling
from tests.gpu.gpu import allocations, synchronisations
from tests.moves.places import On
from tests.oracle import nhd
from tests.spec.test_verify_no_sync import NoReads

BS, DRAFTS, VOCAB, SLOTS = 3, 8, 12, 64


class Step:
    """What a verify step hands on, on the device already."""

    def __init__(self, on):
        chains = [[[5, 6, 7], [5, 8]], [[9]], [[3, 4], [5, 4], [6, 4]]]
        self.tree = DraftTree.from_chains([1, 2, 3], chains, DRAFTS, device=on.device)
        self.logits = torch.randn(BS, DRAFTS, VOCAB, device=on.device)
        self.logits[0, 0, 5] = self.logits[0, 1, 8] = self.logits[2, 0, 6] = 99
        self.window = torch.randperm(SLOTS)[: BS * DRAFTS].view(BS, DRAFTS).to(on.device)
        self.buffers = [nhd(SLOTS, (w,), device=on.device) for w in (64, 20)]
        self.source = [nhd(SLOTS, (w,), device=on.device) for w in (64, 20)]
        self.mover, self.other = on.mover(*self.buffers), on.mover(*self.source)
        self.mover.reserve(BS * DRAFTS)
        self.tgt, self.src = on.loc([0, 1, 2, -1]), on.loc([0, 2, 5, 7])

    def move(self):
        self.mover.move(self.tgt, self.src)

    def move_accepted(self):
        accept = verify_greedy(self.tree, self.logits)
        self.mover.move_accepted(self.window, accept.accept_index, accept.accept_len)

    def sample(self):
        verify_sampling(self.tree, self.logits, 0.8, 0.9, 5)

    def copy(self):
        self.mover.copy_from(self.other, self.tgt, self.src)


CALLS = ("move", "move_accepted", "sample", "copy")


@pytest.mark.parametrize("call", CALLS)
def test_nothing_waits(on, call):
    run = getattr(Step(on), call)
    run()  # a first copy between two movers builds their table
    with synchronisations(on) as waits:
        for _ in range(3):
            run()
    assert waits == []


@pytest.mark.parametrize("call", ["move", "move_accepted", "copy"])
def test_no_value_is_read(on, call, monkeypatch):
    """What a CPU can show of the same: no operation whose result depends on a device's value."""
    if on.device != "cpu" or on.interpreted:
        pytest.skip("records PyTorch's own operations, which the torch backend is made of")
    for module in ("tree", "sampling"):
        monkeypatch.setattr(f"specpool.spec.{module}.values_are_read", lambda device: False)
    step = Step(on)
    getattr(step, call)()
    with NoReads():
        getattr(step, call)()


@pytest.mark.gpu
def test_a_wait_is_seen():
    gpu = On("cuda", "triton")
    values = torch.arange(3, device="cuda")
    for wait in (lambda: values.tolist(), lambda: values[0].item(), lambda: values.nonzero()):
        with synchronisations(gpu) as waits:
            wait()
        assert waits


@pytest.mark.parametrize("call", ["move", "move_accepted", "copy"])
def test_the_mover_allocates_nothing(on, call, register_limit):
    """Forms of every size, through scratch too."""
    step = Step(on)
    count = register_limit + 50
    many = nhd(count, (64,), device=on.device)
    mover = on.mover(many)
    mover.reserve(count)
    places = torch.arange(count, device=on.device)
    later = places.roll(1)
    accept = verify_greedy(step.tree, step.logits)
    calls = {
        "move": lambda: [mover.move(places[:n], later[:n]) for n in (3, 70, 300, count)],
        "move_accepted": lambda: step.mover.move_accepted(step.window, *accept[:2]),
        "copy": step.copy,
    }
    calls[call]()
    before = allocations(on)
    calls[call]()
    assert allocations(on) == before


def test_a_commit_waits_once(on):
    """It reads the accept, since slots are freed on the host; the rest is queued."""
    buffer = torch.arange(80.0, device=on.device)
    mover = RowMover(rows_from(buffer), backend=on.backend)
    allocator, table = PagedSlotAllocator(76, 4, on.device), RequestTable(1, 40, on.device)
    (row,) = table.alloc()
    table.append(row, allocator.alloc_extend([0], [9], [-1]).cpu())
    index, length = on.loc([[0, 2, 5]], torch.int32), on.loc([3], torch.int32)
    for step in range(3):
        have = int(table.lengths[row])
        window = allocator.alloc_extend([have], [have + 8], table.last_loc[[row]])
        moved = buffer[window[[0, 2, 5]]].tolist()
        with synchronisations(on) as waits:
            commit([mover], allocator, table, [row], window, index, length, "move")
        assert len(waits) == (on.device != "cpu")
        assert buffer[table.row(row).long()][-3:].tolist() == moved
        assert table.lengths[row] == 12 + 3 * step
