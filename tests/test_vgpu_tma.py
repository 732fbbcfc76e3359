"""The copy engine against slow models: per byte for the swizzle, per element for copies, exact for reductions."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from vgpu import tensormap, tma
from vgpu.errors import VirtualGpuError
from vgpu.memory import BARRIER, CLEAN, GENERIC, RESERVED, UNWRITTEN, GlobalMemory, SharedMemory

# PTX ISA 5.5.7: in each 128-byte line, which 16-byte chunk of the data lies at each place; lines repeat the table
TABLES = {
    32: ["01234567", "10325476"],
    64: ["01234567", "10325476", "23016745", "32107654"],
    128: ["01234567", "10325476", "23016745", "32107654", "45670123", "54761032", "67452301", "76543210"],
}
BITS = {"u8": 8, "u16": 16, "u32": 32, "s32": 32, "u64": 64, "s64": 64, "f16": 16, "f32": 32, "f64": 64, "bf16": 16,
        "b4x16": 4}
SHARED = 98304


class Tensor:
    """A tensor in the middle of random global memory, with its tensor map."""

    def __init__(self, rng, type, sizes, box, steps=None, pad=0, **layout):
        self.bits = BITS.get(type, 32)
        self.row = box[0] * self.bits // 8
        self.step = 128 // self.bits  # elements in 16 bytes, of which the first coordinate must be a multiple [H200]
        self.sizes, self.box, self.steps = sizes, box, steps or (1,) * len(sizes)
        self.strides = []
        extent = -(-sizes[0] * self.bits // 8)
        for size in sizes[1:]:
            self.strides.append(-(-extent // 16) * 16 + 16 * pad)
            extent = self.strides[-1] * size
        self.guard = 256
        self.memory = rng.integers(0, 256, extent + 2 * self.guard + 16, dtype=np.uint8)
        start = self.memory.ctypes.data + self.guard
        self.address = start + -start % 16
        self.first = self.address - self.memory.ctypes.data
        self.gmem = GlobalMemory()
        self.gmem.register(self.memory.ctypes.data, self.memory.size)
        self.tm = tensormap.decode(tensormap.encode(type, self.address, sizes, self.strides, box, self.steps, **layout))

    def elements(self, coords, granule=1):
        """For each element of the box in shared order: its bit offset in `memory`, or None outside the tensor.

        granule: bytes; a row that ends inside one is continued to its end.
        """
        steps = (1, *self.steps[1:])
        whole = max(8 * granule // self.bits, 1)
        inner = -(-self.sizes[0] // whole) * whole
        counts = [-(-b // s) for b, s in zip(self.box, steps, strict=True)]
        for index in itertools.product(*[range(n) for n in reversed(counts)]):
            at = [c + k * s for c, k, s in zip(coords, reversed(index), steps, strict=True)]
            if all(0 <= a < n for a, n in zip(at, (inner, *self.sizes[1:]), strict=True)):
                byte = self.first + sum(a * s for a, s in zip(at[1:], self.strides, strict=True))
                yield 8 * byte + at[0] * self.bits
            else:
                yield None


def get_bits(array, bit, width):
    if width == 4:
        return int(array[bit // 8]) >> bit % 8 & 15
    return int.from_bytes(array[bit // 8:(bit + width) // 8].tobytes(), "little")


def put_bits(array, bit, width, value):
    if width == 4:
        keep = 0xF0 if bit % 8 == 0 else 0x0F
        array[bit // 8] = int(array[bit // 8]) & keep | value << bit % 8
    else:
        array[bit // 8:(bit + width) // 8] = np.frombuffer(value.to_bytes(width // 8, "little"), np.uint8)


def place(offset, byte, swizzle, row):
    """Shared address of a box's byte, by the tables. Rows lie the swizzle's width apart, however short [H200]."""
    if not swizzle:
        return offset + byte
    address = offset + byte // row * swizzle + byte % row
    table = TABLES[swizzle]
    line, chunk, byte = address // 128, address // 16 % 8, address % 16
    return line * 128 + table[line % len(table)].index(str(chunk)) * 16 + byte


def model_load(tensor, coords, data, offset, swizzle, fill):
    """Write the box to `data`, element by element; returns the number of bytes of the box."""
    bit = 0
    for source in tensor.elements(coords):
        value = fill if source is None else get_bits(tensor.memory, source, tensor.bits)
        target = 8 * place(offset, bit // 8, swizzle, tensor.row) + bit % 8
        put_bits(data, target, tensor.bits, value)
        bit += tensor.bits
    return bit // 8


def model_store(tensor, coords, data, offset, swizzle, memory, combine=lambda old, new: new):
    """Write the box from `data` to `memory`; returns the shared bytes that were needed, and the bytes written."""
    needed, bit, written = set(), 0, 0
    for target in tensor.elements(coords, granule=16):  # [H200]: a row is clipped to whole granules of 16 bytes
        source = 8 * place(offset, bit // 8, swizzle, tensor.row) + bit % 8
        if target is not None:
            needed.update(range(source // 8, (source + tensor.bits + 7) // 8))
            value = combine(get_bits(memory, target, tensor.bits), get_bits(data, source, tensor.bits))
            put_bits(memory, target, tensor.bits, value)
            written += tensor.bits
        bit += tensor.bits
    return needed, written // 8


def shared(rng, written=True):
    """Shared memory full of random bytes, all visible to the asynchronous proxy if `written`."""
    smem = SharedMemory(SHARED)
    smem.data[:] = rng.integers(0, 256, smem.limit, dtype=np.uint8)
    smem.state[:] = CLEAN if written else UNWRITTEN
    return smem


def random_tensor(rng, **fixed):
    """A random tensor of rank 1 to 5, box, element strides and layout; some boxes larger than the tensor, some
    narrower than their swizzle."""
    type = fixed.get("type") or str(rng.choice(list(BITS)))
    bits = BITS[type]
    swizzle = int(rng.choice([0, 32, 64, 128]))
    row = swizzle or 16 * int(rng.integers(1, 6))
    if swizzle and rng.random() < 0.4:
        row = 16 * int(rng.integers(1, swizzle // 16 + 1))
    inner = row * 8 // bits
    if inner > 256:
        swizzle, inner = 0, 128
    rank = int(rng.integers(1, 6))
    box = (inner, *(int(n) for n in rng.integers(1, 6, rank - 1)))
    sizes = (int(rng.integers(1, 3 * inner)), *(int(n) for n in rng.integers(1, 9, rank - 1)))
    if bits == 4:
        sizes = (sizes[0] + sizes[0] % 2, *sizes[1:])
    steps = tuple(int(n) for n in rng.integers(1, 5, rank)) if rng.random() < 0.4 else None
    return Tensor(rng, type, sizes, box, steps, pad=int(rng.integers(0, 3)), swizzle=swizzle)


def random_coords(rng, tensor, negative=True):
    out = [int(rng.integers(-b - 1 if negative else 0, n + 2)) for n, b in zip(tensor.sizes, tensor.box, strict=True)]
    return [out[0] // tensor.step * tensor.step, *out[1:]]


def random_offset(rng):
    return RESERVED + 128 * int(rng.integers(0, 80))  # leaves room for 128 * 5**4 bytes


def fails(kind, message=""):
    class Check:
        def __enter__(self):
            self.inner = pytest.raises(VirtualGpuError)
            self.error = self.inner.__enter__()

        def __exit__(self, *args):
            self.inner.__exit__(*args)
            assert self.error.value.kind == kind and message in self.error.value.message, str(self.error.value)
            return True
    return Check()


# --- swizzle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("base", [0, 128, 384, 1024, 1024 + 5 * 128, 7 * 128, 65536 + 3 * 128])
def test_swizzle_offsets(swizzle, base):
    nbytes = 20 * 128
    chunks = tma.swizzle_offsets(base, nbytes, swizzle)
    assert chunks.shape == (nbytes // 16,)
    for address in range(base, base + nbytes):
        assert chunks[(address - base) // 16] + address % 16 == place(base, address - base, swizzle, swizzle)


@pytest.mark.parametrize("swizzle, row", [(32, 16), (64, 16), (64, 48), (128, 16), (128, 80), (128, 112)])
def test_swizzle_offsets_of_narrow_rows(swizzle, row):
    for base in (1024, 1024 + 5 * 128, 2048 + 128):
        chunks = tma.swizzle_offsets(base, 12 * row, swizzle, row=row)
        assert [int(c) for c in chunks] == [place(base, 16 * i, swizzle, row) for i in range(12 * row // 16)]


@pytest.mark.parametrize("swizzle, bit_pairs", [
    (32, [(4, 7)]), (64, [(4, 7), (5, 8)]), (128, [(4, 7), (5, 8), (6, 9)])])
def test_swizzle_is_an_xor_of_address_bits(swizzle, bit_pairs):
    """The tables of the document and the XOR of bits that CuTe's Swizzle<n,4,3> does are the same thing."""
    chunks = tma.swizzle_offsets(2048 + 128, 4096, swizzle)
    for i, got in enumerate(chunks):
        address = 2048 + 128 + 16 * i
        want = address
        for low, high in bit_pairs:
            want ^= (address >> high & 1) << low
        assert got == want


