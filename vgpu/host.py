"""The CUDA that CuTeDSL sees: answers its host code's runtime calls on a machine without a driver.

Surfaces, each a table of answered functions; everything else stops with an error that names the function:

- the `_cuda…` symbols that the generated host code calls (`symbols`), registered on every ExecutionEngine;
- the functions of cuda.bindings that CuTeDSL and programs call in Python (`runtime_answers`, `driver_answers`);
- optionally torch.cuda, with the "cuda" device standing for the CPU (`torch_cuda`, in a file of its own).

The PTX of a compile is written to a folder of its own and read back before the engine is made, so each engine keeps
its text whatever is compiled next. Streams are handles: a launch is complete when its call returns. No time is
modelled: elapsed times are NaN. Sources: the CUDA Runtime API and Driver API references (signatures, attribute
numbers), the CUDA C++ Programming Guide's table of compute capabilities (limits), and runs of nvidia-cutlass-dsl 4.3.5
to 4.8.1 [measured].
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import math
import os
import re
import shutil
import struct
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import ffi, host_memory, tensormap
from .errors import VirtualGpuError

if TYPE_CHECKING:
    from .launch import LaunchConfig

LaunchFunction = Callable[[str, str, "LaunchConfig", Callable[[int], int]], None]

# cudaFuncAttribute and CUfunction_attribute share these numbers
FUNC_SHARED_SIZE, FUNC_MAX_DYNAMIC_SHARED, FUNC_NON_PORTABLE_CLUSTER = 1, 8, 14
FUNC_HINTS = {9: "preferred shared memory carveout", 15: "cluster scheduling policy preference"}
# cudaLaunchAttributeID: those that a launch may carry. All but 2, 4, 6 are hints that change no result (a device may
# not take 11, the preferred cluster, and use 4).
LAUNCH_COOPERATIVE, LAUNCH_CLUSTER = 2, 4
LAUNCH_ATTRIBUTES = {
    0: "ignore", 1: "access policy window", 2: "cooperative", 3: "synchronization policy", 4: "cluster dimension",
    5: "cluster scheduling policy preference", 6: "programmatic stream serialization", 8: "priority",
    9: "memory synchronization domain map", 10: "memory synchronization domain", 11: "preferred cluster dimension",
    14: "preferred shared memory carveout",
}
ATTRIBUTE_STRIDE = 72  # sizeof(cudaLaunchAttribute): id u32 at 0, value (64 bytes) at 8
DEFAULT_SHARED = 49_152  # bytes of shared memory a CTA may use without MaxDynamicSharedMemorySize
SHARED_LIMIT = 232_448  # bytes, with it (compute capabilities 9.0 and 10.x)
PORTABLE_CLUSTER, LARGEST_CLUSTER = 8, 16
CUDA_ERROR_UNKNOWN = 999

# Symbols of the DSL's runtime library that its generated code might call and that are not modelled.
UNANSWERED_SYMBOLS = (
    "_cudaLaunchKernel", "_cudaMalloc", "_cudaMallocAsync", "_cudaMallocHost", "_cudaMallocManaged", "_cudaFree",
    "_cudaFreeAsync", "_cudaFreeHost", "_cudaMemcpy", "_cudaMemcpyAsync", "_cudaMemset", "_cudaMemsetAsync",
    "_cudaStreamCreate", "_cudaStreamDestroy", "_cudaStreamWaitEvent", "_cudaStreamAddCallback",
    "_cudaStreamBeginCapture", "_cudaStreamEndCapture", "_cudaEventCreate", "_cudaEventDestroy",
    "_cudaEventRecord", "_cudaEventElapsedTime", "_cudaGraphInstantiate", "_cudaGraphLaunch", "_cudaGraphDestroy",
    "_cudaGraphExecDestroy", "_cudaProfilerStart", "_cudaProfilerStop",
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor", "_cudaGetDeviceProperties", "_cudaLibraryGetGlobal",
    "_cudaLibraryGetKernelCount", "_cudaLibraryGetManaged", "_cudaLibraryGetUnifiedFunction",
    "_cudaLibraryLoadFromFile", "_cuLibraryGetGlobal", "_cuLibraryGetKernel", "_cuLibraryGetKernelCount",
    "_cuLibraryGetManaged", "_cuLibraryGetModule", "_cuLibraryGetUnifiedFunction", "_cuLibraryLoadData",
    "_cuLibraryLoadFromFile", "_cuLibraryUnload",
)


# ---------------------------------------------------------------------------------------------------------------------
# The device


@dataclass(frozen=True)
class Model:
    """What the device says of itself. capability: (major, minor); l2_bytes: size of the L2 cache."""

    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int


BLACKWELL = Model("virtual B200", (10, 0), 148, 132_644_864)
MODELS = {
    "sm_90": Model("virtual H200", (9, 0), 132, 52_428_800),
    "sm_100": BLACKWELL,
    "sm_103": Model("virtual B300", (10, 3), 148, 132_644_864),  # [inferred] as the B200
}


def model_of(arch: str) -> Model:
    """The device for a CuTeDSL architecture such as "sm_100a". Raises ValueError for one that is not modelled."""
    match = re.fullmatch(r"(sm_\d+)[af]?", arch)
    if match is None or match[1] not in MODELS:
        raise ValueError(f"arch: {arch!r}; allowed: {', '.join(MODELS)}, with or without the suffix a or f")
    return MODELS[match[1]]


def device_attribute(model: Model, attribute: int) -> int:
    """cudaDeviceGetAttribute, by cudaDeviceAttr number. Raises `unsupported` for one that is not known."""
    values = {
        1: 1024, 2: 1024, 3: 1024, 4: 64,  # threads per block: all, x, y, z
        5: 2**31 - 1, 6: 65_535, 7: 65_535,  # blocks: x, y, z
        8: DEFAULT_SHARED, 81: 233_472, 97: SHARED_LIMIT, 111: 1024,  # shared bytes: block, SM, opt-in, reserved
        9: 65_536, 10: 32, 12: 65_536, 82: 65_536,  # constant bytes, warp size, registers: block, SM
        16: model.sms, 38: model.l2_bytes, 39: 2048, 106: 32,  # SMs, L2 bytes, threads and blocks per SM
        75: model.capability[0], 76: model.capability[1],
        31: 1, 41: 1, 78: 1, 83: 1, 89: 1,  # concurrent kernels, unified addresses, priorities, managed memory
        88: 1, 95: 1, 120: 1,  # pageable memory access (addresses are host addresses), cooperative, clusters
        18: 0, 32: 0,  # integrated, ECC
    }
    if attribute not in values:
        raise VirtualGpuError("unsupported", f"device attribute {attribute} is not modelled")
    return values[attribute]


@dataclass
class Kernel:
    """A kernel handle: its name, the PTX module it stands in, the attributes set on it (by number)."""

    name: str
    text: str
    attributes: dict[int, int] = field(default_factory=dict)

    @functools.cached_property
    def static_shared(self) -> int:
        """Bytes of shared memory that the PTX declares with a size."""
        from .ptx import parse

        module = parse(self.text)
        end = 0
        for v in (*module.variables.values(), *module.kernels[self.name].shared.values()):
            if v.space == "shared" and not v.extern:
                end = -(-end // v.align) * v.align + v.size
        return end

    @property
    def dynamic_limit(self) -> int:
        """Bytes of dynamic shared memory a launch may ask for."""
        return self.attributes.get(FUNC_MAX_DYNAMIC_SHARED, DEFAULT_SHARED - self.static_shared)


class Host:
    """What the driver would remember: libraries (PTX texts) and kernels by handle. launch: called for each launch."""

    def __init__(self, arch: str, launch: LaunchFunction, null_launch: bool = False):
        self.arch, self.model, self.launch, self.null_launch = arch, model_of(arch), launch, null_launch
        self.libraries: dict[int, list[str]] = {}
        self.kernels: dict[int, Kernel] = {}
        self.cuda_version = 12_080  # of the driver, as 1000 major + 10 minor
        self.around_launch: Callable[[], Any] = contextlib.nullcontext
        self._handles = itertools.count(0x1000, 0x10)

    def load(self, texts: list[str] | None) -> int:
        """A library handle. texts: the PTX of the engine that asks; None if it was never seen."""
        if texts is None:
            raise VirtualGpuError("launch", "this kernel's PTX is not known: it was compiled before vgpu.install, "
                                            "or comes from a file made earlier")
        handle = next(self._handles)
        self.libraries[handle] = texts
        return handle

    def kernel(self, library: int, name: str) -> int:
        """A kernel handle, for an entry of a library."""
        entry = re.compile(rf"\.entry\s+{re.escape(name)}\s*[({{]")
        for text in self.libraries.get(library, []):
            if entry.search(text):
                handle = next(self._handles)
                self.kernels[handle] = Kernel(name, text)
                return handle
        raise VirtualGpuError("launch", f"library {library:#x} has no kernel {name!r}")

    def unload(self, library: int) -> None:
        """Forget a library. Its kernels' handles end with it."""
        texts = self.libraries.pop(library, [])
        self.kernels = {h: k for h, k in self.kernels.items() if not any(k.text is t for t in texts)}

    def by_handle(self, kernel: int | None) -> Kernel:
        """The kernel behind a handle, or a `launch` error."""
        if kernel not in self.kernels:
            raise VirtualGpuError("launch", f"{kernel or 0:#x} is not a kernel handle of the virtual GPU")
        return self.kernels[kernel]

    def set_kernel_attribute(self, kernel: int, attribute: int, value: int) -> None:
        """cudaFuncSetAttribute. Raises `launch` for a value the driver refuses, `unsupported` for other attributes."""
        k = self.by_handle(kernel)
        if attribute == FUNC_MAX_DYNAMIC_SHARED:
            largest = SHARED_LIMIT - k.static_shared
            if not 0 <= value <= largest:
                raise VirtualGpuError("launch", f"MaxDynamicSharedMemorySize: {value} bytes; allowed 0..{largest}")
        elif attribute != FUNC_NON_PORTABLE_CLUSTER and attribute not in FUNC_HINTS:
            raise VirtualGpuError("unsupported", f"kernel attribute {attribute} is not modelled")
        k.attributes[attribute] = value

    def kernel_attribute(self, kernel: int, attribute: int) -> int:
        """cuKernelGetAttribute. Raises `unsupported` for attributes that are not known."""
        k = self.by_handle(kernel)
        if attribute == FUNC_SHARED_SIZE:
            return k.static_shared
        if attribute == FUNC_MAX_DYNAMIC_SHARED:
            return k.dynamic_limit
        if attribute not in k.attributes:
            raise VirtualGpuError("unsupported", f"kernel attribute {attribute} is not modelled")
        return k.attributes[attribute]

    def check_device(self, ordinal: int) -> int:
        """The ordinal of the only device, 0, or a `launch` error."""
        if int(ordinal) != 0:
            raise VirtualGpuError("launch", f"device {int(ordinal)}; the only virtual device is 0")
        return 0

    def blocks_per_sm(self, threads: int, dynamic_shared: int) -> int:
        """CTAs an SM holds by threads and shared memory; registers are not known and not counted."""
        warps = -(-max(threads, 1) // 32)
        return min(32, 64 // warps, 233_472 // (dynamic_shared + 1024))


# ---------------------------------------------------------------------------------------------------------------------
# Errors: an exception inside a C callback is lost, so it is kept and raised again by the Python call around it


_kept = threading.local()


def _keep(error: BaseException) -> int:
    """Remember the first exception of a call; returns the CUDA error code to report."""
    if getattr(_kept, "error", None) is None:
        _kept.error = error
    return CUDA_ERROR_UNKNOWN


def kept_error() -> BaseException | None:
    """The exception that a callback has kept for the call that is running."""
    return getattr(_kept, "error", None)


def forget_kept() -> None:
    """A new call into generated code begins."""
    _kept.error = None


def raises_kept(method: Callable) -> Callable:
    """Wrap a call into generated code: what a callback raised comes out, as it was, not the DSL's error for it."""

    @functools.wraps(method)
    def call(*args, **kwargs):
        _kept.error, result = None, None
        try:
            result = method(*args, **kwargs)
        except Exception:
            if _kept.error is None:
                raise
        error, _kept.error = _kept.error, None
        if error is not None:
            raise error
        return result

    return call


# A C function that returns 0 at once whatever its arguments: glibc's has nothing to destroy.
NULL_FUNCTION = ctypes.CDLL(None).pthread_mutexattr_destroy


def _callback(function: Callable, *argtypes) -> Any:
    """A C function `int f(argtypes)` that returns 0, or keeps the exception of `function`. After one that was kept it
    does nothing: generated code may go on regardless."""

    def call(*args) -> int:
        if kept_error() is not None:
            return CUDA_ERROR_UNKNOWN
        try:
            function(*args)
            return 0
        except BaseException as e:  # KeyboardInterrupt as well: it must reach the caller
            return _keep(e)

    return ctypes.CFUNCTYPE(ctypes.c_int, *argtypes)(call)


# ---------------------------------------------------------------------------------------------------------------------
# The symbols that generated host code calls


class _CudaLaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared_bytes", ctypes.c_uint64),
                ("stream", ctypes.c_uint64), ("attributes", ctypes.c_uint64), ("count", ctypes.c_uint32)]


def decode_launch(address: int) -> LaunchConfig:
    """The cudaLaunchConfig_t at a host address. Raises `unsupported` for launch attributes that are not known."""
    from .launch import LaunchConfig

    c = _CudaLaunchConfig.from_address(address)
    attributes = {}
    for i in range(c.count):
        at = c.attributes + ATTRIBUTE_STRIDE * i
        number = ctypes.c_uint32.from_address(at).value
        if number not in LAUNCH_ATTRIBUTES:
            raise VirtualGpuError("unsupported", f"launch attribute {number} is not modelled; "
                                                 f"known are {', '.join(map(str, LAUNCH_ATTRIBUTES))}")
        attributes[number] = ctypes.string_at(at + 8, ATTRIBUTE_STRIDE - 8)
    cluster = struct.unpack_from("<3I", attributes.get(LAUNCH_CLUSTER, b"\0" * 12))
    return LaunchConfig(grid=tuple(c.grid), block=tuple(c.block), cluster=cluster if any(cluster) else (1, 1, 1),
                        shared_bytes=c.shared_bytes, stream=c.stream, attributes=attributes)


def check_launch(host: Host, kernel: Kernel, config: LaunchConfig) -> None:
    """Raise `launch` for what the driver would refuse."""
    threads, cluster, ctas = math.prod(config.block), math.prod(config.cluster), math.prod(config.grid)
    cooperative = any(config.attributes.get(LAUNCH_COOPERATIVE, b"")[:4])
    resident = host.model.sms * host.blocks_per_sm(threads, kernel.static_shared + config.shared_bytes)
    limit = LARGEST_CLUSTER if kernel.attributes.get(FUNC_NON_PORTABLE_CLUSTER) else PORTABLE_CLUSTER
    if not 1 <= threads <= 1024 or config.block[2] > 64:
        problem = f"block {config.block}: {threads} threads; allowed 1..1024, at most 64 in z"
    elif min(config.grid) < 1 or config.grid[0] >= 2**31 or max(config.grid[1:]) > 65_535:
        problem = f"grid {config.grid}: each at least 1, x at most 2147483647, y and z at most 65535"
    elif not 1 <= cluster <= limit:
        problem = f"cluster {config.cluster}: {cluster} CTAs; allowed 1..{limit}"
        if limit == PORTABLE_CLUSTER < cluster <= LARGEST_CLUSTER:
            problem += f" ({LARGEST_CLUSTER} with NonPortableClusterSizeAllowed)"
    elif any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
        problem = f"grid {config.grid} is not a multiple of the cluster {config.cluster}"
    elif config.shared_bytes > kernel.dynamic_limit:
        problem = (f"{config.shared_bytes} bytes of dynamic shared memory; allowed {kernel.dynamic_limit} "
                   f"({kernel.static_shared} static, MaxDynamicSharedMemorySize "
                   f"{kernel.attributes.get(FUNC_MAX_DYNAMIC_SHARED, 'not set')})")
    elif cooperative and ctas > resident:
        problem = f"cooperative launch of {ctas} CTAs; at most {resident} are resident at once"
    else:
        return
    raise VirtualGpuError("launch", problem).place(kernel=kernel.name)


def launch(host: Host, config_address: int, kernel: int, arguments: int) -> None:
    """cudaLaunchKernelExC: decode, check and run. arguments: host address of void*[], one a parameter."""
    k = host.by_handle(kernel)
    config = decode_launch(config_address)
    check_launch(host, k, config)
    with host.around_launch():
        host.launch(k.text, k.name, config, lambda i: ctypes.c_uint64.from_address(arguments + 8 * i).value)


def _store(address: int, value: int, ctype=ctypes.c_int32) -> None:
    ctype.from_address(address).value = value


def symbols(host: Host) -> dict[str, Any]:
    """C callbacks by symbol, shared by all engines. They live as long as the process."""
    p, i = ctypes.c_void_p, ctypes.c_int
    u64 = ctypes.c_uint64
    answered = {
        "_cudaLibraryGetKernel": _callback(
            lambda out, library, name: _store(out, host.kernel(library, name.decode()), u64), p, p, ctypes.c_char_p),
        "_cudaLibraryUnload": _callback(host.unload, p),
        "_cudaGetDevice": _callback(lambda out: _store(out, 0), p),
        "_cudaGetDeviceCount": _callback(lambda out: _store(out, 1), p),
        "_cudaSetDevice": _callback(host.check_device, i),
        "_cuDeviceGet": _callback(lambda out, ordinal: _store(out, host.check_device(ordinal)), p, i),
        "_cudaDeviceGetAttribute": _callback(
            lambda out, attribute, device: _store(out, device_attribute(host.model, attribute)), p, i, i),
        "_cuKernelGetAttribute": _callback(
            lambda out, attribute, kernel, device: _store(out, host.kernel_attribute(kernel, attribute)), p, i, p, i),
        "_cudaFuncSetAttribute": _callback(host.set_kernel_attribute, p, i, i),
        "_cudaKernelSetAttributeForDevice": _callback(
            lambda kernel, attribute, value, device: host.set_kernel_attribute(kernel, attribute, value), p, i, i, i),
        "_cudaLaunchKernelEx": _callback(functools.partial(launch, host), p, p, p),
        "_cudaDeviceSynchronize": _callback(lambda: None),
        "_cudaStreamSynchronize": _callback(lambda stream: None, p),
        "_cuTensorMapEncodeTiled": _callback(encode_tensor_map, p, i, ctypes.c_uint32, p, p, p, p, p, i, i, i, i),
        "cuda_dialect_assert_success": _callback(nothing, i),  # the runtime's ends the process, without saying why
    }
    answered |= ffi.symbols(_callback)
    if host.null_launch:
        answered["_cudaLaunchKernelEx"] = NULL_FUNCTION
    return answered | {name: _callback(functools.partial(_refuse, name[1:])) for name in UNANSWERED_SYMBOLS}


def encode_tensor_map(out: int, dtype: int, rank: int, address: int | None, sizes: int, strides: int, box: int,
                      steps: int, interleave: int, swizzle: int, promotion: int, fill: int) -> None:
    """cuTensorMapEncodeTiled, its arrays given by their addresses. Raises `tensor map` for what the driver refuses."""
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    lists = [list((kind * n).from_address(at)) if n else [] for at, kind, n in (
        (sizes, u64, rank), (strides, u64, rank - 1), (box, u32, rank), (steps, u32, rank))]
    data = tensormap.encode_tiled(dtype, address or 0, *lists, interleave, swizzle, promotion, fill)
    ctypes.memmove(out, data, len(data))


def _refuse(name: str, *args, **kwargs) -> None:
    raise VirtualGpuError("unsupported", f"{name}: the virtual GPU does not answer this CUDA call")


# ---------------------------------------------------------------------------------------------------------------------
# The compiler: keep each engine's PTX, register the symbols


def keep_ptx(pipeline: str, stem: str) -> tuple[str, str | None]:
    """A pass pipeline that also writes PTX to stem.ARCH.ptx, and the stem that the user asked for, if any."""
    asked = re.search(r"dump-ptx-path='([^']*)'", pipeline)
    option = f"dump-ptx-path='{stem}'"
    if asked:
        return pipeline.replace(asked[0], option), asked[1]
    return pipeline.replace("cute-to-nvvm{", f"cute-to-nvvm{{{option} ", 1), None


def _read_ptx(stem: str, asked: str | None) -> list[str]:
    """The PTX files of a compile; copied to where the user wanted them."""
    files = sorted(Path(stem).parent.glob("*.ptx"))
    for f in files if asked else ():
        shutil.copyfile(f, asked + f.name.removeprefix(Path(stem).name))
    return [f.read_text().rstrip("\0") for f in files]  # 4.3.5 ends them with a NUL


@functools.cache
def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
        return True
    except OSError:  # such as 4.3.5's runtime library, which needs libcuda.so.1
        return False


def patch_compiler(compiler: type, host: Host) -> None:
    """Make CuTeDSL's Compiler class bind the PTX it writes to the engine made from it."""
    compile_module, make_engine = compiler.compile, compiler.jit
    callbacks = symbols(host)
    addresses = {name: ctypes.cast(c, ctypes.c_void_p) for name, c in callbacks.items()}
    alive = list(callbacks.values())  # as long as the engines that call them
    compiled = threading.local()

    @functools.wraps(compile_module)
    def compile_keeping_ptx(self, module, pipeline, *args, **kwargs):
        compiled.texts = None
        with tempfile.TemporaryDirectory(prefix="vgpu-") as folder:
            stem = os.path.join(folder, "kernel")
            pipeline, asked = keep_ptx(pipeline, stem)
            result = compile_module(self, module, pipeline, *args, **kwargs)
            compiled.texts = _read_ptx(stem, asked)
        return result

    @functools.wraps(make_engine)
    def make_engine_answered(self, module, opt_level=2, shared_libs=(), **kwargs):
        texts, compiled.texts = getattr(compiled, "texts", None), None
        engine = make_engine(self, module, opt_level, [lib for lib in shared_libs if _loadable(lib)], **kwargs)

        def load(out: int, *_) -> None:
            _store(out, host.load(texts), ctypes.c_uint64)

        p, u = ctypes.c_void_p, ctypes.c_uint32
        alive.append(_callback(load, p, p, p, p, u, p, p, u))
        engine.raw_register_runtime("_cudaLibraryLoadData", ctypes.cast(alive[-1], p))
        for name, address in addresses.items():
            engine.raw_register_runtime(name, address)
        ffi.patch_provider(raises_kept)
        return engine

    compiler.compile, compiler.jit = compile_keeping_ptx, make_engine_answered


def patch_executors(jit_executor: types.ModuleType, cuda_jit_executor: types.ModuleType) -> None:
    """Make exceptions of callbacks come out of the calls that load and run generated code."""
    for cls, names in ((jit_executor.JitExecutor, ("run_compiled_program",)),
                       (jit_executor.JitCompiledFunction, ("run_compiled_program",)),
                       (cuda_jit_executor.CudaDialectJitCompiledFunction, ("to",))):
        for name in names:
            setattr(cls, name, raises_kept(getattr(cls, name)))


def disable_file_cache() -> None:
    """Compiled kernels from files carry no PTX: never load them, in whichever module the DSL does it."""
    for name in ("cutlass.base_dsl.dsl", "cutlass.base_dsl.compile_backend"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            if hasattr(module, "load_cache_from_path"):
                module.load_cache_from_path = nothing


# ---------------------------------------------------------------------------------------------------------------------
# cuda.bindings, as called from Python


KEEP_ORIGINAL = {"cudaRuntimeGetVersion", "cudaGetErrorName", "cudaGetErrorString"}  # need no device


def elapsed(*events) -> float:
    warnings.warn("the virtual GPU models no time: elapsed times are NaN", RuntimeWarning, stacklevel=3)
    return math.nan


def nothing(*args, **kwargs) -> None:
    return None


def runtime_answers(host: Host, runtime: types.ModuleType) -> dict[str, Callable]:
    """Answers for cuda.bindings.runtime by name: what follows the error code in the result."""
    stream, event = runtime.cudaStream_t, runtime.cudaEvent_t
    return {
        "cudaGetDeviceCount": lambda: 1,
        "cudaGetDevice": lambda: 0,
        "cudaSetDevice": lambda device: host.check_device(device) or None,
        "cudaGetDeviceProperties": lambda device: device_properties(host, runtime, device),
        "cudaDeviceGetAttribute": lambda attribute, device: device_attribute(
            host.model, int(attribute) + host.check_device(device)),
        "cudaDriverGetVersion": lambda: host.cuda_version,
        "cudaDeviceSynchronize": nothing,
        "cudaGetLastError": nothing,
        "cudaPeekAtLastError": nothing,
        "cudaStreamCreate": lambda: stream(0),
        "cudaStreamCreateWithFlags": lambda *flags: stream(0),
        "cudaStreamDestroy": nothing,
        "cudaStreamSynchronize": nothing,
        "cudaStreamQuery": nothing,
        "cudaStreamWaitEvent": nothing,
        "cudaEventCreate": lambda: event(1),
        "cudaEventCreateWithFlags": lambda *flags: event(1),
        "cudaEventDestroy": nothing,
        "cudaEventRecord": nothing,
        "cudaEventSynchronize": nothing,
        "cudaEventQuery": nothing,
        "cudaEventElapsedTime": elapsed,
        "cudaLibraryUnload": lambda library: host.unload(int(library)),
        "cudaOccupancyMaxActiveClusters": lambda kernel, config: max_active_clusters(host, config),
    }


def driver_answers(host: Host, driver: types.ModuleType) -> dict[str, Callable]:
    """Answers for cuda.bindings.driver by name: what follows the error code in the result."""
    d = driver
    return host_memory.answers(driver) | {
        "cuInit": nothing,
        "cuDriverGetVersion": lambda: host.cuda_version,
        "cuDeviceGetCount": lambda: 1,
        "cuDeviceGet": lambda ordinal: d.CUdevice(host.check_device(ordinal)),
        "cuDeviceGetName": lambda length, device: host.model.name.encode()[:length - 1],
        "cuDeviceGetAttribute": lambda attribute, device: device_attribute(host.model, int(attribute)),
        "cuDeviceTotalMem": lambda device: memory_bytes(),
        "cuDevicePrimaryCtxRetain": lambda device: d.CUcontext(1),
        "cuDevicePrimaryCtxRelease": nothing,
        "cuCtxCreate": lambda *args: d.CUcontext(1),
        "cuCtxDestroy": nothing,
        "cuCtxGetCurrent": lambda: d.CUcontext(1),
        "cuCtxSetCurrent": nothing,
        "cuCtxGetDevice": lambda: d.CUdevice(0),
        "cuCtxSynchronize": nothing,
        "cuStreamCreate": lambda *flags: d.CUstream(0),
        "cuStreamDestroy": nothing,
        "cuStreamSynchronize": nothing,
        "cuStreamQuery": nothing,
        "cuStreamWaitEvent": nothing,
        "cuEventCreate": lambda *flags: d.CUevent(1),
        "cuEventDestroy": nothing,
        "cuEventRecord": nothing,
        "cuEventSynchronize": nothing,
        "cuEventQuery": nothing,
        "cuEventElapsedTime": elapsed,
        "cuLibraryLoadData": lambda *args: d.CUlibrary(1),  # a cubin: can be asked about, not launched
        "cuLibraryUnload": nothing,
        "cuLibraryEnumerateKernels": lambda count, library: [d.CUkernel(1)] * count,
        "cuLibraryGetKernel": lambda library, name: d.CUkernel(1),
        "cuKernelGetFunction": lambda kernel: d.CUfunction(int(kernel)),
        "cuFuncSetAttribute": nothing,
        "cuKernelSetAttribute": nothing,
        "cuOccupancyAvailableDynamicSMemPerBlock": lambda kernel, blocks, threads: min(
            SHARED_LIMIT, 233_472 // blocks - 1024),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda kernel, threads, shared: host.blocks_per_sm(
            threads, shared),
        "cuOccupancyMaxActiveClusters": lambda kernel, config: max_active_clusters(host, config),
        "cuGetErrorName": lambda error: error.name.encode(),
        "cuGetErrorString": lambda error: error.name.encode(),
    }


def max_active_clusters(host: Host, config: Any) -> int:
    """cuOccupancyMaxActiveClusters of a CUlaunchConfig. How SMs are grouped into GPCs is not modelled, so this is an
    upper bound: all SMs, divided by the cluster's CTAs."""
    size = 1
    for attribute in config.attrs or []:
        if int(attribute.id) == LAUNCH_CLUSTER:
            c = attribute.value.clusterDim
            size = c.x * c.y * c.z
    if size > LARGEST_CLUSTER:
        return 0
    try:
        block, shared = (config.blockDimX, config.blockDimY, config.blockDimZ), config.sharedMemBytes
    except AttributeError:  # the runtime's cudaLaunchConfig_t
        block, shared = (config.blockDim.x, config.blockDim.y, config.blockDim.z), config.dynamicSmemBytes
    return host.model.sms * host.blocks_per_sm(math.prod(block), shared) // size


def memory_bytes() -> int:
    """Bytes of memory of the virtual device: those of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_properties(host: Host, runtime: types.ModuleType, device: int) -> Any:
    """A cudaDeviceProp; fields that are not listed stay zero."""
    attribute = functools.partial(device_attribute, host.model)
    values = {
        "name": host.model.name.encode().ljust(256, b"\0"), "major": attribute(75), "minor": attribute(76),
        "multiProcessorCount": attribute(16), "totalGlobalMem": memory_bytes(), "l2CacheSize": attribute(38),
        "sharedMemPerBlock": attribute(8), "sharedMemPerBlockOptin": attribute(97),
        "sharedMemPerMultiprocessor": attribute(81), "reservedSharedMemPerBlock": attribute(111),
        "regsPerBlock": attribute(12), "regsPerMultiprocessor": attribute(82), "totalConstMem": attribute(9),
        "warpSize": attribute(10), "maxThreadsPerBlock": attribute(1), "maxThreadsPerMultiProcessor": attribute(39),
        "maxThreadsDim": [attribute(n) for n in (2, 3, 4)], "maxGridSize": [attribute(n) for n in (5, 6, 7)],
        "maxBlocksPerMultiProcessor": attribute(106), "concurrentKernels": 1, "unifiedAddressing": 1,
        "managedMemory": 1, "pageableMemoryAccess": 1, "cooperativeLaunch": 1, "clusterLaunch": 1,
    }
    host.check_device(device)
    properties = runtime.cudaDeviceProp()
    for name, value in values.items():
        if hasattr(properties, name):  # fields come and go with the CUDA version
            setattr(properties, name, value)
    return properties


def patch_bindings(module: types.ModuleType, answers: dict[str, Callable], success: Any) -> None:
    """Replace every function of a cuda.bindings module: by its answer, or by an error that names it."""

    def answering(answer: Callable) -> Callable:
        def call(*args, **kwargs) -> tuple:
            value = answer(*args, **kwargs)
            return (success,) if value is None else (success, value)
        return call

    for name in dir(module):
        function = getattr(module, name)
        if not re.match(r"cu(da)?[A-Z]", name) or isinstance(function, type) or not callable(function):
            continue
        if name in answers:
            setattr(module, name, functools.wraps(function)(answering(answers[name])))
        elif name not in KEEP_ORIGINAL:
            setattr(module, name, functools.partial(_refuse, name))


# ---------------------------------------------------------------------------------------------------------------------
# Installation


_host: Host | None = None


def install_host(arch: str, launch: LaunchFunction, null_launch: bool = False) -> None:
    """Let CuTeDSL compile for `arch` ("sm_100a", "sm_103a", "sm_90a", …) and hand its launches to `launch`.

    launch(ptx, kernel name, configuration, address_of_argument) is called once a launch, after the driver's checks;
    address_of_argument(i) is the host address of parameter i's bytes. What it raises comes out of the call of the
    compiled function. null_launch: launches do nothing at all (a C function that returns at once), to measure the
    host's own time. Call before cutlass is imported, or at least before its first compile. A second call only
    replaces `launch`. Raises ValueError for an unknown arch, RuntimeError if cutlass already compiles for another,
    ImportError without nvidia-cutlass-dsl.
    """
    global _host
    model_of(arch)
    if _host is not None:
        _check_arch(arch, _host.arch)
        _host.launch = launch
        return
    if "cutlass" in sys.modules:
        _set_imported_arch(arch)
    else:
        for dsl in ("CUTE_DSL", "CUTE_EXPERIMENTAL_DSL"):
            os.environ[f"{dsl}_ARCH"], os.environ[f"{dsl}_DISABLE_FILE_CACHING"] = arch, "1"
    host = Host(arch, launch, null_launch)
    from cuda.bindings import driver, runtime

    host.cuda_version = driver.CUDA_VERSION
    patch_bindings(runtime, runtime_answers(host, runtime), runtime.cudaError_t.cudaSuccess)
    patch_bindings(driver, driver_answers(host, driver), driver.CUresult.CUDA_SUCCESS)
    from cutlass.base_dsl import compiler, jit_executor
    from cutlass.cutlass_dsl import cuda_jit_executor

    patch_compiler(compiler.Compiler, host)
    patch_executors(jit_executor, cuda_jit_executor)
    disable_file_cache()
    _host = host


def _set_imported_arch(arch: str) -> None:
    """Set the architecture of a CuTeDSL that is imported already, if it has not settled on one."""
    from cutlass.cutlass_dsl import CuTeDSL

    variables = CuTeDSL._get_dsl().envar
    current = vars(variables).get("_arch", vars(variables).get("arch"))  # newer versions detect it at the first use
    if current is None:
        variables.arch = arch
    else:
        _check_arch(arch, current)


def _check_arch(arch: str, current: str) -> None:
    if arch != current:
        raise RuntimeError(f"arch: {arch!r}, but CuTeDSL already compiles for {current!r} in this process; "
                           f"call vgpu.install before importing cutlass, or set CUTE_DSL_ARCH={arch}")


def installed() -> Host:
    """What `install_host` made. Raises RuntimeError before it."""
    if _host is None:
        raise RuntimeError("call vgpu.install first")
    return _host
