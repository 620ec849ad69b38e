"""Launches of kernels that Triton has compiled already, past the work of its public call.

``kernel[grid](...)`` binds, types and keys every argument of every call; what is left to do for a
known kernel is to hand the driver a grid and pointers. That takes an interface that Triton keeps
to itself, so this module is the only place that knows it, for the versions it was checked against
and for NVIDIA; ``prepare`` returns None for anything else, and ``launch`` declines what it should
not do: the public call, which is always right, serves then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton

CHECKED = ("3.6.", "3.7.")
"""Versions of Triton whose launches were compared with those of the public call."""
_LIMIT = 2**31
_ALIGNMENT = 16


class Prepared:
    """A compiled kernel on the current device; all arguments but the constants may change."""

    def __init__(
        self, kernel: Any, compiled: Any, aligned: list[int], constants: tuple[Any, ...]
    ) -> None:
        driver = triton.runtime.driver.active
        self._kernel = kernel
        self._compiled = compiled  # keeps the loaded module
        self._device = driver.get_current_device()
        self._aligned = aligned
        self._constants = constants
        self._stream = driver.get_current_stream
        self._run = compiled.run
        self._head = (compiled.function, compiled.packed_metadata, None, None, None)

    def launch(
        self, grid: tuple[int, ...], pointers: Sequence[int], numbers: Sequence[int]
    ) -> bool:
        """Launch on the current stream of the device, which is the current one.

        Args:
            grid: programs, in one or two dimensions.
            pointers: addresses of the kernel's tensors, in the order of its arguments.
            numbers: its integers, which follow the tensors.

        Returns:
            False, with nothing launched, where the public call would do something else: a number
            that needs 64 bits, an address of another alignment, a hook or a debugging mode of
            Triton's that is on now.
        """
        if max(numbers) >= _LIMIT or self._kernel.pre_run_hooks or _is_observed():
            return False
        if self._aligned and any(pointers[i] % _ALIGNMENT for i in self._aligned):
            return False
        height = grid[1] if len(grid) > 1 else 1
        stream = self._stream(self._device)
        self._run(grid[0], height, 1, stream, *self._head, *pointers, *numbers, *self._constants)
        return True


def prepare(
    kernel: Any,
    compiled: Any,
    pointers: Sequence[int],
    numbers: Sequence[int],
    constants: dict[str, Any],
) -> Prepared | None:
    """What launches again what a public call has just launched; None where only that call should.

    Args:
        kernel: the function; its arguments are tensors, then integers, then constants.
        compiled: what ``kernel[grid](...)`` returned.
        pointers, numbers: that call's tensors' addresses and integers.
        constants: its constants by name.
    """
    if not triton.__version__.startswith(CHECKED) or compiled is None or _is_observed():
        return None
    if compiled.metadata.target.backend != "cuda" or kernel.used_global_vals:
        return None
    names = [p.name for p in kernel.params if p.is_constexpr]
    others = [p for p in kernel.params if not p.is_constexpr]
    if set(names) != set(constants) or len(others) != len(pointers) + len(numbers):
        return None
    # Triton compiles anew for integers of 1, or divisible by 16, unless told not to
    if not all(p.do_not_specialize for p in others[len(pointers) :]) or max(numbers) >= _LIMIT:
        return None
    tensors = others[: len(pointers)]
    aligned = [i for i, p in enumerate(tensors) if not p.do_not_specialize_on_alignment]
    if any(pointers[i] % _ALIGNMENT for i in aligned):
        return None
    return Prepared(kernel, compiled, aligned, tuple(constants[name] for name in names))


def _is_observed() -> bool:
    """Whether a profiler or a debugging mode wants to see, or to change, what is launched."""
    runtime = triton.knobs.runtime
    return bool(
        runtime.debug
        or runtime.add_stages_inspection_hook
        or triton.knobs.compilation.instrumentation_mode
        or _calls(runtime.launch_enter_hook)
        or _calls(runtime.launch_exit_hook)
    )


def _calls(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
