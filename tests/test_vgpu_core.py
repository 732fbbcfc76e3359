"""Control flow, registers, loads and stores of the virtual GPU, by hand-written kernels against plain Python."""

import numpy as np
import pytest
from kernels import aligned, lanes, run, stops, words

import vgpu

T = range(32)


# --- divergence ------------------------------------------------------------------------------------


def test_if_else_merges_registers_written_on_both_sides():
    got = lanes("""
        setp.lt.u32 %p0, %t, 10;
        @%p0 bra THEN;
        add.u32 %r0, %t, 1000;
        bra END;
        THEN: mul.lo.u32 %r0, %t, 3;
        END:""")
    assert got == [3 * t if t < 10 else 1000 + t for t in T]


def test_a_register_written_on_one_side_only_keeps_its_old_value_elsewhere():
    got = lanes("""
        mov.u32 %r0, 7;
        add.u32 %r1, %t, 50;
        and.b32 %r2, %t, 1;
        setp.eq.u32 %p0, %r2, 0;
        @!%p0 bra END;
        mov.u32 %r0, 9;
        mov.u32 %r1, 1;
        END: add.u32 %r0, %r0, %r1;""")
    assert got == [57 + t if t % 2 else 10 for t in T]


def test_uniform_and_array_values_meet():
    """Uniform in one path, per-lane in the other; equal uniform values in both."""
    got = lanes("""
        setp.lt.u32 %p0, %t, 16;
        @%p0 bra A;
        mov.u32 %r1, 5; mov.u32 %r2, %t;
        bra END;
        A: mov.u32 %r1, 5; mov.u32 %r2, 77;
        END: mad.lo.u32 %r0, %r2, 10, %r1;""")
    assert got == [775 if t < 16 else 10 * t + 5 for t in T]


def test_nested_divergence():
    got = lanes("""
        and.b32 %r1, %t, 1; setp.ne.u32 %p1, %r1, 0;
        and.b32 %r2, %t, 2; setp.ne.u32 %p2, %r2, 0;
        and.b32 %r3, %t, 4; setp.ne.u32 %p3, %r3, 0;
        mov.u32 %r0, 0;
        @!%p1 bra NOT1;
          @!%p2 bra NOT2;
            @!%p3 bra NOT3;
              add.u32 %r0, %r0, 100;
            NOT3: add.u32 %r0, %r0, 10;
            bra DONE2;
          NOT2: add.u32 %r0, %r0, 1000;
          DONE2: add.u32 %r0, %r0, 1;
        NOT1: add.u32 %r0, %r0, 10000;""")

    def expected(t):
        value = 0
        if t & 1:
            if t & 2:
                value += (100 if t & 4 else 0) + 10
            else:
                value += 1000
            value += 1
        return value + 10000

    assert got == [expected(t) for t in T]


def test_loop_with_trip_counts_that_differ_between_lanes():
    """Collatz steps of tid + 1: a loop whose body diverges, too."""
    got = lanes("""
        add.u32 %r1, %t, 1;
        mov.u32 %r0, 0;
        LOOP: setp.eq.u32 %p0, %r1, 1;
        @%p0 bra END;
        and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0;
        @%p1 bra EVEN;
        mad.lo.u32 %r1, %r1, 3, 1;
        bra NEXT;
        EVEN: shr.u32 %r1, %r1, 1;
        NEXT: add.u32 %r0, %r0, 1;
        bra LOOP;
        END:""")

    def steps(n):
        count = 0
        while n != 1:
            n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
        return count

    assert got == [steps(t + 1) for t in T]


def test_break_and_continue():
    got = lanes("""
        mov.u32 %r0, 0; mov.u32 %r1, 0;
        LOOP: add.u32 %r1, %r1, 1;
        setp.gt.u32 %p0, %r1, 20; @%p0 bra END;
        setp.eq.u32 %p1, %r1, %t; @%p1 bra END;
        and.b32 %r2, %r1, 3; setp.eq.u32 %p2, %r2, 0; @%p2 bra LOOP;
        add.u32 %r0, %r0, %r1;
        bra LOOP;
        END:""")

    def total(t):
        out = 0
        for i in range(1, 21):
            if i == t:
                break
            out += i if i % 4 else 0
        return out

    assert got == [total(t) for t in T]


def test_brx_jump_table():
    """The index is the same in a warp and different between warps."""
    out = words(96)
    run("""
        T: .branchtargets L0, L1, L2;
        brx.idx %warp, T;
        L0: mov.u32 %r0, 10; bra END;
        L1: mov.u32 %r0, 11; bra END;
        L2: mov.u32 %r0, 12;
        END: st.global.b32 [%o], %r0;""", out, threads=96)
    assert out.tolist() == [10] * 32 + [11] * 32 + [12] * 32


@pytest.mark.parametrize("order", ["copies", "tensor", "random"])
def test_early_return(order):
    """Some lanes return at once, some from inside a loop, some from nested branches; the rest go on together."""
    out = words(64, 99)
    run("""
        setp.eq.u32 %p0, %t, 3; @%p0 ret;
        mov.u32 %r1, 0;
        LOOP: setp.eq.u32 %p1, %r1, %t;
        setp.lt.u32 %p2, %t, 8;
        and.pred %p1, %p1, %p2;
        @%p1 bra GONE;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p3, %r1, 9; @%p3 bra LOOP;
        setp.lt.u32 %p4, %t, 20; @!%p4 bra JOIN;
        and.b32 %r2, %t, 1; setp.ne.u32 %p5, %r2, 0; @%p5 exit;
        st.global.b32 [%o], 1;
        JOIN: activemask.b32 %r3;
        bar.sync 0;
        vote.sync.ballot.b32 %r4, %p4, -1;
        setp.ge.u32 %p6, %t, 30; @!%p6 ret;
        st.global.b32 [%o], %r3;
        setp.ge.u32 %p6, %t, 31; @!%p6 ret;
        st.global.b32 [%o], %r4;
        ret;
        GONE: st.global.b32 [%o], 5;""", out, threads=64, order=order)
    alive = sum(1 << t for t in T if t >= 8 and not (t < 20 and t % 2))
    expected = [99 if t == 3 else 5 if t < 8 else (99 if t % 2 else 1) if t < 20 else 99 for t in T]
    expected[30], expected[31] = alive, sum(1 << t for t in T if alive >> t & 1 and t < 20)
    assert out[:32].tolist() == expected
    assert out[32:].tolist() == [0] * 32


def test_lanes_that_return_early_leave_registers_of_the_others_alone():
    got = lanes("""
        mov.u32 %r0, 1;
        setp.lt.u32 %p0, %t, 4;
        @!%p0 bra ON;
        mov.u32 %r0, 2;
        st.global.b32 [%o], %r0;
        ret;
        ON: add.u32 %r0, %r0, %t;""")
    assert got == [2 if t < 4 else 1 + t for t in T]


def test_a_barrier_after_a_long_way_out():
    """The way out stands behind the main path and is taken by the branch, or falls through."""
    for branch, first in (("@%p0 bra OUT; {main} ret; OUT: {out}", "main"), ("@!%p0 bra MAIN; {out} ret; MAIN: {main}",
                                                                               "out")):
        out = words(32)
        run("setp.lt.u32 %p0, %t, 16;" + branch.format(
            main="bar.sync 0; elect.sync %r1|%p1, 0xffff0000; st.global.b32 [%o], %r1;",
            out="st.global.b32 [%o], 77;"), out)
        assert out.tolist() == [77] * 16 + [16] * 16, first


