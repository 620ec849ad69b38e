"""Text to a model: slots for the next tokens of some rows, and one forward of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specpool.allocator import PagedSlotAllocator
from specpool.request_table import RequestTable
from specpool.spec.forward import ForwardStep
from specpool.spec.protocols import Target


def feed(
    target: Target,
    allocator: PagedSlotAllocator,
    table: RequestTable,
    chunks: Mapping[int, Sequence[int]],
) -> None:
    """Write the KV of ``chunks[row]`` behind what each row holds, and append their slots.

    Raises:
        OutOfSlots: there is no room for them.
        Whatever the target raises. No slot is taken then.
    """
    rows = list(chunks)
    begin = table.lengths[rows]
    counts = [len(chunks[row]) for row in rows]
    slots = allocator.alloc_extend(begin, begin + torch.tensor(counts), table.last_loc[rows])
    try:
        tokens = padded(list(chunks.values()), allocator.device)
        loc = padded([part.tolist() for part in torch.split(slots.cpu(), counts)], allocator.device)
        target.forward(ForwardStep.chain(table, rows, begin.tolist(), tokens, loc))
        table.append(rows, slots, counts)
    except BaseException:
        allocator.free(slots)
        raise


def padded(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Int64 ``[len(lists), longest]``, -1 behind the shorter ones."""
    longest = max(map(len, lists))
    rows = [[*values, *[-1] * (longest - len(values))] for values in lists]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), longest).to(device)
