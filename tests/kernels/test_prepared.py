"""A launch through a kept handle reaches the driver as the public call's does, bit for bit.

Triton's own launcher runs, in C, over a driver that remembers what it is told: function, stream,
grid, block, shared memory and every argument. On a GPU, bytes are compared instead.
"""

import os
import shutil

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from benchmarks.stub_driver import no_gpu
from specpool.rows import rows_from
from specpool_kernels import move, prepared
from specpool_kernels.launch import TritonMove

# bytes of the arguments, constants apart
SIZES = {
    "move_rows": [8] * 4 + [4] * 7,
    "move_accepted": [8] * 5 + [4] * 9,
    "move_staged": [8] * 5 + [4] * 8,
}
I32, I64 = torch.int32, torch.int64


@pytest.fixture(scope="module")
def stub(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose driver is not to be replaced")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is compiled under TRITON_INTERPRET")
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler, cc")
    with no_gpu(tmp_path_factory.mktemp("driver")) as driver:
        yield driver


@pytest.fixture
def driver(stub):
    stub.expect([])
    return stub


@pytest.fixture
def public_calls(monkeypatch):
    """Counts Triton's public calls: one entry each."""
    calls, run = [], JITFunction.run

    def counted(self, *args, **kwargs):
        calls.append(self)
        return run(self, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    return calls


def mover(*, widths=(256,), mapped=False, copy=False):
    mapping = torch.arange(64) if mapped else None
    tensors = [torch.zeros(64, width, dtype=torch.uint8) for width in widths]
    rows = [r for t in tensors for r in rows_from(t, mapping=mapping)]
    sources = [r for t in tensors for r in rows_from(t.clone())] if copy else None
    return TritonMove(rows, torch.zeros(2, dtype=I64), sources)


def locs(count, dtype=I64):
    return torch.zeros(count, dtype=dtype)


def windows(bs, size, entries, loc=I64, index=I32, length=I32):
    return locs(bs * size, loc).view(bs, size), locs(bs * entries, index).view(bs, -1), locs(
        bs, length
    )  # fmt: skip


# a call that compiles and prepares, then one of the same kernel with other values
CASES = {
    "move": ("move", (locs(3), locs(3)), (locs(16), locs(16))),
    "move, 1 pair": ("move", (locs(16), locs(16)), (locs(1), locs(1))),
    "move, int32": ("move", (locs(3, I32), locs(3, I32)), (locs(7, I32), locs(7, I32))),
    "move, mixed": ("move", (locs(3, I32), locs(3)), (locs(16, I32), locs(16))),
    "move, unaligned locs": ("move", (locs(4), locs(4)), (locs(5)[1:], locs(9)[1::2])),
    "move, 2-D": ("move", (locs(4), locs(4)), (locs(8).view(2, 4).t(), locs(16).view(4, 4)[:, :2])),
    "move, more rows": ("move", (locs(100), locs(100)), (locs(200), locs(200))),
    "scratch": ("move", (locs(5000), locs(5000)), (locs(6000), locs(6000))),
    "accept": ("move_accepted", windows(2, 8, 4), windows(16, 16, 3)),
    "accept, all int64": (
        "move_accepted",
        windows(2, 8, 4, I64, I64, I64),
        windows(1, 1, 1, I64, I64, I64),
    ),
    "accept, columns of wider tensors": (
        "move_accepted",
        windows(2, 8, 4),
        (windows(4, 32, 1)[0][:, 3:19], windows(4, 1, 16)[1][:, ::4], locs(8, I32)[1::2]),
    ),
}


def through_both(driver, moves, method, args):
    """What the driver saw of a call through the handle, and of the same call in public."""
    getattr(moves, method)(*args)
    kept = driver.last()
    moves._prepared.clear()
    getattr(moves, method)(*args)
    return kept, driver.last()


def sizes_of(method, args):
    staged = method == "move" and args[0].numel() > 4096
    return SIZES["move_staged" if staged else {"move": "move_rows"}.get(method, method)]


@pytest.mark.parametrize("case", CASES)
def test_the_driver_sees_the_same(driver, public_calls, case):
    method, first, args = CASES[case]
    driver.expect(sizes_of(method, args))
    moves = mover()
    getattr(moves, method)(*first)
    assert len(public_calls) == 1
    before = driver.calls
    kept, public = through_both(driver, moves, method, args)
    assert len(public_calls) == 2, "the handle was not used"
    assert driver.calls == before + 2
    assert kept == public


@pytest.mark.parametrize(
    "table",
    [{"mapped": True}, {"copy": True}, {"widths": (256, 12, 3)}],
    ids=["mapped", "copy", "every access class"],
)
def test_other_tables(driver, public_calls, table):
    driver.expect(SIZES["move_rows"])
    moves = mover(**table)
    moves.move(locs(3), locs(3))
    kept, public = through_both(driver, moves, "move", (locs(9), locs(9)))
    assert len(public_calls) == 2
    assert kept == public


def test_reserve_prepares_every_call_within(driver, public_calls):
    moves = mover()
    moves.reserve(16)
    assert all(moves._prepared.values())
    del public_calls[:]
    for dtype in (I32, I64):
        moves.move(locs(5, dtype), locs(5, I64))
        moves.move_accepted(*windows(2, 8, 4, dtype))
    assert public_calls == []


def test_other_types_are_other_kernels(driver, public_calls):
    driver.expect(SIZES["move_rows"])
    moves = mover()
    functions = set()
    for dtypes in ((I32, I32), (I32, I64), (I64, I32), (I64, I64)):
        moves.move(locs(3, dtypes[0]), locs(3, dtypes[1]))
        functions.add(driver.last().function)
    assert len(functions) == len(public_calls) == 4


def test_the_current_stream_of_each_call(driver, public_calls, monkeypatch):
    moves = mover()
    for stream in (7, 11, 13):
        monkeypatch.setattr(driver, "stream", stream)
        moves.move(locs(3), locs(3))
        assert driver.last().stream == stream
    assert len(public_calls) == 1


def test_grown_scratch_is_passed(driver, public_calls):
    driver.expect(SIZES["move_staged"])
    moves = mover()
    moves.move(locs(5000), locs(5000))
    outgrown = moves._scratch.pop(0)
    moves.move(locs(6000), locs(6000))
    assert len(public_calls) == 1
    assert driver.last().arguments[1] == moves._scratch[0].data_ptr() != outgrown.data_ptr()


def test_a_number_of_64_bits_is_typed_by_triton(driver, public_calls):
    """A row of one: nothing of it is out of reach, and yet its stride is past 2^31."""
    wide = torch.empty_strided((1, 3), (2**31, 1), dtype=I64)
    driver.expect([8] * 4 + [4, 4, 4, 4, 4, 8, 4])
    moves = mover()
    moves.move(locs(3), locs(3))
    moves.move(wide, locs(3))
    assert len(public_calls) == 2
    assert driver.last().arguments[-2] == 2**31
    first = mover()  # such a call prepares nothing
    first.move(wide, locs(3))
    assert not any(first._prepared.values())


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(driver, public_calls, hook):
    moves = mover()
    moves.move(locs(3), locs(3))
    chain, seen = getattr(triton.knobs.runtime, hook), []
    chain.add(seen.append)
    try:
        moves.move(locs(3), locs(3))
    finally:
        chain.remove(seen.append)
    assert len(seen) == 1
    assert len(public_calls) == 2
    moves.move(locs(3), locs(3))
    assert len(public_calls) == 2


@pytest.mark.parametrize(
    ("holder", "name", "value"),
    [
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "fpsan"),
        (triton.knobs.runtime, "add_stages_inspection_hook", print),
        (triton.knobs.runtime, "launch_enter_hook", print),
        (move.move_rows, "pre_run_hooks", [print]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_launches_is_left_to_triton(driver, monkeypatch, holder, name, value):
    moves = mover()
    moves.move(locs(3), locs(3))
    (kept,) = moves._prepared.values()
    monkeypatch.setattr(holder, name, value)
    before = driver.calls
    assert not kept.launch((1, 1), [0] * 4, [1] * 7)
    assert driver.calls == before


@pytest.mark.parametrize("versions", [("0.1.",), ()], ids=str)
def test_other_versions_are_left_to_triton(driver, public_calls, monkeypatch, versions):
    monkeypatch.setattr(prepared, "CHECKED", versions)
    moves = mover()
    for _ in range(3):
        moves.move(locs(3), locs(3))
    assert len(public_calls) == 3


@triton.jit
def specialised(tensor, number, R: triton.language.constexpr):
    pass


@triton.jit(do_not_specialize=["number"])
def lean(tensor, number, R: triton.language.constexpr):
    pass


def test_what_is_not_prepared(driver, monkeypatch):
    tensor = torch.zeros(4)
    call = (tensor, 5), {"R": 2}
    compiled = lean[(1,)](*call[0], **call[1])
    at = [tensor.data_ptr()]
    assert prepared.prepare(lean, compiled, at, [5], {"R": 2}) is not None
    assert prepared.prepare(lean, None, at, [5], {"R": 2}) is None  # a hook of Triton's said no
    assert prepared.prepare(lean, compiled, [at[0] + 4], [5], {"R": 2}) is None
    assert prepared.prepare(lean, compiled, at, [2**31], {"R": 2}) is None
    assert prepared.prepare(lean, compiled, at, [5, 5], {"R": 2}) is None
    assert prepared.prepare(lean, compiled, at, [5], {}) is None
    other = specialised[(1,)](*call[0], **call[1])
    assert prepared.prepare(specialised, other, at, [5], {"R": 2}) is None
    amd = compiled.metadata._replace(target=compiled.metadata.target.__class__("hip", "gfx942", 64))
    monkeypatch.setattr(compiled, "metadata", amd)
    assert prepared.prepare(lean, compiled, at, [5], {"R": 2}) is None


def test_an_address_of_another_alignment_is_left_to_triton(driver):
    tensor = torch.zeros(4)
    compiled = lean[(1,)](tensor, 5, R=2)
    kept = prepared.prepare(lean, compiled, [tensor.data_ptr()], [5], {"R": 2})
    assert kept.launch((1,), [tensor.data_ptr()], [5])
    assert not kept.launch((1,), [tensor.data_ptr() + 4], [5])


def stale_pointers(kept, grid, pointers, numbers):
    return grid, [pointers[0]] * len(pointers), numbers


def swapped_numbers(kept, grid, pointers, numbers):
    return grid, pointers, numbers[::-1]


def a_smaller_grid(kept, grid, pointers, numbers):
    return (grid[0], 1), pointers, numbers


def other_constants(kept, grid, pointers, numbers):
    kept._head = (kept._head[0], (8, 1, 0), *kept._head[2:])
    return grid, pointers, numbers


@pytest.mark.parametrize(
    "fault", [stale_pointers, swapped_numbers, a_smaller_grid, other_constants]
)
def test_a_wrong_launch_is_found(driver, monkeypatch, fault):
    """The comparison fails when a handle is made to launch something else."""
    launch = prepared.Prepared.launch
    monkeypatch.setattr(
        prepared.Prepared, "launch", lambda self, *call: launch(self, *fault(self, *call))
    )
    driver.expect(SIZES["move_accepted"])
    moves = mover()
    args = windows(40, 8, 4)  # ten programs a block, one after another
    moves.move_accepted(*args)
    kept, public = through_both(driver, moves, "move_accepted", args)
    assert kept != public


@pytest.mark.gpu
def test_bytes_through_the_handle():
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    before = torch.randint(256, (512, 1000), dtype=torch.uint8, generator=generator)
    buffer = before.to(device)
    moves = TritonMove(rows_from(buffer), torch.zeros(2, dtype=I64, device=device))
    expected = before.clone()
    for count in (1, 16, 5, 200, 200, 16):
        tgt, src = (torch.randperm(512, generator=generator)[:count] for _ in range(2))
        moves.move(tgt.to(device), src.to(device))
        expected[tgt] = expected[src]
        assert torch.equal(buffer.cpu(), expected)
    if torch.version.hip is None and triton.__version__.startswith(prepared.CHECKED):
        assert all(moves._prepared.values())
