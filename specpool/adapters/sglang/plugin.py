"""The plugin: which functions of SGLang are replaced, and what it says about it.

``register`` is what SGLang calls in the launcher and in every process it spawns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import specpool
from specpool.adapters.sglang import moves, patch, refusals, verify
from specpool.adapters.sglang.installed import sglang_version
from specpool.adapters.sglang.patch import Outcome, Patch
from specpool.adapters.sglang.settings import Settings
from specpool.backends import backend_for, why_not

logger = logging.getLogger("specpool.sglang")
TESTED = ("0.5.23",)
"""SGLang's versions that the test suite runs against."""
_MOVE = ("self", "tgt_loc", "src_loc")
_MEMORY_POOL = "sglang.srt.mem_cache.memory_pool"
_DEEPSEEK_V4 = "sglang.srt.mem_cache.deepseek_v4_memory_pool"
_WINDOWS = "sglang.srt.mem_cache.swa_memory_pool"
# classes of the memory pool's module whose own move is replaced by SPECPOOL_SGLANG=all
_MOVED = (
    "MHATokenToKVPool",
    "MHATokenToKVPoolMXFP8",
    "MLATokenToKVPool",
    "DSATokenToKVPool",
    "HybridLinearKVPool",
)
_MINIMAX = f"{_MEMORY_POOL}:MiniMaxSparseKVPool.move_kv_cache"
_UNGUARDED = (
    "the refusal of what it cannot verify is not in place (see the other error), and a move alone "
    "would turn a crash into wrong answers"
)
_ACCEPT = "sglang.srt.speculative.spec_utils:move_accept_tokens_to_target_kvcache"
_ACCEPT_PARAMETERS = (
    "batch",
    "accept_index",
    "num_correct_drafts",
    "token_to_kv_pool_allocator",
)
_COMPRESSED = (
    "its compress states are kept per position, not per slot, so that moving its rows alone would "
    "be wrong; turn speculative decoding off, or trees with --speculative-eagle-topk 1"
)

_HOOKED: set[str] = set()


class Report(NamedTuple):
    """What the plugin did in this process.

    Attributes:
        settings: what it was asked for.
        patched: targets that are in place.
        failed: targets that are not, with the reason.
    """

    settings: Settings
    patched: tuple[str, ...]
    failed: tuple[Outcome, ...]


def patches(settings: Settings) -> list[Patch]:
    """Everything that is replaced under these settings."""
    if settings.mode == "off":
        return []
    found = [
        # first: without it the next one is left out
        refusals.check_backend(settings.unsafe),
        Patch(_MINIMAX, _MOVE, moves.serving_minimax),
        Patch(f"{_MEMORY_POOL}:MHATokenToKOnlyPool.move_kv_cache", None, moves.serving),
        Patch(f"{_DEEPSEEK_V4}:DeepSeekV4SingleKVPool.move_kv_cache", None, moves.serving),
        Patch(
            f"{_DEEPSEEK_V4}:DeepSeekV4TokenToKVPool.move_kv_cache",
            None,
            moves.refusing(_COMPRESSED),
        ),
        *verify.patches(),
    ]
    if settings.mode == "all":
        found += [
            Patch(f"{_MEMORY_POOL}:{name}.move_kv_cache", _MOVE, moves.serving) for name in _MOVED
        ]
        found.append(Patch(f"{_WINDOWS}:SWAKVPool.move_kv_cache", _MOVE, moves.serving))
        found.append(_fp4_warm_up())
    found.append(Patch(_ACCEPT, _ACCEPT_PARAMETERS, moves.accepting))
    return found


def install(settings: Settings) -> Report:
    """Put everything in place and say what was done: one INFO line, an ERROR a failure."""
    outcomes: list[Outcome] = []
    for one in patches(settings):
        unguarded = one.target == _MINIMAX and outcomes[0].reason is not None
        outcomes.append(Outcome(_MINIMAX, _UNGUARDED) if unguarded else patch.apply(one))
    if settings.mode != "off":
        outcomes.append(_hook_arguments(settings))
    patched = tuple(o.target for o in outcomes if o.reason is None)
    failed = tuple(o for o in outcomes if o.reason is not None)
    with _heard():
        _say(settings, patched, failed)
    return Report(settings, patched, failed)


def register() -> None:
    """SGLang's entry point: read the settings, replace what they name.

    Nothing is raised: SGLang would log it and go on all the same.
    """
    settings, wrong = Settings.from_environment()
    for error in wrong:
        logger.error("specpool was given a setting that is none: %s", error)
    install(settings)


def _hook_arguments(settings: Settings) -> Outcome:
    """Refuse while arguments are resolved; SGLang has a registry of its own for that."""
    target = f"resolution hook {refusals.STEP}"
    if target in _HOOKED:
        return Outcome(target, None)
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(refusals.STEP)(refusals.check_arguments(settings.unsafe))
    except Exception as error:  # whatever another version's registry raises
        return Outcome(target, repr(error))
    _HOOKED.add(target)
    return Outcome(target, None)


def _fp4_warm_up() -> Patch:
    """FP4 pools lack what the warm-up of SGLang's tiled copy reads, and fail to be built for it."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def _init_kv_copy_and_warmup(self: Any) -> None:
            self._kv_copy_config = None

        return _init_kv_copy_and_warmup

    return Patch(f"{_MEMORY_POOL}:MHATokenToKVPoolFP4._init_kv_copy_and_warmup", ("self",), wrap)


def _backend() -> tuple[str, str | None]:
    """What serves this machine's GPUs, or its CPU where there are none, and why nothing does."""
    gpu = torch.version.cuda or getattr(torch.version, "hip", None)
    device = torch.device("cuda" if gpu else "cpu")
    try:
        name = backend_for(device)[0]
    except ValueError as error:  # SPECPOOL_BACKEND names none
        return f"none on {device}", str(error)
    return f"{name} on {device}", why_not(name, device)


@contextmanager
def _heard() -> Iterator[None]:
    """SGLang loads plugins before it sets logging up, when an INFO line would go nowhere."""
    handler, level = logging.StreamHandler(), logger.level
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    if not logger.hasHandlers():
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # nor may it where something has set logging up for warnings
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _say(settings: Settings, patched: tuple[str, ...], failed: tuple[Outcome, ...]) -> None:
    found = sglang_version()
    backend, unserved = _backend()
    logger.info(
        "specpool %s in SGLang %s, mode %s, backend %s: %s",
        specpool.__version__,
        found,
        settings.mode,
        backend,
        ", ".join(target.rpartition(":")[2] for target in patched) or "nothing is replaced",
    )
    if found not in TESTED and settings.mode != "off":
        logger.warning(
            "specpool was tested with SGLang %s, not %s: replaced functions had the expected "
            "parameters, more was not checked",
            ", ".join(TESTED),
            found,
        )
    if unserved is not None and settings.mode != "off":
        logger.error("specpool will move nothing: %s", unserved)
    for outcome in failed:
        logger.error("specpool could not replace %s: %s", *outcome)