# --- tensor loads --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_load_random(seed):
    rng = np.random.default_rng(seed)
    tensor = random_tensor(rng)
    before = tensor.memory.copy()
    for _ in range(3):
        coords, offset = random_coords(rng, tensor), random_offset(rng)
        smem = shared(rng, written=False)
        want = smem.data.copy()
        nbytes = model_load(tensor, coords, want, offset, tensor.tm.swizzle, 0)
        patterns = [c & 0xFFFFFFFF for c in coords] if rng.random() < 0.5 else coords
        assert tma.load_tile(tensor.tm, patterns, tensor.gmem, smem, offset) == nbytes == tma.tile_bytes(tensor.tm)
        assert np.array_equal(smem.data, want)
        index = tma.touched(tensor.tm, offset)
        assert smem.state[index].size == nbytes and (smem.state[index] == CLEAN).all()
        assert not smem.state[offset + tma.shared_bytes(tensor.tm):].any()
        smem.state[index] = UNWRITTEN
        assert not smem.state.any()
    assert np.array_equal(tensor.memory, before)


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_load_out_of_bounds_on_every_side(rank):
    """A box larger than the tensor, at every corner around it."""
    rng = np.random.default_rng(rank)
    sizes, box = (5, 3, 2, 2, 2)[:rank], (16, 4, 3, 3, 3)[:rank]
    tensor = Tensor(rng, "u8", sizes, box)
    smem = shared(rng)
    sides = [(-16, 0, 16), *[(-b, -1, 0, 1, n) for n, b in zip(sizes[1:3], box[1:], strict=False)]]
    for coords in itertools.product(*sides):
        coords = (*coords, *(-1 for _ in range(rank - len(coords))))
        want = smem.data.copy()
        model_load(tensor, coords, want, 2048, 0, 0)
        tma.load_tile(tensor.tm, coords, tensor.gmem, smem, 2048)
        assert np.array_equal(smem.data, want)


