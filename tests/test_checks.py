"""Which pairs move, worked out on the host; the messages have their tests in tests/moves."""

import pytest
import torch

from specpool.checks import PairCheck, bounds_key, check_accept
from specpool.rows import rows_from

CPU = torch.device("cpu")


def _rows(slots, mapping=None):
    return rows_from(torch.zeros(slots, 4), mapping=mapping, name="key")


def _pairs(placed) -> list[list[tuple[int, int]]]:
    return [list(zip(p.tgt.tolist(), p.src.tolist(), strict=True)) for p in placed.values()]


def _placed(check, tgt, src):
    return _pairs(check.pairs(torch.tensor(tgt), torch.tensor(src)))


def test_live_pairs_of_a_move():
    check = PairCheck(_rows(8))
    assert _placed(check, [0, -1, 3, 4, 7], [1, 2, -1, 4, 0]) == [[(0, 1), (7, 0)]]


def test_live_pairs_of_a_copy_keep_equal_slots():
    check = PairCheck(_rows(8), _rows(20))
    assert _placed(check, [4, -1, 2], [4, 2, 19]) == [[(4, 4), (2, 19)]]


def test_rows_of_the_same_bounds_are_judged_once():
    mapping = torch.arange(12)
    check = PairCheck(_rows(8) + _rows(8) + _rows(10) + _rows(12, mapping) + _rows(12, mapping))
    assert len(check.pairs(torch.tensor([1]), torch.tensor([2]))) == 3


def test_bounds_keys():
    one, two = torch.arange(12), torch.arange(12)
    (plain,), (other,), (a,), (b,) = _rows(8), _rows(9), _rows(8, one), _rows(8, two)
    (again,) = _rows(8, one)
    assert bounds_key(plain, plain) == bounds_key(*_rows(8), *_rows(8))
    assert bounds_key(a, a) == bounds_key(again, again)
    keys = {bounds_key(r, s) for r in (plain, other, a, b) for s in (plain, other, a, b)}
    assert len(keys) == 16


def test_pairs_behind_mappings():
    mapping = torch.tensor([0, 3, 0, 2, -1, 1])
    check = PairCheck(_rows(8) + _rows(4, mapping))
    plain, mapped = _placed(check, [1, 2, 3, 5, 0], [3, 1, 5, 4, 1])
    assert plain == [(1, 3), (2, 1), (3, 5), (5, 4), (0, 1)]
    assert mapped == [(3, 2), (2, 1)]


def test_duplicates_are_judged_before_mapping_over_live_pairs():
    mapping = torch.tensor([0, 3, 3, 2])
    check = PairCheck(_rows(4, mapping))
    check.pairs(torch.tensor([1, 1]), torch.tensor([3, -1]))
    check.pairs(torch.tensor([1, 1]), torch.tensor([3, 3]))
    with pytest.raises(ValueError, match="target 1 is given with sources 2 and 3"):
        check.pairs(torch.tensor([1, 1]), torch.tensor([2, 3]))


def test_the_smallest_rows_set_the_limit():
    check = PairCheck(_rows(8) + _rows(5))
    check.pairs(torch.tensor([4]), torch.tensor([0]))
    with pytest.raises(IndexError, match=r"slot 5; slots lie in \[0, 5\)"):
        check.pairs(torch.tensor([5]), torch.tensor([0]))


def test_the_mapping_sets_the_limit_of_mapped_rows():
    check = PairCheck(_rows(100) + _rows(4, torch.tensor([1, 2, 3])))
    with pytest.raises(IndexError, match=r"slot 3; slots lie in \[0, 3\)"):
        check.pairs(torch.tensor([3]), torch.tensor([0]))


def test_accepted_pairs():
    check = PairCheck(_rows(40))
    window = torch.tensor([[10, 11, 12], [20, 21, 22]])
    index = torch.tensor([[0, 2, -1, 7], [3, 4, 5, 99]])
    placed = check.accepted(window, index, torch.tensor([3, 3]))
    assert _pairs(placed) == [[(11, 12)]]


@pytest.mark.parametrize("shape", [(2, 6), (12,)], ids=str)
def test_windows_come_as_rows(shape):
    window = torch.arange(12).view(shape)
    index, length = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    assert check_accept(window, index, length, CPU).tolist() == window.view(2, 6).tolist()


def test_strided_flat_windows_are_not_copied():
    window = torch.arange(24)[::2]
    index, length = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    rows = check_accept(window, index, length, CPU)
    assert rows.tolist() == window.view(3, 4).tolist()
    assert rows.data_ptr() == window.data_ptr()
