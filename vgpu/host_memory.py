"""Device memory that programs take from the driver themselves (cuMemAlloc): host memory, known to the virtual GPU."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np

from .errors import VirtualGpuError

ALIGNMENT = 256  # bytes; of every address cuMemAlloc gives (CUDA C++ programming guide, device memory accesses)
_blocks: dict[int, np.ndarray] = {}  # address -> the bytes, which include room to align the address


def allocate(size: int) -> int:
    """The address of `size` new bytes, not cleared. Raises `launch` for a size that is not positive."""
    from . import register

    if size < 1:
        raise VirtualGpuError("launch", f"cuMemAlloc of {size} bytes; must be at least 1")
    room = np.empty(size + ALIGNMENT, np.uint8)
    address = -(-room.ctypes.data // ALIGNMENT) * ALIGNMENT
    _blocks[address] = room
    register(address, size)
    return address


def free(address: int) -> None:
    """Give memory of `allocate` back. Raises `launch` for another address."""
    from . import device

    if address not in _blocks:
        raise VirtualGpuError("launch", f"cuMemFree of {address:#x}, which cuMemAlloc did not give")
    device().memory.forget(address)
    del _blocks[address]


def fill(address: int, value: int, count: int, width: int) -> None:
    """cuMemsetD8, D16, D32: `count` elements of `width` bytes. Raises `out of bounds` outside known memory."""
    from . import device

    target = device().memory.view(address, count * width)
    target.view(f"u{width}")[:] = value & (1 << 8 * width) - 1


def answers(driver: types.ModuleType) -> dict[str, Callable]:
    """Answers for cuda.bindings.driver by name: what follows the error code in the result. Streams do not matter."""
    out: dict[str, Callable] = {}
    for suffix in ("", "Async"):
        out["cuMemAlloc" + suffix] = lambda size, *stream: driver.CUdeviceptr(allocate(int(size)))
        out["cuMemFree" + suffix] = lambda pointer, *stream: free(int(pointer))
        for width in (1, 2, 4):
            out[f"cuMemsetD{8 * width}{suffix}"] = (
                lambda pointer, value, count, *stream, width=width: fill(int(pointer), int(value), int(count), width))
    return out
