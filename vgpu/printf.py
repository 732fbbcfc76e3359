"""call: the two functions of the device runtime that PTX may call without a body, vprintf and __assertfail."""

from __future__ import annotations

import re
import struct

import numpy as np

from .address import LOW, WINDOW_SHIFT
from .errors import VirtualGpuError
from .isa import Action, Const, Modifiers, decodes
from .ptx import CallParam, Instr, Sym, Vec

_FORMAT = re.compile(r"%([-+ #0]*\d*(?:\.\d+)?)(?:hh|h|ll|l|z|j|t)?([diuxXofFeEgGaAcsp%])")
_WIDE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:ll|l|z|j|t)")
LOCAL = 3  # the window of local memory, where the compiler puts the arguments


def _pick(value, lane: int) -> int:
    return int(value[lane]) if isinstance(value, np.ndarray) else int(value)


def _argument(warp, name: str, lane: int) -> int:
    found = warp.call_params.get(name, {}).get(0)
    if found is None:
        raise VirtualGpuError("uninitialised", f"call parameter {name.split('@')[0]} was never stored")
    return _pick(found, lane)


def _string(warp, address: int) -> str:
    """The zero-terminated text at a global address."""
    b = warp.grid.memory.buffer(address, 1)
    raw = b.data[address - b.base:].tobytes()
    return raw.split(b"\0", 1)[0].decode(errors="replace")


def vprintf(warp, arguments, result) -> None:
    """vprintf(format, arguments): prints for every active lane, lane 0 first; gives the number of arguments."""
    counts = np.zeros(32, np.uint32)
    for lane in np.flatnonzero(warp.mask).tolist():
        text, place = (_argument(warp, name, lane) for name in arguments)
        out, counts[lane] = format_text(warp, _string(warp, text), place, lane)
        print(out, end="")
    if result is not None:
        warp.call_params.setdefault(result, {})[0] = counts


def format_text(warp, text: str, place: int, lane: int) -> tuple[str, int]:
    """(text with its conversions replaced, number of arguments). The arguments lie in the lane's local memory one after
    the other, aligned to their size; floats are doubles (CUDA C++ programming guide, formatted output)."""
    offset, count = place & LOW, 0

    def one(match: re.Match) -> str:
        nonlocal offset, count
        flags, kind = match.groups()
        if kind == "%":
            return "%"
        size = 8 if kind in "fFeEgGaAsp" or _WIDE.match(match.group()) else 4
        offset, count = -(-offset // size) * size, count + 1
        raw = _local(warp, place, lane, offset, size)
        offset += size
        return _convert(warp, flags, kind, raw)

    return _FORMAT.sub(one, text), count


def _local(warp, place: int, lane: int, offset: int, size: int) -> bytes:
    if place >> WINDOW_SHIFT != LOCAL or warp.local is None or offset + size > warp.local.shape[1]:
        raise VirtualGpuError("out of bounds", f"vprintf arguments at {place:#x} are not in local memory", lane=lane)
    return warp.local[lane, offset:offset + size].tobytes()


def _convert(warp, flags: str, kind: str, raw: bytes) -> str:
    if kind in "fFeEgG":
        return f"%{flags}{kind}" % struct.unpack("<d", raw)[0]
    if kind in "aA":
        text = struct.unpack("<d", raw)[0].hex()
        return text.upper() if kind == "A" else text
    value = int.from_bytes(raw, "little", signed=kind in "di")
    if kind == "s":
        return f"%{flags}s" % _string(warp, value)
    if kind == "c":
        return f"%{flags}c" % chr(value & 0xFF)
    if kind == "p":
        return f"%{flags}s" % hex(value)
    return f"%{flags}{'d' if kind in 'diu' else kind}" % value


def assert_fail(warp, arguments) -> None:
    """__assertfail(message, file, line, function, size): a device-side assertion failed."""
    lane = warp.leader
    message, file, line, function = (_argument(warp, name, lane) for name in arguments[:4])
    raise VirtualGpuError("assertion", f"{_string(warp, file)}:{line}: {_string(warp, function)}: assertion "
                          f"`{_string(warp, message)}` failed", lane=lane)


@decodes("call")
def decode_call(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.take("uni")
    m.done()
    callee = next((o for o in i.operands if not isinstance(o, Vec)), None)
    name = callee.name if isinstance(callee, Sym) else "a function pointer"
    vectors = [tuple(p.name for p in o.items if isinstance(p, CallParam)) for o in i.operands if isinstance(o, Vec)]
    result = vectors[0][0] if len(vectors) > 1 and vectors[0] else None
    if name == "vprintf" and vectors and len(vectors[-1]) == 2:
        return Action(vprintf, (), (Const(vectors[-1]), Const(result)))
    if name == "__assertfail" and vectors and len(vectors[-1]) == 5:
        return Action(assert_fail, (), (Const(vectors[-1]),))
    raise i.error("unsupported", f"call of {name}: of functions without a body only vprintf and __assertfail are "
                  "modelled")