def test_predicated_arithmetic_and_memory():
    source, out = np.arange(32, dtype=np.uint32) * 5, words(32)
    run("""
        and.b32 %r1, %t, 1; setp.eq.u32 %p0, %r1, 0;
        mad.wide.u32 %d0, %t, 4, %a1;
        mov.u32 %r2, 3;
        @%p0 ld.global.b32 %r2, [%d0];
        @!%p0 add.u32 %r2, %r2, %t;
        @%p0 mul.lo.u32 %r2, %r2, 2;
        setp.lt.u32 %p1, %t, 24;
        @%p1 st.global.b32 [%o], %r2;""", out, source)
    assert out.tolist() == [(10 * t if t % 2 == 0 else 3 + t) if t < 24 else 0 for t in T]


def test_predicated_instructions_that_no_lane_executes():
    """Not even their addresses are looked at."""
    got = lanes("""
        mov.u32 %r0, 4; mov.u64 %d0, 1;
        setp.gt.u32 %p0, %t, 100;
        @%p0 ld.global.b32 %r0, [%d0];
        @%p0 st.global.b32 [%d0], %r0;
        @%p0 bar.sync 3;""")
    assert got == [4] * 32


def test_partial_last_warp():
    out = words(64)
    run("activemask.b32 %r0; vote.sync.ballot.b32 %r1, 1, -1; add.u32 %r0, %r0, 0; xor.b32 %r2, %r0, %r1;"
        "st.global.b32 [%o], %r0; bar.sync 0; setp.ne.u32 %p0, %r2, 0; @%p0 trap;", out, threads=40)
    assert out.tolist() == [0xFFFFFFFF] * 32 + [0xFF] * 8 + [0] * 24


@pytest.mark.parametrize("block", [(8, 4, 2), (4, 8, 2), (64, 1, 1), (1, 1, 64), (5, 3, 3)])
def test_thread_indices_in_three_dimensions(block):
    n = block[0] * block[1] * block[2]
    out = words(n)
    run("""
        mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
        mov.u32 %r4, %ntid.x; mov.u32 %r5, %ntid.y;
        mad.lo.u32 %r6, %r3, %r5, %r2; mad.lo.u32 %r6, %r6, %r4, %r1;
        shl.b32 %r7, %r3, 16; shl.b32 %r8, %r2, 8; or.b32 %r7, %r7, %r8; or.b32 %r7, %r7, %r1;
        mad.wide.u32 %d0, %r6, 4, %a0;
        st.global.b32 [%d0], %r7;""", out, threads=block)
    x, y, z = block
    assert out.tolist() == [k << 16 | j << 8 | i for k in range(z) for j in range(y) for i in range(x)]


def test_special_registers():
    names = ["%ctaid.x", "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%ntid.y", "%warpid",
             "%nwarpid", "%cluster_ctarank", "%cluster_nctarank", "%cluster_ctaid.x", "%clusterid.x", "%clusterid.y",
             "%nclusterid.x", "%dynamic_smem_size"]
    out = words(len(names) * 12).reshape(12, -1)
    body = """mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.u32 %r1, %r2, 4, %r1;
        setp.ne.u32 %p0, %t, 33; @%p0 ret;
        mad.wide.u32 %d0, %r1, """ + f"{4 * len(names)}, %a0;" + "".join(
        f"mov.u32 %r3, {name}; st.global.b32 [%d0+{4 * i}], %r3;" for i, name in enumerate(names))
    run(body, out, threads=(32, 2, 1), grid=(4, 3, 1), cluster=(2, 1, 1), shared_bytes=512)
    # thread 33 of the block is (1, 1): tid.x is never 33, so nobody wrote
    assert not out.any()
    run(body.replace("%p0, %t, 33", "%p0, %t, 1").replace("@%p0 ret;", "@%p0 ret; mov.u32 %r9, %tid.y;"
        " setp.ne.u32 %p1, %r9, 1; @%p1 ret;"), out, threads=(32, 2, 1), grid=(4, 3, 1), cluster=(2, 1, 1),
        shared_bytes=512)
    for y in range(3):
        for x in range(4):
            assert out[4 * y + x].tolist() == [x, y, 0, 4, 3, 1, 2, 1, 2, x % 2, 2, x % 2, x // 2, y, 2, 512]


def test_lane_masks_and_laneid():
    for name, expected in (("eq", lambda t: 1 << t), ("lt", lambda t: (1 << t) - 1), ("le", lambda t: (2 << t) - 1),
                           ("gt", lambda t: 0xFFFFFFFF & ~((2 << t) - 1)),
                           ("ge", lambda t: 0xFFFFFFFF & ~((1 << t) - 1))):
        assert lanes(f"mov.u32 %r0, %lanemask_{name};") == [expected(t) for t in T]
    assert lanes("mov.u32 %r0, %laneid;", threads=64) == [*T, *T]


def test_clocks_go_up():
    got = lanes("mov.u32 %r1, %clock; mov.u32 %r2, %clock; setp.lt.u32 %p0, %r1, %r2; selp.u32 %r0, 1, 0, %p0;")
    assert got == [1] * 32


# --- registers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [
    "add.u32 %r0, %r9, 1; // here",
    "setp.eq.u32 %p0, %r9, 0; // here",
    "st.global.b32 [%o], %r9; // here",
    "st.global.v2.b32 [%o8], {%r0, %r9}; // here",
    "ld.global.b32 %r0, [%d9]; // here",
    "st.global.b32 [%d9], %t; // here",
    "ld.shared.b32 %r0, [%r9]; // here",
    "atom.global.add.u32 %r0, [%d9], 1; // here",
    "atom.global.add.u32 %r0, [%o], %r9; // here",
    "shfl.sync.idx.b32 %r0, %r9, 0, 31, -1; // here",
    "vote.sync.any.pred %p0, %p9, -1; // here",
    "redux.sync.add.u32 %r0, %r9, -1; // here",
    "match.any.sync.b32 %r0, %r9, -1; // here",
    "bar.sync %r9; // here",
    "@%p9 add.u32 %r0, %t, 1; // here",
    "@%p9 bra END; END: // here",
])
def test_a_register_that_was_never_written(body):
    if "bra END" in body:
        body = "@%p9 bra END; // here\n mov.u32 %r0, 1; END:"
    stops("uninitialised", "mov.u32 %r0, 0;\n" + body + "\nst.global.b32 [%o], %r0;", words(64))


def test_moving_an_unwritten_register_is_no_use_of_it():
    assert lanes("mov.u32 %r1, %r9; mov.u32 %r0, 3;") == [3] * 32


def test_wide_and_narrow_registers_of_one_value():
    got = lanes("""
        cvt.u64.u32 %d0, %t; shl.b64 %d0, %d0, 40; or.b64 %d0, %d0, 5;
        mov.b64 {%r1, %r2}, %d0; shr.u32 %r2, %r2, 8;
        mov.b32 {%h0, %h1}, %r1; mov.b32 %r3, {%h1, %h0};
        mov.b64 %d1, {%r2, %r3}; mov.b128 %q0, {%d1, %d0}; mov.b128 {%d2, %d3}, %q0;
        mov.b64 {_, %r4}, %d2; mov.b64 {%r5, _}, %d2;
        add.u32 %r0, %r4, %r5;""")
    assert got == [(5 << 16) + t for t in T]


# --- global memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, size", [("u8", 1), ("s8", 1), ("b8", 1), ("u16", 2), ("s16", 2), ("f16", 2), ("b32", 4),
                                        ("s32", 4), ("f32", 4)])
