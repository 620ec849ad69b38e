"""What stands where torchvision has a function or a class."""

from collections.abc import Callable
from typing import NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """A callable that says what was called."""

    def call(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{name}: torchvision is not installed, this is its stand-in")

    return call
