"""Which GPU a test process uses: every pytest-xdist worker has its own, where there are enough.

The environment says it, before anything initialises CUDA. The first process writes the names of all
GPUs of the run into ``EVERY``, which its workers and the programs that tests start inherit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping

EVERY = "SPECPOOL_TEST_GPUS"
"""Names of the GPUs that the whole run may use, by commas."""
Environment = MutableMapping[str, str]


def visibility(hip: bool) -> str:
    """The environment variable that says which GPUs a process sees."""
    return "HIP_VISIBLE_DEVICES" if hip else "CUDA_VISIBLE_DEVICES"


def every_gpu(environment: Environment, hip: bool, count: Callable[[], int]) -> list[str]:
    """Names of the GPUs that the run may use: those that the first process sees.

    Args:
        environment: what is set; ``EVERY`` is added to it.
        hip: whether torch is built for HIP.
        count: how many GPUs this process sees, without initialising CUDA where that is possible.
    """
    if EVERY not in environment:
        visible = range(count())
        named = environment.get(visibility(hip)) or environment.get("CUDA_VISIBLE_DEVICES")
        names = named.split(",") if named else map(str, visible)
        environment[EVERY] = ",".join(name for name, _ in zip(names, visible, strict=False))
    return [name for name in environment[EVERY].split(",") if name]


def pin(environment: Environment, hip: bool, gpus: list[str]) -> None:
    """Let a worker see one GPU alone: its own, or one that it shares where workers are more."""
    worker = environment.get("PYTEST_XDIST_WORKER")
    if worker is not None and gpus:
        environment[visibility(hip)] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


def needs_gpus(markexpr: str) -> bool:
    """Whether ``-m`` selects tests that need a GPU, and no others."""
    return bool(re.search(r"\bgpu\b", markexpr)) and not re.search(r"\bnot +gpu\b", markexpr)
