"""Which keys to compile where: all of them take hours, and few show as much.

The kernels' source says what can matter together. Access classes are branches of their own, one of
which a program takes, so a class is looked at alone, and all classes together only for what they
share: order, registers and spills. Pages, mappings and loc types change how an offset is worked
out before a class is entered, in the same code for every class. Hence ``covering`` has, of each
form: every class on every target, with pages and mappings, which is the longest code; all classes
on every target; every other choice of pages and mappings on an NVIDIA and on an AMD target; and
every choice of loc types on one. Copies have no order to show, so all classes together do for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle

from specpool_kernels.aot.compile import TARGETS
from specpool_kernels.plan import Key, Variant, all_keys, loc_types

_NVIDIA = [name for name, target in TARGETS.items() if target.backend == "cuda"]
_AMD = [name for name, target in TARGETS.items() if target.backend == "hip"]
_OTHER_FLAGS = ((False, False), (False, True), (True, False))
ALL_CLASSES = 7
SINGLE_CLASSES = (1, 2, 4)


def forms() -> list[tuple[Variant, bool]]:
    """Every variant, with whether it is one of copies."""
    return list(dict.fromkeys((key.variant, key.copy) for key in all_keys()))


def covering() -> list[tuple[Key, str]]:
    """The keys to compile, each with its target: see the module."""
    return [case for at, form in enumerate(forms()) for case in _covering_form(at, *form)]


def _covering_form(at: int, variant: Variant, copy: bool) -> Iterator[tuple[Key, str]]:
    locs = cycle(loc_types(variant.kernel))

    def key(classes: int, paged: bool, mapped: bool) -> Key:
        return Key(variant, classes, paged, mapped, copy, next(locs))

    for classes in (ALL_CLASSES,) if copy else (*SINGLE_CLASSES, ALL_CLASSES):
        for target in TARGETS:
            yield key(classes, True, True), target
    for turn, flags in zip(count(at), _OTHER_FLAGS):
        for target in (_NVIDIA[turn % len(_NVIDIA)], _AMD[turn % len(_AMD)]):
            yield key(SINGLE_CLASSES[turn % len(SINGLE_CLASSES)], *flags), target
