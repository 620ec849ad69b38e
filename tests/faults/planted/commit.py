"""Faults in the bookkeeping of slots: allocator, request table, commit, branches."""

from tests.faults.fault import planter

_allocator = planter("specpool/allocator.py", "tests/test_allocator.py::")
_paging = planter("specpool/paging.py", "tests/test_allocator.py::")
_request_table = planter("specpool/request_table.py", "tests/test_allocator_table.py::")
_commit = planter("specpool/spec/commit.py", "tests/spec/")
_branches = planter("specpool/spec/branches.py", "tests/spec/test_commit_branches.py::")

SLOTS = [
    _allocator(
        "a page is free as soon as one of its slots is",
        "emptied = pages[self._live_in_page[pages] == 0]",
        "emptied = pages",
        "test_a_freed_window_comes_back_behind_the_kept_slots",
    ),
    _allocator(
        "a page that was emptied is lost",
        "self._free_count += len(emptied)",
        "self._free_count += len(emptied) - (len(emptied) > 0)",
        "test_a_freed_window_comes_back_behind_the_kept_slots",
    ),
    _allocator(
        "a slot may be freed twice",
        "bad = loc[~self._live[loc]]",
        "bad = loc[:0]",
        "test_a_double_free_is_refused",
    ),
    _allocator(
        "the dummy page is handed out",
        "np.arange(pages, 0, -1)",
        "np.arange(pages - 1, -1, -1)",
        "test_page_0_is_never_handed_out",
    ),
    _allocator(
        "a refused call keeps what it took",
        "        if needed > self._free_count:\n",
        "        if needed > self._free_count:\n            self._free_count = 0\n",
        "test_exhaustion_takes_nothing",
    ),
    _allocator(
        "a restored state leaves the pages taken since",
        "self._free_count = len(state._free_pages)",
        "self._free_count = min(self._free_count, len(state._free_pages))",
        "test_state_is_restored_any_number_of_times",
        error="ValueError",
    ),
    _paging(
        "a request begins a page though its last one has room",
        "continues = tail >= 0",
        "continues = tail < 0",
        "test_extend_fills_the_partial_page_first",
    ),
    _request_table(
        "a row's length does not grow",
        "length[row] += count",
        "length[row] += 0",
        "test_rows_grow",
    ),
    _request_table(
        "the last slot is another row's",
        "loc[(begin + count - 1)[some]]",
        "loc[begin[some]]",
        "test_rows_grow",
    ),
    _request_table(
        "a row may grow past its end",
        "bad = np.flatnonzero(length + count > self.max_context)",
        "bad = np.flatnonzero(length > self.max_context)",
        "test_a_row_that_would_overgrow_is_refused",
    ),
    _request_table(
        "a slot may be in two rows",
        "bad = slots[self.holds(slots)]",
        "bad = slots[:0]",
        "test_what_is_refused_writes_nothing",
    ),
    _request_table(
        "a freed row keeps its slots from others",
        "self._hold(slots.numpy(), False)",
        "self._hold(slots.numpy(), True)",
        "test_freed_rows_are_0_and_reused_and_their_slots_come_back",
        error="ValueError",
    ),
]

COMMIT = [
    _commit(
        "rejected slots are not freed",
        "    allocator.free(freed)\n",
        "",
        "test_commit.py::test_path_0_2_5_by_hand[cpu]",
    ),
    _commit(
        "the whole window is freed",
        "np.setdiff1d(step.window, kept, assume_unique=True)",
        "np.sort(step.window)",
        "test_commit.py::test_path_0_2_5_by_hand[cpu]",
    ),
    _commit(
        "the table is rewritten and nothing moves",
        'relocates = chosen == "move" and not np.array_equal(step.path, step.front)',
        "relocates = False",
        "test_commit.py::test_path_0_2_5_by_hand[cpu]",
    ),
    _commit(
        "rows move and the table names where they were",
        'kept = step.path if chosen == "remap" else step.front',
        "kept = step.path",
        "test_commit.py::test_path_0_2_5_by_hand[cpu]",
    ),
    _commit(
        "the draft's pool does not move",
        "for pool in pools:\n            pool.move_accepted",
        "for pool in pools[:1]:\n            pool.move_accepted",
        "test_commit.py::test_one_launch_each_and_none_where_nothing_relocates",
    ),
    _commit(
        "rows move though none relocates",
        'relocates = chosen == "move" and not np.array_equal(step.path, step.front)',
        'relocates = chosen == "move"',
        "test_commit.py::test_one_launch_each_and_none_where_nothing_relocates",
    ),
    _commit(
        "entries are counted from the batch's first window",
        "node = index[request, j] - request * size",
        "node = index[request, j] % size",
        "test_commit_refusals.py::test_bad_steps_are_refused",
    ),
    _commit(
        "pages may be remapped",
        'if mode == "remap" and allocator.page_size > 1:',
        'if mode == "remap" and allocator.page_size < 1:',
        "test_commit_refusals.py::test_remap_of_pages_is_refused_by_name",
    ),
    _commit(
        "a window of another page is committed",
        "        _check_pages(step, table, allocator)\n",
        "",
        "test_commit_refusals.py::test_windows_that_do_not_continue_their_pages",
    ),
    _commit(
        "pools are judged when they have moved",
        "        check_pools(pools, allocator.slot_limit, out_cache_loc.device)\n",
        "",
        "test_commit_refusals.py::test_bad_moves_are_refused",
    ),
    _branches(
        "the prefix's tail is not copied to the last branch",
        "target = branches[:, 1:, :1] +",
        "target = branches[:, 1:-1, :1] +",
        "test_prefix_7_page_4_topk_8_copies_21_rows",
    ),
    _branches(
        "the prefix's tail is copied a slot too early",
        "source = torch.where(place < 0, last[:, None] + 1 + place, -1)",
        "source = torch.where(place < 0, last[:, None] + place, -1)",
        "test_prefix_7_page_4_topk_8_copies_21_rows",
    ),
]

FAULTS = [*SLOTS, *COMMIT]
