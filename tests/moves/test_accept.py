"""Moves from the verifier's own outputs: ragged, padded, in windows of any slot order."""

import pytest
import torch

from tests.moves.conftest import same_bytes
from tests.oracle import hnd, nhd, page_split

GARBAGE = (-7, 10**9, -(2**31), 2**31 - 1)
TREES = [(1, 4, 4), (1, 6, 8), (3, 4, 4), (5, 3, 4), (2, 6, 32), (3, 6, 64), (2, 8, 60), (4, 5, 5)]


def _path(entries: int, window: int, request: int) -> list[int]:
    """A tree path: the root, then ``entries - 1`` places in increasing order, flat."""
    picks = torch.randperm(window - 1)[: entries - 1].sort().values + 1
    return [request * window, *(request * window + picks).tolist()]


def _accept(on, lengths, entries, window, slots, dtype=torch.int32):
    """Random windows and paths of the given lengths; garbage wherever nothing may be read."""
    bs = len(lengths)
    out_cache_loc = torch.randperm(slots)[: bs * window].view(bs, window)
    index = torch.tensor(GARBAGE).repeat(bs * entries)[: bs * entries].view(bs, entries)
    index = index.to(dtype)
    for r, length in enumerate(lengths):
        if length:
            index[r, :length] = torch.tensor(_path(length, window, r), dtype=dtype)
    device = on.device
    return out_cache_loc.to(device), index.to(device), on.loc(lengths, dtype)


def _buffers(on, slots):
    return [
        nhd(slots, (40,), device=on.device, name="key"),
        nhd(slots, (3,), torch.bfloat16, device=on.device, name="value"),
    ]


def test_path_0_2_5_by_hand(on):
    """Slots 20, 22 and 25 of a window that starts at 20 end up in 20, 21 and 22."""
    buffer = nhd(32, device=on.device)
    rows = [buffer.row(slot) for slot in range(32)]
    window = torch.arange(20, 28, device=on.device)
    index = on.loc([[0, 2, 5, -1, -1]], torch.int32)
    mover = on.mover(buffer)
    mover.move_accepted(window, index, on.loc([3], torch.int32))
    rows[21], rows[22] = rows[22], rows[25]
    assert [buffer.row(slot) for slot in range(32)] == rows
    assert (mover.launches, mover.rows_moved) == (1, 2)


def test_the_length_counts_the_root(on):
    """accept_len 1 is the root alone, 2 the root and one more: the last entry moves too."""
    buffer = nhd(16, device=on.device)
    window = on.loc([4, 5, 6, 7])
    for length, moved in ((1, 0), (2, 1), (3, 2)):
        mover = on.accept(buffer, window, on.loc([[0, 2, 3]]), on.loc([length]))
        assert mover.rows_moved == moved


@pytest.mark.parametrize("shape", TREES, ids=lambda shape: "bs{}_S{}_D{}".format(*shape))
def test_ragged_lengths(on, shape):
    bs, entries, window = shape
    lengths = torch.randint(0, entries + 1, (bs,)).tolist()
    lengths[0] = entries
    slots = bs * window + 20
    on.accept(_buffers(on, slots), *_accept(on, lengths, entries, window, slots))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(on, dtype, loc_dtype):
    window, index, length = _accept(on, [4, 0, 2], 4, 7, 40, dtype)
    on.accept(_buffers(on, 40), window.to(loc_dtype), index, length)
    on.accept(_buffers(on, 40), window.to(loc_dtype), index, length.long())
    on.accept(_buffers(on, 40), window.to(loc_dtype), index.long(), length.int())


def test_flat_windows(on):
    window, index, length = _accept(on, [4, 1, 3], 4, 7, 40)
    on.accept(_buffers(on, 40), window.flatten(), index, length)


@pytest.mark.parametrize("lengths", [[0, 0], [0, 3], [3, 0], [0, 3, 0, 1, 0]], ids=str)
def test_padding_rows_are_not_read(on, lengths):
    """Index rows full of garbage, and slots full of garbage too, where accept_len is 0."""
    window, index, length = _accept(on, lengths, 4, 6, 60)
    for r, padding in enumerate(n == 0 for n in lengths):
        if padding:
            window[r] = on.loc([-7, 10**9, -(2**31), 2**31 - 1, -2, 10**6])
    on.accept(_buffers(on, 60), window, index, length)


def test_windows_of_padding_rows_may_repeat_live_ones(on):
    window, index, length = _accept(on, [3, 0], 3, 6, 60)
    window[1] = window[0]
    on.accept(_buffers(on, 60), window, index, length)


def test_garbage_slots_behind_the_length_are_not_read(on):
    """Slots of a window that no accepted entry names may be anything."""
    window = on.loc([[4, 10**9, 6, -9]])
    on.accept(_buffers(on, 16), window, on.loc([[0, 2, -7, 99]]), on.loc([1]))


@pytest.mark.parametrize("entries", [3, 8], ids="S{}".format)
def test_entries_of_minus_1_are_skipped(on, entries):
    """An n-gram verifier gives [bs, D], -1 behind the accepted and anywhere within."""
    index = torch.full((2, entries), -1, dtype=torch.int32)
    index[0, 0], index[0, 2] = 0, 5
    index[1, 1] = 8 + 7
    window = torch.randperm(40, device=on.device)[:16]
    length = on.loc([entries, entries], torch.int32)
    on.accept(_buffers(on, 40), window, index.to(on.device), length)


def test_all_minus_1_moves_nothing(on):
    index = torch.full((3, 4), -1, dtype=torch.int32, device=on.device)
    window = torch.arange(24, device=on.device)
    mover = on.accept(_buffers(on, 24), window, index, on.loc([4, 2, 0]))
    assert (mover.launches, mover.rows_moved) == (1, 0)


