"""Faults in the Triton kernels; their tests run in Triton's interpreter."""

from tests.faults.fault import WRONG, Fault


def _fault(name: str, was: str, becomes: str, *tests: str, errors: tuple[str, ...] = WRONG):
    paths = tuple(f"tests/moves/{test}" for test in tests)
    return Fault(name, "kernels/specpool_kernels/move.py", was, becomes, paths, True, errors)


ORDER = [
    _fault(
        "no barrier between loads and stores",
        "tl.debug_barrier()  # no thread may store",
        "pass  # no thread may store",
        "test_order.py::test_moves_load_then_wait_then_store[triton-on-cpu-12]",
    ),
    _fault(
        "no barrier between the passes through scratch",
        "            _end_pass(WAIT)",
        "            if store == 1:\n                _end_pass(WAIT)",
        "test_order.py::test_moves_through_scratch_wait_after_every_pass[triton-on-cpu]",
    ),
    _fault(
        "no barrier between two tiles of a program's scratch",
        "            _end_pass(WAIT)",
        "            if store == 0:\n                _end_pass(WAIT)",
        "test_order.py::test_moves_through_scratch_wait_after_every_pass[triton-on-cpu]",
    ),
    _fault(
        "programs share scratch",
        "own = scratch + pid.to(tl.int64) * n",
        "own = scratch + pid.to(tl.int64) * 0",
        "test_order.py::test_programs_share_no_scratch[triton-on-cpu]",
    ),
    _fault(
        "a chunk is stored before the next one is loaded",
        "        values = values + (value,)\n",
        "        values = values + (value,)\n"
        "        if CHUNKS > 1:\n"
        "            to = _pointers(chunk, to_offset, col, ELEMENT, ALIGN)\n"
        "        tl.store(to, value, mask=mask)\n",
        "test_order.py::test_moves_load_then_wait_then_store[triton-on-cpu-12]",
    ),
]

PAIRS = [
    _fault(
        "an identity pair moves",
        "live = live & (src != tgt)",
        "live = live & (src == src)",
        "test_overlap.py::test_overlap[triton-on-cpu-identity]",
    ),
    _fault(
        "a source of -1 is a row",
        "live = (src >= 0)",
        "live = (src >= -1)",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_source]",
    ),
    _fault(
        "a target of -1 is a row",
        "(tgt >= 0) & (tgt < tl.load(block + 1))",
        "(tgt >= -1) & (tgt < tl.load(block + 1))",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_target]",
    ),
    _fault(
        "-1 counts as a bad slot",
        "bad = (~live) & (src != -1) & (tgt != -1)",
        "bad = (~live) & (src != -1)",
        "test_overlap.py::test_overlap[triton-on-cpu-skipped_target]",
        errors=("IndexError",),
    ),
    _fault(
        "the slot behind the last is a source",
        "(src < tl.load(source + 1))",
        "(src <= tl.load(source + 1))",
        "test_dropped.py::test_one_bad_pair_among_good_ones[triton-on-cpu-src-12]",
    ),
    _fault(
        "the slot behind the last is a target",
        "(tgt < tl.load(block + 1))",
        "(tgt <= tl.load(block + 1))",
        "test_dropped.py::test_one_bad_pair_among_good_ones[triton-on-cpu-tgt-12]",
    ),
    _fault(
        "the last slot is outside",
        "(src < tl.load(source + 1))",
        "(src < tl.load(source + 1) - 1)",
        "test_overlap.py::test_overlap[triton-on-cpu-last_slot]",
    ),
    _fault(
        "slot 0 is outside",
        "live = (src >= 0)",
        "live = (src >= 1)",
        "test_overlap.py::test_overlap[triton-on-cpu-last_slot]",
    ),
    _fault(
        "a slot of 64 bits is judged by its lower 32",
        "    head = tl.load(block)\n",
        "    head = tl.load(block)\n    src = src.to(tl.int32).to(tl.int64)\n",
        "test_dropped.py::test_one_bad_pair_among_good_ones[triton-on-cpu-src-4294967299]",
    ),
    _fault(
        "the last pair is not read",
        "mask=k < n, other=-1",
        "mask=k < n - 1, other=-1",
        "test_overlap.py::test_overlap[triton-on-cpu-swap]",
    ),
    _fault(
        "locs are read as if they were dense",
        "at = row * loc[2] + (k - row * loc[1]) * loc[3]",
        "at = k",
        "test_locs.py::test_strided[triton-on-cpu-2-int32]",
    ),
    _fault(
        "locs of two dimensions are read by their last stride alone",
        "at = row * loc[2] + (k - row * loc[1]) * loc[3]",
        "at = k * loc[3]",
        "test_locs.py::test_windows_of_a_larger_table[triton-on-cpu]",
    ),
    _fault(
        "a copy judges its sources by the targets' bounds",
        "    if COPY:\n        source = block + 8\n",
        "    if COPY:\n        source = block\n",
        "test_copy.py::test_pools_of_different_sizes_strides_and_layouts[triton-on-cpu]",
    ),
    _fault(
        "a copy takes its sources' places from the targets' strides",
        "SOURCE: tl.constexpr = 8 if COPY else 0\n    first",
        "SOURCE: tl.constexpr = 0\n    first",
        "test_copy.py::test_copies[triton-on-cpu-7B-one]",
    ),
]

