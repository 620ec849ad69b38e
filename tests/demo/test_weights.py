"""Loading: a GGUF file written here is read back, and what cannot be run is refused by name."""

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from specpool.demo.weights import load_gguf
from tests.demo.tiny import BYTES, CPU

LAYER_SHAPES = {
    "attn_norm": (8,),
    "attn_q": (8, 8),
    "attn_k": (4, 8),
    "attn_v": (4, 8),
    "attn_output": (8, 8),
    "ffn_norm": (8,),
    "ffn_gate": (12, 8),
    "ffn_up": (12, 8),
    "ffn_down": (8, 12),
}


def write(path, architecture="llama", pre="smollm", rope=4, extra=()):
    """A Llama of two layers and random weights; returns its tensors by name."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(32)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(12)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(rope)
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*BYTES, "ab", "<end>"])
    writer.add_token_merges(["a b"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_eos_token_id(257)
    generator = np.random.default_rng(0)
    shapes = {"token_embd": (258, 8), "output_norm": (8,)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()}
    shapes |= dict(extra)
    tensors = {
        f"{name}.weight": generator.standard_normal(shape, np.float32)
        for name, shape in shapes.items()
    }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(values).double() for name, values in tensors.items()}


def load(path, on_tensor=lambda done, total: None):
    return load_gguf(path, torch.float64, CPU, on_tensor)


def test_a_file_is_read_back(tmp_path):
    tensors, seen = write(tmp_path / "m.gguf"), []
    weights, tokenizer = load(tmp_path / "m.gguf", lambda *progress: seen.append(progress))
    config = weights.config
    assert (config.layers, config.dim, config.ffn_dim) == (2, 8, 12)
    assert (config.heads, config.kv_heads, config.head_dim) == (2, 1, 4)
    assert (config.vocab, config.context, config.eos) == (258, 32, 257)
    assert config.rope_base == pytest.approx(1e4)
    assert config.eps == pytest.approx(1e-5)
    assert torch.equal(weights.embedding, tensors["token_embd.weight"])
    assert weights.head is weights.embedding  # tied
    assert torch.equal(weights.norm, tensors["output_norm.weight"])
    names = dict(zip(LAYER_SHAPES, ("attn_norm", "q", "k", "v", "o", "ffn_norm"), strict=False))
    names |= {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
    for i, layer in enumerate(weights.layers):
        for name, attribute in names.items():
            assert torch.equal(getattr(layer, attribute), tensors[f"blk.{i}.{name}.weight"])
    assert tokenizer.encode("ab<end>b") == [256, 257, BYTES.index("b")]
    assert seen == [(done, len(tensors)) for done in range(1, len(tensors) + 1)]


def test_a_head_of_its_own_is_used(tmp_path):
    tensors = write(tmp_path / "m.gguf", extra={"output": (258, 8)})
    weights, _ = load(tmp_path / "m.gguf")
    assert torch.equal(weights.head, tensors["output.weight"])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no model file at .*nowhere\.gguf"):
        load(tmp_path / "nowhere.gguf")


@pytest.mark.parametrize("content", [b"", b"not a model at all, but long enough to be read"])
def test_a_file_that_is_no_gguf_is_refused(tmp_path, content):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.gguf is not a readable GGUF file"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gpt2"}, "holds the architecture 'gpt2'"),
        ({"pre": "llama-bpe"}, r"has the tokenizer \('gpt2', 'llama-bpe'\)"),
        ({"rope": 2}, "rotates a part of each head only"),
        ({"extra": {"rope_freqs": (2,)}}, "scales its rotary frequencies"),
    ],
    ids=["architecture", "tokenizer", "partial rotation", "scaled rotation"],
)
def test_what_is_not_written_here_is_refused(tmp_path, change, message):
    write(tmp_path / "m.gguf", **change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m.gguf")
