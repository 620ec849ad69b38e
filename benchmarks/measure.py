"""What the benchmarks share: times with spread, memory, launches, the machine, and results on disk.

Calls take turns, so that a machine's drift hits all alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import specpool

Calls = dict[str, Callable[[], object]]


def interleaved(
    calls: Calls, device: str, seconds: float = 2.0, least: int = 7
) -> dict[str, list[float]]:
    """Seconds of each call until all that it started is done, the calls taken in turn."""
    for call in calls.values():
        call()
    synchronize(device)
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or min(map(len, times.values())) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            synchronize(device)
            times[name].append(time.perf_counter() - start)
    return times


def on_the_gpu(calls: Calls, rounds: int = 50) -> dict[str, list[float]]:
    """Seconds of each call on a CUDA device's clock, between events before and after it."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3)
    return times


def host_seconds(calls: Calls, device: str, rounds: int = 30, least: float = 2e-4) -> Any:
    """Seconds of each call on the host alone: many calls a reading, none waited for meanwhile."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    counts = {}
    for name, call in calls.items():
        start = time.perf_counter()
        for _ in range(10):
            call()
        counts[name] = max(1, int(least / ((time.perf_counter() - start) / 10)))
    for _ in range(rounds):
        for name, call in calls.items():
            synchronize(device)
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            times[name].append((time.perf_counter() - start) / counts[name])
    return times


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high, "runs": len(values)}


def copy_rate(device: str, seconds: float = 1.0) -> dict[str, float]:
    """Bytes a second that a plain copy of a large tensor reads and writes."""
    size = (1 << 30) if device == "cuda" else (256 << 20)
    generator = torch.Generator(device).manual_seed(2)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(256, generator=generator)
    target = torch.empty_like(source)
    times = interleaved({"copy": lambda: target.copy_(source)}, device, seconds)["copy"]
    if device == "cuda":
        times = on_the_gpu({"copy": lambda: target.copy_(source)})["copy"]
    return spread([2 * size / t for t in times])


def extra_bytes(call: Callable[[], object], device: str) -> int:
    """Most bytes that a call holds beyond what was there: the allocator's peak on CUDA.

    On a CPU: numpy's and Python's peak as tracemalloc sees it, plus PyTorch's as its profiler does;
    they need not coincide, so this is an upper bound.
    """
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    call()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    held = most = 0
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return peak + most


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object], device: str) -> int | None:
    """Kernels, copies and fills that a call starts on CUDA; on a CPU PyTorch operators it runs.

    None where the profiler may not watch the device: then it sees nothing.
    """
    call()
    if device == "cuda":
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
        on_device = torch.autograd.DeviceType.CUDA
        return sum(e.device_type == on_device for e in seen.events() or ()) or None
    with _Operators() as operators:
        call()
    return operators.count


def machine() -> dict[str, Any]:
    """What a reader must know to place the figures."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [x for x in info.read_text().splitlines() if x.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": np.__version__,
        "sglang": _version("sglang"),
        "specpool": specpool.__version__,
        "command": " ".join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: str, results: list[dict[str, Any]], **more: Any) -> None:
    """Results as JSON, beside the machine they were measured on and what else there is to say."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        json.dumps({"machine": machine(), **more, "results": results}, indent=1) + "\n"
    )
    print(f"written to {path}")