@pytest.mark.parametrize("uniform", [False, True])
def test_loads_extend_by_their_type(kind, size, uniform):
    data = np.random.default_rng(size).integers(0, 256, 64 * size, dtype=np.uint8)
    body = f"""
        {"mov.u64 %d0, %a1" if uniform else f"mad.wide.u32 %d0, %t, {size}, %a1"};
        ld.global.{kind} %r0, [%d0+{size}];"""
    values = data.view(f"<{'i' if kind[0] == 's' else 'u'}{size}").astype(np.int64)
    expected = [int(values[1 if uniform else t + 1]) & 0xFFFFFFFF for t in T]
    assert lanes(body, data) == expected


def test_sign_extension_to_64_and_16_bits():
    data = np.array([0x80, 0x7F, 0xFF, 0x00] * 8, np.uint8)
    out = np.zeros(32, np.uint64)
    run("""cvt.u64.u32 %d1, %t; add.u64 %d1, %d1, %a1; ld.global.s8 %d0, [%d1]; ld.global.s8 %h0, [%d1];
        cvt.u64.u16 %d2, %h0; shl.b64 %d2, %d2, 8; xor.b64 %d0, %d0, %d2; st.global.b64 [%o8], %d0;""", out, data)
    signed = data.astype(np.int8).astype(np.int64)
    assert out.tolist() == [((int(v) & (2 ** 64 - 1)) ^ ((int(v) & 0xFFFF) << 8)) for v in signed]


@pytest.mark.parametrize("n, kind", [(2, "b8"), (4, "b8"), (2, "b16"), (4, "b16"), (8, "b16"), (2, "b32"), (4, "b32"),
                                     (8, "b32"), (2, "b64"), (4, "b64"), (1, "b128")])
@pytest.mark.parametrize("which", ["all", "some"])
def test_vector_copies(n, kind, which):
    """Load and store vectors of every size, with all lanes and with some."""
    size = int(kind[1:]) // 8
    data = aligned(np.random.default_rng(n * size).integers(0, 256, 32 * n * size, dtype=np.uint8))
    out = aligned(np.zeros_like(data))
    letter = {1: "h", 2: "h", 4: "r", 8: "d", 16: "q"}[size]
    registers = ", ".join(f"%{letter}{10 + i if letter != 'q' else i}" for i in range(n))
    vector = f".v{n}" if n > 1 else ""
    registers = f"{{{registers}}}" if n > 1 else registers
    guard = "and.b32 %r1, %t, 3; setp.eq.u32 %p0, %r1, 1; @%p0 ret;" if which == "some" else ""
    run(f"""{guard}
        mad.wide.u32 %d0, %t, {n * size}, %a0; mad.wide.u32 %d1, %t, {n * size}, %a1;
        ld.global{vector}.{kind} {registers}, [%d1];
        st.global{vector}.{kind} [%d0], {registers};""", out, data)
    rows, copied = data.reshape(32, -1), out.reshape(32, -1)
    for t in T:
        assert copied[t].tolist() == ([0] * (n * size) if which == "some" and t % 4 == 1 else rows[t].tolist())


def test_stores_take_the_low_bits():
    out = np.zeros(64, np.uint8)
    run("""add.u32 %r1, %t, 0x1f0; cvt.u64.u32 %d1, %t; add.u64 %d0, %a0, %d1; st.global.b8 [%d0], %r1;
        add.u32 %r1, %r1, 0x12340000; mad.wide.u32 %d0, %t, 1, %a0; setp.gt.u32 %p0, %t, 15; @%p0 ret;
        mad.wide.u32 %d0, %t, 2, %a0; st.global.b16 [%d0+32], %r1;""", out)
    assert out[:32].tolist() == [(t + 0xF0) & 0xFF for t in T]
    assert out[32:].view("<u2").tolist() == [0x1F0 + t for t in range(16)]


def test_where_lanes_store_to_one_address_one_of_them_stays():
    out = words(4)
    run("st.global.b32 [%a0], %t; and.b32 %r1, %t, 1; mad.wide.u32 %d0, %r1, 4, %a0; st.global.b32 [%d0+8], %t;", out)
    assert out[0] in T and out[2] in range(0, 32, 2) and out[3] in range(1, 32, 2)


def test_lanes_may_touch_several_tensors_at_once():
    first, second, out = np.arange(16, dtype=np.uint32), np.arange(100, 116, dtype=np.uint32), words(32)
    run("""
        and.b32 %r1, %t, 15; setp.lt.u32 %p0, %t, 16; selp.b64 %d0, %a1, %a2, %p0;
        mad.wide.u32 %d0, %r1, 4, %d0; ld.global.b32 %r2, [%d0]; st.global.b32 [%o], %r2;
        add.u32 %r2, %r2, 1; st.global.b32 [%d0], %r2;""", out, first, second)
    assert out.tolist() == [*range(16), *range(100, 116)]
    assert first.tolist() == [*range(1, 17)] and second.tolist() == [*range(101, 117)]


def test_memory_at_an_odd_base_address():
    """A buffer that starts and ends anywhere: every aligned element inside it is reachable."""
    room = np.arange(256, dtype=np.uint8)
    inner = room[-room.ctypes.data % 16 + 3:][:75]
    out = words(32)
    run("""
        add.u64 %d0, %a1, 15; and.b64 %d0, %d0, -16; mad.wide.u32 %d0, %t, 4, %d0;
        setp.gt.u32 %p0, %t, 14; @%p0 ret;
        ld.global.b32 %r0, [%d0]; st.global.b32 [%o], %r0;""", out, inner)
    start = -inner.ctypes.data % 16
    assert out[:15].tolist() == inner[start:start + 60].view("<u4").tolist()


@pytest.mark.parametrize("access, size", [("ld.global.b32 %r0, [{}];", 4), ("st.global.b32 [{}], %t;", 4),
                                          ("ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [{}];", 16),
                                          ("st.global.b16 [{}], %h0;", 2), ("ld.global.v2.b64 {{%d1, %d2}}, [{}];", 16),
                                          ("atom.global.add.u32 %r0, [{}], 1;", 4)])
def test_misaligned_global_access(access, size):
    data = np.zeros(2048, np.uint8)
    data = data[-data.ctypes.data % 64:]
    prepare = f"mov.u16 %h0, 1; mad.wide.u32 %d0, %t, {size}, %a0; setp.eq.u32 %p0, %t, 5; @%p0 add.u64 %d0, %d0, 1;"
    stops("misaligned", f"{prepare}\n{access.format('%d0')} // here", data, lane=5)
    stops("misaligned", f"mov.u16 %h0, 1;\n{access.format('%a0+' + str(size // 2))} // here", data)


@pytest.mark.parametrize("access", ["ld.global.b32 %r0, [{}];", "st.global.b32 [{}], %t;",
                                    "atom.global.add.u32 %r0, [{}], 1;", "red.global.add.u32 [{}], 1;"])
def test_out_of_bounds_global_access(access):
    data = words(32)
    stops("out of bounds", f"{access.format('%o+4')} // here", data, match="1?4 bytes past the end|past the end",
        lane=31)
    stops("out of bounds", f"{access.format('%o+-4')} // here", data, match="4 bytes before the start", lane=0)
    stops("out of bounds", f"mov.u64 %d0, 64;\n{access.format('%d0')} // here", data, match="in no known buffer")


def test_vector_access_that_crosses_the_end():
    data = words(34)
    stops("out of bounds", "mad.wide.u32 %d0, %t, 8, %a0; \nsetp.gt.u32 %p0, %t, 17; @%p0 ret;\n"
          "ld.global.v2.b32 {%r0, %r1}, [%d0]; // here", data, lane=17)


def test_freed_memory_is_not_known_any_more():
    data = words(32)
    address = data.ctypes.data
    run("ld.global.b32 %r0, [%o];", data)
    keep = data  # the memory lives on, but no argument names it
    stops("out of bounds", f"mov.u64 %d0, {address}; ld.global.b32 %r0, [%d0];", match="in no known buffer")
    assert keep is data


