"""Every test process has the virtual B200 in place before CuTeDSL is imported."""

import pytest

import vgpu

vgpu.install("sm_100a")


@pytest.fixture(autouse=True)
def fresh_records():
    """No test sees another's launches or settings."""
    vgpu.reset()
    yield
    device = vgpu.device()
    device.order, device.seed, device.exact = "copies", 0, False
