"""Full cycles of rows, over and over: what a race between loads and stores would not survive.

A cycle moves every row by one place, so a row that is overwritten before it is read is lost for
good, and its neighbour stands there twice from then on. A thousand rounds are compared once, with
the rows rolled by a thousand places.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import torch

from specpool.mover import RowMover
from specpool.rows import rows_from
from specpool_kernels import move
from tests.moves.places import On

WIDTHS = {"16-byte": 128, "4-byte": 36, "byte": 11}
"""Bytes of a row, by the class of access that moves it."""


def lost_rows(on: On, rows: int, width: int, rounds: int, form: str = "move") -> int:
    """Rows that are not what they must be after ``rounds`` moves of a full cycle.

    Args:
        rows: rows of the buffer, all in the cycle.
        width: bytes a row.
        form: ``"move"``, or ``"accept"``: the cycle as one window whose every entry is accepted.
    """
    random = torch.randint(0, 256, (rows, width), dtype=torch.uint8)
    buffer = torch.zeros(rows, width, dtype=torch.uint8, device=on.device)
    mover = RowMover(rows_from(buffer), backend=on.backend)
    order = torch.randperm(rows, device=on.device)  # places of the cycle, anywhere in the buffer
    buffer[order] = random.to(on.device)
    index = torch.arange(rows, dtype=torch.int32, device=on.device).roll(1)[None]
    length = on.loc([rows], torch.int32)
    source = order.roll(1)
    for _ in range(rounds):
        if form == "move":
            mover.move(order, source)
        else:
            mover.move_accepted(order, index, length)
    mover.check()
    return int((buffer[order].cpu() != random.roll(rounds, 0)).any(1).sum())


def without_barriers(folder: Path) -> ModuleType:
    """The kernels with their barriers taken out, as a module of their own.

    Args:
        folder: where its source goes, which Triton reads.
    """
    source = Path(move.__file__).read_text()
    assert source.count("tl.debug_barrier()") == 2
    mutant = folder / "move_without_barriers.py"
    mutant.write_text(source.replace("tl.debug_barrier()", "pass"))
    spec = importlib.util.spec_from_file_location(mutant.stem, mutant)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
