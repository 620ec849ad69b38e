"""What an operator may set: three environment variables, read when the plugin is loaded."""

from __future__ import annotations

import os
from typing import NamedTuple

MODE = "SPECPOOL_SGLANG"
UNSAFE = "SPECPOOL_SGLANG_UNSAFE"
_MODES = ("default", "all", "off")


class Settings(NamedTuple):
    """The plugin's settings.

    Attributes:
        mode: ``"default"``: the pools that SGLang cannot move, and refusals; ``"all"``: every
            pool that rows describe; ``"off"``: nothing.
        unsafe: MiniMax with speculation is not refused where its verification is broken.
    """

    mode: str
    unsafe: bool

    @classmethod
    def from_environment(cls) -> tuple[Settings, list[str]]:
        """Read ``SPECPOOL_SGLANG`` and ``SPECPOOL_SGLANG_UNSAFE``.

        Returns:
            The settings, and what is wrong with either variable: that one alone has its default.
        """
        wrong = []
        mode = os.environ.get(MODE, "") or "default"
        if mode not in _MODES:
            wrong.append(f"{MODE}={mode!r} is none of {', '.join(_MODES)}; default is taken")
            mode = "default"
        unsafe = os.environ.get(UNSAFE, "") or "0"
        if unsafe not in ("0", "1"):
            wrong.append(f"{UNSAFE}={unsafe!r} is neither 0 nor 1; 0 is taken")
        return cls(mode, unsafe == "1"), wrong
