"""The tensor core of the virtual GPU: descriptors, operand layouts, MMA, tcgen05.cp and shift.

Layouts are checked against a plain evaluation, element by element, of the CuTe layouts that the PTX ISA prints
(9.7.16.3.3); products against float64 and against vgpu.numerics, which has its own tests.
"""

from dataclasses import replace

import numpy as np
import pytest

from vgpu import mma, numerics
from vgpu.descriptor import InstrDescriptor, SmemDescriptor, chunk_offsets, scale_vector
from vgpu.errors import VirtualGpuError
from vgpu.memory import BARRIER, CLEAN, GENERIC, UNWRITTEN, SharedMemory
from vgpu.mma import MmaOp, execute
from vgpu.tmem import TensorMemory
from vgpu.tmem_copy import CopyOp, copy_read_ranges, copy_tmem_ranges, decompress, execute_copy, execute_shift

# swizzle code -> CuTe Swizzle<B, M, S>, PTX ISA 9.7.16.3.3 and CUTLASS (code 1); bytes of an atom's row
SWIZZLE = {0: (0, 4, 3), 6: (1, 4, 3), 4: (2, 4, 3), 2: (3, 4, 3), 1: (2, 5, 2)}
WIDTH = {0: 16, 6: 32, 4: 64, 2: 128, 1: 128}


def fails(kind, match=None):
    """Context: the body raises a VirtualGpuError of this kind."""
    class Check:
        def __enter__(self):
            self.raises = pytest.raises(VirtualGpuError, match=match)
            self.info = self.raises.__enter__()

        def __exit__(self, *args):
            done = self.raises.__exit__(*args)
            assert self.info.value.kind == kind, str(self.info.value)
            return done
    return Check()


def encode(d):
    """The 64 bits of a shared-memory descriptor, by PTX ISA table 40."""
    return (d.start >> 4 | d.leading >> 4 << 16 | d.stride >> 4 << 32 | 1 << 46 | d.base_offset << 49
            | d.swizzle << 61)


# ------------------------------------------------------------------------------------------- reference layout

def cute(index, mode):
    """Offset of `index` in one mode [(size, stride), ...] of a CuTe layout."""
    offset = 0
    for size, stride in mode[:-1]:
        offset += index % size * stride
        index //= size
    return offset + index * mode[-1][1]


def address(d, mn, k, major, size=1):
    """Byte address of element (mn, k), of `size` bytes, by the canonical layouts of PTX ISA 9.7.16.3.3."""
    t, lbo, sbo = 16 // size, d.leading // size, d.stride // size
    w = WIDTH[d.swizzle] // 16
    if major == "K":
        modes = [(8, w * t), (0, sbo)], [(t, 1), (0, t if d.swizzle else lbo)]
    elif d.swizzle == 0:
        modes = [(t, 1), (1, t), (0, sbo)], [(8, t), (0, lbo)]
    else:
        modes = [(t, 1), (w, t), (0, lbo)], [(4 if d.swizzle == 1 else 8, w * t), (0, sbo)]
    linear = d.start + size * (cute(mn, modes[0]) + cute(k, modes[1]))
    b, m, s = SWIZZLE[d.swizzle]
    pattern = 128 * d.base_offset
    relative = linear - pattern
    return pattern + (relative ^ (relative & ((1 << b) - 1) << (m + s)) >> s)


