"""What is refused is refused before the first byte moves, with what was given and what is wanted.

Slots, duplicates and accept entries are judged by value on CPU tensors; a GPU drops and counts
them (test_dropped) unless SPECPOOL_CHECK=1 was set, which it is here.
"""

import re

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests.moves.conftest import same_bytes
from tests.oracle import hnd, nhd

SLOTS = 12


@pytest.fixture
def pool(checked):
    """Buffers, their mover, and a check that a call is refused and changes nothing."""
    on = checked
    buffers = [
        nhd(SLOTS, (40,), device=on.device, name="key"),
        nhd(SLOTS + 8, (2,), torch.bfloat16, device=on.device, name="value"),
        hnd(3, 2, 4, 8, device=on.device, name="index"),
    ]
    mover = on.mover(*buffers)

    def refused(call, error, *wanted):
        before = [b.bytes() for b in buffers]
        with pytest.raises(error) as raised:
            call(mover)
        for words in wanted:
            assert re.search(words, str(raised.value)), raised.value
        for buffer, memory in zip(buffers, before, strict=True):
            same_bytes(buffer, memory)
        assert (mover.launches, mover.rows_moved) == (0, 0)
        mover.check()

    return refused


def test_counts_that_differ(on, pool):
    for tgt, src, words in (
        ([1, 2, 3], [4, 5], "tgt_loc has 3 locs and src_loc 2"),
        ([], [4], "tgt_loc has 0 locs and src_loc 1"),
    ):
        tgt, src = on.loc(tgt), on.loc(src)
        pool(lambda mover, t=tgt, s=src: mover.move(t, s), ValueError, words, "needs one source")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bool, torch.int16, torch.uint8, torch.complex64], ids=str
)
def test_locs_of_other_dtypes(on, pool, dtype):
    good, bad = on.loc([1, 0]), on.loc([1, 0]).to(dtype)
    words = f"int32 or int64, got {dtype}"
    pool(lambda mover: mover.move(bad, good), TypeError, "tgt_loc", words)
    pool(lambda mover: mover.move(good, bad), TypeError, "src_loc", words)


@pytest.mark.parametrize("loc", [[1, 0], 3, None], ids=str)
def test_locs_that_are_no_tensors(on, pool, loc):
    kind = type(loc).__name__
    words = f"tgt_loc must be a torch.Tensor of locs, got {kind}"
    pool(lambda mover: mover.move(loc, on.loc([1, 0])), TypeError, words)


def test_locs_on_another_device(on, pool):
    far = torch.zeros(2, dtype=torch.int64, device="meta")
    words = ("src_loc is on meta", f"rows are on {on.device}", "move it there")
    pool(lambda mover: mover.move(on.loc([1, 0]), far), ValueError, *words)


@pytest.mark.parametrize("bad", [-2, -7, SLOTS, SLOTS + 8, 2**31, 2**40, -(2**62)])
@pytest.mark.parametrize("side", ["tgt_loc", "src_loc"])
def test_slots_outside(on, pool, side, bad):
    """Negative other than -1, or beyond the smallest buffer's rows; good pairs stay too."""
    good, wrong = on.loc([1, 2, 3, 4]), on.loc([5, 6, bad, 0])
    pairs = (wrong, good) if side == "tgt_loc" else (good, wrong)
    words = (f"{side} holds slot {bad};", rf"\[0, {SLOTS}\)", "-1 skips a pair")
    pool(lambda mover: mover.move(*pairs), IndexError, *words)


def test_a_skipped_pair_may_name_any_slot(on, pool):
    buffer = nhd(SLOTS, device=on.device)
    before = buffer.bytes()
    mover = on.mover(buffer)
    mover.move(on.loc([-1, 99]), on.loc([99, -1]))
    mover.check()
    same_bytes(buffer, before)


@pytest.mark.parametrize(
    ("tgt", "src", "words"),
    [
        ([5, 1, 5], [2, 3, 4], "target 5 is given with sources 2 and 4"),
        ([1, 1, 1], [2, 2, 3], "target 1 is given with sources 2 and 3"),
        ([5, 5], [5, 2], "target 5 is given with sources 5 and 2"),
    ],
)
def test_targets_with_different_sources(on, pool, tgt, src, words):
    call = lambda mover: mover.move(on.loc(tgt), on.loc(src))  # noqa: E731
    pool(call, ValueError, words, "takes one source")


def _accept(on, index, length, window=None):
    window = torch.arange(12).view(2, 6).to(on.device) if window is None else window
    return lambda mover: mover.move_accepted(window, on.loc(index), on.loc(length))


