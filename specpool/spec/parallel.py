"""One rank decides, every rank commits the same: accept across the ranks of a process group.

Ranks that each work out greedy acceptance diverge one day, since a logit's last bits depend on the
order of a reduction, and then hang in some later collective. So one rank verifies and the others
are told, tensor parallel ranks and pipeline stages alike; each of them moves its own heads or
layers with what it was told. A step, on every rank of ``group``:

    check_agreement(tree, rows, window, step=n, group=group)  # before the model's own collectives
    logits = model(...)
    accept = verify_greedy(tree, logits) if dist.get_rank(group) == src else None
    accept = broadcast_accept(accept, tree, rows, window, step=n, group=group, src=src)
    commit(pools, allocator, table, rows, window, accept.accept_index, accept.accept_len)

A rank that never comes cannot be told from a slow one but by time: give the group a timeout of
seconds (``init_process_group`` and ``new_group`` take one; gloo's is 30 minutes otherwise). With
NCCL a timeout is an exception only where ``TORCH_NCCL_BLOCKING_WAIT=1`` is set, and else the end
of the process. Tensors travel on the CPU with gloo, on the current GPU with NCCL; only gloo has
been run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from specpool.paging import host_ints
from specpool.spec.tree import DraftTree
from specpool.spec.verify import Accept


class RanksDisagree(RuntimeError):
    """Ranks are not at the same step, or one of them refused it; nothing was committed."""


def broadcast_accept(
    accept: Accept | None,
    tree: DraftTree,
    requests: Sequence[int] | Tensor,
    out_cache_loc: Tensor,
    *,
    step: int,
    group: dist.ProcessGroup | None = None,
    src: int = 0,
) -> Accept:
    """The accept of rank ``src``, on every rank of the group.

    Two collectives, whatever the batch: 9 numbers of each rank are gathered and compared, then the
    accept travels, all four tensors in one int64 ``[bs, S + 3]``. What is gathered tells of the
    whole step (tokens, parents, requests and slots by 64-bit checksums), so it must be the same
    on every rank, slots included. Reading it is one synchronisation on a GPU. After a
    ``RanksDisagree`` the group can be used again.

    Args:
        accept: the verifier's answer on rank ``src``; not read on the others, None will do.
        tree: the batch's trees; S is ``tree.steps + 1``.
        requests: ``[bs]``, as ``commit`` takes them.
        out_cache_loc: int32 or int64 ``[bs, D]`` or ``[bs * D]``, as ``commit`` takes them.
        step: the caller's own count of steps.
        group: None is the default group.
        src: the rank that decides, counted *within the group*.

    Returns:
        The accept, on the tree's device, its dtypes as ``Accept`` has them.

    Raises:
        RanksDisagree: on every rank at once: any of the above differs between ranks, or another
            rank raised one of the errors below.
        TypeError, ValueError: on the rank that was given it, the others raise ``RanksDisagree``:
            an accept that is missing or of another batch, shapes that do not fit, a ``src``
            outside the group.
        ValueError: this process is not in the group (the group's ranks are not told).
        RuntimeError: from ``torch.distributed``: a rank is gone, or did not come in time.
    """

    def describe() -> Tensor:
        if not 0 <= src < dist.get_world_size(group):
            raise ValueError(
                f"src is {src}; it counts within the group, in [0, {dist.get_world_size(group)})"
            )
        digest = _digest(tree, requests, out_cache_loc, step, src)
        if dist.get_rank(group) == src:
            _check_accept(accept, tree)
        return digest

    device = _agree(describe, group)
    bs, width = tree.batch_size, tree.steps + 1
    if accept is not None and dist.get_rank(group) == src:
        rest = torch.stack([accept.accept_len.long(), accept.bonus, accept.nan.long()], dim=1)
        packed = torch.cat([accept.accept_index.long(), rest], dim=1).to(device)
    else:
        packed = torch.empty(bs, width + 3, dtype=torch.int64, device=device)
    dist.broadcast(packed, group=group, group_src=src)
    packed = packed.to(tree.tokens.device)
    return Accept(
        accept_index=packed[:, :width].int(),
        accept_len=packed[:, width].int(),
        bonus=packed[:, width + 1].clone(),
        nan=packed[:, width + 2].bool(),
    )


def check_agreement(
    tree: DraftTree,
    requests: Sequence[int] | Tensor,
    out_cache_loc: Tensor,
    *,
    step: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Refuse, on every rank at once, a step that is not the same on all ranks of the group.

    To be called before a forward that has collectives of its own: those hang, or mix rows of
    different requests, where ranks disagree. One collective.

    Args:
        tree: see ``broadcast_accept``, for these and the others.
        requests: ``[bs]``.
        out_cache_loc: ``[bs, D]`` or ``[bs * D]``.
        step: the caller's own count of steps.
        group: None is the default group.

    Raises:
        As ``broadcast_accept``.
    """
    _agree(lambda: _digest(tree, requests, out_cache_loc, step, -1), group)


_FIELDS = (
    "refused",
    "src",  # -1 in check_agreement, so that one call is not taken for the other
    "step",
    "batch size",
    "num_draft_tokens",
    "tree steps",
    "tree",
    "requests",
    "out_cache_loc",
)
_CHECKSUMS = _FIELDS[-3:]


def _agree(describe: Callable[[], Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Gather and compare what all ranks ``describe``; returns the device that the group takes."""
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not in the group; only the group's ranks take part")
    on_gpu = "nccl" in dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    # What this rank alone refuses is still told to the others, or they would wait for it.
    refusal: Exception | None = None
    try:
        own = describe().to(device)
    except Exception as error:
        refusal = error
        own = torch.ones(len(_FIELDS), dtype=torch.int64, device=device)
    everyone = own.new_empty(dist.get_world_size(group), len(own))
    dist.all_gather(list(everyone), own, group=group)
    if refusal is not None:
        raise refusal
    _refuse(everyone.tolist())
    return device


def _refuse(digests: list[list[int]]) -> None:
    refused = [rank for rank, digest in enumerate(digests) if digest[0]]
    if refused:
        raise RanksDisagree(
            f"rank {refused[0]} of the group refused its own step, and says why; nothing was "
            "committed"
        )
    first = dict(zip(_FIELDS, digests[0], strict=True))
    for rank, digest in enumerate(digests):
        told = [
            name if name in _CHECKSUMS else f"{name} ({value}, not {first[name]})"
            for name, value in zip(_FIELDS, digest, strict=True)
            if value != first[name]
        ]
        if told:
            raise RanksDisagree(
                f"ranks are at different steps: rank {rank} of the group differs from rank 0 in "
                f"{', '.join(told)}; nothing was committed"
            )


def _digest(
    tree: DraftTree,
    requests: Sequence[int] | Tensor,
    out_cache_loc: Tensor,
    step: int,
    src: int,
) -> Tensor:
    """What a rank tells of its step, int64 ``[len(_FIELDS)]`` on the tree's device."""
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree must be a DraftTree, got {type(tree).__name__}")
    bs, nodes = tree.tokens.shape
    rows = host_ints("requests", requests)
    if len(rows) != bs:
        raise ValueError(f"requests has {len(rows)} rows, the tree {bs}; give one each")
    if not isinstance(out_cache_loc, Tensor):
        raise TypeError(f"out_cache_loc must be a torch.Tensor, got {type(out_cache_loc).__name__}")
    if out_cache_loc.shape not in ((bs, nodes), (bs * nodes,)):
        raise ValueError(
            f"out_cache_loc must be [bs, D] = [{bs}, {nodes}] or [{bs * nodes}] as the tree, got "
            f"{list(out_cache_loc.shape)}"
        )
    device = tree.tokens.device
    sums = [
        _checksum(tree.tokens, tree.parents, tree.sizes),
        _checksum(torch.from_numpy(rows).to(device)),
        _checksum(out_cache_loc.to(device)),
    ]
    told = torch.tensor([0, src, step, bs, nodes, tree.steps], dtype=torch.int64)
    return torch.cat([told.to(device), torch.stack(sums)])


def _checksum(*tensors: Tensor) -> Tensor:
    """Int64 [], of values and their places: the sum of each one's hash, modulo 2^64.

    The hash is splitmix64's (Steele, Lea and Flood 2014, figure 15; constants as there, signed),
    of the value plus its place times the same odd number as there.
    """
    values = torch.cat([t.reshape(-1).long() for t in tensors])
    place = torch.arange(1, len(values) + 1, device=values.device)
    x = values + place * -0x61C8864680B583EB
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return (x ^ _shift(x, 31)).sum()


def _shift(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _check_accept(accept: Accept | None, tree: DraftTree) -> None:
    if not isinstance(accept, Accept):
        raise TypeError(
            f"the rank that decides gives the verifier's Accept, got {type(accept).__name__}"
        )
    bs = tree.batch_size
    integers = (torch.int32, torch.int64)
    for (name, tensor), shape, dtypes in zip(
        accept._asdict().items(),
        ((bs, tree.steps + 1), (bs,), (bs,), (bs,)),
        (integers, integers, (torch.int64,), (torch.bool,)),
        strict=True,
    ):
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise ValueError(
                f"accept.{name} must be {dtypes[0]} {list(shape)} for this tree, got "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
