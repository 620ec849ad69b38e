"""Rows of one mover share no bytes: where they did, which buffer a byte moves with were chance."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from specpool.rows import Rows


def check_disjoint(rows: Iterable[Rows]) -> None:
    """Refuse rows that share bytes.

    Rows of one tensor and one page geometry (the heads of an HND page, the parts of a split page)
    may interleave and are checked row by row within a page; otherwise whole byte ranges must not
    intersect.

    Raises:
        ValueError: names the two sets of rows that share bytes.
    """
    groups: dict[tuple[int, int, int], list[Rows]] = {}
    for r in rows:
        groups.setdefault((r.tensor.data_ptr(), r.page_size, r.page_stride), []).append(r)
    spans = []
    for group in groups.values():
        base = min(r.address for r in group)
        # parts that lie further apart than a page (heads outermost) are runs of their own
        apart = [r for r in group if r.pages > 1 and r.address - base + r.page_span > r.page_stride]
        together = [r for r in group if r not in apart]
        if len(together) > 1:
            _check_page(together)
        for run in (together, *([r] for r in apart)):
            first = min(run, key=lambda r: r.address)
            spans.append((first.address, max(r.end for r in run), first.name))
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise ValueError(
                f"{name} and {other} share memory, or a stretch of it: every buffer may be given "
                "once, and buffers whose rows take turns must be declared from the one tensor that "
                "holds them"
            )


def _check_page(group: list[Rows]) -> None:
    base = min(r.address for r in group)
    starts = np.concatenate(
        [np.arange(r.page_size) * r.token_stride + (r.address - base) for r in group]
    )
    widths = np.concatenate([np.full(r.page_size, r.width) for r in group])
    owner = np.concatenate([np.full(r.page_size, i) for i, r in enumerate(group)])
    order = np.argsort(starts, kind="stable")
    ends = (starts + widths)[order]
    clash = np.flatnonzero(starts[order][1:] < ends[:-1])
    if clash.size:
        a, b = group[owner[order[clash[0]]]], group[owner[order[clash[0] + 1]]]
        raise ValueError(f"{a.name} and {b.name} share memory: rows of a page must not overlap")