@pytest.mark.parametrize("code", [0, 6, 4, 2])
@pytest.mark.parametrize("start, base", [(2048, 0), (2048 + 384, 3), (2048 + 32, 0)])
def test_k_major_layout_element_by_element(code, start, base):
    d = SmemDescriptor(start, 4096, 8 * WIDTH[code] + 1024, base, code)
    offsets = chunk_offsets(d, 24, 2, "K")
    for row in range(24):
        for byte in range(32):
            assert offsets[row, byte // 16] + byte % 16 == address(d, row, byte, "K")


@pytest.mark.parametrize("code", [0, 6, 4, 2, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_mn_major_layout_element_by_element(code, size):
    d = SmemDescriptor(2048, 5120, 2048, 0, code)
    mn = 256 // size
    offsets = chunk_offsets(d, 32 // size, 16, "MN")
    for k in range(32 // size):
        for i in range(mn):
            got = offsets[k, i * size // 16] + i * size % 16
            assert got == address(d, i, k, "MN", size)


def test_the_worked_examples_of_the_ptx_isa():
    """Exact layouts printed under figures 188 to 192, in elements, with their LBO and SBO."""
    def linear(rows, cols):
        return lambda i, j: cute(i, rows) + cute(j, cols)
    k0 = chunk_offsets(SmemDescriptor(1024, 64 * 4, 32 * 4, 0, 0), 16, 4, "K")  # tf32 ((8,2),(4,4)):((4,32),(1,64))
    exact = linear([(8, 4), (2, 32)], [(4, 1), (4, 64)])
    assert all(k0[i, j] == 1024 + 4 * exact(i, 4 * j) for i in range(16) for j in range(4))
    m0 = chunk_offsets(SmemDescriptor(1024, 128 * 2, 64 * 2, 0, 0), 16, 2, "MN")  # bf16, no swizzling
    exact = linear([(8, 1), (1, 8), (2, 64)], [(8, 8), (2, 128)])
    assert all(m0[k, j] == 1024 + 2 * exact(8 * j, k) for k in range(16) for j in range(2))
    m64 = chunk_offsets(SmemDescriptor(0, 256 * 2, 512 * 2, 0, 4), 16, 8, "MN")  # bf16, 64-byte swizzling
    exact = linear([(8, 1), (4, 8), (2, 256)], [(8, 32), (2, 512)])
    for k in range(16):
        for j in range(8):
            byte = 2 * exact(8 * j, k)
            assert m64[k, j] == byte ^ (byte >> 7 & 3) << 4


@pytest.mark.parametrize("code, steps", [(2, 4), (4, 2)])
def test_k_advance_inside_the_swizzle_atom(code, steps):
    """Adding the plain byte step to the start address walks along the row: together all its bytes, each once."""
    width = WIDTH[code]
    whole = chunk_offsets(SmemDescriptor(4096, 0, 8 * width, 0, code), 16, width // 16, "K")
    parts = [chunk_offsets(SmemDescriptor(4096 + 32 * i, 0, 8 * width, 0, code), 16, 2, "K") for i in range(steps)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert sorted(whole.ravel()) == list(range(4096, 4096 + 16 * width, 16))


def test_a_tile_that_starts_inside_the_pattern_uses_absolute_address_bits():
    d = SmemDescriptor(1024 + 128, 0, 1024, 0, 2)
    assert chunk_offsets(d, 1, 1, "K")[0, 0] == (1024 + 128) ^ 16
    shifted = replace(d, base_offset=1)
    assert chunk_offsets(shifted, 1, 1, "K")[0, 0] == 1024 + 128


# ------------------------------------------------------------------------------------------- descriptors

def test_smem_descriptor_fields():
    d = SmemDescriptor.decode(0x3A5B | 0x1234 << 16 | 0x2BCD << 32 | 1 << 46 | 5 << 49 | 4 << 61)
    assert d == SmemDescriptor(start=0x3A5B0, leading=0x12340, stride=0x2BCD0, base_offset=5, swizzle=4)


@pytest.mark.parametrize("bits, match", [
    (0, "bits 46-48"), (3 << 46, "bits 46-48"), (5 << 46, "bits 46-48"), (1 << 46 | 1 << 53, "bits 53-60"),
    (1 << 46 | 1 << 60, "bits 53-60"), (1 << 46 | 1 << 14, "14-15"), (1 << 46 | 1 << 31, "30-31"),
    (1 << 46 | 1 << 52, "sm_103a"), (1 << 46 | 3 << 61, "code 3"), (1 << 46 | 5 << 61, "code 5"),
    (1 << 46 | 7 << 61, "code 7"), (1 << 64, "64-bit")])
def test_illegal_smem_descriptors(bits, match):
    with fails("descriptor", match):
        SmemDescriptor.decode(bits)


def test_32_byte_atoms_are_for_mn_major_only():
    with fails("descriptor", "MN-major"):
        chunk_offsets(SmemDescriptor(1024, 0, 1024, 0, 1), 8, 2, "K")


def test_dense_instruction_descriptor_fields():
    value = 1 << 4 | 4 << 7 | 5 << 10 | 1 << 13 | 1 << 16 | 24 << 17 | 8 << 24
    d = InstrDescriptor.decode(value, "f8f6f4")
    assert (d.m, d.n, d.k, d.d_format, d.a_format, d.b_format) == (128, 192, 32, "f32", "e3m2", "e2m1")
    assert (d.negate_a, d.negate_b, d.transpose_a, d.transpose_b) == (True, False, False, True)
    d = InstrDescriptor.decode(1 << 3 | 2 << 4 | 1 << 10 | 1 << 15 | 4 << 17 | 4 << 24, "i8")
    assert (d.saturate, d.d_format, d.a_format, d.b_format, d.transpose_a, d.m) == (True, "s32", "u8", "s8", True, 64)


def test_block_scaled_instruction_descriptor_fields():
    value = 2 << 4 | 1 << 7 | 1 << 10 | 1 << 12 | 1 << 14 | 32 << 17 | 1 << 23 | 2 << 27 | 1 << 30
    d = InstrDescriptor.decode(value, "mxf4nvf4")  # bit 12 set: ignored
    assert (d.m, d.n, d.k, d.d_format, d.a_format, d.b_format) == (256, 256, 64, "f32", "e2m1", "e2m1")
    assert (d.scale_format, d.sfa_id, d.sfb_id, d.negate_a, d.negate_b) == ("ue8m0", 2, 2, False, True)
    d = InstrDescriptor.decode(3 << 4 | 3 << 7 | 5 << 10 | 1 << 15 | 2 << 17 | 1 << 23 | 1 << 27 | 1 << 29, "mxf8f6f4")
    assert (d.a_format, d.b_format, d.sfa_id, d.sfb_id, d.transpose_a, d.k, d.n) == ("e2m3", "e2m1", 1, 3, True, 32, 16)
    assert InstrDescriptor.decode(1 << 7 | 1 << 10 | 1 << 17 | 1 << 27, "mxf4nvf4").scale_format == "ue4m3"


NV = 1 << 7 | 1 << 10 | 16 << 17 | 1 << 27  # mxf4nvf4, M 128, N 128, ue4m3


@pytest.mark.parametrize("value, kind, fault, match", [
    (NV | 1 << 2, "mxf4nvf4", "unsupported", "sparse"), (NV | 1 << 31, "mxf4nvf4", "unsupported", "sm_103a"),
    (NV | 1, "mxf4nvf4", "descriptor", "bits 0-1"), (NV | 1 << 3, "mxf4nvf4", "descriptor", "bits 3-3"),
    (NV | 1 << 6, "mxf4nvf4", "descriptor", "bits 6-6"), (NV | 1 << 24, "mxf4nvf4", "descriptor", "bits 24-26"),
    (NV ^ 1 << 7 | 5 << 7, "mxf4nvf4", "descriptor", "type 5 of matrix A"),
    (NV | 2 << 10, "mxf4nvf4", "descriptor", "type 3 of matrix B"), (NV, "mxf4", "descriptor", "ue8m0"),
    (2 << 4, "f16", "descriptor", "type 2 of matrix D"), (1 << 4 | 2 << 7, "f16", "descriptor", "type 2 of matrix A"),
    (1 << 4, "tf32", "descriptor", "matrix A"), (1 << 7, "f16", "descriptor", "16-bit D"),
    (1 << 4 | 1 << 3, "f16", "descriptor", "saturation"), (2 << 4 | 1 << 13, "i8", "descriptor", "negated"),
    (1 << 4 | 1 << 23, "f16", "descriptor", "bits 23-23"),
    (1 << 4 | 1 << 30, "f16", "descriptor", "bits 30-31"), (1 << 4 | 2 << 7, "f8f6f4", "descriptor", "type 2"),
    (0, "f64", "unsupported", "f64"), (1 << 32, "f16", "descriptor", "32-bit")])
def test_illegal_instruction_descriptors(value, kind, fault, match):
    with fails(fault, match):
        InstrDescriptor.decode(value, kind)


def instr(kind, m, n, a="f16", b=None, **fields):
    """The 32-bit descriptor, from the tables of PTX ISA 9.7.16.4.2."""
    code = {"f16": 0, "bf16": 1, "tf32": 2, "u8": 0, "s8": 1, "e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5}
    fp4 = kind in ("mxf4", "mxf4nvf4")
    low = 1 << 7 | 1 << 10 if fp4 else code[a] << 7 | code[b or a] << 10
    get = fields.get
    low |= get("na", 0) << 13 | get("nb", 0) << 14 | get("ta", 0) << 15 | get("tb", 0) << 16 | n // 8 << 17
    if kind.startswith("mx"):
        return (low | get("sfb_id", 0) << 4 | get("ue8m0", 1) << 23 | m // 128 << 27 | get("sfa_id", 0) << 29)
    return low | get("d", 1) << 4 | get("saturate", 0) << 3 | m // 16 << 24


@pytest.mark.parametrize("kind, vec", [("f16", None), ("i8", None), ("mxf4nvf4", 4), ("mxf8f6f4", 1)])
def test_shape_table(kind, vec):
    """PTX ISA table 39, dense rows, for every M and N that the fields can say."""
    a = {"i8": "s8", "mxf8f6f4": "e4m3"}.get(kind, "f16")
    for group in (1, 2):
        for m in (64, 128, 192, 256):
            for n in range(0, 320, 8):
                if kind == "i8":
                    columns = (8, 16, 24, *range(32, 257, 16)) if group == 1 else range(32, 257, 32)
                else:
                    columns = range(8 * group, 257, 8 * group)
                rows = {1: (128,) if vec else (64, 128), 2: (128, 256)}[group]
                if vec and m % 128:
                    continue
                d = InstrDescriptor.decode(instr(kind, m, n, a, d=2 if kind == "i8" else 1), kind)
                if m in rows and n in columns:
                    d.check(group, vec)
                else:
                    with fails("descriptor"):
                        d.check(group, vec)


@pytest.mark.parametrize("kind, vec, fields, match", [
    ("mxf4nvf4", 1, {}, "scale_vec::1X"), ("mxf4", 4, {}, "scale_vec::4X"), ("mxf8f6f4", 2, {}, "scale_vec::2X"),
    ("f16", 4, {}, "scale_vec::4X"), ("mxf4nvf4", None, {}, "scale_vec"), ("mxf4nvf4", 2, {"ue8m0": 0}, "ue4m3"),
    ("mxf4nvf4", 4, {"sfa_id": 2}, "A id 2"), ("mxf4", 2, {"sfb_id": 1}, "B id 1"), ("mxf4", 2, {"ta": 1}, "transpose"),
    ("mxf4nvf4", 4, {"tb": 1}, "transpose"), ("f8f6f4", None, {"tb": 1}, "multiple of 16")])
def test_illegal_combinations(kind, vec, fields, match):
    n = 24 if kind == "f8f6f4" else 128
    d = InstrDescriptor.decode(instr(kind, 128, n, "e4m3" if "f8" in kind else "f16", **fields), kind)
    with fails("descriptor", match):
        d.check(1, vec)


def test_cta_group_must_be_one_or_two():
    with fails("descriptor", "cta_group::3"):
        InstrDescriptor.decode(NV, "mxf4nvf4").check(3, 4)


def test_scale_vector_qualifiers():
    """PTX ISA 9.7.16.10.7.1."""
    assert [scale_vector("mxf4nvf4", q) for q in ("scale_vec::4X", "block16")] == [4, 4]
    assert [scale_vector("mxf4nvf4", q) for q in ("scale_vec::2X", "block32")] == [2, 2]
    assert [scale_vector("mxf8f6f4", q) for q in (None, "scale_vec::1X", "block32")] == [1, 1, 1]
    assert scale_vector("mxf4", None) == 2 and scale_vector("f16", None) is None
    for kind, qualifier in (("mxf4nvf4", None), ("f16", "block16"), ("mxf4", "scale_vec::3X")):
        with fails("descriptor"):
            scale_vector(kind, qualifier)


# ------------------------------------------------------------------------------------------- operands for MMAs

A_START, B_START = 0x800, 0x10800  # in every CTA's window; both multiples of 2048
D_COLUMN, SFA, SFB, A_COLUMN = 0, 256, 288, 400


def small_values(fmt):
    """Code -> value of a small floating-point format, NaN where a code is not a number."""
    e, m = {"e4m3": (4, 3), "e5m2": (5, 2), "e2m3": (2, 3), "e3m2": (3, 2), "e2m1": (2, 1)}[fmt]
    bias, out = 2 ** (e - 1) - 1, []
    for code in range(2 ** (1 + e + m)):
        exponent, fraction = code >> m & (2**e - 1), (code & (2**m - 1)) / 2**m
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        special = (fmt == "e5m2" and exponent == 31) or (fmt == "e4m3" and code & 0x7F == 0x7F)
        out.append(np.nan if special else -value if code >> (e + m) else value)
    return np.array(out)


def operand(rng, kind, fmt, rows, ops=1):
    """(raw uint8[rows, 32 ops] as it lies in K-major shared memory, float64 values[rows, K ops])."""
    count = {"f16": 16, "tf32": 8, "mxf4": 64, "mxf4nvf4": 64}.get(kind, 32) * ops
    if fmt in ("f16", "bf16", "tf32"):
        values = rng.integers(-64, 65, (rows, count)) / 16
        words = values.astype(np.float16) if fmt == "f16" else values.astype(np.float32).view(np.uint32)
        return (words >> 16).astype(np.uint16).view(np.uint8) if fmt == "bf16" else words.view(np.uint8), values
    if fmt in ("u8", "s8"):
        raw = rng.integers(0, 256, (rows, count)).astype(np.uint8)
        return raw, raw.view(np.int8 if fmt == "s8" else np.uint8).astype(np.float64)
    table = small_values(fmt)
    codes = rng.choice(np.flatnonzero(np.abs(table) <= 6), (rows, count))
    if kind in ("mxf4", "mxf4nvf4"):
        return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8), table[codes]
    if fmt in ("e4m3", "e5m2"):
        return codes.astype(np.uint8), table[codes]
    return pad_groups(codes, 4 if fmt == "e2m1" else 6), table[codes]


def pad_groups(codes, width):
    """16 codes of `width` bits packed at the start of every 16 bytes, the rest filled with 0xA5."""
    out = np.full(codes.shape, 0xA5, np.uint8)
    for row, line in enumerate(codes):
        for g in range(0, len(line), 16):
            word = sum(int(c) << width * i for i, c in enumerate(line[g:g + 16]))
            out[row, g:g + 2 * width] = list(word.to_bytes(2 * width, "little"))
    return out


def put(smem, offset, data):
    smem.data[offset:offset + len(data)] = data
    smem.state[offset:offset + len(data)] = CLEAN


def store_k_major(smem, desc, raw):
    for row in range(len(raw)):
        for c in range(0, 32, 16):
            put(smem, address(desc, row, c, "K"), raw[row, c:c + 16])


def store_mn_major(smem, desc, raw, size):
    """raw: uint8[rows, 32] K-major elements of `size` bytes."""
    elements = raw.reshape(len(raw), -1, size)
    for row in range(elements.shape[0]):
        for k in range(elements.shape[1]):
            put(smem, address(desc, row, k, "MN", size), elements[row, k])


def memories(ctas, smem_bytes=0x20000):
    tmems = [TensorMemory() for _ in range(ctas)]
    for t in tmems:
        t.owner[:] = 0
    return [SharedMemory(smem_bytes, rank) for rank in range(ctas)], tmems


def k_major(start, code=2, op=0):
    """Packed tiles one after the other, as many MMAs in each as its swizzle width holds."""
    per = max(1, WIDTH[code] // 32)
    tile, step = divmod(op, per)
    return SmemDescriptor(start + 0x4000 * tile + 32 * step, 0x2000, 8 * WIDTH[code], 0, code)


def scale_bytes(rng, rows, count, ue8m0):
    return rng.integers(*((124, 131) if ue8m0 else (0x28, 0x48)), (rows, count)).astype(np.uint8)


def fill_scales(tmem, column, scales, byte=0, quadrants=(0, 1, 2, 3)):
    """Scale factors of one MMA, uint8[rows, factors]: PTX ISA 9.7.16.10.7.2, copied to these quadrants."""
    for row, factors in enumerate(scales):
        for w in quadrants:
            lane, col = 32 * w + row % 32, column + row // 32
            cell = tmem.cells[lane, col:col + 1].view(np.uint8)
            cell[byte:byte + len(factors)] = factors
            tmem.written[lane, col] = True


class Problem:
    """Random MMAs that accumulate into one D, with their memories and their operands' values."""

    def __init__(self, kind="mxf4nvf4", m=128, n=128, cta=1, ops=1, a="e2m1", b=None, code=2, vec=None, ue8m0=None,
                 **fields):
        self.kind, self.m, self.n, self.cta, self.vec = kind, m, n, cta, vec
        self.rng = rng = np.random.default_rng(0)
        self.smems, self.tmems = memories(cta)
        b = b or a
        self.a_raw, self.a = operand(rng, kind, a, m, ops)
        self.b_raw, self.b = operand(rng, kind, b, n, ops)
        self.ue8m0 = kind != "mxf4nvf4" if ue8m0 is None else ue8m0
        self.sfa = self.sfb = None
        self.ops = [MmaOp(kind, cta, D_COLUMN, encode(k_major(B_START, code, i)),
                          instr(kind, m, n, a, b, ue8m0=int(self.ue8m0), **fields),
                          a_desc=encode(k_major(A_START, code, i)), scale_vec=vec,
                          sfa_tmem=SFA + 4 * i if vec else None, sfb_tmem=SFB + 8 * i if vec else None,
                          accumulate=i > 0) for i in range(ops)]
        for i in range(ops):
            self.store("A", i, code)
            self.store("B", i, code)
        if vec:
            self.sfa, self.sfb = (scale_bytes(rng, rows, vec * ops, self.ue8m0) for rows in (m, n))
            for i in range(ops):
                self.put_scales(i)

    def store(self, name, i, code=2):
        raw, start = (self.a_raw, A_START) if name == "A" else (self.b_raw, B_START)
        rows = len(raw) // self.cta
        for v, smem in enumerate(self.smems):
            store_k_major(smem, k_major(start, code, i), raw[rows * v:rows * (v + 1), 32 * i:32 * i + 32])

    def put_scales(self, i, byte_a=0, byte_b=0):
        part = slice(self.vec * i, self.vec * i + self.vec)
        rows = self.m // self.cta
        for v, tmem in enumerate(self.tmems):
            fill_scales(tmem, SFA + 4 * i, self.sfa[rows * v:rows * (v + 1), part], byte_a)
            if self.cta == 2 and self.m == 128:
                half = self.n // 2
                for h in range(2):
                    fill_scales(tmem, SFB + 8 * i, self.sfb[half * h:half * (h + 1), part], byte_b, (2 * h, 2 * h + 1))
            else:
                fill_scales(tmem, SFB + 8 * i, self.sfb[:, part], byte_b)

    def run(self, exact=False):
        execute(self.ops, self.smems, self.tmems, exact)
        return self.d()

    def cells(self):
        """uint32[m, n]: the cells of D, gathered one by one as PTX ISA 9.7.16.10.5 draws them."""
        out = np.empty((self.m, self.n), np.uint32)
        for i in range(self.m):
            v, r = divmod(i, self.m // self.cta)
            if self.m == 64:
                lane = r % 16 + 32 * (r // 16) + (self.ops[0].d_tmem >> 16)
                out[i] = self.tmems[v].cells[lane, D_COLUMN:D_COLUMN + self.n]
            elif self.cta == 2 and self.m == 128:
                half = self.n // 2
                out[i, :half] = self.tmems[v].cells[r, D_COLUMN:D_COLUMN + half]
                out[i, half:] = self.tmems[v].cells[r + 64, D_COLUMN:D_COLUMN + half]
            else:
                out[i] = self.tmems[v].cells[r, D_COLUMN:D_COLUMN + self.n]
        return out

    def d(self):
        return self.cells().view(np.float32)

    def scaled(self):
        """A and B times their scale factors, float64."""
        if not self.vec:
            return self.a, self.b
        table = numerics.BYTE_TABLES["ue8m0" if self.ue8m0 else "ue4m3"].astype(np.float64)
        return tuple(np.repeat(table[s], x.shape[1] // s.shape[1], axis=1) * x
                     for x, s in ((self.a, self.sfa), (self.b, self.sfb)))

    def check(self, d, c=0.0):
        """D is A B^T + C up to the rounding of either mode."""
        a, b = self.scaled()
        want, size = a @ b.T + c, np.abs(a) @ np.abs(b).T + np.abs(c)
        np.testing.assert_array_less(np.abs(d - want), size * (a.shape[1] + 8) * 2.0**-23 + 1e-30)

    def exact(self, c=None):
        """What numerics computes from the values, one MMA after the other."""
        d = np.zeros((self.m, self.n), np.float32) if c is None else c
        k, idesc = self.a.shape[1] // len(self.ops), InstrDescriptor.decode(self.ops[0].idesc, self.kind)
        a, b = self.a.astype(np.float32), self.b.astype(np.float32)
        for i in range(len(self.ops)):
            ka = slice(k * i, k * i + k)
            if self.vec in (2, 4):
                g = slice(self.vec * i, self.vec * i + self.vec)
                d = numerics.block_scaled_exact(a[:, ka], b[:, ka], self.sfa[:, g], self.sfb[:, g], d,
                                                idesc.scale_format)
            else:
                scales = (self.sfa[:, i], self.sfb[:, i]) if self.vec else ()
                d = numerics.fused_exact(a[:, ka], b[:, ka], d, idesc.a_format, idesc.b_format, *scales)
        return d


SHAPES = [(128, 128, 1), (128, 8, 1), (128, 200, 1), (256, 64, 2), (256, 256, 2), (128, 64, 2), (128, 32, 2)]
SCALED = [("mxf4nvf4", 4, False), ("mxf4nvf4", 4, True), ("mxf4nvf4", 2, True), ("mxf4", 2, True)]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("m, n, cta", SHAPES)
def test_nvfp4_shapes(m, n, cta, exact):
    p = Problem(m=m, n=n, cta=cta, ops=2, vec=4)
    d = p.run(exact)
    p.check(d)
    if exact:
        np.testing.assert_array_equal(d.view(np.uint32), p.exact().view(np.uint32))


@pytest.mark.parametrize("kind, vec, ue8m0", SCALED)
@pytest.mark.parametrize("code", [0, 6, 4, 2])
def test_four_bit_kinds_and_swizzles(kind, vec, ue8m0, code):
    p = Problem(kind, n=64, ops=3, vec=vec, ue8m0=ue8m0, code=code)
    p.check(p.run())
    np.testing.assert_array_equal(p.run(True).view(np.uint32), p.exact().view(np.uint32))


@pytest.mark.parametrize("a, b", [("e4m3", "e5m2"), ("e2m3", "e3m2"), ("e2m1", "e4m3"), ("e3m2", "e2m1")])
@pytest.mark.parametrize("kind, vec", [("f8f6f4", None), ("mxf8f6f4", 1)])
@pytest.mark.parametrize("m, n, cta", [(128, 48, 1), (256, 64, 2), (128, 64, 2)])
def test_eight_bit_kinds(kind, vec, a, b, m, n, cta):
    p = Problem(kind, m, n, cta, ops=2, a=a, b=b, vec=vec)
    p.check(p.run())
    np.testing.assert_array_equal(p.run(True).view(np.uint32), p.exact().view(np.uint32))


@pytest.mark.parametrize("kind, fmt", [("f16", "f16"), ("f16", "bf16"), ("tf32", "tf32")])
@pytest.mark.parametrize("m, n, cta", [(64, 24, 1), (128, 40, 1), (256, 32, 2), (128, 32, 2)])
def test_dense_kinds(kind, fmt, m, n, cta):
    p = Problem(kind, m, n, cta, ops=2, a=fmt)
    np.testing.assert_array_equal(p.run(), p.a @ p.b.T)  # few bits: exact in either mode
    np.testing.assert_array_equal(p.run(True), p.a @ p.b.T)


@pytest.mark.parametrize("a, b", [("u8", "s8"), ("s8", "s8")])
@pytest.mark.parametrize("saturate", [0, 1])
def test_integers(a, b, saturate):
    p = Problem("i8", 128, 32, ops=2, a=a, b=b, d=2, saturate=saturate)
    p.run()
    np.testing.assert_array_equal(p.cells().view(np.int32), p.a @ p.b.T)
    p.ops = [replace(p.ops[0], accumulate=True)]
    p.tmems[0].cells[:, :32] = 2**31 - 1
    p.run()
    total = p.a[:, :32] @ p.b[:, :32].T + 2**31 - 1
    want = np.clip(total, -(2**31), 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
    np.testing.assert_array_equal(p.cells().view(np.int32), want)


@pytest.mark.parametrize("exact", [False, True])
def test_sixteen_bit_d_takes_the_low_half_of_its_cell(exact):
    p = Problem("f16", 64, 16, ops=2, a="f16", d=0)
    p.tmems[0].cells[:, :16], p.tmems[0].written[:, :16] = 0xFFFF4100, True  # 2.5 in the low half
    p.ops[0] = replace(p.ops[0], accumulate=True)
    p.run(exact)
    got = p.cells().astype(np.uint16).view(np.float16)
    first = (p.a[:, :16] @ p.b[:, :16].T + 2.5).astype(np.float16)
    want = (p.a[:, 16:] @ p.b[:, 16:].T + first.astype(np.float64)).astype(np.float16)  # rounded after every MMA
    np.testing.assert_array_equal(got, want)
    assert (p.cells() >> 16 == 0).all()


@pytest.mark.parametrize("kind, fmt, size, code", [
    ("f16", "f16", 2, 2), ("f16", "bf16", 2, 4), ("f16", "f16", 2, 0), ("f8f6f4", "e4m3", 1, 6),
    ("f8f6f4", "e5m2", 1, 2), ("tf32", "tf32", 4, 1), ("i8", "s8", 1, 2)])
@pytest.mark.parametrize("cta", [1, 2])
def test_transposed_operands(kind, fmt, size, code, cta):
    m, n = 128 * cta, 64
    p = Problem(kind, m, n, cta, a=fmt, ta=1, tb=1, d=2 if kind == "i8" else 1)
    for smem in p.smems:
        smem.state[:] = UNWRITTEN
    ops = {}
    for name, start, raw in (("a_desc", A_START, p.a_raw), ("b_desc", B_START, p.b_raw)):
        desc = SmemDescriptor(start, 0x2000, 0x400 if code else 0x80, 0, code)
        ops[name] = encode(desc)
        rows = len(raw) // cta
        for v, smem in enumerate(p.smems):
            store_mn_major(smem, desc, raw[rows * v:rows * (v + 1)], size)
    p.ops = [replace(p.ops[0], **ops)]
    p.run()
    p.check(p.cells().view(np.int32 if kind == "i8" else np.float32))


@pytest.mark.parametrize("kind, fmt, code", [("tf32", "tf32", 2), ("f16", "f16", 1)])
def test_transpose_and_swizzle_must_fit(kind, fmt, code):
    p = Problem(kind, 128, 64, a=fmt, ta=1)
    p.ops = [replace(p.ops[0], a_desc=encode(SmemDescriptor(A_START, 0x2000, 0x400, 0, code)))]
    with fails("descriptor", "32-byte atoms"):
        p.run()


# ------------------------------------------------------------------------------------------- A in tensor memory

def move_a_to_tmem(p, raw, lane=0, lanes=None):
    """Rewrite the problem so that A, uint8[m, 32 ops], lies in TMEM from A_COLUMN on."""
    rows = p.m // p.cta
    for v, tmem in enumerate(p.tmems):
        for r in range(rows):
            place = r % 16 + 32 * (r // 16) + lane if p.m == 64 else r
            for copy in ((0, 64) if p.cta == 2 and p.m == 128 else (0,)):
                words = np.ascontiguousarray(raw[rows * v + r]).view(np.uint32)
                tmem.cells[place + copy, A_COLUMN:A_COLUMN + len(words)] = words
                tmem.written[place + copy, A_COLUMN:A_COLUMN + len(words)] = True
    p.ops = [replace(op, a_desc=None, a_tmem=A_COLUMN + 8 * i + (lane << 16), d_tmem=D_COLUMN + (lane << 16))
             for i, op in enumerate(p.ops)]


@pytest.mark.parametrize("kind, fmt, vec, m, cta", [
    ("f16", "f16", None, 128, 1), ("f16", "bf16", None, 256, 2), ("tf32", "tf32", None, 128, 1),
    ("f8f6f4", "e4m3", None, 128, 1), ("mxf4nvf4", "e2m1", 4, 128, 1), ("f16", "f16", None, 128, 2)])
def test_a_in_tensor_memory(kind, fmt, vec, m, cta):
    p = Problem(kind, m, 32, cta, ops=2, a=fmt, vec=vec)
    move_a_to_tmem(p, p.a_raw)
    for smem in p.smems:
        smem.state[A_START:B_START] = UNWRITTEN
    p.check(p.run())


@pytest.mark.parametrize("lane", [0, 16])
def test_half_used_datapath_at_either_lane(lane):
    p = Problem("f16", 64, 32, ops=2, a="f16")
    move_a_to_tmem(p, p.a_raw, lane)
    p.check(p.run())
    assert p.tmems[0].written[:, D_COLUMN].sum() == 64


@pytest.mark.parametrize("fmt, shift", [("e2m1", 2), ("e3m2", 0), ("e2m3", 0)])
def test_sub_byte_a_in_tensor_memory_lies_in_bytes(fmt, shift):
    p = Problem("f8f6f4", 128, 32, a=fmt)
    table = small_values(fmt)
    codes = p.rng.integers(0, len(table), p.a.shape)
    p.a = table[codes]
    move_a_to_tmem(p, (codes << shift).astype(np.uint8))
    p.check(p.run())


def test_each_half_of_a_pair_reads_its_own_copy_of_a():
    p = Problem("f16", 128, 32, 2, a="f16")
    move_a_to_tmem(p, p.a_raw)
    p.tmems[1].cells[64 + 5, A_COLUMN] ^= 0x8000  # one element of row 69, in the copy for the upper half of N
    want = p.a @ p.b.T
    want[69, 16:] -= 2 * p.a[69, 0] * p.b[16:, 0]
    np.testing.assert_array_equal(p.run(), want)


def test_a_in_tensor_memory_must_have_been_written():
    p = Problem("f16", 128, 32, a="f16")
    move_a_to_tmem(p, p.a_raw)
    p.tmems[0].written[77, A_COLUMN + 3] = False
    with fails("uninitialised", f"lane 77, column {A_COLUMN + 3}"):
        p.run()


@pytest.mark.parametrize("change, match", [
    ({"a_tmem": 0x00100000 + A_COLUMN}, "lane 16"), ({"a_tmem": 508}, "covers"), ({"a_desc": 1 << 46}, "one of them"),
    ({"a_tmem": D_COLUMN + 30}, "overlaps")])
def test_bad_places_of_a(change, match):
    p = Problem("f16", 128, 32, a="f16")
    move_a_to_tmem(p, p.a_raw)
    p.ops = [replace(p.ops[0], **change)]
    with pytest.raises(VirtualGpuError, match=match):
        p.run()


# ------------------------------------------------------------------------------------------- scale factors

@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("which", ["sfa", "sfb"])
def test_a_missing_copy_of_the_scales_shows(which, exact):
    """Lanes 64-95 hold other scale factors: exactly the rows of that quadrant come out differently."""
    p = Problem(vec=4)
    good = p.run(exact)
    column = SFA + 2 if which == "sfa" else SFB
    p.tmems[0].cells[64:96, column] ^= 0x08080808
    changed = (p.run(exact) != good).any(axis=1)
    assert set(np.flatnonzero(changed)) == set(range(64, 96))


def test_a_quadrant_is_computed_with_what_it_has():
    p = Problem(vec=4)
    other = scale_bytes(p.rng, 128, 4, False)
    fill_scales(p.tmems[0], SFB, other, quadrants=(1,))
    d = p.run()
    rows = slice(32, 64)
    mine, p.sfb = p.sfb, other
    a, b = p.scaled()
    np.testing.assert_allclose(d[rows], (a @ b.T)[rows], rtol=1e-4, atol=1e-4)
    p.sfb = mine
    a, b = p.scaled()
    np.testing.assert_allclose(np.delete(d, rows, 0), np.delete(a @ b.T, rows, 0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cells", [(SFA, SFA + 1), (SFB,), (SFA, SFA + 1, SFB)])
@pytest.mark.parametrize("quadrant, rows, columns", [(0, range(32), range(16)), (3, range(32, 64), range(16, 32))])
def test_two_by_two_datapath_reads_scales_by_quadrant(quadrant, rows, columns, cells):
    """M = 128 of a pair: lanes 0-63 serve the lower half of N, lanes 64-127 the upper."""
    p = Problem(m=128, n=32, cta=2, vec=4)
    good = p.run().copy()
    lanes = slice(32 * quadrant, 32 * quadrant + 32)
    for column in cells:
        p.tmems[0].cells[lanes, column] ^= 0x10101010
    changed = p.run() != good
    assert changed[np.ix_(list(rows), list(columns))].any()
    changed[np.ix_(list(rows), list(columns))] = False
    assert not changed.any()


@pytest.mark.parametrize("address", [SFA, SFB])
def test_scales_must_have_been_written(address):
    p = Problem(vec=4, n=64)
    p.tmems[0].written[100, address + 1 if address == SFB else address + 3] = False
    with fails("uninitialised", "lane 100"):
        p.run()


def test_scales_beyond_n_are_not_read():
    p = Problem(vec=4, n=40)  # columns 32..39 of B: lanes 0-7 of the second column
    p.tmems[0].written[:, SFB + 1] = False
    for w in range(4):
        p.tmems[0].written[32 * w:32 * w + 8, SFB + 1] = True
    p.check(p.run())


@pytest.mark.parametrize("byte_a, byte_b", [(0, 2), (2, 0), (2, 2)])
def test_scale_factor_ids_of_2x(byte_a, byte_b):
    p = Problem("mxf4", n=64, vec=2, sfa_id=byte_a, sfb_id=byte_b)
    p.tmems[0].cells[:] = 0x7F7F7F7F
    p.put_scales(0, byte_a, byte_b)
    p.check(p.run())


@pytest.mark.parametrize("byte", range(4))
def test_scale_factor_ids_of_1x(byte):
    p = Problem("mxf8f6f4", n=32, a="e4m3", vec=1, sfa_id=byte, sfb_id=3 - byte)
    p.tmems[0].cells[:] = 0x85858585
    p.put_scales(0, byte, 3 - byte)
    p.check(p.run())


def test_different_ids_run_together():
    """Two k-blocks of one 32-bit word (2X), as CuTe issues them: they differ by the id and by address bits 31:30."""
    p = Problem("mxf4", n=64, ops=2, vec=2)
    for i in range(2):
        part = slice(2 * i, 2 * i + 2)
        fill_scales(p.tmems[0], SFA, p.sfa[:, part], 2 * i)
        fill_scales(p.tmems[0], SFB, p.sfb[:, part], 2 * i)
    p.ops[1] = replace(p.ops[1], idesc=instr("mxf4", 128, 64, sfa_id=2, sfb_id=2), sfa_tmem=SFA | 2 << 30,
                       sfb_tmem=SFB | 2 << 30)
    p.ops[0] = replace(p.ops[0], sfa_tmem=SFA, sfb_tmem=SFB)
    p.check(p.run())
    np.testing.assert_array_equal(p.run(True).view(np.uint32), p.exact().view(np.uint32))


def test_scales_of_b_two_columns_further():
    """Odd tiles of N = 64 use the second half of a 128-row block of scale factors (CUTLASS, CuTeDSL)."""
    p = Problem(n=64, vec=4)
    whole = scale_bytes(p.rng, 128, 4, False)
    whole[64:] = p.sfb
    fill_scales(p.tmems[0], SFB, whole)
    p.ops = [replace(p.ops[0], sfb_tmem=SFB + 2)]
    p.check(p.run())


@pytest.mark.parametrize("exact", [False, True])
def test_nan_scales_poison_their_row_and_column(exact):
    p = Problem(vec=4)
    p.sfa[33, 1], p.sfb[70, 3] = 0x7F, 0xFF
    p.put_scales(0)
    d = p.run(exact)
    want = np.zeros(d.shape, bool)
    want[33], want[:, 70] = True, True
    np.testing.assert_array_equal(np.isnan(d), want)
    assert (p.cells()[want] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("which", ["a_raw", "b_raw"])
def test_swapped_nibbles_of_one_operand_show(which):
    p = Problem(vec=4)
    good = p.run()
    raw = getattr(p, which)
    setattr(p, which, raw >> 4 | raw << 4)
    p.store("A", 0)
    p.store("B", 0)
    assert (p.run() != good).mean() > 0.9


def test_tcgen05_cp_puts_scales_where_the_mma_reads_them():
    """Scale-factor atoms of 128 rows x 4 factors, (m % 32) * 16 + (m / 32) * 4 + k, one .32x128b.warpx4 each."""
    p = Problem(vec=4)
    p.tmems[0].cells[:] = 0
    p.tmems[0].written[:] = False
    for start, scales, column in ((0x18000, p.sfa, SFA), (0x18200, p.sfb, SFB)):
        for m in range(128):
            put(p.smems[0], start + m % 32 * 16 + m // 32 * 4, scales[m])
        desc = encode(SmemDescriptor(start, 0, 128, 0, 0))
        execute_copy(CopyOp("32x128b", column, desc, multicast="warpx4"), p.smems, p.tmems)
    p.check(p.run())


# ------------------------------------------------------------------------------------------- accumulation, modifiers

@pytest.mark.parametrize("exact", [False, True])
def test_accumulation_and_batches(exact):
    """One call for four MMAs equals four calls: bit for bit if exact, else within rounding."""
    p, q = Problem(ops=4, vec=4), Problem(ops=4, vec=4)
    together = p.run(exact)
    for op in q.ops:
        execute([op], q.smems, q.tmems, exact)
    if exact:
        np.testing.assert_array_equal(together.view(np.uint32), q.d().view(np.uint32))
    q.check(q.d())
    q.check(together)


def test_the_accumulator_is_read():
    p = Problem(vec=4)
    c = p.rng.standard_normal((128, 128)).astype(np.float32)
    p.tmems[0].cells[:, :128], p.tmems[0].written[:, :128] = c.view(np.uint32), True
    p.ops = [replace(p.ops[0], accumulate=True)]
    p.check(p.run(), c)


def test_a_restart_in_the_middle_of_a_sequence():
    p = Problem(ops=3, vec=4)
    p.ops[1] = replace(p.ops[1], accumulate=False)
    d = p.run()
    p.a, p.b, p.sfa, p.sfb = p.a[:, 64:], p.b[:, 64:], p.sfa[:, 4:], p.sfb[:, 4:]
    p.check(d)


def test_two_accumulators_in_one_sequence():
    p = Problem(n=64, vec=4)
    p.ops.append(replace(p.ops[0], d_tmem=128))
    d = p.run()
    np.testing.assert_array_equal(p.tmems[0].cells[:, 128:192].view(np.float32), d)


def test_an_accumulator_never_written():
    p = Problem(vec=4)
    p.run()
    p.ops = [replace(p.ops[0], accumulate=True)]
    p.tmems[0].written[90, 17] = False
    with fails("uninitialised", "lane 90, column 17"):
        p.run()


@pytest.mark.parametrize("na, nb", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("kind, fmt, vec", [("mxf4nvf4", "e2m1", 4), ("f16", "bf16", None)])
@pytest.mark.parametrize("exact", [False, True])
def test_negate(kind, fmt, vec, na, nb, exact):
    p = Problem(kind, n=32, a=fmt, vec=vec, na=na, nb=nb)
    p.a = p.a * (1 - 2 * na) * (1 - 2 * nb)
    p.check(p.run(exact))


@pytest.mark.parametrize("shift", [1, 15])
def test_scale_input_d(shift):
    p = Problem("f16", n=32, a="f16")
    p.tmems[0].cells[:, :32], p.tmems[0].written[:, :32] = np.float32(3.0).view(np.uint32), True
    p.ops = [replace(p.ops[0], accumulate=True, scale_input_d=shift)]
    np.testing.assert_array_equal(p.run(), p.a @ p.b.T + 3.0 / 2**shift)
    for change in ({"scale_input_d": 16}, {"kind": "f8f6f4", "scale_input_d": 1}):
        with fails("descriptor", "scale-input-d"):
            execute([replace(p.ops[0], **change)], p.smems, p.tmems)


def test_disabled_lanes_keep_their_contents():
    p = Problem("f16", 256, 32, 2, a="f16")
    p.ops = [replace(p.ops[0], disable_output_lane=(0, 1 << 5, 0, 0, 0, 0, 0, 1 << 31))]
    poison = p.tmems[0].cells[0, 0]
    d, want = p.run().copy(), p.a @ p.b.T
    for row in (32 + 5, 128 + 127):
        assert (d[row].view(np.uint32) == poison).all()
        want[row] = d[row] = 0
    np.testing.assert_array_equal(d, want)
    assert not p.tmems[0].written[37, D_COLUMN] and not p.tmems[1].written[127, D_COLUMN]
    p.ops = [replace(p.ops[0], accumulate=True)]
    p.run()  # the disabled lanes were never written, but nothing is accumulated into them
    with fails("descriptor", "4 words"):
        execute([replace(p.ops[0], disable_output_lane=(1, 0, 0, 0))], p.smems, p.tmems)


# ------------------------------------------------------------------------------------------- faults in memory

@pytest.mark.parametrize("state, kind", [(UNWRITTEN, "uninitialised"), (GENERIC, "proxy fence"), (BARRIER, "mbarrier")])
@pytest.mark.parametrize("start, name", [(A_START, "operand A"), (B_START, "operand B")])
def test_state_of_operand_bytes(state, kind, start, name):
    p = Problem(vec=4)
    p.smems[0].state[start + 1024 + 7] = state
    with fails(kind, name):
        p.run()


def test_bytes_beside_the_operand_do_not_matter():
    p = Problem(vec=4)
    read = mma.read_ranges(p.ops[0])[0]
    used = np.concatenate([(r.offsets[..., None] + np.arange(16)).ravel() for r in read])
    p.smems[0].state[np.setdiff1d(np.arange(len(p.smems[0].state)), used)] = UNWRITTEN
    p.check(p.run())


@pytest.mark.parametrize("fmt, gap", [("e2m1", 8), ("e2m3", 12)])
def test_padding_of_sub_byte_operands_need_not_be_written(fmt, gap):
    p = Problem("f8f6f4", n=32, a=fmt, code=0)
    desc = SmemDescriptor.decode(p.ops[0].a_desc)
    for row in range(128):
        for chunk in (0, 16):
            where = address(desc, row, chunk, "K")
            p.smems[0].state[where + gap:where + 16] = UNWRITTEN
    p.check(p.run())
    p.smems[0].state[address(desc, 3, 16, "K") + gap - 1] = UNWRITTEN
    with fails("uninitialised"):
        p.run()


@pytest.mark.parametrize("start", [0x3F0, 0x20400 - 64])
def test_operands_outside_shared_memory(start):
    p = Problem(vec=4)
    p.ops = [replace(p.ops[0], a_desc=encode(SmemDescriptor(start, 0, 1024, 0, 2)))]
    with fails("out of bounds", "operand A"):
        p.run()


@pytest.mark.parametrize("change, match", [
    ({"d_tmem": 512 - 64}, "accumulator D"), ({"d_tmem": 1 << 16}, "lane 1"), ({"d_tmem": 16 << 16}, "lane 16"),
    ({"sfa_tmem": 510}, "scale factor A"), ({"sfb_tmem": 509}, "scale factor B"), ({"sfa_tmem": 32 << 16}, "lane 32"),
    ({"sfa_tmem": D_COLUMN + 127}, "overlaps"), ({"sfb_tmem": D_COLUMN}, "overlaps")])
def test_tensor_memory_addresses(change, match):
    p = Problem(vec=4)
    p.ops = [replace(p.ops[0], **change)]
    with fails("tensor memory", match):
        p.run()


@pytest.mark.parametrize("column, match", [(D_COLUMN + 127, "accumulator D"), (SFA, "scale factor A"),
                                           (SFB + 3, "scale factor B")])
def test_columns_that_are_not_allocated(column, match):
    p = Problem(m=256, cta=2, vec=4)
    p.tmems[1].owner[column] = -1
    with fails("tensor memory", f"{match}.*column {column}"):
        p.run()


def test_scale_addresses_are_mandatory():
    p = Problem(vec=4)
    with fails("descriptor", "both scale factors"):
        execute([replace(p.ops[0], sfb_tmem=None)], p.smems, p.tmems)


def test_memories_must_match_the_cta_group():
    p = Problem(m=256, cta=2, vec=4)
    with pytest.raises(ValueError, match="cta_group::2"):
        execute(p.ops, p.smems[:1], p.tmems[:1])


# ------------------------------------------------------------------------------------------- accounting

def test_read_ranges_name_every_byte_that_is_read():
    p = Problem(m=256, n=64, cta=2, vec=4)
    op = replace(p.ops[0], rank=5)
    ranges = mma.read_ranges(op)
    assert sorted(ranges) == [4, 5]
    a, b = ranges[4]
    assert (a.lo, a.hi, a.offsets.size) == (A_START, A_START + 128 * 128, 256)
    assert (b.lo, b.hi, b.offsets.size) == (B_START, B_START + 32 * 128, 64)
    desc = SmemDescriptor.decode(op.b_desc)
    assert set(b.offsets.ravel()) == {address(desc, row, c, "K") for row in range(32) for c in (0, 16)}
    assert sorted(mma.read_ranges(replace(p.ops[0], rank=0))) == [0, 1]
    one = Problem(vec=4).ops[0]
    assert list(mma.read_ranges(replace(one, rank=3))) == [3]


def test_tmem_ranges():
    op = Problem(vec=4).ops[0]
    ranges = mma.tmem_ranges(op)
    assert ranges.writes == ((D_COLUMN, D_COLUMN + 128),)
    assert sorted(ranges.reads) == [(SFA, SFA + 4), (SFB, SFB + 4)]
    assert (D_COLUMN, D_COLUMN + 128) in mma.tmem_ranges(replace(op, accumulate=True)).reads
    pair = Problem(m=128, n=64, cta=2, vec=4).ops[0]
    assert mma.tmem_ranges(pair).writes == ((D_COLUMN, D_COLUMN + 32),)
    assert sorted(mma.tmem_ranges(pair).reads) == [(SFA, SFA + 2), (SFB, SFB + 1)]


@pytest.mark.parametrize("m, cta, n, measured", [
    (128, 1, 64, 48), (128, 1, 128, 64), (128, 1, 256, 128), (256, 2, 64, 43), (256, 2, 128, 64), (256, 2, 256, 128),
    (128, 2, 64, 25), (128, 2, 128, 32), (128, 2, 256, 64)])
def test_cycles_against_published_issue_intervals(m, cta, n, measured):
    """B200 initiation intervals of block-scaled MMAs, SemiAnalysis microbench-blackwell."""
    op = MmaOp("mxf4nvf4", cta, 0, 1 << 46, instr("mxf4nvf4", m, n), a_desc=1 << 46, scale_vec=4, sfa_tmem=0,
               sfb_tmem=0)
    assert mma.cycles(op) == pytest.approx(measured, rel=0.08)
    assert mma.flops(op) == 2 * m * n * 64


@pytest.mark.parametrize("n, measured", [(64, 32), (128, 64), (256, 128)])
def test_cycles_with_a_in_tensor_memory(n, measured):
    op = MmaOp("f16", 1, 0, 1 << 46, instr("f16", 128, n), a_tmem=256)
    assert mma.cycles(op) == measured
    assert mma.flops(op) == 2 * 128 * n * 16


# ------------------------------------------------------------------------------------------- tcgen05.cp, shift

# shape, multicast -> for each TMEM lane the source row, or None: PTX ISA 9.7.16.9.2, CUTLASS copy_traits_sm100.hpp
def source_row(shape, multicast, lane):
    warp, inner = divmod(lane, 32)
    if shape.startswith("128x"):
        return lane
    if shape == "4x256b":
        return warp if inner == 0 else None
    if multicast == "warpx4":
        return inner
    if multicast == "warpx2::02_13":  # warps 0, 2 hold the first half, warps 1, 3 the second
        return inner + 32 * (warp % 2)
    return inner + 32 * (warp // 2)  # 01_23


SHAPES_OF_CP = [("128x256b", None, 128, 2), ("128x128b", None, 128, 1), ("4x256b", None, 4, 2),
                ("64x128b", "warpx2::02_13", 64, 1), ("64x128b", "warpx2::01_23", 64, 1), ("32x128b", "warpx4", 32, 1)]


@pytest.mark.parametrize("shape, multicast, rows, chunks", SHAPES_OF_CP)
@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize("cta", [1, 2])
def test_copy_shapes_element_by_element(shape, multicast, rows, chunks, code, cta):
    smems, tmems = memories(cta)
    desc = SmemDescriptor(0x2000, 0x1000, 8 * WIDTH[code], 0, code)
    rng = np.random.default_rng(0)
    raws = [rng.integers(0, 256, (rows, 16 * chunks)).astype(np.uint8) for _ in range(cta)]
    for smem, raw in zip(smems, raws, strict=True):
        for r in range(rows):
            for byte in range(16 * chunks):
                put(smem, address(desc, r, byte, "K"), raw[r, byte:byte + 1])
    op = CopyOp(shape, 40, encode(desc), cta, multicast)
    execute_copy(op, smems, tmems)
    for tmem, raw in zip(tmems, raws, strict=True):
        fresh = TensorMemory()
        for lane in range(128):
            row = source_row(shape, multicast, lane)
            for column in range(4 * chunks):
                if row is not None:
                    word = raw[row, 4 * column:4 * column + 4].tobytes()
                    fresh.cells[lane, 40 + column] = int.from_bytes(word, "little")
                    fresh.written[lane, 40 + column] = True
        np.testing.assert_array_equal(tmem.cells, fresh.cells)
        np.testing.assert_array_equal(tmem.written, fresh.written)
    assert copy_tmem_ranges(op).writes == ((40, 40 + 4 * chunks),) and copy_tmem_ranges(op).reads == ()
    reads = copy_read_ranges(replace(op, rank=2))
    assert sorted(reads) == ([2] if cta == 1 else [2, 3])
    assert {int(x) for x in reads[2][0].offsets.ravel()} == {
        address(desc, r, 16 * c, "K") for r in range(rows) for c in range(chunks)}


def test_copy_of_four_rows_at_another_lane():
    """After a shift the last lane of each quadrant is refreshed."""
    smems, tmems = memories(1)
    put(smems[0], 0x2000, np.arange(128, dtype=np.uint8))
    execute_copy(CopyOp("4x256b", 31 << 16 | 8, encode(SmemDescriptor(0x2000, 64, 0, 0, 0))), smems, tmems)
    assert sorted(np.flatnonzero(tmems[0].written[:, 8])) == [31, 63, 95, 127]
    assert tmems[0].cells[63, 8] == 0x13121110


@pytest.mark.parametrize("src_format, width", [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_copy_with_decompression(src_format, width):
    smems, tmems = memories(1)
    codes = np.random.default_rng(0).integers(0, 2**width, (128, 16))
    raw = pad_groups(codes, width)
    put(smems[0], 0x2000, raw.ravel())
    smems[0].state[0x2000:0x2800].reshape(128, 16)[:, 2 * width:] = UNWRITTEN  # the padding
    desc = encode(SmemDescriptor(0x2000, 0, 128, 0, 0))
    execute_copy(CopyOp("128x128b", 0, desc, src_format=src_format), smems, tmems)
    got = np.ascontiguousarray(tmems[0].cells[:, :4]).view(np.uint8)
    np.testing.assert_array_equal(got, codes << (2 if width == 4 else 0))
    assert decompress(raw, src_format).shape == raw.shape


@pytest.mark.parametrize("op, kind, match", [
    (CopyOp("64x128b", 0, 1 << 46), "descriptor", "multicast None"),
    (CopyOp("128x256b", 0, 1 << 46, multicast="warpx4"), "descriptor", "multicast warpx4"),
    (CopyOp("32x128b", 510, 1 << 46, multicast="warpx4"), "tensor memory", "columns"),
    (CopyOp("32x128b", 32 << 16, 1 << 46, multicast="warpx4"), "tensor memory", "lane 32"),
    (CopyOp("128x128b", 0, 1 << 46, src_format="b2x16"), "unsupported", "b2x16"),
    (CopyOp("128x128b", 0, 1 << 46, cta_group=4), "descriptor", "cta_group"),
    (CopyOp("128x128b", 0, 0), "descriptor", "bits 46-48"),
    (CopyOp("128x128b", 0, 1 << 46), "out of bounds", "source"),
    (CopyOp("128x128b", 0, encode(SmemDescriptor(0x800, 0, 128, 0, 0))), "uninitialised", "source")])
def test_copy_faults(op, kind, match):
    smems, tmems = memories(1)
    with fails(kind, match):
        execute_copy(op, smems, tmems)


def test_copy_to_columns_that_are_not_allocated():
    smems, tmems = memories(1)
    tmems[0].owner[6] = -1
    with fails("tensor memory", "column 6"):
        execute_copy(CopyOp("128x256b", 0, encode(SmemDescriptor(0x800, 0, 128, 0, 0))), smems, tmems)
    with pytest.raises(ValueError, match="cta_group::2"):
        execute_copy(CopyOp("128x256b", 8, encode(SmemDescriptor(0x800, 0, 128, 0, 0)), 2), smems, tmems)


def test_shift_moves_rows_down_by_one_in_its_quadrant():
    _, tmems = memories(1)
    before = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)
    tmems[0].cells[:], tmems[0].written[:] = before, True
    execute_shift(32 << 16 | 16, tmems)
    want = before.copy()
    for r in range(32, 63):
        want[r, 16:24] = before[r + 1, 16:24]
    np.testing.assert_array_equal(tmems[0].cells, want)


@pytest.mark.parametrize("taddr, kind, match", [(8 << 16, "tensor memory", "lane 8"), (508, "tensor memory", "columns"),
                                                (0, "uninitialised", "lane 1")])
def test_shift_faults(taddr, kind, match):
    _, tmems = memories(1)
    with fails(kind, match):
        execute_shift(taddr, tmems)
