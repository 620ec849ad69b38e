"""The request table: rows, lengths, and refusals that write nothing."""

import pytest
import torch

from specpool.allocator import OutOfSlots
from specpool.request_table import RequestTable


def loc(*slots, dtype=torch.int64):
    return torch.tensor(slots, dtype=dtype)


def snapshot(table):
    return [
        table.slots.clone(),
        table.lengths.clone(),
        table.last_loc.clone(),
        torch.from_numpy(table._in_use.copy()),
        torch.from_numpy(table._held.nonzero()[0]),
    ]


def refuses(table, error, match, call):
    before = snapshot(table)
    with pytest.raises(error, match=match):
        call()
    assert all(map(torch.equal, before, snapshot(table)))


def test_rows_grow():
    table = RequestTable(3, 6, "cpu")
    a, b = table.alloc(2)
    table.append(a, loc(4, 5, 9))
    table.append([b, a], loc(1, 2, 7, dtype=torch.int32), [2, 1])
    assert table.slots.dtype == torch.int32
    assert table.slots.tolist() == [[4, 5, 9, 7, 0, 0], [1, 2, 0, 0, 0, 0], [0] * 6]
    assert table.lengths.tolist() == [4, 2, 0]
    assert table.last_loc.tolist() == [7, 2, -1]
    assert table.row(a).tolist() == [4, 5, 9, 7]
    assert table.row(a).data_ptr() == table.slots.data_ptr()


def test_a_row_that_gets_nothing_stays():
    table = RequestTable(2, 6, "cpu")
    rows = table.alloc(2)
    table.append(rows, loc(3), [1, 0])
    table.append(rows, loc(4, 5), [0, 2])
    assert table.last_loc.tolist() == [3, 5]
    table.append([], loc(), [])
    assert table.lengths.tolist() == [1, 2]


def test_freed_rows_are_0_and_reused_and_their_slots_come_back():
    table = RequestTable(3, 4, "cpu")
    rows = table.alloc(3)
    table.append(rows, loc(*range(1, 10)), [4, 3, 2])
    assert table.free([2, 0]).tolist() == [8, 9, 1, 2, 3, 4]
    assert table.slots.tolist() == [[0] * 4, [5, 6, 7, 0], [0] * 4]
    assert table.available == 2
    assert table.alloc() == [0]
    assert (table.lengths[0], table.last_loc[0]) == (0, -1)
    table.append(0, loc(1, 8))  # slots of a freed row may be in a row again
    assert table.free(1).tolist() == [5, 6, 7]


def test_a_row_that_would_overgrow_is_refused():
    """sglang#26972: the slice clamped, and the slots that did not fit leaked."""
    table = RequestTable(2, 4, "cpu")
    a, b = table.alloc(2)
    table.append(a, loc(1, 2, 3))
    refuses(
        table,
        ValueError,
        "row 0 has 3 tokens and would get 2 more, past max_context=4",
        lambda: table.append([b, a], loc(4, 5, 6), [1, 2]),
    )
    refuses(table, ValueError, "past max_context=4", lambda: table.check_room([a, b], [1, 5]))
    table.check_room([a, b], [1, 4])
    table.append(a, loc(4))


def test_what_is_refused_writes_nothing():
    table = RequestTable(3, 8, "cpu")
    a, b = table.alloc(2)
    table.append(a, loc(1, 2))
    for match, call in (
        ("row 2 is not in use", lambda: table.append(2, loc(5))),
        ("row -1 is not in use", lambda: table.append([-1, a], loc(5, 6), [1, 1])),
        ("row 3 is not in use", lambda: table.append(3, loc(5))),
        ("a row is named twice", lambda: table.append([a, a], loc(5, 6), [1, 1])),
        ("do not go to 2 rows", lambda: table.append([a, b], loc(5, 6, 7), [1, 1])),
        ("do not go to 2 rows", lambda: table.append([a, b], loc(5, 6))),
        ("do not go to 2 rows", lambda: table.append([a, b], loc(5, 6), [3, -1])),
        ("slot 0 is no slot", lambda: table.append([a, b], loc(5, 0), [1, 1])),
        ("slot -1 is no slot", lambda: table.append(a, loc(5, -1))),
        ("slot 2147483648 is no slot", lambda: table.append(a, loc(5, 2**31))),
        ("slot 2 is in a row", lambda: table.append(b, loc(5, 2))),
        ("slot 5 is given more than once", lambda: table.append([a, b], loc(5, 5), [1, 1])),
        ("row 2 is not in use", lambda: table.free([a, 2])),
        ("a row is named twice", lambda: table.free([a, a])),
        ("row 2 is not in use", lambda: table.row(2)),
    ):
        refuses(table, ValueError, match, call)
    refuses(table, TypeError, "integers", lambda: table.append(a, torch.tensor([1.5])))
    refuses(table, OutOfSlots, "2 rows asked for, 1 of 3 are free", lambda: table.alloc(2))


def test_sizes_that_are_refused():
    with pytest.raises(ValueError, match="requests must be at least 1"):
        RequestTable(0, 4, "cpu")
    with pytest.raises(TypeError, match="max_context must be an integer"):
        RequestTable(1, 4.5, "cpu")


def test_a_table_made_in_inference_mode_is_written_outside_of_it():
    with torch.inference_mode():
        table = RequestTable(1, 4, "cpu")
    (row,) = table.alloc()
    table.append(row, loc(3))
    with torch.inference_mode():
        table.append(row, loc(2))
    assert table.free(row).tolist() == [3, 2]
