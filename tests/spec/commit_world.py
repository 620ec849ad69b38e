"""Requests being served, with an oracle of their logical KV that knows nothing of slots.

A node of a draft tree has an id; its KV is bytes that follow from the id and the buffer. The oracle
keeps each request's history of ids, and ``check`` reads every position's bytes through the request
table, from every buffer of every pool. Whatever commit does with slots must leave that as it is.
"""

import random

import numpy as np
import torch

from specpool.allocator import PagedSlotAllocator
from specpool.pools import MHATokenToKVPool, MiniMaxSparseKVPool
from specpool.request_table import RequestTable
from specpool.spec.commit import commit


def mha(size, page, layers=2, layout=None):
    return MHATokenToKVPool(
        size, page, torch.float16, 2, 3, layers, "cpu", False, kv_cache_layout=layout
    )


def minimax(size, page):
    return MiniMaxSparseKVPool(
        size=size,
        page_size=page,
        dtype=torch.bfloat16,
        head_num=2,
        head_dim=3,
        idx_head_dim=5,
        dense_layer_ids=[0],
        sparse_layer_ids=[1, 2, 4],
        disable_value_sparse_layer_ids=[2, 4],
        device="cpu",
    )


POOLS = {
    "mha": mha,
    "mha-hnd": lambda size, page: mha(size, page, layout="hnd"),
    "minimax": minimax,
}


def buffers(pool) -> list[torch.Tensor]:
    """Every buffer as uint8 with the slot first, sharing its memory."""
    if isinstance(pool, MiniMaxSparseKVPool):
        parts = (pool.main_pool, pool.index_kv_pool, pool.index_k_pool)
        return [b for part in parts for b in buffers(part)]
    found = [b.view(torch.uint8) for b in (*pool.k_buffer, *getattr(pool, "v_buffer", []))]
    if getattr(pool, "kv_cache_layout", None) == "hnd":  # [pages, heads, page, bytes]
        return [b.permute(0, 2, 1, 3) for b in found]
    return found


