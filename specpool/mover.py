"""RowMover: any list of rows on one device, moved in one launch.

It checks a call's arguments once, at this door, picks the backend that serves the device and hands
it the call. Pools build one of these over their own rows; so may anyone over tensors of theirs.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from specpool.backends import Backend, backend_for, build_backend, known_backend
from specpool.checks import PairCheck, check_accept, check_pairs
from specpool.disjoint import check_disjoint
from specpool.ops import register
from specpool.rows import Rows, rows_from
from specpool_kernels.device import is_capturing


class _Service(NamedTuple):
    """What serves a mover's calls: a backend, and validation by value where it is wanted."""

    moves: Backend
    judge: PairCheck | None


class RowMover:
    """Moves rows within buffers: ``buffer[tgt] = buffer[src]`` in all of them, in one launch.

    Any overlap of sources and targets in a call is right: all sources are read before any target
    is written. -1 skips a pair; ``src == tgt`` costs no memory traffic. Slots outside raise
    before a byte moves on the CPU; on a GPU their pairs are dropped and counted (see ``check``),
    unless ``SPECPOOL_CHECK=1`` was set when the mover was built: then every call is validated
    first, at the price of one synchronisation, except while a graph is captured.

    The rows' tensors are kept alive and must stay where they are: memory that was replaced is
    noticed at the next call, and the cpu backend's views keep PyTorch from resizing it.

    Args:
        rows: what moves, all on one device; an empty list moves nothing.
        backend: ``"cpu"``, ``"torch"`` or ``"triton"``; None takes ``backend_for`` the device.

    Attributes:
        launches: times a backend was invoked: 1 a call that has pairs and rows, else 0.

    Raises:
        ValueError: rows on several devices, rows that share memory, an unknown backend.

    Example:
        >>> key = torch.arange(8.0).view(4, 2)
        >>> mover = RowMover(rows_from(key))
        >>> mover.move(torch.tensor([0, 1]), torch.tensor([1, 2]))
        >>> key[:, 0].tolist()
        [2.0, 4.0, 4.0, 6.0]
    """

    def __init__(self, rows: Sequence[Rows], backend: str | None = None) -> None:
        self._backend_name = None if backend is None else known_backend(backend)
        self._checks_values = os.environ.get("SPECPOOL_CHECK") == "1"
        self._attached: dict[str, list[Rows]] = {}
        self._reserved = 0
        self._captured = False
        self._counters: torch.Tensor | None = None
        self.launches = 0
        if isinstance(rows, torch.Tensor | Rows):
            raise TypeError(
                f"a mover takes a list of Rows, which rows_from(tensor) gives, got "
                f"{type(rows).__name__}"
            )
        self._build(list(rows), {})
        self._handle = register(self)

    @property
    def device(self) -> torch.device | None:
        """The rows' device; None without rows."""
        return self._rows[0].tensor.device if self._rows else None

    @property
    def rows(self) -> tuple[Rows, ...]:
        """All rows that move, attached ones included."""
        return tuple(self._rows)

    @property
    def backend(self) -> str | None:
        """Name of the backend in use; None without rows."""
        return self._name

    @property
    def rows_moved(self) -> int:
        """Live pairs so far, times the buffers they moved in. Reading it synchronises."""
        return 0 if self._counters is None else int(self._counters[1])

    def move(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Move ``buffer[tgt_loc[i]] = buffer[src_loc[i]]`` for every i, in every buffer.

        Args:
            tgt_loc: int32 or int64 locs of any shape and strides, on the rows' device.
            src_loc: as many locs. 1-D and 2-D locs are read in place, others are flattened,
                which may copy them.

        Raises:
            TypeError: locs that are no int32 or int64 tensors.
            ValueError: counts that differ, another device, one target with different sources.
            IndexError: a slot other than -1 outside the rows (see the class).
        """
        if torch.compiler.is_compiling():
            torch.ops.specpool.move(self._tensors, self._handle, tgt_loc, src_loc)
            return
        if not self._rows:
            return
        check_pairs(tgt_loc, src_loc, self._rows[0].tensor.device)
        if tgt_loc.numel() == 0:
            return
        moves, judge = self._ready(tgt_loc.numel())
        if judge is not None:
            judge.pairs(tgt_loc, src_loc)
        moves.move(tgt_loc, src_loc)
        self.launches += 1

    def move_accepted(
        self, out_cache_loc: torch.Tensor, accept_index: torch.Tensor, accept_len: torch.Tensor
    ) -> None:
        """Move every request's accepted entries to the front of the window it verified.

        For row r and j < accept_len[r]: the row of slot ``out_cache_loc.flat[accept_index[r, j]]``
        moves to slot ``out_cache_loc[r, j]``.

        Args:
            out_cache_loc: ``[bs, D]`` or ``[bs * D]`` locs that the verify step wrote.
            accept_index: ``[bs, S]`` entries, flat into ``[bs * D]``; -1 skips.
            accept_len: ``[bs]`` entries of each row that count, **the root included**
                (SGLang's ``num_correct_drafts + 1``); 0 is padding, of which nothing is read.
            All int32 or int64, of any strides, on the rows' device.

        Raises:
            TypeError: not int32 or int64 tensors.
            ValueError: shapes that do not fit, another device, an ``accept_len`` outside
                [0, min(S, D)], two requests that use one slot.
            IndexError: an entry outside its request's window, a slot outside the rows.
        """
        if torch.compiler.is_compiling():
            torch.ops.specpool.move_accepted(
                self._tensors, self._handle, out_cache_loc, accept_index, accept_len
            )
            return
        if not self._rows:
            return
        device = self._rows[0].tensor.device
        window = check_accept(out_cache_loc, accept_index, accept_len, device)
        if window.numel() == 0 or accept_index.numel() == 0:
            if device.type == "cpu" and bool(accept_len.any()):
                raise ValueError(
                    f"accept_len counts entries, but accept_index is {list(accept_index.shape)} "
                    f"and out_cache_loc {list(window.shape)}: there are none"
                )
            return
        moves, judge = self._ready(accept_index.numel())
        if judge is not None:
            judge.accepted(window, accept_index, accept_len)
        moves.move_accepted(window, accept_index, accept_len)
        self.launches += 1

    def copy_from(self, other: RowMover, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        """Copy ``mine[tgt_loc[i]] = others[src_loc[i]]`` from another mover's rows, in one launch.

        Not for use inside ``torch.compile``.

        Args:
            other: a mover whose rows have these rows' widths, in order, on this device, and
                share no memory with them. Attached rows count.
            tgt_loc: locs of this mover's rows.
            src_loc: as many locs of the other's rows.

        Raises:
            ValueError: rows of other widths, on another device, or sharing memory.
            TypeError, IndexError: as ``move``.
        """
        if not self._rows and not other._rows:
            return
        if [r.width for r in self._rows] != [r.width for r in other._rows]:
            raise ValueError(
                f"copy_from needs rows of the same widths in order: {len(self._rows)} rows of "
                f"{_some(r.width for r in self._rows)} bytes here, {len(other._rows)} of "
                f"{_some(r.width for r in other._rows)} there"
            )
        check_pairs(tgt_loc, src_loc, self._rows[0].tensor.device)
        if other.device != self.device:
            raise ValueError(f"copy_from copies on one device: {self.device}, not {other.device}")
        if tgt_loc.numel() == 0:
            return
        self._ready(tgt_loc.numel())
        other._ready(0)
        moves, judge = self._copies_from(other)
        if judge is not None and not is_capturing(self._rows[0].tensor.device):
            judge.pairs(tgt_loc, src_loc)
        moves.move(tgt_loc, src_loc)
        self.launches += 1

    def attach(
        self,
        name: str,
        tensor: torch.Tensor,
        layout: str = "nhd",
        *,
        page_size: int | None = None,
        widths: Sequence[int] | None = None,
        mapping: torch.Tensor | None = None,
    ) -> None:
        """Let another tensor that is keyed by slot move with the rows, in the same launch.

        Args:
            name: what it is called; a name attached before is replaced.
            tensor, layout, page_size, widths, mapping: see ``rows_from``.

        Raises:
            ValueError: the tensor shares memory with the rows or is on another device.
            RuntimeError: a move of this mover was captured into a graph already.
        """
        added = rows_from(
            tensor, layout, page_size=page_size, widths=widths, mapping=mapping, name=name
        )
        self._build(self._own, {**self._attached, name: added})

    def detach(self, name: str) -> None:
        """Stop moving the tensor attached as ``name``; KeyError if there is none."""
        if name not in self._attached:
            attached = ", ".join(self._attached) or "none"
            raise KeyError(f"no tensor is attached as {name!r}; attached: {attached}")
        self._build(self._own, {n: r for n, r in self._attached.items() if n != name})

    def replace_rows(self, rows: Sequence[Rows]) -> None:
        """Move these rows from now on; what is attached, reserved and counted stays.

        Raises:
            RuntimeError: a move of this mover was captured into a graph already.
        """
        self._build(list(rows), self._attached)

    def reserve(self, max_pairs: int) -> None:
        """Prepare for calls of up to ``max_pairs`` pairs: allocate, and compile every form.

        Required before a graph is captured; afterwards such calls neither allocate nor
        synchronise.

        Raises:
            TypeError, ValueError: no integer of at least 1.
            RuntimeError: more than was reserved when a move of this mover was captured.
        """
        if operator.index(max_pairs) < 1:
            raise ValueError(f"reserve needs at least 1 pair, got {max_pairs}")
        if max_pairs <= self._reserved:
            return
        if self._captured:
            raise RuntimeError(
                f"a move of this mover was captured with {self._reserved} pairs reserved, and the "
                f"graph holds on to that scratch; reserve {max_pairs} before the capture"
            )
        self._reserved = max_pairs
        if self._service is not None:
            self._service.moves.reserve(self._reserved)

    def check(self) -> None:
        """Raise if slots were outside since the last check. Synchronises.

        Raises:
            IndexError: how many pairs were dropped (a pair is counted once a call; one that is
                only bad behind a mapping, once for each kind of mapped rows).
        """
        if self._counters is None:
            return
        dropped = int(self._counters[0])
        if dropped:
            self._counters[0] = 0
            raise IndexError(
                f"{dropped} pairs named slots outside the rows and were not moved; set "
                "SPECPOOL_CHECK=1 before building the mover to raise at the call"
            )

    def copy_dropped(self, count: torch.Tensor) -> None:
        """Have the count that ``check`` reads copied to ``count``, without waiting for it.

        Args:
            count: int64 ``[1]``; pinned host memory for a mover on a GPU.
        """
        if self._counters is not None:
            count.copy_(self._counters[:1], non_blocking=True)

    def _build(self, own: list[Rows], attached: dict[str, list[Rows]]) -> None:
        """Check rows and build the table; the mover changes only when all is right."""
        if self._captured:
            raise RuntimeError(
                "a move of this mover was captured into a graph, which holds on to its rows; "
                "attach and replace rows before the capture"
            )
        rows = [*own, *(r for group in attached.values() for r in group)]
        devices = {r.tensor.device for r in rows}
        if len(devices) > 1:
            raise ValueError(
                f"rows are on several devices ({', '.join(sorted(map(str, devices)))}); a mover "
                "serves one"
            )
        check_disjoint(rows)
        name, service = None, None
        if rows:
            device = rows[0].tensor.device
            name = self._backend_name or backend_for(device)[0]
            if self._counters is None or self._counters.device != device:
                with torch.inference_mode(False):  # or they could not be counted on outside of it
                    self._counters = torch.zeros(2, dtype=torch.int64, device=device)
            service = self._serve(name, rows)
        self._own, self._attached, self._rows = own, attached, rows
        self._name, self._service = name, service
        self._tensors = list({id(r.tensor): r.tensor for r in rows}.values())
        mappings = {id(r.mapping): r.mapping for r in rows if r.mapping is not None}
        self._watched = [*self._tensors, *mappings.values()]
        self._addresses = [t.data_ptr() for t in self._watched]
        self._copies: weakref.WeakKeyDictionary[RowMover, tuple[list[Rows], _Service]] = (
            weakref.WeakKeyDictionary()
        )

    def _serve(self, name: str, rows: list[Rows], sources: list[Rows] | None = None) -> _Service:
        """The backend for these rows, and the validation by value that it does not do itself."""
        assert self._counters is not None
        moves = build_backend(name, rows, self._counters, sources)
        if self._reserved:
            moves.reserve(self._reserved)
        on_cpu = rows[0].tensor.device.type == "cpu"
        wanted = name != "cpu" and (on_cpu or self._checks_values)
        return _Service(moves, PairCheck(rows, sources) if wanted else None)

    def _ready(self, pairs: int) -> _Service:
        """What serves a call of ``pairs`` pairs; built anew when memory was replaced."""
        if list(map(torch.Tensor.data_ptr, self._watched)) != self._addresses:
            for row in self._rows:
                row.check_memory()
            self._build(self._own, self._attached)
        assert self._service is not None
        if self._service.judge is not None:
            # where values are read anyway, memory that shrank at its address is looked for too
            for row in self._rows:
                row.check_memory()
        if not is_capturing(self._rows[0].tensor.device):
            return self._service
        if pairs > self._reserved:
            raise RuntimeError(
                f"a call of {pairs} pairs is captured into a graph, but {self._reserved} are "
                f"reserved; call reserve({pairs}) before the capture"
            )
        self._captured = True
        return _Service(self._service.moves, None)  # values cannot be read during a capture

    def _copies_from(self, other: RowMover) -> _Service:
        known = self._copies.get(other)
        if known is None or known[0] is not other._rows:
            if is_capturing(self._rows[0].tensor.device):
                raise RuntimeError(
                    "copy_from is captured into a graph; copy once between these movers before "
                    "the capture"
                )
            check_disjoint([*self._rows, *other._rows])
            assert self._name is not None
            known = (other._rows, self._serve(self._name, self._rows, other._rows))
            self._copies[other] = known
        return known[1]


def _some(values: Iterable[int]) -> str:
    widths = sorted(set(values))
    return ", ".join(map(str, widths[:4])) + (", ..." if len(widths) > 4 else "")
