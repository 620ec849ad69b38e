"""Where these tests run: on a GPU, and on a CPU with a mover that does as a GPU's does.

Such a mover drops and counts bad pairs where a CPU's would raise, unless SPECPOOL_CHECK=1 is set.
"""

from __future__ import annotations

import pytest

from specpool.mover import RowMover
from tests.moves.conftest import INTERPRETED, On, params, register_limit, seeded

__all__ = ["on", "register_limit", "seeded"]  # fixtures

PLACES = [("cpu", "triton")] if INTERPRETED else [("cpu", "torch"), ("cuda", "triton")]


@pytest.fixture(params=params(PLACES))
def on(request, monkeypatch) -> On:
    serve = RowMover._serve

    def as_on_a_gpu(mover, *args):
        service = serve(mover, *args)
        return service if mover._checks_values else service._replace(judge=None)

    monkeypatch.setattr(RowMover, "_serve", as_on_a_gpu)
    place = On(*request.param)
    if place.device == "cpu":  # where pools take the backend from
        monkeypatch.setenv("SPECPOOL_BACKEND", place.backend)
    return place
