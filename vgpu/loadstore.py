"""Handlers of the load/store unit: ld, ldu, st, st.bulk, call parameters (PTX ISA 9.7.9.8-13).

A strong load (volatile, relaxed, acquire) may be the body of a spin loop on a flag: it ends its basic block, so that a
warp that keeps reading the same value lets the others run.
"""

from __future__ import annotations

import numpy as np

from . import alu
from .access import FLAT, gather, scatter, shared_parts
from .address import address_width, space_of, take_space
from .errors import VirtualGpuError
from .isa import CACHE_HINTS, Action, Const, Flow, Modifiers, Slot, decodes, operand_count
from .ptx import SINK, TYPE_BYTES, CallParam, Instr, Mem, Reg, Vec
from .spin import polled
from .warp import merge

UINT = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
SINT = {1: np.dtype(np.int8), 2: np.dtype(np.int16), 4: np.dtype(np.int32), 8: np.dtype(np.int64)}
STRONG = ("volatile", "relaxed", "acquire", "release", "mmio")
SCOPES = ("cta", "cluster", "gpu", "sys")


# --- loads -------------------------------------------------------------------------------------------


def load(warp, address, space, size, n, width, signed):
    """n elements of `size` bytes into registers of `width` bits: a value, or a tuple of n."""
    space, address = space_of(warp, address, space)
    if warp.trace is not None:
        note_access(warp, space, address, size * n, "ld")
    if type(address) is int and space != "local":
        raw = _at(warp, space, address, size * n)
        if n == 1:
            return _extend(int.from_bytes(raw, "little"), size, width, signed)
        return tuple(_extend(int.from_bytes(raw[k * size:(k + 1) * size], "little"), size, width, signed)
                     for k in range(n))
    found = gather(warp, space, address, size * n, "ld")
    columns = _widen(found.view(UINT[size]).reshape(-1, n).T, width, signed)
    if warp.count != 32:
        full = np.zeros((n, 32), columns.dtype)
        full[:, warp.mask] = columns
        columns = full
    return columns[0] if n == 1 else tuple(columns)


