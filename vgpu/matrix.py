"""Handlers: ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14.5.15-17).

A row of 16 bytes comes from the address of one lane. In the 8x8 shapes of 16-bit elements lane t holds elements
2(t%4), 2(t%4)+1 of row t/4. In the shapes of bytes, always transposed, lane t holds column t/4 of rows 4(t%4)..4(t%4)+3
of a 16x16 load, column t/4 + 8 in its second register; and columns t/4 and t/4 + 8 of rows 2(t%4), 2(t%4)+1 of a store
[the order inside the registers: CUTLASS, copy_traits_sm100.hpp].
"""

from __future__ import annotations

import numpy as np

from .access import gather_rows, mark_stored, shared_parts, typed
from .errors import VirtualGpuError
from .isa import Action, Const, Modifiers, decodes, operand_count
from .ptx import Instr, Vec

ROW = 16  # bytes


def _row_addresses(warp, address, rows: int, what: str) -> np.ndarray:
    """uint64[rows]: the addresses that the first `rows` lanes give."""
    warp.require_converged(what)
    if warp.count != 32:
        raise VirtualGpuError("barrier", f"{what} is executed by {warp.count} lanes; all 32 must take part")
    if address is None:
        raise VirtualGpuError("uninitialised", "the address is read from a register that was never written")
    addresses = np.broadcast_to(np.asarray(address, np.uint64), (32,))[:rows]
    bad = addresses & np.uint64(ROW - 1)
    if bad.any():
        i = int(np.argmax(bad != 0))
        raise VirtualGpuError("misaligned", f"matrix row address {int(addresses[i]):#x} is not a multiple of {ROW}",
                              lane=i)
    return addresses & np.uint64(0xFFFFFFFF)


def _load_rows(warp, address, rows: int) -> np.ndarray:
    """uint8[rows, 16]"""
    return gather_rows(warp, _row_addresses(warp, address, rows, "ldmatrix"), ROW, "ldmatrix")


def _store_rows(warp, address, data: np.ndarray) -> None:
    addresses = _row_addresses(warp, address, len(data), "stmatrix")
    flat = np.ascontiguousarray(data).view(np.complex128)[:, 0]
    for cta, relative, where in shared_parts(warp, "shared", addresses, ROW, True, "stmatrix"):
        index = mark_stored(warp, cta, relative, ROW)
        typed(cta.smem, "data", ROW)[0][index] = flat[where]


def _words(values) -> np.ndarray:
    """uint32[n, 32]: registers with all their lanes."""
    if any(v is None for v in values):
        raise VirtualGpuError("uninitialised", "a register that was never written is read")
    return np.stack([np.broadcast_to(np.asarray(v, np.uint32), (32,)) for v in values])


def _result(words: np.ndarray):
    return words[0] if len(words) == 1 else tuple(words)


def load(warp, address, count, transposed):
    """ldmatrix.m8n8.b16: row r of matrix j is at the address of lane 8j + r."""
    matrices = _load_rows(warp, address, 8 * count).view(np.uint16).reshape(count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    return _result(np.ascontiguousarray(matrices).view(np.uint32).reshape(count, 32))


def load_bytes(warp, address, count):
    """ldmatrix.m16n16.trans.b8: row r of matrix j is at the address of lane 16j + r."""
    matrices = _load_rows(warp, address, 16 * count).reshape(count, 16, 16).transpose(0, 2, 1)
    return _result(np.ascontiguousarray(matrices).view(np.uint32).reshape(2 * count, 32))


def store(warp, address, values, transposed) -> None:
    """stmatrix.m8n8.b16"""
    matrices = _words(values).view(np.uint16).reshape(-1, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    _store_rows(warp, address, np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, ROW))


def store_bytes(warp, address, values) -> None:
    """stmatrix.m16n8.trans.b8: the 16 bytes of a row in memory are one column of the matrix."""
    held = _words(values).view(np.uint8).reshape(-1, 8, 4, 2, 2)  # matrix, t/4, t%4, half, parity
    _store_rows(warp, address, held.transpose(0, 2, 4, 3, 1).reshape(-1, ROW))


def move(warp, value):
    """movmatrix.m8n8.trans.b16: the transpose, register to register."""
    warp.require_converged("movmatrix")
    matrix = _words((value,)).view(np.uint16).reshape(8, 8).T
    return np.ascontiguousarray(matrix).view(np.uint32).reshape(32)


@decodes("ldmatrix", "stmatrix")
def decode(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.need("sync")
    m.need("aligned")
    loads = i.opcode[0] == "ldmatrix"
    shape = m.need("m8n8", "m16n16", "m8n16") if loads else m.need("m8n8", "m16n8")
    count = int(m.need("x1", "x2", "x4")[1:])
    transposed = m.take("trans") is not None
    m.take("shared", "shared::cta")
    if m.take("b8x16"):
        raise i.error("unsupported", f"{i.opcode[0]} of 4-bit and 6-bit elements (.b8x16) is not modelled")
    kind = m.need("b16", "b8")
    m.done()
    operand_count(i, 2)
    address, vector = i.operands if not loads else reversed(i.operands)
    registers = vector if isinstance(vector, Vec) else Vec((vector,))
    per_matrix = 2 if shape == "m16n16" else 1
    if (kind == "b16") != (shape == "m8n8") or (kind == "b8" and not transposed) or count * per_matrix > 4:
        raise i.error("unknown instruction", f"{i.opcode[0]}.{shape}.x{count}{'.trans' * transposed}.{kind}")
    if len(registers.items) != count * per_matrix:
        raise i.error("unknown instruction", f"{len(registers.items)} registers; expected {count * per_matrix}")
    if loads and kind == "b16":
        return Action(load, registers.items, (address, Const(count), Const(transposed)), (32, 0, 0))
    if loads:
        return Action(load_bytes, registers.items, (address, Const(count)), (32, 0))
    if kind == "b16":
        return Action(store, (), (address, registers, Const(transposed)), (32, 32, 0))
    return Action(store_bytes, (), (address, registers), (32, 32))


@decodes("movmatrix")
def decode_move(i: Instr) -> Action:
    m = Modifiers(i, 1)
    for name in ("sync", "aligned", "m8n8", "trans", "b16"):
        m.need(name)
    m.done()
    operand_count(i, 2)
    return Action(move, (i.operands[0],), (i.operands[1],), (32,))
