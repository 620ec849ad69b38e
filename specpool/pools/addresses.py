"""Where a pool's buffers lie, for what copies to and from them outside of torch.

Addresses are of this moment: a buffer that is replaced has another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

BufInfos = tuple[list[int], list[int], list[int]]
"""Addresses, sizes in bytes, and bytes a page, of buffers that a transfer engine registers."""


def buf_infos(buffers: Sequence[torch.Tensor], page_size: int) -> BufInfos:
    """What a transfer engine needs to know of NHD buffers ``[slots, heads, dim]``."""
    return (
        [buffer.data_ptr() for buffer in buffers],
        [buffer.nbytes for buffer in buffers],
        [buffer[0].nbytes * page_size for buffer in buffers],
    )


def address_tensor(buffers: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Addresses of buffers, uint64 ``[len(buffers)]``, as transfer kernels take them."""
    return torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64, device=device)
