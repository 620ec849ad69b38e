"""Rows of draft nodes: against an oracle in Python lists, static, without reads or allocations."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from specpool.adapters.sglang.verify_rows import TreeBatch, TreeRows, row_bytes
from tests.adapters.allocations import Allocations

REQUESTS, WIDTH, DRAFTS = 5, 24, 5
TABLE = torch.arange(1000, 1000 + REQUESTS * WIDTH, dtype=torch.int32).view(REQUESTS, WIDTH)


def path(parents, node):
    return ([] if parents[node] < 0 else path(parents, parents[node])) + [node]


def batch_of(prefixes, trees, requests, padding=0):
    """A batch of trees, and behind it stale entries of as many padded requests."""
    drafts = len(trees[0])
    positions, mask = [], []
    for prefix, tree in zip(prefixes, trees, strict=True):
        for node in range(drafts):
            seen = path(tree, node)
            positions.append(prefix + len(seen) - 1)
            mask += [True] * prefix + [other in seen for other in range(drafts)]
    return TreeBatch(
        torch.tensor(requests + [REQUESTS - 1] * padding),
        torch.tensor(prefixes + [WIDTH - 1] * padding),
        torch.tensor(mask, dtype=torch.bool),
        torch.tensor(positions + [10**6] * (padding * drafts)),
        torch.arange(1, 1 + drafts * len(trees)) * 7,
    )


def expected(prefixes, trees, requests, slots):
    """Each node's row, as lists."""
    rows, drafts = [], len(trees[0])
    for r, (prefix, tree) in enumerate(zip(prefixes, trees, strict=True)):
        for node in range(drafts):
            own = [int(slots[r * drafts + other]) for other in path(tree, node)]
            rows.append(TABLE[requests[r], :prefix].tolist() + own)
    return rows


def read(bucket, count):
    return [
        row[:length].tolist()
        for row, length in zip(bucket.slots[:count], bucket.lens[:count].tolist(), strict=True)
    ]


def wrong(prefixes, trees, requests, rows=None, limit=WIDTH, padding=0):
    """Rows that are not the oracle's, padding included."""
    drafts = len(trees[0])
    rows = rows or TreeRows(TABLE, REQUESTS, DRAFTS)
    bucket = rows.bucket(len(trees) + padding, drafts)
    batch = batch_of(prefixes, trees, requests, padding)
    rows.write(bucket, batch, limit)
    live = len(trees) * drafts
    oracle = expected(prefixes, trees, requests, batch.out_cache_loc)
    oracle += [[0]] * (padding * drafts)
    return sum(a != b for a, b in zip(read(bucket, live + padding * drafts), oracle, strict=True))


@st.composite
def batches(draw):
    drafts = draw(st.integers(1, DRAFTS))
    live = draw(st.integers(1, REQUESTS - 1))
    # a further -1 is a node beside the root, at depth 0
    tree = st.tuples(*[st.integers(-1, node - 1) for node in range(drafts)]).map(list)
    return (
        draw(st.lists(st.integers(1, WIDTH - drafts), min_size=live, max_size=live)),
        draw(st.lists(tree, min_size=live, max_size=live)),
        draw(st.permutations(range(REQUESTS)))[:live],
        draw(st.integers(0, REQUESTS - live)),
    )


@given(batches(), batches())
@settings(max_examples=150)
def test_every_node_has_the_prefix_and_its_ancestors_whatever_was_there_before(first, second):
    rows = TreeRows(TABLE, REQUESTS, DRAFTS)
    for prefixes, trees, requests, padding in (first, second):
        limit = max(prefixes) + len(trees[0])
        assert wrong(prefixes, trees, requests, rows, limit, padding) == 0


def test_other_dtypes_of_the_engine_s_tensors():
    batch = batch_of([3], [[-1, 0]], [2])
    rows = TreeRows(TABLE, REQUESTS, DRAFTS)
    bucket = rows.bucket(1, 2)
    less = batch._replace(prefix=batch.prefix.int(), out_cache_loc=batch.out_cache_loc.int())
    rows.write(bucket, less, WIDTH)
    assert read(bucket, 2) == expected([3], [[-1, 0]], [2], batch.out_cache_loc)


