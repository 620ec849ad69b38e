"""What setters do to their arguments before a byte is written: check them, scale them, cast them.

Only ``write`` writes, and nothing changes the caller's tensors: a setter whose arguments have
passed through the other functions cannot fail half way.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, Protocol

import torch

from specpool_kernels.device import is_capturing

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)

Write = Callable[[], None]
"""A load that has been checked; calling it writes the bytes."""


class Staged(NamedTuple):
    """A store that has been checked and converted: ``views[i][at] = values[i]`` for every i."""

    views: Sequence[torch.Tensor]
    at: tuple[torch.Tensor, ...]
    values: Sequence[torch.Tensor]


def write(*stores: Staged) -> None:
    """Do ``stores`` in order, as if every value were read before the first byte is written."""
    written = {_memory(view) for staged in stores for view in staged.views}
    # A view of the pool's own buffers may be given as a value; torch refuses some overlaps only.
    read = [
        [value.clone() if _memory(value) in written else value for value in staged.values]
        for staged in stores
    ]
    for staged, values in zip(stores, read, strict=True):
        for view, value in zip(staged.views, values, strict=True):
            view[staged.at] = value


def _memory(tensor: torch.Tensor) -> int:
    """Where a tensor's storage begins; the same for all while compiling, which cannot tell."""
    return 0 if torch.compiler.is_compiling() else tensor.untyped_storage().data_ptr()


class HasLayerId(Protocol):
    """What a ``layer`` argument must have: the model's absolute id of the layer."""

    @property
    def layer_id(self) -> int:
        """The layer's absolute id."""


class HasLoc(Protocol):
    """What a wrapped write location must have (SGLang's ``KVWriteLoc``)."""

    @property
    def loc(self) -> torch.Tensor:
        """The slots to write, one a token."""


def checked_int(name: str, value: int, least: int) -> int:
    """``value`` as an int of at least ``least``.

    Raises:
        TypeError: not an integer.
        ValueError: below ``least``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def layer_id_of(layer: HasLayerId | None, override: int | None = None) -> int:
    """``override`` where it is given, else the layer's ``layer_id``.

    Raises:
        TypeError: there is neither.
    """
    if override is not None:
        return override
    try:
        return layer.layer_id  # type: ignore[union-attr]
    except AttributeError:
        raise TypeError(
            f"layer must have a layer_id attribute, got {type(layer).__name__}; pass the attention "
            "layer, or any object with a layer_id"
        ) from None


def slots_of(name: str, loc_info: torch.Tensor | HasLoc) -> torch.Tensor:
    """The locs of a tensor, or of an object with a ``loc``, as int64 ``[n]``.

    Raises:
        TypeError: neither of these, or a dtype other than int32 and int64.
    """
    loc: Any = loc_info if isinstance(loc_info, torch.Tensor) else getattr(loc_info, "loc", None)
    if not isinstance(loc, torch.Tensor):
        raise TypeError(
            f"{name} must be an int32 or int64 tensor of slots, or have one as its loc attribute, "
            f"got {type(loc_info).__name__}"
        )
    if loc.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must hold int32 or int64 slots, got {loc.dtype}")
    return loc.reshape(-1).to(torch.int64)


def within(name: str, slots: torch.Tensor, limit: int) -> torch.Tensor:
    """``slots`` (int64 ``[n]``), which a setter may index a buffer of ``limit`` slots with.

    They are looked at on a CPU, and on other devices under ``SPECPOOL_CHECK=1``, which costs one
    synchronisation. Without it a negative slot of padding becomes the dummy slot 0, since indexing
    would take it for the buffer's last slots, and one past the end trips the device's own assert.

    Raises:
        IndexError: a slot outside ``[0, limit)``.
    """
    device = slots.device
    looked_at = device.type == "cpu" or (
        os.environ.get("SPECPOOL_CHECK") == "1" and not is_capturing(device)
    )
    if not looked_at:
        return slots.clamp_min(0)
    check_range(name, slots, limit)
    return slots


def check_range(name: str, slots: torch.Tensor, limit: int) -> None:
    """Refuse slots outside ``[0, limit)``; synchronises with the tensor's device.

    Raises:
        IndexError: names the first such slot.
    """
    if not slots.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(slots))
    if low < 0 or high >= limit:
        raise IndexError(
            f"{name} holds {low if low < 0 else high}, outside [0, {limit}); give slots that the "
            "pool has (padding belongs in the dummy slot 0)"
        )


def check_values(
    name: str, values: torch.Tensor, n: int, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    """``values`` as ``[n, *shape]`` without a gradient; ``[n, prod(shape)]`` is accepted too.

    Raises:
        TypeError: not a tensor of a floating dtype.
        ValueError: another shape or another device.
    """
    if not isinstance(values, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(values).__name__}")
    if not values.dtype.is_floating_point:
        raise TypeError(
            f"{name} must have a floating dtype, got {values.dtype}; quantised bytes are given by "
            "their fp8 view"
        )
    check_device(name, values, device)
    wanted = (n, *shape)
    if tuple(values.shape) not in (wanted, (n, math.prod(shape))):
        raise ValueError(
            f"{name} must be {list(wanted)} or {[n, math.prod(shape)]} for {n} slots, got "
            f"{list(values.shape)}"
        )
    return values.detach().reshape(wanted)


def check_list(what: str, given: Any, of: str) -> None:
    """Refuse what is no list or tuple.

    Raises:
        TypeError: names ``what`` was given, and what it is a list ``of``.
    """
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{what} must be a list {of}, got {type(given).__name__}")


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that is not on the pool's device.

    Raises:
        ValueError: it is on another.
    """
    if tensor.device != device:
        raise ValueError(
            f"{name} is on {tensor.device} and the pool on {device}; move it with "
            f"{name}.to('{device}')"
        )


def check_scale(
    name: str, scale: float | torch.Tensor | None, device: torch.device
) -> float | torch.Tensor | None:
    """A scale that ``cast`` can divide by: None, a positive number, or a tensor of one element.

    Raises:
        TypeError: something else.
        ValueError: a number that is not positive and finite, a tensor of more elements, or one
            of a dimension on another device.
    """
    if scale is None:
        return None
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or not scale.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be one floating value, got {scale.dtype} {list(scale.shape)}"
            )
        if scale.dim() == 0:
            return scale.detach()
        check_device(name, scale, device)
        return scale.detach().reshape(1)
    if isinstance(scale, bool) or not isinstance(scale, Real):
        raise TypeError(f"{name} must be a number or a tensor, got {type(scale).__name__}")
    number = float(scale)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {number}")
    return number


def cast(
    values: torch.Tensor, scale: float | torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """``values / scale`` as ``dtype``; the caller's tensor where dtypes agree (no scale then).

    The division rounds to the dtype of the input, as SGLang 0.5.23's in-place division does. A cast
    to fp8 clamps finite and infinite values to the dtype's range first, and keeps NaN.
    """
    if values.dtype == dtype:
        return values
    if values.dtype in FP8_DTYPES:
        values = values.to(torch.float32)  # fp8 has no arithmetic
    if scale is not None:
        values = torch.div(values, scale, out=torch.empty_like(values))
    if dtype in FP8_DTYPES:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)
