"""`move_kv_cache` of every pool of SGLang, with the plugin: right, in one launch, or refused.

Every byte of every allocation is compared with the oracle's, and where SGLang's own move is right
with what that leaves.
"""

import random

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.sglang.driving import move, move_badly
from tests.sglang.pools import cases

CASES = cases()
BACKENDS = ("cpu", "triton")
SERVED = [name for name, case in CASES.items() if case.served in ("default", "all")]
MOVED = [name for name, case in CASES.items() if case.served != "never"]
few = hypothesis.settings(max_examples=8, derandomize=True)


def shuffled(name: str, seed: int = 0) -> tuple[list[int], list[int]]:
    """Locs to each other's places, so that targets are sources, and SGLang's padding behind."""
    locs = random.Random(seed).sample(range(1, CASES[name].locs), 10)
    return [*sorted(locs), 0, 0], [*locs, 0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SERVED)
def test_a_served_pool_moves_in_one_launch(everything, name, backend):
    result = everything(move, name, *shuffled(name), torch.int64, backend)
    assert result.right, result
    assert (result.launches, result.backend) == (1, backend)


@pytest.mark.parametrize("name", CASES)
def test_with_nothing_configured_what_sglang_moves_stays_its_own(default, without, name):
    result = default(move, name, *shuffled(name))
    if CASES[name].served == "default":
        assert result.right, result
        assert result.launches == 1
    elif CASES[name].served == "parts":
        assert result.right, result
        assert result.launches is None
    elif name == "minimax-hisparse":
        assert result.refused, result
    else:
        assert result == without(move, name, *shuffled(name))
        assert result.launches is None


def test_hisparse_is_refused_by_name(everything):
    result = everything(move, "minimax-hisparse", *shuffled("minimax-hisparse"))
    assert result.refused, result
    for said in (
        "UnsupportedAccess",
        "MiniMaxSparseKVPool",
        "--enable-hisparse",
        "SPECPOOL_SGLANG",
    ):
        assert said in result.error


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].served in ("parts", "left")])
def test_what_moves_itself_is_left_to_it(everything, name):
    result = everything(move, name, *shuffled(name))
    assert result.right, result
    assert result.launches is None


@st.composite
def a_move(draw, name, among=None):
    """Targets that differ, sources that may repeat, anything overlapping, padding in between."""
    locs = st.sampled_from(among or range(1, CASES[name].locs))
    tgt = draw(st.lists(locs, min_size=1, max_size=12, unique=True))
    src = draw(st.lists(locs, min_size=len(tgt), max_size=len(tgt)))
    pairs = [*zip(tgt, src, strict=True), *[(0, 0)] * draw(st.integers(0, 2))]
    tgt, src = zip(*draw(st.permutations(pairs)), strict=True)
    return list(tgt), list(src), draw(st.sampled_from((torch.int32, torch.int64)))


@few
@hypothesis.given(data=st.data(), backend=st.sampled_from(BACKENDS))
@pytest.mark.parametrize("name", MOVED)
def test_any_move_leaves_what_the_oracle_says(everything, name, data, backend):
    tgt, src, dtype = data.draw(a_move(name))
    result = everything(move, name, tgt, src, dtype, backend)
    assert (result.error, result.wrong) == (None, 0)


@few
@hypothesis.given(data=st.data(), backend=st.sampled_from(BACKENDS))
@pytest.mark.parametrize("name", [name for name in SERVED if CASES[name].own_is_right])
def test_where_sglang_s_own_move_is_right_the_bytes_are_the_same(
    everything, without, name, data, backend
):
    # where a loc has no window slot SGLang moves its dummy slot: see test_defects
    among = [loc for loc in range(1, 20) if loc % 5] if name == "swa" else None
    tgt, src, dtype = data.draw(a_move(name, among))
    ours = everything(move, name, tgt, src, dtype, backend)
    theirs = without(move, name, tgt, src, dtype)
    assert theirs.error is None
    assert ours.digest == theirs.digest


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slide_of_600_slots_overlaps_itself(everything, backend):
    slots = list(range(8, 608))
    result = everything(move, "mha-large", slots, [s - 1 for s in slots], torch.int64, backend)
    assert result.right, result
    assert result.launches == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mha", "minimax", "single-v4", "dsa", "swa"])
def test_minus_one_skips_a_pair(everything, name, backend):
    result = everything(move, name, [1, -1, 3, 4], [6, 7, -1, 8], torch.int64, backend)
    assert result.right, result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mha", "mha-hnd", "minimax", "single-v4", "dsa", "c4"])
def test_a_slot_outside_is_refused_before_anything_moves(everything, name, backend):
    outside = CASES[name].locs + 1  # behind the mapping's sentinel, where there is one
    for tgt, src in (([1, outside], [2, 3]), ([1, 3], [2, outside]), ([1, -2], [2, 3])):
        result = everything(move_badly, name, tgt, src, torch.int64, backend)
        assert result.refused, result
        assert result.error.startswith("IndexError")


def test_an_empty_call_launches_nothing(everything):
    result = everything(move, "minimax", [], [])
    assert (result.error, result.changed, result.launches) == (None, 0, 0)
