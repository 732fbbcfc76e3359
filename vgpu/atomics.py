"""Handlers: atom and red on global and shared memory, scalar, packed and vector forms (PTX ISA 9.7.13.5-6)."""

from __future__ import annotations

import math
import struct

import numpy as np

from .access import shared_parts
from .address import address_width, space_of, take_space
from .errors import VirtualGpuError
from .isa import Action, Const, Flow, Modifiers, Slot, decodes
from .ptx import SINK, TYPE_BYTES, Imm, Instr, Vec
from .spin import polled

FLOATS = {"f16": "e", "f32": "f", "f64": "d"}  # struct codes
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}
OPERATIONS = ("add", "and", "or", "xor", "min", "max", "inc", "dec", "exch", "cas")
INTEGERS = ("b32", "b64", "u32", "u64", "s32", "s64")
KINDS = {  # operation -> types of the scalar form
    "add": ("u32", "s32", "u64", "s64", "f32", "f64", "f16", "f16x2", "bf16", "bf16x2"),
    "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"), "inc": ("u32",), "dec": ("u32",),
    "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64"), "exch": ("b32", "b64", "b128"),
    "cas": ("b16", "b32", "b64", "b128"),
}
SMALLEST_NORMAL = 2.0 ** -126


# --- arithmetic --------------------------------------------------------------------------------------


def to_float(bits: int, kind: str) -> float:
    """The value of a bit pattern."""
    if kind == "bf16":
        bits, kind = bits << 16, "f32"
    return struct.unpack("<" + FLOATS[kind], bits.to_bytes(TYPE_BYTES[kind], "little"))[0]


def _from_float(value: float, kind: str) -> int:
    """The bits of a value that is exact in float64, rounded to nearest even."""
    dtype = {"f16": np.float16, "f32": np.float32, "bf16": np.float32, "f64": np.float64}[kind]
    if math.isnan(value):
        return NAN[kind]
    with np.errstate(all="ignore"):
        bits = int.from_bytes(dtype(value).tobytes(), "little")
    if kind != "bf16":
        return bits
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def _float(op: str, kind: str, a: int, b: int, flush: bool) -> int:
    x, y = to_float(a, kind), to_float(b, kind)
    if op == "add":
        if flush:
            x, y = _flushed(x), _flushed(y)
        total = x + y if kind != "f64" else float(np.float64(x) + np.float64(y))
        out = _from_float(total, kind)
        return _from_float(_flushed(to_float(out, kind)), kind) if flush else out
    if math.isnan(x) or math.isnan(y):
        return NAN[kind] if math.isnan(x) and math.isnan(y) else b if math.isnan(x) else a
    first = (x, math.copysign(1, x)) < (y, math.copysign(1, y))  # -0 is below +0
    return a if first == (op == "min") else b