class World:
    """Requests on a target pool, a draft model's pool, and a tensor attached to the target's mover.

    Attributes:
        pools: what commit is given.
        history: ids of each request's tokens, by row.
    """

    def __init__(self, page=1, pool="mha", prefixes=(5, 3, 9), window=8, capacity=300, seed=0):
        self.page, self.window = page, window
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        size = -(-max(capacity, 8 * page) // page) * page
        self.target, self.draft = POOLS[pool](size, page), mha(size, page, layers=1)
        self.hidden = torch.zeros(size + page, 7, dtype=torch.uint8)
        self.target.mover.attach("hidden states", self.hidden)
        self.pools = [self.target, self.draft]
        self.parts = [*buffers(self.target), *buffers(self.draft), self.hidden]
        self.numbers = {part.data_ptr(): number for number, part in enumerate(self.parts)}
        for part in self.parts:
            part.copy_(torch.randint(0, 256, part.shape, generator=self.generator))
        self.allocator = PagedSlotAllocator(size, page, "cpu")
        self._scatter()
        self.table = RequestTable(len(prefixes) + 2, max(200, 8 * page), "cpu")
        self.ids = 0
        self.values: dict[tuple[int, int], torch.Tensor] = {}
        self.history: dict[int, list[int]] = {}
        for length in prefixes:
            self.join(length)

    def _scatter(self):
        """A busy pool's free pages lie in no order."""
        slots = self.allocator.alloc(self.allocator.size).view(-1, self.page)
        for i in torch.randperm(len(slots), generator=self.generator).tolist():
            self.allocator.free(slots[i])

    def join(self, length) -> int:
        (row,) = self.table.alloc()
        ids = self.new_ids(length)
        slots = self.allocator.alloc_extend([0], [length], [-1])
        self.table.append(row, slots)
        self.write(slots.tolist(), ids)
        self.history[row] = ids
        return row

    def leave(self, row):
        self.allocator.free(self.table.free(row))
        del self.history[row]

    def new_ids(self, count):
        self.ids += count
        return list(range(self.ids - count, self.ids))

    def at(self, part, slot):
        """One slot's bytes in one buffer, as a view."""
        return part[divmod(slot, self.page)] if part.dim() == 4 else part[slot]

    def kv(self, node, part):
        """The bytes of a token's KV in a buffer."""
        key = node, self.numbers[part.data_ptr()]
        if key not in self.values:
            shape = self.at(part, 0).shape
            values = np.random.default_rng(key).integers(0, 256, shape, dtype=np.uint8)
            self.values[key] = torch.from_numpy(values)
        return self.values[key]

    def write(self, slots, ids):
        for part in self.parts:
            for slot, node in zip(slots, ids, strict=True):
                self.at(part, slot).copy_(self.kv(node, part))

    def draft_step(self, rows, sizes=None):
        """Windows for these rows (-1: padding), written with nodes of new ids.

        Returns:
            ``out_cache_loc [bs, D]``, -1 behind a tree's nodes, garbage for padding; and the ids.
        """
        loc = torch.tensor([-7, 10**9, 0, -1]).repeat(len(rows), self.window)[:, : self.window]
        nodes = {}
        for i, row in enumerate(rows):
            if row == -1:
                continue
            count = sizes[i] if sizes else self.window
            length = int(self.table.lengths[row])
            slots = self.allocator.alloc_extend(
                [length], [length + count], self.table.last_loc[row : row + 1]
            )
            loc[i] = -1
            loc[i, :count] = slots
            nodes[i] = self.new_ids(count)
            self.write(slots.tolist(), nodes[i])
        return loc, nodes

    def path(self, size):
        """A path from the root to some node of a random tree of ``size`` nodes."""
        parents = [-1, *(self.random.randrange(n) for n in range(1, size))]
        path = [self.random.randrange(size)]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        return path

    def accept(self, paths, entries, dtype=torch.int32):
        """accept_index and accept_len of paths of nodes ([] for padding), garbage behind them."""
        index = torch.tensor([-7, 10**9, 0, -1]).repeat(len(paths), entries)[:, :entries].to(dtype)
        for r, path in enumerate(paths):
            index[r, : len(path)] = torch.tensor(path) + r * self.window
        return index, torch.tensor([len(p) for p in paths]).to(dtype)

    def commit(self, rows, paths, mode="auto", sizes=None, pools=None, entries=None, **options):
        """A whole step, after which the oracle expects the paths' nodes behind each history."""
        loc, nodes = self.draft_step(rows, sizes)
        index, length = self.accept(paths, entries or max(1, *map(len, paths)))
        for r, path in enumerate(paths):
            if path:
                self.history[rows[r]] += [nodes[r][n] for n in path]
        pools = self.pools if pools is None else pools
        given = (self.allocator, self.table, rows, loc, index, length)
        return commit(pools, *given, mode, **options)

    def check(self):
        """The table has each request's history, byte for byte, and no slot is lost."""
        lengths = [len(self.history.get(row, [])) for row in range(self.table.requests)]
        assert self.table.lengths.tolist() == lengths
        held = [s for row in self.history for s in self.table.row(row).tolist()]
        assert len(held) == len(set(held))
        self.allocator.check_consistent()
        self.allocator.check_live("rows", torch.tensor(held))
        assert self.allocator.live == sum(lengths), "slots were lost, or freed while in use"
        assert self.allocator.held == sum(-n % self.page for n in lengths), "a page's tail was lost"
        for row, ids in self.history.items():
            slots = self.table.row(row).tolist()
            assert int(self.table.last_loc[row]) == slots[-1]
            assert not self.table.slots[row, len(ids) :].any()
            assert [s % self.page for s in slots] == [p % self.page for p in range(len(ids))]
            for part in self.parts:
                for slot, node in zip(slots, ids, strict=True):
                    assert torch.equal(self.at(part, slot), self.kv(node, part)), (row, slot)

    def snapshot(self):
        state = self.allocator.state()
        table = self.table
        host = [table.lengths, table.last_loc, *map(torch.from_numpy, (table._in_use, table._held))]
        books = [*map(torch.from_numpy, (state._live, state._free_pages)), table.slots, *host]
        return [t.clone() for t in (*self.parts, *books)]
