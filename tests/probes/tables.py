"""Kernels that apply many instructions to a table of operand vectors.

An instruction is written with one-letter operands: inputs a, b, c; result d; scratch t (32 bits), h and g (16 bits),
u (64 bits), p and q (predicates). Every family runs twice: once with one vector a lane ("lanes"), once with one vector
a CTA, so that all lanes hold the same value ("uniform"); the hardware's results of the two must be the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from .assembler import Kernel
from .model import Buffer, Probe, Row

OPERAND = re.compile(r"(?<![\w.%])([abcdthgupq])(?![\w.])")
SCRATCH = {"t": "b32", "h": "b16", "g": "b16", "u": "b64", "p": "pred", "q": "pred"}


@dataclass(frozen=True)
class Tolerance:
    """How far an approximate instruction's result may be from the hardware's, and the format to compare in."""

    kind: str
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class Family:
    """Instructions of one signature: input widths and arrays, one result width (bits)."""

    name: str
    result: int
    inputs: tuple[np.ndarray, ...]
    instructions: tuple[str, ...]
    tolerances: dict[str, Tolerance] | None = None


def emit(k: Kernel, instruction: str, inputs: list[str], result: int) -> str:
    """Emit the instruction(s) with fresh result and scratch registers; the result register."""
    registers = dict(zip("abc", inputs, strict=False))
    registers["d"] = k.new(f"b{result}")

    def register(match: re.Match) -> str:
        letter = match[1]
        if letter not in registers:
            registers[letter] = k.new(SCRATCH[letter])
        return registers[letter]

    for part in instruction.split(";"):
        k(OPERAND.sub(register, part.strip()) + ";")
    return registers["d"]


def table_ptx(family: Family, uniform: bool) -> str:
    """Parameters: out, then one array an input. Vector index: the thread's, or with `uniform` the CTA's number."""
    k = Kernel("u64", *["u64"] * len(family.inputs))
    count = len(family.inputs[0])
    if uniform:
        index = k.b32("mov.u32 $, %ctaid.x;")
    else:
        index, block = k.b32("mov.u32 $, %tid.x;"), k.b32("mov.u32 $, %ctaid.x;")
        index = k.b32(f"mad.lo.u32 $, {block}, 64, {index};")
    values = []
    for i, array in enumerate(family.inputs):
        width = 8 * array.dtype.itemsize
        address = k.element(k.pointer(1 + i), index, array.dtype.itemsize)
        register = k.new(f"b{max(width, 16)}")
        k(f"ld.global.{'u8' if width == 8 else f'b{width}'} {register}, [{address}];")
        values.append(register)
    out = k.element(k.pointer(0), index, family.result // 8)
    for row, instruction in enumerate(family.instructions):
        value = emit(k, instruction, values, family.result)
        k(f"st.global.b{family.result} [{out}+{row * count * family.result // 8}], {value};")
    return k.text()


def table_rows(family: Family) -> tuple[Row, ...]:
    """One row of results an instruction."""
    operands = tuple(zip(*(array.tolist() for array in family.inputs), strict=True))
    rows = []
    for i, instruction in enumerate(family.instructions):
        tolerance = (family.tolerances or {}).get(instruction, Tolerance("exact"))
        rows.append(Row(instruction, i * len(operands) * family.result // 8, family.result, operands, tolerance.kind,
                        tolerance.relative, tolerance.absolute))
    return tuple(rows)


def table_probes(group: str, family: Family) -> list[Probe]:
    """The family with one vector a lane, and with one vector a CTA of one warp."""
    count = len(family.inputs[0])
    size = count * len(family.instructions) * family.result // 8
    args = (Buffer(bytes(size), output=True), *(Buffer(array.tobytes()) for array in family.inputs))
    shapes = {"lanes": ((count // 64, 1, 1), (64, 1, 1)), "uniform": ((count, 1, 1), (32, 1, 1))}
    return [Probe(f"{group}/{family.name}_{way}", table_ptx(family, way == "uniform"), args, grid=grid, block=block,
                  rows=table_rows(family)) for way, (grid, block) in shapes.items()]
