"""A mark for what needs the real model, so that `-m "not model"` leaves it out."""


def pytest_configure(config):
    config.addinivalue_line("markers", "model: needs SmolLM2's file, and some seconds")
