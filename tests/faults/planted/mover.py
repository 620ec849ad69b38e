"""Faults in rows, in what is checked of a call, and in the mover."""

from tests.faults.fault import planter

_rows = planter("specpool/rows.py", "tests/test_rows.py::")
_disjoint = planter("specpool/disjoint.py", "tests/test_rows.py::")
_checks = planter("specpool/checks.py", "tests/")
_mover = planter("specpool/mover.py", "tests/")

ROWS = [
    _rows(
        "heads lie a token apart",
        "offset=h * head,",
        "offset=h * token,",
        "test_hnd",
    ),
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
        error="ValueError",
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
    _disjoint(
        "rows that share bytes are not noticed",
        "        if start < end:",
        "        if start < end - 256:",
        "test_shared_bytes_are_refused_by_name",
    ),
    _disjoint(
        "rows of a page that share bytes are not noticed",
        "if len(together) > 1:",
        "if len(together) > 2:",
        "test_heads_that_share_bytes_are_refused",
    ),
]

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
        error="ValueError",
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
        error="IndexError",
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
        error="IndexError",
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

FAULTS = [*ROWS, *CHECKS, *MOVER]
