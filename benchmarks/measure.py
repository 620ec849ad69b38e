"""Timing and reporting that the benchmarks share: medians with spread, machine and versions."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import specpool


def interleaved(
    calls: dict[str, Callable[[], object]], device: str, seconds: float = 2.0, least: int = 7
) -> dict[str, list[float]]:
    """Seconds of each call, the calls taken in turn so that a machine's drift hits all alike."""
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    for call in calls.values():
        call()
    sync()
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or min(map(len, times.values())) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            sync()
            times[name].append(time.perf_counter() - start)
    return times


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "q1": low, "q3": high, "runs": len(values)}


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
        "numpy": np.__version__,
        "specpool": specpool.__version__,
        "command": " ".join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
    }


def write(path: str, results: list[dict[str, Any]]) -> None:
    """Results as JSON, beside the machine they were measured on."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    print(f"written to {target}")
