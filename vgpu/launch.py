"""Launching a kernel: configuration, parameters, the virtual device, the record of a launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

from threadpoolctl import ThreadpoolController

from . import (  # noqa: F401  (they register their instructions)
    address,
    atomics,
    collective,
    copy_engine,
    cp_async,
    hints,
    loadstore,
    matrix,
    move,
    printf,
    sync,
    tensor,
    wgmma,
)
from .errors import VirtualGpuError
from .machine import ORDERS, Grid
from .memory import GlobalMemory
from .ptx import Module, Variable
from .timing.record import Recorder
from .translate import Program, translate

MAX_CLUSTER = 16  # CTAs, with the non-portable size allowed


@dataclass(frozen=True)
class LaunchConfig:
    """What the CUDA launch call says. Shapes as (x, y, z); shared_bytes: dynamic shared memory per CTA."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    stream: int = 0
    attributes: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Launch:
    """The record of one launch. counters: plain numbers and dictionaries, JSON-serialisable."""

    kernel: str
    config: LaunchConfig
    counters: dict[str, Any]
    warnings: list[str]
    recording: Recorder | None = None  # for the timing model, if the device was recording


class Device:
    """The virtual GPU: its memory and size. sms: number of SMs; shared_limit: bytes of shared memory a CTA may use."""

    def __init__(self, arch: str = "sm_100a", order: str = "copies", seed: int = 0, exact: bool = False):
        if order not in ORDERS:
            raise ValueError(f"order: {order!r}; allowed: {', '.join(ORDERS)}")
        self.arch, self.order, self.seed, self.exact = arch, order, seed, exact
        self.sms = 132 if arch.startswith("sm_90") else 148
        self.shared_limit = 232_448
        self.memory = GlobalMemory()
        self.recording = False  # keep what warps do, for the timing model
        self.launches: list[Launch] = []
        self.lock = threading.RLock()


def place_globals(module: Module, memory: GlobalMemory) -> None:
    """Give .global and .const variables of a module their memory, once, and make it known to `memory`."""
    for v in module.variables.values():
        if v.space not in ("global", "const"):
            continue
        if v.storage is None:
            _allocate(v)
        if not memory.registered(v.address):
            memory.register(v.address, max(v.size, 1), v.storage)


