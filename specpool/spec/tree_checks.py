"""What a draft tree's tensors must be.

``check_shapes`` reads no values, so it runs for every tree; ``check_values`` reads them, so it
runs on the CPU, and on a GPU only when asked (it synchronises).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specpool_kernels.device import is_capturing

_Array = npt.NDArray[np.int64]
_Q_SLACK = 1e-2  # half precision draft probabilities sum to 1 within this


def values_are_read(device: torch.device) -> bool:
    """Whether values on ``device`` are validated now: on the CPU, or under SPECPOOL_CHECK=1."""
    if device.type == "cpu":
        return True
    return checks_asked_for(device)


def checks_asked_for(device: torch.device) -> bool:
    """Whether SPECPOOL_CHECK=1 is set and values can be read (not while a graph is captured)."""
    if os.environ.get("SPECPOOL_CHECK") != "1" or device.type == "meta":
        return False
    return not is_capturing(device)


def check_shapes(
    tokens: Tensor, parents: Tensor, sizes: Tensor, steps: int, proposal: str, q: Tensor | None
) -> None:
    """Refuse tensors that make no ``DraftTree``, without reading them.

    Raises:
        TypeError: not a tensor.
        ValueError: shapes, dtypes, devices, ``steps``, ``proposal``, or a ``q`` that is missing.
    """
    wanted = [
        ("tokens", tokens, torch.int64),
        ("parents", parents, torch.int32),
        ("sizes", sizes, torch.int32),
    ]
    for name, tensor, dtype in wanted:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != tokens.device:
            raise ValueError(f"{name} is on {tensor.device}, tokens on {tokens.device}")
    if tokens.dim() != 2 or tokens.shape[1] < 1:
        raise ValueError(f"tokens must be [bs, D] with D >= 1, got {list(tokens.shape)}")
    if parents.shape != tokens.shape:
        raise ValueError(f"parents must be {_s(tokens)} as tokens, got {_s(parents)}")
    if sizes.shape != tokens.shape[:1]:
        raise ValueError(f"sizes must be [bs] = [{tokens.shape[0]}], got {_s(sizes)}")
    if steps < 0:
        raise ValueError(f"steps is {steps}; it is the greatest depth, at least 0")
    if proposal not in ("deterministic", "sampled"):
        raise ValueError(f"proposal must be 'deterministic' or 'sampled', got {proposal!r}")
    if q is None:
        if proposal == "sampled":
            raise ValueError("a sampled tree needs q, what its children were drawn from")
        return
    if proposal != "sampled":
        raise ValueError("a deterministic tree has no q; give proposal='sampled' if it was drawn")
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    bs, width = tokens.shape
    if (
        q.dim() != 3
        or q.shape[0] != bs
        or not 1 <= q.shape[1] <= width
        or not q.is_floating_point()
    ):
        raise ValueError(
            f"q must be floating [bs, Q, V] with bs = {bs} and 1 <= Q <= D = {width}, got "
            f"{q.dtype} {_s(q)}"
        )
    if q.device != tokens.device:
        raise ValueError(f"q is on {q.device}, tokens on {tokens.device}")


def check_values(
    tokens: Tensor, parents: Tensor, sizes: Tensor, steps: int, q: Tensor | None
) -> None:
    """Refuse values that make no tree; shapes are right already.

    Raises:
        ValueError: naming the row and the node.
    """
    token: _Array = tokens.cpu().numpy()
    parent: _Array = parents.cpu().numpy().astype(np.int64)
    size: _Array = sizes.cpu().numpy().astype(np.int64)
    width = token.shape[1]
    for (r,) in _where((size < 0) | (size > width)):
        raise ValueError(f"sizes[{r}] is {size[r]}; a row has 0 to D = {width} nodes")
    node = np.arange(width)
    live = node < size[:, None]
    for r, i in _where(~live & ((token != -1) | (parent != -1))):
        raise ValueError(
            f"row {r} has {size[r]} nodes, so node {i} is padding: its token and parent must be "
            f"-1, got {token[r, i]} and {parent[r, i]}"
        )
    for r, i in _where(live & (token < 0)):
        raise ValueError(f"tokens[{r}, {i}] is {token[r, i]}; a node's token is not negative")
    child = live & (node > 0)
    for (r,) in _where(live[:, 0] & (parent[:, 0] != -1)):
        raise ValueError(f"parents[{r}, 0] is {parent[r, 0]}; node 0 is the root, its parent -1")
    for r, i in _where(child & ((parent < 0) | (parent >= size[:, None]))):
        raise ValueError(
            f"parents[{r}, {i}] is {parent[r, i]}, out of range: row {r} has nodes 0 to "
            f"{size[r] - 1}"
        )
    for r, i in _where(child & (parent >= node)):
        raise ValueError(
            f"parents[{r}, {i}] is {parent[r, i]}: a parent stands before its child (so there "
            f"are no cycles), give node {i} a parent from 0 to {i - 1}"
        )
    _check_siblings(token, parent, child)
    _check_depths(parent, child, steps)
    if q is not None:
        _check_q(q.detach().float().cpu().numpy(), parent, child)


def _check_siblings(token: _Array, parent: _Array, child: npt.NDArray[np.bool_]) -> None:
    row, node = np.nonzero(child)
    family, word = parent[row, node], token[row, node]
    order = np.lexsort((node, word, family, row))
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in (row, family, word):
        same &= key[order][1:] == key[order][:-1]
    for (at,) in _where(same):
        first, second = order[at], order[at + 1]
        raise ValueError(
            f"nodes {node[first]} and {node[second]} of row {row[first]} are siblings with the "
            f"same token {word[first]}; merge them"
        )


def _check_depths(parent: _Array, child: npt.NDArray[np.bool_], steps: int) -> None:
    depth = np.zeros_like(parent)
    rows = np.arange(len(parent))
    for i in range(1, parent.shape[1]):  # parents stand before their children
        depth[:, i] = np.where(child[:, i], depth[rows, parent[:, i]] + 1, 0)
    for r, i in _where(depth > steps):
        raise ValueError(f"node {i} of row {r} has depth {depth[r, i]}, but steps is {steps}")


def _check_q(q: npt.NDArray[np.float32], parent: _Array, child: npt.NDArray[np.bool_]) -> None:
    for r, i in _where(child & (parent >= q.shape[1])):
        raise ValueError(
            f"node {i} of row {r} is a child of node {parent[r, i]}, but q covers nodes 0 to "
            f"{q.shape[1] - 1}"
        )
    drawn = np.zeros(q.shape[:2], dtype=bool)
    row, node = np.nonzero(child)
    drawn[row, parent[row, node]] = True
    right = (q >= 0).all(-1) & (np.abs(q.sum(-1) - 1) <= _Q_SLACK)  # False for a NaN
    for r, n in _where(drawn & ~right):
        raise ValueError(
            f"q[{r}, {n}] is no distribution (sum {q[r, n].sum():.4g}, least {q[r, n].min():.4g}), "
            "but children were drawn from it"
        )


def _where(bad: npt.NDArray[np.bool_]) -> Sequence[Sequence[int]]:
    """The first place where ``bad`` holds, as a list of none or one."""
    return [[int(at[0]) for at in bad.nonzero()]] if bad.any() else []


def _s(tensor: Tensor) -> str:
    return str(list(tensor.shape))
