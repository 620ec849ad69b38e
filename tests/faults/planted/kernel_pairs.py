"""Faults in the kernels: which pairs move, behind which mappings, and what is counted."""

from tests.faults.fault import planter

_move = planter("kernels/specpool_kernels/move.py", "tests/moves/")

PAIRS = [
    _move(
        "an identity pair moves",
        "live = live & (src != tgt)",
        "live = live & (src == src)",
        "test_overlap.py::test_overlap[triton-on-cpu-identity]",
    ),
    _move(
        "a source of -1 is a row",
        "live = (src >= 0)",
        "live = (src >= -1)",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_source]",
    ),
    _move(
        "a target of -1 is a row",
        "(tgt >= 0) & (tgt < tl.load(block + 1))",
        "(tgt >= -1) & (tgt < tl.load(block + 1))",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_target]",
    ),
    _move(
        "-1 counts as a bad slot",
        "bad = (~live) & (src != -1) & (tgt != -1)",
        "bad = (~live) & (src != -1)",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_target]",
        error="IndexError",
    ),
    _move(
        "the slot behind the last is a source",
        "(src < tl.load(source + 1))",
        "(src <= tl.load(source + 1))",
        "test_dropped.py::test_the_smallest_rows_limit_the_slots[triton-on-cpu]",
    ),
    _move(
        "the slot behind the last is a target",
        "(tgt < tl.load(block + 1))",
        "(tgt <= tl.load(block + 1))",
        "test_dropped.py::test_the_smallest_rows_limit_the_slots[triton-on-cpu]",
    ),
    _move(
        "the last slot is outside",
        "(src < tl.load(source + 1))",
        "(src < tl.load(source + 1) - 1)",
        "test_overlap.py::test_overlap[triton-on-cpu-last_slot]",
    ),
    _move(
        "slot 0 is outside",
        "live = (src >= 0)",
        "live = (src >= 1)",
        "test_overlap.py::test_overlap[triton-on-cpu-last_slot]",
    ),
    _move(
        "a slot of 64 bits is judged by its lower 32",
        "    head = tl.load(block)\n",
        "    head = tl.load(block)\n    src = src.to(tl.int32).to(tl.int64)\n",
        "test_dropped.py::test_one_bad_pair_among_good_ones[triton-on-cpu-src-4294967299]",
    ),
    _move(
        "the last pair is not read",
        "mask=k < n, other=-1",
        "mask=k < n - 1, other=-1",
        "test_overlap.py::test_overlap[triton-on-cpu-swap]",
    ),
    _move(
        "locs are read as if they were dense",
        "at = row * loc[2] + (k - row * loc[1]) * loc[3]",
        "at = k",
        "test_locs.py::test_strided[triton-on-cpu-2-int32]",
    ),
    _move(
        "locs of two dimensions are read by their last stride alone",
        "at = row * loc[2] + (k - row * loc[1]) * loc[3]",
        "at = k * loc[3]",
        "test_locs.py::test_windows_of_a_larger_table[triton-on-cpu]",
    ),
    _move(
        "a copy judges its sources by the targets' bounds",
        "    if COPY:\n        source = block + 8\n",
        "    if COPY:\n        source = block\n",
        "test_copy.py::test_pools_of_different_sizes_strides_and_layouts[triton-on-cpu]",
    ),
    _move(
        "a copy takes its sources' places from the targets' strides",
        "SOURCE: tl.constexpr = 8 if COPY else 0\n    first",
        "SOURCE: tl.constexpr = 0\n    first",
        "test_copy.py::test_copies[triton-on-cpu-7B-one]",
    ),
]

MAPPINGS = [
    _move(
        "the mapping is ignored for sources",
        "        src = tl.where(from_map != 0, tl.load(at",
        "        _ = tl.where(from_map != 0, tl.load(at",
        "test_mappings.py::test_both_locs_are_translated[triton-on-cpu]",
    ),
    _move(
        "the mapping is ignored for targets",
        "        tgt = tl.where(to_map != 0, tl.load(at",
        "        _ = tl.where(to_map != 0, tl.load(at",
        "test_mappings.py::test_both_locs_are_translated[triton-on-cpu]",
    ),
    _move(
        "a source that maps to 0 is slot 0",
        "((src > 0) | (from_map == 0))",
        "((src >= 0) | (from_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu-0]",
    ),
    _move(
        "a target that maps to 0 is slot 0",
        "((tgt > 0) | (to_map == 0))",
        "((tgt >= 0) | (to_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu-0]",
    ),
    _move(
        "a target that maps to -1 is the row before the buffer",
        "((tgt > 0) | (to_map == 0))",
        "((tgt != 0) | (to_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu--1]",
    ),
    _move(
        "slot 0 of plain rows is skipped as if it were mapped",
        "((tgt > 0) | (to_map == 0))",
        "(tgt > 0)",
        "test_mappings.py::test_slot_0_behind_a_mapping_never_moves[triton-on-cpu]",
    ),
    _move(
        "an entry behind the last slot is a row",
        "inside = (src < tl.load(source + 2))",
        "inside = (src <= tl.load(source + 2))",
        "test_dropped.py::test_bad_entries_of_a_mapping[triton-on-cpu]",
    ),
]

COUNTS = [
    _move(
        "every part of a block counts",
        "counters, part == 0, MAPPED, COPY)",
        "counters, part >= 0, MAPPED, COPY)",
        "test_dropped.py::test_every_bucket[triton-on-cpu-17]",
    ),
    _move(
        "both passes through scratch count",
        "counting = (part == 0) & (not STORE)",
        "counting = part == 0",
        "test_dropped.py::test_beyond_the_register_limit[triton-on-cpu]",
    ),
    _move(
        "rows are not counted",
        "zero + (head >> 32), mask=live",
        "zero, mask=live",
        "test_overlap.py::test_overlap[triton-on-cpu-one]",
    ),
    _move(
        "bad slots are not counted",
        "zero + 1, mask=bad",
        "zero, mask=bad",
        "test_dropped.py::test_all_bad_moves_nothing[triton-on-cpu]",
    ),
]

FAULTS = [*PAIRS, *MAPPINGS, *COUNTS]
