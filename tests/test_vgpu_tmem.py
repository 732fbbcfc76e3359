"""Tensor memory of the virtual GPU: allocation rules, loads and stores element by element, what must be waited for."""

import re

import numpy as np
import pytest
from kernels import run, stops, words

ORDERS = [("copies", 0), ("tensor", 0), ("random", 0), ("random", 1), ("random", 2)]
in_every_order = pytest.mark.parametrize("order, seed", ORDERS)
DECLARE = ".shared .align 4 .b32 slot; .shared .align 8 .b64 bar;"
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], {};"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 {}, {};"
GIVE_UP = "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
FIRST = "setp.ne.u32 %p29, %warp, 0;"
BEGIN = FIRST + "@%p29 bra READY;" + ALLOC + "READY: bar.sync 0; ld.shared.b32 %r200, [slot];"
END = "bar.sync 0; @%p29 bra DONE;" + FREE.format("%r200", "{}") + "DONE: mov.u32 %r255, 0;"


def registers(count: int, first: int = 0) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


# --- allocation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [32, 64, 128, 256, 512])
def test_allocation_gives_an_address_and_can_be_repeated(columns):
    """Blocks do not overlap; the freed one is given out again."""
    out = words(3)
    again = columns <= 256
    run(ALLOC.format(columns) + "ld.shared.b32 %r1, [slot];" +
        (ALLOC.format(columns) + "ld.shared.b32 %r2, [slot];" if again else "mov.u32 %r2, 512;") +
        FREE.format("%r1", columns) + ALLOC.format(columns) + "ld.shared.b32 %r3, [slot];" + FREE.format("%r3",
        columns) + (FREE.format("%r2", columns) if again else "") + GIVE_UP +
        "setp.ne.u32 %p0, %t, 0; @%p0 ret; st.global.b32 [%a0], %r1; st.global.b32 [%a0+4], %r2;"
        "st.global.b32 [%a0+8], %r3;",
        out, declare=DECLARE)
    first, second, third = out.tolist()
    assert abs(first - second) >= columns and third == first and max(first,
        second) + columns <= (512 if again else 1024)
    assert first % columns == 0


def test_allocation_waits_for_free_columns():
    """Warp 1 asks for all columns while warp 0 holds some; it gets them when they are freed."""
    out = words(2)
    run("""setp.ne.u32 %p0, %warp, 0; setp.eq.u32 %p1, %lane, 0;
        @%p0 bra OTHER;""" + ALLOC.format(512) + """bar.sync 1, 64;
        ld.shared.b32 %r1, [slot]; mov.u32 %r2, 0; DELAY: add.u32 %r2, %r2, 1; nanosleep.u32 1;
        setp.lt.u32 %p2, %r2, 20;
        @%p2 bra DELAY; @%p1 st.global.b32 [%a0], 1;""" + FREE.format("%r1", 512) + """ret;
        OTHER: bar.sync 1, 64;""" + ALLOC.format(512).replace("[slot]", "[slot2]") + """
        ld.global.b32 %r3, [%a0]; @%p1 st.global.b32 [%a0+4], %r3;
        ld.shared.b32 %r1, [slot2];""" + FREE.format("%r1", 512),
        out, threads=64, declare=DECLARE + ".shared .b32 slot2;")
    assert out.tolist() == [1, 1]


GET = "ld.shared.b32 %r1, [slot];"


@pytest.mark.parametrize("before, statement, match", [
    ("", ALLOC.format(16), "16 columns; allowed: 32, 64, 128, 256, 512"),
    ("", ALLOC.format(96), "96 columns"),
    ("", ALLOC.format(1024), "1024 columns"),
    (ALLOC.format(64), ALLOC.format(128), "128 columns after one of 64"),
    (GIVE_UP, ALLOC.format(32), "after relinquish_alloc_permit"),
    (ALLOC.format(64) + GET, FREE.format("%r1", 32), "dealloc of 32 columns"),
    (ALLOC.format(64) + GET + "add.u32 %r1, %r1, 32;", FREE.format("%r1", 64), "dealloc of 64 columns at 0x20"),
    (ALLOC.format(32) + GET, FREE.format("%r1", 32).replace("::1", "::2"), "all tcgen05 instructions .* must agree"),
    ("", ALLOC.format(32).replace("::1", "::2"), "in a cluster of 1 CTAs"),
])
def test_allocation_rules(before, statement, match):
    stops("tensor memory", f"{before}\n{statement} // here", declare=DECLARE, match=match)


