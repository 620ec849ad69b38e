"""A little of everything that launches, as a program: for compute-sanitizer, or without pytest.

``python -m tests.gpu.exercise [cuda | cpu]`` moves in each form and class of access, pages,
mappings and copies, all against the oracle, and ends with the word "moved".
"""

from __future__ import annotations

import sys

import torch

from tests import oracle
from tests.moves.places import On
from tests.oracle import hnd, nhd, page_split

SLOTS = 24


def buffers(on: On) -> list[oracle.Buffer]:
    """All three classes of access, pages with gaps and a mapping."""
    mapping = on.loc([0, *range(SLOTS - 1, 0, -1)])
    return [
        nhd(SLOTS, (1100,), device=on.device),
        nhd(SLOTS, (256,), device=on.device),
        nhd(SLOTS, (5,), device=on.device),
        hnd(SLOTS // 4, 2, 4, 6, gap=1, device=on.device),
        page_split(SLOTS // 4, 4, (20, 4), padding=4, device=on.device),
        nhd(SLOTS, (16,), device=on.device, mapping=mapping),
    ]


def exercise(on: On) -> None:
    """Move by every form; AssertionError where a byte is wrong."""
    made = buffers(on)
    mover = on.mover(*made)
    places = torch.randperm(SLOTS, device=on.device)
    on.move_with(mover, made, places, places.roll(1))
    on.move_with(mover, made, [0, -1, 5], [3, 4, -1], torch.int32)
    window = places.view(3, 8)
    index = on.loc([[0, 2, 5, -1], [8, 15, 9, 12], [-7, 10**9, 0, 0]], torch.int32)
    on.accept_with(mover, made, window, index, on.loc([3, 4, 0], torch.int32))
    source = on.mover(*buffers(on))
    mover.copy_from(source, places, places.roll(3))
    for count in on.size(300, 70), on.size(4200, 80):
        many = nhd(count, (24,), device=on.device)
        order = torch.randperm(count, device=on.device)
        on.move(many, order, order.roll(1))


if __name__ == "__main__":
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    exercise(On(device, "triton" if device == "cuda" else "torch"))
    print("moved")
