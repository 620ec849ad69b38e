"""Where a move is called from: autograd modes, threads, and tensors whose memory was replaced."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests import oracle
from tests.moves.conftest import same_bytes
from tests.oracle import nhd

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("built", [*MODES, "plain"])
@pytest.mark.parametrize("moved", [*MODES, "plain"])
@pytest.mark.parametrize("made", [*MODES, "plain"])
def test_autograd_modes(on, made, built, moved):
    """Buffers made, movers built and moves called in any mode: also counts and ``check``."""
    mode = {"plain": torch.enable_grad, **MODES}
    with mode[made]():
        buffers = [nhd(12, (w,), device=on.device) for w in (16, 5)]
        source = nhd(12, (16,), device=on.device)
    with mode[built]():
        mover = on.mover(*buffers)
    with mode[moved]():
        on.move_with(mover, buffers, [0, 1, 2], [0, 2, 5])
        window, index = torch.arange(6, device=on.device), on.loc([[0, 2, 5]])
        on.accept_with(mover, buffers, window, index, on.loc([3]))
        other = on.mover(source)
        alone = on.mover(buffers[0])
        alone.copy_from(other, on.loc([3]), on.loc([4]))
    assert buffers[0].row(3) == source.row(4)


def test_tensors_that_require_grad(on):
    """Moving is no differentiable step: it neither fails nor is recorded."""
    parameter = torch.nn.Parameter(torch.arange(24.0, device=on.device).view(6, 4))
    computed = parameter * 2
    for tensor in (parameter, computed):
        rows = tensor.detach().clone()
        rows[0] = rows[3]
        RowMover(rows_from(tensor), backend=on.backend).move(on.loc([0]), on.loc([3]))
        assert torch.equal(tensor.detach(), rows)
    computed.sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2))


def test_movers_in_several_threads(on):
    """Each thread has its own mover, as each pool does; the backends share no state."""
    count = on.size(40, 6)
    buffers = [nhd(20, (w,), device=on.device) for w in (16, 5, 300, 48)]
    expected = []
    for buffer in buffers:
        memory = buffer.bytes()
        for _ in range(count):
            buffer.memory.copy_(torch.from_numpy(oracle.moved(buffer, list(CYCLE))))
        expected.append(buffer.bytes())
        buffer.memory.copy_(torch.from_numpy(memory))

    def work(buffer):
        mover = on.mover(buffer)
        tgt, src = zip(*CYCLE, strict=True)
        for _ in range(count):
            mover.move(on.loc(tgt), on.loc(src))
        return mover.rows_moved

    with ThreadPoolExecutor(4 if not on.interpreted else 1) as threads:
        assert list(threads.map(work, buffers)) == [count * len(CYCLE)] * 4
    for buffer, memory in zip(buffers, expected, strict=True):
        same_bytes(buffer, memory)


@pytest.mark.slow
def test_reserved_calls(on, register_limit):
    """A reserve changes no result and no count, and its scratch serves the calls that follow."""
    count = register_limit + 40
    buffers = [nhd(count, (w,), device=on.device) for w in (16, 5)]
    mover = on.mover(*buffers)
    mover.reserve(count)
    mover.check()
    assert (mover.launches, mover.rows_moved) == (0, 0)
    scratch = {k: t.data_ptr() for k, t in _scratch(mover).items()}
    assert bool(scratch) == (on.backend == "triton")
    places = torch.arange(count, device=on.device)
    for tgt in (places, places.flip(0), places[:7]):
        on.move_with(mover, buffers, tgt, tgt.roll(1))
    assert {k: t.data_ptr() for k, t in _scratch(mover).items()} == scratch


def _scratch(mover) -> dict:
    return getattr(mover._service.moves, "_scratch", {})


CYCLE = [(0, 7), (7, 3), (3, 12), (12, 19), (19, 0)]


@pytest.mark.parametrize("how", ["set_", "data"])
def test_replaced_memory_is_followed(on, how):
    """The new memory moves, the old one is left alone."""
    buffer, later = nhd(12, device=on.device), nhd(12, device=on.device)
    mover = on.mover(buffer)
    on.move_with(mover, [buffer], [0], [2])
    before = buffer.bytes()
    expected = oracle.moved(later, [(1, 5)])
    if how == "set_":
        buffer.tensor.set_(later.tensor)
    else:
        buffer.tensor.data = later.tensor
    mover.move(on.loc([1]), on.loc([5]))
    same_bytes(buffer, before)
    same_bytes(later, expected)
    assert mover.rows_moved == 2


def test_one_replaced_buffer_of_many(on):
    buffers, later = [nhd(12, device=on.device) for _ in range(4)], nhd(12, device=on.device)
    mover = on.mover(*buffers)
    mover.move(on.loc([0]), on.loc([2]))
    before = [b.bytes() for b in buffers]
    expected = [oracle.moved(b, [(1, 5)]) for b in buffers]
    follows = oracle.moved(later, [(1, 5)])
    buffers[2].tensor.set_(later.tensor)
    mover.move(on.loc([1]), on.loc([5]))
    for i, buffer in enumerate(buffers):
        same_bytes(buffer, before[i] if i == 2 else expected[i])
    same_bytes(later, follows)


def _skip_where_numpy_pins(on):
    if on.backend == "cpu":
        pytest.skip("PyTorch resizes no storage that numpy views: test_viewed_memory_stays")


def test_viewed_memory_stays(on):
    """While the cpu backend's views exist, their memory cannot be freed under them."""
    if on.backend != "cpu":
        pytest.skip("only the cpu backend views the memory")
    tensor = torch.zeros(12, 16)
    RowMover(rows_from(tensor), backend="cpu")
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)


