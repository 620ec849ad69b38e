"""Faults in the kernel that moves from a verifier's answer."""

from tests.faults.fault import planter

_move = planter("kernels/specpool_kernels/move.py", "tests/moves/")

ACCEPT = [
    _move(
        "accept_len does not count the root",
        "ok = ok & (j < length)",
        "ok = ok & (j <= length)",
        "test_accept.py::test_the_length_counts_the_root[triton-on-cpu]",
    ),
    _move(
        "the last accepted entry stays behind",
        "ok = ok & (j < length)",
        "ok = ok & (j < length - 1)",
        "test_accept.py::test_the_length_counts_the_root[triton-on-cpu]",
    ),
    _move(
        "an entry of -1 is a bad slot",
        "& (node != -1) & (~too_long)",
        "& (~too_long)",
        "test_accept.py::test_entries_of_minus_1_are_skipped[triton-on-cpu-S3]",
        error="IndexError",
    ),
    _move(
        "the window's offset is not subtracted",
        "node = node - request * window",
        "node = node",
        "test_accept.py::test_any_order_of_slots[triton-on-cpu]",
    ),
    _move(
        "the window's offset is counted in entries",
        "node = node - request * window",
        "node = node - request * entries",
        "test_accept.py::test_any_order_of_slots[triton-on-cpu]",
    ),
    _move(
        "a neighbour's first slot belongs to the window",
        "(node < window)",
        "(node <= window)",
        "test_dropped.py::test_accept_entries[triton-on-cpu-3-torch.int32]",
    ),
    _move(
        "a neighbour's last slot belongs to the window",
        "(node >= 0)",
        "(node >= -1)",
        "test_dropped.py::test_accept_entries[triton-on-cpu-3-torch.int32]",
    ),
    _move(
        "an entry without a target moves into the next window",
        "(node < window) & (j < window)",
        "(node < window)",
        "test_dropped.py::test_accepted_entries_beyond_the_window[triton-on-cpu]",
    ),
    _move(
        "a negative length is padding",
        "too_long = (length > entries) | (length < 0)",
        "too_long = length > entries",
        "test_dropped.py::test_accept_lengths[triton-on-cpu--1]",
    ),
    _move(
        "a length beyond the entries is cut to them",
        "too_long = (length > entries) | (length < 0)",
        "too_long = length < 0",
        "test_dropped.py::test_accept_lengths[triton-on-cpu-4]",
    ),
    _move(
        "every entry of a row of a bad length counts",
        "skip = (~ok) & ((~too_long) | (j != 0))",
        "skip = (~ok) & (~too_long)",
        "test_dropped.py::test_accept_lengths[triton-on-cpu-4]",
    ),
    _move(
        "accept_index is read as if it were dense",
        "at = request * index_row_stride + j * index_col_stride",
        "at = request * entries + j",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
    _move(
        "accept_len is read as if it were dense",
        "accept_len + request * len_stride",
        "accept_len + request",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
    _move(
        "windows are read as if they were dense",
        "row = out_cache_loc + request * loc_row_stride",
        "row = out_cache_loc + request * window",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
]

FAULTS = [*ACCEPT]
