"""CuTeDSL functions compiled with --enable-tvm-ffi, on the virtual GPU.

Such a function is called through tvm-ffi's C interface (package apache-tvm-ffi) instead of ctypes. Its host code needs
three more symbols, and takes tensors that say they lie on a CUDA device. The interface here is that of
nvidia-cutlass-dsl 4.8.1 [measured].
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

PROVIDER = "cutlass.cutlass_dsl.tvm_ffi_provider"
POINTER = ctypes.c_void_p
# int (self, arguments, their number, result): TVMFFISafeCallType of tvm/ffi/c_api.h
SafeCall = ctypes.CFUNCTYPE(ctypes.c_int, POINTER, POINTER, ctypes.c_int32, POINTER)
SetError = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
RaiseError = ctypes.CFUNCTYPE(None, POINTER, ctypes.c_int)


def init_library(state: int, init: int, load: int, set_error: int) -> None:
    """cuda_dialect_init_library_once: load the kernels at the first call. state: of the module, 0 before.

    init(library*) and load(library*, device) are generated code; set_error(kind, message) tells tvm-ffi.
    """
    done = ctypes.c_int64.from_address(state)
    if done.value:
        return
    library = POINTER()
    error = ctypes.CFUNCTYPE(ctypes.c_int32, POINTER)(init)(ctypes.addressof(library))
    error = error or ctypes.CFUNCTYPE(ctypes.c_int32, POINTER, ctypes.c_int32)(load)(ctypes.addressof(library), 0)
    if error:
        SetError(set_error)(b"RuntimeError", b"the kernel could not be loaded")
        raise RuntimeError(f"the kernel could not be loaded: CUDA error {error}")
    done.value = library.value


def raise_error(kind: int, error: int) -> None:
    """CuteDSLRT_TVMFFISetRaisedCudaError: a CUDA call failed; the error that says why is kept by the host. It comes out
    of calls of CuTeDSL's functions as it is; of others', who use the function behind, as a RuntimeError of its text."""
    import tvm_ffi

    from .host import kept_error

    message = str(kept_error() or f"CUDA error {error}").encode()
    library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
    SetError(("TVMFFIErrorSetRaisedFromCStr", library))(b"RuntimeError", message)


def symbols(callback: Callable[..., Any]) -> dict[str, Any]:
    """The symbols that the host code of such a function calls beside CUDA's. callback(function, *argument types)."""
    return {
        "cuda_dialect_init_library_once": callback(init_library, POINTER, POINTER, POINTER, POINTER),
        "cuda_dialect_unload_library_once": callback(lambda state: None, POINTER),
        "CuteDSLRT_TVMFFISetRaisedCudaError": RaiseError(raise_error),  # after an error, when callbacks do nothing
    }


class _OnCuda:
    """A CPU tensor as tvm-ffi is to see it."""

    def __init__(self, tensor: Any):
        self.tensor = tensor

    def __dlpack__(self, **_) -> Any:
        from .torch_cuda import cuda_capsule

        return cuda_capsule(self.tensor.__dlpack__())

    def __dlpack_device__(self) -> tuple[int, int]:
        from .torch_cuda import DLPACK_CUDA

        return DLPACK_CUDA, 0


def on_cuda(value: Any) -> Any:
    """An argument with its torch tensors as tensors on cuda:0. Where torch's "cuda" stands for the CPU, those that are
    on the CPU stay there."""
    import torch
    import tvm_ffi

    from .torch_cuda import is_marked

    if isinstance(value, torch.Tensor):
        if getattr(torch.cuda, "virtual", False) and not is_marked(value):
            return value
        with torch._C.DisableTorchFunction():
            return tvm_ffi.from_dlpack(_OnCuda(value.detach()))
    if isinstance(value, (tuple, list)):
        items = [on_cuda(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def patch_provider(raises_kept: Callable[[Callable], Callable]) -> None:
    """Let compiled functions keep the engine that the host has answered, and their calls take CPU tensors.

    Called after each engine is made; does nothing until CuTeDSL has imported its part for tvm-ffi. raises_kept: wraps a
    call so that the exception a callback raised comes out.
    """
    provider = sys.modules.get(PROVIDER)
    if provider is None or hasattr(provider, "on_virtual_gpu"):
        return
    provider.on_virtual_gpu = True
    provider.TVMFFIJitCompiledFunctionBase._create_tvm_ffi_function = _create_function
    for cls in (provider.TVMFFIJitCompiledFunction, provider.TVMFFIJitCompiledFunctionWithKwargs):
        cls.__call__ = raises_kept(_converting(cls.__call__))


def _converting(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(self, *args, **kwargs):
        return method(self, *map(on_cuda, args), **{name: on_cuda(value) for name, value in kwargs.items()})
    return call


def _create_function(self) -> Any:
    """The tvm_ffi.Function of a compiled function, from its engine, where CuTeDSL would link an object file anew.

    The engine gives a function's packed form: void (void** addresses of the arguments and of the result)."""
    if self.engine is None:
        return None
    import tvm_ffi

    from .host import forget_kept

    packed = ctypes.CFUNCTYPE(None, POINTER)(self.engine.raw_lookup("__tvm_ffi_" + self.function_name))

    def safe_call(function, arguments, count, result) -> int:
        forget_kept()
        values = (POINTER(function), POINTER(arguments), ctypes.c_int32(count), POINTER(result), ctypes.c_int32(-1))
        packed((POINTER * 5)(*map(ctypes.addressof, values)))
        return values[-1].value

    callback = SafeCall(safe_call)
    address = ctypes.cast(callback, POINTER).value
    return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=(self.engine, callback))