# --- constants, parameters, module variables ---------------------------------------------------------


def test_module_variables_keep_their_values_and_may_be_written():
    module = """
        .global .align 4 .u32 counter = 5;
        .const .align 4 .b32 table[4] = {10, 20, 30, 40};
        .global .align 16 .f32 zeros[4];"""
    body = """
        and.b32 %r1, %t, 3; mov.u64 %d0, table; mad.wide.u32 %d0, %r1, 4, %d0; ld.const.b32 %r0, [%d0];
        ld.const.b32 %r2, [table+8]; add.u32 %r0, %r0, %r2;
        mov.u64 %d1, counter; ld.global.u32 %r3, [%d1]; add.u32 %r0, %r0, %r3;
        ld.global.u32 %r4, [zeros+12]; add.u32 %r0, %r0, %r4;
        setp.ne.u32 %p0, %t, 0; @%p0 bra END; red.global.add.u32 [counter], 1; END:"""
    out = words(32)
    for launch in range(2):
        run(body + "st.global.b32 [%o], %r0;", out, module=module)
        assert out.tolist() == [10 * (t % 4 + 1) + 30 + 5 + launch for t in T]


def test_parameters_by_value_and_through_generic_addresses():
    blob = bytes(range(128))
    out = words(32)
    run("""
        mov.b64 %d0, k_param_1; cvta.param.u64 %d1, %d0; mad.wide.u32 %d2, %t, 4, %d1;
        ld.u32 %r0, [%d2]; ld.param.u32 %r1, [k_param_1+4]; add.u32 %r0, %r0, %r1;
        isspacep.param %p0, %d1; isspacep.global %p1, %d1; isspacep.shared %p2, %d1;
        and.pred %p0, %p0, %p1; not.pred %p2, %p2; and.pred %p0, %p0, %p2; @!%p0 trap;
        ld.param.v2.u32 {%r2, %r3}, [k_param_1+8]; add.u32 %r0, %r0, %r3;
        st.global.b32 [%o], %r0;""", out, blob)
    values = np.frombuffer(blob, "<u4").astype(np.uint64)
    assert out.tolist() == [int(values[t] + values[1] + values[3]) & 0xFFFFFFFF for t in T]


def test_a_call_parameter_may_be_named_like_a_kernel_parameter():
    out = words(32)
    run("""{ .param .b64 k_param_0; st.param.b64 [k_param_0], 9; }
        ld.param.u64 %d0, [k_param_0]; mad.wide.u32 %d0, %t, 4, %d0; st.global.b32 [%d0], %t;""", out)
    assert out.tolist() == list(T)


def test_call_parameters_are_read_as_they_were_written():
    stops("uninitialised", """{ .param .align 8 .b8 p[16]; st.param.v2.b32 [p], {%t, %t};
        ld.param.v2.b32 {%r0, %r1}, [p];\nld.param.b64 %d0, [p+8]; // here\n}""", match="byte 8 of call parameter p")


# --- local memory ----------------------------------------------------------------------------------


def test_local_memory_is_each_threads_own():
    got = lanes("""
        mov.u32 %r9, depot;
        st.local.b32 [%r9], %t;
        st.local.v2.b32 [depot+8], {%t, 7};
        and.b32 %r1, %t, 3; mad.lo.u32 %r2, %r1, 4, %r9;
        st.local.b32 [%r2+16], %t;
        ld.local.b32 %r3, [%r9]; ld.local.v2.b32 {%r4, %r5}, [depot+8]; ld.local.b32 %r6, [%r2+16];
        mad.lo.u32 %r0, %r3, 100, %r4; add.u32 %r0, %r0, %r5; add.u32 %r0, %r0, %r6;""",
                declare=".local .align 16 .b8 depot[32];")
    assert got == [102 * t + 7 for t in T]


def test_local_memory_through_generic_addresses():
    got = lanes("""
        mov.u64 %d0, depot; cvta.local.u64 %d1, %d0;
        mad.wide.u32 %d2, %t, 0, %d1;
        st.u16 [%d2+6], %h0; ld.s16 %r1, [%d2+6];
        isspacep.local %p0, %d2; @!%p0 trap;
        cvta.to.local.u64 %d3, %d2; ld.local.s16 %r2, [%d3+6]; add.s32 %r0, %r1, %r2;""".replace(
        "st.u16", "cvt.u16.u32 %h0, %t; neg.s16 %h0, %h0; st.u16"), declare=".local .align 8 .b8 depot[8];")
    assert got == [-2 * t & 0xFFFFFFFF for t in T]


def test_local_bounds_and_alignment():
    declare = ".local .align 16 .b8 depot[16];"
    stops("out of bounds", "mov.u32 %r1, depot; \nld.local.b32 %r0, [%r1+16]; // here", declare=declare,
        match="have 16")
    stops("misaligned", "mov.u32 %r1, depot; \nst.local.b32 [%r1+2], %t; // here", declare=declare)
    stops("out of bounds", "mul.lo.u32 %r1, %t, 4; \nst.local.b32 [%r1], %t; // here", declare=declare, lane=31)


# --- shared memory ---------------------------------------------------------------------------------


def test_static_and_dynamic_shared_variables():
    """Each at its alignment, none over another, the dynamic one behind the static ones."""
    module = """.extern .shared .align 128 .b8 dynamic[];
        .shared .align 2 .b16 first; .shared .align 16 .b8 second[20];"""
    out = words(8)
    launch = run("""
        mov.u32 %r1, first; mov.u32 %r2, second; mov.u32 %r3, dynamic; mov.u32 %r4, inner;
        mov.u32 %r5, %total_smem_size; mov.u32 %r6, %dynamic_smem_size;
        st.global.v4.b32 [%a0], {%r1, %r2, %r3, %r4}; st.global.v2.b32 [%a0+16], {%r5, %r6};
        mad.lo.u32 %r7, %t, 4, %r3; st.shared.b32 [%r7+128], %t; ld.shared.b32 %r8, [%r7+128];
        setp.ne.u32 %p0, %r8, %t; @%p0 trap;""", out, module=module, declare=".shared .align 8 .b64 inner[2];",
                 shared_bytes=256)
    first, second, dynamic, inner, total, size = out[:6].tolist()
    spans = sorted([(first, 2, 2), (second, 20, 16), (inner, 16, 8)])
    assert all(start % align == 0 for start, _, align in spans) and dynamic % 128 == 0
    assert all(a + n <= b for (a, n, _), (b, _, _) in zip(spans, spans[1:], strict=False))
    assert dynamic >= spans[-1][0] + spans[-1][1] and size == 256 and total >= dynamic + 256 - 1024
    assert launch.warnings == []


def test_shared_memory_is_shared_by_the_cta_and_no_other():
    out = words(4 * 64)
    run("""
        mad.lo.u32 %r1, %t, 4, 0; mov.u32 %r2, buf; add.u32 %r1, %r1, %r2;
        mov.u32 %r9, %ctaid.x; mad.lo.u32 %r3, %r9, 1000, %t;
        st.shared.b32 [%r1], %r3; bar.sync 0;
        xor.b32 %r4, %t, 63; mad.lo.u32 %r4, %r4, 4, %r2; ld.shared.b32 %r5, [%r4];
        mad.lo.u32 %r6, %r9, 64, %t; mad.wide.u32 %d0, %r6, 4, %a0; st.global.b32 [%d0], %r5;""", out, threads=64,
        grid=4, declare=".shared .align 4 .b8 buf[256];")
    assert out.tolist() == [1000 * c + (t ^ 63) for c in range(4) for t in range(64)]


