"""The table of arithmetic instructions: opcode -> `Alu`.

`alu_int` (integers, logic, comparison, selection, movement), `alu_float` (floating point) and `alu_convert` (cvt) fill
the registry when imported. Not here: cvta, isspacep, shfl, vote and all that knows memory or lanes.
"""

from __future__ import annotations

from functools import lru_cache

from . import alu_convert, alu_float, alu_int  # noqa: F401  (they register their instructions)
from .alu_base import BITS, DTYPE, PAIR, REGISTRY, TRIPLE, Alu, mask, signed
from .alu_int import pack, unpack
from .errors import VirtualGpuError

__all__ = ["Alu", "lookup", "opcodes", "pack", "unpack"]


def opcodes() -> list[tuple[str, ...]]:
    """Every registered opcode; variants of operand count end in "p|q" or "a,b,c"."""
    return list(REGISTRY)


@lru_cache(maxsize=4096)
def entry(key: tuple[str, ...]) -> Alu:
    """The instruction of a registry key."""
    build, choices = REGISTRY[key]
    return build(*choices)


def lookup(opcode: tuple[str, ...], destinations: int = 1, sources: int | None = None, width: int | None = None) -> Alu:
    """The arithmetic of an opcode split at its dots, e.g. ("add", "s32").

    destinations: 2 for the form `p|q`. sources: number of source operands where the opcode alone does not tell (3 for
    the three-input min and max). width: bits of the destination register of a cvt, where it is wider or narrower than
    the result (PTX ISA 9.7.9.21: the result is extended by the sign of its type).
    Raises VirtualGpuError "unknown instruction" for an opcode or modifier that is not in the table.
    """
    opcode = tuple(opcode)
    forms = [(PAIR,)] * (destinations == 2) + [(TRIPLE,)] * (sources == 3) + [()]
    variants = [order + form for order in _orders(opcode) for form in forms]
    key = next((k for k in variants if k in REGISTRY), None)
    if key is None:
        raise VirtualGpuError("unknown instruction", _unknown(opcode))
    found = entry(key)
    if width and opcode[0] == "cvt" and width != BITS[found.dst[0]]:
        return _resized(found, width, opcode[-2][0] == "s")
    return found


def _orders(opcode: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The opcode, and where it has both .relu and .satfinite, also with the two exchanged: compilers write both."""
    if not {"relu", "satfinite"} <= set(opcode):
        return [opcode]
    exchange = {"relu": "satfinite", "satfinite": "relu"}
    return [opcode, tuple(exchange.get(part, part) for part in opcode)]


def _unknown(opcode: tuple[str, ...]) -> str:
    known = max((sum(1 for _ in _common(opcode, key)) for key in REGISTRY if key[0] == opcode[0]), default=0)
    name = ".".join(opcode)
    if not known:
        return f"{name}: no instruction {opcode[0]} is modelled"
    if known == len(opcode):
        return f"{name}: the opcode is incomplete"
    return f"{name}: .{opcode[known]} is not known after {'.'.join(opcode[:known])}"


def _common(a: tuple[str, ...], b: tuple[str, ...]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def _resized(found: Alu, width: int, is_signed: bool) -> Alu:
    """A conversion whose result goes to a register of another width."""
    kind, bits = f"b{width}", BITS[found.dst[0]]

    def run(*values):
        out = found.function(*values)
        if type(out) is int:
            return (signed(out, bits) if is_signed else out) & mask(width)
        return (out.view(f"i{bits // 8}") if is_signed else out).astype(DTYPE[kind])

    return Alu((kind,), found.src, run)