@pytest.mark.parametrize("size", [0, 8])
def test_freed_memory_is_refused(on, size):
    """As a memory saver does it: the storage shrinks under the tensor."""
    _skip_where_numpy_pins(on)
    kept, freed = nhd(12, device=on.device, name="kept"), torch.zeros(12, 16, device=on.device)
    mover = RowMover([*kept.rows(), *rows_from(freed, name="freed")], backend=on.backend)
    before = kept.bytes()
    freed.untyped_storage().resize_(size)
    with pytest.raises(RuntimeError, match=rf"freed: .* freed or shrunk to {size} bytes; build"):
        mover.move(on.loc([0]), on.loc([2]))
    with pytest.raises(RuntimeError, match="freed or shrunk"):
        mover.move_accepted(on.loc([0, 1]), on.loc([[1]]), on.loc([1]))
    same_bytes(kept, before)
    assert (mover.launches, mover.rows_moved) == (0, 0)


def test_memory_that_comes_back_is_followed(on):
    _skip_where_numpy_pins(on)
    tensor = torch.zeros(12, 16, device=on.device)
    mover = RowMover(rows_from(tensor), backend=on.backend)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="freed or shrunk"):
        mover.move(on.loc([0]), on.loc([2]))
    tensor.untyped_storage().resize_(12 * 16 * 4)
    tensor.copy_(torch.arange(12.0)[:, None])
    mover.move(on.loc([0]), on.loc([2]))
    assert tensor[0, 0] == 2


def test_replaced_memory_that_is_too_small_is_refused(on):
    tensor = torch.zeros(12, 16, device=on.device)
    small = torch.zeros(6, 16, device=on.device)
    mover = RowMover(rows_from(tensor), backend=on.backend)
    tensor.data = small
    with pytest.raises(RuntimeError, match="freed or shrunk to 384 bytes"):
        mover.move(on.loc([0]), on.loc([2]))
    assert not small.any()


def test_replaced_memory_of_other_strides_is_refused(on):
    """The declared geometry no longer describes the tensor: its rows would be read elsewhere."""
    tensor = torch.zeros(12, 16, device=on.device)
    wide = torch.arange(12.0, device=on.device)[:, None].repeat(1, 32)
    before = wide.clone()
    mover = RowMover(rows_from(tensor), backend=on.backend)
    tensor.data = wide[:, :16]
    with pytest.raises(RuntimeError, match=r"strides"):
        mover.move(on.loc([0]), on.loc([2]))
    assert torch.equal(wide, before)


def test_rows_share_memory_after_a_replacement(on):
    first, second = nhd(12, device=on.device), nhd(12, device=on.device)
    mover = on.mover(first, second)
    before = first.bytes()
    second.tensor.set_(first.tensor)
    with pytest.raises(ValueError, match="share memory"):
        mover.move(on.loc([0]), on.loc([2]))
    same_bytes(first, before)


def test_the_mover_keeps_its_tensors_alive(on):
    mover = RowMover(rows_from(torch.arange(12.0, device=on.device)), backend=on.backend)
    torch.zeros(12, device=on.device)
    mover.move(on.loc([0]), on.loc([5]))
    assert mover.rows[0].tensor[0] == 5
