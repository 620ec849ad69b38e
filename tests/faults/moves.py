"""Faults beside the kernels: table, plan, launch, the other backends, rows, checks, mover."""

from tests.faults.fault import WRONG, Fault

KERNELS = "kernels/specpool_kernels"


def _fault(
    file: str,
    name: str,
    was: str,
    becomes: str,
    test: str,
    errors: tuple[str, ...] = WRONG,
) -> Fault:
    return Fault(name, file, was, becomes, (f"tests/{test}",), "triton-on-cpu" in test, errors)


def _table(name: str, was: str, becomes: str, test: str) -> Fault:
    return _fault(f"{KERNELS}/table.py", name, was, becomes, test)


TABLE = [
    _table(
        "every buffer has the first one's width",
        "for at in range(0, row.width, step)",
        "for at in range(0, rows[0].width, step)",
        "moves/test_field_cases.py::test_the_first_width_is_not_everyones[triton-on-cpu]",
    ),
    _table(
        "the last chunk of a row is as wide as the others",
        "min(step, row.width - at)",
        "step",
        "kernels/test_table.py::test_chunks_cover_each_row_once[100]",
    ),
    _table(
        "a block holds a chunk less than its program moves",
        "part = all_chunks[at : at + CHUNKS]",
        "part = all_chunks[at : at + CHUNKS - 1]",
        "kernels/test_table.py::test_chunks_cover_each_row_once[1000]",
    ),
    _table(
        "chunks of one buffer alone share a block",
        "return cls(rows.slots, mapping, rows.token_stride, rows.page_gap, page_size)",
        "return cls(rows.slots, mapping + rows.address, rows.token_stride, rows.page_gap, 1)",
        "kernels/test_table.py::test_chunks_of_several_layers_share_a_block",
    ),
    _table(
        "the access is chosen without the rows' address",
        "bits = rows.address | sources.address | rows.width",
        "bits = sources.address | rows.width",
        "kernels/test_table.py::test_the_access_of_a_copy_suits_both_sides",
    ),
    _table(
        "the access is chosen without the rows' width",
        "bits = rows.address | sources.address | rows.width",
        "bits = rows.address | sources.address",
        "kernels/test_table.py::test_the_widest_access_that_width_stride_and_base_allow[60-64-0-1]",
    ),
    _table(
        "the access of a copy is chosen without its targets' strides",
        "bits |= mine.token_stride | mine.page_gap",
        "bits |= mine.page_gap",
        "kernels/test_table.py::test_the_access_of_a_copy_suits_the_strides_of_both_sides",
    ),
    _table(
        "the division by the page size rounds down",
        "return ((1 << (31 + bits)) + page_size - 1) // page_size, 31 + bits",
        "return (1 << (31 + bits)) // page_size, 31 + bits",
        "kernels/test_table.py::test_page_division_is_exact_for_every_small_slot[3]",
    ),
    _table(
        "the largest rows limit the locs",
        "limit = min(r.loc_limit for r, _ in pairs)",
        "limit = max(r.loc_limit for r, _ in pairs)",
        "moves/test_dropped.py::test_the_smallest_rows_limit_the_slots[triton-on-cpu]",
    ),
    _table(
        "the largest sources limit the locs of a copy",
        "source_limit = min(s.loc_limit for _, s in pairs)",
        "source_limit = max(s.loc_limit for _, s in pairs)",
        "moves/test_dropped.py::test_the_smallest_rows_limit_the_slots_of_a_copy[triton-on-cpu]",
    ),
    _table(
        "every block counts bad slots",
        "flags = 0 if blocks else COUNT_BAD_LOCS",
        "flags = COUNT_BAD_LOCS",
        "kernels/test_table.py::test_one_block_counts_for_all_rows_of_the_same_bounds",
    ),
    _table(
        "a copy's table is mapped only where its targets are",
        "mapped=any(g.rows.mapping or g.sources.mapping for g in groups)",
        "mapped=any(g.rows.mapping for g in groups)",
        "moves/test_copy.py::test_mappings_of_both_sides[triton-on-cpu]",
    ),
]