def test_shared_memory_through_generic_addresses():
    got = lanes("""
        mov.u64 %d0, buf; cvta.shared.u64 %d1, %d0; mad.wide.u32 %d2, %t, 8, %d1;
        st.v2.b32 [%d2], {%t, 9}; ld.b64 %d3, [%d2]; mov.b64 {%r1, %r2}, %d3;
        isspacep.shared %p0, %d2; isspacep.shared::cluster %p1, %d2; isspacep.global %p2, %d2;
        not.pred %p2, %p2; and.pred %p0, %p0, %p1; and.pred %p0, %p0, %p2; @!%p0 trap;
        cvta.to.shared.u64 %d4, %d2; cvt.u32.u64 %r3, %d4; ld.shared.b32 %r4, [%r3+4];
        mad.lo.u32 %r0, %r1, 100, %r2; add.u32 %r0, %r0, %r4;""", declare=".shared .align 8 .b8 buf[256];")
    assert got == [100 * t + 18 for t in T]


def test_lanes_with_generic_addresses_in_different_spaces():
    stops("unsupported", """
        mov.u64 %d0, buf; cvta.shared.u64 %d1, %d0; setp.lt.u32 %p0, %t, 3; selp.b64 %d2, %o, %d1, %p0;
        st.b32 [%d2], %t; // here""", words(32), declare=".shared .b32 buf;", lane=3, match="different state spaces")


def test_shared_bounds_alignment_and_initialisation():
    declare = ".shared .align 16 .b8 buf[256];"
    address = "mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 4, %r9;"
    stops("out of bounds", f"{address}\nst.shared.b32 [%r8+132], %t; // here", declare=declare, lane=31)
    stops("out of bounds", "\nst.shared.b32 [512], %t; // here", declare=declare,
        match="shared access of 4 bytes at 0x200")
    stops("out of bounds", f"{address} add.u32 %r8, %r8, 0x1000000;\nst.shared.b32 [%r8], %t; // here", declare=declare,
          match="not in the window of the executing CTA")
    stops("out of bounds", f"{address} add.u32 %r8, %r8, 0x1000000;\nld.shared::cluster.b32 %r0, [%r8]; // here",
          declare=declare, match="CTA rank 1; the cluster has 1")
    stops("misaligned", f"{address}\nst.shared.b32 [%r8+2], %t; // here", declare=declare)
    stops("misaligned", f"{address}\nld.shared.v4.b32 {{%r0, %r1, %r2, %r3}}, [%r9+8]; // here", declare=declare)
    stops("uninitialised", f"{address} st.shared.b32 [%r8], %t;\nld.shared.b32 %r0, [%r8+4]; // here", declare=declare,
          match="never written")
    stops("uninitialised", f"{address} st.shared.b8 [%r9], %t;\nld.shared.b16 %r0, [%r9]; // here", declare=declare)


def test_st_bulk_zeroes_shared_memory():
    got = lanes("""
        mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 4, %r9; st.shared.b32 [%r8], %t; bar.sync 0;
        setp.ne.u32 %p0, %t, 0; @%p0 bra ON; st.bulk.weak.shared::cta [%r9+16], 64, 0; ON: bar.sync 0;
        ld.shared.b32 %r0, [%r8];""", declare=".shared .align 16 .b8 buf[128];")
    assert got == [0 if 4 <= t < 20 else t for t in T]


# --- atomics ---------------------------------------------------------------------------------------

ATOMICS = {
    "add.u32": lambda a, b: a + b, "and.b32": lambda a, b: a & b, "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b, "min.u32": min, "max.u32": max, "exch.b32": lambda a, b: b,
    "inc.u32": lambda a, b: 0 if a >= b else a + 1, "dec.u32": lambda a, b: b if a == 0 or a > b else a - 1,
    "min.s32": lambda a, b: min(a, b, key=lambda v: v - (v >> 31 << 32)),
    "max.s32": lambda a, b: max(a, b, key=lambda v: v - (v >> 31 << 32)),
}


@pytest.mark.parametrize("operation", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_integer_atomics(operation, space):
    """Every lane its own word; old values returned, new ones left."""
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 2 ** 32, 32, dtype=np.uint32)
    memory[:4] = 0, 1, 5, 0xFFFFFFFF
    operand = rng.integers(0, 2 ** 32, 32, dtype=np.uint32)
    operand[:4] = 3, 1, 5, 7
    data, out = memory.copy(), words(64)
    if space == "global":
        body = f"atom.global.{operation} %r0, [%d1], %r1; ld.global.b32 %r2, [%d1];"
    else:
        body = f"""ld.global.b32 %r5, [%d1]; mov.u32 %r9, buf; mad.lo.u32 %r9, %t, 4, %r9; st.shared.b32 [%r9], %r5;
            atom.shared::cta.{operation} %r0, [%r9], %r1; ld.shared.b32 %r2, [%r9];"""
    run(f"""mad.wide.u32 %d1, %t, 4, %a1; mad.wide.u32 %d2, %t, 4, %a2; ld.global.b32 %r1, [%d2];
        {body} st.global.b32 [%o], %r0; st.global.b32 [%o+128], %r2;""", out, data, operand,
        declare=".shared .align 4 .b8 buf[128];")
    assert out[:32].tolist() == memory.tolist()
    assert out[32:].tolist() == [ATOMICS[operation](int(a), int(b)) & 0xFFFFFFFF for a, b in
                                 zip(memory, operand, strict=True)]


def test_atomics_of_all_lanes_on_one_word():
    """Each lane sees the sum of those before it, in some order; 64 bits, and red."""
    out, total = np.zeros(32, np.uint64), np.zeros(2, np.uint64)
    run("""cvt.u64.u32 %d0, %t; add.u64 %d0, %d0, 0x100000000; atom.add.u64 %d1, [%a1], %d0;
        st.global.b64 [%o8], %d1; red.relaxed.gpu.global.max.u64 [%a1+8], %d0;""", out, total)
    parts = sorted(out.tolist())
    steps = sorted(b - a for a, b in zip(parts, [*parts[1:], int(total[0])], strict=True))
    assert steps == [t + 2 ** 32 for t in T] and parts[0] == 0
    assert total[1] == 2 ** 32 + 31


def test_compare_and_swap():
    memory = np.array([5, 6] * 16, np.uint32)
    out = words(32)
    run("mad.wide.u32 %d1, %t, 4, %a1; atom.global.cas.b32 %r0, [%d1], 5, %t; st.global.b32 [%o], %r0;", out, memory)
    assert out.tolist() == [5, 6] * 16 and memory.tolist() == [t if t % 2 == 0 else 6 for t in T]
    wide = np.array([7, 8, 9, 10], np.uint64)
    run("""setp.gt.u32 %p0, %t, 0; @%p0 ret; mov.b128 %q0, {7, 8}; mov.b128 %q1, {70, 80};
        mov.u64 %d1, 7; mov.u64 %d2, 8; mov.u64 %d3, 70; mov.b128 %q0, {%d1, %d2}; mov.b128 %q1, {%d3, %d2};
        atom.global.cas.b128 %q2, [%a0], %q0, %q1; st.global.b128 [%a0+16], %q2;""".replace(
        "mov.b128 %q0, {7, 8}; mov.b128 %q1, {70, 80};", ""), wide)
    assert wide.tolist() == [70, 8, 7, 8]


FLOATS = {"f32": (np.float32, 4), "f64": (np.float64, 8), "f16": (np.float16, 2)}


