"""vgpu.numerics against independent oracles: torch's 8-bit types, exact integers, and MMA-Sim (bit for bit)."""

import numpy as np
import pytest
import torch
from mmasim.nv_ptx import TCGen05MMA, TCGen05MMABlockScale

from vgpu import numerics as nx

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SCALE_TORCH = {"ue4m3": torch.float8_e4m3fn, "ue8m0": torch.float8_e8m0fnu}
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
         "e5m2": torch.float8_e5m2}


def bits(x):
    return np.ascontiguousarray(x).view(np.uint16 if x.dtype == np.float16 else np.uint32)


def assert_same_bits(got, want):
    assert got.dtype == want.dtype
    wrong = np.argwhere(bits(got) != bits(want))
    assert not len(wrong), f"{len(wrong)} of {got.size}, first {wrong[0]}: {got[tuple(wrong[0])]!r}"


# ------------------------------------------------------------------------------------------- formats

@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2),
                                         ("ue8m0", torch.float8_e8m0fnu)])
def test_byte_tables_agree_with_torch(name, dtype):
    want = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    np.testing.assert_array_equal(nx.BYTE_TABLES[name], want)


def test_ue4m3_ignores_the_sign_bit():
    table = nx.BYTE_TABLES["ue4m3"]
    np.testing.assert_array_equal(table[128:], table[:128])
    np.testing.assert_array_equal(table[:128], nx.BYTE_TABLES["e4m3"][:128])
    assert np.isnan(table[[0x7F, 0xFF]]).all() and np.isnan(table).sum() == 2


