"""One row of slots for every draft node: the request's prefix, then the node's own path.

The rows have the shape of SGLang's ``req_to_token``, so that its decode kernels read each node as
a request of its own. They are built with static shapes from what a verify step brings, without a
read by the host and without an allocation, into buffers that captured graphs may keep.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

DUMMY_SLOT = 0
"""The slot that padding reads and writes."""


class TreeBatch(NamedTuple):
    """What a verify step brings.

    Attributes:
        requests: int64 ``[bs]``, each request's row in ``req_to_token``.
        prefix: ``[bs]``, tokens of each request without its drafts.
        mask: bool, flat, who sees whom in SGLang's FULL_MASK layout: for each live request in
            turn ``[drafts, prefix + drafts]``.
        positions: ``[bs * drafts]``, each node's position: its prefix plus its depth.
        out_cache_loc: ``[live * drafts]``, each node's slot. A graph is padded to ``bs`` requests
            and its batch is not: where there are fewer slots, the requests after them are padding,
            whose other entries are stale and whose part of the mask is absent.
    """

    requests: torch.Tensor
    prefix: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class Bucket(NamedTuple):
    """The rows of one batch shape, views of the same buffers whatever the batch.

    Attributes:
        slots: int32 ``[bs * drafts, width]``, what stands for ``req_to_token``.
        numbers: int64 ``[bs * drafts]``, what stands for ``req_pool_indices``: 0, 1, 2, ...
        lens: int64 ``[bs * drafts]``, what stands for ``seq_lens``: prefix + depth + 1.
    """

    slots: torch.Tensor
    numbers: torch.Tensor
    lens: torch.Tensor


def row_bytes(count: int, width: int) -> int:
    """Bytes of the slots of ``count`` rows."""
    return count * width * torch.int32.itemsize


class TreeRows:
    """Rows for every node of the largest batch, and what building them needs, allocated once.

    Args:
        req_to_token: int32 ``[requests, width]``, SGLang's table.
        requests: the largest batch.
        drafts: nodes of one request's tree, its root included.
    """

    def __init__(self, req_to_token: torch.Tensor, requests: int, drafts: int) -> None:
        device, self.width = req_to_token.device, req_to_token.shape[1]
        self.count, self.drafts = requests * drafts, drafts
        self._req_to_token = req_to_token

        def made(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        self._slots = torch.full(
            (self.count, self.width), DUMMY_SLOT, dtype=torch.int32, device=device
        )
        self._numbers = torch.arange(self.count, device=device)
        self._lens = torch.ones(self.count, dtype=torch.int64, device=device)
        self._request = made(self.count)
        self._place = made(self.count)
        self._loc = made(self.count, torch.int32)
        self._prefix, self._stride, self._start = (made(self.count) for _ in range(3))
        pairs = self.count * drafts
        self._at, self._seen = made(pairs), made(pairs, torch.bool)
        self._slot = made(pairs, torch.int32)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return row_bytes(self.count, self.width)

    def bucket(self, requests: int, drafts: int) -> Bucket:
        """The views for a batch of ``requests`` trees of ``drafts`` nodes.

        Raises:
            ValueError: more rows, or larger trees, than were allocated for.
        """
        count = requests * drafts
        if count > self.count or drafts > self.drafts:
            raise ValueError(
                f"{requests} requests of {drafts} drafts need {count} rows, and {self.count} were "
                f"allocated, for {self.drafts} drafts a request at most"
            )
        return Bucket(self._slots[:count], self._numbers[:count], self._lens[:count])

    def write(self, bucket: Bucket, batch: TreeBatch, limit: int) -> None:
        """Build every node's row.

        Nothing is read by the host, and nothing is allocated. Whatever the tensors hold, no entry
        outside them is read or written, and no length exceeds ``limit``.

        Args:
            bucket: of the batch's ``requests`` and drafts.
            batch: tensors on the rows' device.
            limit: no row is longer; at least the longest prefix and its drafts.
        """
        count, drafts = bucket.lens.shape[0], batch.positions.shape[0] // batch.prefix.shape[0]
        live = min(batch.out_cache_loc.shape[0], count) // drafts
        end = live * drafts
        bucket.lens[end:].fill_(1)
        bucket.slots[end:, 0].fill_(DUMMY_SLOT)
        if live == 0:
            return
        limit = min(limit, self.width)
        prefix = self._prefix[:live]
        prefix.copy_(batch.prefix[:live])
        place, loc = self._places(batch, prefix, drafts, limit)
        seen = self._relatives(batch.mask, prefix, drafts)
        torch.add(place.view(end), 1, out=bucket.lens[:end])
        request = self._request[:end]
        request.view(live, drafts).copy_(batch.requests[:live, None])
        request.clamp_(0, self._req_to_token.shape[0] - 1)
        torch.index_select(
            self._req_to_token[:, :limit], 0, request, out=bucket.slots[:end, :limit]
        )
        # an ancestor's slot at the ancestor's place; what a node does not see writes the node's
        # own slot at the node's own place, once more
        shape = (live, drafts, drafts)
        pairs = end * drafts
        at = torch.where(
            seen, place[:, None, :], place[:, :, None], out=self._at[:pairs].view(shape)
        )
        slot = torch.where(
            seen, loc[:, None, :], loc[:, :, None], out=self._slot[:pairs].view(shape)
        )
        bucket.slots[:end].scatter_(1, at.view(end, drafts), slot.view(end, drafts))

    def _places(
        self, batch: TreeBatch, prefix: torch.Tensor, drafts: int, limit: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``[live, drafts]``: each node's place in a row, prefix + depth, and its slot."""
        live = prefix.shape[0]
        end = live * drafts
        place = self._place[:end].view(live, drafts)
        torch.sub(batch.positions[:end].view(live, drafts), prefix[:, None], out=place)
        place.clamp_(0, drafts - 1).add_(prefix[:, None]).clamp_(0, limit - 1)
        loc = self._loc[:end].view(live, drafts)
        loc.copy_(batch.out_cache_loc[:end].view(live, drafts))
        return place, loc

    def _relatives(self, mask: torch.Tensor, prefix: torch.Tensor, drafts: int) -> torch.Tensor:
        """Bool ``[live, drafts, drafts]``: whether node i sees node j, out of the full mask."""
        live = prefix.shape[0]
        pairs = live * drafts * drafts
        stride, start = self._stride[:live], self._start[:live]
        torch.add(prefix, drafts, out=stride)
        # a request's mask begins after those before it, and a node's view of its tree after its
        # view of the prefix
        torch.cumsum(stride, 0, out=start)
        start.sub_(stride).mul_(drafts).add_(prefix)
        at, node = self._at[:pairs].view(live, drafts, drafts), self._numbers[:drafts]
        at.copy_(node[:, None]).mul_(stride[:, None, None]).add_(node).add_(start[:, None, None])
        at.clamp_(0, mask.shape[0] - 1)
        seen = self._seen[:pairs]
        torch.index_select(mask, 0, at.view(pairs), out=seen)
        return seen.view(live, drafts, drafts)
