"""Small PTX kernels for the tests of the virtual GPU: the text around a body, launching it, what it must stop with."""

from __future__ import annotations

import numpy as np
import pytest

import vgpu

REGISTERS = """
    .reg .pred %p<32>;
    .reg .b16 %h<32>;
    .reg .b32 %r<256>;
    .reg .b64 %d<64>;
    .reg .b128 %q<4>;
    .reg .b32 %t, %lane, %warp, %n<8>;
    .reg .b64 %a<8>, %o, %o8;
"""


def ptx(body: str, args=(), declare: str = "", module: str = "", directives: str = "") -> str:
    """A kernel with one parameter an argument: %a<i> holds argument i if it is an array, %n<i> if it is an int.

    Also at hand: %t is %tid.x, %lane, %warp, and %o and %o8 point at element tid of 4 and of 8 bytes of argument 0.
    """
    kinds = [f".align 64 .b8 k_param_{i}[{len(a)}]" if isinstance(a, bytes) else
             f".u64 k_param_{i}" if isinstance(a, np.ndarray) else f".u32 k_param_{i}" for i, a in enumerate(args)]
    parameters = ", ".join(f".param {kind}" for kind in kinds)
    loads = [f"ld.param.u64 %a{i}, [k_param_{i}];" if isinstance(a, np.ndarray) else
             f"ld.param.u32 %n{i}, [k_param_{i}];" for i, a in enumerate(args) if not isinstance(a, bytes)]
    start = ["mov.u32 %t, %tid.x;", "mov.u32 %lane, %laneid;", "shr.u32 %warp, %t, 5;"]
    if args and isinstance(args[0], np.ndarray):
        start += ["mad.wide.u32 %o, %t, 4, %a0;", "mad.wide.u32 %o8, %t, 8, %a0;"]
    target = "sm_90a" if "wgmma" in body + module else "sm_100a"
    return "\n".join([".version 8.7", f".target {target}", ".address_size 64", module,
                      f".visible .entry k({parameters}) {directives}", "{", REGISTERS, declare, *loads, *start, body,
                      "    ret;", "}"])


def run(body: str, *args, threads=32, grid=1, cluster=1, shared_bytes=0, declare="", module="", directives="",
        **options) -> vgpu.Launch:
    """Launch `ptx(body, args, …)`; threads, grid, cluster: an int for x, or (x, y, z)."""
    shape = [(v, 1, 1) if isinstance(v, int) else v for v in (grid, threads, cluster)]
    return vgpu.launch(ptx(body, args, declare, module, directives), "k", shape[0], shape[1], list(args),
                       cluster=shape[2], shared_bytes=shared_bytes, **options)


def words(count: int, fill: int = 0) -> np.ndarray:
    """uint32[count], for results."""
    return np.full(count, fill, np.uint32)


def aligned(array: np.ndarray, to: int = 64) -> np.ndarray:
    """A copy whose address is a multiple of `to`."""
    room = np.zeros(array.nbytes + to, np.uint8)
    start = -room.ctypes.data % to
    out = room[start:start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


def lanes(body: str, *args, threads=32, **options) -> list[int]:
    """What `body` leaves in %r0, for each thread of one CTA; arguments are %a1, %n1, …"""
    out = words(threads)
    run(f"{body}\nst.global.b32 [%o], %r0;", out, *args, threads=threads, **options)
    return out.tolist()


def stops(kind: str | tuple[str, ...], body: str, *args, match: str | None = None, warp: int | None = 0,
          lane: int | None = None, cta=(0, 0, 0), **options) -> vgpu.VirtualGpuError:
    """Run a kernel that must stop with an error of this kind, or of one of these.

    The error is at the statement followed by `// here`, if there is one, and its text names that PTX line, the CTA and
    the warp; the lane too where `lane` is given. match: regular expression found in the message.
    """
    with pytest.raises(vgpu.VirtualGpuError, match=match) as caught:
        run(body, *args, **options)
    error, text = caught.value, str(caught.value)
    assert error.kind == kind or error.kind in kind, text
    if "// here" in body:
        source = ptx(body, args, options.get("declare", ""), options.get("module", ""), options.get("directives", ""))
        line = next(i for i, row in enumerate(source.split("\n"), 1) if "// here" in row)
        assert error.line == line, text
        assert f"PTX line {line}: " in text
        if warp is not None:
            assert (error.cta, error.warp) == (cta, warp), text
            assert f"CTA {cta}, warp {warp}" in text
    if lane is not None:
        assert error.lane == lane, text
        assert f"lane {lane}" in text
    return error