def _flushed(x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < SMALLEST_NORMAL else x


def _signed(v: int, kind: str) -> int:
    bits = 8 * TYPE_BYTES[kind]
    return v - (1 << bits) if kind[0] == "s" and v >> (bits - 1) else v


def apply_atomic(op: str, kind: str, old: int, b: int, c: int = 0, flush: bool = False) -> int:
    """The new value an atomic leaves in memory, as unsigned bits.

    flush: subnormal inputs and results become zeros, as add.f32 does on global memory (PTX ISA 9.7.13.5).
    """
    if kind.endswith("x2"):
        half = kind[:-2]
        return _float(op, half, old & 0xFFFF, b & 0xFFFF, False) | _float(op, half, old >> 16, b >> 16, False) << 16
    if kind in NAN and op in ("add", "min", "max"):
        return _float(op, kind, old, b, flush and kind == "f32")
    mask = (1 << (8 * TYPE_BYTES[kind])) - 1
    if op in ("min", "max"):
        return (min if op == "min" else max)(_signed(old, kind), _signed(b, kind)) & mask
    return {
        "add": lambda: old + b, "and": lambda: old & b, "or": lambda: old | b, "xor": lambda: old ^ b,
        "exch": lambda: b, "cas": lambda: c if old == b else old,
        "inc": lambda: 0 if old >= b else old + 1, "dec": lambda: b if old == 0 or old > b else old - 1,
    }[op]() & mask


# --- execution ---------------------------------------------------------------------------------------


def atomic(warp, address, op, kind, space, b, c):
    """Lane after lane: memory becomes op(memory, b, c). Returns the old values, one int if only one lane is active."""
    size = TYPE_BYTES[kind]
    space, address = space_of(warp, address, space)
    out = np.zeros(32, np.dtype(f"u{size}") if size <= 8 else object)
    changed = False
    for (lane, a), (_, bv), (_, cv) in zip(warp.per_lane(address), warp.per_lane(b), warp.per_lane(c), strict=True):
        view = _cell(warp, space, a, size, lane)
        old = int.from_bytes(view, "little")
        new = apply_atomic(op, kind, old, bv, cv, space == "global")
        out[lane] = old
        if new != old:
            view[...] = np.frombuffer(new.to_bytes(size, "little"), np.uint8)
            changed = True
    if changed:
        warp.grid.counters["global_writes"] += space == "global"
        warp.cta.cluster.progress += 1
    return int(out[warp.leader]) if warp.count == 1 else out


def _cell(warp, space: str, address: int, size: int, lane: int) -> np.ndarray:
    """uint8[size]: the memory an atomic works on."""
    if space == "global":
        warp.grid.memory.check(address, size, size, lane)
        return warp.grid.memory.view(address, size)
    if not space.startswith("shared"):
        raise VirtualGpuError("unsupported", f"atomics on {space} memory", lane=lane)
    cta, offset = warp.cta.cluster.resolve(address, "atom.shared")
    cta.smem.check(offset, size, size, lane)
    ((cta, relative, _),) = shared_parts(warp, space, np.array([address], np.uint64), size, True, "atom.shared")
    where = slice(offset, offset + size)
    cta.smem.require_written(where, "atom.shared")
    writer = warp.index if cta is warp.cta else (warp.cta.rank, warp.index)
    cta.smem.mark_generic(where, writer, warp.cta.cluster.next_sequence())
    return cta.smem.data[where]


def atomic_vector(warp, address, op, kind, space, b):
    """The vector forms: each element is an atomic of its own. Returns a tuple of old values."""
    space, address = space_of(warp, address, space)
    total = TYPE_BYTES[kind] * len(b)
    for lane, a in warp.per_lane(address):
        if a % total:
            raise VirtualGpuError("misaligned", f"address {a:#x} is not a multiple of {total}", lane=lane)
    return tuple(atomic(warp, address + k * TYPE_BYTES[kind], op, kind, space, v, 0) for k, v in enumerate(b))


def atom(warp, resume, slots, address, op, kind, space, b, c) -> int:
    """atom; as the last statement of its block, for it may be trying to take a lock."""
    if type(b) is tuple:
        return polled(warp, resume, slots, atomic_vector(warp, address, op, kind, space, b))
    return polled(warp, resume, slots, (atomic(warp, address, op, kind, space, b, c),))


def reduce(warp, address, op, kind, space, b) -> None:
    """red"""
    if type(b) is tuple:
        atomic_vector(warp, address, op, kind, space, b)
    else:
        atomic(warp, address, op, kind, space, b, 0)


# --- decoding ----------------------------------------------------------------------------------------


@decodes("atom", "red")
def decode(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.drop("relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys")
    hint = m.take("L2::cache_hint")
    space = take_space(m)
    op = m.need(*OPERATIONS)
    vector = m.take("v2", "v4", "v8")
    noftz = m.take("noftz") is not None
    kind = m.need(*TYPE_BYTES)
    m.done()
    returns = i.opcode[0] == "atom"
    _check(i, op, kind, vector, noftz, space, returns)
    operands = list(i.operands[:-1] if hint else i.operands)
    dst = operands.pop(0) if returns else SINK
    if len(operands) != (3 if op == "cas" else 2):
        raise i.error("unknown instruction", f"{len(i.operands)} operands of {i.opcode[0]}.{op}")
    address, b, c = operands[0], operands[1], operands[2] if op == "cas" else Imm(0)
    width = 8 * TYPE_BYTES[kind]
    if not returns:
        return Action(reduce, (), (address, Const(op), Const(kind), Const(space), b),
                      (address_width(space), 0, 0, 0, width))
    results = dst.items if isinstance(dst, Vec) else (dst,)
    return Action(atom, tuple(r for r in results if r != SINK),
                  (Vec(tuple(Slot(r) for r in results)), address, Const(op), Const(kind), Const(space), b, c),
                  (0, address_width(space), 0, 0, 0, width, width), Flow.BLOCK)


def _check(i: Instr, op: str, kind: str, vector, noftz: bool, space: str, returns: bool) -> None:
    """Raise for a combination of operation and type that PTX does not have."""
    half = kind in ("f16", "bf16", "f16x2", "bf16x2")
    if vector:
        lanes = int(vector[1:])
        known = (half and op in ("add", "min", "max")) or (kind == "f32" and op == "add")
        if not known or lanes * TYPE_BYTES[kind] > 16 or space.startswith("shared"):
            raise i.error("unknown instruction", f"{i.opcode[0]}.{op}.{vector}.{kind} on {space} memory does not exist")
    elif kind not in KINDS[op] or (not returns and op in ("exch", "cas")):
        raise i.error("unknown instruction", f"{i.opcode[0]}.{op}.{kind} does not exist")
    if half != noftz:
        raise i.error("unknown instruction", f".noftz is {'required' if half else 'not known'} with .{kind}")
