"""Locs: both integer types, any strides and shapes, read where they lie."""

import pytest
import torch

from tests.oracle import nhd

DTYPES = {"int32": torch.int32, "int64": torch.int64}


def _apart(loc: torch.Tensor, step: int) -> torch.Tensor:
    """The same locs as every ``step``-th element, with wrong ones between."""
    wide = torch.full((loc.numel() * step,), 3, dtype=loc.dtype, device=loc.device)
    wide[::step] = loc.flatten()
    return wide[::step]


@pytest.mark.parametrize("tgt_dtype", DTYPES)
@pytest.mark.parametrize("src_dtype", DTYPES)
def test_dtypes_mix(on, tgt_dtype, src_dtype):
    tgt = on.loc([0, 1, 2, -1, 7], DTYPES[tgt_dtype])
    src = on.loc([1, 2, 5, 3, -1], DTYPES[src_dtype])
    on.move(nhd(8, device=on.device), tgt, src)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [2, 3])
def test_strided(on, dtype, step):
    tgt = on.loc(list(range(20)), DTYPES[dtype])
    src = on.loc([*range(1, 20), 0], DTYPES[dtype])
    buffer = nhd(20, (24,), device=on.device)
    on.move(buffer, _apart(tgt, step), src)
    on.move(buffer, tgt, _apart(src, step))
    on.move(buffer, _apart(tgt, step), _apart(src, step + 1))


def test_one_loc_for_all_sources(on):
    """A stride of 0, as ``expand`` gives it."""
    on.move(nhd(8, device=on.device), on.loc([0, 1, 2]), on.loc([6]).expand(3))


def test_a_slice_that_starts_inside(on):
    locs = on.loc([9, 9, 0, 1, 2, 9], torch.int32)
    on.move(nhd(8, device=on.device), locs[2:5], on.loc([4, 5, 0, 1, 2], torch.int32)[2:])


def _grids(on, dtype):
    """[4, 6] targets and sources, a permutation of 24 slots each."""
    tgt = torch.randperm(24, device=on.device).to(dtype).view(4, 6)
    return tgt, tgt.roll(5).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_dimensions(on, dtype):
    tgt, src = _grids(on, DTYPES[dtype])
    buffer = nhd(24, (20,), device=on.device)
    on.move(buffer, tgt, src)
    on.move(buffer, tgt, src.flatten())
    on.move(buffer, tgt.view(3, 8), src.view(8, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_dimensions_that_no_view_flattens(on, dtype):
    """``x[:, ::2]`` and ``x.t()`` have two strides."""
    tgt, src = _grids(on, DTYPES[dtype])
    buffer = nhd(24, (20,), device=on.device)
    on.move(buffer, tgt[:, ::2], src[:, ::2])
    on.move(buffer, tgt[::2, 1:5], src[1:3, :4])
    on.move(buffer, tgt.t(), src.t())
    on.move(buffer, tgt.t(), src)
    on.move(buffer, tgt[:, ::2].flatten(), src.t()[:3])


def test_windows_of_a_larger_table(on):
    """Rows of ``req_to_token`` cut to a width: the usual 2-D loc tensor."""
    table = torch.randperm(64, device=on.device).to(torch.int32).view(4, 16)
    on.move(nhd(64, device=on.device), table[:, 2:5], table[:, 3:6])


def test_other_dimensions_are_flattened(on):
    tgt, src = _grids(on, torch.int64)
    buffer = nhd(24, (20,), device=on.device)
    on.move(buffer, tgt.view(2, 2, 6), src.view(4, 3, 2))
    on.move(buffer, tgt.view(2, 2, 6).transpose(0, 2), src.view(2, 2, 6).transpose(0, 2))
    on.move(buffer, tgt.view(2, 2, 6)[:, :, ::2], src.view(2, 2, 6)[:, :, 1::2])
    on.move(buffer, on.loc(3), on.loc(5))


def test_locs_are_left_alone(on):
    tgt, src = on.loc([0, -1, 2]), on.loc([1, 2, 3])
    on.move(nhd(8, device=on.device), tgt, src)
    assert (tgt.tolist(), src.tolist()) == ([0, -1, 2], [1, 2, 3])
