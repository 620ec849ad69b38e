"""Which servers are verified, as a rule; tests/sglang asks it of real arguments and backends."""

from dataclasses import replace

import pytest

from specpool.adapters.sglang import verify, verify_fingerprints
from specpool.adapters.sglang.verify_checks import ENABLE, Facts, Memory, why_not

SERVED = Facts(
    setting="1",
    version="0.5.23",
    drifted=(),
    device="cuda",
    algorithm="EAGLE3",
    topk=4,
    dense=("fa3", "fa3"),
    adaptive=False,
    multi_layer=False,
    fp8_attention=False,
    hisparse=False,
    two_batch_overlap=False,
    padded_tokens=False,
    pipeline=1,
    context_parallel=1,
    msa_decode=False,
    memory=Memory(rows=384, width=200_000, budget=1 << 30, free=8 << 30, slots=1 << 20),
)
UNSERVED = {
    "setting": ("", f"{ENABLE}=1"),
    "version": ("0.5.24", "tested with SGLang 0.5.23, and this is 0.5.24"),
    "drifted": (("a.py:f", "b.py"), "a.py:f, b.py"),
    "device": ("npu", "npu"),
    "algorithm": ("DFLASH", "DFLASH"),
    "dense": (("fa4", "fa3"), "fa3 and fa4 attention"),
    "adaptive": (True, "--speculative-adaptive"),
    "multi_layer": (True, "--speculative-eagle-topk 1"),
    "fp8_attention": (True, "SGLANG_DISABLE_M3_FP8_ATTN_GEMM=1"),
    "hisparse": (True, "--enable-hisparse"),
    "two_batch_overlap": (True, "--enable-two-batch-overlap"),
    "padded_tokens": (True, "DP attention"),
    "pipeline": (2, "--pp-size 1"),
    "context_parallel": (2, "context parallelism"),
    "msa_decode": (True, "SGLANG_DISABLE_MSA=1"),
}


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_what_was_shown_is_served(algorithm):
    assert why_not(replace(SERVED, algorithm=algorithm)) is None


def test_what_arguments_cannot_tell_is_left_to_the_backend():
    assert why_not(replace(SERVED, msa_decode=None, memory=None)) is None


@pytest.mark.parametrize("fact", UNSERVED)
def test_each_fact_alone_is_a_reason_that_says_what_to_do(fact):
    value, words = UNSERVED[fact]
    assert words in why_not(replace(SERVED, **{fact: value}))


def test_that_it_is_not_turned_on_comes_first():
    every = {fact: value for fact, (value, _) in UNSERVED.items()}
    assert "not turned on" in why_not(replace(SERVED, **every))


def test_chains_need_no_mask_of_the_dense_layers():
    for changed in ({"dense": ("fa4", "fa4")}, {"multi_layer": True}):
        assert why_not(replace(SERVED, topk=1, **changed)) is None


def test_rocm_is_left_alone():
    assert "left alone" in why_not(replace(SERVED, device="hip"))


@pytest.mark.parametrize(
    ("changed", "numbers"),
    [
        ({"budget": 256 << 20}, ("384 nodes and 200000 slots take 293 MiB", "allows 256")),
        ({"free": 200 << 20}, ("take 293 MiB", "200 are free", "--mem-fraction-static")),
        ({"slots": 383}, ("384 nodes are more than the 383 slots",)),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_the_numbers(changed, numbers):
    reason = why_not(replace(SERVED, memory=SERVED.memory._replace(**changed)))
    for words in numbers:
        assert words in reason


def test_nothing_is_replaced_until_it_is_turned_on(monkeypatch):
    monkeypatch.delenv(ENABLE, raising=False)
    assert verify.patches() == []
    monkeypatch.setenv(ENABLE, "1")
    assert [p.target.rpartition(".")[2] for p in verify.patches()] == [
        "init_forward_metadata_out_graph",
        "forward_extend",
    ]


def test_an_sglang_that_is_not_there_has_drifted_everywhere(monkeypatch, caplog):
    monkeypatch.setattr(verify_fingerprints, "find_spec", lambda name: None)
    assert verify_fingerprints.drifted() == tuple(verify_fingerprints.FINGERPRINTS)
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == len(verify_fingerprints.FINGERPRINTS)


def test_a_fingerprint_is_of_one_part_s_source(tmp_path, monkeypatch):
    package = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr(verify_fingerprints, "find_spec", lambda name: package)
    (tmp_path / "a.py").write_text("class C:\n    def f(self):\n        return 1\n\n\nx = 1\n")
    first = [verify_fingerprints.fingerprint(p) for p in ("a.py", "a.py:C", "a.py:C.f")]
    (tmp_path / "a.py").write_text("class C:\n    def f(self):\n        return 1\n\n\nx = 2\n")
    second = [verify_fingerprints.fingerprint(p) for p in ("a.py", "a.py:C", "a.py:C.f")]
    assert None not in first
    assert first[0] != second[0]
    assert first[1:] == second[1:]
    (tmp_path / "a.py").write_text("class C:\n    def f(self):\n        return 2\n")
    assert verify_fingerprints.fingerprint("a.py:C.f") != first[2]
    assert verify_fingerprints.fingerprint("a.py:C.g") is None
    assert verify_fingerprints.fingerprint("b.py") is None
