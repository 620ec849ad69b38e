"""Faults in what the kernels are given: the table, the plan, the locs."""

from tests.faults.fault import planter

_table = planter("kernels/specpool_kernels/table.py", "tests/")
_plan = planter("kernels/specpool_kernels/plan.py", "tests/kernels/test_plan.py::")
_launch = planter("kernels/specpool_kernels/launch.py", "tests/kernels/test_launch.py::")

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
    _plan(
        "a bucket takes a pair more than it holds",
        "if pairs <= rows:",
        "if pairs <= rows + 1:",
        "test_a_move_takes_the_smallest_bucket_that_holds_it[17-64]",
    ),
    _plan(
        "windows are counted to the grid without their padding",
        "requests <= rows // padded(entries) * _GRID_Y",
        "requests <= rows // entries * _GRID_Y",
        "test_requests_share_a_program_while_their_windows_fit",
    ),
    _plan(
        "a window is laid out in fewer entries than it has",
        "return 1 << max(0, entries - 1).bit_length()",
        "return 1 << entries.bit_length() - 1",
        "test_padded_is_the_next_power_of_two",
    ),
    _plan(
        "programs through scratch are not fewer when pairs are many",
        "fit = MAX_SCRATCH // (pairs * STAGED_BYTES)",
        "fit = MAX_SCRATCH",
        "test_scratch_at_most_64_mib_with_fewer_programs",
    ),
    _plan(
        "the form through scratch is not warmed up",
        "staged = [move_variant(max_pairs)] if max_pairs > MAX_PAIRS else []",
        "staged = []",
        "test_variants_hold_the_bucket_just_above_a_limit[4096]",
    ),
    _launch(
        "locs of two dimensions are read as one row",
        "return loc, loc.shape[1], row_stride, col_stride",
        "return loc, loc.numel(), row_stride, col_stride",
        "test_one_and_two_dimensions_are_read_in_place",
    ),
]

FAULTS = [*TABLE, *PLAN]