def _allocate(v: Variable) -> None:
    """Memory for a variable, initialised; zero where it has no initialiser (PTX ISA 5.4.4)."""
    v.storage = ctypes.create_string_buffer(max(v.size, 1) + v.align)
    v.address = -(-ctypes.addressof(v.storage) // v.align) * v.align
    ctypes.memmove(v.address, v.init, len(v.init))


def check_config(program: Program, config: LaunchConfig, device: Device) -> None:
    """Raise `launch` for what the driver would refuse."""
    for name in ("grid", "block", "cluster"):
        shape = getattr(config, name)
        if len(shape) != 3 or not all(type(v) is int and v >= 1 for v in shape):
            raise VirtualGpuError("launch", f"{name} {shape}; three whole numbers of at least 1 are needed")
    threads = config.block[0] * config.block[1] * config.block[2]
    if not 1 <= threads <= 1024:
        raise VirtualGpuError("launch", f"block {config.block}: {threads} threads; allowed 1..1024")
    if max(config.grid[1:]) > 65535:
        raise VirtualGpuError("launch", f"grid {config.grid}; y and z are at most 65535")
    if prod(config.cluster) > MAX_CLUSTER:
        raise VirtualGpuError("launch", f"cluster {config.cluster}: {prod(config.cluster)} CTAs; at most {MAX_CLUSTER}")
    if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
        raise VirtualGpuError("launch", f"grid {config.grid} is not a multiple of the cluster {config.cluster}")
    if config.shared_bytes < 0:
        raise VirtualGpuError("launch", f"{config.shared_bytes} bytes of dynamic shared memory")
    total = program.shared_static + config.shared_bytes
    if total > device.shared_limit:
        raise VirtualGpuError("launch", f"{total} bytes of shared memory; allowed {device.shared_limit}")
    required = program.kernel.directives.get("reqntid")
    if required and tuple(required) != tuple(config.block)[:len(required)]:
        raise VirtualGpuError("launch", f"block {config.block}; the kernel requires {required} (.reqntid)")
    most = program.kernel.directives.get("maxntid")
    if most and threads > prod(most):
        raise VirtualGpuError("launch", f"block {config.block}; the kernel allows {prod(most)} threads (.maxntid)")
    cluster = program.kernel.directives.get("reqnctapercluster")
    if cluster and tuple(cluster) != tuple(config.cluster)[:len(cluster)]:
        raise VirtualGpuError("launch", f"cluster {config.cluster}; the kernel requires {cluster} (.reqnctapercluster)")


def launch_kernel(device: Device, text: str, entry: str | None, config: LaunchConfig,
                  address_of_argument: Callable[[int], int], **overrides) -> Launch:
    """Execute a kernel. address_of_argument(i): host address of the bytes of parameter i, as the driver is given them.

    overrides: order, seed, exact for this launch only.
    """
    program = translate(text, entry)
    params = bytearray()
    for i, p in enumerate(program.kernel.params):
        params += bytes(p.offset - len(params))
        params += ctypes.string_at(address_of_argument(i), p.size)
    return execute(device, program, config, bytes(params), **overrides)


@cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


def execute(device: Device, program: Program, config: LaunchConfig, params: bytes, order: str | None = None,
            seed: int | None = None, exact: bool | None = None) -> Launch:
    """Run a translated kernel to its end and keep the record."""
    with device.lock:
        check_config(program, config, device)
        device.memory.refresh()
        place_globals(program.module, device.memory)
        grid = Grid(device, program, config, params, order or device.order, device.seed if seed is None else seed,
                    device.exact if exact is None else exact, Recorder() if device.recording else None)
        try:
            with _blas().limit(limits=1, user_api="blas"):  # many small products: threads only wait for each other
                grid.run()
        except RecursionError as e:
            raise VirtualGpuError("internal", f"recursion in the virtual GPU: {e}") from e
        record = Launch(program.kernel.name, config, summarise(grid), [
            w if n == 1 else f"{w} (x{n})" for w, n in grid.warnings.items()], grid.recorder)
        device.launches.append(record)
        return record


def summarise(grid: Grid) -> dict[str, Any]:
    """Counters of a finished grid.

    instructions_by_warp: PTX statements by warp index, summed over CTAs; units_by_warp: which units each warp used;
    bytes_per_sm: most bytes any SM received when CTA i runs on SM i modulo their number; mma_cycles: by the published
    rule max(N/2, shared bytes/128) a MMA (SemiAnalysisAI/microbench-blackwell), summed over CTAs.
    """
    names = ("ctas", "clusters", "tma_load_instructions", "tma_load_bytes", "tma_delivered_bytes",
             "tma_store_instructions", "tma_store_bytes", "l2_prefetch_bytes", "dsmem_bytes", "global_store_bytes",
             "mma_instructions", "mma_cycles", "mma_flops", "tcgen05_cp", "tcgen05_ld", "tcgen05_ld_bytes",
             "tcgen05_st", "tcgen05_commit")
    out: dict[str, Any] = {n: grid.counters[n] for n in names}
    out["shared_bytes_per_cta"] = grid.program.shared_static + grid.config.shared_bytes
    out["warp_instructions"] = sum(grid.by_warp.values())
    out["instructions_by_warp"] = {str(k): v for k, v in sorted(grid.by_warp.items())}
    out["units_by_warp"] = {str(k): sorted(v) for k, v in sorted(grid.units.items())}
    out["tma_bytes_by_tensor"] = {hex(k): v for k, v in sorted(grid.tensor_bytes.items())}
    out["bytes_per_sm"] = max(grid.sm_bytes.values(), default=0)
    return out
