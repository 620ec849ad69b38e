"""The speeds to reach, as checks of a result: MiniMax-M3's buffers, 8,192 slots, medians.

On a CPU against per-buffer indexing, PyTorch's and SGLang's; on a GPU against the device's own copy
rate, an empty launch, and SGLang's kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SHAPE, SLOTS = "minimax-m3", 8192
TARGETS = {("accept", n): 3.0 for n in (1, 4, 16)} | {("accept", n): 1.3 for n in (64, 256)}
TARGETS |= {("random", n): 3.0 for n in (1, 4, 16)}
TARGETS |= {("random", n): 1.0 for n in (64, 256, 1024, 2048)}
"""On a CPU, the least ratio against indexing, by kind and number of requests or pairs."""
_TORCH = "torch indexing"
_SGLANG, _PART = "SGLang indexing, main K/V", "specpool, main K/V"
_TILED, _EMPTY = "SGLang tiled kernel, main K/V", "empty launch"


_OBJECTS = 16 << 10  # bytes of Python's own objects in a call


class Check(NamedTuple):
    """A figure beside what is wanted of it."""

    what: str
    against: str
    got: float
    wanted: float
    met: bool
    unit: str = "x"


def checks(result: dict[str, Any], facts: dict[str, Any]) -> list[Check]:
    """What the design asks of one result of ``benchmarks.move``, and whether it is met.

    Args:
        result: an entry of ``results``.
        facts: the file's other keys: ``shape``, ``device``, ``copy_bytes_per_second``, ...
    """
    kind, n = result["kind"], result["n"]
    if facts["shape"] != SHAPE or (kind, n) not in TARGETS:
        return []
    what = f"{'accept windows' if kind == 'accept' else 'random pairs'}, {n:,}"
    time = {name: s["median"] for name, s in result["seconds"].items()}
    if facts["device"] == "cpu":
        found = [(_TORCH, time[_TORCH] / time["specpool"])]
        if _SGLANG in time:
            found.append((_SGLANG, time[_SGLANG] / time[_PART]))
        least = TARGETS[kind, n]
        ratios = [Check(what, name, got, least, got >= least) for name, got in found]
        held = "extra_bytes" in result
        return [*ratios, _memory(what, result, facts)] if held else ratios
    if kind != "accept":
        return []
    out: list[Check] = []
    gpu = {name: s["median"] for name, s in result["gpu_seconds"].items()}
    if n >= 64:
        rate = result["bytes"] / gpu["specpool"]
        share = rate / facts["copy_bytes_per_second"]["median"]
        out.append(Check(what, "the device's copy rate", 100 * share, 80, share >= 0.8, "%"))
    if n == 1:
        ratio = time["specpool"] / time[_EMPTY]
        out.append(Check(what, "an empty launch, at most", ratio, 1.5, ratio <= 1.5))
    if n >= 16 and _TILED in time:
        ratio = gpu[_TILED] / gpu[_PART]
        out.append(Check(what, _TILED, ratio, 3, ratio >= 3))
    return out


def _memory(what: str, result: dict[str, Any], facts: dict[str, Any]) -> Check:
    held = result["extra_bytes"]["specpool"]
    most = result["most_moving_pairs"] * facts["widest_row"] + _OBJECTS
    against = "extra memory, at most one buffer's moved rows and 16 KiB"
    return Check(what, against, held / 1024, most / 1024, held <= most, " KiB")
