"""Numbers of the tensor core: element formats, and what one tcgen05.mma adds up, fast or bit for bit.

The exact arithmetic is the model of MMA-Sim (arXiv 2511.10909, PyPI `mmasim`), which its authors validated against
Blackwell hardware for cta_group::1 [measured, by them]. The fast arithmetic is a float32 matrix product whose
distance from the exact one is bounded below.
"""

from __future__ import annotations

import numpy as np

NAN32, NAN16 = 0x7FFFFFFF, 0x7FFF  # the canonical NaN of float32 and float16 results [measured]
GROUP = 16  # products of e2m1 elements that are added exactly before alignment [measured]
FRACTION_GROUPS, FRACTION_PRODUCTS = 35, 25  # fractional bits kept at the largest exponent [measured]
# exponent with which a zero takes part in the alignment [measured]
ZERO_GROUPS, ZERO_F32, ZERO_F16 = -139, -133, -21
_NEVER = -20000  # exponent of a zero factor: its products never set the alignment

# glibc returns blocks of 128 KiB and more to the system as soon as they are freed, so that the arrays of every MMA
# would be faulted in anew: up to half of the time. One large block freed raises that threshold (man 3 mallopt).
np.empty(24 << 20, np.uint8)


def _float_table(exponent_bits: int, mantissa_bits: int, *, nan: tuple[int, ...] = (), inf: tuple[int, ...] = (),
                 shift: int = 0) -> np.ndarray:
    """float32[256]: the value of every byte, for a sign-exponent-mantissa format in the low bits, left by `shift`."""
    code = np.arange(256) >> shift
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    significand = mantissa + ((exponent > 0) << mantissa_bits)
    value = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    value[np.isin(code, nan)] = np.nan
    value[np.isin(code, inf)] = np.inf
    return np.where(code >> (exponent_bits + mantissa_bits) & 1, -value, value).astype(np.float32)


def _unsigned(table: np.ndarray) -> np.ndarray:
    """The table with the sign bit ignored (ue4m3 is a 7-bit type; MMA-Sim drops bit 7)."""
    return table[np.arange(256) & 0x7F]


# byte -> float32; PTX ISA 5.2.3 and the OCP 8-bit and microscaling formats
BYTE_TABLES: dict[str, np.ndarray] = {
    "e4m3": _float_table(4, 3, nan=(0x7F, 0xFF)),
    "e5m2": _float_table(5, 2, nan=(0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF), inf=(0x7C, 0xFC)),
    "ue4m3": _unsigned(_float_table(4, 3, nan=(0x7F, 0xFF))),
    "ue8m0": np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32),
    "u8": np.arange(256, dtype=np.float32),
    "s8": np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32),
    # one element in an 8-bit container: 6-bit types in bits 5:0, e2m1 in bits 5:2 [MMA-Sim; PTX ISA 9.7.16.10.4.3]
    "e2m3": _float_table(2, 3)[np.arange(256) & 0x3F],
    "e3m2": _float_table(3, 2)[np.arange(256) & 0x3F],
    "e2m1": _float_table(2, 1, shift=2)[np.arange(256) & 0x3F],
}
E2M1 = _float_table(2, 1)[:16]  # value of each nibble
_E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], 1).view(np.uint64).ravel()

# exponent below which a format has subnormals; zero and subnormal elements are aligned with it
MIN_EXPONENT = {"f32": -126, "bf16": -126, "tf32": -126, "f16": -14, "e5m2": -14, "e4m3": -6, "e3m2": -2, "e2m3": 0,
                "e2m1": 0}


def _scale_exponents(fmt: str, smallest: int) -> np.ndarray:
    table = BYTE_TABLES[fmt].astype(np.float64)
    return np.where(np.isnan(table), 0, np.maximum(np.frexp(table)[1] - 1, smallest)).astype(np.int32)


SCALE_EXPONENTS = {"ue4m3": _scale_exponents("ue4m3", -6), "ue8m0": _scale_exponents("ue8m0", -127)}


def decode_packed_e2m1(raw: np.ndarray) -> np.ndarray:
    """uint8[..., n] holding two e2m1 a byte, low nibble first -> float32[..., 2 n]."""
    return _E2M1_PAIRS.take(raw).view(np.float32)


