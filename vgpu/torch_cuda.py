"""torch's "cuda" device standing for the CPU, for programs written for a GPU (`vgpu.install(torch_cuda=True)`)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import types
from typing import Any

from .host import Host, device_attribute, elapsed, installed, memory_bytes, nothing

DLPACK_CUDA = 2  # kDLCUDA
DLPACK_TENSOR = {b"dltensor": 0, b"dltensor_versioned": 32}  # where the DLTensor lies in what a capsule points at


def install_torch_cuda() -> None:
    """Let torch's "cuda" device stand for the CPU, in this thread, for the rest of the process.

    Tensors made for "cuda" are CPU tensors whose storage is marked; they say they are on cuda:0. Copies between the
    two devices copy, as on a GPU. torch.cuda knows one device; what it does not answer here fails as on a CPU-only
    torch. Needs `install_host` first. Raises RuntimeError without it, or where torch sees a real GPU.
    """
    import torch

    host = installed()
    if getattr(torch.cuda, "virtual", False):
        return
    if torch.cuda.is_available():
        raise RuntimeError("install_torch_cuda: torch has a real GPU here")
    for name, value in torch_cuda_answers(host, torch).items():
        # an object for each name: torch._dynamo wants to tell its functions apart
        setattr(torch.cuda, name, functools.partial(value) if isinstance(value, types.FunctionType) else value)
    torch.Generator = cpu_generator(torch)
    cuda_as_cpu(torch).__enter__()
    host.around_launch = torch._C.DisableTorchFunction  # a launch sees the CPU tensors that they are


def torch_cuda_answers(host: Host, torch: types.ModuleType) -> dict[str, Any]:
    """Replacements for names of torch.cuda."""

    class Stream:
        """The only stream."""

        cuda_stream, device = 0, torch.device("cuda", 0)
        __init__ = synchronize = wait_stream = wait_event = nothing

        def query(self) -> bool:
            return True

        def record_event(self, event=None):
            return event or Event()

    class Event:
        """A point in the only stream; all work before it is complete."""

        __init__ = record = synchronize = wait = nothing
        elapsed_time = staticmethod(elapsed)

        def query(self) -> bool:
            return True

    class NoContext(contextlib.nullcontext):
        """torch.cuda.device(…) and stream(…): there is nothing to switch."""

    stream, attribute = Stream(), functools.partial(device_attribute, host.model)
    properties = types.SimpleNamespace(
        name=host.model.name, major=host.model.capability[0], minor=host.model.capability[1],
        multi_processor_count=host.model.sms, total_memory=memory_bytes(), L2_cache_size=host.model.l2_bytes,
        shared_memory_per_block=attribute(8), shared_memory_per_block_optin=attribute(97),
        shared_memory_per_multiprocessor=attribute(81), max_threads_per_multi_processor=attribute(39),
        regs_per_multiprocessor=attribute(82), warp_size=attribute(10))
    return {
        "virtual": True, "Stream": Stream, "Event": Event, "device": NoContext, "stream": NoContext,
        "is_available": lambda: True, "is_initialized": lambda: True, "init": nothing,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": nothing, "set_stream": nothing,
        "get_device_name": lambda device=None: host.model.name,
        "get_device_capability": lambda device=None: host.model.capability,
        "get_device_properties": lambda device=None: properties,
        "current_stream": lambda device=None: stream, "default_stream": lambda device=None: stream,
        "synchronize": nothing, "empty_cache": nothing, "manual_seed": nothing, "manual_seed_all": nothing,
        "reset_peak_memory_stats": nothing, "is_bf16_supported": lambda *args: True,
        "is_current_stream_capturing": lambda: False,
    }


def cpu_generator(torch: types.ModuleType) -> type:
    """torch.Generator, with "cuda" standing for the CPU."""

    class Generator(torch.Generator):
        def __new__(cls, device="cpu"):
            return super().__new__(cls, "cpu" if is_cuda(device) else device)

        def __init__(self, device="cpu"):
            super().__init__()

    return Generator


def is_cuda(device: Any) -> bool:
    """Whether a device argument of torch (string, torch.device, ordinal, None) means cuda."""
    if isinstance(device, bool) or device is None:
        return False
    return isinstance(device, int) or str(device).startswith("cuda")


def is_marked(tensor: Any) -> bool:
    """Whether a CPU tensor stands for one on cuda."""
    try:
        return getattr(tensor.untyped_storage(), "stands_for_cuda", False)
    except (NotImplementedError, RuntimeError):  # layouts without a storage
        return False


def mark(value: Any) -> Any:
    """Mark the storages of a result: a tensor, or a tuple or list of tensors; returns it."""
    many = isinstance(value, (tuple, list)) and value and hasattr(value[0], "untyped_storage")
    for tensor in value if many else (value,):
        if hasattr(tensor, "untyped_storage"):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # layouts without a storage
                tensor.untyped_storage().stands_for_cuda = True
    return value


def transfer(torch: types.ModuleType, func: Any, source: Any, *rest, device: Any = None, **kwargs) -> Any:
    """Tensor.to, cuda and cpu: a copy when the device changes. A device comes first, by name, or as a tensor's."""
    tensor = torch.Tensor
    if func is not tensor.to:
        device, rest = ("cuda" if func is tensor.cuda else "cpu"), ()
    elif rest and (isinstance(rest[0], (str, torch.device)) or type(rest[0]) is int):
        device, rest = rest[0], rest[1:]
    elif rest and isinstance(rest[0], tensor):
        device = "cuda" if is_marked(rest[0]) else "cpu"
    on_cuda = is_marked(source) if device is None else is_cuda(device)
    moved = tensor.to(source, *rest, **kwargs) if rest or kwargs else source
    if moved is source and is_marked(source) != on_cuda:
        moved = source.clone()
    return mark(moved) if on_cuda else moved


