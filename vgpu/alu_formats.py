"""Floating-point formats: bit patterns to float64 and back under every rounding mode, and exact arithmetic.

Every format but f64 is computed in float64. A sum that float64 cannot hold is rounded to odd (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", 2008), so that rounding it once more to 24 bits or fewer is exact. Of a
product nothing is lost; a quotient or root of 24-bit operands, rounded to 53 bits, lies on no rounding boundary of
the narrow format unless it is exact (Figueroa, "When is double rounding innocuous?", 1995). f64 itself uses NumPy for
round to nearest and rational numbers for the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt

import numpy as np

from .alu_base import DTYPE

ROUNDINGS = "rn|rz|rm|rp"


@dataclass(frozen=True)
class Format:
    """A binary format with one sign bit; `largest`, `infinity` and `nan` are the codes of these without a sign.

    infinity is None where the format has none. `nan` is what the hardware writes for a NaN. container: register kind
    of one element.
    """

    exponent: int
    mantissa: int
    largest: int
    infinity: int | None
    nan: int
    container: str

    @property
    def bias(self) -> int:
        """Exponent bias."""
        return (1 << self.exponent - 1) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << self.exponent + self.mantissa

    @property
    def normal(self) -> int:
        """Code of the smallest normal number."""
        return 1 << self.mantissa

    @property
    def one(self) -> int:
        """Code of 1.0."""
        return self.bias << self.mantissa

    def value(self, code: int) -> float:
        """The number a code stands for; NaN beyond the infinity or, where there is none, beyond the largest."""
        magnitude = code & self.sign - 1
        field, fraction = magnitude >> self.mantissa, magnitude & self.normal - 1
        size = (fraction + (self.normal if field else 0)) * 2.0 ** (max(field, 1) - self.bias - self.mantissa)
        if magnitude > self.largest:
            size = np.inf if magnitude == self.infinity else np.nan
        return -size if code & self.sign else size


def _ieee(exponent: int, mantissa: int, container: str) -> Format:
    infinity = (1 << exponent) - 1 << mantissa
    return Format(exponent, mantissa, infinity - 1, infinity, (1 << exponent + mantissa) - 1, container)


# The canonical NaN of f64 is not all ones: see `nan64`. OCP formats: OFP8 1.0 and MX 1.0.
FORMATS = {
    "f64": _ieee(11, 52, "b64"), "f32": _ieee(8, 23, "b32"), "f16": _ieee(5, 10, "b16"), "bf16": _ieee(8, 7, "b16"),
    "tf32": _ieee(8, 10, "b32"), "e5m2": _ieee(5, 2, "b8"), "e4m3": Format(4, 3, 0x7E, None, 0x7F, "b8"),
    "e2m1": Format(2, 1, 0x7, None, 0x7, "b8"), "e2m3": Format(2, 3, 0x1F, None, 0x1F, "b8"),
    "e3m2": Format(3, 2, 0x1F, None, 0x1F, "b8"),
}
_NATIVE = {"f64": np.float64, "f32": np.float32, "f16": np.float16}


class Codes:
    """A format's special codes as arrays of no dimension: NumPy takes these twice as fast as Python ints."""

    def __init__(self, fmt: Format):
        dtype = DTYPE[fmt.container]
        self.sign, self.rest = np.array(fmt.sign, dtype), np.array(fmt.sign - 1, dtype)
        self.normal, self.one = np.array(fmt.normal, dtype), np.array(fmt.one, dtype)
        self.nan, self.zero = np.array(fmt.nan, dtype), np.array(0, dtype)
        self.infinity = np.array(fmt.largest if fmt.infinity is None else fmt.infinity, dtype)
        self.quiet = np.array(fmt.normal >> 1, dtype)


CODES = {name: Codes(fmt) for name, fmt in FORMATS.items()}


