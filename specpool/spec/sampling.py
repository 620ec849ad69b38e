"""Drawing tokens: the target's distribution with its options, and draws from a distribution."""

from __future__ import annotations

from operator import index

import torch
from torch import Tensor

from specpool.spec.tree_checks import values_are_read


def probabilities(
    logits: Tensor,
    temperature: Tensor | float = 1.0,
    top_p: Tensor | float = 1.0,
    top_k: Tensor | int | None = None,
) -> Tensor:
    """What a model draws from: temperature, then the top k, then the top p of those.

    ``softmax(logits / temperature)``; of it the ``top_k`` likeliest tokens (never more: of equal
    ones some may be left out), renormalised; of those the shortest prefix, the likeliest first,
    whose probabilities reach ``top_p``, renormalised (nucleus sampling, Holtzman et al. 2020). The
    order is that of SGLang, vLLM and Hugging Face. Each option is one number or a tensor ``[bs]``.

    Args:
        logits: floating ``[bs, ..., V]``; -inf is a token never drawn.
        temperature: at least 0; 0 puts everything on the argmax.
        top_p: in (0, 1].
        top_k: at least 1; None (or V and more) keeps all.

    Returns:
        float32 of the logits' shape. A distribution whose greatest logit is NaN or infinite is
        NaN throughout.

    Raises:
        ValueError: an option outside its range (tensors: on the CPU, see ``DraftTree``), of
            another shape or device.
    """
    heat = _option("temperature", temperature, logits, torch.float32)
    nucleus = _option("top_p", top_p, logits, torch.float32)
    scores = logits.float()
    choice = logits.argmax(-1, keepdim=True)
    token = torch.arange(logits.shape[-1], device=logits.device)
    # The best score is taken off first, so that no division by a small temperature overflows; what
    # is left of it is NaN where it was NaN or infinite, which makes the whole row NaN.
    scores = scores - scores.gather(-1, choice)
    greedy = torch.where(token == choice, scores, -torch.inf)
    scores = torch.where(heat > 0, scores / heat, greedy)
    if top_k is None and not isinstance(top_p, Tensor) and top_p == 1:
        return scores.softmax(-1)
    if top_k is None or isinstance(top_k, Tensor):
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            limit = _option("top_k", top_k, logits, torch.int64)
            best = best.masked_fill(token >= limit, -torch.inf)
    else:
        _check_range("top_k", top_k, top_k)
        best, order = scores.topk(min(index(top_k), scores.shape[-1]))  # far faster than a sort
    probs = best.softmax(-1)
    before = probs.cumsum(-1) - probs
    probs = torch.where((before < nucleus) | (nucleus == 1), probs, 0.0)
    probs = probs / probs.sum(-1, keepdim=True)
    # The best score is 0 now, or NaN: what every token starts from.
    return best[..., :1].expand_as(scores).clone().scatter_(-1, order, probs)


def sample(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One token from each distribution: int64 ``[...]`` from ``[..., V]``, which need not sum to 1.

    A token of probability 0 (or NaN) is drawn only where nothing else can be.
    """
    return _race(probs, generator).argmax(-1)


def sample_children(q: Tensor, k: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw k different tokens of each distribution, one after the other without replacement.

    The Gumbel top-k trick (Vieira 2014; Kool et al. 2019), which is an exponential race: the k
    largest ``q / Exp(1)`` in falling order are k successive draws.

    Args:
        q: ``[..., V]``, not negative.
        k: at most V.
        generator: of q's device; None is the device's default.

    Returns:
        int64 ``[..., k]`` in draw order. When fewer than k tokens have any probability, others
        follow them; the verifier judges those as point masses, which is right for any token.

    Raises:
        ValueError: k outside [1, V].
    """
    if not 1 <= k <= q.shape[-1]:
        raise ValueError(f"k is {k}; a vocabulary of {q.shape[-1]} gives 1 to {q.shape[-1]} tokens")
    return _race(q, generator).topk(k, dim=-1).indices


def _race(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    # In double precision: 24 random bits a token would make the tail of a large vocabulary wrong.
    noise = torch.empty(probs.shape, dtype=torch.float64, device=probs.device)
    return torch.where(probs > 0, probs / noise.exponential_(generator=generator), -1.0)


def _option(name: str, value: Tensor | float, logits: Tensor, dtype: torch.dtype) -> Tensor:
    """The option as a tensor that broadcasts over ``logits``, checked."""
    bs, dims = logits.shape[0], logits.dim()
    if not isinstance(value, Tensor):
        _check_range(name, float(value), float(value))
        return torch.full((1,) * dims, value, dtype=dtype, device=logits.device)
    if value.shape != (bs,) or value.device != logits.device:
        raise ValueError(
            f"{name} must be a number or [bs] = [{bs}] on {logits.device}, got "
            f"{list(value.shape)} on {value.device}"
        )
    if values_are_read(value.device) and bs:
        _check_range(name, *(float(bound) for bound in value.aminmax()))
    return value.to(dtype).view(bs, *(1,) * (dims - 1))


def _check_range(name: str, low: float, high: float) -> None:
    """Refuse an option whose values lie outside its range; NaN lies outside."""
    right, rule = {
        "temperature": (low >= 0 and high < float("inf"), "at least 0 and finite"),
        "top_p": (low > 0 and high <= 1, "in (0, 1]"),
        "top_k": (low >= 1, "at least 1, or None for all"),
    }[name]
    if not right:
        given = f"between {low} and {high}" if low < high else str(low)
        raise ValueError(f"{name} is {given}; it must be {rule}")
