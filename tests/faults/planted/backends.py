"""Faults in the backends without a kernel: PyTorch's and numpy's."""

from tests.faults.fault import planter

_move_reference = planter("kernels/specpool_kernels/move_reference.py", "tests/moves/")
_cpu = planter("specpool/cpu.py", "tests/moves/")

TORCH = [
    _move_reference(
        "rows move one after another",
        "            rows[to] = torch.where(some, sources[_place(sources, src)], rows[to])\n",
        "            for t, s in zip(tgt, src, strict=True):\n"
        "                rows[_place(rows, t)] = sources[_place(sources, s)]\n",
        "test_overlap.py::test_overlap[torch-on-cpu-slide_up_by_1]",
    ),
    _move_reference(
        "a pair that must not move writes row 0",
        "tgt = torch.where(live, tgt, torch.where(some, tgt.take(first), 0))",
        "tgt = torch.where(live, tgt, 0)",
        "test_overlap.py::test_overlap[torch-on-cpu-skipped_source]",
    ),
    _move_reference(
        "where no pair moves, row 0 is written",
        "rows[to] = torch.where(some, sources[_place(sources, src)], rows[to])",
        "rows[to] = sources[_place(sources, src)] + (~some).to(torch.uint8)",
        "test_overlap.py::test_overlap[torch-on-cpu-all_skipped]",
    ),
    _move_reference(
        "the window's offset is not subtracted",
        "torch.arange(bs, device=j.device)[:, None] * window",
        "torch.arange(bs, device=j.device)[:, None] * 0",
        "test_accept.py::test_any_order_of_slots[torch-on-cpu]",
    ),
    _move_reference(
        "the last accepted entry stays behind",
        "used = (j < length)",
        "used = (j < length - 1)",
        "test_accept.py::test_the_length_counts_the_root[torch-on-cpu]",
    ),
    _move_reference(
        "an entry that maps to 0 is slot 0",
        "return slot, live & (slot > 0)",
        "return slot, live & (slot >= 0)",
        "test_mappings.py::test_entries_of_0_or_less_skip_their_pair[torch-on-cpu-0]",
    ),
    _move_reference(
        "the slot behind the last is a source",
        "live = (src >= 0) & (src < source_limit)",
        "live = (src >= 0) & (src <= source_limit)",
        "test_dropped.py::test_the_smallest_rows_limit_the_slots[torch-on-cpu]",
    ),
    _move_reference(
        "every slot is the first of its page",
        'rounding_mode="floor"), slot % page_size',
        'rounding_mode="floor"), slot * 0',
        "test_layouts.py::test_split_pages[torch-on-cpu-(576, 8)-3]",
    ),
    _move_reference(
        "rows are counted once for each set of rows, not for each buffer",
        "live.sum() * len(tensors)",
        "live.sum() * len(group)",
        "test_layouts.py::test_split_pages[torch-on-cpu-(576, 8)-3]",
    ),
]

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
        error="IndexError",
    ),
    _cpu(
        "rows are counted in the first buffer alone",
        "tgt.size * len(group.tensors)",
        "tgt.size",
        "test_overlap.py::test_overlap[cpu-on-cpu-swap]",
    ),
]

FAULTS = [*TORCH, *CPU]