def small_float(code, exponent_bits, mantissa_bits):
    """Value of a sign-exponent-mantissa code without infinities, from the definition."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) & 1 else 1
    e = code >> mantissa_bits & (2**exponent_bits - 1)
    fraction = (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
    bias = 2 ** (exponent_bits - 1) - 1
    return sign * (fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias))


@pytest.mark.parametrize("name, e, m, shift", [("e2m3", 2, 3, 0), ("e3m2", 3, 2, 0), ("e2m1", 2, 1, 2)])
def test_containers_of_sub_byte_types(name, e, m, shift):
    width = 1 + e + m
    for code in range(2**width):
        assert nx.BYTE_TABLES[name][code << shift] == small_float(code, e, m)


def test_packed_e2m1_takes_the_low_nibble_first():
    raw = np.array([[0x21, 0xF7]], np.uint8)
    np.testing.assert_array_equal(nx.decode_packed_e2m1(raw), np.array([[0.5, 1.0, 6.0, -6.0]], np.float32))
    every = nx.decode_packed_e2m1(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(every[0::2], np.tile(E2M1 + [-x for x in E2M1], 16))


@pytest.mark.parametrize("name, width, e, m", [("e2m1", 4, 2, 1), ("e2m3", 6, 2, 3), ("e3m2", 6, 3, 2)])
def test_padded_groups_of_sixteen(name, width, e, m):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 2**width, (3, 32))
    raw = np.full((3, 32), 0xA5, np.uint8)  # the padding is not zero
    for row in range(3):
        for group in range(2):
            word = sum(int(c) << (width * i) for i, c in enumerate(codes[row, 16 * group:16 * group + 16]))
            packed = word.to_bytes(2 * width, "little")
            raw[row, 16 * group:16 * group + len(packed)] = list(packed)
    want = np.vectorize(lambda c: small_float(int(c), e, m))(codes)
    np.testing.assert_array_equal(nx.decode_padded(raw, name), want)


def test_sixteen_and_thirty_two_bit_types_agree_with_torch():
    codes = np.arange(65536, dtype=np.uint16)
    for name in ("f16", "bf16"):
        want = torch.from_numpy(codes.view(np.int16)).view(TORCH[name]).float().numpy()
        np.testing.assert_array_equal(nx.decode(codes.view(np.uint8), name), want)
    x = np.array([1.0, 1 + 2**-10, 1 + 2**-11, -(1 + 2**-10 + 2**-23)], np.float32)
    np.testing.assert_array_equal(nx.decode(x.view(np.uint8), "tf32"),
                                  np.array([1.0, 1 + 2**-10, 1.0, -(1 + 2**-10)], np.float32))


def test_integers():
    raw = np.array([0, 127, 128, 255], np.uint8)
    np.testing.assert_array_equal(nx.decode(raw, "u8"), [0, 127, 128, 255])
    np.testing.assert_array_equal(nx.decode(raw, "s8"), [0, 127, -128, -1])


# ------------------------------------------------------------------------------------------- block scaled

def nvfp4_oracle(a, b, sfa, sfb, c, fmt):
    """a, b: e2m1 codes [rows, 64]; sfa, sfb: bytes."""
    block = 64 // sfa.shape[1]
    kind = "mxf4nvf4" if block == 16 else "mxf4"
    sim = TCGen05MMABlockScale(
        "Blackwell", f"m128n{len(b)}k64.kind::{kind}.block{block}.f32.e2m1.e2m1.{fmt}")
    pack = [torch.from_numpy((x[:, 0::2] << 4 | x[:, 1::2]).astype(np.uint8)) for x in (a, b)]
    scales = [torch.from_numpy(np.ascontiguousarray(s)).view(SCALE_TORCH[fmt]) for s in (sfa, sfb)]
    return sim(pack[0], pack[1].T, torch.from_numpy(c), scales[0], scales[1].T).numpy()


def random_c(rng, shape, low, high):
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(low, high, shape)).astype(np.float32)


def nvfp4_case(case, rng, fmt, groups, n, tame=False):
    """Codes, scale bytes and C of one named situation; tame: no product of ue8m0 factors leaves float32."""
    a, b = rng.integers(0, 16, (128, 64), dtype=np.uint8), rng.integers(0, 16, (n, 64), dtype=np.uint8)
    top = 0x7E if fmt == "ue4m3" else 0xFE
    sfa, sfb = (rng.integers(0, top + 1, (rows, groups), dtype=np.uint8) for rows in (128, n))
    if tame and fmt == "ue8m0":
        sfa, sfb = sfa // 2 + 32, sfb // 2 + 32
    c = random_c(rng, (128, n), -20, 20)
    if case == "sign bits of the scales" and fmt == "ue4m3":
        sfa, sfb = sfa | 0x80 & rng.integers(0, 256, sfa.shape, np.uint8), sfb | 0x80
        sfa[sfa == 0xFF], sfb[sfb == 0xFF] = 0x80, 0x80
    elif case == "subnormal scales":
        sfa, sfb = sfa & 7, sfb & 7
    elif case == "extreme scales":
        sfa, sfb = (np.where(rng.random(s.shape) < 0.5, s % 3, top - s % 3).astype(np.uint8) for s in (sfa, sfb))
    elif case == "nan scales":
        sfa[rng.random(sfa.shape) < 0.02] = 0xFF
        sfb[rng.random(sfb.shape) < 0.02] = top + 1
    elif case == "mostly zeros":
        a[rng.random(a.shape) < 0.95] &= 8
        c[:, ::2] = 0
    elif case == "zero c":
        c[:] = 0
    elif case == "any c":
        c = rng.integers(0, 2**32, c.shape, np.uint64).astype(np.uint32).view(np.float32)
    elif case == "subnormal c":
        c = (rng.integers(0, 2**24, c.shape) | rng.integers(0, 2, c.shape) << 31).astype(np.uint32).view(np.float32)
        sfa, sfb = sfa & 3, sfb & 3
    elif case == "cancellation":
        c = -nvfp4_oracle(a, b, sfa, sfb, np.zeros_like(c), fmt)
    return a, b, sfa, sfb, c


CASES = ["random", "sign bits of the scales", "subnormal scales", "extreme scales", "nan scales", "mostly zeros",
         "zero c", "any c", "subnormal c", "cancellation"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("fmt, groups", [("ue4m3", 4), ("ue8m0", 4), ("ue8m0", 2)])
def test_exact_block_scaled_is_mmasim(fmt, groups, case):
    rng = np.random.default_rng(CASES.index(case))
    a, b, sfa, sfb, c = nvfp4_case(case, rng, fmt, groups, 40)
    want = nvfp4_oracle(a, b, sfa, sfb, c, fmt)
    got = nx.block_scaled_exact(nx.E2M1[a], nx.E2M1[b], sfa, sfb, c, fmt)
    assert_same_bits(got, want)
    if case == "nan scales":
        assert 0 < np.isnan(got).sum() < got.size
        assert set(bits(got)[np.isnan(got)]) == {0x7FFFFFFF}


def test_exact_chain_rounds_once_per_instruction():
    rng = np.random.default_rng(7)
    a, b, sfa, sfb, c = nvfp4_case("random", rng, "ue4m3", 4, 24)
    want, got = c, c
    for step in range(5):
        a, b = np.roll(a, step, 1), np.roll(b, 3 * step, 1)
        want = nvfp4_oracle(a, b, sfa, sfb, want, "ue4m3")
        got = nx.block_scaled_exact(nx.E2M1[a], nx.E2M1[b], sfa, sfb, got, "ue4m3")
    assert_same_bits(got, want)


def magnitude(a, b, sfa, sfb, c, fmt):
    """S of the fast modes' bound, in float64."""
    scaled = [np.abs(x.reshape(len(x), s.shape[1], -1) * nx.BYTE_TABLES[fmt].astype(np.float64)[s][:, :, None])
              .reshape(len(x), -1) for x, s in ((a, sfa), (b, sfb))]
    return np.abs(c.astype(np.float64)) + scaled[0] @ scaled[1].T


