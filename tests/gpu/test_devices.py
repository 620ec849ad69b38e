"""A pool on a device that is not the current one."""

import os

import pytest
import torch

from tests.gpu import programs, two_devices
from tests.gpu.workers import EVERY, visibility


def test_a_pool_where_there_is_one_device():
    two_devices.check("cpu", "cpu")


@pytest.mark.gpu
def test_a_pool_on_a_device_that_is_not_the_current_one():
    every = os.environ[EVERY]
    if "," not in every:
        pytest.skip("needs two GPUs, and there is one")
    done = programs.run("tests.gpu.two_devices", **{visibility(bool(torch.version.hip)): every})
    assert done.returncode == 0, done.stdout + done.stderr