def test_freeing_twice_is_said():
    """PTX forbids it; shipped kernels do it."""
    launch = run(ALLOC.format(64) + GET + 2 * FREE.format("%r1", 64), declare=DECLARE)
    assert re.search("which are freed already", "\n".join(launch.warnings))


def test_allocation_is_for_whole_warps():
    half = "setp.lt.u32 %p0, %t, 16; @!%p0 bra E;\n{} // here\nE: activemask.b32 %r9;"
    stops("barrier", half.format(ALLOC.format(32)), declare=DECLARE, match="tcgen05.alloc is executed by only 16 lanes")
    stops("barrier", ALLOC.format(32) + "ld.shared.b32 %r1, [slot];" + half.format(FREE.format("%r1", 32)),
          declare=DECLARE, match="tcgen05.dealloc is executed by only 16 lanes")


def test_the_address_goes_to_shared_memory():
    stops("misaligned", "\n" + ALLOC.format(32).replace("[slot]", "[slot+2]") + " // here", declare=DECLARE)
    stops("out of bounds", "mov.u32 %r1, 65536;\n" + ALLOC.format(32).replace("[slot]", "[%r1]") + " // here",
        declare=DECLARE)


def test_everything_is_freed_before_the_kernel_ends():
    stops("tensor memory", ALLOC.format(32), declare=DECLARE,
        match=r"exits with tensor memory allocated: columns \[0\]")


# --- loads and stores ------------------------------------------------------------------------------

WIDTH = 64  # columns of the picture that the tests load and store


def place(shape: str, t: int, r: int, split: int = 0) -> tuple[int, int]:
    """(lane, column) of register r of thread t, by the table of PTX ISA 9.7.16.2.3."""
    return {
        "32x32b": (t, r),
        "16x64b": ((t & 1) * 8 + (t >> 2), ((t >> 1) & 1) + 2 * r),
        "16x128b": ((t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)),
        "16x256b": ((t >> 2) + 8 * ((r >> 1) & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)),
        "16x32bx2": (t % 16, r + (split if t >= 16 else 0)),
    }[shape]


PER = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
PICTURE = "add.u32 %r100, %r200, 8; mad.lo.u32 %r101, %t, 0x10000, 0;" + "".join(
    f"add.u32 %r{i}, %r101, {i};" for i in range(WIDTH)) + (
    f"tcgen05.st.sync.aligned.32x32b.x{WIDTH}.b32 [%r100], {registers(WIDTH)}; tcgen05.wait::st.sync.aligned;")
SHAPES = [("32x32b", n) for n in (1, 2, 4, 8, 16, 32)] + [("16x64b", n) for n in (1, 2, 8, 16)] + [
    ("16x128b", n) for n in (1, 2, 4, 8)] + [("16x256b", n) for n in (1, 2, 4)] + [("16x32bx2", n) for n in (1, 4, 16)]