@given(st.data())
@settings(max_examples=60)
def test_no_entry_outside_is_touched_whatever_the_tensors_hold(data):
    """Of the rows, of the table, of the mask; and no length exceeds the limit."""
    anything = st.sampled_from([-(2**40), -1, 0, 1, WIDTH - 1, WIDTH, 2**40])
    draw = lambda count: torch.tensor([data.draw(anything) for _ in range(count)])  # noqa: E731
    batch = TreeBatch(draw(2), draw(2), torch.ones(3, dtype=torch.bool), draw(6), draw(6).int())
    rows = TreeRows(TABLE, REQUESTS, DRAFTS)
    guarded = torch.full((rows.count + 2, WIDTH), -7, dtype=torch.int32)
    rows._slots = guarded[1:-1]
    bucket = rows.bucket(2, 3)
    rows.write(bucket, batch, 9)
    assert bucket.lens.min() >= 1
    assert bucket.lens.max() <= 9
    assert (guarded[0] == -7).all()
    assert (guarded[1 + 6 :] == -7).all()


def test_nothing_is_read_by_the_host():
    with FakeTensorMode() as mode:
        table = mode.from_tensor(TABLE)
        rows = TreeRows(table, REQUESTS, DRAFTS)
        batch = TreeBatch(*map(mode.from_tensor, batch_of([3, 9], [[-1, 0, 0]] * 2, [1, 2], 1)))
        bucket = rows.bucket(3, 3)
        rows.write(bucket, batch, WIDTH)
        assert bucket.slots.shape == (9, WIDTH)


def test_a_hundred_steps_of_changing_batches_allocate_nothing_and_stay_where_they_are():
    rows = TreeRows(TABLE, REQUESTS, DRAFTS)
    addresses, made = {}, []
    for i in range(100):
        drafts, live = 1 + i % DRAFTS, 1 + i % (REQUESTS - 1)
        prefixes = [1 + (i * 5 + r) % (WIDTH - drafts) for r in range(live)]
        tree = [-1, *[(i * node) % node for node in range(1, drafts)]]
        batch = batch_of(prefixes, [tree] * live, list(range(live)), padding=1)
        bucket = rows.bucket(live + 1, drafts)
        with Allocations() as allocations:
            rows.write(bucket, batch, max(prefixes) + drafts)
        made += allocations.operators
        addresses.setdefault(live + 1, set()).add(tuple(t.data_ptr() for t in bucket))
    assert made == []
    assert all(len(seen) == 1 for seen in addresses.values())


def test_the_count_of_allocations_sees_one():
    with Allocations() as allocations:
        torch.arange(3).add_(1)
        torch.zeros(3) + 1
    assert allocations.count == 3


@pytest.mark.parametrize(("requests", "drafts"), [(6, 5), (1, 6)])
def test_a_batch_beyond_the_rows_is_refused_with_the_numbers(requests, drafts):
    numbers = f"{requests} requests of {drafts} drafts need {requests * drafts} rows, and 25 .* 5"
    with pytest.raises(ValueError, match=numbers):
        TreeRows(TABLE, REQUESTS, DRAFTS).bucket(requests, drafts)


def test_bytes_of_rows():
    assert TreeRows(TABLE, REQUESTS, DRAFTS).nbytes == row_bytes(25, WIDTH) == 4 * 25 * WIDTH


def sees_its_elder(self, mask, prefix, drafts):
    seen = _RELATIVES(self, mask, prefix, drafts)
    node = torch.arange(1, drafts)
    seen[:, node, node - 1] = True
    return seen


def in_tree_order(self, batch, prefix, drafts, limit):
    place, loc = _PLACES(self, batch, prefix, drafts, limit)
    return place.copy_(prefix[:, None] + torch.arange(drafts)), loc


def prefix_for_total(self, bucket, batch, limit):
    drafts = batch.positions.shape[0] // batch.prefix.shape[0]
    _WRITE(self, bucket, batch._replace(prefix=batch.prefix - drafts), limit)


def stale_padding(self, bucket, batch, limit):
    lens, slots = bucket.lens.clone(), bucket.slots.clone()
    _WRITE(self, bucket, batch, limit)
    end = batch.out_cache_loc.shape[0]
    bucket.lens[end:], bucket.slots[end:] = lens[end:], slots[end:]


_RELATIVES, _PLACES, _WRITE = TreeRows._relatives, TreeRows._places, TreeRows.write


@pytest.mark.parametrize(
    ("method", "fault"),
    [
        (None, None),
        ("_relatives", sees_its_elder),
        ("_places", in_tree_order),
        ("write", prefix_for_total),
        ("write", stale_padding),
    ],
    ids=["none", "sibling", "tree order", "prefix for total", "stale padding"],
)
def test_planted_faults_are_caught(method, fault):
    tree = [-1, 0, 0, 1, 2]
    with patch.object(TreeRows, method, fault) if method else nullcontext():
        rows = TreeRows(TABLE, REQUESTS, DRAFTS)
        count = wrong([9, 7, 12], [tree] * 3, [2, 4, 1], rows)
        count += wrong([11, 8], [tree] * 2, [3, 0], rows, padding=1)
    assert (count > 0) == (fault is not None)
