"""Byte-level BPE as SmolLM2 has it: GPT-2's, except that every digit is a word of its own.

Text becomes UTF-8 bytes, each byte a printable character, and pairs of those are merged in the
order of the merge table; so any text can be encoded, and decoding gives the same bytes back.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import groupby, pairwise

# GPT-2's split without its number group, which never matches once digits are split off: letters,
# other marks, white space. [^\W\d_] is "any letter" to Python's re, which knows no \p{L}.
_WORDS = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in a GPT-2 vocabulary, by byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_TO_CHAR = _byte_characters()
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(_BYTE_TO_CHAR)}


class Tokenizer:
    """Text to token ids and back, from a GGUF file's own tables.

    `tokens` holds each id's characters (bytes in GPT-2's printable alphabet, or a special token's
    plain text), `merges` the pairs "left right" in order of priority, `special` the ids that are
    matched whole before anything is split.
    """

    def __init__(self, tokens: list[str], merges: list[str], special: set[int]) -> None:
        self._tokens = tokens
        self._ids = {token: i for i, token in enumerate(tokens)}
        self._rank = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._special = frozenset(special)
        # The longest first, so that no special token is taken for a shorter one it begins with.
        names = sorted((tokens[i] for i in special), key=len, reverse=True)
        # "(?!)" matches nowhere: a vocabulary without special tokens is never split.
        self._special_split = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")

    def encode(self, text: str) -> list[int]:
        """The token ids of `text`; special tokens written out in it become their ids."""
        ids: list[int] = []
        for place, chunk in enumerate(self._special_split.split(text)):
            if place % 2:  # re.split puts what the group matched at the odd places
                ids.append(self._ids[chunk])
            else:
                for word in _split_words(chunk):
                    ids += self._merge(word)
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; a character may be spread over several tokens."""
        text = self._tokens[token]
        if token in self._special:
            return text.encode()
        return bytes(_CHAR_TO_BYTE[char] for char in text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, with U+FFFD where the bytes are no UTF-8."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def _merge(self, word: str) -> list[int]:
        parts = [_BYTE_TO_CHAR[byte] for byte in word.encode()]
        never = len(self._rank)
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda p: self._rank.get(p, never))
            if pair not in self._rank:
                break
            parts = _join(parts, pair)
        return [self._ids[part] for part in parts]


def _join(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with every occurrence of `pair` made one, from the left."""
    joined: list[str] = []
    place = 0
    while place < len(parts):
        if tuple(parts[place : place + 2]) == pair:
            joined.append(parts[place] + parts[place + 1])
            place += 2
        else:
            joined.append(parts[place])
            place += 1
    return joined


def _split_words(text: str) -> Iterator[str]:
    """The words of `text`; every number character (Unicode's N) is a word of its own."""
    for is_number, run in groupby(text, key=lambda char: unicodedata.category(char)[0] == "N"):
        if is_number:
            yield from run
        else:
            yield from _WORDS.findall("".join(run))
