"""The real model's file, and a mark for what needs it, so that `-m "not model"` leaves it out."""

import os

import pytest

from specpool.demo.parts import SMOLLM2, packaged_model


def pytest_configure(config):
    config.addinivalue_line("markers", "model: needs SmolLM2's file, and some seconds")


@pytest.fixture(scope="module")
def path():
    if SMOLLM2.present():
        return packaged_model()
    message = f"SmolLM2 is not installed: {SMOLLM2.command}"
    if os.environ.get("CI") == "true" or os.environ.get("SPECPOOL_REQUIRE_MODEL") == "1":
        pytest.fail(message)
    pytest.skip(message)
