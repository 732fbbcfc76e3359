"""Floating-point instructions: f64, f32, f16, bf16 and their packed pairs (PTX ISA 9.7.3 to 9.7.5).

Correctly rounded where PTX says so (rn, rz, rm, rp). The approximations (ex2, lg2, sin, cos, tanh, rsqrt, and the
.approx and .full forms of rcp, sqrt, div) are computed in float64 and rounded to nearest: within the hardware's error
bounds, but not its bits. f32, f16 and bf16 results that are NaN are the hardware's canonical 0x7FFFFFFF and 0x7FFF.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from .alu_base import PAIR, TRIPLE, Alu, expression, floating, operation, packed, register
from .alu_formats import (
    CODES,
    FORMATS,
    ROUNDINGS,
    compute,
    compute64,
    decode,
    encode,
    flush,
    flush_result,
    is_nan,
    quiet,
    rectify,
    saturate,
    some,
)
from .alu_int import TRUE, set_value

_ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}


def element(type_name: str) -> str:
    """The format of a type's elements."""
    return _ELEMENT.get(type_name, type_name)


def elementwise(type_name: str, count: int, body: Callable) -> Alu:
    """An instruction on `count` operands of a type from a body on the bit patterns of elements."""
    kind, inside = register(type_name), FORMATS[element(type_name)].container
    if kind != inside:
        body = packed(body, inside, kind)
    return floating(kind, " ".join([kind] * count), body)


def finished(bits: np.ndarray, name: str, clamp: str | None) -> np.ndarray:
    """Results after the clamping modifier "sat", "relu" or None."""
    if clamp is None:
        return bits
    return saturate(bits, name) if clamp == "sat" else rectify(bits, name)


_DIRECT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_DIRECT_TYPES = {"f32": np.float32, "f16": np.float16}


def rounded(operation_name: str, name: str, mode: str | None) -> Callable:
    """A correctly rounded operation on bit patterns of one format."""
    mode = mode or "rn"
    if name == "f64":
        return lambda *bits: compute64(operation_name, list(bits), mode)
    if mode == "rn" and operation_name in _DIRECT and name in _DIRECT_TYPES:
        return _direct(_DIRECT[operation_name], name)
    return lambda *bits: encode(compute(operation_name, [decode(b, name) for b in bits], mode), name, mode)


def _direct(ufunc: np.ufunc, name: str) -> Callable:
    """f32 or f16 arithmetic rounded to nearest, by NumPy (which rounds f16 twice, from f32, innocuously)."""
    inside, nan = _DIRECT_TYPES[name], CODES[name].nan

    def body(a, b):
        out = ufunc(a.view(inside), b.view(inside))
        bad = np.isnan(out)
        return np.where(bad, nan, out.view(a.dtype)) if some(bad) else out.view(a.dtype)

    return body


def arithmetic(operation_name: str, type_name: str, count: int, mode=None, ftz=None, clamp=None) -> Alu:
    """An operation with its rounding, flushing and clamping modifiers."""
    name = element(type_name)
    exact = rounded(operation_name, name, mode)

    def body(*bits):
        if not ftz:
            return finished(exact(*bits), name, clamp)
        bits = [flush(b, name) for b in bits]

        def unrounded(i):
            return compute(operation_name, [decode(b[i], name) for b in bits], mode or "rn")

        return finished(flush_result(exact(*bits), name, mode or "rn", unrounded), name, clamp)

    return elementwise(type_name, count, body)


# --- add, sub, mul, fma -------------------------------------------------------------------------------------

@operation(f"add|sub|mul.{ROUNDINGS}?.ftz?.sat?.f32")
def _add(name, mode, ftz, sat):
    return arithmetic(name, "f32", 2, mode, ftz, sat)


@operation(f"fma|mad.{ROUNDINGS}.ftz?.sat?.f32")
def _fma(_, mode, ftz, sat):
    return arithmetic("fma", "f32", 3, mode, ftz, sat)


@operation(f"add|sub|mul.{ROUNDINGS}?.ftz?.f32x2")
def _add_pair(name, mode, ftz):
    return arithmetic(name, "f32x2", 2, mode, ftz)


@operation(f"fma.{ROUNDINGS}.ftz?.f32x2")
def _fma_pair(mode, ftz):
    return arithmetic("fma", "f32x2", 3, mode, ftz)


@operation(f"add|sub|mul.{ROUNDINGS}?.f64")
def _add64(name, mode):
    return arithmetic(name, "f64", 2, mode)


