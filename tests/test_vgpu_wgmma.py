"""Warpgroup MMA: operand layouts and fragments from the tables of PTX ISA 9.7.15.5, exact integers, MMA-Sim bit for
bit, and what happens to programs that wait, fence or agree too little."""

import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import kernels as k
import numpy as np
import pytest
import torch
from kernels import words
from mmasim.nv_ptx import WGMMA

import vgpu
from vgpu import descriptor as descriptors
from vgpu import numerics, wgmma
from vgpu.mutate import mutants
from vgpu.timing import chips
from vgpu.timing.record import Recorder
from vgpu.timing.simulate import Recorded, Simulation
from vgpu.validation import kernels as timing_kernels

SHARED = ".extern .shared .align 1024 .b8 sm[];"
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "e4m3": torch.float8_e4m3fn,
         "e5m2": torch.float8_e5m2, "s8": torch.int8, "u8": torch.uint8}
SIZE = {"f16": 2, "bf16": 2, "tf32": 4}  # bytes of an element, otherwise 1
ORDERS = ("copies", "tensor", "random")


# --- where things lie, from the documents ---------------------------------------------------------------------


def offset(coordinate: int, shape, stride) -> int:
    """Address of a coordinate in a nested layout, first mode fastest."""
    total = 0
    for extent, step in zip(shape, stride, strict=True):
        total += coordinate % extent * step
        coordinate //= extent
    return total