@pytest.mark.parametrize(
    ("index", "length", "words"),
    [
        ([[0, 6, 2], [6, 7, 8]], [3, 1], r"accept_index\[0, 1\] is 6; .* row 0 .* \[0, 6\)"),
        ([[0, 1, 2], [6, 5, 8]], [1, 2], r"accept_index\[1, 1\] is 5; .* row 1 .* \[6, 12\)"),
        ([[0, 1, 2], [6, 7, 12]], [0, 3], r"accept_index\[1, 2\] is 12"),
        ([[0, -2, 2], [6, 7, 8]], [2, 3], r"accept_index\[0, 1\] is -2"),
        ([[0, 10**9, 2], [6, 7, 8]], [2, 3], r"accept_index\[0, 1\] is 1000000000"),
    ],
)
def test_accept_entries_outside_their_window(on, pool, index, length, words):
    pool(_accept(on, index, length), IndexError, words)


@pytest.mark.parametrize("bad", [-1, 4, 10**6])
def test_accept_lengths_outside_the_entries(on, pool, bad):
    words = (rf"accept_len\[1\] is {bad};", "the root included", r"\[0, 3\]")
    pool(_accept(on, [[0, 1, 2], [6, 7, 8]], [3, bad]), ValueError, *words)


def test_accept_lengths_beyond_the_window(on, pool):
    """Wider entries than drafts: at most D of them can be accepted."""
    window = on.loc([[0, 1], [2, 3]])
    call = _accept(on, [[0, 1, -1], [2, 3, -1]], [2, 3], window)
    pool(call, ValueError, r"accept_len\[1\] is 3", r"\[0, 2\]")


def test_accepted_slots_outside(on, pool):
    for bad in (SLOTS, -2):
        window = on.loc([[0, 1, bad, 3]])
        call = _accept(on, [[0, 2, -1]], [2], window)
        pool(call, IndexError, f"src_loc holds slot {bad}")
        call = _accept(on, [[0, 1, 3]], [3], window)
        pool(call, IndexError, f"tgt_loc holds slot {bad}")


def test_windows_that_share_a_target(on, pool):
    window = on.loc([[0, 1, 2], [4, 1, 6]])
    words = "slot 1 is in the windows of requests 0 and 1"
    pool(_accept(on, [[0, 2], [3, 5]], [2, 2], window), ValueError, words)


@pytest.mark.parametrize(
    ("window", "index", "length", "words"),
    [
        ((12,), (5, 3), (5,), r"out_cache_loc must be .* bs = 5, got \[12\]"),
        ((3, 4), (2, 3), (2,), r"bs = 2, got \[3, 4\]"),
        ((2, 3, 2), (2, 3), (2,), r"bs = 2, got \[2, 3, 2\]"),
        ((12,), (6,), (2,), r"accept_index must be \[bs, S\], got \[6\]"),
        ((12,), (2, 3), (3,), r"accept_len must be \[bs\] = \[2\] .* got \[3\]"),
        ((12,), (2, 3), (2, 1), r"accept_len must be \[bs\] = \[2\] .* got \[2, 1\]"),
    ],
)
def test_accept_shapes(on, pool, window, index, length, words):
    shapes = [torch.zeros(s, dtype=torch.int64, device=on.device) for s in (window, index, length)]
    pool(lambda mover: mover.move_accepted(*shapes), ValueError, words)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_accept_dtypes_and_devices(on, pool, place):
    name = ["out_cache_loc", "accept_index", "accept_len"][place]
    good = [on.loc([[0, 1, 2]]), on.loc([[0, 1]]), on.loc([2])]
    for change, error, words in (
        (lambda t: t.float(), TypeError, f"{name} must be int32 or int64, got torch.float32"),
        (lambda t: t.bool(), TypeError, f"{name} must be int32 or int64, got torch.bool"),
        (lambda t: t.to("meta"), ValueError, f"{name} is on meta"),
        (lambda t: t.tolist(), TypeError, f"{name} must be a torch.Tensor"),
    ):
        args = [change(t) if i == place else t for i, t in enumerate(good)]
        pool(lambda mover, a=args: mover.move_accepted(*a), error, words)


def test_the_pool_still_works_after_refusals(on):
    buffer = nhd(SLOTS, device=on.device)
    mover = on.mover(buffer)
    with pytest.raises(ValueError, match="needs one source"):
        mover.move(on.loc([1, 2]), on.loc([3]))
    on.move_with(mover, [buffer], [1, 2], [2, 1])


def test_overlapping_and_repeated_buffers(on):
    key = nhd(SLOTS, (16,), device=on.device, name="key")
    before = key.bytes()
    for other, name in ((key.tensor, "again"), (key.tensor[3:5], "slice")):
        rows = [*key.rows(), *rows_from(other, name=name)]
        with pytest.raises(ValueError, match=f"key and {name} share memory"):
            RowMover(rows, backend=on.backend)
    same_bytes(key, before)


def test_mixed_devices(on):
    rows = [*nhd(4, device=on.device).rows(), *rows_from(torch.zeros(4, 4, device="meta"))]
    with pytest.raises(ValueError, match=r"several devices \(.*meta.*\); a mover serves one"):
        RowMover(rows, backend=on.backend)
