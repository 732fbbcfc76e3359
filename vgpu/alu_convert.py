"""Conversions: cvt and cvt.pack (PTX ISA 9.7.9.21, 9.7.9.22).

A source register may be wider than the source type: only its low bits count. Where both sources of a packed
conversion are given, the first one lands in the upper half.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np

from .alu_base import DTYPE, Alu, expression, floating, lanewise, mask, operation, register, resized, width_of
from .alu_formats import (
    CODES,
    FORMATS,
    ROUNDINGS,
    decode,
    encode,
    flush,
    flush_result,
    is_nan,
    nan64,
    quiet,
    rectify,
    round_fraction,
    saturate,
    some,
    upper_half,
)
from .alu_int import bounds, clamp, is_signed, value

INTEGERS = "u8|u16|u32|u64|s8|s16|s32|s64"
_INTEGER_TYPES = INTEGERS.split("|")
WHOLE = "rni|rzi|rmi|rpi"


def _container(type_name: str) -> int:
    """Bits of the register that takes a result: 8-bit integers are extended to 16 bits, as compilers keep them."""
    return max(width_of(type_name), 16)


# --- integer to integer -------------------------------------------------------------------------------------

@operation(f"cvt.{INTEGERS}.{INTEGERS}")
def _cvt_int(dtype, stype):
    """Truncate, or extend by the source type's sign; a result of 8 bits is extended by its own."""
    room, n, m = _container(dtype), width_of(stype), width_of(dtype)
    bits, extends = (8, is_signed(dtype)) if m == 8 else (min(n, m), is_signed(stype) and n < m)
    one = "((a & LOW) ^ S) - S & M" if extends else "a & LOW"
    inside = f"(a).astype('{'i' if extends else 'u'}{bits // 8}')"
    lanes = inside if bits == room else f"{inside}.astype('u{room // 8}')"
    text = f"{one} if type(a) is int else {lanes}"
    return expression(f"b{room}", register(stype), text, LOW=mask(bits), S=1 << bits - 1, M=mask(room))


def _within(dtype: str, stype: str) -> bool:
    """True where every value of `stype` is one of `dtype`, so that .sat is not allowed."""
    (low, high), (least, most) = bounds(dtype), bounds(stype)
    return low <= least and most <= high


@operation(*(f"cvt.sat.{d}!.{s}!" for d in _INTEGER_TYPES for s in _INTEGER_TYPES if not _within(d, s)))
def _cvt_int_saturated(dtype, stype):
    room, n, m = _container(dtype), width_of(stype), width_of(dtype)

    def compute(a):
        bits = clamp(value(a & mask(n), stype), dtype)
        return value(bits, dtype) & mask(room) if m < room else bits

    return lanewise(f"b{room}", register(stype), compute)


# --- integer to floating point ------------------------------------------------------------------------------

def _whole(bits: np.ndarray, t: str) -> np.ndarray:
    """Integers as float64; 64-bit ones rounded to odd, exact for a later rounding to 50 bits or fewer."""
    n = width_of(t)
    if n < 64:
        return (bits.view(f"i{n // 8}") if is_signed(t) else bits).astype(np.float64)
    negative = (bits >> np.uint64(63)).astype(bool) & is_signed(t)
    size = np.where(negative, -bits, bits)
    sticky = size >> np.uint64(11) | ((size & np.uint64(2047)) != 0)
    x = np.where(size >> np.uint64(53) != 0, sticky.astype(np.float64) * 2048.0, size.astype(np.float64))
    return np.where(negative, -x, x)


@operation(f"cvt.{ROUNDINGS}.ftz?.sat?.f32!.{INTEGERS}", f"cvt.{ROUNDINGS}.~.sat?.f16!.{INTEGERS}",
           f"cvt.{ROUNDINGS}.~.~.bf16!.{INTEGERS}")
def _cvt_from_int(mode, _, sat, dtype, stype):
    def body(bits):
        out = encode(_whole(bits, stype), dtype, mode)
        return saturate(out, dtype) if sat else out

    return floating(register(dtype), register(stype), body)


@operation(f"cvt.{ROUNDINGS}.sat?.f64.{INTEGERS}")
def _cvt_from_int64(mode, sat, stype):
    def compute(a):
        x = value(a & mask(width_of(stype)), stype)
        x = min(max(x, 0), 1) if sat else x
        return round_fraction(Fraction(x), mode) if x else 0

    if sat or width_of(stype) == 64:
        return lanewise("b64", register(stype), compute)
    return floating("b64", register(stype), lambda bits: _whole(bits, stype).view(np.uint64))