@pytest.mark.parametrize("kind", FLOATS)
def test_floating_point_atomic_add(kind):
    dtype, size = FLOATS[kind]
    rng = np.random.default_rng(5)
    a, b = (rng.standard_normal(32) * 10.0 ** rng.integers(-2, 3, 32) for _ in range(2))
    memory, operand = a.astype(dtype), b.astype(dtype)
    data, flag = memory.copy(), ".noftz" if kind == "f16" else ""
    letter = {2: "h", 4: "r", 8: "d"}[size]
    run(f"""mad.wide.u32 %d30, %t, {size}, %a0; mad.wide.u32 %d31, %t, {size}, %a1;
        ld.global.b{8 * size} %{letter}1, [%d31]; red.global.add{flag}.{kind} [%d30], %{letter}1;""", data, operand)
    exact = [np.longdouble(x) + np.longdouble(y) for x, y in zip(memory, operand, strict=True)]
    assert data.tolist() == [dtype(e) for e in exact]


def test_add_f32_flushes_subnormals_in_global_memory_only():
    tiny = np.array([1, 0x80000003, 0x00800000, 0x80800000], np.uint32)
    memory, out = np.array([2, 0x80000001, 0x80000001, 0x00800001], np.uint32), words(4)
    start = memory.copy()
    run("""setp.gt.u32 %p0, %t, 3; @%p0 ret; mad.wide.u32 %d1, %t, 4, %a1; mad.wide.u32 %d2, %t, 4, %a2;
        mov.u32 %r9, buf; mad.lo.u32 %r9, %t, 4, %r9; ld.global.b32 %r1, [%d1]; ld.global.b32 %r2, [%d2];
        st.shared.b32 [%r9], %r2; red.shared.add.f32 [%r9], %r1; ld.shared.b32 %r3, [%r9]; st.global.b32 [%o], %r3;
        red.global.add.f32 [%d2], %r1;""", out, tiny, memory, declare=".shared .align 4 .b8 buf[16];")
    exact = (tiny.view(np.float32).astype(np.float64) + start.view(np.float32)).astype(np.float32)
    assert out.tolist() == exact.view(np.uint32).tolist()
    assert memory.tolist() == [0, 0x80000000, 0x00800000, 0]


def test_packed_and_vector_atomics():
    rng = np.random.default_rng(8)
    memory = rng.standard_normal((32, 8)).astype(np.float16)
    operand = rng.standard_normal((32, 8)).astype(np.float16)
    for form, expected in (("add.noftz", lambda a, b: (a.astype(np.float64) + b).astype(np.float16)),
                           ("max.noftz", np.maximum), ("min.noftz", np.minimum)):
        data, old = memory.copy(), np.zeros_like(memory)
        run(f"""mad.wide.u32 %d0, %t, 16, %a0; mad.wide.u32 %d1, %t, 16, %a1; mad.wide.u32 %d2, %t, 16, %a2;
            ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%d1];
            atom.global.{form}.v4.f16x2 {{%r4, %r5, %r6, %r7}}, [%d0], {{%r0, %r1, %r2, %r3}};
            st.global.v4.b32 [%d2], {{%r4, %r5, %r6, %r7}};""", data, operand, old)
        assert (old == memory).all() and (data == expected(memory, operand)).all(), form
    data = np.arange(64, dtype=np.float32)
    run("""mad.wide.u32 %d0, %t, 8, %a0; mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000;
        red.global.v2.f32.add [%d0], {%r1, %r2};""", data)
    assert data.tolist() == [i + 1 + i % 2 for i in range(64)]
    halves = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    word = np.array([halves[0] | halves[1] << 16], np.uint32)
    run("setp.gt.u32 %p0, %t, 0; @%p0 ret; mov.b32 %r1, 0x40003f80; red.global.add.noftz.bf16x2 [%a0], %r1;", word)
    sums = np.array([int(word[0]) << 16 & 0xFFFFFFFF, int(word[0]) & 0xFFFF0000], np.uint32).view(np.float32)
    assert sums.tolist() == [2.5, 0.0]


# --- lanes of a warp ---------------------------------------------------------------------------------


def shfl(mode, b, c, lane):
    """PTX ISA 9.7.9.6, as it is written there."""
    segment, clamp, b = c >> 8 & 31, c & 31, b & 31
    highest, lowest = lane & segment | clamp & ~segment & 31, lane & segment
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": lowest | b & ~segment & 31}[mode]
    ok = j >= highest if mode == "up" else j <= highest
    return (j if ok else lane), ok


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("c", [0x1F, 0x00, 0x181F, 0x1C03, 0x1800, 0x0F])
@pytest.mark.parametrize("b", ["1", "3", "16", "33", "%t", "%r5"])
def test_shuffle(mode, b, c, ):
    got = lanes(f"""mul.lo.u32 %r5, %t, 7; mad.lo.u32 %r1, %t, 3, 100;
        shfl.sync.{mode}.b32 %r2|%p0, %r1, {b}, {c}, -1; shfl.sync.{mode}.b32 %r3, %r1, {b}, {c}, 0xffffffff;
        setp.ne.u32 %p1, %r2, %r3; @%p1 trap; selp.u32 %r4, 1, 0, %p0; mad.lo.u32 %r0, %r4, 1000, %r2;""")
    step = {"%t": lambda t: t, "%r5": lambda t: 7 * t}.get(b) or (lambda t: int(b))
    expected = [shfl(mode, step(t), c, t) for t in T]
    assert got == [1000 * ok + 100 + 3 * j for j, ok in expected]


def test_shuffle_of_a_uniform_value_and_from_lanes_that_are_gone():
    assert lanes("mov.u32 %r1, 9; shfl.sync.down.b32 %r0, %r1, 1, 31, -1;") == [9] * 32
    stops("uninitialised", "setp.gt.u32 %p0, %t, 15; @%p0 ret;\nshfl.sync.idx.b32 %r0, %t, 20, 31, 0xffff; // here",
          match="lane 20")
    stops("uninitialised", "setp.gt.u32 %p0, %t, 15; @%p0 ret;\nshfl.sync.down.b32 %r0, %t, 1, 31, 0xffff; // here",
          match="lane 16", lane=15)


@pytest.mark.parametrize("pattern", [0, 0xFFFFFFFF, 1, 0x80000000, 0x0F0F1234])
def test_votes(pattern):
    got = lanes(f"""
        mov.u32 %r9, {pattern}; shr.u32 %r9, %r9, %t; and.b32 %r9, %r9, 1; setp.ne.u32 %p0, %r9, 0;
        vote.sync.all.pred %p1, %p0, -1; vote.sync.any.pred %p2, %p0, -1; vote.sync.uni.pred %p3, %p0, -1;
        vote.sync.all.pred %p4, !%p0, -1; vote.sync.ballot.b32 %r1, %p0, -1;
        selp.u32 %r2, 1, 0, %p1; selp.u32 %r3, 2, 0, %p2; selp.u32 %r4, 4, 0, %p3; selp.u32 %r5, 8, 0, %p4;
        setp.ne.u32 %p5, %r1, {pattern}; @%p5 trap;
        or.b32 %r0, %r2, %r3; or.b32 %r0, %r0, %r4; or.b32 %r0, %r0, %r5;""")
    all_, none = pattern == 0xFFFFFFFF, pattern == 0
    assert got == [all_ | 2 * (not none) | 4 * (all_ or none) | 8 * none] * 32


