import pytest

from specpool.adapters.sglang.settings import Settings


@pytest.mark.parametrize(
    ("mode", "unsafe", "expected"),
    [
        (None, None, ("default", False)),
        ("", "", ("default", False)),
        ("all", "1", ("all", True)),
        ("off", "0", ("off", False)),
    ],
)
def test_settings(monkeypatch, mode, unsafe, expected):
    for name, value in (("SPECPOOL_SGLANG", mode), ("SPECPOOL_SGLANG_UNSAFE", unsafe)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert Settings.from_environment() == (expected, [])


@pytest.mark.parametrize(
    ("mode", "unsafe", "expected", "named"),
    [
        ("everything", "1", ("default", True), "SPECPOOL_SGLANG='everything'"),
        ("off", "yes", ("off", False), "SPECPOOL_SGLANG_UNSAFE='yes'"),
    ],
)
def test_a_wrong_value_is_named_and_costs_no_other(monkeypatch, mode, unsafe, expected, named):
    monkeypatch.setenv("SPECPOOL_SGLANG", mode)
    monkeypatch.setenv("SPECPOOL_SGLANG_UNSAFE", unsafe)
    settings, (wrong,) = Settings.from_environment()
    assert settings == expected
    assert wrong.startswith(named)