@pytest.mark.parametrize("shape, repeat", SHAPES)
@pytest.mark.parametrize("half", [0, 16])
def test_loads_element_by_element(shape, repeat, half):
    """Four warps, each its quadrant. The address may name the lane inside it, or the lane of tensor memory."""
    if shape == "32x32b" and half:
        return
    n, split = PER[shape] * repeat, 20 if shape == "16x32bx2" else 0
    out = words(128 * n * 2)
    extra = f", {split}" if split else ""
    body = ""
    for i, absolute in enumerate((0, 1)):
        body += f"""shl.b32 %r102, %warp, {5 + 16}; mul.lo.u32 %r102, %r102, {absolute};
            add.u32 %r103, %r100, %r102; add.u32 %r103, %r103, {(half << 16) + 3};
            tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {registers(n)}, [%r103]{extra}; tcgen05.wait::ld.sync.aligned;
            mad.lo.u32 %r104, %t, {n}, {128 * n * i}; mad.wide.u32 %d0, %r104, 4, %a0;""" + "".join(
            f"st.global.b32 [%d0+{4 * r}], %r{r};" for r in range(n))
    launch = run(BEGIN.format(128) + PICTURE + body + END.format(128), out, threads=128, declare=DECLARE)
    got = out.reshape(2, 128, n)
    for t in range(128):
        for r in range(n):
            lane, column = place(shape, t % 32, r, split)
            expected = (32 * (t // 32) + lane + half) << 16 | (column + 3)
            assert got[0, t, r] == got[1, t, r] == expected, (t, r)
    assert launch.warnings == [] and launch.counters["tcgen05_ld_bytes"] == 2 * 128 * n * 4


@pytest.mark.parametrize("shape, repeat", SHAPES)
@pytest.mark.parametrize("half", [0, 16])
def test_stores_element_by_element(shape, repeat, half):
    """What a store writes shows in the picture, and nothing else changes."""
    if shape == "32x32b" and half:
        return
    n, split = PER[shape] * repeat, 20 if shape == "16x32bx2" else 0
    out = words(128 * WIDTH)
    values = "".join(f"mad.lo.u32 %r{r}, %t, 1000, {0x80000000 + r};" for r in range(n))
    extra = f"{split}, " if split else ""
    run(BEGIN.format(128) + PICTURE + values + f"""add.u32 %r103, %r100, {(half << 16) + 5};
        tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [%r103], {extra}{registers(n)}; tcgen05.wait::st.sync.aligned;
        tcgen05.ld.sync.aligned.32x32b.x{WIDTH}.b32 {registers(WIDTH)}, [%r100]; tcgen05.wait::ld.sync.aligned;
        mad.wide.u32 %d0, %t, {4 * WIDTH}, %a0;""" +
        "".join(f"st.global.b32 [%d0+{4 * r}], %r{r};" for r in range(WIDTH)) + END.format(128), out, threads=128,
            declare=DECLARE)
    lane, column = np.indices((128, WIDTH))
    expected = lane << 16 | column
    for t in range(128):
        for r in range(n):
            i, j = place(shape, t % 32, r, split)
            expected[32 * (t // 32) + i + half, j + 5] = 0x80000000 + r + 1000 * t
    assert (out.reshape(128, WIDTH) == expected).all()


def test_packing_of_16_bit_columns():
    """pack::16b joins the low halves of two columns; unpack::16b is its inverse."""
    out = words(32 * 8)
    run(BEGIN.format(128) + PICTURE + f"""
        tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {registers(4)}, [%r100]; tcgen05.wait::ld.sync.aligned;
        add.u32 %r103, %r100, 30; tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%r103], {registers(2)};
        tcgen05.wait::st.sync.aligned; tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers(4, 4)}, [%r103];
        tcgen05.wait::ld.sync.aligned; mad.wide.u32 %d0, %t, 32, %a0;""" +
        "".join(f"st.global.b32 [%d0+{4 * r}], %r{r};" for r in range(8)) + END.format(128), out, declare=DECLARE)
    for row in out.reshape(32, 8).tolist():
        assert row == [0x10000, 0x30002, 0x50004, 0x70006, 0, 1, 2, 3]


LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r0, %r1}, [%r100]; // here"
ST = "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r100], {%t, %t}; // here"


@pytest.mark.parametrize("address, match", [
    ("add.u32 %r100, %r200, 63;", "columns 63..64 are not all allocated"),
    ("add.u32 %r100, %r200, 511;", "column 512; tensor memory has 512|not all allocated"),
    ("add.u32 %r100, %r200, 0x200000;", "warp 0 may access lanes 0..31 only; the address names lane 32"),
    ("add.u32 %r100, %r200, 0x80000;", "lane 8 of the address; 32x32b starts at a multiple of 32"),
])
@pytest.mark.parametrize("access", [LD, ST])
def test_addresses_that_are_not_allowed(address, match, access):
    stops("tensor memory", ALLOC.format(64) + f"ld.shared.b32 %r200, [slot]; {address}\n{access}", declare=DECLARE,
        match=match)


def test_16_lane_shapes_start_at_a_multiple_of_16():
    stops("tensor memory", ALLOC.format(64) + "ld.shared.b32 %r200, [slot]; add.u32 %r100, %r200, 0x80000;\n"
          "tcgen05.ld.sync.aligned.16x64b.x1.b32 {%r0}, [%r100]; // here", declare=DECLARE, match="multiple of 16")


def test_loads_are_for_whole_warps_and_one_address():
    start = ALLOC.format(64) + "ld.shared.b32 %r200, [slot]; mov.u32 %r100, %r200;"
    stops("barrier", start + f"setp.lt.u32 %p0, %t, 8; @!%p0 bra E;\n{LD}\nE: activemask.b32 %r9;", declare=DECLARE,
          match="only 8 lanes")
    stops("unsupported", start + f"add.u32 %r100, %r100, %t;\n{ST}", declare=DECLARE,
          match="differs between the active lanes", lane=1)


def test_what_was_never_written():
    stops("uninitialised", ALLOC.format(64) + "ld.shared.b32 %r200, [slot]; mov.u32 %r100, %r200;"
          f"{ST.replace(' // here', '')} add.u32 %r100, %r100, 1;\n{LD}", declare=DECLARE, lane=0,
          match="lane 0, column 2, which was never written")


def test_a_new_allocation_has_no_contents():
    stops("uninitialised", ALLOC.format(64) + "ld.shared.b32 %r200, [slot]; mov.u32 %r100, %r200;" +
          ST.replace(" // here", "") + "tcgen05.wait::st.sync.aligned;" + FREE.format("%r200", 64) + ALLOC.format(64) +
          "\n" + LD, declare=DECLARE)


@pytest.mark.parametrize("between, warns", [("", True), ("tcgen05.wait::ld.sync.aligned;", False)])
def test_registers_of_a_load_before_wait_ld(between, warns):
    """The value arrives all the same; nothing orders the read of tensor memory before what follows."""
    out = words(32)
    launch = run(ALLOC.format(128) + "ld.shared.b32 %r200, [slot];" + PICTURE +
                 f"tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%r0, %r1}}, [%r100]; {between} add.u32 %r2, %r0, %r1;"
                 "tcgen05.wait::ld.sync.aligned; st.global.b32 [%o], %r2;" + FREE.format("%r200", 128), out,
                     declare=DECLARE)
    assert out.tolist() == [(t << 17) + 1 for t in range(32)]
    assert bool(re.search("used before tcgen05.wait::ld", "\n".join(launch.warnings))) == warns


# --- with the tensor core --------------------------------------------------------------------------

# D[128, 8] = A[128, 16] . B[8, 16]^T in fp16, both K-major without swizzle: 8 rows x 16 bytes, the next 16 bytes of k
# 128 bytes further (LBO), the next 8 rows 256 bytes further (SBO)
OPERANDS = ".shared .align 128 .b8 a[4096]; .shared .align 128 .b8 b[256];" + DECLARE
DESCRIPTOR = (128 >> 4) << 16 | (256 >> 4) << 32 | 1 << 46
INSTRUCTION = 1 << 4 | (8 >> 3) << 17 | (128 >> 4) << 24
FILL = """setp.eq.u32 %p28, %t, 0; @%p28 mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
    mov.u32 %r201, a; mov.u32 %r202, b; mov.u32 %r203, bar; mad.lo.u32 %r204, %t, 32, %r201; mov.b32 %r205, 0x3c003c00;
    st.shared.v4.b32 [%r204], {%r205, %r205, %r205, %r205}; st.shared.v4.b32 [%r204+16], {%r205, %r205, %r205, %r205};
    mad.lo.u32 %r204, %t, 2, %r202; mov.b16 %h0, 0x4000; st.shared.b16 [%r204], %h0;"""
FENCE = "fence.proxy.async.shared::cta; bar.sync 0;"
MMA = f"""shr.u32 %r206, %r201, 4; cvt.u64.u32 %d20, %r206; or.b64 %d20, %d20, {DESCRIPTOR};
    shr.u32 %r206, %r202, 4; cvt.u64.u32 %d21, %r206; or.b64 %d21, %d21, {DESCRIPTOR}; mov.u32 %r207, {INSTRUCTION};
    mov.pred %p27, 0;
    @%p28 tcgen05.mma.cta_group::1.kind::f16 [%r200], %d20, %d21, %r207, %p27;"""
COMMIT = "@%p28 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r203];"
WAIT = "M: mbarrier.try_wait.parity.shared::cta.b64 %p26, [bar], 0; @!%p26 bra M;"
READ = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers(8)}, [%r200];"
RESULT = "tcgen05.wait::ld.sync.aligned; mad.wide.u32 %d0, %t, 32, %a0;" + "".join(
    f"st.global.b32 [%d0+{4 * r}], %r{r};" for r in range(8))


@in_every_order
def test_a_product_with_all_its_waits(order, seed):
    out = words(128 * 8)
    launch = run(BEGIN.format(32) + FILL + FENCE + MMA + COMMIT + WAIT + "tcgen05.fence::after_thread_sync;" + READ +
                 RESULT + END.format(32), out, threads=128, order=order, seed=seed, declare=OPERANDS)
    assert (out.view(np.float32) == 32.0).all()
    assert launch.warnings == [] and launch.counters["mma_instructions"] == 1


UNWAITED = FILL + FENCE + MMA + COMMIT + "bar.sync 0;\n"


@in_every_order
@pytest.mark.parametrize("body, kind, match", [
    (FILL + "bar.sync 0;\n" + MMA, "proxy fence", "tcgen05.mma reads shared byte"),
    (UNWAITED + READ + " // here", "race",
     r"tcgen05.ld on tensor memory columns 0..7, which an operation in flight still writes: PTX line \d+"),
    (UNWAITED + "st.shared.b32 [%r201], 0; // here", "race", "still reads: PTX line .*tcgen05.mma"),
    (UNWAITED + ST.replace("%r100", "%r200"), "race", "tcgen05.st on tensor memory"),
    (UNWAITED + "@%p29 bra X;\n" + FREE.format("%r200", 32) + " // here\nX: bar.sync 0;", "race",
     "dealloc while an operation on these columns is in flight"),
    (FILL + FENCE + MMA + WAIT, "deadlock", "arrivals so far: nobody"),
])
def test_a_product_without_one_of_its_waits(body, kind, match, order, seed):
    stops(kind, BEGIN.format(32) + body, words(128 * 8), threads=128, order=order, seed=seed, declare=OPERANDS,
          warp=None, match=match)


@in_every_order
def test_an_accumulator_overwritten_before_wait_ld(order, seed):
    """The loads of warp 0 are under way when the next MMA overwrites their columns."""
    stops("race", BEGIN.format(32) + FILL + FENCE + MMA + COMMIT + WAIT + READ + "bar.sync 0;\n" + MMA, words(128 * 8),
          threads=128, order=order, seed=seed, declare=OPERANDS, warp=None,
          match="overwrites tensor memory columns 0..7, which warp 0 loads with no tcgen05.wait::ld since|in flight")


@in_every_order
def test_a_cta_that_exits_with_an_mma_in_flight(order, seed):
    stops(("race", "tensor memory"), BEGIN.format(32) + FILL + FENCE + MMA + COMMIT, threads=128, order=order,
          seed=seed, declare=OPERANDS, warp=None, match="the CTA exits")
