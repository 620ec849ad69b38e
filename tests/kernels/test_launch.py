"""The launcher's own refusals and loc shapes; what it launches is tested in tests/moves."""

import pytest
import torch

pytest.importorskip("triton")

from specpool.rows import rows_from
from specpool_kernels.launch import TritonMove, _as_read, _check_reach


def test_cpu_tensors_need_the_interpreter():
    counters = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"CUDA and HIP devices, got cpu; .* TRITON_INTERPRET=1"):
        TritonMove(rows_from(torch.zeros(4, 4)), counters)


@pytest.mark.parametrize(
    ("shape", "stride", "reach"),
    [((2,), (2**31,), 2**31), ((2, 3), (2**31 - 2, 1), 2**31), ((2**31,), (0,), 0)],
)
def test_locs_that_32_bits_cannot_index(shape, stride, reach):
    loc = torch.empty_strided(shape, stride, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=rf"reaches {reach} elements .* 2\^31 - 1 are supported"):
        _check_reach(loc)


@pytest.mark.parametrize(("shape", "stride"), [((2,), (2**31 - 1,)), ((2**31 - 1,), (1,))])
def test_locs_that_32_bits_just_index(shape, stride):
    _check_reach(torch.empty_strided(shape, stride, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize(
    ("loc", "expected"),
    [
        (torch.zeros(12)[::2], (6, 0, 2)),
        (torch.zeros(4, 6), (6, 6, 1)),
        (torch.zeros(4, 6).t(), (4, 1, 6)),
        (torch.zeros(4, 6)[:, 1::2], (3, 6, 2)),
        (torch.zeros(1).expand(5), (5, 0, 0)),
        (torch.zeros(2, 3, 4), (24, 0, 1)),
        (torch.tensor(3), (1, 0, 1)),
    ],
    ids=lambda value: str(list(value.shape)) if isinstance(value, torch.Tensor) else "",
)
def test_one_and_two_dimensions_are_read_in_place(loc, expected):
    read, *shape = _as_read(loc)
    assert tuple(shape) == expected
    assert read.data_ptr() == loc.data_ptr()
