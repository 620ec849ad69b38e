"""What the plugin says where no SGLang is, and who hears it."""

import logging
from contextlib import contextmanager

import pytest

from specpool.adapters.sglang import plugin
from specpool.adapters.sglang.patch import Outcome
from specpool.adapters.sglang.plugin import install
from specpool.adapters.sglang.settings import Settings

OFF = Settings("off", False)


@contextmanager
def fresh_root(*handlers):
    """The root logger as a fresh process has it; pytest adds handlers of its own to each test."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, list(handlers)
    try:
        yield
    finally:
        root.handlers = kept


def test_its_line_is_heard_before_logs_are_set_up(capsys):
    with fresh_root():
        install(OFF)
    assert "mode off" in capsys.readouterr().err


def test_its_line_is_heard_where_logs_are_set_up_for_warnings(capsys):
    """As a library that called ``logging.basicConfig()`` leaves them."""
    with fresh_root(logging.StreamHandler()):
        assert not logging.getLogger("specpool.sglang").isEnabledFor(logging.INFO)
        install(OFF)
    assert capsys.readouterr().err.count("mode off") == 1
    assert logging.getLogger("specpool.sglang").level == logging.NOTSET


@pytest.mark.parametrize("chosen", ["trition", "triton"])
def test_a_backend_that_serves_nothing_is_an_error(capsys, monkeypatch, chosen):
    monkeypatch.setenv("SPECPOOL_BACKEND", chosen)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr("torch.version.cuda", None)
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr(plugin, "patches", lambda settings: [])
    monkeypatch.setattr(plugin, "_hook_arguments", lambda settings: Outcome("a target", "gone"))
    with fresh_root():
        install(Settings("default", False))
    said = capsys.readouterr().err
    assert "mode default" in said
    assert "ERROR specpool will move nothing" in said
    assert "ERROR specpool could not replace a target: gone" in said