def test_warp_operations_of_some_lanes():
    """Inside a branch, with the mask of those that are there; the others have their own."""
    got = lanes("""
        setp.lt.u32 %p0, %t, 12; @!%p0 bra OTHER;
        setp.lt.u32 %p1, %t, 3; vote.sync.ballot.b32 %r1, %p1, 0xfff; redux.sync.add.u32 %r2, %t, 0xfff;
        elect.sync %r3|%p2, 0xfff; bar.warp.sync 0xfff; bra END;
        OTHER: setp.lt.u32 %p1, %t, 14; vote.sync.ballot.b32 %r1, %p1, 0xfffff000;
        redux.sync.max.u32 %r2, %t, 0xfffff000;
        elect.sync %r3|%p2, 0xfffff000;
        END: selp.u32 %r4, 1, 0, %p2; shl.b32 %r3, %r3, 1; or.b32 %r3, %r3, %r4; shl.b32 %r2, %r2, 16;
        xor.b32 %r0, %r1, %r2; shl.b32 %r3, %r3, 24; xor.b32 %r0, %r0, %r3;""")

    def expected(t):
        ballot, total, leader = (7, sum(range(12)), 0) if t < 12 else (0x3000, 31, 12)
        return ballot ^ total << 16 ^ (leader << 1 | (t == leader)) << 24

    assert got == [expected(t) & 0xFFFFFFFF for t in T]


@pytest.mark.parametrize("instruction", [
    "shfl.sync.idx.b32 %r0, %t, 0, 31, {};", "vote.sync.any.pred %p1, 1, {};", "elect.sync %r1|%p1, {};",
    "redux.sync.add.u32 %r0, %t, {};", "match.any.sync.b32 %r0, %t, {};", "bar.warp.sync {};"])
def test_member_masks_must_name_the_lanes_that_are_there(instruction):
    branch = "setp.lt.u32 %p0, %t, 8; @!%p0 bra END;\n{} // here\nEND: activemask.b32 %r9;"
    stops("barrier", branch.format(instruction.format("-1")), match="does not execute", lane=8)
    stops("barrier", branch.format(instruction.format("0x7f")), match="does not name it", lane=7)


def test_match():
    got = lanes("""
        and.b32 %r1, %t, 3; setp.gt.u32 %p0, %t, 19; @%p0 bra FEW;
        match.any.sync.b32 %r0, %r1, 0xfffff; bra END;
        FEW: mov.u64 %d0, 5; match.all.sync.b64 %r2|%p1, %d0, 0xfff00000;
        cvt.u64.u32 %d1, %t; match.all.sync.b64 %r3|%p2, %d1, 0xfff00000;
        not.pred %p2, %p2; and.pred %p1, %p1, %p2; @!%p1 trap; add.u32 %r0, %r2, %r3;
        END:""")
    assert got == [sum(1 << s for s in range(20) if s % 4 == t % 4) if t < 20 else 0xFFF00000 for t in T]


@pytest.mark.parametrize("operation, function", [
    ("add.u32", lambda v: sum(v)), ("add.s32", lambda v: sum(v)), ("min.u32", min), ("max.u32", max),
    ("min.s32", lambda v: min(v, key=lambda x: x - (x >> 31 << 32))),
    ("max.s32", lambda v: max(v, key=lambda x: x - (x >> 31 << 32))),
    ("and.b32", lambda v: int(np.bitwise_and.reduce(np.array(v, np.uint32)))),
    ("or.b32", lambda v: int(np.bitwise_or.reduce(np.array(v, np.uint32)))),
    ("xor.b32", lambda v: int(np.bitwise_xor.reduce(np.array(v, np.uint32))))])
def test_redux(operation, function):
    values = np.random.default_rng(4).integers(0, 2 ** 32, 32, dtype=np.uint32)
    got = lanes(f"mad.wide.u32 %d1, %t, 4, %a1; ld.global.b32 %r1, [%d1]; redux.sync.{operation} %r0, %r1, -1;", values)
    assert got == [function(values.tolist()) & 0xFFFFFFFF] * 32


def test_redux_of_floats():
    values = np.array([1.5, -7.0, -0.0, 0.0, 3.0, np.nan] + [2.0] * 26, np.float32)

    def reduced(form, data):
        return np.array(lanes("mad.wide.u32 %d1, %t, 4, %a1; ld.global.b32 %r1, [%d1];"
                              f"redux.sync.{form}.f32 %r0, %r1, -1;",
                              data), np.uint32)[0].item()

    bits = lambda x: int(np.float32(x).view(np.uint32))  # noqa: E731
    assert reduced("min", values) == bits(-7.0) and reduced("max", values) == bits(3.0)
    assert reduced("max.abs", values) == bits(7.0) and reduced("min.NaN", values) == 0x7FFFFFFF
    zeros = np.array([0.0, -0.0] * 16, np.float32)
    assert reduced("min", zeros) == 0x80000000 and reduced("max", zeros) == 0
    assert reduced("min", np.full(32, np.nan, np.float32)) == 0x7FFFFFFF


# --- matrices --------------------------------------------------------------------------------------