def test_slots_of_minus_1_skip_their_pair(on):
    """A slot that was never allocated, as a source or as a target."""
    window = on.loc([[3, -1, 5, 6], [-1, 8, 9, 10]])
    index = on.loc([[0, 2, 3, 1], [4, 6, 5, 4]])
    on.accept(_buffers(on, 16), window, index, on.loc([4, 4]))


def test_any_order_of_slots(on):
    """Windows allocated from a fragmented pool, descending and interleaved between requests."""
    window = on.loc([[30, 2, 28, 4, 26, 6], [31, 3, 29, 5, 27, 7]])
    index = on.loc([[0, 1, 3, 5], [6, 9, 10, 11]])
    on.accept(_buffers(on, 32), window, index, on.loc([4, 3]))


@pytest.mark.parametrize("index", [[3, 2, 1, 0], [1, 2, 3, 0], [1, 0, 3, 2], [2, 2, 2, 2]], ids=str)
def test_paths_in_any_order(on, index):
    """No real tree accepts like this; the move is parallel all the same."""
    on.accept(_buffers(on, 16), on.loc([[5, 9, 3, 12]]), on.loc([index]), on.loc([4]))


@pytest.mark.parametrize("bs", [17, 64, 70])
def test_many_requests(on, bs):
    """More requests than one program takes, the last program partly filled."""
    lengths = torch.randint(0, 5, (bs,)).tolist()
    slots = bs * 6 + 3
    on.accept(nhd(slots, (20,), device=on.device), *_accept(on, lengths, 4, 6, slots))


@pytest.mark.parametrize("entries", [17, 65, 257, 1025, 4096])
def test_windows_of_every_bucket(on, entries):
    """One window is never split: a path that moves every row by one crosses every chunk."""
    index = torch.arange(1, entries + 1, dtype=torch.int32, device=on.device)[None]
    window = torch.randperm(entries + 1, device=on.device)
    on.accept(nhd(entries + 1, (8,), device=on.device), window, index, on.loc([entries]))


def test_more_entries_than_a_program_takes(on):
    """Triton refuses them, since a window is never split; the other backends need not."""
    entries = 4097
    index = torch.full((1, entries), -1, dtype=torch.int32, device=on.device)
    index[0, 0] = 3
    window, length = torch.arange(entries, device=on.device), on.loc([entries])
    buffer = nhd(entries, (8,), device=on.device)
    if on.backend != "triton":
        on.accept(buffer, window, index, length)
        return
    before, mover = buffer.bytes(), on.mover(buffer)
    with pytest.raises(ValueError, match=r"at most 4096 entries a request .* got \[1, 4097\]"):
        mover.move_accepted(window, index, length)
    same_bytes(buffer, before)
    assert mover.launches == 0


def test_strided_inputs(on):
    window, index, length = _accept(on, [4, 2, 3], 4, 7, 40)
    wide = torch.full((6, 14), 10**9, device=on.device)
    wide[::2, ::2] = window
    columns = index.t().contiguous()
    lengths = torch.full((3, 5), 99, dtype=torch.int32, device=on.device)
    lengths[:, 2] = length
    assert not columns.t().is_contiguous()
    on.accept(_buffers(on, 40), wide[::2, ::2], columns.t(), lengths[:, 2])
    flat = torch.full((42,), 10**9, device=on.device)
    flat[::2] = window.flatten()
    on.accept(_buffers(on, 40), flat[::2], index, length)


def test_one_length_for_all(on):
    window, index, _ = _accept(on, [3, 3], 3, 5, 20)
    on.accept(_buffers(on, 20), window, index, on.loc([3]).expand(2))


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=["no_requests", "no_entries"])
def test_empty_accepts_launch_nothing(on, shape):
    index = torch.empty(shape, dtype=torch.int32, device=on.device)
    length = torch.zeros(shape[0], dtype=torch.int32, device=on.device)
    window = torch.arange(shape[0] * 4, device=on.device)
    buffer = nhd(8, device=on.device)
    before = buffer.bytes()
    mover = on.mover(buffer)
    mover.move_accepted(window, index, length)
    same_bytes(buffer, before)
    assert (mover.launches, mover.rows_moved) == (0, 0)


def test_empty_windows_launch_nothing(on):
    mover = on.mover(nhd(8, device=on.device))
    none = torch.empty(0, dtype=torch.int64, device=on.device)
    mover.move_accepted(none, torch.full((2, 3), -1, device=on.device), on.loc([0, 0]))
    assert mover.launches == 0


def test_paged_buffers(on):
    buffers = [
        hnd(10, 2, 4, 8, torch.bfloat16, device=on.device),
        page_split(5, 8, (20, 4), padding=4, device=on.device),
        nhd(40, (5,), device=on.device),
    ]
    mover = on.accept(buffers, *_accept(on, [4, 0, 2, 3], 5, 9, 40))
    assert mover.launches == 1


def test_accepted_equals_the_same_pairs_moved(on):
    """Without the oracle: `move_accepted` against `move` with pairs worked out by hand."""
    window = on.loc([[10, 11, 12, 13], [20, 21, 22, 23]])
    one, two = nhd(32, device=on.device), nhd(32, device=on.device)
    two.memory.copy_(one.memory)
    index = on.loc([[0, 3, -1], [4, 5, 7]])
    on.mover(one).move_accepted(window, index, on.loc([2, 3]))
    on.mover(two).move(on.loc([10, 11, 20, 21, 22]), on.loc([10, 13, 20, 21, 23]))
    same_bytes(one, two.bytes())