def canonical(major: str, width: int, size: int, lbo: int, sbo: int):
    """Byte offset of element (row along M or N, k) by the canonical layouts of PTX ISA 9.7.15.5.1.2.1; width: bytes of
    a swizzled row, 16 without. Swizzling: Swizzle<log2(width / 16), 4, 3> of the bytes."""
    t, big = 16 // size, 1 << 20  # elements in 16 bytes
    if major == "K":
        rows = (8, big), (width, sbo)
        ks = (t, big), (size, lbo if width == 16 else 16)
    else:
        rows = (t, width // 16, big), (size, 16, sbo if width == 16 else lbo)
        ks = (8, big), (width, lbo if width == 16 else sbo)

    def place(row: int, column: int, start: int) -> int:
        address = start + offset(row, *rows) + offset(column, *ks)
        return address ^ (address >> 7 & width // 16 - 1) << 4

    return place


def image(matrix: np.ndarray, place, start: int, into: np.ndarray) -> None:
    """Put the elements of matrix[rows, k] where `place` says."""
    raw = np.ascontiguousarray(matrix).view(np.uint8).reshape(*matrix.shape, -1)
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            at = place(row, column, start)
            into[at:at + raw.shape[2]] = raw[row, column]


def d_place(thread: int, i: int) -> tuple[int, int]:
    """Row and column of element i of D in a thread of the warpgroup (PTX ISA figure 'WGMMA .m64nNk16 D matrix')."""
    lane = thread % 32
    return 16 * (thread // 32) + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def a_place(thread: int, i: int, size: int) -> tuple[int, int]:
    """Row and column of element i of A's fragment, for elements of 2, 1 or 4 bytes (figures 'matrix A')."""
    row, c = 16 * (thread // 32) + thread % 32 // 4, thread % 4
    if size == 2:
        return row + 8 * (i // 2 % 2), 2 * c + i % 2 + 8 * (i // 4)
    if size == 1:
        return row + 8 * (i // 4 % 2), 4 * c + i % 4 + 16 * (i // 8)
    return row + 8 * (i % 2), c + 4 * (i // 2)


def to_threads(d: np.ndarray) -> np.ndarray:
    """D[64, n] -> [128, n / 2]: the elements of each thread."""
    return np.array([[d[d_place(t, i)] for i in range(d.shape[1] // 2)] for t in range(128)], d.dtype)


def encoded(x: np.ndarray, fmt: str) -> np.ndarray:
    """float64 values in the format's bits."""
    return torch.from_numpy(x).to(TORCH[fmt]).view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[SIZE.get(fmt, 1)]
                                                    ).numpy()


# --- a kernel around some MMAs --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One wgmma.mma_async, or `steps` along K. width: bytes of a swizzled row of both operands."""

    n: int = 16
    a: str = "f16"
    b: str = "f16"
    d: str = "f32"
    majors: str = "KK"
    width: int = 128
    steps: int = 1
    registers: bool = False  # A from registers
    scale_d: str = "1"
    tail: tuple[int, ...] = (1, 1)  # imm-scale
    satfinite: bool = False

    @property
    def k(self) -> int:
        return 32 // SIZE.get(self.a, 1)

    @property
    def regs(self) -> int:
        return self.n // (4 if self.d == "f16" else 2)

    def layout(self, major: str, rows: int) -> tuple[int, int, int]:
        """LBO, SBO and the distance from one k-step to the next, of an operand without gaps."""
        if major == "K" and self.width == 16:
            return 128, 256 * self.steps, 256
        if major == "K":
            return 16, 8 * self.width, 32
        across = -(-rows * SIZE[self.a] // self.width)  # atoms along M or N
        if self.width == 16:
            return 128 * across, 128, 256 * across
        return 16 * self.width * self.steps, 8 * self.width, 16 * self.width


def descriptor(register: str, start: int, lbo: int, sbo: int, width: int, base: int = 0) -> str:
    """PTX that makes the descriptor (PTX ISA 9.7.15.5.1.2.2) of the tile at `start` bytes after `sm`."""
    code = {16: 0, 128: 1, 64: 2, 32: 3}[width]
    rest = code << 62 | base << 49 | sbo // 16 << 32 | lbo // 16 << 16
    return f"""
        mov.u32 %t9, sm;
        add.u32 %t9, %t9, {start};
        shr.u32 %t9, %t9, 4;
        cvt.u64.u32 {register}, %t9;
        or.b64 {register}, {register}, {rest};"""


def names(prefix: str, count: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(count)) + "}"


def instruction(case: Case, accumulators: str = "c", extra: str = "") -> str:
    """The text of one MMA with descriptors in %d10 and %d11."""
    a = names("a_", 4) if case.registers else "%d10"
    imm = [str(s) for s in case.tail] if case.d != "s32" else []
    if SIZE.get(case.a) == 2:
        imm += [str(int(m == "M")) for m in (case.majors[1:] if case.registers else case.majors)]
    sat = ".satfinite" if case.satfinite else ""
    return (f"wgmma.mma_async.sync.aligned.m64n{case.n}k{case.k}.{case.d}.{case.a}.{case.b}{sat} "
            f"{names(accumulators, case.regs)}, {a}, %d11, {', '.join([case.scale_d, *imm])};{extra}")


DECLARE = ".reg .b32 %c<128>; .reg .b32 %e<128>; .reg .b32 %a_<4>; .reg .b32 %t<10>; .reg .pred %on;"
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


def fill(nbytes: int) -> str:
    """128 threads copy the image at %a0 to shared memory, 16 bytes each at a time."""
    return "\n".join(f"""
        mad.wide.u32 %d0, %t, 16, %a0;
        ld.global.v4.b32 {{%t0, %t1, %t2, %t3}}, [%d0+{at}];
        mov.u32 %t9, sm;
        mad.lo.u32 %t9, %t, 16, %t9;
        st.shared.v4.b32 [%t9+{at}], {{%t0, %t1, %t2, %t3}};""" for at in range(0, nbytes, 2048))


def move(register: str, count: int, pointer: str, store: bool) -> str:
    """Each thread loads or stores `count` registers of its own."""
    each = [f"st.global.b32 [%d1+{4 * i}], %{register}{i};" if store else
            f"ld.global.b32 %{register}{i}, [%d1+{4 * i}];" for i in range(count)]
    return f"mad.wide.u32 %d1, %t, {4 * count}, {pointer};\n" + "\n".join(each)


def compute(case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray, **options) -> tuple[np.ndarray, vgpu.Launch]:
    """D = A B^T + C on the virtual GPU. a: [64, steps k], b: [n, steps k], encoded; c: [64, n] in D's type."""
    places = [canonical(m, case.width, a.itemsize, *case.layout(m, rows)[:2])
              for m, rows in zip(case.majors, (64, case.n), strict=True)]
    memory, half = np.zeros(2 << 16, np.uint8), 1 << 16
    image(a, places[0], 0, memory)
    image(b, places[1], half, memory)
    steps = []
    for i in range(case.steps):
        for register, major, rows, start in (("%d10", case.majors[0], 64, 0), ("%d11", case.majors[1], case.n, half)):
            lbo, sbo, step = case.layout(major, rows)
            steps.append(descriptor(register, start + i * step, lbo, sbo, case.width))
        steps.append(instruction(case))
    body = "\n".join([fill(2 * half), move("c", case.regs, "%a1", False), move("a_", 4, "%a2", False),
                      "fence.proxy.async.shared::cta;\nbar.sync 0;\nsetp.eq.u32 %on, %t, %t;", FENCE, *steps, COMMIT,
                      WAIT, move("c", case.regs, "%a1", True)])
    fragments = np.zeros((128, 16 // a.itemsize), a.dtype)
    for t in range(128):
        for i in range(fragments.shape[1]):
            fragments[t, i] = a[a_place(t, i, a.itemsize)]
    registers = to_threads(c)
    launch = k.run(body, memory, registers.view(np.uint32), fragments.view(np.uint32), threads=128,
                   shared_bytes=2 * half, declare=DECLARE, module=SHARED, **options)
    assert not launch.warnings
    return registers, launch


def integers(rng, shape, fmt: str, top: int = 3) -> np.ndarray:
    return rng.integers(0 if fmt == "u8" else -top, top + 1, shape).astype(np.float64)


def check(case: Case, top: int = 3, sign: int = 1, start: bool = True, **options) -> vgpu.Launch:
    """Small integers have one right answer, in every format and order of summation."""
    rng = np.random.default_rng(case.n)
    a, b = (integers(rng, (rows, case.steps * case.k), f, top) for rows, f in ((64, case.a), (case.n, case.b)))
    c = rng.integers(-9, 10, (64, case.n)).astype(wgmma.D_TYPES[case.d])
    got, launch = compute(case, encoded(a, case.a), encoded(b, case.b), c, **options)
    want = sign * (a @ b.T) + (c if start else 0)
    assert (np.abs(want) <= 2048).all() or case.d != "f16"  # exact in float16
    np.testing.assert_array_equal(got.astype(np.float64), to_threads(want))
    return launch


# --- layouts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 32, 64, 128])
@pytest.mark.parametrize("majors", ["KK", "KM", "MK", "MM"])
@pytest.mark.parametrize("a", ["f16", "bf16"])
def test_canonical_layouts(a, majors, width):
    check(Case(n=72 if majors[1] == "M" else 24, a=a, b=a, majors=majors, width=width))


@pytest.mark.parametrize("width", [16, 64, 128])
@pytest.mark.parametrize("a, b, d", [("f16", "f16", "f16"), ("tf32", "tf32", "f32"), ("e4m3", "e4m3", "f32"),
                                     ("e4m3", "e5m2", "f16"), ("e5m2", "e4m3", "f32"), ("s8", "s8", "s32"),
                                     ("u8", "s8", "s32"), ("s8", "u8", "s32"), ("u8", "u8", "s32")])
def test_element_types(a, b, d, width):
    check(Case(n=32, a=a, b=b, d=d, width=width))


@pytest.mark.parametrize("n", [8, 16, 40, 128, 248, 256])
def test_sizes_of_n(n):
    check(Case(n=n))


@pytest.mark.parametrize("case", [
    Case(steps=2, width=64), Case(steps=4, width=128), Case(steps=3, width=16), Case(steps=2, majors="MM", n=64),
    Case(steps=3, majors="MM", width=16), Case(steps=4, a="s8", b="u8", d="s32"), Case(steps=4, d="f16"),
    Case(steps=2, a="tf32", b="tf32", width=64)], ids=str)
def test_a_group_of_mmas_along_k(case):
    """They run in one batch; each starts inside the swizzle atom, or at the next one."""
    for order in ORDERS:
        check(case, order=order)


@pytest.mark.parametrize("a, d", [("f16", "f32"), ("f16", "f16"), ("bf16", "f32"), ("tf32", "f32"), ("e5m2", "f32"),
                                  ("u8", "s32")])
def test_a_from_registers(a, d):
    check(Case(n=24, a=a, b=a, d=d, registers=True))


def test_b_is_mn_major_with_a_from_registers():
    check(Case(n=64, registers=True, majors="KM"))


@pytest.mark.parametrize("tail, sign", [((-1, 1), -1), ((1, -1), -1), ((-1, -1), 1)])
def test_negated_operands(tail, sign):
    check(Case(tail=tail), sign=sign)
    check(Case(a="e4m3", b="e4m3", tail=tail), sign=sign)


@pytest.mark.parametrize("scale_d, start", [("0", False), ("1", True), ("%on", True), ("!%on", False)])
def test_scale_d(scale_d, start):
    check(Case(scale_d=scale_d), start=start)


def test_large_integers_wrap_or_saturate():
    a, b = np.full((64, 32), 255, np.uint8), np.full((16, 32), 255, np.uint8)
    c = np.full((64, 16), 2**31 - 1 - 32 * 255 * 255 // 2, np.int32)
    case = Case(a="u8", b="u8", d="s32")
    wrapped = int(c[0, 0]) + 32 * 255 * 255 - 2**32
    assert (compute(case, a, b, c)[0] == wrapped).all()
    assert (compute(replace(case, satfinite=True), a, b, c)[0] == 2**31 - 1).all()


def test_fragments_are_inverse_to_each_other():
    rng = np.random.default_rng(0)
    for dtype, name in ((np.float32, "f32"), (np.float16, "f16")):
        rows = rng.standard_normal((16, 40)).astype(dtype)
        registers = wgmma.d_registers(rows)
        assert registers.shape == (20 if name == "f32" else 10, 32)
        np.testing.assert_array_equal(wgmma.d_rows(registers, name), rows)


# --- arithmetic -----------------------------------------------------------------------------------------------


def random_bits(rng, fmt: str, shape, narrow: bool) -> np.ndarray:
    """Any bit patterns; or, narrow, values whose exponents are close, so that sums cancel."""
    size = SIZE.get(fmt, 1)
    if narrow:
        return encoded(rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 3, shape), fmt)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * size)).astype(np.uint8).view(f"i{size}" if size > 1 else "u1")


def simulated(case: Case, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """MMA-Sim's result of one MMA."""
    sim = WGMMA("Hopper", f"m64n{case.n}k{case.k}.{case.d}.{case.a}.{case.b}")
    x, y = (torch.from_numpy(raw.copy()).view(TORCH[fmt]) for raw, fmt in ((a, case.a), (b, case.b)))
    return sim(x, y.T, torch.from_numpy(c)).numpy()


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    return got.dtype == want.dtype and (got.view(np.uint8) == want.view(np.uint8)).all()


FLOATS = [Case(n=24, a=a, b=b, d=d) for a, b, d in (
    ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
    ("e4m3", "e4m3", "f32"), ("e4m3", "e5m2", "f32"), ("e5m2", "e4m3", "f16"), ("e5m2", "e5m2", "f16"))]


@pytest.mark.parametrize("kind", ["any", "narrow", "zero c", "small"])
@pytest.mark.parametrize("case", FLOATS, ids=lambda c: f"{c.d}.{c.a}.{c.b}")
def test_exact_is_mmasim(case, kind):
    rng = np.random.default_rng(len(kind))
    a, b = (random_bits(rng, f, (rows, case.k), kind != "any") for f, rows in ((case.a, 64), (case.b, case.n)))
    c = (rng.standard_normal((64, case.n)) * 2.0 ** rng.integers(-6, 6, (64, case.n))).astype(wgmma.D_TYPES[case.d])
    if kind == "any":
        c = rng.integers(0, 256, (64, case.n * c.itemsize)).astype(np.uint8).view(c.dtype)
    elif kind == "zero c":
        c[:] = 0
    elif kind == "small":
        c *= c.dtype.type(2.0**-14 if case.d == "f16" else 2.0**-130)
        a[:, 1:] = 0
        a[:, 0] = 1  # the smallest subnormal number
    form = wgmma.Form(case.n, case.k, case.d, case.a, case.b)
    x, y = numerics.decode(a.view(np.uint8), case.a), numerics.decode(b.view(np.uint8), case.b)
    got = wgmma.exact_product(form, x, y, c)
    assert same_bits(got, simulated(case, a, b, c))


def test_eight_bit_floats_keep_thirteen_bits():
    """The case that the others differ in: 1 + 2**-14 is 1 after a wgmma of 8-bit floats, and not after one of f16."""
    one = np.zeros((64, 32), np.float32)
    one[:, 0] = 1
    c = np.full((64, 8), 2.0**-14, np.float32)
    eight = wgmma.exact_product(wgmma.Form(8, 32, "f32", "e4m3", "e4m3"), one, one[:8], c)
    half = wgmma.exact_product(wgmma.Form(8, 16, "f32", "f16", "f16"), one[:, :16], one[:8, :16], c)
    assert (eight == 1).all()
    assert (half == 1 + 2.0**-14).all()


@pytest.mark.parametrize("case", FLOATS[:5], ids=lambda c: f"{c.d}.{c.a}")
def test_exact_launch_is_mmasim_step_by_step(case):
    case = replace(case, steps=2, n=16)
    rng = np.random.default_rng(3)
    a, b = (random_bits(rng, f, (rows, 2 * case.k), True) for f, rows in ((case.a, 64), (case.b, case.n)))
    c = rng.standard_normal((64, case.n)).astype(wgmma.D_TYPES[case.d])
    want = simulated(case, a[:, case.k:], b[:, case.k:], simulated(case, a[:, :case.k], b[:, :case.k], c))
    assert same_bits(compute(case, a, b, c, exact=True)[0], to_threads(want))


@pytest.mark.parametrize("case", FLOATS[:4], ids=lambda c: f"{c.d}.{c.a}")
def test_fast_is_close_to_exact(case):
    rng = np.random.default_rng(4)
    a, b = (random_bits(rng, f, (rows, case.k), True) for f, rows in ((case.a, 64), (case.b, case.n)))
    c = rng.standard_normal((64, case.n)).astype(wgmma.D_TYPES[case.d])
    form = wgmma.Form(case.n, case.k, case.d, case.a, case.b)
    x, y = numerics.decode(a.view(np.uint8), case.a), numerics.decode(b.view(np.uint8), case.b)
    exact, fast = wgmma.exact_product(form, x, y, c), wgmma.products(form, x, y, c, 1, False)
    scale = np.abs(c.astype(np.float64)) + np.abs(x) @ np.abs(y).T.astype(np.float64)
    bound = (1.5 * case.k + 8) * 2.0**-24 * scale + (2.0**-10 * np.abs(exact) if case.d == "f16" else 0)
    assert (np.abs(fast.astype(np.float64) - exact) <= bound).all()


# --- asynchrony -----------------------------------------------------------------------------------------------

TILE = Case(n=16)  # 64 and 16 rows of 128 bytes, the operands of all tests below
TILE_BYTES = 16384
READY = f"""
    {fill(TILE_BYTES)}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    {descriptor("%d10", 0, 16, 1024, 128)}
    {descriptor("%d11", 8192, 16, 1024, 128)}
    {chr(10).join(f"mov.b32 %c{i}, 0; mov.b32 %e{i}, 0;" for i in range(8))}"""
MMA, OTHER = instruction(TILE), instruction(TILE, "e")


@pytest.fixture
def tiles():
    """The tiles' bytes, and D of one MMA by threads."""
    rng = np.random.default_rng(1)
    a, b = integers(rng, (64, 16), "f16"), integers(rng, (16, 16), "f16")
    memory = np.zeros(TILE_BYTES, np.uint8)
    place = canonical("K", 128, 2, 16, 1024)
    image(encoded(a, "f16"), place, 0, memory)
    image(encoded(b, "f16"), place, 8192, memory)
    return memory, to_threads((a @ b.T).astype(np.float32))


def launch(body: str, tiles, threads=128, shared_bytes=TILE_BYTES + 2048, start=READY, **options):
    """Run READY and the body, which leaves its results in %c0 … %c7. Returns them [threads, 8] and the launch."""
    out = np.zeros((threads, 8), np.float32)
    done = k.run("\n".join([start, body, move("c", 8, "%a1", True)]), tiles[0], out.view(np.uint32), threads=threads,
                 shared_bytes=shared_bytes, declare=DECLARE, module=SHARED, **options)
    return out, done


def stops(kind, body: str, tiles, match: str, threads=128, start=READY, **options) -> vgpu.VirtualGpuError:
    """READY and the body must stop with an error of this kind, at the statement followed by `// here`."""
    out = np.zeros((threads, 8), np.uint32)
    return k.stops(kind, "\n".join([start, body, move("c", 8, "%a1", True)]), tiles[0], out, match=match, warp=None,
                   threads=threads, shared_bytes=TILE_BYTES + 2048, declare=DECLARE, module=SHARED, **options)


def test_accumulators_live_across_the_blocks_of_a_loop(tiles):
    """Their values come late, moves pass them on, and each turn waits for the group before only."""
    body = f"""
        mov.b32 %r0, 0;
        {chr(10).join(f"mov.b32 %e{i}, %c{i};" for i in range(8))}
    LOOP:
        {chr(10).join(f"mov.b32 %c{i}, %e{i};" for i in range(8))}
        {FENCE} {MMA} {COMMIT}
        wgmma.wait_group.sync.aligned 1;
        {chr(10).join(f"mov.b32 %e{i}, %c{i};" for i in range(8))}
        add.u32 %r0, %r0, 1;
        setp.lt.u32 %p0, %r0, 5;
        @%p0 bra LOOP;
        {WAIT}"""
    for order in ORDERS:
        out, done = launch(body, tiles, order=order)
        np.testing.assert_array_equal(out, 5 * tiles[1])
        assert not done.warnings


def test_two_sets_of_accumulators_in_turn(tiles):
    body = f"""
        mov.b32 %r0, 0;
    LOOP:
        {FENCE} {MMA} {COMMIT} wgmma.wait_group.sync.aligned 1;
        {FENCE} {OTHER} {OTHER} {COMMIT} wgmma.wait_group.sync.aligned 1;
        add.u32 %r0, %r0, 1;
        setp.lt.u32 %p0, %r0, 3;
        @%p0 bra LOOP;
        {WAIT}
        {chr(10).join(f"add.rn.f32 %c{i}, %c{i}, %e{i};" for i in range(8))}"""
    for order in ORDERS:
        np.testing.assert_array_equal(launch(body, tiles, order=order)[0], 9 * tiles[1])


def test_wait_group_covers_the_older_groups_only(tiles):
    """The first group's registers may be read while the second is in flight; the second's may not."""
    both = f"{FENCE} {MMA} {COMMIT} {OTHER} {COMMIT} wgmma.wait_group.sync.aligned 1;"
    read = "mov.b32 %r9, 0; {}\n" + WAIT
    out, _ = launch(both + read.format("add.rn.f32 %c0, %c0, 0f3F800000;"), tiles)
    np.testing.assert_array_equal(out[:, 0], tiles[1][:, 0] + 1)
    stops("race", both + read.format("add.rn.f32 %r9, %e0, %e0; // here"), tiles, "no wgmma.wait_group for it")


@pytest.mark.parametrize("use", [
    "add.rn.f32 %r9, %c3, %c3;", "add.u32 %r9, %c3, 1;", "setp.eq.b32 %p1, %c3, 0;", "st.shared.b32 [%t9], %c3;",
    "cvt.rn.f16.f32 %h1, %c3;", "mov.b64 %d5, {%c2, %c3};", "shfl.sync.idx.b32 %r9, %c3, 0, 31, -1;",
    "@%on add.u32 %c3, %t, 1;", "st.global.b32 [%a1], %c3;", "selp.b32 %r9, %c3, %t, %on;"])
def test_using_a_register_in_flight_is_a_race(tiles, use):
    start = "mov.u32 %t9, sm; setp.lt.u32 %on, %lane, 7;"
    stops("race", f"{start} {FENCE} {MMA} {COMMIT}\n {use} // here\n {WAIT}", tiles, r"PTX line \d+: wgmma.mma_async")


def test_a_group_that_is_not_committed_is_not_waited_for(tiles):
    stops("race", f"{FENCE} {MMA} {WAIT}", tiles, "no wgmma.wait_group")


def test_the_end_of_the_kernel_does_not_wait(tiles):
    body = f"{FENCE} {OTHER} {COMMIT}"
    stops("race", body, tiles, "the CTA exits while an operation")


def test_continuing_needs_no_fence_but_the_same_shape(tiles):
    wide = instruction(replace(TILE, n=8), "c", " // here")
    stops("race", f"{FENCE} {MMA}\n{wide}", tiles, "another shape in flight")
    shuffled = MMA.replace("%c0, %c1", "%c1, %c0") + " // here"
    stops("race", f"{FENCE} {MMA}\n{shuffled}", tiles, "only a part, or a copy")


def test_two_mmas_cannot_continue_one_in_flight(tiles):
    copies = "\n".join(f"mov.b32 %e{i}, %c{i};" for i in range(8))
    stops("race", f"{FENCE} {MMA}\n{copies}\n{MMA}\n{OTHER} // here", tiles, "a copy")


def test_registers_that_no_mma_writes_are_free(tiles):
    body = f"mov.b32 %r9, 7; {FENCE} {MMA} {COMMIT} add.u32 %r9, %r9, 1; {WAIT} cvt.rn.f32.u32 %c0, %r9;"
    out, _ = launch(body, tiles)
    assert (out[:, 0] == 8).all()
    np.testing.assert_array_equal(out[:, 1:], tiles[1][:, 1:])


# --- shared memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 7168, 8192 + 2032])
def test_storing_to_an_operand_in_flight_is_a_race(tiles, at):
    body = f"mov.u32 %t9, sm; {FENCE} {MMA} {COMMIT} bar.sync 0;\nst.shared.b32 [%t9+{at}], %t; // here\n{WAIT}"
    stops("race", body, tiles, "which an operation in flight still reads: PTX line")


def test_storing_elsewhere_or_after_the_wait_is_not(tiles):
    body = "mov.u32 %t9, sm; {} st.shared.b32 [%t9+{}], %t; {}"
    start = f"{FENCE} {MMA} {COMMIT}"
    for where in (body.format(start, 8192 + 2048 + 128, WAIT), body.format(start + WAIT, 0, "")):
        np.testing.assert_array_equal(launch(where, tiles)[0], tiles[1])


def test_a_copy_into_an_operand_in_flight_is_a_race(tiles):
    """As where a stage is released before wgmma.wait_group."""
    body = f"""
        mov.u32 %t9, sm;
        setp.eq.u32 %p0, %t, 0;
        @%p0 mbarrier.init.shared.b64 [%t9+{TILE_BYTES}], 1;
        fence.mbarrier_init.release.cluster;
        bar.sync 0;
        {FENCE} {MMA} {COMMIT}
        bar.sync 0;
        @%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%t9+{TILE_BYTES}], 1024;
        add.u32 %t8, %t9, {TILE_BYTES};
        @%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%t9], [%a0], 1024, [%t8]; // here
        {WAIT}"""
    for order in ORDERS:
        stops("race", body, tiles, "in flight still reads: PTX line", order=order)


def test_ordinary_stores_need_a_proxy_fence(tiles):
    start = READY.replace("fence.proxy.async.shared::cta;", "")
    stops("proxy fence", f"{FENCE}\n{MMA} // here", tiles, "operand A of wgmma.mma_async", start=start)


def test_operands_must_have_been_written(tiles):
    start = READY.replace(fill(TILE_BYTES), fill(2048))
    stops("uninitialised", f"{FENCE}\n{MMA} // here\n{COMMIT} {WAIT}", tiles, "operand", start=start)


def test_operands_must_lie_in_shared_memory(tiles):
    start = READY.replace(descriptor("%d11", 8192, 16, 1024, 128), descriptor("%d11", 1 << 17, 16, 1024, 128))
    stops("out of bounds", f"{FENCE}\n{MMA} // here\n{COMMIT} {WAIT}", tiles, "operand B", start=start)


# --- fences ---------------------------------------------------------------------------------------------------

UNFENCED, OVERWRITTEN = "are accessed by other instructions with no wgmma.fence", "in flight are written"


def warned(body: str, tiles, what: str) -> list[str]:
    """The lines of the body that are warned of; there must be no other warning."""
    done = launch(body, tiles)[1]
    source = k.ptx("\n".join([READY, body]), [tiles[0], words(8)], DECLARE, SHARED).split("\n")
    found = [re.search(rf"{what} .* PTX line (\d+)", w) for w in done.warnings]
    return [source[int(m[1]) - 1].strip() for m in found]


def unfenced(body: str, tiles) -> list[str]:
    """The MMAs that lack a fence."""
    return warned(body, tiles, UNFENCED)


def test_no_fence_at_all_is_warned_of(tiles):
    assert unfenced(f"{MMA}\n{COMMIT} {WAIT}", tiles) == [MMA]


def test_a_write_after_the_fence_is_warned_of(tiles):
    assert unfenced(f"{FENCE}\nmov.b32 %c3, 0;\n{MMA}\n{COMMIT} {WAIT}", tiles) == [MMA]
    assert unfenced(f"mov.b32 %c3, 0;\n{FENCE}\n{MMA}\n{COMMIT} {WAIT}", tiles) == []


def test_a_read_between_two_mmas_is_warned_of(tiles):
    between = f"{FENCE} {MMA} {COMMIT} {WAIT} add.rn.f32 %r9, %c3, %c3;"
    second = MMA.replace("%d11, 1,", "%d11, 0,")
    assert unfenced(f"{between}\n{second}\n{COMMIT} {WAIT}", tiles) == [second]
    assert unfenced(f"{between} {FENCE}\n{second}\n{COMMIT} {WAIT}", tiles) == []


def test_moves_pass_on_what_was_written(tiles):
    """A move of a register that was written before the fence is none; one of a register written after it is."""
    assert unfenced(f"mov.b32 %r9, 0; {FENCE} mov.b32 %c3, %r9;\n{MMA}\n{COMMIT} {WAIT}", tiles) == []
    assert unfenced(f"{FENCE} mul.lo.u32 %r9, %t, 0; mov.b32 %c3, %r9;\n{MMA}\n{COMMIT} {WAIT}", tiles) == [MMA]


def test_fragments_of_a_need_the_fence_too(tiles):
    from_registers = instruction(replace(TILE, registers=True))
    zero = "mov.b32 %a_0, 0; mov.b32 %a_1, 0; mov.b32 %a_2, 0; mov.b32 %a_3, 0;"
    assert unfenced(f"{FENCE} {zero}\n{from_registers}\n{COMMIT} {WAIT}", tiles) == [from_registers]
    assert unfenced(f"{zero} {FENCE}\n{from_registers}\n{COMMIT} {WAIT}", tiles) == []


def test_a_fence_on_one_path_only_is_warned_of(tiles):
    body = f"setp.lt.u32 %p0, %t, 512;\n@%p0 bra ON;\n{FENCE}\nON:\n{MMA}\n{COMMIT} {WAIT}"
    assert unfenced(body, tiles) == [MMA]


def test_writing_registers_of_an_mma_in_flight_is_warned_of(tiles):
    zero = "mov.b32 %c3, 0;"
    assert warned(f"{FENCE} {MMA} {COMMIT}\n{zero}\n{WAIT}", tiles, OVERWRITTEN) == [zero]
    assert warned(f"{FENCE} {MMA} {COMMIT} {WAIT}\n{zero}", tiles, OVERWRITTEN) == []


def test_writing_fragments_of_a_in_flight_is_warned_of(tiles):
    multiply = f"mov.b32 %a_0, 0; mov.b32 %a_1, 0; mov.b32 %a_2, 0; mov.b32 %a_3, 0; {FENCE}"
    multiply += f"{instruction(replace(TILE, registers=True))} {COMMIT}"
    add = "add.u32 %a_2, %t, 1;"
    assert warned(f"{multiply}\n{add}\n{WAIT}", tiles, OVERWRITTEN) == [add]
    assert warned(f"{multiply} {WAIT}\n{add}", tiles, OVERWRITTEN) == []


# --- the warpgroup --------------------------------------------------------------------------------------------


def test_three_warps_are_not_enough(tiles):
    body = f"setp.ge.u32 %p0, %t, 96; @%p0 bra OUT; {FENCE} {MMA} {COMMIT} {WAIT}\nOUT:"
    stops(("deadlock", "race"), body, tiles, "one starts when all four warps have issued it|in flight")


def test_a_cta_of_three_warps_has_no_warpgroup(tiles):
    stops("barrier", f"{FENCE} // here", tiles, "all 128 threads of a warpgroup", threads=96, start="")


def test_half_a_warp_cannot_issue(tiles):
    body = f"setp.lt.u32 %p0, %lane, 16; @!%p0 bra OUT;\n{FENCE} // here\nOUT:"
    stops("barrier", body, tiles, "only 16 lanes")


def test_the_warps_must_agree_on_the_descriptors(tiles):
    body = f"cvt.u64.u32 %d5, %warp; add.s64 %d10, %d10, %d5; {FENCE}\n{MMA} // here\n{COMMIT} {WAIT}"
    stops("descriptor", body, tiles, "the same wgmma.mma_async with the same descriptors")


def test_warpgroups_are_independent(tiles):
    """Two of them, with different numbers of MMAs in flight."""
    many = f"setp.ge.u32 %p0, %t, 128; @!%p0 bra ONE; {FENCE} {MMA} {COMMIT} {MMA} {COMMIT} bra ON;"
    body = f"{many}\nONE: {FENCE} {MMA} {COMMIT}\nON: {WAIT}"
    start = READY.replace("%t, 16,", "%r200, 16,")
    for order in ORDERS:
        out, _ = launch(body, tiles, threads=256, start="and.b32 %r200, %t, 127;" + start, order=order)
        np.testing.assert_array_equal(out, np.concatenate([tiles[1], 2 * tiles[1]]))


# --- what is refused ------------------------------------------------------------------------------------------

GOOD = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 " + names("c", 8) + ", %d10, %d11, 1, 1, 1, 0, 0;"


@pytest.mark.parametrize("old, new, kind, match", [
    (".sync", "", "unknown instruction", "expects one of .sync"),
    ("n16k16", "n12k16", "unknown instruction", "N a multiple of 8"),
    ("n16k16", "n264k16", "unknown instruction", "up to 256"),
    ("n16k16", "n16k8", "unknown instruction", "K must be 16"),
    ("m64", "m128", "unknown instruction", "m64nNkK"),
    ("f16.f16", "f16.bf16", "unknown instruction", "for this A"),
    (".f32.f16", ".s32.f16", "unknown instruction", "for this A"),
    ("f32.f16.f16", "s32.b1.b1", "unsupported", "of type b1"),
    ("mma_async", "mma_async.sp", "unsupported", "sparse"),
    ("f16.f16 ", "f16.f16.satfinite ", "unknown instruction", "satfinite"),
    (", %c7", "", "unknown instruction", "7 accumulator registers"),
    ("1, 1, 1, 0, 0", "1, 2, 1, 0, 0", "unknown instruction", "imm-scale-a"),
    ("1, 1, 1, 0, 0", "1, 1, 0, 0, 0", "unknown instruction", "imm-scale-b"),
    ("1, 1, 1, 0, 0", "1, 1, 1, 0, 2", "unknown instruction", "imm-trans-b"),
    ("1, 1, 1, 0, 0", "1, 1, 1", "unknown instruction", "6 operands"),
    ("%d10, %d11, 1, 1, 1, 0", "{%a_0, %a_1}, %d11, 1, 1, 1", "unknown instruction", "A in registers has 4"),
    ("n16k16.f32.f16.f16", "n40k32.s32.s8.s8", "unknown instruction", "a multiple of 16"),
])
def test_what_is_not_an_instruction(old, new, kind, match):
    assert old in GOOD
    with pytest.raises(vgpu.VirtualGpuError, match=match) as caught:
        k.run(GOOD.replace(old, new, 1), threads=128, declare=DECLARE, module=SHARED)
    assert caught.value.kind == kind
    assert caught.value.line is not None


def test_wait_group_takes_a_constant():
    with pytest.raises(vgpu.VirtualGpuError, match="takes a constant"):
        k.run("wgmma.wait_group.sync.aligned %r0;", threads=128)


@pytest.mark.parametrize("bit", [14, 31, 46, 52, 61])
def test_unused_bits_of_a_descriptor_must_be_zero(tiles, bit):
    error = stops("descriptor", f"or.b64 %d11, %d11, {1 << bit}; {FENCE}\n{MMA} // here", tiles, "are not 0")
    low, high = map(int, re.search(r"bits (\d+)-(\d+)", str(error)).groups())
    assert low <= bit <= high


def test_descriptor_fields():
    value = 3 << 62 | 5 << 49 | 0x1234 << 32 | 0x0ABC << 16 | 0x2345
    desc = wgmma.decode_descriptor(value)
    assert (desc.start, desc.leading, desc.stride, desc.base_offset) == (0x23450, 0xABC0, 0x12340, 5)
    assert [wgmma.decode_descriptor(code << 62).swizzle for code in range(4)] == [
        descriptors.NO_SWIZZLE, descriptors.SWIZZLE_128B, descriptors.SWIZZLE_64B, descriptors.SWIZZLE_32B]


# --- counting and timing --------------------------------------------------------------------------------------


def test_counters():
    counters = check(Case(n=128, steps=4)).counters
    assert counters["mma_instructions"] == 4
    assert counters["mma_flops"] == 4 * 2 * 64 * 128 * 16
    assert counters["mma_cycles"] == 4 * 64  # N / 2 each
    assert set(counters["units_by_warp"]) == {"0", "1", "2", "3"}
    assert all("MMA" in units for units in counters["units_by_warp"].values())


@pytest.mark.parametrize("form, cycles", [
    (wgmma.Form(256, 16, "f32", "f16", "f16"), 128), (wgmma.Form(64, 32, "f32", "e4m3", "e4m3"), 32),
    (wgmma.Form(8, 16, "f32", "f16", "f16"), (64 + 8) * 32 / 128),
    (wgmma.Form(8, 16, "f32", "f16", "f16", a_registers=True), 4)])
def test_cycles(form, cycles):
    """2048 multiply-adds of f16 a cycle; small N is bound by reading A from shared memory."""
    assert form.cycles == cycles


def test_the_recording_has_each_mma_once(tiles):
    device = vgpu.device()
    device.recording = True
    try:
        done = launch(f"{FENCE} {MMA} {MMA} {COMMIT} {WAIT}", tiles)[1]
    finally:
        device.recording = False
    events = [[e[1:] for e in warp if e[1].startswith("wgmma")] for warp in done.recording.structure(0)[0]]
    cycles = wgmma.Form(16, 16, "f32", "f16", "f16").cycles
    assert events[0] == [("wgmma", cycles), ("wgmma", cycles), ("wgmma_commit",), ("wgmma_wait", 0)]
    assert events[1:] == [[("wgmma_commit",), ("wgmma_wait", 0)]] * 3


def replay(*warps: list[tuple]) -> list[float]:
    """Cycles that the warps of one CTA need for these events, on a chip whose MMAs have a latency of 50 cycles."""
    constants = chips.H200.constants() | {"mma_latency": chips.assumed(50, "cycles", "test")}
    recorder, clock = Recorder(), (0.0, "clock")
    recorder.structures[(tuple((clock, *w, clock) for w in warps),)] = 0
    recorder.clusters.append((0, (((),) * len(warps),)))
    clocks = Simulation(chips.Chip(name="test", **constants), [Recorded(recorder, 1, 1)]).run().clocks
    return [clocks[0, w][1] - clocks[0, w][0] for w in range(len(warps))]


COMMITTED, WAITED = (0.0, "wgmma_commit"), (0.0, "wgmma_wait", 0)


def test_replay_waits_for_the_groups_end():
    """Two MMAs one after the other, then the latency; the other warps wait for what the first one issues."""
    first = [(0.0, "wgmma", 100.0), COMMITTED, (0.0, "wgmma", 100.0), COMMITTED]
    others = [[COMMITTED, COMMITTED, WAITED]] * 3
    assert replay([*first, WAITED], *others) == pytest.approx([250] * 4, abs=5)
    assert replay([*first, (0.0, "wgmma_wait", 1)], *others)[0] == pytest.approx(150, abs=5)


def test_replay_of_a_first_warp_that_is_late():
    late = [(400.0, "wgmma", 100.0), COMMITTED, WAITED]
    assert replay(late, [COMMITTED, WAITED], [COMMITTED, WAITED], [COMMITTED]) == pytest.approx([550] * 3 + [0], abs=5)


def test_replay_of_waits_that_need_not_wait():
    events = [(0.0, "wgmma", 100.0), COMMITTED, (0.0, "wgmma_wait", 1), (500.0, "wgmma_wait", 0)]
    assert replay(events) == pytest.approx([500], abs=5)


def test_replay_of_two_warpgroups_shares_the_tensor_core():
    group = [[(0.0, "wgmma", 100.0), COMMITTED, WAITED], *[[COMMITTED, WAITED]] * 3]
    assert replay(*group) == pytest.approx([150] * 4, abs=5)
    assert replay(*group, *group) == pytest.approx([150] * 4 + [250] * 4, abs=5)


# --- whole kernels --------------------------------------------------------------------------------------------

LOOPS = {kernel.name: kernel for kernel in timing_kernels.wgmma_family()[:7]}
MAIN_LOOPS = {m.name: m for m in (
    timing_kernels.main_loop("small", "test", timing_kernels.MainLoop(128, 1, 3, 7, grid=2)),
    timing_kernels.main_loop("two groups", "test", timing_kernels.MainLoop(64, 2, 2, 5, grid=1)))}


def run_kernel(kernel, text: str | None = None, **options) -> tuple[bool, vgpu.Launch]:
    """Is the output as expected?"""
    arguments, arrays = timing_kernels.host_arguments(kernel)
    done = vgpu.launch(text or kernel.ptx, kernel.entry, kernel.grid, kernel.block, arguments, cluster=kernel.cluster,
                       shared_bytes=kernel.shared_bytes, **options)
    return bool((arrays["out"] == kernel.expected().reshape(-1).view(np.uint8)).all()), done


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["wgmma/n128_one_by_one", "wgmma/n128_two_sets", "wgmma/n256_two_groups"])
def test_timing_kernels(name, order):
    right, done = run_kernel(LOOPS[name], order=order)
    assert right
    assert not done.warnings


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MAIN_LOOPS)
def test_main_loops(name, order):
    right, done = run_kernel(MAIN_LOOPS[name], order=order)
    assert right
    assert not done.warnings


def test_every_wgmma_synchronisation_of_a_main_loop_is_needed():
    """Without it the virtual GPU stops or warns, in one of the orders."""
    kernel = MAIN_LOOPS["wgmma/small"]
    taken_out = [m for m in mutants(kernel.ptx) if m.what.startswith("wgmma")]
    assert len(taken_out) == 4  # fence, commit, wait 1, wait 0
    for mutant in taken_out:
        noticed = False
        for order in ORDERS:
            try:
                noticed |= bool(run_kernel(kernel, mutant.text, order=order)[1].warnings)
            except vgpu.VirtualGpuError:
                noticed = True
        assert noticed, mutant.what


def test_cutedsl_kernels_for_hopper():
    """Compiled for sm_90a in a process of its own: every one right, none with a warning."""
    script = Path(__file__).parent / "cutedsl" / "hopper_gemm.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300,
                          cwd=Path(__file__).parent.parent)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(lines) == 8
    assert all(line.endswith("right []") for line in lines), lines
