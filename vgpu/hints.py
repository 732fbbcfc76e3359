"""Handlers of what changes no result: prefetches, cache policies, register counts, sleep, dependent launches; trap."""

from __future__ import annotations

import struct

from .copy_engine import read_tensormap
from .errors import VirtualGpuError
from .isa import CACHE_HINTS, Action, Const, Flow, Modifiers, decodes, operand_count
from .ptx import Imm, Instr
from .spin import give_way


def nothing(warp, *operands) -> None:
    """A hint."""


def prefetch_map(warp, address) -> None:
    """prefetch.tensormap: the map must be readable."""
    read_tensormap(warp, warp.uniform(address, "tensor map address"))


@decodes("prefetch", "prefetchu", "applypriority", "discard")
def decode_prefetch(i: Instr) -> Action:
    m = Modifiers(i, 1)
    tensormap = m.take("tensormap") is not None
    m.drop("global", "local", "param", "const", "L1", "L2", "L2::evict_last", "L2::evict_normal")
    m.done()
    if tensormap:
        return Action(prefetch_map, (), (i.operands[0],), (64,))
    return Action(nothing, (), tuple(i.operands[:1]), (64,))


_PRIORITY = {"L2::evict_first": 0x12, "L2::evict_last": 0x14, "L2::evict_normal": 0x16}


def policy_value(priority: str | None, fraction: float) -> int:
    """The 64 bits of a cache policy, as an H200 makes them of createpolicy.fractional [measured]; others are hints too,
    and any value will do."""
    return _PRIORITY.get(priority, 0x10) << 56 | max(0, round(16 * fraction) - 1) << 52


def constant(value):
    """A value known when the kernel is translated."""
    return value


@decodes("createpolicy")
def decode_policy(i: Instr) -> Action:
    m = Modifiers(i, 1)
    kind = m.need("fractional", "range", "cvt")
    priority = m.take(*_PRIORITY)
    m.drop("global", "L2", "L2::evict_unchanged", *CACHE_HINTS)
    m.need("b64")
    m.done()
    fraction = i.operands[1] if kind == "fractional" and len(i.operands) > 1 else Imm(1)
    value = policy_value(priority, imm_float(fraction))
    return Action(constant, (i.operands[0],), (Imm(value),), (64,), pure=True)


def imm_float(imm: Imm) -> float:
    """The value of a literal."""
    if not imm.float_bits:
        return float(imm.value)
    raw = imm.value.to_bytes(imm.float_bits // 8, "little")
    return struct.unpack("<f" if imm.float_bits == 32 else "<d", raw)[0]


def set_registers(warp) -> None:
    """setmaxnreg: there are registers enough here."""
    warp.require_converged("setmaxnreg")


@decodes("setmaxnreg")
def decode_registers(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.need("inc", "dec")
    for name in ("sync", "aligned", "u32"):
        m.need(name)
    m.done()
    operand_count(i, 1)
    count = i.operands[0].value if isinstance(i.operands[0], Imm) else -1
    if not 24 <= count <= 256 or count % 8:
        raise i.error("unknown instruction", f"setmaxnreg {count}; allowed: multiples of 8 from 24 to 256")
    return Action(set_registers)


def sleep(warp, resume: int, duration) -> int:
    """nanosleep: the other warps run first."""
    return give_way(warp, resume)


@decodes("nanosleep")
def decode_sleep(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.need("u32")
    m.done()
    operand_count(i, 1)
    return Action(sleep, (), (i.operands[0],), (32,), Flow.BLOCK)


@decodes("pmevent")
def decode_event(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.take("mask")
    m.done()
    return Action(nothing)


@decodes("griddepcontrol")
def decode_dependency(i: Instr) -> Action:
    """Grids run one after the other here: what a dependent launch waits for has always ended."""
    m = Modifiers(i, 1)
    kind = m.need("wait", "launch_dependents")
    m.done()
    return Action(dependency, (), (Const("pdl_wait" if kind == "wait" else "pdl_launch"),))


def dependency(warp, event: str) -> None:
    """griddepcontrol: only the timing model, which overlaps launches, needs to know."""
    if warp.trace is not None:
        warp.note(event)


def trap(warp, name) -> None:
    """trap, brkpt (there is no debugger)"""
    raise VirtualGpuError("trap", f"the kernel executed {name}")


@decodes("trap", "brkpt")
def decode_trap(i: Instr) -> Action:
    Modifiers(i, 1).done()
    operand_count(i, 0)
    return Action(trap, (), (Const(i.opcode[0]),), (0,))