def decode_padded(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Shared-memory form of sub-byte elements of kind f8f6f4 (PTX ISA 9.7.16.10.4.4): 16 elements packed at the
    start of every 16 bytes. uint8[..., 16 n] -> float32[..., 16 n]; fmt e2m1, e2m3 or e3m2."""
    chunks = raw.reshape(*raw.shape[:-1], -1, 16)
    if fmt == "e2m1":
        return decode_packed_e2m1(np.ascontiguousarray(chunks[..., :8])).reshape(raw.shape)
    return BYTE_TABLES[fmt].take(unpack_6bit(chunks)).reshape(raw.shape)


def unpack_6bit(chunks: np.ndarray) -> np.ndarray:
    """uint8[..., 16] whose first 12 bytes are 16 elements of 6 bits, lowest bits first -> uint8[..., 16], one each."""
    triples = chunks[..., :12].reshape(*chunks.shape[:-1], 4, 3).astype(np.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    six = word[..., None] >> np.array([0, 6, 12, 18], np.uint32) & np.uint32(0x3F)
    return six.astype(np.uint8).reshape(*chunks.shape[:-1], 16)


def decode(raw: np.ndarray, fmt: str) -> np.ndarray:
    """Elements of whole bytes: uint8[..., bytes] -> float32[..., elements].

    fmt: f16, bf16, tf32 (the low 13 bits of its 32 are dropped), or a name of BYTE_TABLES (one element a byte).
    """
    if fmt == "f16":
        return raw.view(np.float16).astype(np.float32)
    if fmt == "bf16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if fmt == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return BYTE_TABLES[fmt].take(raw)


def canonical_nan(x: np.ndarray) -> np.ndarray:
    """Replace, in place, every NaN of a float32 or float16 array by the tensor core's; returns x."""
    nans = np.isnan(x)
    if nans.any():
        half = x.dtype == np.float16
        x.view(np.uint16 if half else np.uint32)[nans] = NAN16 if half else NAN32
    return x


def block_scaled_fast(a: np.ndarray, b: np.ndarray, sfa: np.ndarray, sfb: np.ndarray, c: np.ndarray | None,
                      scale_format: str) -> np.ndarray:
    """D = (A * SFA) (B * SFB)^T + C of one or more MMAs in one matrix product.

    a: float32[M, K], b: float32[N, K], element values; sfa: uint8[M, G], sfb: uint8[N, G], raw scale factors of
    K / G elements each; c: float32[M, N] or None; scale_format: ue4m3 or ue8m0. Returns float32[M, N].

    Scaled e2m1, e4m3, ... are exact in float32; scale factors beyond 2**+-60 (ue8m0 only) are multiplied in
    float64. Bound: let S = |C| + sum over k of |a sfa b sfb| for one element of D, and let the K elements be those
    of n MMAs of kind mxf4 or mxf4nvf4. Then |fast - exact| <= (K + 4 n + 4) 2**-24 S + n 2**-148, where exact is n
    calls of `block_scaled_exact`: float32 sums K + 1 terms with relative error 2**-24 each, the exact MMA loses less
    than one unit in the 24th place by its final rounding and less than 5 * 2**-27 S in its alignment (a non-zero
    group of products is at least 2**-8 of its alignment unit). It holds while no sum overflows.
    """
    if scale_format == "ue8m0" and _extreme(sfa, sfb):
        a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        d = _scaled(a, sfa, scale_format) @ _scaled(b, sfb, scale_format).T
        if c is not None:
            d += c
        return canonical_nan(d.astype(np.float32, copy=False))


def _extreme(*scales: np.ndarray) -> bool:
    return any(s.max() > 187 or s.min() < 67 for s in scales)


def _scaled(x: np.ndarray, scales: np.ndarray, fmt: str) -> np.ndarray:
    """x: float[R, K] times the scale factor of each of its K / G elements, scales: uint8[R, G]."""
    rows, groups = scales.shape
    factors = BYTE_TABLES[fmt].take(scales)
    return (x.reshape(rows, groups, -1) * factors[:, :, None]).reshape(x.shape)


def block_scaled_exact(a: np.ndarray, b: np.ndarray, sfa: np.ndarray, sfb: np.ndarray, c: np.ndarray,
                       scale_format: str) -> np.ndarray:
    """One MMA of kind mxf4 or mxf4nvf4, bit for bit as measured (MMA-Sim, `gst_fdpa`).

    a: float32[M, 64], b: float32[N, 64] of e2m1 values; sfa: uint8[M, G], sfb: uint8[N, G] with G 2 or 4;
    c: float32[M, N]. Returns float32[M, N].

    Each of the 4 groups of 16 products is summed exactly. The largest exponent E is taken over the groups' scale
    exponents (the size of the sum does not matter; a group whose products are all zero counts as -139) and C's;
    every term is truncated to 35 fractional bits at 2**E; their sum is rounded toward zero to float32.
    """
    va, ea = _scaled_groups(a, sfa, scale_format)
    vb, eb = _scaled_groups(b, sfb, scale_format)
    with np.errstate(invalid="ignore", over="ignore"):
        terms = np.matmul(va, vb.transpose(0, 2, 1))
        present = np.matmul((va != 0).astype(np.float32), (vb != 0).astype(np.float32).transpose(0, 2, 1))
        exponents = ea[:, :, None] + eb[:, None, :]
        np.copyto(exponents, ZERO_GROUPS, where=present == 0)
        largest = np.maximum(exponents.max(axis=0), alignment_exponents(c, "f32", ZERO_GROUPS))
        unit = np.ldexp(1.0, FRACTION_GROUPS - largest)
        terms *= unit
        total = np.trunc(terms, out=terms).sum(axis=0)
        total += np.trunc(c * unit)
        return round_toward_zero(total / unit)


def _scaled_groups(x: np.ndarray, scales: np.ndarray, fmt: str) -> tuple[np.ndarray, np.ndarray]:
    """float64[4, R, 16], the elements of each group of 16 times their scale factor, and int32[4, R], its exponent."""
    rows, given = scales.shape
    scales = scales if given * GROUP == x.shape[1] else np.repeat(scales, x.shape[1] // GROUP // given, axis=1)
    factors = BYTE_TABLES[fmt].take(scales).astype(np.float64)
    values = x.reshape(rows, -1, GROUP) * factors[:, :, None]
    return values.transpose(1, 0, 2), SCALE_EXPONENTS[fmt].take(scales).T


def alignment_exponents(x: np.ndarray, fmt: str, zero: int) -> np.ndarray:
    """int32, x's shape: floor(log2 |x|), not below the format's subnormal exponent; `zero` where x is 0. The value at
    NaN and infinity is of no consequence: they decide the result whatever the alignment."""
    with np.errstate(invalid="ignore"):
        exponents = np.maximum(np.frexp(x)[1] - 1, MIN_EXPONENT[fmt])
    return np.where(x == 0, zero, exponents)


def dense_fast(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """D = A B^T + C of one or more dense floating-point MMAs in one float32 matrix product.

    a: float32[M, K], b: float32[N, K], element values; c: float32[M, N] or None. Returns float32[M, N].

    Bound, for elements that are zero or normal in their format, K elements of n MMAs, S = |C| + sum of |a b|:
    |fast - n calls of fused_exact| <= (1.5 K + 4 n + 4) 2**-24 S + n 2**-148 (K + 1 float32 roundings; in the exact
    MMA, K + 1 truncations of 2**-25 of the largest term and one unit in the 24th place at the end).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        d = a @ b.T
        if c is not None:
            d += c
        return canonical_nan(d)


def integer_dot(a: np.ndarray, b: np.ndarray, c: np.ndarray, saturate: bool) -> np.ndarray:
    """D = A B^T + C of kind i8. a: float32[M, K], b: float32[N, K], integers of 8 bits; c: int32[M, N]. Returns
    int32[M, N], clamped if `saturate`, else modulo 2**32 [inferred]."""
    total = (a.astype(np.float64) @ b.T.astype(np.float64)).astype(np.int64) + c
    if saturate:
        total = np.clip(total, -(2**31), 2**31 - 1)
    return total.astype(np.int32)


def fused_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray, a_format: str, b_format: str,
                sfa: np.ndarray | None = None, sfb: np.ndarray | None = None,
                fraction: int = FRACTION_PRODUCTS) -> np.ndarray:
    """One MMA of kind f16, tf32, f8f6f4 or (with ue8m0 scales) mxf8f6f4, bit for bit as measured (MMA-Sim, `t_fdpa`,
    `st_fdpa`).

    a: float32[M, K], b: float32[N, K], element values; sfa: uint8[M], sfb: uint8[N], one scale factor a row, or None;
    c: float32[M, N] or float16[M, N]. Returns c's type: float32 rounded toward zero, or float16 rounded to nearest.

    The K products and C are truncated to `fraction` fractional bits at the largest exponent among them, then added.
    """
    half = c.dtype == np.float16
    va, ea = _columns(a, a_format, sfa)
    vb, eb = _columns(b, b_format, sfb)
    zero = ZERO_F16 if half else ZERO_F32
    largest = alignment_exponents(c, "f16" if half else "f32", zero)
    scratch = np.empty(c.shape, np.int32)
    for k in range(len(va)):
        np.maximum(largest, np.add.outer(ea[k], eb[k], out=scratch), out=largest)
    unit = np.ldexp(1.0, fraction - largest)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.trunc(c * unit)
        product = np.empty(c.shape, np.float64)
        for k in range(len(va)):
            np.multiply.outer(va[k], vb[k], out=product)
            product *= unit
            total += np.trunc(product, out=product)
        total /= unit
        return canonical_nan(total.astype(np.float16) + np.float16(0)) if half else round_toward_zero(total)


def _columns(x: np.ndarray, fmt: str, scales: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """float64[K, R] values times their row's scale and int32[K, R] alignment exponents."""
    with np.errstate(invalid="ignore"):
        values = np.ascontiguousarray(x.T, np.float64)
    exponents = alignment_exponents(values, fmt, _NEVER).astype(np.int32)
    if scales is not None:
        values *= BYTE_TABLES["ue8m0"].take(scales)
        exponents += SCALE_EXPONENTS["ue8m0"].take(scales)
    return values, exponents


def round_toward_zero(x: np.ndarray) -> np.ndarray:
    """float64 -> float32 by truncation, subnormals kept, -0 turned into +0, NaN made canonical; a magnitude of 2**128
    or more becomes infinity (as MMA-Sim does; not measured)."""
    out = (x.view(np.int64) & ~0x1FFFFFFF).view(np.float64)
    tiny = np.abs(x) < 2.0**-126
    if tiny.any():
        out[tiny] = np.trunc(x[tiny] * 2.0**149) * 2.0**-149
    with np.errstate(over="ignore"):
        return canonical_nan(out.astype(np.float32) + np.float32(0))
