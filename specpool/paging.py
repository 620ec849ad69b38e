"""From positions to pages and slots: the paged allocator's arithmetic, which holds no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Extension:
    """What a call that extends requests takes.

    Attributes:
        pages: ``[bs]`` new pages that each request takes.
    """

    pages: Ints
    _request: Ints
    _position: Ints
    _page: Ints
    """Of each new token: which of its request's new pages it lies in, -1 in the partial one."""
    _in_partial: Ints
    """Of each new token: the slot it has if it lies in the partial page."""
    _page_size: int

    def slots(self, taken: Ints) -> Ints:
        """The slot of each new token, given the ``pages.sum()`` pages that were taken, in order."""
        taken = np.append(taken, 0)  # so that a call that takes no page can index it as well
        which = (np.cumsum(self.pages) - self.pages)[self._request] + self._page
        fresh = taken[which] * self._page_size + self._position % self._page_size
        slots: Ints = np.where(self._page < 0, self._in_partial, fresh)
        return slots


def extension(start: Ints, count: Ints, tail: Ints, page_size: int) -> Extension:
    """Extend requests by the positions ``start[r] .. start[r] + count[r] - 1``.

    Args:
        start: ``[bs]``.
        count: ``[bs]``, at least 0.
        tail: ``[bs]`` the last slot of a partial page to go on in, or -1 to begin in a new page, at
            offset ``start[r] % page_size``.
        page_size: slots a page.
    """
    continues = tail >= 0
    first_new = start // page_size + continues  # the first page to take, counted from position 0
    pages = np.where(count > 0, -(-(start + count) // page_size) - first_new, 0)
    request = np.repeat(np.arange(len(start)), count)
    step = np.arange(len(request)) - np.repeat(np.cumsum(count) - count, count)
    position = start[request] + step
    page = position // page_size - first_new[request]
    return Extension(pages, request, position, page, tail[request] + 1 + step, page_size)


def host_ints(name: str, values: Sequence[int] | torch.Tensor | Ints) -> Ints:
    """Integers of any shape as a flat int64 array on the host.

    Raises:
        TypeError: anything but integers.
    """
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else values
    found = np.asarray(array)
    if found.size == 0 and not isinstance(values, torch.Tensor):
        found = found.astype(np.int64)  # an empty list has no dtype of its own
    if found.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {found.dtype}")
    return found.reshape(-1).astype(np.int64, copy=False)