@pytest.mark.parametrize("case", ["random", "subnormal scales", "mostly zeros", "cancellation", "subnormal c"])
@pytest.mark.parametrize("fmt, groups", [("ue4m3", 4), ("ue8m0", 4), ("ue8m0", 2)])
@pytest.mark.parametrize("count", [1, 4])
def test_fast_block_scaled_keeps_its_bound(fmt, groups, case, count):
    rng = np.random.default_rng(11)
    parts = [nvfp4_case(case, rng, fmt, groups, 40, tame=True) for _ in range(count)]
    a, b = (np.concatenate([nx.E2M1[p[i]] for p in parts], 1) for i in (0, 1))
    sfa, sfb = (np.concatenate([p[i] for p in parts], 1) for i in (2, 3))
    c = exact = parts[0][4]
    for i in range(count):
        k, g = slice(64 * i, 64 * i + 64), slice(groups * i, groups * i + groups)
        exact = nx.block_scaled_exact(a[:, k], b[:, k], sfa[:, g], sfb[:, g], exact, fmt)
    fast = nx.block_scaled_fast(a, b, sfa, sfb, c, fmt)
    assert np.isfinite(exact).all() and np.isfinite(fast).all()
    bound = (64 * count + 4 * count + 4) * 2.0**-24 * magnitude(a, b, sfa, sfb, c, fmt) + count * 2.0**-148
    error = np.abs(fast.astype(np.float64) - exact)
    assert (error <= bound).all()
    assert case != "random" or (error > bound / 500).any()  # the bound is not idle


def test_fast_block_scaled_survives_extreme_ue8m0_factors():
    a = b = np.full((128, 64), 6.0, np.float32)
    sfa, sfb = np.full((128, 2), 254, np.uint8), np.full((128, 2), 0, np.uint8)  # 2**127 and 2**-127
    d = nx.block_scaled_fast(a, b, sfa, sfb, None, "ue8m0")
    np.testing.assert_array_equal(d, np.float32(64 * 36))


@pytest.mark.parametrize("exact", [False, True])
def test_a_nan_scale_poisons_its_row_or_column_and_nothing_else(exact):
    rng = np.random.default_rng(3)
    a, b = nx.E2M1[rng.integers(0, 16, (128, 64))], nx.E2M1[rng.integers(0, 16, (32, 64))]
    sfa, sfb = rng.integers(40, 70, (128, 4)).astype(np.uint8), rng.integers(40, 70, (32, 4)).astype(np.uint8)
    sfa[5, 2], sfb[17, 0] = 0x7F, 0xFF
    c = np.ones((128, 32), np.float32)
    d = (nx.block_scaled_exact if exact else nx.block_scaled_fast)(a, b, sfa, sfb, c, "ue4m3")
    want = np.zeros((128, 32), bool)
    want[5], want[:, 17] = True, True
    np.testing.assert_array_equal(np.isnan(d), want)
    assert (bits(d)[want] == 0x7FFFFFFF).all()


def test_a_nan_in_c_stays_where_it_is():
    a, sf, c = np.ones((128, 64), np.float32), np.full((128, 4), 0x38, np.uint8), np.zeros((128, 128), np.float32)
    c[3, 4] = np.nan
    for d in (nx.block_scaled_exact(a, a, sf, sf, c, "ue4m3"), nx.block_scaled_fast(a, a, sf, sf, c, "ue4m3")):
        assert bits(d)[3, 4] == 0x7FFFFFFF and np.isnan(d).sum() == 1


# ------------------------------------------------------------------------------------------- one product a term

