"""A Llama's weights, read from a GGUF file.

GGUF lays a Llama's Q and K rows for rotary pairs that are neighbours (0, 1), (2, 3), ...; llama.py
rotates them that way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specpool.demo.tokenizer import Tokenizer


@dataclass(frozen=True)
class Config:
    """A Llama's sizes. `eos` is the token that ends an answer, None when there is none."""

    layers: int
    dim: int
    ffn_dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    eps: float
    eos: int | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are [out, in], norms [dim]."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """A whole model: `embedding` and `head` are [vocab, dim], one tensor where they are tied."""

    config: Config
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


# GGUF's name of each of a layer's tensors, in the order of LayerWeights' fields.
_GGUF_LAYER = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
)


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
    on_config: Callable[[Config, Tokenizer], None] = lambda config, tokenizer: None,
) -> tuple[Weights, Tokenizer]:
    """Read a Llama and its tokenizer from a GGUF file, dequantised to `dtype` on `device`.

    `on_config` is called before the first tensor is read, which takes the time, and
    `on_tensor(done, total)` after each. Raises FileNotFoundError when there is no
    such file and ValueError when it is not a GGUF file, not a Llama, or a Llama whose rotary
    embedding or tokenizer is of a kind that is not written here.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no model file at {path}")
    from gguf import GGUFReader
    from gguf.quants import dequantize

    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = fields.get("general.architecture")
    if found != "llama":
        raise ValueError(f"{path} holds the architecture {found!r}; the demo runs 'llama' only")
    tokenizer = _tokenizer(fields, path)
    config = _config(fields, {entry.name: entry.shape.tolist() for entry in reader.tensors}, path)
    on_config(config, tokenizer)

    tensors: dict[str, Tensor] = {}
    for done, entry in enumerate(reader.tensors, 1):
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        tensors[entry.name] = values.to(device, dtype)
        on_tensor(done, len(reader.tensors))
    layers = [
        LayerWeights(*(tensors[f"blk.{i}.{name}.weight"] for name in _GGUF_LAYER))
        for i in range(config.layers)
    ]
    embedding = tensors["token_embd.weight"]
    # A file without an output matrix ties it to the embedding.
    head = tensors.get("output.weight", embedding)
    return Weights(config, embedding, layers, tensors["output_norm.weight"], head), tokenizer


def _config(fields: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], path: Path) -> Config:
    """The sizes, from a file's fields and its tensors' shapes, innermost dimension first."""
    if "rope_freqs.weight" in shapes:
        raise ValueError(f"{path} scales its rotary frequencies, which the demo does not do")
    heads = fields["llama.attention.head_count"]
    config = Config(
        layers=fields["llama.block_count"],
        dim=fields["llama.embedding_length"],
        ffn_dim=fields["llama.feed_forward_length"],
        heads=heads,
        kv_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        vocab=int(shapes["token_embd.weight"][1]),
        context=fields["llama.context_length"],
        rope_base=fields["llama.rope.freq_base"],
        eps=fields["llama.attention.layer_norm_rms_epsilon"],
        eos=fields.get("tokenizer.ggml.eos_token_id"),
    )
    if fields["llama.rope.dimension_count"] != config.head_dim:
        raise ValueError(f"{path} rotates a part of each head only, which the demo does not do")
    return config


def _tokenizer(fields: dict[str, object], path: Path) -> Tokenizer:
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"{path} has the tokenizer {kind}; the demo has ('gpt2', 'smollm') only")
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    types = fields["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(merges, list)
    assert isinstance(types, list)
    control = 3  # GGUF's TokenType.CONTROL
    return Tokenizer(tokens, merges, {i for i, kind in enumerate(types) if kind == control})
