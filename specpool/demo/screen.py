"""Where the demo shows itself: text as it comes, and what it is busy with on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Screen:
    """Writes text to `out`; bars go to standard error, so that text can be piped on its own.

    Where standard error is no terminal, a line takes the place of each bar.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> None:
        """Show `text` at once."""
        self._out.write(text)
        self._out.flush()

    def heading(self, title: str) -> None:
        """Begin a part."""
        self.write(f"\n--- {title}\n")

    @contextmanager
    def bar(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """A progress bar; what it yields is called with how much is done, and of how much."""
        if not sys.stderr.isatty():
            print(f"{label} ...", file=sys.stderr, flush=True)
            yield lambda done, total: None
            return
        from tqdm import tqdm

        with tqdm(desc=label, file=sys.stderr, leave=False) as bar:

            def show(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield show
