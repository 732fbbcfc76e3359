"""Handlers: mov, also of vectors and addresses (PTX ISA 9.7.9.1-2). Plain arithmetic is in `alu`."""

from __future__ import annotations

from . import alu
from .isa import Action, Const, Modifiers, decodes, operand_count
from .ptx import TYPE_BYTES, Instr, Vec


def identity(value):
    """mov"""
    return value


def pack(values, width):
    """mov d, {…}: join, low bits first. Compilers fill a pair up with a register that was never written, and insert
    into such a pair; an undefined part is all ones, a NaN."""
    if any(v is None for v in values):
        ones = (1 << width // len(values)) - 1
        values = tuple(ones if v is None else v for v in values)
    return alu.pack(width, values)


def unpack(value, width, n):
    """mov {…}, a: split. See `pack` for a register that was never written."""
    return alu.unpack(width, n, (1 << width) - 1 if value is None else value)


@decodes("mov")
def decode(i: Instr) -> Action:
    m = Modifiers(i, 1)
    kind = m.need(*TYPE_BYTES)
    m.done()
    operand_count(i, 2)
    width = 1 if kind == "pred" else 8 * TYPE_BYTES[kind]
    d, s = i.operands
    if isinstance(d, Vec):
        return Action(unpack, d.items, (s, Const(width), Const(len(d.items))), (width, 0, 0), pure=True)
    if isinstance(s, Vec):
        return Action(pack, (d,), (s, Const(width)), (width // len(s.items), 0), pure=True)
    return Action(identity, (d,), (s,), (width,), pure=True, template="{0}")
