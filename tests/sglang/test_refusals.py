"""MiniMax with speculation on CUDA: refused by SGLang's own argument resolution and backend.

Arguments are resolved as the launcher does it, whole, from a model's configuration on disk and a
device that is named cuda; no GPU is needed for that.
"""

import json
from types import SimpleNamespace

import pytest
import torch

from tests.sglang.engines import Engine

SPARSE = {
    "sparse_index_dim": 16,
    "sparse_attention_freq": [0, 1],
    "sparse_disable_index_value": [1, 1],
    "sparse_score_type": "max",
    "sparse_block_size": 16,
    "sparse_init_block": 0,
    "sparse_local_block": 1,
    "sparse_topk_blocks": 3,
    "sparse_num_index_heads": 1,
}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
NGRAM = {"speculative_algorithm": "NGRAM"}
EAGLE = {
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 4,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 8,
}
SAID = (
    "MiniMax sparse attention",
    "TARGET_VERIFY",
    "'NoneType' object has no attribute 'device'",
    "a draft tree for a chain",
    "What works: no --speculative-algorithm",
    "ROCm with --speculative-eagle-topk 1",
    "NVFP4",
    "SPECPOOL_SGLANG_MINIMAX_VERIFY=1",
    "SPECPOOL_SGLANG_UNSAFE=1",
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Configurations on disk: a MiniMax sparse model, and a Llama."""
    found = {}
    for name, more in {
        "minimax": {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "sparse_attention_config": SPARSE,
        },
        "llama": {"architectures": ["LlamaForCausalLM"]},
    }.items():
        found[name] = tmp_path_factory.mktemp(name)
        (found[name] / "config.json").write_text(json.dumps(CONFIG | more))
    return {name: str(path) for name, path in found.items()}


def resolve(model, arguments, platform=()):
    """Arguments resolved as the launcher does it; what was raised, None where nothing was."""
    from sglang.srt.runtime_context import override_platform
    from sglang.srt.server_args import ServerArgs

    given = {"model_path": model, "device": "cuda", "skip_tokenizer_init": True} | arguments
    if arguments.get("speculative_algorithm", "").startswith("EAGLE"):
        given["speculative_draft_model_path"] = model
    with override_platform(**dict.fromkeys(platform, True)):
        try:
            ServerArgs(**given).resolve_once()
        except Exception as error:
            return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("arguments", [NGRAM, EAGLE], ids=["ngram", "eagle"])
def test_refused_while_arguments_are_resolved(default, models, arguments):
    """Before any process is spawned; the message is what a user sees."""
    error = default(resolve, models["minimax"], arguments)
    assert error.startswith("ValueError: specpool refuses")
    for part in (*SAID, arguments["speculative_algorithm"]):
        assert part in error


@pytest.mark.parametrize("arguments", [NGRAM, EAGLE], ids=["ngram", "eagle"])
def test_without_the_plugin_sglang_starts_it(without, models, arguments):
    assert without(resolve, models["minimax"], arguments) is None


def test_what_works_is_not_refused(default, models):
    assert default(resolve, models["minimax"], {}) is None
    assert default(resolve, models["llama"], NGRAM) is None
    assert default(resolve, models["llama"], EAGLE) is None


def test_rocm_is_sglang_s_own_matter(default, models):
    error = default(resolve, models["minimax"], NGRAM, ["is_hip"])
    assert error is None or "specpool" not in error


def test_the_message_names_the_algorithms_of_the_nvfp4_stack(default, models):
    nvfp4 = NGRAM | {"quantization": "minimax_m3_nvfp4"}
    theirs = default(resolve, models["minimax"], nvfp4, ["is_blackwell"])
    assert "NVFP4 only supports DSPARK or DFLASH" in theirs
    assert "specpool" not in theirs
    assert "(DSPARK, DFLASH)" in default(resolve, models["minimax"], NGRAM)


def test_unsafe_overrides_it_loudly(models):
    with Engine(SPECPOOL_SGLANG_UNSAFE="1") as engine:
        assert engine(resolve, models["minimax"], NGRAM) is None
        assert engine(build_backend, "NGRAM") is None
        loud = [line for line in engine.log() if line.startswith("ERROR")]
        assert len(loud) == 2
        for line in loud:
            assert "SPECPOOL_SGLANG_UNSAFE=1 overrides" in line
            assert "answers may be wrong" in line


def test_off_refuses_nothing(models):
    with Engine(SPECPOOL_SGLANG="off") as engine:
        assert engine(resolve, models["minimax"], NGRAM) is None
        assert engine(build_backend, "NGRAM") is None


def build_backend(algorithm, device="cuda"):
    """SGLang's own sparse backend, as a rank builds it; what was raised, None where nothing was."""
    from sglang.srt.layers.attention.minimax_sparse_backend import MiniMaxSparseAttnBackend
    from sglang.srt.runtime_context import get_context, get_parallel

    from tests.sglang import pools

    config = SimpleNamespace(
        architectures=["MiniMaxM3SparseForCausalLM"], sparse_attention_config=SPARSE
    )
    runner = SimpleNamespace(
        token_to_kv_pool=pools.build_minimax(
            page_size=1,
            dense_layer_ids=[0],
            sparse_layer_ids=[1],
            disable_value_sparse_layer_ids=[1],
            end_layer=2,
        ),
        hisparse_coordinator=None,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((4, 64), dtype=torch.int32)),
        model_config=SimpleNamespace(
            context_len=64,
            hf_config=config,
            hf_text_config=config,
            num_attention_heads=4,
            get_total_num_kv_heads=lambda: 2,
        ),
        device=device,
    )
    widths = dict.fromkeys(("tp", "attn_tp", "attn_cp", "attn_dp", "attn_dcp", "pp"), 1)
    one_rank = {f"{name}_size": size for name, size in widths.items()} | {"attn_dcp_rank": 0}
    arguments = {"speculative_algorithm": algorithm}
    if algorithm is not None:
        arguments |= {
            "speculative_eagle_topk": 4,
            "speculative_num_steps": 3,
            "speculative_num_draft_tokens": 8,
        }
    try:
        with (
            get_context().override_server_args(**arguments),
            get_parallel().override(**one_rank, attn_dp_enabled=False),
        ):
            runner.server_args = get_context()._server_args
            MiniMaxSparseAttnBackend(runner)
    except NotImplementedError as error:
        return f"{type(error).__name__}: {error}"


def test_refused_again_when_the_backend_is_built(default):
    error = default(build_backend, "EAGLE")
    assert error.startswith("UnsupportedAccess: specpool refuses")
    for part in SAID:
        assert part in error


def test_a_backend_without_speculation_is_built(default):
    assert default(build_backend, None) is None


def test_without_the_plugin_the_backend_is_built(without):
    assert without(build_backend, "EAGLE") is None
