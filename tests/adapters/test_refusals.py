"""When MiniMax with speculation is refused, as a rule; tests/sglang has the real arguments."""

import pytest

from specpool.adapters.sglang.refusals import Speculation, refusal

BROKEN = Speculation("EAGLE", True, "cuda", "it is not turned on")


def test_what_is_broken_is_refused_with_what_works():
    reason = refusal(BROKEN)
    for words in ("EAGLE", "extend fields", "draft tree for a chain", "ROCm", "NVFP4",
                  "it is not turned on", "SPECPOOL_SGLANG_UNSAFE=1"):  # fmt: skip
        assert words in reason


@pytest.mark.parametrize(
    "change",
    [{"algorithm": None}, {"sparse": False}, {"device": "hip"}, {"device": "cpu"},
     {"unserved": None}],
)  # fmt: skip
def test_whatever_works_is_not(change):
    assert refusal(BROKEN._replace(**change)) is None