def codes(rng, fmt, shape):
    width = {"f16": 16, "bf16": 16, "tf32": 32}.get(fmt, 8)
    return rng.integers(0, 2**width, shape, np.uint64).astype(f"u{width // 8}")


def finite(raw, fmt):
    """Clear an exponent bit of the codes that are infinite or NaN."""
    bit = {"f16": 0x400, "bf16": 0x80, "tf32": 1 << 23, "e5m2": 0x04, "e4m3": 0x08}.get(fmt, 0)
    return np.where(np.isfinite(values(raw, fmt)), raw, raw & ~raw.dtype.type(bit))


def values(raw, fmt):
    return nx.decode(np.ascontiguousarray(raw).view(np.uint8), fmt)


def as_torch(raw, fmt):
    signed = torch.from_numpy(raw.view({1: np.uint8, 2: np.int16, 4: np.int32}[raw.itemsize]))
    return signed.view(TORCH[fmt]) if fmt in TORCH else signed


F8 = ["e4m3", "e5m2", "e2m3", "e3m2", "e2m1"]
DENSE = [("f16", 16, "f32", "f16", "f16"), ("f16", 16, "f32", "bf16", "bf16"), ("f16", 16, "f16", "f16", "f16"),
         ("tf32", 8, "f32", "tf32", "tf32")]
DENSE += [("f8f6f4", 32, d, a, b) for d in ("f32", "f16") for a, b in zip(F8, F8[1:] + F8[:1], strict=True)]


@pytest.mark.parametrize("case", ["any", "finite", "small", "zero c"])
@pytest.mark.parametrize("kind, k, d, fa, fb", DENSE)
def test_exact_dense_is_mmasim(kind, k, d, fa, fb, case):
    rng = np.random.default_rng(k)
    a, b = codes(rng, fa, (64, k)), codes(rng, fb, (24, k))
    if d == "f16":
        c = rng.integers(0, 65536, (64, 24)).astype(np.uint16).view(np.float16)
    else:
        c = rng.integers(0, 2**32, (64, 24), np.uint64).astype(np.uint32).view(np.float32)
    if case != "any":
        a, b, c = finite(a, fa), finite(b, fb), np.nan_to_num(c, nan=1.0, posinf=2.0, neginf=-2.0)
    if case == "small":
        a = a & {"f16": 0x83FF, "bf16": 0x9FFF, "tf32": 0x9FFFFFFF}.get(fa, 0x87)
        c = (c * (2.0**-12 if d == "f16" else 2.0**-60)).astype(c.dtype)
    if case == "zero c":
        c = np.zeros_like(c)
    sim = TCGen05MMA("Blackwell", f"m64n24k{k}.kind::{kind}.{d}.{fa}.{fb}")
    want = sim(as_torch(a, fa), as_torch(b, fb).T, torch.from_numpy(c)).numpy()
    assert_same_bits(nx.fused_exact(values(a, fa), values(b, fb), c, fa, fb), want)


@pytest.mark.parametrize("fmt, d, a, b, rounded", [
    ("bf16", "f32", [2.0**-75, 2.0**-80], [2.0**-74, -(2.0**-80)], 2.0**-149),
    ("f16", "f16", [2.0**-12, 2.0**-24], [2.0**-13, 2.0**-24], 0.0)])
def test_zeros_set_the_alignment(fmt, d, a, b, rounded):
    """A zero C counts as 2**-133 (float16: 2**-21): the second product falls below its 25 fractional bits, which the
    rounding at the edge of the subnormal numbers makes visible."""
    rows = [np.pad(np.array(x, np.float32), (0, 14))[None].repeat(n, 0) for x, n in ((a, 64), (b, 8))]
    c = np.zeros((64, 8), np.float16 if d == "f16" else np.float32)
    sim = TCGen05MMA("Blackwell", f"m64n8k16.kind::f16.{d}.{fmt}.{fmt}")
    want = sim(*(torch.from_numpy(x).to(TORCH[fmt]) for x in (rows[0], rows[1].T.copy())), torch.from_numpy(c)).numpy()
    got = nx.fused_exact(*rows, c, fmt, fmt)
    assert_same_bits(got, want)
    assert (got == c.dtype.type(rounded)).all()


