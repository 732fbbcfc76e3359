"""Integer instructions over operand tables."""

from __future__ import annotations

import numpy as np

from .model import Probe
from .operands import INT16, INT32, INT64, vectors
from .tables import Family, table_probes

COMPARE_SIGNED = ("eq", "ne", "lt", "le", "gt", "ge")
COMPARE_UNSIGNED = ("lo", "ls", "hi", "hs")


def compare(types: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """setp of every type and comparison, as 1 or 0."""
    return tuple(f"setp.{c}.{t} p, a, b; selp.b32 d, 1, 0, p" for t, names in types.items() for c in names)


def quotients(edges: list[int], dtype: type) -> tuple[np.ndarray, ...]:
    """Dividends and divisors: first every sign, division by zero and overflow, then pairs of edge values."""
    top = 1 << 8 * np.dtype(dtype).itemsize
    numbers = (0, 1, 7, -1, -7, top // 2 - 1, top // 2)
    first = [(a % top, b % top) for b in (0, -1, 1, 3, -3, top // 2) for a in numbers]
    a, b = vectors(edges, dtype, 2)
    a[:len(first)], b[:len(first)] = zip(*first, strict=True)
    return a, b


def families_32() -> list[Family]:
    """32-bit results from 32-bit operands."""
    one, two, three = (vectors(INT32, np.uint32, n) for n in (1, 2, 3))
    permute = tuple(f"prmt.b32{mode} d, a, b, c" for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"))
    return [
        Family("arithmetic_32", 32, two, (
            "add.u32 d, a, b", "sub.s32 d, a, b", "add.sat.s32 d, a, b", "sub.sat.s32 d, a, b", "mul.lo.u32 d, a, b",
            "mul.hi.u32 d, a, b", "mul.hi.s32 d, a, b", "min.u32 d, a, b", "max.u32 d, a, b", "min.s32 d, a, b",
            "max.s32 d, a, b", "add.s32 d, a, -7", "mul.lo.s32 d, a, 0x10001", "sub.s32 d, 5, a")),
        Family("arithmetic_32_rare", 32, two, (
            "mul24.lo.u32 d, a, b", "mul24.lo.s32 d, a, b", "mul24.hi.u32 d, a, b", "min.relu.s32 d, a, b",
            "max.relu.s32 d, a, b")),
        Family("divide_32", 32, quotients(INT32, np.uint32), (
            "div.u32 d, a, b", "div.s32 d, a, b", "rem.u32 d, a, b", "rem.s32 d, a, b", "div.u32 d, a, 7",
            "div.s32 d, a, -3", "rem.u32 d, a, 24", "rem.s32 d, a, 10")),
        Family("unary_32", 32, one, (
            "neg.s32 d, a", "abs.s32 d, a", "not.b32 d, a", "cnot.b32 d, a", "clz.b32 d, a", "popc.b32 d, a",
            "brev.b32 d, a", "bfind.u32 d, a", "bfind.s32 d, a", "bfind.shiftamt.u32 d, a", "bfind.shiftamt.s32 d, a")),
        Family("logic_32", 32, two, (
            "and.b32 d, a, b", "or.b32 d, a, b", "xor.b32 d, a, b", "shl.b32 d, a, b", "shr.u32 d, a, b",
            "shr.s32 d, a, b", "shr.b32 d, a, b", "shl.b32 d, a, 31", "shr.s32 d, a, 40", "shl.b32 d, 1, b",
            "bmsk.clamp.b32 d, a, b", "bmsk.wrap.b32 d, a, b", "szext.clamp.u32 d, a, b", "szext.wrap.s32 d, a, b")),
        Family("three_32", 32, three, (
            "mad.lo.s32 d, a, b, c", "mad.hi.u32 d, a, b, c", "mad.hi.s32 d, a, b, c", "bfe.u32 d, a, b, c",
            "bfe.s32 d, a, b, c", "bfi.b32 d, a, b, c, 5", "bfi.b32 d, a, b, 3, c", "sad.u32 d, a, b, c",
            "sad.s32 d, a, b, c", "slct.b32.s32 d, a, b, c", "slct.b32.f32 d, a, b, c", "shf.l.wrap.b32 d, a, b, c",
            "shf.l.clamp.b32 d, a, b, c", "shf.r.wrap.b32 d, a, b, c", "shf.r.clamp.b32 d, a, b, c",
            "setp.ne.s32 p, c, 0; selp.b32 d, a, b, p")),
        Family("permute_32", 32, (*two, np.concatenate([vectors(INT32, np.uint32, 1)[0][64:], np.arange(
            0, 64 * 0x11F3, 0x11F3, dtype=np.uint32)])), (
            *permute, "prmt.b32 d, a, b, 0x5410", "prmt.b32 d, a, b, 0x7632", "prmt.b32 d, a, 0, 0x8b9a")),
        Family("lop3_32", 32, three, tuple(f"lop3.b32 d, a, b, c, {table:#x}" for table in (
            0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0xD8, 0x1B, 0x6A, 0xF8, 0x3C, 0x40))),
        Family("dot_32", 32, three, (
            "dp4a.u32.u32 d, a, b, c", "dp4a.s32.s32 d, a, b, c", "dp4a.u32.s32 d, a, b, c", "dp4a.s32.u32 d, a, b, c",
            "dp2a.lo.u32.u32 d, a, b, c", "dp2a.hi.s32.s32 d, a, b, c", "dp2a.lo.s32.u32 d, a, b, c")),
        Family("carry_32", 32, three, (
            "add.cc.u32 t, a, b; addc.u32 d, c, a", "sub.cc.u32 t, a, b; subc.u32 d, c, a",
            "add.cc.u32 t, a, b; addc.cc.u32 t, b, c; addc.u32 d, 0, 0",
            "mad.lo.cc.u32 t, a, b, c; madc.hi.u32 d, a, b, 0")),
        Family("compare_32", 32, two, compare({"s32": COMPARE_SIGNED, "u32": (*COMPARE_SIGNED, *COMPARE_UNSIGNED),
                                               "b32": ("eq", "ne")})),
        Family("set_32", 32, two, ("set.lt.u32.s32 d, a, b", "set.hs.u32.u32 d, a, b", "set.eq.f32.s32 d, a, b")),
        Family("packed_16x2", 32, two, ("add.u16x2 d, a, b", "min.s16x2 d, a, b", "max.u16x2 d, a, b",
                                        "max.relu.s16x2 d, a, b")),
        Family("narrow_32", 32, one, (
            "cvt.u8.u32 h, a; cvt.u32.u16 d, h", "cvt.s32.s8 d, a", "cvt.u32.u8 d, a", "cvt.s32.s16 d, a",
            "cvt.sat.s8.s32 d, a", "cvt.sat.u8.s32 d, a", "cvt.sat.s16.s32 d, a", "cvt.sat.u16.u32 d, a",
            "cvt.sat.u32.s32 d, a", "cvt.sat.s32.u32 d, a", "cvt.sat.u8.u32 d, a")),
        Family("pack_32", 32, three, ("cvt.pack.sat.s16.s32 d, a, b", "cvt.pack.sat.u8.s32.b32 d, a, b, c",
                                      "cvt.pack.sat.s8.s32.b32 d, a, b, c")),
        Family("moves_32", 32, two, (
            "mov.b32 {h, g}, a; mov.b32 d, {g, h}", "mov.b64 u, {a, b}; shr.u64 u, u, 12; cvt.u32.u64 d, u",
            "mov.b64 u, {a, b}; mov.b64 {t, d}, u")),
    ]


def families_16_64() -> list[Family]:
    """16-bit and 64-bit operands and mixed widths."""
    half = vectors(INT16, np.uint16, 2)
    word = vectors(INT32, np.uint32, 2)
    wide1, wide2 = vectors(INT64, np.uint64, 1), vectors(INT64, np.uint64, 2)
    amounts = (wide1[0], vectors(INT32, np.uint32, 2)[0])
    return [
        Family("arithmetic_16", 16, half, (
            "add.u16 d, a, b", "sub.s16 d, a, b", "mul.lo.u16 d, a, b", "mul.hi.u16 d, a, b", "mul.hi.s16 d, a, b",
            "min.s16 d, a, b", "max.u16 d, a, b", "and.b16 d, a, b", "xor.b16 d, a, b", "not.b16 d, a", "neg.s16 d, a",
            "abs.s16 d, a", "mad.lo.u16 d, a, b, a")),
        Family("shift_16", 16, (half[0], vectors(INT32, np.uint32, 2)[1]), (
            "shl.b16 d, a, b", "shr.u16 d, a, b", "shr.s16 d, a, b")),
        Family("divide_16", 16, quotients(INT16, np.uint16), (
            "div.u16 d, a, b", "rem.u16 d, a, b", "div.s16 d, a, b", "rem.s16 d, a, b")),
        Family("widen_16", 32, half, (
            "mul.wide.u16 d, a, b", "mul.wide.s16 d, a, b", "mad.wide.s16 d, a, b, 100", "cvt.u32.u16 d, a",
            "cvt.s32.s16 d, a", "cvt.s32.s8 d, a", "cvt.u32.u8 d, a", "mov.b32 d, {a, b}",
            *compare({"s16": ("lt", "ge"), "u16": ("lt", "hs"), "b16": ("eq",)}))),
        Family("widen_32", 64, word, (
            "mul.wide.u32 d, a, b", "mul.wide.s32 d, a, b", "mad.wide.u32 d, a, b, 0x123456789",
            "mad.wide.s32 d, a, b, -1", "cvt.u64.u32 d, a", "cvt.s64.s32 d, a", "cvt.s64.s8 d, a", "mov.b64 d, {a, b}",
            "cvt.sat.u64.s32 d, a")),
        Family("arithmetic_64", 64, wide2, (
            "add.s64 d, a, b", "sub.s64 d, a, b", "mul.lo.u64 d, a, b", "mul.hi.u64 d, a, b", "mul.hi.s64 d, a, b",
            "min.u64 d, a, b", "max.s64 d, a, b", "and.b64 d, a, b", "or.b64 d, a, b", "xor.b64 d, a, b",
            "mad.lo.s64 d, a, b, a", "mad.hi.u64 d, a, b, b", "add.s64 d, a, 0x7fffffff00000000",
            "setp.gt.s64 p, a, b; selp.b64 d, a, b, p")),
        Family("unary_64", 64, wide1, ("neg.s64 d, a", "abs.s64 d, a", "not.b64 d, a", "cnot.b64 d, a", "brev.b64 d, a",
                                       "bfe.u64 d, a, 5, 40", "bfe.s64 d, a, 60, 8", "bfi.b64 d, a, 77, 12, 33")),
        Family("divide_64", 64, quotients(INT64, np.uint64), (
            "div.u64 d, a, b", "div.s64 d, a, b", "rem.u64 d, a, b", "rem.s64 d, a, b")),
        Family("shift_64", 64, amounts, ("shl.b64 d, a, b", "shr.u64 d, a, b", "shr.s64 d, a, b", "shr.s64 d, a, 63",
                                         "and.b32 t, b, 255; bfe.u64 d, a, t, 17",
                                         "and.b32 t, b, 255; bfe.s64 d, a, 9, t")),
        Family("narrow_64", 32, wide2, (
            "clz.b64 d, a", "popc.b64 d, a", "bfind.u64 d, a", "bfind.s64 d, a", "cvt.u32.u64 d, a", "cvt.s32.s64 d, a",
            "cvt.sat.s32.s64 d, a", "cvt.sat.u32.s64 d, a", "cvt.sat.u8.s64 d, a", "mov.b64 {t, d}, a",
            *compare({"s64": COMPARE_SIGNED, "u64": ("lt", "hs", "hi"), "b64": ("eq",)}))),
    ]


def probes() -> list[Probe]:
    """All of this module's probes."""
    first = [probe for family in families_32() for probe in table_probes("integer", family)]
    return first + [probe for family in families_16_64() for probe in table_probes("integer_mixed", family)]
