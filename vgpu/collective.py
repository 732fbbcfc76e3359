"""Handlers between the lanes of a warp: elect, shfl, vote, match, redux, activemask (PTX ISA 9.7.9, 9.7.13)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .errors import VirtualGpuError
from .isa import Action, Const, Modifiers, decodes, operand_count
from .ptx import Instr, Pair
from .warp import LANES

_ELECTED = np.zeros((32, 32), np.bool_)
_ELECTED[np.arange(32), np.arange(32)] = True
_ELECTED.setflags(write=False)
FULL_MASK, CANONICAL_NAN = 0xFFFFFFFF, 0x7FFFFFFF


def members(warp, mask, what: str) -> np.ndarray:
    """bool[32] of the lanes that take part: those that the member mask names and that have not exited.

    All of them must be executing this, and nobody else.
    """
    bits = warp.uniform(mask, "member mask")
    if bits == FULL_MASK:
        named = warp.mask if warp.converged() else warp.alive()
    else:
        named = (np.uint32(bits) >> LANES & np.uint32(1)).astype(np.bool_) & warp.alive()
    if named is warp.mask:
        return named
    for lanes, text in ((warp.mask & ~named, "executes {} with a member mask {:#x} that does not name it"),
                        (named & ~warp.mask, "does not execute {}, whose member mask {:#x} names it")):
        if lanes.any():
            raise VirtualGpuError("barrier", f"a lane {text.format(what, bits)}", lane=int(lanes.argmax()))
    return named


def elect(warp, mask):
    """elect.sync: the lowest named lane is elected (PTX leaves the choice open; it is deterministic)."""
    leader = int(members(warp, mask, "elect.sync").argmax())
    if warp.count == 1:
        return leader, True
    return leader, _ELECTED[leader]


@decodes("elect.sync")
def decode_elect(i: Instr) -> Action:
    Modifiers(i, 2).done()
    operand_count(i, 2)
    if not isinstance(i.operands[0], Pair):
        raise i.error("unknown instruction", "elect.sync needs two destinations, d|p")
    return Action(elect, (i.operands[0].first, i.operands[0].second), (i.operands[1],), (32,))


def shuffle(warp, mode, value, b, c, mask):
    """shfl.sync: (result, predicate)."""
    members(warp, mask, "shfl.sync")
    if value is None:
        raise VirtualGpuError("uninitialised", "shfl.sync of a register that was never written")
    if mode == "idx" and type(b) is int and type(c) is int and c == 31:
        lane = b & 31
        if not warp.mask[lane]:
            raise _unread(lane, warp.leader)
        return value if type(value) is int else int(value[lane]), True
    uniform = type(b) is int and type(c) is int
    source, ok = (_uniform_sources if uniform else _sources)(mode, b, c)
    if warp.count != 32:
        inactive = warp.mask & ~warp.mask[source]
        if inactive.any():
            bad = int(inactive.argmax())
            raise _unread(int(source[bad]), bad)
    return value if type(value) is int else value[source], ok


def _unread(source: int, lane: int) -> VirtualGpuError:
    return VirtualGpuError("uninitialised", f"shfl.sync reads lane {source}, which is not active", lane=lane)


def _sources(mode: str, b, c) -> tuple[np.ndarray, np.ndarray]:
    """(source lane, is it in range) of every lane, by the formulae of PTX ISA 9.7.9.6."""
    lanes, offset, c = LANES.astype(np.int64), np.asarray(b, np.int64) & 31, np.asarray(c, np.int64)
    clamp, segment = c & 31, c >> 8 & 31
    highest = lanes & segment | clamp & ~segment
    if mode == "up":
        source = lanes - offset
        ok = source >= highest
    else:
        source = {"down": lanes + offset, "bfly": lanes ^ offset, "idx": lanes & segment | offset & ~segment}[mode]
        ok = source <= highest
    return np.where(ok, source, lanes), ok


_uniform_sources = lru_cache(maxsize=256)(_sources)


def shuffle_value(warp, mode, value, b, c, mask):
    """shfl.sync without the predicate."""
    return shuffle(warp, mode, value, b, c, mask)[0]


@decodes("shfl.sync")
def decode_shfl(i: Instr) -> Action:
    m = Modifiers(i, 2)
    mode = m.need("up", "down", "bfly", "idx")
    m.need("b32")
    m.done()
    operand_count(i, 5)
    d = i.operands[0]
    src = (Const(mode), *i.operands[1:])
    widths = (32, 32, 32, 32, 32)
    if isinstance(d, Pair):
        return Action(shuffle, (d.first, d.second), src, widths)
    return Action(shuffle_value, (d,), src, widths)


def vote(warp, mode, p, mask):
    """vote.sync"""
    named = members(warp, mask, "vote.sync")
    if p is None:
        raise VirtualGpuError("uninitialised", "vote.sync of a predicate that was never written")
    flags = np.broadcast_to(np.asarray(p, np.bool_), (32,)) & named
    if mode == "ballot":
        return bits_of(flags)
    n, total = int(np.count_nonzero(flags)), int(np.count_nonzero(named))
    return {"all": n == total, "any": n > 0, "uni": n in (0, total)}[mode]


def bits_of(flags: np.ndarray) -> int:
    """bool[32] as a lane mask."""
    return int(np.packbits(flags, bitorder="little").view(np.uint32)[0])


@decodes("vote.sync")
def decode_vote(i: Instr) -> Action:
    m = Modifiers(i, 2)
    mode = m.need("all", "any", "uni", "ballot")
    m.need("b32" if mode == "ballot" else "pred")
    m.done()
    operand_count(i, 3)
    return Action(vote, (i.operands[0],), (Const(mode), *i.operands[1:]), (32, 1, 32))


def match(warp, mode, value, mask):
    """match.sync: (lane mask, predicate)."""
    named = members(warp, mask, "match.sync")
    if value is None:
        raise VirtualGpuError("uninitialised", "match.sync of a register that was never written")
    values = np.broadcast_to(np.asarray(value), (32,))
    same = (values[:, None] == values) & named
    if mode == "any":
        return np.packbits(same, axis=1, bitorder="little").view(np.uint32)[:, 0], True
    every = bool(same[warp.leader][named].all())
    return (bits_of(named) if every else 0), every


def match_value(warp, mode, value, mask):
    """match.sync without the predicate."""
    return match(warp, mode, value, mask)[0]


@decodes("match.any.sync", "match.all.sync")
def decode_match(i: Instr) -> Action:
    m = Modifiers(i, 3)
    width = 64 if m.need("b32", "b64") == "b64" else 32
    m.done()
    operand_count(i, 3)
    d = i.operands[0]
    if isinstance(d, Pair) and i.opcode[1] == "any":
        raise i.error("unknown instruction", "match.any has no predicate result")
    dst, fn = ((d.first, d.second), match) if isinstance(d, Pair) else ((d,), match_value)
    return Action(fn, dst, (Const(i.opcode[1]), *i.operands[1:]), (32, width, 32))


_REDUX = {"add": np.add, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "min": np.minimum,
          "max": np.maximum}


def _participants(warp, value, mask) -> np.ndarray:
    """uint32: the values of the named lanes."""
    named = members(warp, mask, "redux.sync")
    if value is None:
        raise VirtualGpuError("uninitialised", "redux.sync of a register that was never written")
    return np.broadcast_to(np.asarray(value, np.uint32), (32,))[named]


def redux(warp, op, kind, value, mask):
    """redux.sync over the named lanes; sums modulo 2^32."""
    values = _participants(warp, value, mask)
    return int(_REDUX[op].reduce(values.view(np.int32) if kind == "s32" else values)) & 0xFFFFFFFF


def redux_f32(warp, op, absolute, nan, value, mask):
    """redux.sync.{min,max}{.abs}{.NaN}.f32: -0 is below +0; NaNs count only with .NaN, or if there is nothing else."""
    values = _participants(warp, value, mask).view(np.float32)
    if absolute:
        values = np.abs(values)
    keep = values[~np.isnan(values)]
    if not len(keep) or (nan and len(keep) < len(values)):
        return CANONICAL_NAN
    order = np.lexsort((~np.signbit(keep), keep))
    return int(keep[order[0 if op == "min" else -1]].view(np.uint32))


@decodes("redux.sync")
def decode_redux(i: Instr) -> Action:
    m = Modifiers(i, 2)
    op = m.need(*_REDUX)
    absolute, nan = m.take("abs") is not None, m.take("NaN") is not None
    kind = m.need("u32", "s32", "b32", "f32")
    m.done()
    operand_count(i, 3)
    known = {"u32": ("add", "min", "max"), "s32": ("add", "min", "max"), "b32": ("and", "or", "xor"),
             "f32": ("min", "max")}[kind]
    if op not in known or ((absolute or nan) and kind != "f32"):
        raise i.error("unknown instruction", f"redux.sync.{'.'.join(i.opcode[2:])} does not exist")
    if kind == "f32":
        return Action(redux_f32, (i.operands[0],), (Const(op), Const(absolute), Const(nan), *i.operands[1:]),
                      (0, 0, 0, 32, 32))
    return Action(redux, (i.operands[0],), (Const(op), Const(kind), *i.operands[1:]), (0, 0, 32, 32))


def activemask(warp) -> int:
    """activemask.b32"""
    return bits_of(warp.mask)


@decodes("activemask.b32")
def decode_activemask(i: Instr) -> Action:
    operand_count(i, 1)
    return Action(activemask, (i.operands[0],))
