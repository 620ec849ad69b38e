"""What is moved: accept windows of trees in use, and random pairs, at random slots of a pool."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specpool_kernels.shapes import Tree

WINDOW, ACCEPTED = 16, 4


class Pairs(NamedTuple):
    """Targets and their sources, all distinct."""

    tgt: torch.Tensor
    src: torch.Tensor


class Accept(NamedTuple):
    """A verifier's answer and, for the peers, the pairs it stands for."""

    out_cache_loc: torch.Tensor
    accept_index: torch.Tensor
    accept_len: torch.Tensor
    tgt: torch.Tensor
    src: torch.Tensor


class Input(NamedTuple):
    """A case, and its pairs that really move."""

    case: Accept | Pairs
    tgt: torch.Tensor
    src: torch.Tensor

    @classmethod
    def of(cls, case: Accept | Pairs) -> Input:
        moving = case.tgt != case.src
        return cls(case, case.tgt[moving], case.src[moving])


def random_pairs(n: int, slots: int, device: str, generator: torch.Generator) -> Pairs:
    """N pairs; a slot may be a target and another pair's source."""
    tgt, src = (torch.randperm(slots, generator=generator)[:n] for _ in range(2))
    return Pairs(tgt.to(device), src.to(device))


def accept_windows(bs: int, slots: int, device: str, generator: torch.Generator) -> Accept:
    """Windows of neighbouring slots at random places, every one with the root + 3 accepted."""
    length = torch.full((bs,), ACCEPTED)
    return _windows(WINDOW, ACCEPTED, length, slots, device, generator)


def tree_windows(
    tree: Tree, bs: int, slots: int, device: str, generator: torch.Generator
) -> Accept:
    """Windows of a tree; of each request a random number of steps is accepted, the root at least.

    Accepted nodes are in increasing positions, as in a tree laid out by depth. With one branch a
    step they are the window's first, and nothing moves.
    """
    entries = tree.steps + 1
    length = torch.randint(1, entries + 1, (bs,), generator=generator)
    return _windows(tree.drafts, entries, length, slots, device, generator, tree.topk == 1)


def _windows(
    window: int,
    entries: int,
    length: torch.Tensor,
    slots: int,
    device: str,
    generator: torch.Generator,
    chain: bool = False,
) -> Accept:
    bs = len(length)
    starts = torch.randperm(slots // window, generator=generator)[:bs] * window
    slot = starts[:, None] + torch.arange(window)
    nodes = torch.arange(entries).expand(bs, entries)
    if not chain:
        order = torch.rand(bs, window - 1, generator=generator).argsort(1)[:, : entries - 1]
        nodes = torch.cat((torch.zeros(bs, 1, dtype=torch.long), order.sort(1).values + 1), 1)
    used = torch.arange(entries) < length[:, None]
    index = torch.where(used, nodes + torch.arange(bs)[:, None] * window, -1)
    src, tgt = slot.gather(1, nodes)[used], slot[:, :entries][used]
    return Accept(*(x.to(device) for x in (slot, index.int(), length.int(), tgt, src)))