MAPPINGS = [
    _fault(
        "the mapping is ignored for sources",
        "        src = tl.where(from_map != 0, tl.load(at",
        "        _ = tl.where(from_map != 0, tl.load(at",
        "test_mappings.py::test_both_locs_are_translated[triton-on-cpu]",
    ),
    _fault(
        "the mapping is ignored for targets",
        "        tgt = tl.where(to_map != 0, tl.load(at",
        "        _ = tl.where(to_map != 0, tl.load(at",
        "test_mappings.py::test_both_locs_are_translated[triton-on-cpu]",
    ),
    _fault(
        "a source that maps to 0 is slot 0",
        "((src > 0) | (from_map == 0))",
        "((src >= 0) | (from_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu-0]",
    ),
    _fault(
        "a target that maps to 0 is slot 0",
        "((tgt > 0) | (to_map == 0))",
        "((tgt >= 0) | (to_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu-0]",
    ),
    _fault(
        "a target that maps to -1 is the row before the buffer",
        "((tgt > 0) | (to_map == 0))",
        "((tgt != 0) | (to_map == 0))",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[triton-on-cpu--1]",
    ),
    _fault(
        "slot 0 of plain rows is skipped as if it were mapped",
        "((tgt > 0) | (to_map == 0))",
        "(tgt > 0)",
        "test_mappings.py::test_slot_0_behind_a_mapping_never_moves[triton-on-cpu]",
    ),
    _fault(
        "an entry behind the last slot is a row",
        "inside = (src < tl.load(source + 2))",
        "inside = (src <= tl.load(source + 2))",
        "test_dropped.py::test_bad_entries_of_a_mapping[triton-on-cpu]",
    ),
]

COUNTS = [
    _fault(
        "every part of a block counts",
        "counters, part == 0, MAPPED, COPY)",
        "counters, part >= 0, MAPPED, COPY)",
        "test_dropped.py::test_every_bucket[triton-on-cpu-17]",
    ),
    _fault(
        "both passes through scratch count",
        "counting = (part == 0) & (not STORE)",
        "counting = part == 0",
        "test_dropped.py::test_beyond_the_register_limit[triton-on-cpu]",
    ),
    _fault(
        "rows are not counted",
        "zero + (head >> 32), mask=live",
        "zero, mask=live",
        "test_overlap.py::test_overlap[triton-on-cpu-one]",
    ),
    _fault(
        "bad slots are not counted",
        "zero + 1, mask=bad",
        "zero, mask=bad",
        "test_dropped.py::test_all_bad_moves_nothing[triton-on-cpu]",
    ),
]

PLACES = [
    _fault(
        "a slot times its stride wraps at 2^31",
        "offset = wide * (tl.load(side + 4) // BYTES).to(tl.int32).to(tl.int64)",
        "offset = (wide * (tl.load(side + 4) // BYTES)) & 0x7FFFFFFF",
        "test_large.py::test_rows_past_2_31_bytes[triton-on-cpu-torch.int32-1021B]",
    ),
    _fault(
        "a page times its gap wraps at 2^31",
        "offset += page.to(tl.int32).to(tl.int64) * gap",
        "offset += (page * gap) & 0x7FFFFFFF",
        "test_large.py::test_pages_past_2_31_bytes[triton-on-cpu-3-(1, 583)]",
    ),
    _fault(
        "the gap between pages is ignored",
        "gap = (tl.load(side + 5) // BYTES)",
        "gap = (tl.load(side + 5) * 0)",
        "test_layouts.py::test_split_pages[triton-on-cpu-(576, 8)-3]",
    ),
    _fault(
        "a page is twice as long",
        ">> tl.load(side + 7)",
        ">> (tl.load(side + 7) + 1)",
        "test_layouts.py::test_split_pages[triton-on-cpu-(576, 8)-3]",
    ),
    _fault(
        "an element more than the row has is moved",
        "return col < tl.multiple_of(size",
        "return col <= tl.multiple_of(size",
        "test_bytes.py::test_widths[triton-on-cpu-5B]",
    ),
    _fault(
        "an element less than the row has is moved",
        "return col < tl.multiple_of(size, ALIGN // BYTES)",
        "return col < size - 1",
        "test_bytes.py::test_widths[triton-on-cpu-5B]",
    ),
    _fault(
        "the second program of a block moves the first one's chunks",
        "first = block + 16 + (part // PARTS) * CHUNKS",
        "first = block + 16",
        "test_bytes.py::test_widths_in_every_bucket[triton-on-cpu-17-1040B]",
    ),
    _fault(
        "every program moves the first part of its chunk",
        "col = (part % PARTS) * E + tl.arange(0, E)[None, :]",
        "col = tl.arange(0, E)[None, :]",
        "test_bytes.py::test_widths_in_every_bucket[triton-on-cpu-257-48B]",
    ),
    _fault(
        "the last chunk of a block is dropped",
        "    for c in tl.static_range(CHUNKS):\n        if CHUNKS > 1:",
        "    for c in tl.static_range(CHUNKS - 1):\n        if CHUNKS > 1:",
        "test_bytes.py::test_widths[triton-on-cpu-1024B]",
    ),
    _fault(
        "the last tile does not go through scratch",
        "for tile in range(pid, tiles, tl.num_programs(0))",
        "for tile in range(pid, tiles - 1, tl.num_programs(0))",
        "test_large.py::test_past_the_register_limit_past_2_31_bytes[triton-on-cpu]",
    ),
    _fault(
        "the last pairs do not go through scratch",
        "for start in range(0, n, R)",
        "for start in range(0, n - n % R, R)",
        "test_overlap.py::test_cycles_beyond_the_register_limit[triton-on-cpu-12B]",
    ),
    _fault(
        "rows share their place in scratch",
        "kept = tl.multiple_of(staged + (k.to(tl.int64) * E)",
        "kept = tl.multiple_of(staged + ((k - start).to(tl.int64) * E)",
        "test_overlap.py::test_cycles_beyond_the_register_limit[triton-on-cpu-12B]",
    ),
]