@operation(f"fma|mad.{ROUNDINGS}.f64")
def _fma64(_, mode):
    return arithmetic("fma", "f64", 3, mode)


@operation("add|sub|mul.rn?.ftz?.sat?.f16|f16x2")
def _add16(name, mode, ftz, sat, t):
    return arithmetic(name, t, 2, mode, ftz, sat)


@operation("add|sub|mul.rn?.bf16|bf16x2")
def _add_bf16(name, mode, t):
    return arithmetic(name, t, 2, mode)


@operation("fma.rn.ftz?.sat|relu?.f16|f16x2")
def _fma16(ftz, clamp, t):
    return arithmetic("fma", t, 3, "rn", ftz, clamp)


@operation("fma.rn.relu?.bf16|bf16x2")
def _fma_bf16(relu, t):
    return arithmetic("fma", t, 3, "rn", None, relu)


def _mixed(operation_name: str, count: int, mode: str | None, sat: str | None, source: str) -> Alu:
    """f32 arithmetic whose operands but the last are f16 or bf16 (PTX ISA 9.7.5)."""

    def body(*bits):
        values = [decode(b, source) for b in bits[:-1]] + [decode(bits[-1], "f32")]
        return finished(encode(compute(operation_name, values, mode or "rn"), "f32", mode or "rn"), "f32", sat)

    return floating("b32", " ".join(["b16"] * (count - 1) + ["b32"]), body)


@operation(f"add|sub.{ROUNDINGS}?.sat?.f32.f16|bf16")
def _add_mixed(name, mode, sat, source):
    return _mixed(name, 2, mode, sat, source)


@operation(f"fma.{ROUNDINGS}.sat?.f32.f16|bf16")
def _fma_mixed(mode, sat, source):
    return _mixed("fma", 3, mode, sat, source)


# --- division, roots, approximations ------------------------------------------------------------------------

@operation(f"div|rcp|sqrt.{ROUNDINGS}.ftz?.f32")
def _div(name, mode, ftz):
    return arithmetic(name, "f32", 2 if name == "div" else 1, mode, ftz)


@operation(f"div|rcp|sqrt.{ROUNDINGS}.f64")
def _div64(name, mode):
    return arithmetic(name, "f64", 2 if name == "div" else 1, mode)


