"""Patches of SGLang's functions: set, read back, and reported.

SGLang swallows what a plugin raises, and a hook on a method that a class lacks fails silently. So
nothing here relies on its registry: a patch finds its target, compares the parameters with those
it was written for, sets the replacement and looks whether it is there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_MARK = "_specpool_original"
_SELF = "_specpool_replacement"


class Patch(NamedTuple):
    """One function of SGLang to replace.

    Attributes:
        target: ``"package.module:function"`` or ``"package.module:Class.method"``.
        parameters: names of the target's parameters, in order, that the replacement was written
            for; None where the class must have no such method yet, not even an inherited one.
        wrap: given the original (None where there is none), the replacement. A method that is
            inherited is set on the class itself, and its base keeps the original.
    """

    target: str
    parameters: tuple[str, ...] | None
    wrap: Callable[[Any], Callable[..., Any]]


class Outcome(NamedTuple):
    """What became of a patch: ``reason`` says why it is not in place, None where it is."""

    target: str
    reason: str | None


def examine(patch: Patch) -> Outcome:
    """Whether a patch's target is there and is what the patch was written for; changes nothing."""
    try:
        owner, name = _find(patch.target)
    except Exception as error:  # whatever an engine's modules raise when they are imported
        return Outcome(patch.target, f"it was not found: {error!r}")
    try:
        return Outcome(patch.target, _drift(patch, owner, name))
    except (TypeError, ValueError) as error:  # nothing that has a signature
        return Outcome(patch.target, f"it is no function: {error}")


def apply(patch: Patch) -> Outcome:
    """Put a patch in place; a patch that is in place already stays as it is."""
    found = examine(patch)
    if found.reason is not None:
        return found
    owner, name = _find(patch.target)
    if _is_ours(owner, name):
        return found
    try:
        return _set(patch, owner, name)
    except Exception as error:  # one patch that fails takes no other with it
        return Outcome(patch.target, f"it could not be set: {error!r}")


def _set(patch: Patch, owner: Any, name: str) -> Outcome:
    original = getattr(owner, name, None)
    replacement = patch.wrap(original)
    if original is not None:
        replacement = functools.wraps(original)(replacement)
    setattr(replacement, _MARK, original)
    setattr(replacement, _SELF, replacement)
    setattr(owner, name, replacement)
    if inspect.ismodule(owner):
        _rebind(name, original, replacement)
    if vars(owner).get(name) is not replacement:
        return Outcome(patch.target, "it was set, and something else was read back")
    return Outcome(patch.target, None)


def is_replacement(function: Any) -> bool:
    """Whether a function was set here, and no other plugin's stands around it or in its place."""
    # functools.wraps copies a function's attributes to what wraps it
    return function is not None and getattr(function, _SELF, None) is function


def _find(target: str) -> tuple[Any, str]:
    """The module or class that holds a target, and the target's name in it."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *classes, name = path.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def _is_ours(owner: Any, name: str) -> bool:
    return hasattr(vars(owner).get(name), _MARK)


def _drift(patch: Patch, owner: Any, name: str) -> str | None:
    """How the target differs from what the patch was written for; None where it does not."""
    found = getattr(owner, name, None)
    if _is_ours(owner, name) or (found is None and patch.parameters is None):
        return None
    if found is None:
        return f"{owner.__name__} has no {name}"
    if patch.parameters is None:
        return f"{owner.__name__} has a {name} of its own by now"
    parameters = tuple(inspect.signature(found).parameters)
    if parameters != patch.parameters:
        return f"its parameters are {parameters}, not {patch.parameters}"
    return None


def _rebind(name: str, original: Any, replacement: Any) -> None:
    """Replace the function where modules imported it by name before it was patched."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sglang.") and getattr(module, "__dict__", {}).get(name) is (
            original
        ):
            setattr(module, name, replacement)
