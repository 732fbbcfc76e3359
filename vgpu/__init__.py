"""A virtual Blackwell GPU: executes PTX on the CPU, with CuTeDSL's launches or directly.

    import vgpu
    vgpu.install("sm_100a")          # before CuTeDSL compiles; its launches then run here, on CPU tensors
    ...
    print(vgpu.last_launch().counters)

    vgpu.launch(ptx_text, "kernel", grid=(4, 1, 1), block=(128, 1, 1), args=[tensor, 7])

It knows PTX and the CUDA launch, nothing of what kernels compute.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import VirtualGpuError
from .launch import Device, Launch, LaunchConfig, execute, launch_kernel
from .translate import translate

__all__ = ["Launch", "LaunchConfig", "VirtualGpuError", "device", "install", "last_launch", "launch", "launches",
           "register", "reset"]

_device: Device | None = None


def device() -> Device:
    """The virtual device, made at the first use."""
    global _device
    if _device is None:
        _device = Device()
    return _device


def install(arch: str = "sm_100a", order: str = "copies", seed: int = 0, exact: bool = False,
            torch_cuda: bool = False, null_launch: bool = False) -> Device:
    """Make CuTeDSL compile for `arch` and launch on the virtual device. Call before CuTeDSL's first compile.

    order: in which asynchronous work completes: 'copies' first, 'tensor' core first, or at 'random' by `seed`.
    exact: MMA results bit for bit as measured on hardware (slower) instead of float32 matmul.
    null_launch: launches return at once and do nothing, to measure what a call costs the host; for the whole process.
    torch_cuda: also let torch's "cuda" device stand for the CPU, for programs written for a GPU.
    """
    global _device
    from . import host

    if _device is None or _device.arch != arch:
        _device = Device(arch, order, seed, exact)
    else:
        _device.order, _device.seed, _device.exact = Device(arch, order, seed, exact).order, seed, exact
    host.install_host(arch, _launch_from_host, null_launch)
    if torch_cuda:
        from .torch_cuda import install_torch_cuda

        install_torch_cuda()
    return _device


def _launch_from_host(text: str, entry: str, config: LaunchConfig, address_of_argument) -> None:
    launch_kernel(device(), text, entry, config, address_of_argument)


def launch(ptx: str, entry: str | None, grid, block, args, *, cluster=(1, 1, 1), shared_bytes: int = 0,
           order: str | None = None, seed: int | None = None, exact: bool | None = None) -> Launch:
    """Run PTX text directly. grid, block, cluster: (x, y, z).

    args, one a parameter: a CPU tensor or numpy array (its address is passed), an int (in the parameter's size), or
    bytes (the parameter itself, such as a 128-byte tensor map). Raises VirtualGpuError.
    """
    program = translate(ptx, entry)
    params = program.kernel.params
    if len(args) != len(params):
        raise ValueError(f"args: {len(args)} given; the kernel has {len(params)} parameters")
    blob = bytearray()
    named = []
    for value, p in zip(args, params, strict=True):
        blob += bytes(p.offset - len(blob))
        blob += _argument(value, p.size, named)
    try:
        config = LaunchConfig(tuple(grid), tuple(block), tuple(cluster), shared_bytes)
        return execute(device(), program, config, bytes(blob), order, seed, exact)
    finally:
        for address in named:
            device().memory.forget(address)


def _argument(value: Any, size: int, named: list[int], on: Device | None = None) -> bytes:
    if isinstance(value, (bytes, bytearray)):
        if len(value) != size:
            raise ValueError(f"args: {len(value)} bytes for a parameter of {size}")
        return bytes(value)
    if isinstance(value, np.ndarray):
        if not (value.flags.c_contiguous and value.flags.writeable):
            raise ValueError("args: a numpy array must be contiguous and writable")
        address = value.ctypes.data
        (on or device()).memory.register(address, value.nbytes)
        named.append(address)
        return address.to_bytes(8, "little")
    if hasattr(value, "data_ptr"):
        return value.data_ptr().to_bytes(8, "little")
    if not isinstance(value, (int, np.integer)):
        raise TypeError(f"args: {type(value).__name__}; allowed: a CPU tensor, a numpy array, an int, bytes")
    return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def register(address: int, size: int) -> None:
    """Make host memory known that is not a torch tensor's; the caller keeps it alive."""
    device().memory.register(address, size)


def last_launch() -> Launch:
    """The record of the latest launch. Raises RuntimeError if there was none."""
    if not device().launches:
        raise RuntimeError("nothing has been launched on the virtual device")
    return device().launches[-1]


def launches() -> list[Launch]:
    """Records of all launches since `reset`."""
    return list(device().launches)


def reset() -> None:
    """Forget the records of past launches."""
    device().launches.clear()