def shared_rows(data: np.ndarray) -> str:
    """Copies argument 1, 512 bytes, to the shared array buf."""
    return """mov.u32 %r99, buf; mad.wide.u32 %d1, %t, 16, %a1; mad.lo.u32 %r98, %t, 16, %r99;
        ld.global.v4.b32 {%r90, %r91, %r92, %r93}, [%d1]; st.shared.v4.b32 [%r98], {%r90, %r91, %r92, %r93};
        bar.sync 0;"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix_of_16_bit_elements(count, transposed):
    """Lane i gives the address of row (5 i) % 32. Lane t gets elements 2(t%4), 2(t%4)+1 of row t/4."""
    data = np.random.default_rng(count).integers(0, 2 ** 16, (32, 8), dtype=np.uint16)
    out, back = words(32 * count), np.zeros((32, 8), np.uint16)
    registers = "{" + ", ".join(f"%r{i}" for i in range(count)) + "}"
    trans = ".trans" if transposed else ""
    stores = "".join(f"st.global.b32 [%d0+{4 * i}], %r{i};" for i in range(count))
    run(f"""{shared_rows(data)}
        mul.lo.u32 %r50, %t, 5; and.b32 %r50, %r50, 31; mad.lo.u32 %r51, %r50, 16, %r99;
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [%r51];
        mad.wide.u32 %d0, %t, {4 * count}, %a0; {stores}
        mov.u32 %r60, back; mad.lo.u32 %r61, %r50, 16, %r60;
        st.shared.v4.b32 [%r61], {{0, 0, 0, 0}}; bar.sync 0;
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r61], {registers}; bar.sync 0;
        mad.lo.u32 %r62, %t, 16, %r60; ld.shared.v4.b32 {{%r70, %r71, %r72, %r73}}, [%r62];
        mad.wide.u32 %d2, %t, 16, %a2; st.global.v4.b32 [%d2], {{%r70, %r71, %r72, %r73}};""", out, data, back,
        declare=".shared .align 16 .b8 buf[512]; .shared .align 16 .b8 back[512];")
    halves = out.view(np.uint16).reshape(32, count, 2)
    for t in T:
        for j in range(count):
            for e in range(2):
                row, column = t // 4, 2 * (t % 4) + e
                if transposed:
                    row, column = column, row
                assert halves[t, j, e] == data[(5 * (8 * j + row)) % 32, column]
    written = {(5 * i) % 32 for i in range(8 * count)}
    assert all((back[r] == (data[r] if r in written else 0)).all() for r in T)


@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_of_bytes(count):
    """m16n16: register i of lane t holds bytes t/4 + 8 (i%2) of rows 4(t%4) .. 4(t%4)+3 of matrix i/2."""
    data = np.random.default_rng(1).integers(0, 256, (32, 16), dtype=np.uint8)
    n = 2 * count
    out = words(32 * n)
    registers = "{" + ", ".join(f"%r{i}" for i in range(n)) + "}"
    run(f"""{shared_rows(data)}
        ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8 {registers}, [%r98];
        mad.wide.u32 %d0, %t, {4 * n}, %a0; st.global.v{n}.b32 [%d0], {registers};""", out, data,
        declare=".shared .align 16 .b8 buf[512];")
    got = out.view(np.uint8).reshape(32, n, 4)
    assert all(got[t, i, e] == data[16 * (i // 2) + 4 * (t % 4) + e, t // 4 + 8 * (i % 2)]
               for t in T for i in range(n) for e in range(4))


def test_stmatrix_of_bytes():
    """m16n8: byte e of lane t goes to row 2(t%4) + e%2, byte t/4 + 8 (e/2)."""
    data, out = np.random.default_rng(2).integers(0, 256, (32, 16), dtype=np.uint8), np.zeros((32, 16), np.uint8)
    run("""mad.wide.u32 %d1, %t, 16, %a1; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d1];
        mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 16, %r9;
        stmatrix.sync.aligned.m16n8.x4.trans.shared.b8 [%r8], {%r0, %r1, %r2, %r3};
        ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r8]; mad.wide.u32 %d0, %t, 16, %a0;
        st.global.v4.b32 [%d0], {%r4, %r5, %r6, %r7};""", out, data, declare=".shared .align 16 .b8 buf[512];")
    held = data.reshape(32, 4, 4)
    assert all(out[8 * j + 2 * (t % 4) + e % 2, t // 4 + 8 * (e // 2)] == held[t, j, e]
               for t in T for j in range(4) for e in range(4))


def test_movmatrix():
    out = words(32)
    run("""mad.lo.u32 %r1, %t, 0x20002, 0x10000; movmatrix.sync.aligned.m8n8.trans.b16 %r0, %r1;
        st.global.b32 [%o], %r0;""", out)
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    assert (out.view(np.uint16).reshape(8, 8) == matrix.T).all()


def test_matrix_errors():
    declare = ".shared .align 16 .b8 buf[512];"
    stops("misaligned", "mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 8, %r9;\n"
          "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r8]; // here", declare=declare, lane=1)
    stops("uninitialised", "mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 16, %r9;\n"
          "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r8]; // here", declare=declare)
    stops("out of bounds", "mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 32, %r9;\n"
          "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r8], {%t, %t, %t, %t}; // here", declare=declare)
    stops("barrier", "mov.u32 %r9, buf; setp.lt.u32 %p0, %t, 16; @!%p0 bra END;\n"
          "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r9]; // here\nEND: activemask.b32 %r9;", declare=declare,
              match="16 lanes")


# --- printf, hints, traps ----------------------------------------------------------------------------


def test_printf(capsys):
    text = b"t=%d u=%u x=%#06x f=%.2f %s %c 100%% %lld %5s|\n\0word\0"
    module = f".global .align 1 .b8 text[{len(text)}] = {{{', '.join(map(str, text))}}};"
    run("""
        setp.gt.u32 %p0, %t, 1; @%p0 ret;
        mov.u64 %d0, depot; cvta.local.u64 %d1, %d0; mov.u64 %d2, text; cvta.global.u64 %d3, %d2;
        sub.s32 %r1, 0, %t; st.local.b32 [depot], %r1; st.local.b32 [depot+4], %r1; mov.u32 %r2, 255;
        st.local.b32 [depot+8], %r2; mov.b64 %d4, 0d400C000000000000; st.local.b64 [depot+16], %d4;
        add.u64 %d5, %d3, WORD; st.local.b64 [depot+24], %d5; mov.u32 %r3, 65; st.local.b32 [depot+32], %r3;
        mov.u64 %d6, -5000000000; st.local.b64 [depot+40], %d6; st.local.b64 [depot+48], %d5;
        { .param .b64 param0; st.param.b64 [param0], %d3; .param .b64 param1; st.param.b64 [param1], %d1;
          .param .b32 retval0; call.uni (retval0), vprintf, (param0, param1); ld.param.b32 %r4, [retval0]; }
        setp.ne.u32 %p1, %r4, 8; @%p1 trap;""".replace("WORD", str(text.index(b"word"))),
        module=module, declare=".local .align 8 .b8 depot[56];")
    assert capsys.readouterr().out == ("t=0 u=0 x=0x00ff f=3.50 word A 100% -5000000000  word|\n"
                                       "t=-1 u=4294967295 x=0x00ff f=3.50 word A 100% -5000000000  word|\n")


def test_assertions_of_the_kernel():
    text = b"x > 0\0file.py\0run\0"
    module = f".global .align 1 .b8 text[{len(text)}] = {{{', '.join(map(str, text))}}};"
    stops("assertion", """
        mov.u64 %d0, text; add.u64 %d1, %d0, 6; add.u64 %d2, %d0, 14;
        { .param .b64 p0; st.param.b64 [p0], %d0; .param .b64 p1; st.param.b64 [p1], %d1; .param .b32 p2;
          st.param.b32 [p2], 42; .param .b64 p3; st.param.b64 [p3], %d2; .param .b64 p4; st.param.b64 [p4], 1;
          call.uni __assertfail, (p0, p1, p2, p3, p4);
          }""", module=module, match="file.py:42: run: assertion `x > 0` failed")


def test_trap():
    stops("trap", "setp.gt.u32 %p0, %t, 3; @!%p0 bra END;\ntrap; // here\nEND: activemask.b32 %r9;")


def test_hints_change_nothing():
    got = lanes("""
        prefetch.global.L2 [%a0]; prefetchu.L1 [%a0]; discard.global.L2 [%a0], 128;
        applypriority.global.L2::evict_normal [%a0], 128;
        setmaxnreg.dec.sync.aligned.u32 64; nanosleep.u32 100; griddepcontrol.wait; griddepcontrol.launch_dependents;
        createpolicy.fractional.L2::evict_first.b64 %d0, 1.0; ld.global.L2::cache_hint.b32 %r1, [%o], %d0;
        ld.global.L1::no_allocate.L2::128B.b32 %r1, [%o]; ld.relaxed.gpu.global.b32 %r1, [%o];
        fence.acq_rel.gpu; membar.gl; fence.sc.cta; fence.proxy.alias; pmevent 1;
        mov.u32 %r0, 6;""")
    assert got == [6] * 32


def test_setmaxnreg_needs_the_whole_warp():
    stops("barrier",
          "setp.lt.u32 %p0, %t, 8; @!%p0 bra END;\nsetmaxnreg.inc.sync.aligned.u32 232; // here\n"
          "END: activemask.b32 %r9;", match="8 lanes")


# --- launches --------------------------------------------------------------------------------------


def test_launch_limits():
    for options, match in (({"threads": 1025}, "1025 threads"), ({"threads": (32, 32, 2)}, "2048 threads"),
                           ({"grid": 0}, "at least 1"), ({"grid": (1, 65536, 1)}, "65535"),
                           ({"grid": 3, "cluster": 2}, "not a multiple"), ({"shared_bytes": 300_000}, "shared memory"),
                           ({"directives": ".reqntid 64, 1, 1"}, "requires")):
        with pytest.raises(vgpu.VirtualGpuError, match=match) as caught:
            run("", **options)
        assert caught.value.kind == "launch"


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="1 given; the kernel has 0"):
        vgpu.launch(".version 8.7\n.target sm_100a\n.entry k() { ret; }", "k", (1, 1, 1), (32, 1, 1), [1])


def test_counters_and_records():
    launch = run("st.global.b32 [%o], %t;", words(64), threads=64)
    assert launch.counters["ctas"] == 1 and launch.counters["global_store_bytes"] == 256
    assert vgpu.last_launch() is launch and vgpu.launches()[-1] is launch
    vgpu.reset()
    assert vgpu.launches() == []
    with pytest.raises(RuntimeError, match="nothing has been launched"):
        vgpu.last_launch()
