"""Where the demo shows itself: text as it comes, and what it is busy with on standard error."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from specpool.demo.tokenizer import Tokenizer
from specpool.spec import Event


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


class Transcript:
    """Shows a loop's answers under their names: as they come where `streams`, else whole.

    Several requests' texts would run into each other, so only one at a time can stream.
    """

    def __init__(
        self,
        screen: Screen,
        names: Sequence[str],
        tokenizer: Tokenizer,
        eos: int | None,
        *,
        streams: bool,
    ) -> None:
        self._screen, self._names, self._streams = screen, names, streams
        self._tokenizer, self._eos = tokenizer, eos
        self._tokens: list[list[int]] = [[] for _ in names]
        self._steps = [0 for _ in names]
        # A character may end in a later step than it begins in.
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in names]

    def show(self, event: Event) -> None:
        """Take what a step brought a request."""
        request, screen = event.request, self._screen
        self._tokens[request] += event.tokens
        self._steps[request] += 1
        if self._streams and self._steps[request] == 1:
            screen.heading(self._names[request])
        if self._streams:
            screen.write(self._text(request, event.tokens))
        elif event.finished:
            screen.heading(self._names[request])
            screen.write(self._text(request, self._tokens[request]))
        if event.finished:
            count, steps = len(self._tokens[request]), self._steps[request]
            screen.write(f"\n[{count} tokens in {steps} steps]\n")

    def _text(self, request: int, tokens: Sequence[int]) -> str:
        shown = (token for token in tokens if token != self._eos)
        return self._decoders[request].decode(b"".join(map(self._tokenizer.token_bytes, shown)))