ACCEPT = [
    _fault(
        "accept_len does not count the root",
        "ok = ok & (j < length)",
        "ok = ok & (j <= length)",
        "test_accept.py::test_the_length_counts_the_root[triton-on-cpu]",
    ),
    _fault(
        "the last accepted entry stays behind",
        "ok = ok & (j < length)",
        "ok = ok & (j < length - 1)",
        "test_accept.py::test_the_length_counts_the_root[triton-on-cpu]",
    ),
    _fault(
        "an entry of -1 is a bad slot",
        "& (node != -1) & (~too_long)",
        "& (~too_long)",
        "test_accept.py::test_entries_of_minus_1_are_skipped[triton-on-cpu-S3]",
        errors=("IndexError",),
    ),
    _fault(
        "the window's offset is not subtracted",
        "node = node - request * window",
        "node = node",
        "test_accept.py::test_any_order_of_slots[triton-on-cpu]",
    ),
    _fault(
        "the window's offset is counted in entries",
        "node = node - request * window",
        "node = node - request * entries",
        "test_accept.py::test_any_order_of_slots[triton-on-cpu]",
    ),
    _fault(
        "a neighbour's first slot belongs to the window",
        "(node < window)",
        "(node <= window)",
        "test_dropped.py::test_accept_entries[triton-on-cpu-3-torch.int32]",
    ),
    _fault(
        "a neighbour's last slot belongs to the window",
        "(node >= 0)",
        "(node >= -1)",
        "test_dropped.py::test_accept_entries[triton-on-cpu-3-torch.int32]",
    ),
    _fault(
        "an entry without a target moves into the next window",
        "(node < window) & (j < window)",
        "(node < window)",
        "test_dropped.py::test_accepted_entries_beyond_the_window[triton-on-cpu]",
    ),
    _fault(
        "a negative length is padding",
        "too_long = (length > entries) | (length < 0)",
        "too_long = length > entries",
        "test_dropped.py::test_accept_lengths[triton-on-cpu--1]",
    ),
    _fault(
        "a length beyond the entries is cut to them",
        "too_long = (length > entries) | (length < 0)",
        "too_long = length < 0",
        "test_dropped.py::test_accept_lengths[triton-on-cpu-4]",
    ),
    _fault(
        "every entry of a row of a bad length counts",
        "skip = (~ok) & ((~too_long) | (j != 0))",
        "skip = (~ok) & (~too_long)",
        "test_dropped.py::test_accept_lengths[triton-on-cpu-4]",
    ),
    _fault(
        "accept_index is read as if it were dense",
        "at = request * index_row_stride + j * index_col_stride",
        "at = request * entries + j",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
    _fault(
        "accept_len is read as if it were dense",
        "accept_len + request * len_stride",
        "accept_len + request",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
    _fault(
        "windows are read as if they were dense",
        "row = out_cache_loc + request * loc_row_stride",
        "row = out_cache_loc + request * window",
        "test_accept.py::test_strided_inputs[triton-on-cpu]",
    ),
]

FAULTS = [*ORDER, *PAIRS, *MAPPINGS, *COUNTS, *PLACES, *ACCEPT]