def _divide_approximately(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a * (1 / b), where 1 / b is zero beyond 2^126 (PTX ISA 9.7.3.8)."""
    return np.where(np.abs(b) > 2.0**126, a * np.copysign(0.0, b), a / b)


_APPROXIMATE = {
    "rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos,
    "lg2": np.log2, "ex2": np.exp2, "tanh": np.tanh, "div.full": lambda a, b: a / b,
    "div.approx": _divide_approximately,
}


def approximate(name: str, type_name: str, count: int = 1, ftz: str | None = None) -> Alu:
    """A function in float64, rounded to nearest: approximate, not the hardware's bits."""
    form, function = element(type_name), _APPROXIMATE[name]

    def body(*bits):
        if ftz:
            bits = [flush(b, form) for b in bits]
        out = encode(function(*(decode(b, form) for b in bits)), form)
        return flush(out, form) if ftz else out

    return elementwise(type_name, count, body)


@operation("rcp|sqrt|rsqrt|sin|cos|lg2|ex2.approx.ftz?.f32")
def _approx(name, ftz):
    return approximate(name, "f32", 1, ftz)


@operation("tanh.approx.f32|f16|f16x2|bf16|bf16x2")
def _tanh(t):
    return approximate("tanh", t)


@operation("ex2.approx.f16|f16x2")
def _ex2_half(t):
    return approximate("ex2", t)


@operation("ex2.approx.ftz.bf16|bf16x2")
def _ex2_bf16(t):
    return approximate("ex2", t, 1, "ftz")


@operation("div.full|approx.ftz?.f32")
def _div_approx(kind, ftz):
    return approximate(f"div.{kind}", "f32", 2, ftz)


def _approximate64(name: str, upper: bool) -> Alu:
    """An f64 approximation; `upper`: of operand and result only the upper 32 bits count, subnormals are zero."""
    keep = np.uint64(0xFFFFFFFF00000000 if upper else 0xFFFFFFFFFFFFFFFF)

    def body(bits):
        x = (flush(bits, "f64") if upper else bits) & keep
        y = _APPROXIMATE[name](x.view(np.float64))
        out = np.where(np.isnan(y), np.uint64(0x7FFFFFFF00000000 if upper else 0xFFF8000000000000), y.view(np.uint64))
        return flush(out, "f64") & keep if upper else out

    return floating("b64", "b64", body)


@operation("rcp|rsqrt.approx.ftz.f64")
def _approx_upper(name):
    return _approximate64(name, upper=True)


@operation("rsqrt.approx.f64")
def _rsqrt64():
    return _approximate64("rsqrt", upper=False)


# --- sign and class -----------------------------------------------------------------------------------------

def _signs(name: str, type_name: str, ftz: str | None) -> Alu:
    """abs or neg. A NaN becomes what other arithmetic makes of it [measured on sm_90]."""
    form = element(type_name)

    def body(bits):
        bits = flush(bits, form) if ftz else bits
        out = bits & CODES[form].rest if name == "abs" else bits ^ CODES[form].sign
        nan = is_nan(bits, form)
        return np.where(nan, quiet(bits, form), out) if some(nan) else out

    return elementwise(type_name, 1, body)


@operation("abs|neg.ftz?.f32|f16|f16x2", "abs|neg.~.f64|bf16|bf16x2")
def _abs(name, ftz, t):
    return _signs(name, t, ftz)


@operation("copysign.f32|f64")
def _copysign(t):
    """The magnitude of b with the sign of a."""
    return expression(register(t), f"{register(t)} {register(t)}", "a & SIGN | b & REST",
                      SIGN=FORMATS[t].sign, REST=FORMATS[t].sign - 1)


_CLASS = {
    "finite": "(a & REST) < INF", "infinite": "(a & REST) == INF", "number": "(a & REST) <= INF",
    "notanumber": "(a & REST) > INF",
    "normal": "(((a & REST) >= NORMAL) & ((a & REST) < INF)) | ((a & REST) == 0)",  # zero too [measured on sm_90]
    "subnormal": "((a & REST) < NORMAL) & ((a & REST) > 0)",
}


@operation("testp.finite|infinite|number|notanumber|normal|subnormal.f32|f64")
def _testp(name, t):
    fmt = FORMATS[t]
    return expression("pred", register(t), _CLASS[name], REST=fmt.sign - 1, INF=fmt.infinity, NORMAL=fmt.normal)


# --- minimum and maximum ------------------------------------------------------------------------------------

def _ordered(bits: np.ndarray, name: str) -> np.ndarray:
    """Keys that order like the numbers, -0 before +0."""
    sign = CODES[name].sign
    return np.where(bits & sign, ~bits, bits | sign)


def _chosen(largest: bool, name: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller or larger of two bit patterns; where one is NaN, anything."""
    if name in _FLOATS and np.count_nonzero((a | b) & CODES[name].rest) == len(a):
        ufunc, inside = np.fmax if largest else np.fmin, _FLOATS[name]
        return ufunc(a.view(inside), b.view(inside)).view(a.dtype)
    return np.where((_ordered(a, name) < _ordered(b, name)) ^ largest, a, b)


_FLOATS = {"f32": np.float32, "f64": np.float64}


def _extremum(largest: bool, name: str, propagate: bool) -> Callable:
    """The smaller or larger of two bit patterns; a NaN loses, or with `propagate` wins."""

    def choose(a, b):
        out = _chosen(largest, name, a, b)
        nan_a, nan_b = is_nan(a, name), is_nan(b, name)
        if not some(nan_a | nan_b):
            return out
        if propagate:
            return np.where(nan_a | nan_b, quiet(b, name), out)
        return np.where(nan_a & nan_b, quiet(b, name), np.where(nan_a, b, np.where(nan_b, a, out)))

    return choose


def extremum(name: str, type_name: str, count: int, ftz=None, nan=None, xorsign=False, magnitude=False) -> Alu:
    """min or max of `count` operands; `magnitude` compares absolute values, `xorsign` gives the result a sign."""
    form = element(type_name)
    choose, codes = _extremum(name == "max", form, nan is not None), CODES[form]

    def body(*bits):
        values = [flush(b, form) for b in bits] if ftz else bits
        out = reduce(choose, [b & codes.rest for b in values] if magnitude else values)
        if not xorsign:
            return out
        signs = reduce(np.bitwise_xor, values) & codes.sign
        return np.where(is_nan(out, form), out, out | signs)

    return elementwise(type_name, count, body)


@operation("min|max.ftz?.NaN?.f32|f16|f16x2", "min|max.~.NaN?.bf16|bf16x2")
def _min(name, ftz, nan, t):
    return extremum(name, t, 2, ftz, nan)


@operation("min|max.f64")
def _min64(name):
    return extremum(name, "f64", 2)


@operation("min|max.ftz?.NaN?.xorsign.abs.f32|f16|f16x2", "min|max.~.NaN?.xorsign.abs.bf16|bf16x2")
def _min_xorsign(name, ftz, nan, t):
    return extremum(name, t, 2, ftz, nan, xorsign=True, magnitude=True)


@operation("min|max.ftz?.NaN?.abs?.f32", variant=TRIPLE)
def _min3(name, ftz, nan, magnitude):
    return extremum(name, "f32", 3, ftz, nan, magnitude=magnitude is not None)


# --- comparison ---------------------------------------------------------------------------------------------

# name -> comparison of floats: those that end in "u" hold with a NaN too
_COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a < b) | (a > b), "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: a != b, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b), "nan": lambda a, b: (a != a) | (b != b),
}
COMPARISONS = "|".join(_COMPARE)


def _compare(name: str, form: str, ftz: str | None) -> Callable:
    """A comparison of bit patterns."""
    test, inside = _COMPARE[name], _FLOATS.get(form)

    def body(a, b):
        if ftz:
            a, b = flush(a, form), flush(b, form)
        return test(a.view(inside), b.view(inside)) if inside else test(decode(a, form), decode(b, form))

    return body


_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _predicate(name: str, t: str, ftz: str | None, boolean: str | None, pair: bool) -> Alu:
    """setp, and with `pair` its second result, the same of the comparison's complement."""
    test = _compare(name, t, ftz)
    join = (lambda p, *c: _COMBINE[boolean](p, *c)) if boolean else (lambda p: p)

    def body(a, b, *c):
        p = test(a, b)
        return (join(p, *c), join(~p, *c)) if pair else join(p, *c)

    kind = register(t)
    return floating("pred pred" if pair else "pred", f"{kind} {kind}" + (" pred" if boolean else ""), body)


_TESTS = f"{COMPARISONS}.and|or|xor?"


@operation(f"setp.{_TESTS}.ftz?.f32|f16", f"setp.{_TESTS}.~.f64|bf16")
def _setp(name, boolean, ftz, t):
    return _predicate(name, t, ftz, boolean, pair=False)


@operation(f"setp.{_TESTS}.ftz?.f32!", f"setp.{_TESTS}.~.f64!", variant=PAIR)
def _setp_pair(name, boolean, ftz, t):
    return _predicate(name, t, ftz, boolean, pair=True)


def _halves(name: str, t: str, ftz: str | None, boolean: str | None) -> Callable:
    """A comparison of the halves of packed registers, lower half first: bool[lanes, 2]."""
    test = _compare(name, element(t), ftz)

    def body(a, b, *c):
        p = test(*(np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2) for x in (a, b)))
        return _COMBINE[boolean](p, c[0][:, None]) if boolean else p

    return body


@operation(f"setp.{_TESTS}.ftz?.f16x2!", f"setp.{_TESTS}.~.bf16x2!")
def _setp_halves(name, boolean, ftz, t):
    """p compares the lower halves, q the upper ones (PTX ISA 9.7.7.2)."""
    test = _halves(name, t, ftz, boolean)
    return floating("pred pred", "b32 b32" + (" pred" if boolean else ""), lambda *xs: tuple(test(*xs).T.copy()))


@operation(f"set.{_TESTS}.ftz?.u32|s32|f32|f16.f32!", f"set.{_TESTS}.~.bf16!.f32!",
           f"set.{_TESTS}.~.u32|s32|f32|f16|bf16.f64!", f"set.{_TESTS}.ftz?.f16|u16|s16|u32|s32.f16!",
           f"set.{_TESTS}.~.bf16!.f16!", f"set.{_TESTS}.~.bf16|u16|s16|u32|s32.bf16!")
def _set(name, boolean, ftz, dtype, t):
    sources = (register(t),) * 2 + (("pred",) if boolean else ())
    return Alu((register(dtype),), sources, set_value(_setp(name, boolean, ftz, t).function, dtype))


@operation(f"set.{_TESTS}.ftz?.f16x2|u32|s32.f16x2!", f"set.{_TESTS}.~.bf16x2|u32|s32.bf16x2!")
def _set_halves(name, boolean, ftz, dtype, t):
    """Each half of the result is 1.0 or, for an integer type, all ones where the halves compare true."""
    test, true = _halves(name, t, ftz, boolean), np.uint16(TRUE.get(element(dtype), 0xFFFF) & 0xFFFF)
    return floating("b32", "b32 b32" + (" pred" if boolean else ""),
                    lambda *xs: (test(*xs) * true).view(np.uint32).reshape(-1))
