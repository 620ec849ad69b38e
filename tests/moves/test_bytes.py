"""Bytes move as bytes: every width, dtype, base and mix of buffers, and no byte beside a row."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from tests.moves.conftest import same_bytes
from tests.oracle import GUARD, nhd

PATH = ([0, 1, 2, 5], [0, 2, 5, 1])
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 36, 48, 63, 64, 68, 100, 112, 127]
WIDTHS += [128, 129, 132, 144, 160, 255, 256, 257, 576, 584, 656, 1000, 1024, 1040, 1152, 2048]
WIDTHS += [2051, 4096, 4100, 8192]


@pytest.mark.parametrize("width", WIDTHS, ids="{}B".format)
def test_widths(on, width):
    on.move(nhd(6, (width,), device=on.device), *PATH)


@pytest.mark.parametrize("width", [8191, 8188], ids="{}B".format)
def test_wide_rows_of_odd_bytes(on, width):
    """Byte-wide columns are many programs: only a whole row of them is this slow to interpret."""
    on.move(nhd(6, (on.size(width, width // 4 | 3),), device=on.device), *PATH)


@pytest.mark.parametrize("width", [5, 20, 48, 1040], ids="{}B".format)
@pytest.mark.parametrize("count", [17, 65, 257, 1025, 4096])
def test_widths_in_every_bucket(on, width, count):
    tgt = torch.randperm(count, device=on.device)
    on.move(nhd(count, (width,), device=on.device), tgt, tgt.roll(1))


def test_widths_differ_within_one_launch(on):
    """The first width is the smallest, then the largest: no buffer's width is another's."""
    widths = [128, 512, 1, 16, 3, 64, 7, 1024, 20, 132, 2, 4]
    buffers = [nhd(6, (w,), device=on.device, name=f"{w}B") for w in widths]
    on.move(buffers, *PATH)
    on.move(buffers[::-1], *PATH)


def test_values_wider_than_keys(on):
    key = nhd(6, (2, 4), torch.bfloat16, device=on.device, name="key")
    value = nhd(6, (2, 12), torch.bfloat16, device=on.device, name="value")
    on.move([key, value], *PATH)


@pytest.mark.parametrize("width", [5, 16, 256], ids="{}B".format)
def test_more_than_100_buffers(on, width):
    buffers = [nhd(6, (width,), device=on.device, name=f"layer {i}") for i in range(120)]
    mover = on.move(buffers, *PATH)
    assert mover.launches == 1


def test_buffers_of_different_slot_counts(on):
    on.move([nhd(6, device=on.device), nhd(60, device=on.device)], *PATH)


_ALL = [v for v in vars(torch).values() if isinstance(v, torch.dtype)]
DTYPES = sorted({d for d in _ALL if str(d).split(".")[1][0] != "q"}, key=str)


def test_dtypes_are_all_here():
    names = {str(dtype) for dtype in DTYPES}
    kinds = ["e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]
    assert {f"torch.float8_{kind}" for kind in kinds} <= names
    assert {"torch.float4_e2m1fn_x2", "torch.bool", "torch.complex64", "torch.uint16"} <= names


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("dim", [3, 16])
def test_dtypes(on, dtype, dim):
    """Random bytes: NaN payloads, subnormals and bools other than 0 and 1 come through."""
    try:
        torch.empty(1, dtype=dtype, device=on.device)
    except (RuntimeError, TypeError) as unsupported:
        pytest.skip(f"this PyTorch makes no {dtype} tensor: {unsupported}")
    on.move(nhd(6, (2, dim), dtype, device=on.device), *PATH)


@pytest.mark.parametrize(
    "lead", [GUARD + n for n in (1, 2, 4, 8, 13)], ids=lambda n: f"+{n - GUARD}"
)
@pytest.mark.parametrize("width", [16, 24, 128, 132], ids="{}B".format)
def test_misaligned_bases(on, lead, width):
    on.move(nhd(6, (width,), lead=lead, device=on.device), *PATH)


@pytest.mark.parametrize("lead", [GUARD + 2, GUARD + 6])
def test_misaligned_bases_of_wider_elements(on, lead):
    on.move(nhd(6, (64,), torch.bfloat16, lead=lead, device=on.device), *PATH)


@pytest.mark.parametrize("gap", [1, 3, 4, 16, 100])
@pytest.mark.parametrize("width", [16, 128, 20], ids="{}B".format)
def test_bytes_between_strided_rows_stay(on, gap, width):
    on.move(nhd(6, (width,), gap=gap, device=on.device), *PATH)


def test_keys_and_values_side_by_side_in_one_row(on):
    """A slice of a fused [slots, 2 * dim] buffer moves without its neighbour."""
    fused = nhd(6, (2, 8), torch.bfloat16, device=on.device)
    before = fused.bytes()
    key = fused.tensor[:, 0]
    RowMover(rows_from(key), backend=on.backend).move(on.loc([1]), on.loc([4]))
    start = GUARD + 1 * 32
    before[start : start + 16] = before[GUARD + 4 * 32 : GUARD + 4 * 32 + 16]
    same_bytes(fused, before)


def test_one_dimensional_and_many_dimensional_rows(on):
    on.move(nhd(6, (), torch.int64, device=on.device), *PATH)
    on.move(nhd(6, (2, 1, 3, 4), torch.float16, device=on.device), *PATH)


def test_rows_far_apart_in_a_transposed_tensor(on):
    """[slots, dim] cut from [slots, layers, dim]: the stride is not the width."""
    for layer in range(2):
        whole = nhd(6, (3, 16), device=on.device)
        expected = whole.bytes()
        before = expected.copy()
        for t, s in zip(*PATH, strict=True):
            to, at = (GUARD + slot * 48 + layer * 16 for slot in (t, s))
            expected[to : to + 16] = before[at : at + 16]
        rows = rows_from(whole.tensor[:, layer])
        RowMover(rows, backend=on.backend).move(on.loc(PATH[0]), on.loc(PATH[1]))
        same_bytes(whole, expected)
