"""Address spaces: generic addresses and their windows, cvta, isspacep, mapa, getctarank (PTX ISA 5.1, 9.7.9.19-24).

A generic address below 2^56 is a host address, that is global memory; the shared, parameter and local windows lie
above, where no host address is. Inside the shared window the CTA's rank in its cluster is in bits 24 and up.
"""

from __future__ import annotations

import numpy as np

from .errors import VirtualGpuError
from .isa import Action, Const, Modifiers, decodes
from .memory import OFFSET_MASK, RANK_SHIFT
from .ptx import Instr

WINDOW_SHIFT = 56
SHARED_WINDOW, PARAM_WINDOW, LOCAL_WINDOW = 1 << WINDOW_SHIFT, 2 << WINDOW_SHIFT, 3 << WINDOW_SHIFT
LOW = (1 << WINDOW_SHIFT) - 1
SPACES = ("param::entry", "param::func", "param", "global", "shared::cta", "shared::cluster", "shared", "local",
          "const")
WINDOWS = {"global": 0, "const": 0, "shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW,
           "shared::cluster": SHARED_WINDOW, "param": PARAM_WINDOW, "param::entry": PARAM_WINDOW, "local": LOCAL_WINDOW}
NO_RANK = 0xFF  # a CTA rank that no cluster has
_OF_WINDOW = {0: "global", 1: "shared::cluster", 2: "param", 3: "local"}


def take_space(m: Modifiers) -> str:
    """The state space among the modifiers: "global", "shared" (of the own CTA), "shared::cluster", "local", "const",
    "param" or "generic"."""
    space = m.take(*SPACES) or "generic"
    if space == "shared::cta":
        return "shared"
    return "param" if space.startswith("param") else space


def address_width(space: str) -> int:
    """Bits of an address register of a space."""
    return 32 if space.startswith("shared") or space == "local" else 64


def space_of(warp, address, space: str):
    """(space, address in that space) of a possibly generic address, the same space in all active lanes."""
    if address is None:
        raise VirtualGpuError("uninitialised", "the address is read from a register that was never written")
    if space != "generic":
        return space, address
    if type(address) is int:
        window = address >> WINDOW_SHIFT
    else:
        windows = address[warp.mask] >> np.uint64(WINDOW_SHIFT)
        window = int(windows[0])
        if (windows != windows[0]).any():
            raise VirtualGpuError("unsupported", "generic addresses of one instruction lie in different state spaces",
                                  lane=int(np.flatnonzero(warp.mask)[int(np.argmax(windows != windows[0]))]))
    name = _OF_WINDOW.get(window)
    if name is None:
        value = address if type(address) is int else int(address[warp.leader])
        raise VirtualGpuError("out of bounds", f"generic address {value:#x} is in no state space", lane=warp.leader)
    return name, address if window == 0 else address & LOW


def to_generic(address, window):
    """cvta: an address of a space to a generic one."""
    if type(address) is int:
        return address | window
    return address.astype(np.uint64) | np.uint64(window)


def from_generic(address, width):
    """cvta.to: a generic address to one of a space. Where it is in another space, its use will say so."""
    out = address & LOW
    if type(out) is int:
        return out & ((1 << width) - 1)
    return out if width == 64 else out.astype(np.uint32)


@decodes("cvta")
def decode_cvta(i: Instr) -> Action:
    m = Modifiers(i, 1)
    to = m.take("to")
    window = WINDOWS[m.need(*WINDOWS)]
    width = 64 if m.need("u64", "u32") == "u64" else 32
    m.done()
    d, a = i.operands
    if to:
        return Action(from_generic, (d,), (a, Const(width)), (64, 0), pure=True)
    return Action(to_generic, (d,), (a, Const(window)), (64, 0), pure=True)


def in_space(warp, address, space):
    """isspacep: .shared is that of the executing CTA, and parameters are global, too (PTX ISA 9.7.9.22)."""
    window = address >> (WINDOW_SHIFT if type(address) is int else np.uint64(WINDOW_SHIFT))
    if space == "shared":
        place = address >> (RANK_SHIFT if type(address) is int else np.uint64(RANK_SHIFT))
        return place == SHARED_WINDOW >> RANK_SHIFT | warp.cta.rank
    if space == "const":
        return _in_constants(warp, address)
    if space == "global":
        return ((window == 0) | (window == 2)) ^ _in_constants(warp, address)
    return window == {"shared::cluster": 1, "param": 2, "local": 3}[space]


def _in_constants(warp, address):
    """Constant variables lie in host memory, too."""
    found = False
    for v in warp.grid.program.module.variables.values():
        if v.space == "const":
            found = found | ((address >= v.address) & (address < v.address + v.size))
    return found


@decodes("isspacep")
def decode_isspacep(i: Instr) -> Action:
    m = Modifiers(i, 1)
    space = take_space(m)
    m.done()
    if space == "generic":
        raise i.error("unknown instruction", "isspacep without a state space")
    return Action(in_space, (i.operands[0],), (i.operands[1], Const(space)), (64, 0))


def mapa(warp, address, rank, generic, width):
    """mapa: the address of the same variable in the CTA `rank` of the cluster.

    A rank beyond the cluster gives an address that no access may use: compilers let every lane compute one and
    predicate the access.
    """
    window = SHARED_WINDOW if generic else 0
    if type(address) is int and type(rank) is int:
        return (address & OFFSET_MASK) | min(rank, NO_RANK) << RANK_SHIFT | window
    offset = np.asarray(address, np.uint64) & np.uint64(OFFSET_MASK)
    ranks = np.minimum(np.asarray(rank, np.uint64), np.uint64(NO_RANK))
    out = offset | ranks << np.uint64(RANK_SHIFT) | np.uint64(window)
    return out if width == 64 else out.astype(np.uint32)


@decodes("mapa")
def decode_mapa(i: Instr) -> Action:
    m = Modifiers(i, 1)
    generic = m.take("shared::cluster") is None
    width = 64 if m.need("u32", "u64") == "u64" else 32
    m.done()
    d, a, rank = i.operands
    return Action(mapa, (d,), (a, rank, Const(generic), Const(width)), (width, 32, 0, 0))


def getctarank(address):
    """getctarank: the CTA rank in a shared address, a 32-bit number."""
    if type(address) is int:
        return address >> RANK_SHIFT & 0xFF
    return (address >> address.dtype.type(RANK_SHIFT)).astype(np.uint32) & np.uint32(0xFF)


@decodes("getctarank")
def decode_getctarank(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.take("shared::cluster")
    m.need("u32", "u64")
    m.done()
    return Action(getctarank, (i.operands[0],), (i.operands[1],), (64,), pure=True)