# --- floating point to integer ------------------------------------------------------------------------------

_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _to_int(x: np.ndarray, dtype: str, nan: int) -> np.ndarray:
    """Whole float64 numbers to the bits of the nearest integer of a type, extended to its register."""
    low, high = bounds(dtype)
    inside = np.int64 if is_signed(dtype) else np.uint64
    beyond = x >= 2.0 ** high.bit_length()
    kept = np.where(beyond | np.isnan(x), 0.0, np.maximum(x, float(low))).astype(inside)
    out = np.where(beyond, inside(high), kept)
    return np.where(np.isnan(x), inside(nan), out).astype(DTYPE[f"b{_container(dtype)}"])


def _nan_integer(dtype: str, stype: str) -> int:
    """What a NaN becomes (PTX ISA 9.7.9.21): 0, or the top bit alone from f64 or to 64 bits."""
    if stype != "f64" and width_of(dtype) != 64:
        return 0
    return bounds(dtype)[0] if is_signed(dtype) else 1 << width_of(dtype) - 1


@operation(f"cvt.{WHOLE}.ftz?.sat?.{INTEGERS}.f32!", f"cvt.{WHOLE}.~.sat?.{INTEGERS}.f16|f64",
           f"cvt.{WHOLE}.~.~.{INTEGERS}.bf16!")
def _cvt_to_int(mode, ftz, _, dtype, stype):
    """The result always saturates, with or without .sat."""
    nan = _nan_integer(dtype, stype)

    def body(bits):
        bits = flush(bits, stype) if ftz else bits
        return _to_int(_TO_WHOLE[mode](decode(bits, stype)), dtype, nan)

    return floating(f"b{_container(dtype)}", register(stype), body)


# --- floating point to floating point -----------------------------------------------------------------------

def narrow(bits: np.ndarray, stype: str, dtype: str, mode: str = "rn", finite: bool = False) -> np.ndarray:
    """Bit patterns of one format as those of another that is not f64."""
    if stype == "f32" and mode == "rn" and not finite and dtype in ("f16", "bf16"):
        single = bits.view(np.float32)
        out = single.astype(np.float16).view(np.uint16) if dtype == "f16" else upper_half(bits)
        bad = np.isnan(single)
        return np.where(bad, CODES[dtype].nan, out) if some(bad) else out
    return encode(decode(bits, stype), dtype, mode, finite)


def widen(bits: np.ndarray, stype: str) -> np.ndarray:
    """Bit patterns of a format as those of f64."""
    out = decode(bits, stype).view(np.uint64)
    return nan64(out, [out])


def _from_f64(bits: np.ndarray, dtype: str, mode: str) -> np.ndarray:
    """f64 to a narrower format; a NaN keeps its sign and the top of its payload [measured on sm_90]."""
    out, fmt = encode(decode(bits, "f64"), dtype, mode), FORMATS[dtype]
    nan = is_nan(bits, "f64")
    if not some(nan):
        return out
    payload = bits >> np.uint64(52 - fmt.mantissa) & np.uint64(fmt.normal - 1)
    sign = (bits >> np.uint64(63)) * np.uint64(fmt.sign)
    carried = sign | payload | np.uint64(fmt.infinity | fmt.normal >> 1)
    return np.where(nan, carried.astype(out.dtype), out)


def _change(stype: str, dtype: str, mode: str, ftz: str | None, sat: str | None) -> Alu:
    """With .ftz, f32 operands and results are flushed, operands not where the result is f16 [measured on sm_90]."""

    def body(bits):
        if ftz and stype == "f32" and dtype != "f16":
            bits = np.where(is_nan(bits, "f32"), quiet(bits, "f32"), flush(bits, "f32"))
        if dtype == "f64":
            out = widen(bits, stype)
        else:
            out = _from_f64(bits, dtype, mode) if stype == "f64" else narrow(bits, stype, dtype, mode)
        if ftz and dtype == "f32":
            out = flush_result(out, dtype, mode, lambda i: decode(bits[i], stype))
        return saturate(out, dtype) if sat else out

    return floating(register(dtype), register(stype), body)


@operation(f"cvt.{ROUNDINGS}.ftz?.sat?.f16!.f32!", f"cvt.{ROUNDINGS}.ftz?.sat?.f32!.f64!",
           f"cvt.{ROUNDINGS}.~.sat?.f16!.f64!", f"cvt.{ROUNDINGS}.ftz?.~.bf16!.f32!",
           f"cvt.{ROUNDINGS}.~.~.bf16!.f64|f16", f"cvt.{ROUNDINGS}.~.~.f16|f64.bf16!",
           f"cvt.{ROUNDINGS}.ftz!.~.f32!.bf16!")