PLAN = [
    _fault(
        f"{KERNELS}/plan.py",
        "a bucket takes a pair more than it holds",
        "if pairs <= rows:",
        "if pairs <= rows + 1:",
        "kernels/test_plan.py::test_a_move_takes_the_smallest_bucket_that_holds_it[17-64]",
    ),
    _fault(
        f"{KERNELS}/plan.py",
        "windows are counted to the grid without their padding",
        "requests <= rows // padded(entries) * _GRID_Y",
        "requests <= rows // entries * _GRID_Y",
        "kernels/test_plan.py::test_requests_share_a_program_while_their_windows_fit",
    ),
    _fault(
        f"{KERNELS}/plan.py",
        "a window is laid out in fewer entries than it has",
        "return 1 << max(0, entries - 1).bit_length()",
        "return 1 << entries.bit_length() - 1",
        "kernels/test_plan.py::test_padded_is_the_next_power_of_two",
    ),
    _fault(
        f"{KERNELS}/plan.py",
        "programs through scratch are not fewer when pairs are many",
        "fit = MAX_SCRATCH // (pairs * STAGED_BYTES)",
        "fit = MAX_SCRATCH",
        "kernels/test_plan.py::test_scratch_at_most_64_mib_with_fewer_programs",
    ),
    _fault(
        f"{KERNELS}/plan.py",
        "the form through scratch is not warmed up",
        "staged = [move_variant(max_pairs)] if max_pairs > MAX_PAIRS else []",
        "staged = []",
        "kernels/test_plan.py::test_variants_hold_the_bucket_just_above_a_limit[4096]",
    ),
    _fault(
        f"{KERNELS}/launch.py",
        "locs of two dimensions are read by their first row's stride",
        "shape = (1, *loc.shape) if loc.dim() == 1 else loc.shape",
        "shape = (1, loc.numel())",
        "kernels/test_launch.py::test_one_and_two_dimensions_are_read_in_place",
    ),
]


def _torch(name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG) -> Fault:
    return _fault(f"{KERNELS}/move_reference.py", name, was, becomes, f"moves/{test}", errors)


TORCH = [
    _torch(
        "rows move one after another",
        "            rows[to] = torch.where(some, sources[_place(sources, src)], rows[to])\n",
        "            for t, s in zip(tgt, src, strict=True):\n"
        "                rows[_place(rows, t)] = sources[_place(sources, s)]\n",
        "test_overlap.py::test_overlap[torch-on-cpu-slide_up_by_1]",
    ),
    _torch(
        "a pair that must not move writes row 0",
        "tgt = torch.where(live, tgt, torch.where(some, tgt[first], 0))",
        "tgt = torch.where(live, tgt, 0)",
        "test_overlap.py::test_overlap[torch-on-cpu-skipped_source]",
    ),
    _torch(
        "where no pair moves, row 0 is written",
        "rows[to] = torch.where(some, sources[_place(sources, src)], rows[to])",
        "rows[to] = sources[_place(sources, src)] + (~some).to(torch.uint8)",
        "test_overlap.py::test_overlap[torch-on-cpu-all_skipped]",
    ),
    _torch(
        "the window's offset is not subtracted",
        "torch.arange(bs, device=j.device)[:, None] * window",
        "torch.arange(bs, device=j.device)[:, None] * 0",
        "test_accept.py::test_any_order_of_slots[torch-on-cpu]",
    ),
    _torch(
        "the last accepted entry stays behind",
        "used = (j < length)",
        "used = (j < length - 1)",
        "test_accept.py::test_the_length_counts_the_root[torch-on-cpu]",
    ),
    _torch(
        "an entry that maps to 0 is slot 0",
        "return slot, live & (slot > 0)",
        "return slot, live & (slot >= 0)",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[torch-on-cpu-0]",
    ),
    _torch(
        "the slot behind the last is a source",
        "live = (src >= 0) & (src < source_limit)",
        "live = (src >= 0) & (src <= source_limit)",
        "test_dropped.py::test_the_smallest_rows_limit_the_slots[torch-on-cpu]",
    ),
    _torch(
        "every slot is the first of its page",
        'rounding_mode="floor"), slot % page_size',
        'rounding_mode="floor"), slot * 0',
        "test_layouts.py::test_split_pages[torch-on-cpu-(576, 8)-3]",
    ),
    _torch(
        "rows are counted once for each set of rows, not for each buffer",
        "live.sum() * len(tensors)",
        "live.sum() * len(group)",
        "test_layouts.py::test_split_pages[torch-on-cpu-(576, 8)-3]",
    ),
]


