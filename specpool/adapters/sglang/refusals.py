"""MiniMax with speculation on CUDA: refused where SGLang cannot verify it, twice.

In SGLang 0.5.23 the missing move is the last of three failures there. A move that works would let
a server start whose verification crashes or, worse, takes a draft tree for a chain. So it is
refused while arguments are resolved, before any process is spawned, and again on every rank when
the attention backend is built; unless ``verify`` serves it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from specpool.adapters.sglang import verify
from specpool.adapters.sglang.patch import Patch
from specpool.adapters.sglang.settings import UNSAFE
from specpool.adapters.sglang.verify_checks import facts_of_arguments, facts_of_backend, why_not
from specpool.errors import UnsupportedAccess

logger = logging.getLogger("specpool.sglang")
BACKEND = "sglang.srt.layers.attention.minimax_sparse_backend:MiniMaxSparseAttnBackend.__init__"
STEP = "handle_speculative_decoding"
_BROKEN = (
    "SGLang 0.5.23 cannot verify drafts on MiniMax's sparse layers on CUDA: "
    "ForwardBatch.init_new fills no extend fields for TARGET_VERIFY, which "
    "MiniMaxSparseAttnBackend.forward_extend reads (AttributeError: 'NoneType' object has no "
    "attribute 'device'), and behind that its kernels take a draft tree for a chain"
)
_WORKS = (
    "What works: no --speculative-algorithm; ROCm with --speculative-eagle-topk 1; the NVFP4 stack "
    "with its own algorithms (DSPARK, DFLASH)"
)


class Speculation(NamedTuple):
    """What decides whether drafts can be verified.

    Attributes:
        algorithm: the resolved ``--speculative-algorithm``; None without speculation.
        sparse: whether MiniMax's sparse attention runs on SGLang's generic sparse backend.
        device: ``"cuda"``, ``"hip"`` or another device's type.
        unserved: why ``verify`` does not serve it; None where it does.
    """

    algorithm: str | None
    sparse: bool
    device: str
    unserved: str | None


def refusal(speculation: Speculation) -> str | None:
    """Why a server must not start like this; None where it may."""
    if speculation.algorithm is None or not speculation.sparse or speculation.device != "cuda":
        return None
    if speculation.unserved is None:
        return None
    return (
        f"specpool refuses --speculative-algorithm {speculation.algorithm} with MiniMax sparse "
        f"attention: {_BROKEN}. {_WORKS}. specpool's own verification does not serve it: "
        f"{speculation.unserved}. {UNSAFE}=1 starts it all the same"
    )


def check_arguments(unsafe: bool) -> Callable[[Any, Callable[[Any], None]], None]:
    """A resolution hook that refuses after SGLang has resolved speculation's arguments.

    Raises:
        ImportError: this SGLang has other names for what the hook reads.
    """
    # now, since a hook that fails later would keep every server with speculation from starting
    from sglang.srt.arg_groups.model_override_base import (  # noqa: F401
        model_config_of,
        resolved_view,
    )
    from sglang.srt.configs.model_config import (  # noqa: F401
        is_minimax_sparse,
        uses_minimax_m3_nvfp4_native_stack,
    )

    def refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        _decide(_from_arguments(server_args), unsafe, ValueError)

    return refuse


def check_backend(unsafe: bool) -> Patch:
    """The second line, on each rank: when the sparse attention backend has been built."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, runner: Any) -> None:
            original(self, runner)
            speculation = _from_backend(self, runner)
            _decide(speculation, unsafe, UnsupportedAccess)
            if speculation.algorithm is not None and speculation.unserved is None:
                verify.serve(self)

        return __init__

    return Patch(BACKEND, ("self", "runner"), wrap)


def _decide(speculation: Speculation, unsafe: bool, error: type[Exception]) -> None:
    reason = refusal(speculation)
    if reason is None:
        return
    if not unsafe:
        raise error(reason)
    logger.error("%s=1 overrides this, and answers may be wrong: %s", UNSAFE, reason)


def _from_arguments(server_args: Any) -> Speculation:
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolved_view

    view = resolved_view(server_args)
    if view.speculative_algorithm is None:
        return Speculation(None, False, _device(view.device), None)
    from sglang.srt.configs.model_config import (
        is_minimax_sparse,
        uses_minimax_m3_nvfp4_native_stack,
    )

    sparse = is_minimax_sparse(model_config_of(server_args).hf_config)
    sparse = sparse and not uses_minimax_m3_nvfp4_native_stack(view.quantization)
    device = _device(view.device)
    unserved = why_not(facts_of_arguments(view, device)) if sparse else None
    return Speculation(view.speculative_algorithm, sparse, device, unserved)


def _from_backend(backend: Any, runner: Any) -> Speculation:
    from sglang.srt.arg_groups.model_override_base import attention_backends_of
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_spec

    algorithm, device = get_spec().speculative_algorithm, _device(runner.device)
    if algorithm is None:
        return Speculation(None, True, device, None)
    dense = attention_backends_of(resolving_view(runner.server_args))
    return Speculation(algorithm, True, device, why_not(facts_of_backend(backend, device, dense)))


def _device(device: Any) -> str:
    """A device's type; ROCm's GPUs call themselves cuda too."""
    from sglang.srt.runtime_context import get_platform

    kind = str(device).partition(":")[0]
    return "hip" if kind == "cuda" and get_platform().is_hip else kind
