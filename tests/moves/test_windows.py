"""Windows of one call are disjoint; the cpu backend and every validated call look."""

import pytest
import torch

from specpool.mover import RowMover
from specpool.rows import rows_from


def _mover(on):
    key = torch.arange(40.0, device=on.device).view(20, 2)
    return key, RowMover(rows_from(key, name="key"), backend=on.backend)


def test_a_slot_in_two_windows_is_refused(checked):
    """One request's source is another's target: on a GPU the order of the two would be chance."""
    on = checked
    key, mover = _mover(on)
    before = key.clone()
    window = on.loc([[1, 2, 3], [3, 4, 5]])
    index = on.loc([[0, 2, -1], [3, 5, -1]], torch.int32)
    mover_call = (window, index, on.loc([2, 2], torch.int32))
    with pytest.raises(ValueError, match="slot 3 is in the windows of requests 0 and 1"):
        mover.move_accepted(*mover_call)
    assert torch.equal(key, before)
    assert mover.launches == 0


def test_a_slot_that_two_windows_name_but_do_not_use_is_fine(on):
    key, mover = _mover(on)
    window = on.loc([[1, 2, 3, 0], [4, 5, 6, 0]])
    index = on.loc([[0, 2], [4, 6]], torch.int32)
    mover.move_accepted(window, index, on.loc([2, 2], torch.int32))
    assert key[[2, 5], 0].tolist() == [6, 12]


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)], ids=str)
def test_lengths_without_entries_are_refused(on, shape):
    if not on.validates:
        pytest.skip("a GPU's lengths are not read where there are no entries: nothing moves")
    _, mover = _mover(on)
    entries, slots = shape
    index = torch.full((1, entries), -1, dtype=torch.int32)
    with pytest.raises(ValueError, match="accept_len counts entries, but"):
        mover.move_accepted(torch.arange(slots)[None], index, torch.tensor([2]))
