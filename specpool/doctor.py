"""What this machine can do: versions, devices, which backend serves each and why, what is missing.

Nothing is moved and nothing is compiled; backends are named by the rule that a mover itself uses.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import specpool
from specpool.adapters.sglang import diagnosis
from specpool.backends import backend_for, why_not
from specpool.demo.parts import PARTS

_PACKAGES = ("torch", "triton", "numpy")


def examine() -> dict[str, Any]:
    """Versions by name (None where absent), devices with their backends, missing parts, SGLang."""
    return {
        "versions": {
            "python": platform.python_version(),
            "specpool": specpool.__version__,
            **{package: _version(package) for package in _PACKAGES},
        },
        "devices": [_device(device) for device in _devices()],
        "missing": [
            {"part": part.module, "purpose": part.purpose, "get": part.command}
            for part in PARTS
            if not part.present()
        ],
        "sglang": diagnosis.examine(),
    }


def describe(found: dict[str, Any]) -> str:
    """`examine`'s answer for a reader."""
    lines = ["versions"]
    lines += [f"  {name:<9} {is_ or 'not installed'}" for name, is_ in found["versions"].items()]
    lines.append("devices")
    for device in found["devices"]:
        lines.append(f"  {device['device']:<9} {device['name']}")
        lines.append(f"  {'':<9} served by {device['backend']}: {device['reason']}")
    lines.append("missing" if found["missing"] else "nothing is missing")
    for part in found["missing"]:
        lines.append(f"  {part['part']}: {part['purpose']}")
        lines.append(f"      {part['get']}")
    lines += diagnosis.describe(found["sglang"])
    return "\n".join(lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in range(count))]


def _device(device: torch.device) -> dict[str, str]:
    try:
        backend, reason = backend_for(device)
    except ValueError as error:  # SPECPOOL_BACKEND names none
        backend, reason = "none", str(error)
    else:
        refusal = why_not(backend, device)
        if refusal:
            backend, reason = "none", f"{reason}, but {refusal}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return {"device": str(device), "name": name, "backend": backend, "reason": reason}