def some(lanes: np.ndarray) -> bool:
    """True where any lane is (four times as fast as `any`)."""
    return np.count_nonzero(lanes) != 0


def is_nan(bits: np.ndarray, name: str) -> np.ndarray:
    """Which bit patterns of f64, f32, f16 or bf16 are NaN."""
    codes = CODES[name]
    return bits & codes.rest > codes.infinity


def quiet(bits: np.ndarray, name: str) -> np.ndarray:
    """What arithmetic makes of NaN operands: f64 keeps the payload, the others write their canonical NaN."""
    return bits | CODES[name].quiet if name == "f64" else np.full(bits.shape, CODES[name].nan)


def flush(bits: np.ndarray, name: str) -> np.ndarray:
    """Subnormal bit patterns as zeros of the same sign (.ftz)."""
    codes = CODES[name]
    tiny = bits & codes.rest < codes.normal
    return np.where(tiny, bits & codes.sign, bits) if some(tiny) else bits


def flush_result(out: np.ndarray, name: str, mode: str, exact: Callable) -> np.ndarray:
    """`flush` for results. One that was rounded up to the smallest normal number is flushed, too, if with an exponent
    of unlimited range it would have been rounded to less [measured on sm_90: mul, fma, cvt].

    exact(i): results i in float64 before rounding, exact or rounded to odd.
    """
    codes = CODES[name]
    edge = np.flatnonzero(out & codes.rest == codes.normal)
    if len(edge):
        doubled = encode(2 * exact(edge), name, mode) & codes.rest  # rounded one exponent higher, where it is normal
        out = out.copy()
        out[edge] = np.where(doubled < 2 * codes.normal, out[edge] & codes.sign, out[edge])
    return flush(out, name)


def saturate(bits: np.ndarray, name: str) -> np.ndarray:
    """Clamp to [+0, 1]; NaN to +0 (.sat)."""
    codes = CODES[name]
    return np.where(bits > codes.infinity, codes.zero, np.minimum(bits, codes.one))


def rectify(bits: np.ndarray, name: str) -> np.ndarray:
    """Negative numbers and -0 to +0; NaN to the canonical NaN (.relu)."""
    codes = CODES[name]
    out = np.where(bits & codes.sign, codes.zero, bits)
    return out if FORMATS[name].infinity is None else np.where(is_nan(bits, name), codes.nan, out)


@lru_cache(maxsize=8)
def _table(name: str) -> np.ndarray:
    fmt = FORMATS[name]
    return np.array([fmt.value(code) for code in range(2 * fmt.sign)])


def decode(bits: np.ndarray, name: str) -> np.ndarray:
    """Bit patterns of a format as float64."""
    if name in _NATIVE:
        return bits.view(_NATIVE[name]).astype(np.float64)
    if name == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return _table(name)[bits]


def _toward(up: bool) -> Callable:
    return lambda units, negative: np.where(negative == up, np.floor(units), np.ceil(units))


# mode -> (magnitude in units of the last place, sign) -> whole number
_ROUND = {
    "rn": lambda units, negative: np.rint(units), "rz": lambda units, negative: np.floor(units),
    "rna": lambda units, negative: np.floor(units + 0.5), "rp": _toward(True), "rm": _toward(False),
}


def encode(x: np.ndarray, name: str, mode: str = "rn", finite: bool = False) -> np.ndarray:
    """float64 to the bit patterns of a format other than f64.

    mode: rn, rz, rm, rp, or rna (nearest, ties away from zero). finite: overflow and infinity give the largest finite
    number (.satfinite), as they always do in a format without an infinity.
    """
    fmt = FORMATS[name]
    if mode == "rn" and fmt.container == "b8" and (finite or fmt.infinity is None):
        out = _encode_small(x, name)
    elif mode != "rn" or finite or name not in ("f32", "f16", "bf16"):
        out = _encode(x, fmt, mode, finite)
    elif name == "bf16":
        out = upper_half(_odd_single(x))
    else:
        out = x.astype(_NATIVE[name]).view(DTYPE[fmt.container])
    nan = np.isnan(x)
    return np.where(nan, CODES[name].nan, out) if some(nan) else out


