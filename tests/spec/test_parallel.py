"""One rank's accept reaches all, and ranks that are not at the same step learn it at once, over
real processes.
"""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from specpool.spec import Accept, DraftTree
from specpool.spec.parallel import RanksDisagree, broadcast_accept, check_agreement
from tests.spec.parallel_ranks import Ranks

WORLD = 3
AT_ONCE = 20  # seconds; what waits for a timeout waits for 60


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(WORLD, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def the_tree(chains=((1, 2), (3,)), roots=(7, 8), width=5, steps=3):
    chains = [[list(chain) for chain in chains]] * len(roots)
    return DraftTree.from_chains(list(roots), chains, width, steps=steps)


def the_step(**changes):
    step = {
        "tree": the_tree(),
        "requests": [4, 2],
        "out_cache_loc": torch.arange(10, 20).view(2, 5),
        "step": 6,
        "group": None,
        "src": 1,
    }
    return {**step, **changes}


def the_accept(first=1):
    """An answer whose numbers tell whose it is, with a row of NaN."""
    return Accept(
        accept_index=torch.tensor([[0, first, 3, -1], [5, -1, -1, -1]], dtype=torch.int32),
        accept_len=torch.tensor([3, 1], dtype=torch.int32),
        bonus=torch.tensor([2**40 + first, -1]),
        nan=torch.tensor([False, True]),
    )


def own_accepts(rank, world):
    """Each rank gives an answer of its own; what comes back, and its dtypes."""
    accept = broadcast_accept(the_accept(first=rank), **the_step())
    empty = Accept(
        torch.empty(0, 2, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0, dtype=torch.int64),
        torch.empty(0, dtype=torch.bool),
    )
    none = torch.empty(0, 1, dtype=torch.int64)
    tree = DraftTree(none, none.int(), none[:, 0].int(), 1)
    nothing = broadcast_accept(empty, tree, [], none, step=7)
    assert [t.shape for t in nothing] == [t.shape for t in empty]
    return [t.tolist() for t in accept], [t.dtype for t in accept]


def test_every_rank_has_the_answer_of_the_one_that_decides(ranks):
    expected = the_accept(first=1)
    values = [t.tolist() for t in expected], [t.dtype for t in expected]
    assert ranks.run(WORLD, own_accepts) == [values] * WORLD


def in_a_group(rank, world):
    group = dist.new_group([0, 2])
    try:
        accept = broadcast_accept(the_accept(rank), **the_step(group=group))
    except ValueError as error:
        return str(error)
    return int(accept.bonus[0]) - 2**40


def test_src_counts_within_the_group(ranks):
    outside = "this process is not in the group; only the group's ranks take part"
    assert ranks.run(WORLD, in_a_group) == [2, outside, 2]


CHANGES = {
    "step": (lambda: {"step": 7}, "step (7, not 6)"),
    "root": (lambda: {"tree": the_tree(roots=(7, 9))}, "tree"),
    "order of trees": (lambda: {"tree": the_tree(roots=(8, 7))}, "tree"),
    "parents": (lambda: {"tree": the_tree(((1,), (3, 2)))}, "tree"),
    "depth": (lambda: {"tree": the_tree(steps=2)}, "tree steps (2, not 3)"),
    "batch": (
        lambda: {
            "tree": the_tree(roots=(7,)),
            "requests": [4],
            "out_cache_loc": torch.arange(10, 15),
        },
        "batch size (1, not 2), tree, requests, out_cache_loc",
    ),
    "width": (
        lambda: {"tree": the_tree(width=4), "out_cache_loc": torch.arange(10, 18)},
        "num_draft_tokens (4, not 5), tree, out_cache_loc",
    ),
    "requests": (lambda: {"requests": [2, 4]}, "requests"),
    "slot": (lambda: {"out_cache_loc": torch.arange(11, 21).view(2, 5)}, "out_cache_loc"),
    "order of slots": (
        lambda: {"out_cache_loc": torch.arange(19, 9, -1).view(2, 5)},
        "out_cache_loc",
    ),
    "src": (lambda: {"src": 0}, "src (0, not 1)"),
}


def differing(rank, world, odd):
    """Rank ``odd`` differs in one thing after another; what each rank is told of each."""
    told = {}
    for name, (changed, _) in CHANGES.items():
        step = the_step(**(changed() if rank == odd else {}))
        bs = step["tree"].batch_size
        accept = Accept(*(t[:bs] for t in the_accept()))
        accept = accept._replace(accept_index=accept.accept_index[:, : step["tree"].steps + 1])
        with pytest.raises(RanksDisagree) as caught:
            broadcast_accept(accept, **step)
        told[name] = str(caught.value)
        del step["src"]
        if name != "src":
            with pytest.raises(RanksDisagree) as caught:
                check_agreement(**step)
            assert str(caught.value) == told[name]
    check_agreement(**{k: v for k, v in the_step().items() if k != "src"})
    broadcast_accept(the_accept(), **the_step())  # the group is as good as before
    return told


@pytest.mark.parametrize("odd", [1, 2])
def test_a_rank_that_differs_is_named_on_all_ranks_at_once(ranks, odd):
    outcomes = ranks.outcomes(WORLD, differing, odd)
    told = {
        name: f"ranks are at different steps: rank {odd} of the group differs from rank 0 in "
        f"{what}; nothing was committed"
        for name, (_, what) in CHANGES.items()
    }
    for outcome in outcomes:
        assert outcome.error is None
        assert outcome.value == told
        assert outcome.seconds < AT_ONCE


REFUSED = {
    "no accept": (None, {}, "TypeError: the rank that decides gives the verifier's Accept"),
    "another batch's": (
        the_accept()._replace(accept_len=torch.ones(3, dtype=torch.int32)),
        {},
        "ValueError: accept.accept_len must be torch.int32 [2] for this tree, got torch.int32 [3]",
    ),
    "another dtype": (
        the_accept()._replace(nan=torch.zeros(2)),
        {},
        "ValueError: accept.nan must be torch.bool [2] for this tree, got torch.float32 [2]",
    ),
    "no tree": (the_accept(), {"tree": None}, "TypeError: tree must be a DraftTree, got NoneType"),
    "src": (the_accept(), {"src": 3}, "ValueError: src is 3; it counts within the group"),
    "rows": (the_accept(), {"requests": [1]}, "ValueError: requests has 1 rows, the tree 2"),
    "window": (
        the_accept(),
        {"out_cache_loc": torch.arange(8)},
        "ValueError: out_cache_loc must be [bs, D] = [2, 5] or [10] as the tree, got [8]",
    ),
    "no tensor": (
        the_accept(),
        {"out_cache_loc": [1]},
        "TypeError: out_cache_loc must be a torch.Tensor, got list",
    ),
}


def told_of(accept, step):
    with pytest.raises((RanksDisagree, TypeError, ValueError)) as caught:
        broadcast_accept(accept, **step)
    return f"{type(caught.value).__name__}: {caught.value}"


def refusing(rank, world):
    """Rank 1, which decides, cannot; what each rank is told."""
    return {
        name: told_of(accept, the_step(**changes)) if rank == 1 else told_of(None, the_step())
        for name, (accept, changes, _) in REFUSED.items()
    }


def test_what_one_rank_refuses_all_are_told(ranks):
    first, deciding, third = ranks.run(WORLD, refusing)
    others = (
        "RanksDisagree: rank 1 of the group refused its own step, and says why; nothing was "
        "committed"
    )
    assert first == third == dict.fromkeys(REFUSED, others)
    for name, (_, _, start) in REFUSED.items():
        assert deciding[name].startswith(start)


def missing(rank, world):
    """Rank 2 does not come, and does not end either."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    dist.barrier(group)  # connected, all of them
    if rank == 2:
        time.sleep(5)
        return None
    with pytest.raises(RuntimeError) as caught:
        broadcast_accept(the_accept(), **the_step(group=group))
    return type(caught.value).__name__


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(ranks):
    outcomes = ranks.outcomes(WORLD, missing)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD
    assert all(outcome.value != "RanksDisagree" for outcome in outcomes)
    assert all(outcome.seconds < AT_ONCE for outcome in outcomes)


def test_checksums_differ_where_one_value_does():
    """Each single change of a value, and each swap, of small numbers as slots and tokens are."""
    from specpool.spec.parallel import _checksum

    base = torch.arange(40)
    seen = {int(_checksum(base))}
    for i in range(40):
        for value in (-1, 0, 41, 2**40):
            changed = base.clone()
            changed[i] = value
            seen.add(int(_checksum(changed)))
        for j in range(i):
            swapped = base.clone()
            swapped[[i, j]] = base[[j, i]]
            seen.add(int(_checksum(swapped)))
    assert len(seen) == 1 + 40 * 4 - 1 + 40 * 39 // 2  # base[0] is 0 already


def test_the_checksum_is_splitmix64s():
    """Its first outputs from seed 0 are published: e220a8397b1dcdaf, 6e789e6aa1b965f4."""
    from specpool.spec.parallel import _checksum

    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    assert int(_checksum(torch.zeros(2))) % 2**64 == (first + second) % 2**64