def _cvt_narrow(mode, ftz, sat, dtype, stype):
    return _change(stype, dtype, mode, ftz, sat)


@operation("cvt.ftz?.sat?.f64!.f32!", "cvt.ftz!.sat?.f32!.f32!", "cvt.~.sat!.f32!.f32!", "cvt.ftz?.sat?.f32!.f16!",
           "cvt.~.sat?.f64!.f16!", "cvt.~.sat!.f64!.f64!", "cvt.~.~.f64!.bf16!", "cvt.ftz!.~.f32!.bf16!",
           "cvt.~.sat?.f16!.f16!", "cvt.~.~.bf16!.bf16!")
def _cvt_exact(ftz, sat, dtype, stype):
    return _change(stype, dtype, "rn", ftz, sat)


@operation("cvt.f32!.f32", "cvt.f64!.f64")
def _cvt_same(t):
    """Moves the bits, NaNs too [measured on sm_90]."""
    return expression(register(t), register(t), "a")


@operation("cvt.f32.bf16", f"cvt.{ROUNDINGS}.f32.bf16")
def _cvt_bf16(_=None):
    """Moves the bits up, NaNs too [measured on sm_90]."""
    return expression("b32", "b16", f"{resized('a', 32)} << 16")


@operation(f"cvt.{WHOLE}.ftz?.sat?.f32!.f32", f"cvt.{WHOLE}.~.sat?.f64!.f64",
           f"cvt.{WHOLE}.~.sat?.f16!.f16", f"cvt.{WHOLE}.~.~.bf16!.bf16")
def _cvt_whole(mode, ftz, sat, t):
    """A number rounded to a whole number of the same format."""

    def body(bits):
        bits = flush(bits, t) if ftz else bits
        x = _TO_WHOLE[mode](decode(bits, t))
        out = nan64(x.view(np.uint64), [bits]) if t == "f64" else encode(x, t)
        return saturate(out, t) if sat else out

    return floating(register(t), register(t), body)


# --- clamped and packed formats -----------------------------------------------------------------------------

def _converter(stype: str, dtype: str, mode: str, finite: str | None, relu: str | None) -> Callable:
    """A conversion of element bit patterns with .satfinite and .relu."""

    def convert(bits):
        out = narrow(bits, stype, dtype, mode, finite is not None)
        return rectify(out, dtype) if relu else out

    return convert


@operation("cvt.rn|rz.relu!.satfinite?.f16|bf16.f32", "cvt.rn|rz.~.satfinite!.f16|bf16.f32")
def _cvt_half(mode, relu, finite, dtype):
    return floating("b16", "b32", _converter("f32", dtype, mode, finite, relu))


@operation("cvt.rna!.satfinite?.~.tf32.f32", "cvt.rn|rz.satfinite?.relu?.tf32.f32")
def _cvt_tf32(mode, finite, relu):
    """tf32 lies in the upper 19 bits of its register. rna cuts the payload of a NaN [measured on sm_90]."""
    convert = _converter("f32", "tf32", mode, finite, relu)

    def body(bits):
        out = convert(bits) << np.uint32(13)
        return np.where(is_nan(bits, "f32"), bits & np.uint32(0xFFFFE000), out) if mode == "rna" and not finite else out

    return floating("b32", "b32", body)


def _element(packed_name: str) -> str:
    return packed_name.removesuffix("x2")


def _pairs(elements: np.ndarray, name: str) -> np.ndarray:
    """Elements in a row, lower one first, as packed registers; e2m1 elements share a byte."""
    if name == "e2m1":
        return elements[1::2] << np.uint8(4) | elements[::2]
    return elements.view(f"u{2 * elements.itemsize}")