def cuda_capsule(capsule: Any) -> Any:
    """A DLPack capsule of a CPU tensor, changed to say that the tensor lies on cuda:0 (dlpack.h: DLTensor's device).

    CuTeDSL takes the addresses of such a tensor as global ones; of a CPU tensor's it makes generic pointers, which
    cp.async and other copies from global memory refuse."""
    api = ctypes.pythonapi
    name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", api))
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", api))
    name = name_of(capsule)
    tensor = pointer_of(capsule, name) + DLPACK_TENSOR[name]
    ctypes.c_int32.from_address(tensor + 8).value = DLPACK_CUDA
    return capsule


def cuda_as_cpu(torch: types.ModuleType) -> Any:
    """A TorchFunctionMode under which device "cuda" means marked CPU tensors."""
    from torch.overrides import TorchFunctionMode
    from torch.utils import _device as default_device

    tensor, cuda0 = torch.Tensor, torch.device("cuda", 0)
    answers = {tensor.device.__get__: cuda0, tensor.is_cuda.__get__: True, tensor.is_cpu.__get__: False,
               tensor.get_device: 0}
    factories = {getattr(torch, name) for name in (
        "empty", "empty_strided", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace",
        "logspace", "eye", "tensor", "as_tensor", "scalar_tensor")}

    class CudaAsCpu(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if func in answers and is_marked(args[0]):
                return answers[func]
            if func in (tensor.to, tensor.cuda, tensor.cpu):
                return transfer(torch, func, *args, **kwargs)
            if func in (tensor.pin_memory, tensor.record_stream):
                return args[0]
            if func is tensor.__dlpack__ and is_marked(args[0]):
                return cuda_capsule(func(*args, **kwargs))
            return self.call(func, args, kwargs)

        def call(self, func, args: tuple, kwargs: dict):
            """Any other function: results of a cuda device or of marked tensors are marked."""
            kwargs.pop("pin_memory", None)
            device, inputs = kwargs.get("device"), []
            if device is None and func in factories:
                device = default_device.CURRENT_DEVICE  # None, or that of torch.set_default_device
            elif device is None:
                inputs = [t for a in (*args, *kwargs.values())
                          for t in (a if isinstance(a, (tuple, list)) else (a,)) if isinstance(t, tensor)]
            on_cuda = is_cuda(device) or any(map(is_marked, inputs))
            if is_cuda(device):
                kwargs["device"] = "cpu"
            result = func(*args, **kwargs)
            return mark(result) if on_cuda and not any(result is t for t in inputs) else result

    return CudaAsCpu()
