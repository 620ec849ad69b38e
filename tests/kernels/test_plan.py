"""The plan: few variants, all of them known before the first call, and scratch that suffices."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpool_kernels import plan


@pytest.mark.parametrize(
    ("pairs", "rows"),
    [(1, 16), (16, 16), (17, 64), (64, 64), (65, 256), (256, 256), (257, 1024), (1025, 4096)],
)
def test_a_move_takes_the_smallest_bucket_that_holds_it(pairs, rows):
    variant = plan.move_variant(pairs)
    assert (variant.kernel, variant.rows) == ("move_rows", rows)


def test_moves_beyond_the_largest_bucket_go_through_scratch():
    assert plan.move_variant(plan.MAX_PAIRS).kernel == "move_rows"
    assert plan.move_variant(plan.MAX_PAIRS + 1).kernel == "move_staged"


@given(st.integers(1, 3 * plan.MAX_PAIRS), st.data())
def test_variants_lists_all_that_a_call_can_launch(max_pairs, data):
    """A form that is missing would be compiled at its first call, maybe under graph capture."""
    listed = plan.variants(max_pairs)
    pairs = data.draw(st.integers(1, max_pairs))
    assert plan.move_variant(pairs) in listed
    entries = data.draw(st.integers(1, min(pairs, plan.MAX_PAIRS)))
    assert plan.accept_variant(entries, max(1, pairs // entries)) in listed


@pytest.mark.parametrize("bucket", [16, 64, 256, 1024, 4096])
def test_variants_hold_the_bucket_just_above_a_limit(bucket):
    for pairs in (bucket - 1, bucket, bucket + 1):
        assert plan.move_variant(pairs) in plan.variants(pairs)


def test_variants_are_few_and_distinct():
    listed = plan.variants(9000)
    assert len(listed) == len(set(listed)) == 11
    assert len(plan.variants(1)) == 2


@pytest.mark.parametrize("variant", plan.variants(9000), ids=str)
def test_threads_and_grid_fit_every_device(variant):
    """1,024 threads a program is the most; programs split a block into whole parts."""
    for warp_size in (32, 64):
        assert 1 <= variant.num_warps(warp_size) * warp_size <= 1024
    assert variant.split in (1, 2, 4, 8, 16, 32)


def test_requests_share_a_program_while_their_windows_fit():
    assert plan.accept_variant(4, 1).rows == 16
    assert plan.accept_variant(16, 1000).rows == 16
    assert plan.accept_variant(17, 1).rows == 64
    for entries in (3, 4):  # both are laid out in 4
        assert plan.accept_variant(entries, 4 * 65_535).rows == 16
        assert plan.accept_variant(entries, 4 * 65_535 + 1).rows == 64


@pytest.mark.parametrize(("entries", "requests"), [(4097, 1), (4096, 65_536)])
def test_accepts_beyond_one_program_or_the_grid_are_refused(entries, requests):
    with pytest.raises(ValueError, match=rf"4096 entries.*got \[{requests}, {entries}\]"):
        plan.accept_variant(entries, requests)


def test_copies_are_split_over_the_grid():
    assert plan.copy_variant(1_000_000).rows == 16
    assert plan.copy_variant(16 * 65_535 + 1).rows == 64
    with pytest.raises(ValueError, match="a copy takes at most"):
        plan.copy_variant(4096 * 65_535 + 1)


@given(st.integers(1, 2**20))
def test_padded_is_the_next_power_of_two(entries):
    padded = plan.padded(entries)
    assert padded & (padded - 1) == 0
    assert padded // 2 < entries <= padded


@given(st.integers(1, 2**24), st.integers(1, 4000), st.integers(1, 200), st.data())
def test_reserved_scratch_is_never_outgrown(max_pairs, blocks, processors, data):
    reserved = plan.scratch_bytes(max_pairs, blocks, processors)
    pairs = data.draw(st.integers(1, max_pairs))
    programs = plan.staged_programs(pairs, blocks, processors)
    assert 1 <= programs * pairs * plan.STAGED_BYTES <= reserved
    assert reserved <= max(plan.MAX_SCRATCH, max_pairs * plan.STAGED_BYTES)


def test_scratch_at_most_64_mib_with_fewer_programs():
    assert plan.MAX_SCRATCH == 64 * 2**20
    assert plan.staged_programs(5000, 1000, 132) == 104
    assert plan.staged_programs(2**19, 1000, 132) == 1
    assert plan.scratch_bytes(2**20, 1000, 132) == 2**20 * plan.STAGED_BYTES
