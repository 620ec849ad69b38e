"""Which servers SGLang's own argument resolution lets start when verification is turned on."""

import json

import pytest

from tests.sglang.engines import Engine
from tests.sglang.test_refusals import CONFIG, EAGLE, NGRAM, SPARSE, resolve

ENABLE = "SPECPOOL_SGLANG_MINIMAX_VERIFY"
SERVED = {
    "eagle": EAGLE | {"attention_backend": "fa3"},
    "eagle, pages": EAGLE | {"attention_backend": "fa3", "page_size": 128},
    "eagle, chains": EAGLE | {"speculative_eagle_topk": 1, "attention_backend": "fa4"},
    "ngram": NGRAM | {"attention_backend": "flashinfer"},
}
REFUSED = {
    "a dense backend without trees": (
        EAGLE | {"attention_backend": "fa4", "page_size": 1},
        "fa4 attention is not known to mask trees",
    ),
    "pipeline": (SERVED["eagle"] | {"pp_size": 2}, "--pp-size 1"),
    "DP attention": (
        SERVED["eagle"] | {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        "start without DP attention",
    ),
    "padded to ranks": (
        SERVED["eagle"] | {"tp_size": 2, "moe_dense_tp_size": 1},
        "--moe-dense-tp-size",
    ),
    "two batches": (
        SERVED["ngram"] | {"enable_two_batch_overlap": True, "moe_a2a_backend": "deepep"},
        "--enable-two-batch-overlap",
    ),
    "an algorithm of its own": (
        {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 8,
         "speculative_draft_model_path": "same"},
        "not of DFLASH",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def verifying():
    with Engine(**{ENABLE: "1"}) as engine:
        yield engine


@pytest.fixture(scope="module")
def minimax(tmp_path_factory):
    """A MiniMax sparse model's configuration on disk."""
    path = tmp_path_factory.mktemp("minimax")
    more = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "sparse_attention_config": SPARSE,
    }
    (path / "config.json").write_text(json.dumps(CONFIG | more))
    return str(path)


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_starts(verifying, minimax, name):
    assert verifying(resolve, minimax, SERVED[name]) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_is_refused_before_anything_is_spawned(verifying, minimax, name):
    arguments, words = REFUSED[name]
    if arguments.get("speculative_draft_model_path") == "same":
        arguments = arguments | {"speculative_draft_model_path": minimax}
    error = verifying(resolve, minimax, arguments)
    assert error is not None
    assert error.startswith("ValueError: specpool refuses"), error
    assert words in error


@pytest.mark.parametrize("name", SERVED)
def test_without_it_each_is_refused(default, minimax, name):
    error = default(resolve, minimax, SERVED[name])
    assert f"it is not turned on ({ENABLE}=1 does)" in error
