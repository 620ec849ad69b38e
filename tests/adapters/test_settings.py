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
    assert Settings.from_environment() == expected


@pytest.mark.parametrize(("name", "value"), [("", "everything"), ("_UNSAFE", "yes")])
def test_a_wrong_value_is_named(monkeypatch, name, value):
    monkeypatch.setenv(f"SPECPOOL_SGLANG{name}", value)
    with pytest.raises(ValueError, match=f"SPECPOOL_SGLANG{name}='{value}'"):
        Settings.from_environment()
