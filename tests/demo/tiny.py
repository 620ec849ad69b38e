"""A tiny model with random weights, and attentions that watch what they select.

Small enough for every run, and with gains at which wrong KV changes the text within a few tokens.
"""

import functools
import math

import torch

from specpool.demo.generate import greedy, shuffled_slots
from specpool.demo.llama import DenseAttention, Llama
from specpool.demo.minimax import BlockSparseAttention, Sparsity
from specpool.demo.tokenizer import Tokenizer
from specpool.demo.weights import Config, LayerWeights, Weights

CPU = torch.device("cpu")
CONFIG = Config(
    layers=8,
    dim=64,
    ffn_dim=128,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocab=257,
    context=4096,
    rope_base=1e4,
    eps=1e-5,
    eos=None,
)
SPARSITY = Sparsity(dense_layers=3, block=4, topk=6, alpha=1.0)
NEW = 64
PROMPTS = torch.randint(0, 257, (3, 64), generator=torch.Generator().manual_seed(1)).tolist()

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [chr(b) for b in _PRINTABLE] + [chr(256 + i) for i in range(256 - len(_PRINTABLE))]
"""A GPT-2 vocabulary's 256 byte tokens, in the order that its files have them."""


class Watched(BlockSparseAttention):
    """Records how near each selection came to another one, and how many blocks it left out."""

    def __init__(self, *args, page_size=1):
        super().__init__(*args, SPARSITY, page_size=page_size)
        self.margin = float("inf")
        self.dropped = 0

    def keep_blocks(self, best, query_blocks):
        keep = super().keep_blocks(best, query_blocks)
        blocks = torch.arange(best.shape[-1])
        forced = (blocks == 0) | (blocks == query_blocks[:, None, None])
        seen = best > float("-inf")
        worst_kept = best.masked_fill(~keep | forced, float("inf")).amin(-1)
        best_dropped = best.masked_fill(keep | ~seen, float("-inf")).amax(-1)
        self.margin = min(self.margin, float((worst_kept - best_dropped).min()))
        self.dropped += int((seen & ~keep).sum())
        return keep


ATTENTIONS = {"minimax": Watched, "mha": DenseAttention}


def random_weights(
    config: Config,
    *,
    seed: int = 0,
    gain: float = 2.0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | None = None,
) -> Weights:
    """Draw a model at random: normal weights scaled by 1 / sqrt(in), norms of one.

    `gain` multiplies the Q, K and O matrices: at 1 a small random model attends almost evenly and
    hardly notices wrong KV; at 2 it does.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return (drawn * (scale / math.sqrt(columns))).to(device, dtype)

    def ones() -> torch.Tensor:
        return torch.ones(config.dim, dtype=dtype, device=device)

    q_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    layers = [
        LayerWeights(
            attn_norm=ones(),
            q=matrix(q_width, config.dim, gain),
            k=matrix(kv_width, config.dim, gain),
            v=matrix(kv_width, config.dim),
            o=matrix(config.dim, q_width, gain),
            ffn_norm=ones(),
            gate=matrix(config.ffn_dim, config.dim),
            up=matrix(config.ffn_dim, config.dim),
            down=matrix(config.dim, config.ffn_dim),
        )
        for _ in range(config.layers)
    ]
    embedding = matrix(config.vocab, config.dim, math.sqrt(config.dim))
    return Weights(config, embedding, layers, ones(), matrix(config.vocab, config.dim))


@functools.cache
def tiny_model(dtype=torch.float64):
    return Llama(random_weights(CONFIG, dtype=dtype))


def new_attention(kind, size, dtype=torch.float64, page=1):
    return ATTENTIONS[kind](CONFIG, size, dtype, CPU, page_size=page)


@functools.cache
def reference(kind, prompt):
    """Plain greedy decoding of a prompt, and the attention it ran on."""
    size = len(PROMPTS[prompt]) + NEW
    attention = new_attention(kind, size)
    answer = greedy(tiny_model(), attention, shuffled_slots(size, seed=2), PROMPTS[prompt], NEW)
    return answer, attention


def byte_tokenizer():
    """256 bytes, and one special token that ends an answer."""
    return Tokenizer([*BYTES, "<|im_end|>"], [], {256})