_ROUND_HALF, _ONE, _SIXTEEN = np.array(0x7FFF, np.uint32), np.array(1, np.uint32), np.array(16, np.uint32)


def upper_half(bits: np.ndarray) -> np.ndarray:
    """f32 bit patterns rounded to bf16, to nearest even; NaNs are not looked at."""
    return (bits + _ROUND_HALF + (bits >> _SIXTEEN & _ONE) >> _SIXTEEN).astype(np.uint16)


def _odd_single(x: np.ndarray) -> np.ndarray:
    """float64 as f32 bits rounded to odd."""
    single = x.astype(np.float32)
    bits, back = single.view(np.uint32), single.astype(np.float64)
    inexact = back != x
    if not some(inexact):
        return bits
    return np.where(inexact, bits - (np.abs(back) > np.abs(x)) | _ONE, bits)


@lru_cache(maxsize=8)
def _boundaries(name: str) -> np.ndarray:
    """Between each two neighbouring codes, the largest number that rounds down to nearest even."""
    values = _table(name)[:FORMATS[name].largest + 1]
    middles = (values[:-1] + values[1:]) / 2
    middles[1::2] = np.nextafter(middles[1::2], 0)
    return middles


def _encode_small(x: np.ndarray, name: str) -> np.ndarray:
    code = np.searchsorted(_boundaries(name), np.abs(x)).astype(np.uint8)
    return np.where(np.signbit(x), code | CODES[name].sign, code)


def _encode(x: np.ndarray, fmt: Format, mode: str, finite: bool) -> np.ndarray:
    raw = np.ascontiguousarray(x).view(np.int64)
    negative = raw < 0
    exponent = np.maximum((raw >> 52 & 0x7FF) - 1023, fmt.emin)
    units = np.ldexp(np.abs(x), fmt.mantissa - exponent)
    code = _ROUND[mode](units, negative).astype(np.int64) + (exponent - fmt.emin << fmt.mantissa)
    over = fmt.largest
    if not finite and fmt.infinity is not None:
        inward = {"rz": True, "rp": negative, "rm": ~negative}.get(mode, False)
        over = np.where(inward, fmt.largest, fmt.infinity)
    code = np.where(code > fmt.largest, over, code)
    endless = fmt.largest if finite or fmt.infinity is None else fmt.infinity
    code = np.where(np.isinf(x), endless, code)
    return (code | negative * fmt.sign).astype(DTYPE[fmt.container])


# --- exact sums, for narrow formats -------------------------------------------------------------------------

_LOW = np.array(0x0FFFFFFF, np.int64)


def odd_sum(p: np.ndarray, c: np.ndarray, mode: str) -> np.ndarray:
    """p + c in float64, rounded to odd where that matters to a format of 24 bits or fewer.

    Only a sum whose low 28 bits are zero can lie on a boundary of such a format. In mode rm an exact zero is negative
    unless both are +0.
    """
    s = -(-p + -c) if mode == "rm" else p + c
    bits = s.view(np.int64)
    if np.count_nonzero(bits & _LOW) == len(bits):
        return s
    t = s - p
    error = (p - (s - t)) + (c - t)
    if not some(error):
        return s
    step = np.where((error > 0) == (s > 0), 1, -1)
    moves = ((error > 0) | (error < 0)) & (bits & 1 == 0)
    return np.where(moves, bits + step, bits).view(np.float64)


# operation -> its two addends; operation -> its value
SUMS = {"add": lambda a, b: (a, b), "sub": lambda a, b: (a, -b), "fma": lambda a, b, c: (a * b, c)}
PRODUCTS = {"mul": lambda a, b: a * b, "div": lambda a, b: a / b, "rcp": lambda a: 1 / a, "sqrt": np.sqrt}


