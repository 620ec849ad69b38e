"""Devices and streams: where a launch goes, and whether a graph is being captured there."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current one, where it is a GPU and is not already."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a graph."""
    if device.type != "cuda":
        return False
    with on_device(device):
        return torch.cuda.is_current_stream_capturing()