@pytest.mark.parametrize("fa, fb", [(a, b) for a in F8 for b in F8])
def test_exact_mxf8f6f4_is_mmasim(fa, fb):
    rng = np.random.default_rng(5)
    a, b = codes(rng, fa, (128, 32)), codes(rng, fb, (24, 32))
    if fa in ("e4m3", "e5m2"):
        a[::2] = finite(a[::2], fa)
    b = finite(b, fb)
    sfa, sfb = rng.integers(0, 256, (128, 1)).astype(np.uint8), rng.integers(0, 256, (24, 1)).astype(np.uint8)
    c = random_c(rng, (128, 24), -100, 100)
    sim = TCGen05MMABlockScale("Blackwell", f"m128n24k32.kind::mxf8f6f4.block32.f32.{fa}.{fb}.ue8m0")
    scales = [torch.from_numpy(s).view(torch.float8_e8m0fnu) for s in (sfa, sfb)]
    want = sim(as_torch(a, fa), as_torch(b, fb).T, torch.from_numpy(c), scales[0], scales[1].T).numpy()
    got = nx.fused_exact(values(a, fa), values(b, fb), c, fa, fb, sfa[:, 0], sfb[:, 0])
    assert_same_bits(got, want)
    assert np.isfinite(got).any()


@pytest.mark.parametrize("fmt, k", [("f16", 16), ("bf16", 16), ("tf32", 8), ("e4m3", 32)])
@pytest.mark.parametrize("count", [1, 4])
def test_fast_dense_keeps_its_bound(fmt, k, count):
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((rows, k * count)) * 2.0 ** rng.integers(-3, 4, (rows, k * count)) for rows in (64, 48))
    if fmt == "e4m3":
        a, b = (torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy() for x in (a, b))
        a, b = (np.where(np.abs(x) < 2.0**-6, 0, x).astype(np.float32) for x in (a, b))
    else:
        raw = [x.astype(np.float32).view(np.uint32) for x in (a, b)]
        keep = {"f16": 0xFFFFE000, "bf16": 0xFFFF0000, "tf32": 0xFFFFE000}[fmt]
        a, b = ((x & np.uint32(keep)).view(np.float32) for x in raw)
    c = exact = random_c(rng, (64, 48), -10, 10)
    for i in range(count):
        exact = nx.fused_exact(a[:, k * i:k * i + k], b[:, k * i:k * i + k], exact, fmt, fmt)
    size = np.abs(c).astype(np.float64) + np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64).T
    error = np.abs(nx.dense_fast(a, b, c).astype(np.float64) - exact)
    bound = (1.5 * k * count + 4 * count + 4) * 2.0**-24 * size + count * 2.0**-148
    assert (error <= bound).all()
    assert (error > bound / 500).any()


# ------------------------------------------------------------------------------------------- rounding, integers

def test_round_toward_zero_against_its_neighbours():
    rng = np.random.default_rng(9)
    x = rng.standard_normal(20000) * 2.0 ** rng.integers(-152, 127, 20000)
    x[:4] = [2.0**-149, 2.0**-150, -(2.0**-126) * (1 - 2.0**-30), 2.0**128 * (1 - 2.0**-26)]
    got = nx.round_toward_zero(x)
    with np.errstate(over="ignore"):
        above = np.nextafter(np.abs(got), np.float32(np.inf)).astype(np.float64)
    assert (np.abs(got).astype(np.float64) <= np.abs(x)).all() and (np.abs(x) < above).all()
    assert (np.sign(got) * np.sign(x) >= 0).all()
    assert bits(nx.round_toward_zero(np.array([-(2.0**-151), -0.0]))).tolist() == [0, 0]
    assert bits(nx.round_toward_zero(np.array([np.nan]))).tolist() == [0x7FFFFFFF]
    np.testing.assert_array_equal(nx.round_toward_zero(np.array([2.0**128, -np.inf])), [np.inf, -np.inf])


@pytest.mark.parametrize("saturate", [False, True])
def test_integer_dot_against_python_integers(saturate):
    rng = np.random.default_rng(1)
    a, b = rng.integers(-128, 128, (6, 32)), rng.integers(0, 256, (5, 32))
    c = rng.integers(-(2**31), 2**31, (6, 5)).astype(np.int32)
    c[0] = [2**31 - 1, -(2**31), 2**31 - 1000, -(2**31) + 1000, 0]
    got = nx.integer_dot(a.astype(np.float32), b.astype(np.float32), c, saturate)
    for i in range(6):
        for j in range(5):
            total = sum(int(x) * int(y) for x, y in zip(a[i], b[j], strict=True)) + int(c[i, j])
            want = min(max(total, -(2**31)), 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
            assert got[i, j] == want
