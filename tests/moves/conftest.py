"""Fixtures of the move tests: each place that this process can serve.

Places on a GPU are always there; without one, their tests are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.moves.places import INTERPRETED, PLACES, On, same_bytes

__all__ = ["INTERPRETED", "PLACES", "On", "same_bytes"]  # what the tests take from here


def params(places: Sequence[tuple[str, str]]) -> list:
    """Places as parameters of a fixture, those on a GPU with its mark."""
    return [
        pytest.param(
            (device, backend),
            id=f"{backend}-on-{device}",
            marks=[pytest.mark.gpu] if device == "cuda" else [],
        )
        for device, backend in places
    ]


@pytest.fixture(params=params(PLACES))
def on(request) -> On:
    return On(*request.param)


@pytest.fixture
def checked(on, monkeypatch) -> On:
    """Movers that are built here judge every call by value before anything moves."""
    if not on.validates:
        monkeypatch.setenv("SPECPOOL_CHECK", "1")
    return on


@pytest.fixture
def register_limit(on, monkeypatch) -> int:
    """Pairs beyond which a move goes through scratch: fewer where that takes seconds."""
    if not on.interpreted:
        return 4096
    from specpool_kernels import plan

    monkeypatch.setattr(plan, "_BUCKETS", {16: plan._BUCKETS[16], 64: plan._BUCKETS[64]})
    monkeypatch.setattr(plan, "MAX_PAIRS", 64)
    return 64


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
