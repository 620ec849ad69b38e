"""Processes of SGLang for tests: with the plugin in each of its settings, or without it.

A patch stays in a process for good, so what is compared runs in processes of its own. They are
forked from a server that has imported SGLang, which takes many seconds, and nothing else;
`test_loading` shows the plugin in fresh and in spawned processes as well.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

PRELOADED = [
    "torch",
    "sglang.srt.plugins",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.mem_cache.swa_memory_pool",
    "sglang.srt.mem_cache.deepseek_v4_memory_pool",
    "sglang.srt.speculative.spec_utils",
    "sglang.srt.speculative.eagle_worker_common",
]


class Engine:
    """One process; calling it runs a function of a test's file there.

    Args:
        plugins: whether it loads SGLang's plugins, as every process of SGLang does first.
        before: called before it loads them.
        environment: variables that it starts with.
    """

    def __init__(
        self,
        *,
        plugins: bool = True,
        before: Callable[[], None] | None = None,
        **environment: str,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._process = ProcessPoolExecutor(
            1, mp_context=context, initializer=_start, initargs=(plugins, before, environment)
        )

    def __call__(self, function, *arguments):
        """What the function returns or raises, run in the engine's process."""
        return self._process.submit(function, *arguments).result()

    def log(self) -> list[str]:
        """What the plugin logged since the process started, each line with its level in front."""
        return self(_logged)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error) -> None:
        self._process.shutdown()


_LOG: list[str] = []


def _logged() -> list[str]:
    return _LOG


def _start(plugins: bool, before: Callable[[], None] | None, environment: dict[str, str]) -> None:
    import torch

    logger = logging.getLogger("specpool.sglang")
    logger.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: _LOG.append(f"{record.levelname} {record.getMessage()}")
    logger.addHandler(handler)

    torch.set_num_threads(1)
    for name in [name for name in os.environ if name.startswith("SPECPOOL_")]:
        del os.environ[name]
    os.environ.update(environment)
    if before is not None:
        before()
    if plugins:
        from sglang.srt.plugins import load_plugins

        load_plugins()