def compute(name: str, operands: list[np.ndarray], mode: str) -> np.ndarray:
    """An operation on float64 values of narrow formats, exact up to one rounding to 24 bits or fewer."""
    if name in SUMS and mode == "rn" and name != "fma":
        p, c = SUMS[name](*operands)
        return p + c
    if name in SUMS:
        return odd_sum(*SUMS[name](*operands), mode)
    return PRODUCTS[name](*operands)


# --- f64 ----------------------------------------------------------------------------------------------------

def round_fraction(x: Fraction, mode: str) -> int:
    """The f64 bits of a rational number other than zero."""
    negative, n, d = x < 0, abs(x.numerator), x.denominator
    e = n.bit_length() - d.bit_length()
    if n << max(-e, 0) < d << max(e, 0):
        e -= 1
    e = max(e, -1022)
    n, d = n << max(52 - e, 0), d << max(e - 52, 0)
    q, rest = divmod(n, d)
    away = {"rn": 2 * rest > d or (2 * rest == d and q & 1), "rz": False, "rm": rest and negative,
            "rp": rest and not negative}[mode]
    code = q + bool(away) + (e + 1022 << 52)
    largest = FORMATS["f64"].largest
    if code > largest:
        code = largest if mode == "rz" or mode == ("rp" if negative else "rm") else largest + 1
    return code | negative << 63


def _root(a: Fraction) -> Fraction:
    """The square root to 100 bits or more, the last one set where it is inexact."""
    scale = max(200 + 2 * a.denominator.bit_length(), 0)
    scale += scale & 1
    whole = (a.numerator << scale) // a.denominator
    root = isqrt(whole)
    return Fraction(2 * root + (root * root != whole), 2 << scale // 2)


_EXACT = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "fma": lambda a, b, c: a * b + c, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "rcp": lambda a: 1 / a, "sqrt": _root,
}


# operation -> which operand's NaN an f64 result takes, the first of these that is one [measured on sm_90]
_NAN_ORDER = {"fma": (1, 2, 0), "div": (0, 1), "rcp": (0,), "sqrt": (0,)}


def nan64(out: np.ndarray, operands: list[np.ndarray]) -> np.ndarray:
    """f64 results whose NaNs are those of the first operand that is one, made quiet, else 0xFFF8000000000000."""
    bad = is_nan(out, "f64")
    if not some(bad):
        return out
    nan = np.full(out.shape, 0xFFF8000000000000, np.uint64)
    for bits in reversed(operands):
        nan = np.where(is_nan(bits, "f64"), quiet(bits, "f64"), nan)
    return np.where(bad, nan, out)


_HUGE = np.finfo(np.float64).max


def compute64(name: str, operands: list[np.ndarray], mode: str) -> np.ndarray:
    """An f64 operation on bit patterns, correctly rounded."""
    values = [bits.view(np.float64) for bits in operands]
    if name in SUMS:
        p, c = SUMS[name](*values)
        if name == "fma":  # a product too large for f64 is still finite
            p = np.where(np.isfinite(values[0]) & np.isfinite(values[1]), np.clip(p, -_HUGE, _HUGE), p)
        y = -(-p + -c) if mode == "rm" else p + c
    else:
        y = PRODUCTS[name](*values)
    out = y.view(np.uint64)
    if mode != "rn" or name == "fma":
        regular = np.all([np.isfinite(v) for v in values], axis=0)
        if name in ("div", "rcp", "sqrt"):
            regular &= values[-1] > 0 if name == "sqrt" else values[-1] != 0
        for i in np.flatnonzero(regular):
            exact = _EXACT[name](*(Fraction(v.item(i)) for v in values))
            if exact:
                out[i] = round_fraction(exact, mode)
    return nan64(out, [operands[i] for i in _NAN_ORDER.get(name, (1, 0))])
