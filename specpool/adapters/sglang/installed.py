"""Which SGLang is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def sglang_version() -> str | None:
    """The version of the installed SGLang; None where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None