def _cpu(name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG) -> Fault:
    return _fault("specpool/cpu.py", name, was, becomes, f"moves/{test}", errors)


CPU = [
    _cpu(
        "pairs move in chunks of 256",
        "                    rows[to] = sources[at]\n",
        "                    for i in range(0, tgt.size, 256):\n"
        "                        at = _place(src[i : i + 256], source_page)\n"
        "                        rows[_place(tgt[i : i + 256], page)] = sources[at]\n",
        "test_field_cases.py::test_overlap_across_chunks[cpu-on-cpu-257]",
    ),
    _cpu(
        "the last pair does not move",
        "to, at = _place(tgt, page), _place(src, source_page)",
        "to, at = _place(tgt[:-1], page), _place(src[:-1], source_page)",
        "test_overlap.py::test_overlap[cpu-on-cpu-swap]",
    ),
    _cpu(
        "rows lie as close as they are wide",
        "memory, rows.start, (rows.token_stride,))",
        "memory, rows.start, (rows.width,))",
        "test_bytes.py::test_bytes_between_strided_rows_stay[cpu-on-cpu-16B-4]",
    ),
    _cpu(
        "pages lie as close as their slots are many",
        "(rows.page_stride, rows.token_stride)",
        "(rows.page_size * rows.token_stride, rows.token_stride)",
        "test_layouts.py::test_split_pages[cpu-on-cpu-(576, 8)-3]",
    ),
    _cpu(
        "rows start where their tensor's storage does",
        "memory, rows.start, (rows.token_stride,))",
        "memory, rows.offset, (rows.token_stride,))",
        "test_overlap.py::test_overlap[cpu-on-cpu-one]",
    ),
    _cpu(
        "sources are placed by the targets' pages",
        "_place(src, source_page)",
        "_place(src, page)",
        "test_copy.py::test_pools_of_different_sizes_strides_and_layouts[cpu-on-cpu]",
        errors=("IndexError",),
    ),
    _cpu(
        "rows are counted in the first buffer alone",
        "tgt.size * len(group.tensors)",
        "tgt.size",
        "test_overlap.py::test_overlap[cpu-on-cpu-swap]",
    ),
]


def _rows(name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG) -> Fault:
    return _fault("specpool/rows.py", name, was, becomes, f"test_rows.py::{test}", errors)


ROWS = [
    _rows("heads lie a token apart", "offset=h * head,", "offset=h * token,", "test_hnd"),
    _rows(
        "the parts of a page lie a row apart",
        "offset += page_size * width",
        "offset += width",
        "test_page_split",
    ),
    _rows(
        "the stride of pages is counted in elements",
        "stride = tensor.stride(0) * tensor.element_size()\n    if not stride",
        "stride = tensor.stride(0)\n    if not stride",
        "test_page_split_counts_bytes_whatever_the_dtype",
        errors=("ValueError",),
    ),
    _rows(
        "slots lie as close as their rows are wide",
        "stride = tensor.stride(0) * item if tensor.shape[0] > 1 else width",
        "stride = width",
        "test_nhd_strided",
    ),
    _rows(
        "a tensor starts where its storage does",
        "return int(self.tensor.storage_offset()) * self.tensor.element_size() + self.offset",
        "return self.offset",
        "test_views_share_memory_and_start_inside_a_storage",
    ),
    _rows(
        "as many locs as slots, whatever the mapping",
        "return self.slots if self.mapping is None else self.mapping.numel()",
        "return self.slots",
        "test_rows_keep_the_mapping",
    ),
    _rows(
        "rows may end behind their tensor",
        "if self.end > self.address + _span(self.tensor) - self.offset:",
        "if self.end > self.address + _span(self.tensor) + 8 - self.offset:",
        "test_rows_may_end_with_the_tensor_but_not_with_its_storage",
    ),
    _rows(
        "freed memory is not noticed",
        "if self.start + self.end - self.address > held:",
        "if held > self.start + self.end:",
        "test_freed_tensors_are_refused",
    ),
    _fault(
        "specpool/disjoint.py",
        "rows that share bytes are not noticed",
        "        if start < end:",
        "        if start < end - 256:",
        "test_rows.py::test_shared_bytes_are_refused_by_name",
    ),
    _fault(
        "specpool/disjoint.py",
        "rows of a page that share bytes are not noticed",
        "if len(together) > 1:",
        "if len(together) > 2:",
        "test_rows.py::test_heads_that_share_bytes_are_refused",
    ),
]


