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
    def from_environment(cls) -> Settings:
        """Read ``SPECPOOL_SGLANG`` and ``SPECPOOL_SGLANG_UNSAFE``.

        Raises:
            ValueError: a value that is none of those above.
        """
        mode = os.environ.get(MODE, "") or "default"
        if mode not in _MODES:
            raise ValueError(f"{MODE}={mode!r} is none of {', '.join(_MODES)}")
        unsafe = os.environ.get(UNSAFE, "") or "0"
        if unsafe not in ("0", "1"):
            raise ValueError(f"{UNSAFE}={unsafe!r} is neither 0 nor 1")
        return cls(mode, unsafe == "1")
