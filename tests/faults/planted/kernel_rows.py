"""Faults in the kernels: the order of accesses, and where a row's bytes lie."""

from tests.faults.fault import planter

_move = planter("kernels/specpool_kernels/move.py", "tests/moves/")

ORDER = [
    _move(
        "no barrier between loads and stores",
        "tl.debug_barrier()  # no thread may store",
        "pass  # no thread may store",
        "test_order.py::test_moves_load_then_wait_then_store[triton-on-cpu-12]",
    ),
    _move(
        "no barrier between the passes through scratch",
        "            _end_pass(WAIT)",
        "            if store == 1:\n                _end_pass(WAIT)",
        "test_order.py::test_moves_through_scratch_wait_after_every_pass[triton-on-cpu]",
    ),
    _move(
        "no barrier between two tiles of a program's scratch",
        "            _end_pass(WAIT)",
        "            if store == 0:\n                _end_pass(WAIT)",
        "test_order.py::test_moves_through_scratch_wait_after_every_pass[triton-on-cpu]",
    ),
    _move(
        "programs share scratch",
        "own = scratch + pid.to(tl.int64) * n",
        "own = scratch + pid.to(tl.int64) * 0",
        "test_order.py::test_programs_share_no_scratch[triton-on-cpu]",
    ),
    _move(
        "a chunk is stored before the next one is loaded",
        "        values = values + (value,)\n",
        "        values = values + (value,)\n"
        "        if CHUNKS > 1:\n"
        "            to = _pointers(chunk, to_offset, col, ELEMENT, ALIGN)\n"
        "        tl.store(to, value, mask=mask)\n",
        "test_order.py::test_moves_load_then_wait_then_store[triton-on-cpu-12]",
    ),
]

PLACES = [
    _move(
        "a slot times its stride wraps at 2^31",
        "offset = wide * (tl.load(side + 4) // BYTES).to(tl.int32).to(tl.int64)",
        "offset = (wide * (tl.load(side + 4) // BYTES)) & 0x7FFFFFFF",
        "test_large.py::test_rows_past_2_31_bytes[triton-on-cpu-torch.int32-1021B]",
    ),
    _move(
        "a page times its gap wraps at 2^31",
        "offset += page.to(tl.int32).to(tl.int64) * gap",
        "offset += (page * gap) & 0x7FFFFFFF",
        "test_large.py::test_pages_past_2_31_bytes[triton-on-cpu-3-(1, 583)]",
    ),
    _move(
        "the gap between pages is ignored",
        "gap = (tl.load(side + 5) // BYTES)",
        "gap = (tl.load(side + 5) * 0)",
        "test_layouts.py::test_split_pages[triton-on-cpu-(576, 8)-3]",
    ),
    _move(
        "a page is twice as long",
        ">> tl.load(side + 7)",
        ">> (tl.load(side + 7) + 1)",
        "test_layouts.py::test_split_pages[triton-on-cpu-(576, 8)-3]",
    ),
    _move(
        "an element more than the row has is moved",
        "return col < tl.multiple_of(size",
        "return col <= tl.multiple_of(size",
        "test_bytes.py::test_widths[triton-on-cpu-5B]",
    ),
    _move(
        "an element less than the row has is moved",
        "return col < tl.multiple_of(size, ALIGN // BYTES)",
        "return col < size - 1",
        "test_bytes.py::test_widths[triton-on-cpu-5B]",
    ),
    _move(
        "the second program of a block moves the first one's chunks",
        "first = block + 16 + (part // PARTS) * CHUNKS",
        "first = block + 16",
        "test_bytes.py::test_widths_in_every_bucket[triton-on-cpu-17-1040B]",
    ),
    _move(
        "every program moves the first part of its chunk",
        "col = (part % PARTS) * E + tl.arange(0, E)[None, :]",
        "col = tl.arange(0, E)[None, :]",
        "test_bytes.py::test_widths_in_every_bucket[triton-on-cpu-257-48B]",
    ),
    _move(
        "the last chunk of a block is dropped",
        "    for c in tl.static_range(CHUNKS):\n        if CHUNKS > 1:",
        "    for c in tl.static_range(CHUNKS - 1):\n        if CHUNKS > 1:",
        "test_bytes.py::test_widths[triton-on-cpu-1024B]",
    ),
    _move(
        "the last tile does not go through scratch",
        "for tile in range(pid, tiles, tl.num_programs(0))",
        "for tile in range(pid, tiles - 1, tl.num_programs(0))",
        "test_large.py::test_past_the_register_limit_past_2_31_bytes[triton-on-cpu]",
    ),
    _move(
        "the last pairs do not go through scratch",
        "for start in range(0, n, R)",
        "for start in range(0, n - n % R, R)",
        "test_overlap.py::test_cycles_beyond_the_register_limit[triton-on-cpu-12B]",
    ),
    _move(
        "rows share their place in scratch",
        "kept = tl.multiple_of(staged + (k.to(tl.int64) * E)",
        "kept = tl.multiple_of(staged + ((k - start).to(tl.int64) * E)",
        "test_overlap.py::test_cycles_beyond_the_register_limit[triton-on-cpu-12B]",
    ),
]

FAULTS = [*ORDER, *PLACES]