@pytest.mark.parametrize("type", ["f16", "bf16", "f32", "f64"])
def test_load_nan_fill(type):
    rng = np.random.default_rng(1)
    tensor = Tensor(rng, type, (40, 7), (128 * 8 // BITS[type], 4), swizzle=128, fill_nan=True)
    fill = int("7ff7" * (BITS[type] // 16), 16)
    kind = {16: np.float16, 32: np.float32, 64: np.float64}[BITS[type]]
    if type != "bf16":
        assert np.isnan(np.array([fill], f"u{BITS[type] // 8}").view(kind)[0])
    for column, row in ((-1, -2), (0, 5), ((40 - 1) // tensor.step, 6), (100, 0), (0, 0)):
        coords = (column * tensor.step, row)
        smem = shared(rng)
        want = smem.data.copy()
        model_load(tensor, coords, want, 1024 + 640, 128, fill)
        tma.load_tile(tensor.tm, coords, tensor.gmem, smem, 1024 + 640)
        assert np.array_equal(smem.data, want)


def nearest_tf32(value: np.float32) -> float:
    """value rounded to 10 mantissa bits, ties to even, in exact arithmetic."""
    exact = Fraction(float(value))
    if not exact:
        return float(value)
    exponent = max(-126, int(np.floor(np.log2(abs(float(value))))))
    unit = Fraction(2) ** (exponent - 10)
    rounded = float(round(exact / unit) * unit)
    return np.inf * np.sign(rounded) if abs(rounded) >= 2.0**128 else rounded


def test_load_rounds_tf32():
    rng = np.random.default_rng(2)
    tensor = Tensor(rng, "tf32", (64, 4), (32, 4))
    values = tensor.memory[tensor.first:tensor.first + 1024].view(np.float32)
    values.view(np.uint32)[:16] = [
        0x3F801000, 0x3F803000, 0x7F7FFFFF, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFF800000, 0, 1 << 31, 0x3F801001,
        0x3F800FFF, 0xBF801000, 0x00001000, 0x00003000, 0x7FC12345, 0xFFA00001]
    for coords in ((0, 0), (8, 1), (-4, 2)):
        smem = shared(rng)
        tma.load_tile(tensor.tm, coords, tensor.gmem, smem, 2048)
        got = smem.data[2048:2048 + 512].view(np.float32)
        for i, bit in enumerate(tensor.elements(coords)):
            source = np.float32(0) if bit is None else tensor.memory[bit // 8:bit // 8 + 4].view(np.float32)[0]
            if np.isnan(source):
                assert got[i:i + 1].view(np.uint32)[0] == 0x7FFFE000
            elif np.isinf(source):
                assert got[i] == source
            else:
                assert got[i] == nearest_tf32(source) and np.signbit(got[i]) == np.signbit(source)


def test_load_multicast():
    rng = np.random.default_rng(3)
    tensor = Tensor(rng, "f16", (100, 20), (64, 8), swizzle=128)
    smems = [shared(rng, written=False) for _ in range(4)]
    want = [s.data.copy() for s in smems]
    for data in want[1:]:
        model_load(tensor, (48, 15), data, 3072 + 256, 128, 0)
    assert tma.load_tile_multicast(tensor.tm, (48, 15), tensor.gmem, smems[1:], 3072 + 256) == 1024
    for smem, data in zip(smems, want, strict=True):
        assert np.array_equal(smem.data, data)
    assert not smems[0].state.any() and (smems[3].state == CLEAN).sum() == 1024


def test_read_then_write_is_a_load():
    """The two halves: the box as it was when read, whatever happens to global memory before it is written."""
    rng = np.random.default_rng(4)
    for box in ((64, 8), (128, 1)):
        tensor = Tensor(rng, "u8", (64 if box[0] == 64 else 256, 32), box)
        smem = shared(rng)
        want = smem.data.copy()
        model_load(tensor, (0, 3), want, 2048, 0, 0)
        dense = tma.read_tile(tensor.tm, (0, 3), tensor.gmem)
        tensor.memory[:] = 0
        tma.write_tile(tensor.tm, dense, smem, 2048)
        assert np.array_equal(smem.data, want)


def test_load_faults():
    rng = np.random.default_rng(5)
    tensor = Tensor(rng, "f16", (100, 20), (64, 8), swizzle=128)
    smem = shared(rng)
    before = smem.data.copy()
    with fails("misaligned", "0x840 is not a multiple of 128"):
        tma.load_tile(tensor.tm, (0, 0), tensor.gmem, smem, 2048 + 64)
    with fails("out of bounds", "1024 bytes"):
        tma.load_tile(tensor.tm, (0, 0), tensor.gmem, smem, RESERVED + SHARED - 896)
    with fails("out of bounds"):
        tma.load_tile(tensor.tm, (0, 0), tensor.gmem, smem, 0)
    smem.state[2048 + 1000] = BARRIER
    with fails("mbarrier"):
        tma.load_tile(tensor.tm, (0, 0), tensor.gmem, smem, 2048)
    for coords in ((0,), (0, 0, 0), (2**32, 0), (0, -2**31 - 1)):
        with fails("tensor map", "must be 2 s32 values"):
            tma.load_tile(tensor.tm, coords, tensor.gmem, smem, 4096)
    assert np.array_equal(smem.data, before)


def test_load_reads_only_known_memory():
    """The map says 20 rows, the buffer ends within row 12; boxes and parts of boxes before that are fine."""
    rng = np.random.default_rng(6)
    tensor = Tensor(rng, "f16", (96, 20), (64, 8), pad=1)
    small = GlobalMemory()
    small.register(tensor.address, 12 * tensor.strides[0] + 64 * 2)
    smem = shared(rng)
    tma.load_tile(tensor.tm, (0, 5), small, smem, 2048)  # row 12, columns 0 to 63
    with fails("out of bounds", "global access"):
        tma.load_tile(tensor.tm, (8, 5), small, smem, 2048)
    with fails("out of bounds"):
        tma.load_tile(tensor.tm, (64, 16), small, smem, 2048)
    with fails("out of bounds"):
        tma.prefetch_tile(tensor.tm, (8, 5), small)
    tma.load_tile(tensor.tm, (1000, 5), small, smem, 2048)  # wholly outside the tensor: nothing is read
    assert not smem.data[2048:2048 + 1024].any()


@pytest.mark.parametrize("coords", [(0, 1, 0), (64, 1, -2)])
def test_load_bounds_count_element_strides(coords):
    """Rows 1, 4, 7 and planes up to 2 are read: the buffer holds all of them, or ends one byte early."""
    rng = np.random.default_rng(23)
    tensor = Tensor(rng, "f16", (128, 9, 3), (64, 9, 5), (1, 3, 2))
    end = 2 * tensor.strides[1] + 7 * tensor.strides[0] + 2 * (coords[0] + 64)
    smem = shared(rng)
    for short in (0, 1):
        gmem = GlobalMemory()
        gmem.register(tensor.address, end - short)
        want = smem.data.copy()
        if short:
            with fails("out of bounds"):
                tma.load_tile(tensor.tm, coords, gmem, smem, 2048)
        else:
            model_load(tensor, coords, want, 2048, 0, 0)
            tma.load_tile(tensor.tm, coords, gmem, smem, 2048)
        assert np.array_equal(smem.data, want)


def test_what_is_not_modelled_stops():
    rng = np.random.default_rng(7)
    smem = shared(rng)
    interleaved = Tensor(rng, "f16", (8, 20, 4), (8, 8, 1), interleave=16)
    with fails("unsupported", "interleave"):
        tma.load_tile(interleaved.tm, (0, 0, 0), interleaved.gmem, smem, 2048)
    for mode in ("im2col", "im2col::w", "im2col::w::128", "im2col_no_offs"):
        with fails("unsupported", mode):
            tma.check_mode(mode)
    with fails("unknown instruction", "tiled"):
        tma.check_mode("tiled")
    for mode in ("tile", "tile::gather4", "tile::scatter4"):
        assert tma.check_mode(mode) is None


@pytest.mark.parametrize("type, coords, message", [
    ("u8", (8, 1), "8 bytes"), ("u8", (-3, 1), "-3 bytes"), ("u16", (1, 1), "16 bytes, 8 elements of u16"),
    ("f32", (2, 1), "8 bytes"), ("u64", (1, 1), "2 elements of u64"), ("b4x16", (16, 0), "32 elements of b4x16"),
    ("u16", (99, 1), "198 bytes"), ("u16", (0xFFFFFFFF, 1), "-2 bytes")])
def test_first_coordinate_is_a_multiple_of_16_bytes(type, coords, message):
    """An illegal instruction on the H200 (probes stops/tma_load_* and stops/tma_store_x_1), inside or not."""
    rng = np.random.default_rng(24)
    tensor = Tensor(rng, type, (512 // max(BITS[type], 4), 20), (128 * 2 // BITS[type], 8))
    smem = shared(rng)
    before = tensor.memory.copy(), smem.data.copy()
    with fails("misaligned", message):
        tma.load_tile(tensor.tm, coords, tensor.gmem, smem, 2048)
    with fails("misaligned", message):
        tma.store_tile(tensor.tm, coords, smem, 2048, tensor.gmem)
    assert np.array_equal(tensor.memory, before[0]) and np.array_equal(smem.data, before[1])


@pytest.mark.parametrize("type", ["f32", "f32.ftz"])
def test_load_flushes_no_subnormals(type):
    """Probe tma_load/2d_f32_ftz_special_values: the H200 gives the bytes as they are."""
    rng = np.random.default_rng(25)
    tensor = Tensor(rng, type, (8, 2), (8, 2))
    tensor.memory[tensor.first:tensor.first + 64].view(np.uint32)[:] = rng.integers(1, 1 << 23, 16)
    smem = shared(rng)
    assert tma.load_tile(tensor.tm, (0, 0), tensor.gmem, smem, 2048) == 64
    assert np.array_equal(smem.data[2048:2048 + 64], tensor.memory[tensor.first:tensor.first + 64])


# --- tensor stores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_store_random(seed):
    """Every byte of global memory around and in the tensor, and all of shared memory."""
    rng = np.random.default_rng(1000 + seed)
    tensor = random_tensor(rng)
    for _ in range(3):
        coords, offset = random_coords(rng, tensor, negative=False), random_offset(rng)
        smem = shared(rng)
        data, state = smem.data.copy(), smem.state.copy()
        want = tensor.memory.copy()
        needed, written = model_store(tensor, coords, data, offset, tensor.tm.swizzle, want)
        smem.state[:] = UNWRITTEN  # only the bytes that are stored need be there
        smem.state[sorted(needed)] = CLEAN
        state[:] = smem.state
        assert tma.store_tile(tensor.tm, coords, smem, offset, tensor.gmem) == written
        assert np.array_equal(tensor.memory, want)
        assert np.array_equal(smem.data, data) and np.array_equal(smem.state, state)


@pytest.mark.parametrize("coords", [(0, 0), (64, 3), (0, 17)])
@pytest.mark.parametrize("state, kind", [(UNWRITTEN, "uninitialised"), (GENERIC, "proxy fence"), (BARRIER, "mbarrier")])
def test_store_needs_visible_bytes(coords, state, kind):
    """Each stored byte matters, in whole boxes (the first) and clipped ones (36 elements and 4 more to the end of their
    granule, 3 rows)."""
    rng = np.random.default_rng(8)
    tensor = Tensor(rng, "f16", (100, 20), (64, 8), swizzle=128)
    needed, _ = model_store(tensor, coords, np.zeros(SHARED, np.uint8), 4096 + 384, 128, tensor.memory.copy())
    before = tensor.memory.copy()
    for byte in rng.choice(sorted(needed), 12):
        smem = shared(rng)
        if state == GENERIC:
            smem.mark_generic(slice(byte, byte + 1), warp=0, sequence=1)
        smem.state[byte] = state
        with fails(kind, "" if state == BARRIER else f"{byte:#x}"):
            tma.store_tile(tensor.tm, coords, smem, 4096 + 384, tensor.gmem)
        assert np.array_equal(tensor.memory, before)


def test_store_faults():
    rng = np.random.default_rng(9)
    tensor = Tensor(rng, "f16", (100, 20), (64, 8), swizzle=128)
    smem = shared(rng)
    before = tensor.memory.copy()
    for coords in ((-8, 0), (0, -8), (0xFFFFFFF8, 0)):
        with fails("tensor map", "must not be negative"):
            tma.store_tile(tensor.tm, coords, smem, 2048, tensor.gmem)
    with fails("misaligned"):
        tma.store_tile(tensor.tm, (0, 0), smem, 2048 + 16, tensor.gmem)
    with fails("out of bounds"):
        tma.store_tile(tensor.tm, (0, 0), smem, RESERVED + SHARED, tensor.gmem)
    with fails("tensor map", "s32 values"):
        tma.store_tile(tensor.tm, (0, 0, 0), smem, 2048, tensor.gmem)
    small = GlobalMemory()
    small.register(tensor.address, 7 * tensor.strides[0])
    with fails("out of bounds"):
        tma.store_tile(tensor.tm, (0, 0), smem, 2048, small)
    assert np.array_equal(tensor.memory, before)


def test_store_writes_whole_granules():
    """The last 2 of 21 elements are 4 bytes of a granule; all its 16 bytes are written, and must be in the buffer."""
    rng = np.random.default_rng(26)
    tensor = Tensor(rng, "u16", (21,), (16,))
    for size, enough in ((48, True), (47, False), (42, False)):
        gmem = GlobalMemory()
        gmem.register(tensor.address, size)
        smem, before = shared(rng), tensor.memory.copy()
        if not enough:
            with fails("out of bounds"):
                tma.store_tile(tensor.tm, (16,), smem, 2048, gmem)
            assert np.array_equal(tensor.memory, before)
            continue
        assert tma.store_tile(tensor.tm, (16,), smem, 2048, gmem) == 16
        before[tensor.first + 32:tensor.first + 48] = smem.data[2048:2048 + 16]
        assert np.array_equal(tensor.memory, before)


# --- gather and scatter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_gather4_and_scatter4(seed):
    rng = np.random.default_rng(2000 + seed)
    type = str(rng.choice(["u8", "bf16", "f32", "b4x16"]))
    swizzle = int(rng.choice([0, 32, 64, 128]))
    inner = (swizzle // int(rng.choice([1, 2])) or 48) * 8 // BITS[type]
    tensor = Tensor(rng, type, (2 * inner + 6, 9), (inner, 1), swizzle=swizzle)
    row_bytes = inner * BITS[type] // 8
    column = int(rng.integers(-inner, 2 * inner)) // tensor.step * tensor.step
    rows = [int(r) for r in rng.integers(-2, 12, 4)]
    smem, offset = shared(rng), random_offset(rng)
    want = smem.data.copy()
    for k, row in enumerate(rows):  # a row lies where the swizzle puts its place in the 4-row box
        dense = np.zeros(row_bytes, np.uint8)
        model_load(tensor, (column, row), dense, 0, 0, 0)
        for i, byte in enumerate(dense):
            want[place(offset, k * row_bytes + i, swizzle, row_bytes)] = byte
    assert tma.gather4(tensor.tm, (column, *rows), tensor.gmem, smem, offset) == 4 * row_bytes
    assert np.array_equal(smem.data, want)
    other = [shared(rng), shared(rng)]
    assert tma.gather4_multicast(tensor.tm, (column, *rows), tensor.gmem, other, offset) == 4 * row_bytes
    index = tma.touched(tensor.tm, offset, "tile::gather4")
    assert want[index].size == tma.tile_bytes(tensor.tm, "tile::gather4")
    assert all(np.array_equal(s.data[index], want[index]) for s in other)

    column, rows = abs(column), [int(r) for r in rng.permutation(12)[:4]]
    stored = tensor.memory.copy()
    for k, row in enumerate(rows):
        dense = smem.data[[place(offset, k * row_bytes + i, swizzle, row_bytes) for i in range(row_bytes)]]
        model_store(tensor, (column, row), dense, 0, 0, stored)
    tma.scatter4(tensor.tm, (column, *rows), smem, offset, tensor.gmem)
    assert np.array_equal(tensor.memory, stored)


def test_gather4_and_scatter4_faults():
    rng = np.random.default_rng(10)
    smem = shared(rng)
    tensor = Tensor(rng, "f16", (100, 20), (64, 1), swizzle=128)
    with fails("tensor map", "must not be negative"):
        tma.scatter4(tensor.tm, (0, 1, 2, -3, 4), smem, 2048, tensor.gmem)
    with fails("tensor map", "4 coordinates for four rows"):
        tma.gather4(tensor.tm, (0, 1, 2, 3), tensor.gmem, smem, 2048)
    smem.state[2048 + 2 * 128 + 5] = GENERIC
    with fails("proxy fence", hex(2048 + 2 * 128 + 5)):
        tma.scatter4(tensor.tm, (0, 1, 2, 3, 4), smem, 2048, tensor.gmem)
    tall = Tensor(rng, "f16", (100, 20), (64, 4), swizzle=128)
    with fails("tensor map", "a box of one row"):
        tma.gather4(tall.tm, (0, 1, 2, 3, 4), tall.gmem, smem, 2048)
    with fails("tensor map", "rank 3"):
        cube = Tensor(rng, "f16", (100, 20, 2), (64, 1, 1), swizzle=128)
        tma.scatter4(cube.tm, (0, 1, 2, 3, 4), smem, 2048, cube.gmem)


def test_prefetch_changes_nothing():
    rng = np.random.default_rng(11)
    tensor = Tensor(rng, "f16", (100, 20), (64, 1))
    before = tensor.memory.copy()
    tma.prefetch_tile(tensor.tm, (80, 3), tensor.gmem)
    tma.prefetch_tile(tensor.tm, (-496, 3), tensor.gmem)
    tma.prefetch_tile(tensor.tm, (0, 1, 5, 19, 30), tensor.gmem, "tile::gather4")
    assert np.array_equal(tensor.memory, before)
    with fails("unsupported", "im2col"):
        tma.prefetch_tile(tensor.tm, (0, 0), tensor.gmem, "im2col")
    with fails("misaligned"):
        tma.prefetch_tile(tensor.tm, (4, 0), tensor.gmem)
    with fails("out of bounds"):
        tma.prefetch_tile(tensor.tm, (0, 0), GlobalMemory())
    tma.bulk_prefetch(tensor.gmem, tensor.address, 64)
    with fails("misaligned"):
        tma.bulk_prefetch(tensor.gmem, tensor.address + 8, 64)
    with fails("misaligned"):
        tma.bulk_prefetch(tensor.gmem, tensor.address, 40)
    with fails("out of bounds"):
        tma.bulk_prefetch(tensor.gmem, tensor.address, 1 << 20)


# --- reductions ----------------------------------------------------------------------------------------------------

FORMATS = {"f16": (10, 5), "bf16": (7, 8), "f32": (23, 8), "f64": (52, 11)}  # mantissa and exponent bits
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}


def split_float(bits, kind):
    """"nan", ±infinity as float, or (sign bit, exact value)."""
    m, e = FORMATS[kind]
    sign, exponent, mantissa = bits >> (m + e), bits >> m & (1 << e) - 1, bits & (1 << m) - 1
    bias = (1 << e - 1) - 1
    if exponent == (1 << e) - 1:
        return "nan" if mantissa else (-1) ** sign * float("inf")
    value = Fraction(mantissa, 1 << m) * Fraction(2) ** (1 - bias)
    if exponent:
        value = (1 + Fraction(mantissa, 1 << m)) * Fraction(2) ** (exponent - bias)
    return sign, (-value if sign else value)


def join_float(value, kind):
    """Bits of the exact nonzero value rounded to nearest even."""
    m, e = FORMATS[kind]
    bias = (1 << e - 1) - 1
    size, exponent = abs(value), 1 - bias
    while size >= Fraction(2) ** (exponent + 1):
        exponent += 1
    code = round(size / Fraction(2) ** (exponent - m)) + ((exponent + bias - 1) << m)  # a carry goes to the exponent
    return min(code, (1 << e) - 1 << m) | (int(value < 0) << (m + e))


def add_exactly(old, new, kind, flush=False):
    parts = [split_float(bits, kind) for bits in (old, new)]
    width = sum(FORMATS[kind])
    if "nan" in parts or sorted(map(str, parts)) == ["-inf", "inf"]:
        return NAN[kind]
    for part, bits in zip(parts, (old, new), strict=True):
        if isinstance(part, float):
            return bits
    tiny = Fraction(2) ** (2 - (1 << FORMATS[kind][1] - 1))
    if flush:
        parts = [(s, v if abs(v) >= tiny else Fraction(0)) for s, v in parts]
    total = parts[0][1] + parts[1][1]
    if not total:
        both_negative = parts[0][0] and parts[1][0] and not parts[0][1]
        return int(both_negative) << width
    out = join_float(total, kind)
    return out & 1 << width if flush and abs(total) < tiny else out


def as_signed(bits, width):
    return bits - (1 << width) if bits >> (width - 1) else bits


def pick_float(op, old, new, kind):
    sides = [split_float(bits, kind) for bits in (old, new)]
    if sides == ["nan", "nan"]:
        return NAN[kind]
    if "nan" in sides:
        return new if sides[0] == "nan" else old
    keys = [(s, 0) if isinstance(s, float) else (float(s[1]), -s[0]) for s in sides]
    first = keys[0] <= keys[1] if op == "min" else keys[0] >= keys[1]
    return old if first else new


def reduce_exactly(op, kind, old, new, flush=False):
    width = {"b32": 32, "b64": 64}.get(kind) or BITS[kind]
    if op in ("and", "or", "xor"):
        return {"and": old & new, "or": old | new, "xor": old ^ new}[op]
    if op == "inc":
        return 0 if old >= new else old + 1
    if op == "dec":
        return new if old == 0 or old > new else old - 1
    if kind in FORMATS:
        return add_exactly(old, new, kind, flush) if op == "add" else pick_float(op, old, new, kind)
    if op == "add":
        return (old + new) % (1 << width)
    a, b = (as_signed(x, width) if kind[0] == "s" else x for x in (old, new))
    return (min if op == "min" else max)(a, b) % (1 << width)


GLOBAL_PAIRS = [*[("add", k) for k in ("u32", "s32", "u64", "f32", "f16", "bf16")],
                *[(op, k) for op in ("min", "max") for k in ("u32", "s32", "u64", "s64", "f16", "bf16")],
                ("inc", "u32"), ("dec", "u32"), *[(op, k) for op in ("and", "or", "xor") for k in ("b32", "b64")]]
SHARED_PAIRS = [("add", "u32"), ("add", "s32"), ("add", "u64"), ("min", "u32"), ("min", "s32"), ("max", "u32"),
                ("max", "s32"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")]


def hard_values(rng, kind, count):
    """Random bit patterns of the kind's width, a third of them special or close to each other."""
    width = {"b32": 32, "b64": 64}.get(kind) or BITS[kind]
    special = [0, 1, 2, (1 << width) - 1, 1 << width - 1, (1 << width - 1) - 1, (1 << width - 1) + 1]
    if kind in FORMATS:
        m, e = FORMATS[kind]
        top = (1 << e) - 1 << m
        special += [top, top + 1, top - 1, top | 1 << (m + e), top - 1 | 1 << (m + e), 1 << m, (1 << m) - 1,
                    (1 << m) - 1 | 1 << (m + e), (1 << e - 1) - 1 << m, ((1 << e - 1) - 1 << m) + 1]
    out = [int.from_bytes(rng.bytes(width // 8), "little") for _ in range(count)]
    return [int(rng.choice(special, replace=True)) if rng.random() < 0.34 and width < 64 else
            special[int(rng.integers(len(special)))] if rng.random() < 0.34 else v for v in out]


def to_bytes(values, kind):
    width = {"b32": 32, "b64": 64}.get(kind) or BITS[kind]
    return np.frombuffer(b"".join(v.to_bytes(width // 8, "little") for v in values), np.uint8)


@pytest.mark.parametrize("op, kind", GLOBAL_PAIRS)
def test_reduce_tile(op, kind):
    """Whole and clipped boxes; guard bytes unchanged; the map's type gives the kind."""
    rng = np.random.default_rng(12)
    for type in {"b32": ("u32", "s32"), "b64": ("u64", "s64")}.get(kind, (kind,)):
        tensor = Tensor(rng, type, (300 * 8 // BITS[type], 5), (128 * 8 // BITS[type], 3), swizzle=128, pad=1)
        inside = tensor.memory[tensor.first:tensor.memory.size - tensor.guard]
        filler = to_bytes(hard_values(rng, kind, 1 + inside.size * 8 // BITS[type]), kind)
        inside[:] = filler[:inside.size]
        for coords in ((0, 0), (tensor.step, 1), (tensor.sizes[0] // tensor.step * tensor.step - tensor.step, 4),
                       (19 * tensor.step, 0)):
            smem = shared(rng)
            values = to_bytes(hard_values(rng, kind, 384 * 8 // BITS[type]), kind)
            smem.data[3072:3072 + 384] = values
            want = tensor.memory.copy()
            _, written = model_store(tensor, coords, smem.data, 3072, 128, want,
                                     lambda old, new: reduce_exactly(op, kind, old, new))
            assert tma.reduce_tile(tensor.tm, coords, smem, 3072, tensor.gmem, op) == written
            assert np.array_equal(tensor.memory, want)


def test_reduce_tile_flushes_only_the_ftz_type():
    rng = np.random.default_rng(13)
    cases = [(1, 1), (0x80000001, 0x80000003), (0x00800000, 0x807FFFFF), (0x3F800000, 5), (0x00000007, 0x80000007)]
    for type in ("f32", "f32.ftz"):
        tensor = Tensor(rng, type, (8, 1), (8, 1))
        where = tensor.memory[tensor.first:tensor.first + 20]
        where[:] = to_bytes([a for a, _ in cases], "u32")
        smem = shared(rng)
        smem.data[2048:2048 + 20] = to_bytes([b for _, b in cases], "u32")
        tma.reduce_tile(tensor.tm, (0, 0), smem, 2048, tensor.gmem, "add")
        want = [add_exactly(a, b, "f32", flush=type == "f32.ftz") for a, b in cases]
        assert where.view(np.uint32).tolist() == want


def test_reduce_tile_faults():
    rng = np.random.default_rng(14)
    smem = shared(rng)
    for type, op in (("u8", "add"), ("u16", "add"), ("b4x16", "add"), ("f64", "add"), ("s64", "add"), ("f32", "min"),
                     ("tf32", "add"), ("s32", "inc"), ("f16", "and"), ("u32", "mul")):
        tensor = Tensor(rng, type, (128, 5), (512 // max(BITS.get(type, 32), 4), 1))
        with fails("unsupported", f"{op} on element type {type}"):
            tma.reduce_tile(tensor.tm, (0, 0), smem, 2048, tensor.gmem, op)
    tensor = Tensor(rng, "u32", (64, 5), (32, 2))
    with fails("tensor map", "must not be negative"):
        tma.reduce_tile(tensor.tm, (-4, 0), smem, 2048, tensor.gmem, "add")
    smem.state[2048 + 128] = GENERIC
    with fails("proxy fence", hex(2048 + 128)):
        tma.reduce_tile(tensor.tm, (0, 0), smem, 2048, tensor.gmem, "add")
    overlapping = tensormap.decode(tensormap.encode("u32", tensor.address, (64, 5), (64,), (32, 2)))
    with fails("unsupported", "overlaps itself"):
        tma.reduce_tile(overlapping, (0, 0), smem, 4096, tensor.gmem, "add")
    assert tma.reduce_tile(overlapping, (48, 0), smem, 4096, tensor.gmem, "add") == 128  # 64-byte rows, 64 bytes apart
    planes = tensormap.decode(tensormap.encode("u32", tensor.address, (32, 2, 2), (128, 128), (32, 2, 2)))
    with fails("unsupported", "stride 128 bytes over 256 bytes"):
        tma.reduce_tile(planes, (0, 0, 0), smem, 4096, tensor.gmem, "add")
    for strides in ((256, 128), (128, 256)):  # apart, whichever dimension is the outer one in memory
        apart = tensormap.decode(tensormap.encode("u32", tensor.address, (32, 2, 2), strides, (32, 2, 2)))
        assert tma.reduce_tile(apart, (0, 0, 0), smem, 4096, tensor.gmem, "add") == 512


# --- bulk copies ---------------------------------------------------------------------------------------------------


def flat(rng, size=4096):
    """Random global memory aligned to 16 bytes: (array, address, GlobalMemory)."""
    raw = rng.integers(0, 256, size + 16, dtype=np.uint8)
    start = -raw.ctypes.data % 16
    array = raw[start:start + size]
    gmem = GlobalMemory()
    gmem.register(array.ctypes.data, size)
    return array, array.ctypes.data, gmem


def test_bulk_load():
    rng = np.random.default_rng(15)
    array, address, gmem = flat(rng)
    smems = [shared(rng, written=False) for _ in range(3)]
    want = [s.data.copy() for s in smems]
    assert tma.bulk_load(gmem, address + 48, smems[0], 2064, 160) == 160
    want[0][2064:2224] = array[48:208]
    assert tma.bulk_load_multicast(gmem, address + 4096 - 32, smems[1:], 4096, 32) == 32
    for data in want[1:]:
        data[4096:4128] = array[-32:]
    for smem, data in zip(smems, want, strict=True):
        assert np.array_equal(smem.data, data)
    assert np.flatnonzero(smems[0].state).tolist() == list(range(2064, 2224)) and smems[0].state.max() == CLEAN


@pytest.mark.parametrize("mask", [None, 0xFFFF, 0, 1, 0x8001, 0x0FF0, 0xA5C3])
def test_bulk_store(mask):
    rng = np.random.default_rng(16)
    array, address, gmem = flat(rng)
    smem = shared(rng)
    picked = [i for i in range(160) if mask is None or mask >> i % 16 & 1]
    smem.state[:] = UNWRITTEN
    smem.state[[2064 + i for i in picked]] = CLEAN
    want = array.copy()
    for i in picked:
        want[320 + i] = smem.data[2064 + i]
    assert tma.bulk_store(smem, 2064, gmem, address + 320, 160, mask) == len(picked)
    assert np.array_equal(array, want)
    if picked:
        smem.mark_generic(slice(2064 + picked[-1], 2065 + picked[-1]), warp=0, sequence=1)
        with fails("proxy fence", hex(2064 + picked[-1])):
            tma.bulk_store(smem, 2064, gmem, address + 320, 160, mask)


def test_bulk_shared_to_shared():
    rng = np.random.default_rng(17)
    src, dst = shared(rng), shared(rng, written=False)
    want = dst.data.copy()
    want[4096:4096 + 96] = src.data[2048 + 16:2048 + 112]
    assert tma.bulk_shared_to_shared(src, 2048 + 16, dst, 4096, 96) == 96
    assert np.array_equal(dst.data, want) and (dst.state == CLEAN).sum() == 96
    with fails("unsupported", "another CTA"):
        tma.bulk_shared_to_shared(src, 2048, src, 4096, 96)
    src.state[2048] = UNWRITTEN
    with fails("uninitialised"):
        tma.bulk_shared_to_shared(src, 2048, dst, 4096, 96)


def test_bulk_faults():
    rng = np.random.default_rng(18)
    array, address, gmem = flat(rng)
    smem, before = shared(rng), array.copy()
    for change, kind, message in ((dict(size=40), "misaligned", "40 bytes; must be a multiple of 16"),
                                  (dict(address=address + 8), "misaligned", "not a multiple of 16"),
                                  (dict(offset=2056), "misaligned", "not a multiple of 16"),
                                  (dict(address=address + 4080), "out of bounds", "global access of 32 bytes"),
                                  (dict(offset=1024 + SHARED - 16), "out of bounds", "shared access of 32 bytes")):
        call = dict(gmem=gmem, address=address, smem=smem, offset=2048, size=32) | change
        for copy in (tma.bulk_load, tma.bulk_store, lambda **c: tma.bulk_store(**c, byte_mask=3),
                     lambda **c: tma.bulk_reduce("add", "u32", **c)):
            with fails(kind, message):
                copy(**call)
    assert np.array_equal(array, before)


@pytest.mark.parametrize("op, kind", [*GLOBAL_PAIRS, ("add", "f64")])
def test_bulk_reduce(op, kind):
    rng = np.random.default_rng(19)
    array, address, gmem = flat(rng)
    smem, count = shared(rng), 480
    width = {"b32": 4, "b64": 8}.get(kind) or BITS[kind] // 8
    old, new = hard_values(rng, kind, count), hard_values(rng, kind, count)
    if kind == "f64":  # NaN payloads of f64 are not pinned down
        old, new = ([v if split_float(v, kind) != "nan" and not isinstance(split_float(v, kind), float) else 1 << 62
                     for v in side] for side in (old, new))
    array[:count * width] = to_bytes(old, kind) if width < 8 else to_bytes(old, kind)[:4096]
    smem.data[2048:2048 + count * width] = to_bytes(new, kind)
    want = array.copy()
    want[64:count * width] = to_bytes([reduce_exactly(op, kind, a, b) for a, b in
                                       zip(old[64 // width:], new[64 // width:], strict=True)], kind)
    noftz = op == "add" and kind in ("f16", "bf16")
    size = count * width - 64
    assert tma.bulk_reduce(op, kind, smem, 2048 + 64, gmem, address + 64, size, noftz=noftz) == size
    assert np.array_equal(array, want)


@pytest.mark.parametrize("op, kind", SHARED_PAIRS)
def test_bulk_reduce_shared(op, kind):
    rng = np.random.default_rng(20)
    src, dst = shared(rng), shared(rng)
    width = {"b32": 4}.get(kind) or BITS[kind] // 8
    old, new = hard_values(rng, kind, 96), hard_values(rng, kind, 96)
    dst.data[4096:4096 + 96 * width] = to_bytes(old, kind)
    src.data[2048:2048 + 96 * width] = to_bytes(new, kind)
    want = dst.data.copy()
    total = [reduce_exactly(op, kind, a, b) for a, b in zip(old, new, strict=True)]
    want[4096:4096 + 96 * width] = to_bytes(total, kind)
    assert tma.bulk_reduce_shared(op, kind, src, 2048, dst, 4096, 96 * width) == 96 * width
    assert np.array_equal(dst.data, want)


def test_bulk_reduce_pairs_are_those_of_the_document():
    rng = np.random.default_rng(21)
    array, address, gmem = flat(rng)
    src, dst = shared(rng), shared(rng)
    kinds = ("u32", "s32", "b32", "u64", "s64", "b64", "f16", "bf16", "f32", "f64")
    for op, kind in itertools.product(("add", "min", "max", "inc", "dec", "and", "or", "xor", "mul"), kinds):
        noftz = op == "add" and kind in ("f16", "bf16")
        if (op, kind) not in [*GLOBAL_PAIRS, ("add", "f64")]:
            with fails("unsupported", f"{op}.{kind}"):
                tma.bulk_reduce(op, kind, src, 2048, gmem, address, 16, noftz=noftz)
        if (op, kind) not in SHARED_PAIRS:
            with fails("unsupported", f"{op}.{kind}"):
                tma.bulk_reduce_shared(op, kind, src, 2048, dst, 2048, 16)
    for kind in ("f16", "bf16"):
        with fails("unsupported", "without .noftz"):
            tma.bulk_reduce("add", kind, src, 2048, gmem, address, 16)
    with fails("unsupported", ".noftz with"):
        tma.bulk_reduce("add", "u32", src, 2048, gmem, address, 16, noftz=True)
    with fails("unsupported", "another CTA"):
        tma.bulk_reduce_shared("add", "u32", src, 2048, src, 2048, 16)


def test_bulk_reduce_f32_subnormals():
    """They are kept, with .noftz and without [H200: probe bulk/reduce_add_f32]; PTX ISA changed its mind."""
    rng = np.random.default_rng(22)
    cases = [(1, 1), (0x80000001, 0x80000003), (0x00800000, 0x807FFFFF), (0x3F800000, 5)]
    for noftz in (True, False):
        array, address, gmem = flat(rng)
        smem = shared(rng)
        array[:16] = to_bytes([a for a, _ in cases], "u32")
        smem.data[2048:2064] = to_bytes([b for _, b in cases], "u32")
        tma.bulk_reduce("add", "f32", smem, 2048, gmem, address, 16, noftz=noftz)
        assert array[:16].view(np.uint32).tolist() == [add_exactly(a, b, "f32") for a, b in cases]
