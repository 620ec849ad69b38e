"""What one batched forward is given: new tokens, where their KV goes, and what each may see.

A prompt's chunk, a draft tree and a level of a growing tree are the same thing with other masks:
tokens that see all of their request's prefix, and of the *window* behind it what the mask allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specpool.request_table import RequestTable
from specpool.spec.tree import DraftTree


@dataclass(frozen=True, eq=False)
class ForwardStep:
    """One forward of D new tokens for each of ``bs`` requests; all tensors lie on one device.

    A request's tokens stand at the front of its row; behind them is padding, which has a token and
    a slot of -1, sees nothing and is seen by nothing. Its logits are never read.

    Attributes:
        tokens: int64 ``[bs, D]``, -1 is padding.
        positions: int64 ``[bs, D]``: where each stands in its sequence, whatever its slot.
        out_cache_loc: int64 ``[bs, D]``: the slot that each one's KV is written to, -1 is padding.
        prefix_loc: int32 ``[bs, P]``: slots of the positions 0, 1, ... that precede the window;
            those from ``prefix_len[r]`` on are not the request's to read here.
        prefix_len: int64 ``[bs]``: positions of the prefix; every new token sees all of them.
        window_loc: int64 ``[bs, W]``: slots that new tokens may see besides, W >= D: the new
            tokens' own, and before them those of a tree that grows level by level.
        window_positions: int64 ``[bs, W]``.
        mask: bool ``[bs, D, W]``: which of the window each new token sees, itself included.
    """

    tokens: Tensor
    positions: Tensor
    out_cache_loc: Tensor
    prefix_loc: Tensor
    prefix_len: Tensor
    window_loc: Tensor
    window_positions: Tensor
    mask: Tensor

    @property
    def context_loc(self) -> Tensor:
        """Prefix and window in one, int64 ``[bs, P + W]``; padding is slot 0, the dummy slot."""
        return torch.cat([self.prefix_loc.long(), self.window_loc.clamp(min=0)], dim=1)

    @property
    def context_positions(self) -> Tensor:
        """The position of each slot of ``context_loc``, int64 ``[bs, P + W]``."""
        place = torch.arange(self.prefix_loc.shape[1], device=self.tokens.device)
        return torch.cat([place.expand(len(self.tokens), -1), self.window_positions], dim=1)

    @property
    def visible(self) -> Tensor:
        """Which slots of ``context_loc`` each new token sees, bool ``[bs, D, P + W]``."""
        place = torch.arange(self.prefix_loc.shape[1], device=self.tokens.device)
        prefix = (place < self.prefix_len[:, None])[:, None] & (self.tokens >= 0)[..., None]
        return torch.cat([prefix, self.mask], dim=2)

    @classmethod
    def chain(
        cls,
        table: RequestTable,
        rows: Sequence[int],
        begin: Sequence[int],
        tokens: Tensor,
        out_cache_loc: Tensor,
    ) -> ForwardStep:
        """Runs of text: ``tokens[r]`` stand at positions ``begin[r]``, ``begin[r] + 1``, ...

        Args:
            table: where the prefix is read.
            rows: ``[bs]`` its rows.
            begin: ``[bs]``, at most each row's length.
            tokens: int64 ``[bs, D]``, -1 padded, on the table's device.
            out_cache_loc: int64 ``[bs, D]``, -1 padded.
        """
        live = tokens >= 0
        order = torch.arange(tokens.shape[1], device=tokens.device)
        length = torch.tensor(begin, dtype=torch.int64).to(tokens.device)
        positions = length[:, None] + order
        mask = (order[:, None] >= order) & live[:, None] & live[..., None]
        prefix = _prefix(table, rows, max(begin))
        return cls(tokens, positions, out_cache_loc, prefix, length, out_cache_loc, positions, mask)

    @classmethod
    def tree(
        cls, table: RequestTable, rows: Sequence[int], tree: DraftTree, out_cache_loc: Tensor
    ) -> ForwardStep:
        """Draft trees behind all that ``rows`` hold.

        Args:
            table: where the prefix is read.
            rows: ``[bs]`` its rows.
            tree: on the table's device.
            out_cache_loc: int64 ``[bs, D]``, -1 behind a tree's nodes.
        """
        lengths = table.lengths[list(rows)]
        on_device = lengths.to(tree.tokens.device)
        positions = tree.positions(on_device)
        prefix = _prefix(table, rows, int(lengths.max()))
        loc, mask = out_cache_loc, tree.ancestors
        return cls(tree.tokens, positions, loc, prefix, on_device, loc, positions, mask)

    @classmethod
    def level(
        cls,
        table: RequestTable,
        rows: Sequence[int],
        tokens: Tensor,
        window_loc: Tensor,
        depths: Tensor,
        mask: Tensor,
    ) -> ForwardStep:
        """The next nodes of growing trees, behind the nodes that were fed before them.

        Args:
            table: where the prefix is read.
            rows: ``[bs]`` its rows.
            tokens: int64 ``[bs, n]``.
            window_loc: int64 ``[bs, fed]``, slots of all fed nodes, the new ones last.
            depths: int64 ``[fed]``, how far each fed node is from its root.
            mask: bool ``[bs, n, fed]``, see ``TreeExpansion``.
        """
        new = tokens.shape[1]
        lengths = table.lengths[list(rows)]
        on_device = lengths.to(tokens.device)
        positions = on_device[:, None] + depths
        own, place = window_loc[:, -new:], positions[:, -new:]
        prefix = _prefix(table, rows, int(lengths.max()))
        return cls(tokens, place, own, prefix, on_device, window_loc, positions, mask)


def _prefix(table: RequestTable, rows: Sequence[int], longest: int) -> Tensor:
    index = torch.tensor(rows, dtype=torch.int64).to(table.device)
    return table.slots[index, :longest]
