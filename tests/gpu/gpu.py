"""What only a GPU has, for tests that run on a CPU as well: graphs, streams, counts.

On a CPU a captured graph is the call itself, replayed by calling it, a stream is the one order that
there is, and nothing is counted. So a test here is one text for both, and what it expects is held
to account wherever the suite runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from specpool_kernels import move
from tests.moves.places import On

Call = Callable[[], object]


def captured(on: On, call: Call) -> Call:
    """A graph of the call, as the function that replays it; the call itself has not run then."""
    if on.device == "cpu":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@contextmanager
def other_stream(on: On) -> Iterator[None]:
    """Another stream as the current one, behind what was queued; waited for at the end."""
    if on.device == "cpu":
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def busy(on: On, cycles: int = 50_000_000) -> None:
    """Keep the current stream busy for some 30 ms, so that what is queued behind is in flight."""
    if on.device != "cpu":
        torch.cuda._sleep(cycles)


@contextmanager
def synchronisations(on: On) -> Iterator[list[str]]:
    """What PyTorch says each time that the host waits for the device."""
    said: list[str] = []
    if on.device == "cpu":
        yield said
        return
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
    finally:
        torch.cuda.set_sync_debug_mode("default")
    said += [str(w.message) for w in caught if "synchroniz" in str(w.message)]


def allocations(on: On) -> int:
    """Blocks that the caching allocator has handed out so far."""
    if on.device == "cpu":
        return 0
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def compiled_kernels() -> int:
    """Kernels that Triton's JIT has compiled, or loaded from its cache, in this process."""
    kernels = (move.move_rows, move.move_accepted, move.move_staged)
    caches = [cache for kernel in kernels for cache in kernel.device_caches.values()]
    return sum(len(kernel_cache) for kernel_cache, *_ in caches)