def note_access(warp, space: str, address, total: int, kind: str) -> None:
    """Record a load or store of `total` bytes a lane for the timing model; global memory moves 32-byte sectors."""
    uniform = type(address) is int
    if space in ("global", "const"):
        active = np.array([address]) if uniform else address[warp.mask]
        lowest = int(active.min())
        if kind == "st":
            lines = len(np.unique(active >> active.dtype.type(7)))
            warp.note("stg", lines, total * len(active))
            return
        warp.note("ldg", 32 * len(np.unique(active >> active.dtype.type(5))) * max(1, total // 32))
        warp.keys.append(lowest >> 5 << 5)
    elif space.startswith("shared"):
        warp.note(kind + "s", total if uniform else total * warp.count)


def _extend(raw: int, size: int, width: int, signed: bool) -> int:
    if signed and raw >> (8 * size - 1):
        return raw - (1 << 8 * size) & ((1 << width) - 1)
    return raw & ((1 << width) - 1)


def _widen(values: np.ndarray, width: int, signed: bool) -> np.ndarray:
    """Contiguous unsigned values of `width` bits, sign-extended where the type is signed."""
    target = UINT[width // 8]
    if signed and target.itemsize > values.dtype.itemsize:
        return values.view(SINT[values.dtype.itemsize]).astype(SINT[width // 8], order="C").view(target)
    return values.astype(target, order="C")


def _at(warp, space: str, address: int, total: int):
    """The bytes at an address that is the same in all lanes."""
    if space in ("global", "const"):
        memory = warp.grid.memory
        if address & (total - 1):
            memory.check(address, total, total, warp.leader)
        try:
            b = memory.buffer(address, total)
        except VirtualGpuError as e:
            e.lane = warp.leader
            raise
        return b.data[address - b.base:address - b.base + total]
    if space == "param":
        found = warp.grid.params[address:address + total]
        if len(found) < total or address % total:
            raise VirtualGpuError("out of bounds", f"{total} bytes at offset {address} of the "
                                  f"{len(warp.grid.params)} bytes of parameters")
        return found
    return _shared_at(warp, space, address, total)


def _shared_at(warp, space: str, address: int, total: int) -> np.ndarray:
    cta, offset = warp.cta.cluster.resolve(address, "ld.shared")
    if cta is not warp.cta:
        shared_parts(warp, space, np.array([address], np.uint64), total, False, "ld.shared")
    cta.smem.check(offset, total, total, warp.leader)
    if cta.writing:
        cta.conflict(offset, offset + total, False, "ld.shared")
    cta.smem.require_written(slice(offset, offset + total), "ld.shared")
    return cta.smem.data[offset:offset + total]


def load_b128(warp, address, space, n):
    """ld.b128: pairs of 64-bit halves joined."""
    halves = load(warp, address, space, 8, 2 * n, 64, False)
    joined = tuple(alu.pack(128, halves[2 * k:2 * k + 2]) for k in range(n))
    return joined[0] if n == 1 else joined


def load_strong(warp, resume, slots, address, space, size, n, width, signed):
    """A load that may be polling a flag: as the last statement of its block."""
    values = load(warp, address, space, size, n, width, signed)
    return polled(warp, resume, slots, (values,) if n == 1 else values)


@decodes("ld", "ldu")
def decode_ld(i: Instr) -> Action:
    m = Modifiers(i, 1)
    strong = m.take(*STRONG) is not None
    m.drop(*CACHE_HINTS, *SCOPES, *STRONG, "weak")
    space = take_space(m)
    hint = m.take("L2::cache_hint")
    n, size, signed = _element(m)
    operand_count(i, 3 if hint else 2)
    d, a = i.operands[:2]
    dst = d.items if isinstance(d, Vec) else (d,)
    if len(dst) != n or not isinstance(a, Mem):
        raise i.error("unknown instruction", f"a vector of {n} is loaded from [address] into {n} registers")
    width = max((r.width for r in dst if isinstance(r, Reg)), default=8 * size)
    if isinstance(a.base, CallParam):
        place = (Const(a.base.name), Const(a.offset), Const(size), Const(n))
        return Action(load_call_param, dst, (*place, Const(width), Const(signed)))
    if size == 16:
        return Action(load_b128, dst, (a, Const(space), Const(n)), (address_width(space), 0, 0))
    src = (a, Const(space), Const(size), Const(n), Const(width), Const(signed))
    widths = (address_width(space), 0, 0, 0, 0, 0)
    if strong and space != "param":
        return Action(load_strong, dst, (Vec(tuple(Slot(r) for r in dst)), *src), (0, *widths), Flow.BLOCK)
    return Action(load, dst, src, widths, loads=space != "param")


def _element(m: Modifiers) -> tuple[int, int, bool]:
    """(elements, bytes of one, signed) of a vector load or store."""
    n = int((m.take("v2", "v4", "v8") or "v1")[1:])
    kind = m.need(*TYPE_BYTES)
    m.done()
    if n * TYPE_BYTES[kind] > 32 or kind == "pred":
        raise m.instr.error("unknown instruction", f".v{n}.{kind}: an access has at most 32 bytes")
    return n, TYPE_BYTES[kind], kind[0] == "s"


# --- stores ------------------------------------------------------------------------------------------


def store(warp, address, values, space, size):
    """Store a tuple of n values of `size` bytes each at every active lane's address."""
    space, address = space_of(warp, address, space)
    if warp.trace is not None:
        note_access(warp, space, address, size * len(values), "st")
    scatter(warp, space, address, size * len(values), _rows(warp, values, UINT[size]), "st")


def _rows(warp, values, element: np.dtype) -> np.ndarray:
    """FLAT[active lanes] of a tuple of values of type `element`."""
    n = len(values)
    flat = FLAT[element.itemsize * n]
    whole = warp.count == 32
    if n == 1 and type(values[0]) is np.ndarray:
        v = values[0] if whole else values[0][warp.mask]
        return v if v.dtype == element else v.astype(element)
    rows = np.empty((warp.count, n), element)
    ones = (1 << 8 * element.itemsize) - 1
    for k, v in enumerate(values):
        if v is None:
            raise VirtualGpuError("uninitialised", "a register that was never written is stored")
        rows[:, k] = (v if whole else v[warp.mask]) if type(v) is np.ndarray else int(v) & ones
    return rows.view(flat)[:, 0]


def store_b128(warp, address, values, space) -> None:
    """st.b128"""
    store(warp, address, tuple(h for v in values for h in alu.unpack(128, 2, v)), space, 8)


@decodes("st")
def decode_st(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.drop(*CACHE_HINTS, *SCOPES, *STRONG, "weak")
    space = take_space(m)
    hint = m.take("L2::cache_hint")
    n, size, _ = _element(m)
    operand_count(i, 3 if hint else 2)
    a, v = i.operands[:2]
    values = v if isinstance(v, Vec) else Vec((v,))
    if len(values.items) != n or not isinstance(a, Mem):
        raise i.error("unknown instruction", f"a vector of {n} is stored at [address] from {n} registers")
    if SINK in values.items:
        raise i.error("unsupported", "stores that leave out elements of a vector (_)")
    if isinstance(a.base, CallParam):
        return Action(store_call_param, (), (Const(a.base.name), Const(a.offset), values, Const(size)),
                      (0, 0, 8 * size, 0))
    if space in ("param", "const"):
        raise i.error("unknown instruction", f"stores to {space} memory")
    width = address_width(space)
    if size == 16:
        return Action(store_b128, (), (a, values, Const(space)), (width, 128, 0))
    return Action(store, (), (a, values, Const(space), Const(size)), (width, 8 * size, 0, 0))


def store_bulk(warp, address, size, value) -> None:
    """st.bulk: zero a block of shared memory (PTX ISA 9.7.9.14)."""
    for (lane, a), (_, n) in zip(warp.per_lane(address), warp.per_lane(size), strict=True):
        if n % 8 or value:
            raise VirtualGpuError("misaligned", f"st.bulk of {n} bytes with value {value}; a multiple of 8, and 0",
                                  lane=lane)
        cta, offset = warp.cta.cluster.resolve(a & 0xFFFFFFFF, "st.bulk")
        cta.smem.check(offset, n, 8, lane)
        cta.conflict(offset, offset + n, True, "st.bulk")
        cta.smem.mark_generic(slice(offset, offset + n), warp.index, warp.cta.cluster.next_sequence())
        cta.smem.data[offset:offset + n] = 0


@decodes("st.bulk")
def decode_bulk(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.take("weak")
    m.take("shared::cta")
    m.done()
    operand_count(i, 3)
    return Action(store_bulk, (), (i.operands[0], i.operands[1], Const(i.operands[2].value)), (64, 64, 0))


# --- call parameters -----------------------------------------------------------------------------------


def store_call_param(warp, name, offset, values, size) -> None:
    """st.param: an argument of the call that follows, or a function's result. Lanes that are not here keep theirs."""
    params, mask = warp.call_params.setdefault(name, {}), True if warp.count == 32 else warp.mask
    for k, v in enumerate(values):
        place = offset + k * size
        if size < 16:
            v = v & (1 << 8 * size) - 1 if type(v) is int else v.astype(UINT[size])
        params[place] = merge(mask, v, params.get(place), UINT.get(size, object))


def load_call_param(warp, name, offset, size, n, width, signed):
    """ld.param of a call's result, or of a function's argument."""
    found = warp.call_params.get(name, {})
    places = range(offset, offset + n * size, size)
    for place in places:
        if place not in found:
            raise VirtualGpuError("uninitialised", f"byte {place} of call parameter {name.split('@')[0]} was never "
                                  "stored (a parameter is read in the parts in which it was written)")
    values = [found[place] for place in places]
    if size < 16:
        values = [_extend(v, size, width, signed) if type(v) is int else _widen(v, width, signed) for v in values]
    return values[0] if n == 1 else tuple(values)