def _checks(name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG) -> Fault:
    return _fault("specpool/checks.py", name, was, becomes, test, errors)


CHECKS = [
    _checks(
        "a target with two sources is not refused",
        "        _check_duplicates(tgt, src)\n",
        "",
        "test_checks.py::test_duplicates_are_judged_before_mapping_over_live_pairs",
    ),
    _checks(
        "a target that is given twice is refused, though its source is the same",
        "bad = np.flatnonzero(same & (src[order][1:] != src[order][:-1]))",
        "bad = np.flatnonzero(same)",
        "moves/test_overlap.py::test_overlap[cpu-on-cpu-repeated_pair]",
        errors=("ValueError",),
    ),
    _checks(
        "a bad target is not refused",
        '        _check_range("tgt_loc", tgt, self._limit)\n',
        "",
        "moves/test_bad_input.py::test_slots_outside[cpu-on-cpu-tgt_loc-12]",
    ),
    _checks(
        "a bad source is not refused",
        '        _check_range("src_loc", src, self._source_limit)\n',
        "",
        "moves/test_bad_input.py::test_slots_outside[cpu-on-cpu-src_loc--2]",
    ),
    _checks(
        "the slot behind the last is a slot",
        "int(loc.view(np.uint64).max()) < limit",
        "int(loc.view(np.uint64).max()) <= limit",
        "test_checks.py::test_the_smallest_rows_set_the_limit",
    ),
    _checks(
        "the largest rows limit the locs",
        "self._limit = min(r.loc_limit for r in rows)",
        "self._limit = max(r.loc_limit for r in rows)",
        "test_checks.py::test_the_mapping_sets_the_limit_of_mapped_rows",
    ),
    _checks(
        "a bad entry of a mapping is not refused",
        '            _check_range(f"the mapping of {row.name}", to, row.slots)\n',
        "",
        "moves/test_mappings.py::test_bad_entries_raise_before_anything_moves[cpu-on-cpu]",
    ),
    _checks(
        "an entry of a neighbour's window is not refused",
        "bad = np.flatnonzero((node < 0) | (node >= size))",
        "bad = np.flatnonzero(node < 0)",
        "moves/test_bad_input.py::test_accept_entries_outside_their_window",
    ),
    _checks(
        "more entries than the window has slots are not refused",
        "most = min(entries, size)",
        "most = entries",
        "moves/test_bad_input.py::test_accept_lengths_beyond_the_window[cpu-on-cpu]",
    ),
    _checks(
        "a slot in two windows is not refused",
        "if len(length) > 1:",
        "if len(length) > 2:",
        "moves/test_windows.py::test_a_slot_in_two_windows_is_refused[cpu-on-cpu]",
    ),
    _checks(
        "a target that maps to 0 is slot 0",
        "live &= to > 0",
        "live &= to >= 0",
        "test_checks.py::test_pairs_behind_mappings",
    ),
    _checks(
        "a source that maps to 0 is slot 0",
        "live &= at > 0",
        "live &= at >= 0",
        "moves/test_mappings.py::test_entries_of_0_or_less_skip_their_pair[cpu-on-cpu-0]",
    ),
    _checks(
        "a copy skips equal slots",
        "np.ones(len(to), dtype=bool) if self._copies else to != at",
        "to != at",
        "test_checks.py::test_live_pairs_of_a_copy_keep_equal_slots",
    ),
    _checks(
        "rows behind different mappings have the same live pairs",
        "return rows.slots, mapping, sources.slots, source_mapping",
        "return rows.slots, mapping != 0, sources.slots, source_mapping != 0",
        "test_checks.py::test_bounds_keys",
    ),
]