def _row(upper: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """Two operands in one row, the lower one first."""
    out = np.empty((len(upper), 2), upper.dtype)
    out[:, 0], out[:, 1] = lower, upper
    return out.reshape(-1)


def _split(bits: np.ndarray, name: str) -> np.ndarray:
    """Elements of packed registers in a row, lower one first."""
    if name == "e2m1":
        return np.stack([bits & np.uint8(15), bits >> np.uint8(4)], axis=1).reshape(-1)
    fmt = FORMATS[name]
    out = np.ascontiguousarray(bits).view(DTYPE[fmt.container])
    return out & np.uint8(2 * fmt.sign - 1) if fmt.sign < 0x80 else out


@operation("cvt.rn|rz.relu?.satfinite?.f16x2|bf16x2.f32")
def _cvt_pair(mode, relu, finite, dtype):
    convert = _converter("f32", _element(dtype), mode, finite, relu)
    return floating("b32", "b32 b32", lambda upper, lower: convert(_row(upper, lower)).view(np.uint32))


NARROW = "e4m3x2|e5m2x2|e2m3x2|e3m2x2|e2m1x2"


@operation(f"cvt.rn.satfinite.relu?.{NARROW}.f32")
def _cvt_small(relu, dtype):
    name = _element(dtype)
    convert = _converter("f32", name, "rn", "satfinite", relu)
    return floating(register(dtype), "b32 b32", lambda upper, lower: _pairs(convert(_row(upper, lower)), name))


@operation(f"cvt.rn.satfinite.relu?.{NARROW}.f16x2|bf16x2")
def _cvt_smaller(relu, dtype, stype):
    name = _element(dtype)
    convert = _converter(_element(stype), name, "rn", "satfinite", relu)
    return floating(register(dtype), "b32", lambda bits: _pairs(convert(_split(bits, _element(stype))), name))


@operation(f"cvt.rn.~.relu?.f16x2!.{NARROW}", f"cvt.rn.satfinite?.relu?.bf16x2!.{NARROW}")
def _cvt_larger(finite, relu, dtype, stype):
    name = _element(stype)
    convert = _converter(name, _element(dtype), "rn", finite, relu)
    return floating("b32", register(stype), lambda bits: convert(_split(bits, name)).view(np.uint32))


# --- ue8m0: powers of two, 2^(code - 127), 0xFF is NaN ------------------------------------------------------

def scale_code(bits: np.ndarray, mode: str, finite: bool) -> np.ndarray:
    """f32 bit patterns to ue8m0, by magnitude; rounded down (rz) or up (rp). Beyond 2^127: 0xFE if finite, else NaN.

    Zero and what rounds below 2^-127 give 0x00. [NVIDIA, cuda_fp8.hpp, the host path of __nv_cvt_float_to_e8m0]
    """
    size = bits & np.uint32(0x7FFFFFFF)
    code = size >> np.uint32(23)
    if mode == "rp":
        code = code + ((size & np.uint32(0x7FFFFF) != 0) & (size > 0x00400000) & (size < 0x7F800000))
    if finite:
        code = np.where((code == 255) & (size <= 0x7F800000), np.uint32(254), code)
    return code.astype(np.uint8)


@operation("cvt.rz|rp.satfinite?.ue8m0x2.f32")
def _cvt_scale(mode, finite):
    return floating("b16", "b32 b32", lambda upper, lower: scale_code(
        _row(upper, lower), mode, finite is not None).view(np.uint16))


@operation("cvt.rz|rp.satfinite?.ue8m0x2.bf16x2")
def _cvt_scale_bf16(mode, finite):
    def body(bits):
        single = _split(bits, "bf16").astype(np.uint32) << np.uint32(16)
        return scale_code(single, mode, finite is not None).view(np.uint16)

    return floating("b16", "b32", body)


@operation("cvt.rn.bf16x2.ue8m0x2")
def _cvt_from_scale():
    def body(bits):
        code = np.ascontiguousarray(bits).view(np.uint8).astype(np.uint16)
        out = np.where(code == 0, np.uint16(0x0040), code << np.uint16(7))
        return np.where(code == 255, np.uint16(0x7FFF), out).view(np.uint32)

    return floating("b32", "b16", body)


# --- cvt.pack -----------------------------------------------------------------------------------------------

@operation("cvt.pack.sat.u16|s16.s32")
def _cvt_pack(dtype):
    return lanewise("b32", "b32 b32", lambda a, b: clamp(value(a, "s32"), dtype) << 16 | clamp(value(b, "s32"), dtype))


@operation("cvt.pack.sat.u2|s2|u4|s4|u8|s8.s32.b32")
def _cvt_pack_more(dtype):
    """a and b, b in the lowest bits, below c shifted left by two elements."""
    n = width_of(dtype)

    def compute(a, b, c):
        return (c << 2 * n | clamp(value(a, "s32"), dtype) << n | clamp(value(b, "s32"), dtype)) & mask(32)

    return lanewise("b32", "b32 b32 b32", compute)