def _mover(name: str, was: str, becomes: str, test: str, errors: tuple[str, ...] = WRONG) -> Fault:
    return _fault("specpool/mover.py", name, was, becomes, test, errors)


MOVER = [
    _mover(
        "replaced memory is not noticed",
        "!= self._addresses:",
        "== []:",
        "moves/test_modes.py::test_replaced_memory_is_followed[cpu-on-cpu-set_]",
    ),
    _mover(
        "what is attached does not move",
        "rows = [*own, *(r for group in attached.values() for r in group)]",
        "rows = [*own]",
        "test_mover.py::test_attached_tensors_move_in_the_same_launch",
    ),
    _mover(
        "attaching a tensor detaches the others",
        "self._build(self._own, {**self._attached, name: added})",
        "self._build(self._own, {name: added})",
        "moves/test_field_cases.py::"
        "test_other_captures_keyed_by_slot_move_in_the_same_launch[cpu-on-cpu]",
    ),
    _mover(
        "replaced rows lose what is attached",
        "self._build(list(rows), self._attached)",
        "self._build(list(rows), {})",
        "test_mover.py::test_replaced_rows_keep_what_is_attached_and_counted",
    ),
    _mover(
        "a move counts as two launches",
        "        moves.move(tgt_loc, src_loc)\n        self.launches += 1\n\n    def move_accepted",
        "        moves.move(tgt_loc, src_loc)\n        self.launches += 2\n\n    def move_accepted",
        "moves/test_overlap.py::test_overlap[cpu-on-cpu-one]",
    ),
    _mover(
        "an empty call is a launch",
        "        if tgt_loc.numel() == 0:\n            return\n        moves, judge",
        "        moves, judge",
        "moves/test_overlap.py::test_empty_calls_launch_nothing[cpu-on-cpu]",
    ),
    _mover(
        "a call is judged when it has moved",
        "            judge.accepted(window, accept_index, accept_len)\n"
        "        moves.move_accepted(window, accept_index, accept_len)\n",
        "            moves.move_accepted(window, accept_index, accept_len)\n"
        "            judge.accepted(window, accept_index, accept_len)\n"
        "        moves.move_accepted(window, accept_index, accept_len)\n",
        "moves/test_bad_input.py::test_windows_that_share_a_target[torch-on-cpu]",
    ),
    _mover(
        "a call that is not judged by its backend is not judged",
        'wanted = name != "cpu" and (on_cpu or self._checks_values)',
        "wanted = False",
        "moves/test_bad_input.py::test_targets_with_different_sources",
    ),
    _mover(
        "dropped pairs are told again and again",
        "            self._counters[0] = 0\n",
        "",
        "moves/test_dropped.py::test_all_bad_moves_nothing[torch-on-cpu]",
        errors=("IndexError",),
    ),
    _mover(
        "rows may change once a graph holds them",
        "        self._captured = True\n",
        "",
        "test_mover_capture.py::test_rows_stay_once_captured",
    ),
    _mover(
        "values are read while a graph is captured",
        "return _Service(self._service.moves, None)",
        "return self._service",
        "test_mover_capture.py::test_values_are_not_read_during_a_capture",
        errors=("IndexError",),
    ),
    _mover(
        "scratch is not reserved for rows that come later",
        "        if self._reserved:\n            moves.reserve(self._reserved)\n",
        "",
        "test_backends.py::test_what_was_reserved_is_reserved_for_rows_attached_later",
    ),
    _mover(
        "a copy goes on from rows that were replaced",
        "if known is None or known[0] is not other._rows:",
        "if known is None:",
        "moves/test_copy.py::test_a_source_that_changed_its_rows_is_followed[cpu-on-cpu]",
    ),
]

FAULTS = [*TABLE, *PLAN, *TORCH, *CPU, *ROWS, *CHECKS, *MOVER]
