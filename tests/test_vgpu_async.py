"""Asynchronous copies of the virtual GPU: right in every order with their waits, found out without them."""

import re

import numpy as np
import pytest
from kernels import aligned, run, stops, words

from vgpu import tensormap

ORDERS = [("copies", 0), ("tensor", 0), ("random", 0), ("random", 1), ("random", 2), ("random", 3)]
in_every_order = pytest.mark.parametrize("order, seed", ORDERS)
SHARED = ".shared .align 128 .b8 buf[1024]; .shared .align 8 .b64 bar[4]; .shared .align 128 .b8 other[1024];"
START = """mov.u32 %r9, buf; mov.u32 %r10, bar; mov.u32 %r11, other; setp.eq.u32 %p31, %t, 0;
        mad.lo.u32 %r8, %t, 4, %r9;
    mad.lo.u32 %r12, %t, 4, %r11; @%p31 mbarrier.init.shared::cta.b64 [bar], 1;
    @%p31 mbarrier.init.shared::cta.b64 [bar+8], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"""
WAIT = "W{0}: mbarrier.try_wait.parity.shared::cta.b64 %p30, [bar{1}], {2}; @!%p30 bra W{0};"
EXPECT = "@%p31 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {};"
COPY = "@%p31 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{}], [{}], {}, [%r10];"
STORE = "@%p31 cp.async.bulk.global.shared::cta.bulk_group [{}], [{}], {};"
COMMIT = "@%p31 cp.async.bulk.commit_group;"


def wait(parity=0, label=0, bar="") -> str:
    return WAIT.format(label, bar, parity)


def source(count=256, first=0) -> np.ndarray:
    return aligned(np.arange(first, first + count, dtype=np.uint32) * 3 + 1)


# --- cp.async --------------------------------------------------------------------------------------

ADDRESSES = """mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 16, %r9; mad.wide.u32 %d1, %t, 16, %a1;
        mad.wide.u32 %d0, %t, 16, %a0;
    mov.u32 %r20, 0xdead; st.shared.v4.b32 [%r8], {%r20, %r20, %r20, %r20};
    st.shared.v4.b32 [%r8+512], {%r20, %r20, %r20, %r20};"""
RESULT = "ld.shared.v4.b32 {{%r1, %r2, %r3, %r4}}, [%r8{}]; st.global.v4.b32 [%d0{}], {{%r1, %r2, %r3, %r4}};"


@pytest.mark.parametrize("wait_for, landed", [
    ("cp.async.wait_all;", (True, True)), ("cp.async.wait_group 0;", (True, True)),
    ("cp.async.wait_group 1;", (True, False)), ("cp.async.wait_group 2;", (False, False)), ("", (False, False))])
def test_cp_async_groups(wait_for, landed):
    """What has not been waited for is not there."""
    data, out = source(), aligned(words(256))
    run(ADDRESSES + """
        cp.async.cg.shared.global [%r8], [%d1], 16; cp.async.commit_group;
        cp.async.ca.shared::cta.global.L2::128B [%r8+512], [%d1+512], 16; cp.async.commit_group;""" + wait_for +
        RESULT.format("", "") + RESULT.format("+512", "+512"), out, data, declare=SHARED)
    for half, there in enumerate(landed):
        part = slice(128 * half, 128 * half + 128)
        assert out[part].tolist() == (data[part].tolist() if there else [0xDEAD] * 128)


def test_cp_async_groups_are_each_threads_own():
    """Odd lanes commit one group more: wait_group 1 leaves their last one under way, and the only one of the others."""
    data, out = source(), aligned(words(256))
    run(ADDRESSES + """and.b32 %r5, %t, 1; setp.ne.u32 %p0, %r5, 0;
        cp.async.cg.shared.global [%r8], [%d1], 16; cp.async.commit_group;
        @%p0 cp.async.cg.shared.global [%r8+512], [%d1+512], 16; @%p0 cp.async.commit_group;
        cp.async.wait_group 1;""" + RESULT.format("", "") + RESULT.format("+512", "+512"), out, data, declare=SHARED)
    rows, got = data.reshape(2, 32, 4), out.reshape(2, 32, 4)
    for t in range(32):
        assert got[0, t].tolist() == (rows[0, t].tolist() if t % 2 else [0xDEAD] * 4)
        assert got[1, t].tolist() == [0xDEAD] * 4


def test_cp_async_fills_with_zeros():
    """A source size below the copy's, and the predicate that ignores the source."""
    data, out = source(), aligned(words(256))
    run(ADDRESSES + """and.b32 %r5, %t, 15; setp.gt.u32 %p0, %t, 20;
        cp.async.cg.shared.global [%r8], [%d1], 16, %r5; cp.async.cg.shared.global [%r8+512], [%d1+512], 16, %p0;
        cp.async.wait_all;""" + RESULT.format("", "") + RESULT.format("+512", "+512"), out, data, declare=SHARED)
    raw, got = data.view(np.uint8).reshape(2, 32, 16), out.view(np.uint8).reshape(2, 32, 16)
    for t in range(32):
        assert got[0, t].tolist() == [*raw[0, t, :t % 16].tolist(), *[0] * (16 - t % 16)]
        assert got[1, t].tolist() == ([0] * 16 if t > 20 else raw[1, t].tolist())


@in_every_order
def test_cp_async_arrives_at_an_mbarrier(order, seed):
    """With and without .noinc; another warp reads what warp 0 copied."""
    for noinc, count in ((".noinc", 32), ("", 33)):
        data, out = source(), aligned(words(128))
        arrival = "" if noinc else "@%p31 {0} {0}".format("mbarrier.arrive.shared::cta.b64 _, [bar];")
        run(f"""setp.eq.u32 %p31, %t, 0; @%p31 mbarrier.init.shared::cta.b64 [bar], {count}; bar.sync 0;
            mov.u32 %r9, buf; mad.lo.u32 %r8, %lane, 16, %r9; mad.wide.u32 %d1, %lane, 16, %a1;
            mad.wide.u32 %d0, %lane, 16, %a0;
            setp.eq.u32 %p0, %warp, 1; @%p0 bra READ;
            cp.async.cg.shared.global [%r8], [%d1], 16; cp.async.mbarrier.arrive{noinc}.shared::cta.b64 [bar];
            {arrival} ret;
            READ: {wait()} {RESULT.format("", "")}""", out, data, threads=64, order=order, seed=seed, declare=SHARED)
        assert (out == data[:128]).all()


def test_cp_async_faults():
    data = source()
    for body, kind, match in (
            ("cp.async.ca.shared.global [%r8+4], [%d1], 8; // here", "misaligned", "not a multiple of 8"),
            ("cp.async.cg.shared.global [%r8], [%d1+8], 16; // here", "misaligned", "not a multiple of 16"),
            ("cp.async.cg.shared.global [%r8], [%d1+640], 16; // here", "out of bounds", "past the end"),
            ("cp.async.cg.shared.global [%r8+3072], [%d1], 16; // here", "out of bounds", "shared access"),
            ("cp.async.cg.shared.global [%r8], [%d1], 16, 17; // here", "out of bounds", "source size 17 exceeds 16")):
        stops(kind, ADDRESSES + "\n" + body, aligned(words(128)), data, match=match, declare=SHARED)


# --- bulk copies -----------------------------------------------------------------------------------


@in_every_order
def test_bulk_load(order, seed):
    data, out = source(), words(256)
    run(START + EXPECT.format(1024) + COPY.format("%r9", "%a1", 512) + COPY.format("%r9+512", "%a1+512", 512) + wait() +
        "ld.shared.b32 %r0, [%r8]; st.global.b32 [%o], %r0;", out, data, threads=256, order=order, seed=seed,
            declare=SHARED)
    assert (out == data).all()


@in_every_order
@pytest.mark.parametrize("access", [
    "ld.shared.b32 %r0, [%r8];", "st.shared.b32 [%r8], %t;", "ld.shared.b32 %r0, [%r9];",
    "ld.shared.v2.b32 {%r0, %r1}, [%r9+504];", "st.shared.b8 [%r9+511], %t;", "atom.shared.add.u32 %r0, [%r8], 1;",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r0}, [%r9];", "@%p31 st.bulk.shared::cta [%r9], 64, 0;"])
def test_touching_what_a_copy_in_flight_writes(access, order, seed):
    """A wait that is missing."""
    stops("race", START + EXPECT.format(512) + COPY.format("%r9", "%a1", 512) + f"\n{access} // here", words(256),
          source(), order=order, seed=seed, declare=SHARED,
          match=r"an operation in flight still writes: PTX line \d+: @%p31 cp.async.bulk.shared::cluster.global")


@in_every_order
def test_memory_beside_a_copy_in_flight_is_free(order, seed):
    out = words(32)
    run(START + "st.shared.b32 [%r8+512], %t;" + EXPECT.format(512) + COPY.format("%r9", "%a1", 512) +
        "ld.shared.b32 %r0, [%r8+512]; st.global.b32 [%o], %r0;" + wait(), out, source(), order=order, seed=seed,
        declare=SHARED)
    assert out.tolist() == list(range(32))


@in_every_order
def test_copies_that_overlap(order, seed):
    stops("race", START + EXPECT.format(1024) + COPY.format("%r9", "%a1", 512) + "\n" +
          COPY.format("%r9+496", "%a1", 512) + " // here", words(32), source(), order=order, seed=seed, declare=SHARED,
          match="copy writes shared bytes .* still writes")


@in_every_order
def test_a_pipeline_of_bulk_copies(order, seed):
    """A producer warp fills two stages, three consumer warps add them up and give them back; six tiles."""
    body = """
        setp.ne.u32 %p0, %warp, 0; mov.u32 %r1, 0; mov.u32 %r0, 0;
        LOOP: and.b32 %r2, %r1, 1; shr.u32 %r3, %r1, 1; and.b32 %r3, %r3, 1; mad.lo.u32 %r4, %r2, 8, %r10;
        mad.lo.u32 %r5, %r2, 512, %r9; @%p0 bra CONSUME;
        xor.b32 %r6, %r3, 1;
        E: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4+16], %r6; @!%p1 bra E;
        mad.wide.u32 %d1, %r1, 384, %a1; elect.sync %r7|%p2, -1; @!%p2 bra NEXT;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r4], 384;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%d1], 384, [%r4]; bra NEXT;
        CONSUME: F: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], %r3; @!%p1 bra F;
        sub.u32 %r6, %t, 32; mad.lo.u32 %r6, %r6, 4, %r5; ld.shared.b32 %r7, [%r6]; mad.lo.u32 %r0, %r0, 5, %r7;
        bar.sync 1, 96; setp.eq.u32 %p3, %t, 32; @%p3 mbarrier.arrive.shared::cta.b64 _, [%r4+16];
        NEXT: add.u32 %r1, %r1, 1; setp.lt.u32 %p4, %r1, 6; @%p4 bra LOOP;
        @!%p0 ret; st.global.b32 [%o+-128], %r0;"""
    data, out = source(6 * 96), words(96)
    start = START + """@%p31 mbarrier.init.shared::cta.b64 [bar+16], 1; @%p31 mbarrier.init.shared::cta.b64 [bar+24], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0;"""
    launch = run(start + body, out, data, threads=128, order=order, seed=seed, declare=SHARED)
    total = np.zeros(96, np.uint64)
    for tile in data.reshape(6, 96):
        total = total * 5 + tile
    assert (out == (total & 0xFFFFFFFF)).all()
    assert launch.counters["tma_load_bytes"] == 6 * 384 and launch.warnings == []
    without_full = body.replace("F: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], %r3; @!%p1 bra F;", "")
    without_empty = body.replace("E: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4+16], %r6; @!%p1 bra E;", "")
    for kinds, text in ((("uninitialised", "race"), without_full), (("mbarrier", "race"), without_empty)):
        stops(kinds, start + text, words(96), data, threads=128, order=order, seed=seed, declare=SHARED, warp=None)
    too_many = body.replace("_, [%r4], 384;", "_, [%r4], 400;")
    stops("deadlock", start + too_many, words(96), data, threads=128, order=order, seed=seed, declare=SHARED, warp=None,
          match="still missing 16 transaction bytes")


@in_every_order
def test_bulk_store(order, seed):
    """Written, fenced, stored, and the shared memory reused after wait_group.read."""
    out = aligned(words(512))
    run(START + """mul.lo.u32 %r1, %t, 7; st.shared.b32 [%r8], %r1; fence.proxy.async.shared::cta; bar.sync 0;""" +
        STORE.format("%a0", "%r9", 1024) + COMMIT + "@%p31 cp.async.bulk.wait_group.read 0; bar.sync 0;"
        "mul.lo.u32 %r1, %t, 9; st.shared.b32 [%r8], %r1; fence.proxy.async; bar.sync 0;" +
        STORE.format("%a0+1024", "%r9", 1024) + COMMIT + "@%p31 cp.async.bulk.wait_group 0;", out, threads=256,
        order=order, seed=seed, declare=SHARED)
    assert out.tolist() == [7 * t for t in range(256)] + [9 * t for t in range(256)]


def test_bulk_store_with_a_byte_mask():
    out = aligned(np.full(64, 0xEE, np.uint8))
    run(START +
        "mad.lo.u32 %r1, %t, 0x01010101, 0; st.shared.b32 [%r8], %r1; fence.proxy.async; bar.sync 0;"
        "mov.u16 %h0, 0x8421; @%p31 cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%a0], [%r9], 64, %h0;" +
        COMMIT + "@%p31 cp.async.bulk.wait_group 0;", out, declare=SHARED)
    assert out.tolist() == [i // 4 if 0x8421 >> i % 16 & 1 else 0xEE for i in range(64)]


@in_every_order
def test_writing_what_a_store_in_flight_still_reads(order, seed):
    """wait_group.read that is missing, or comes too early; reading is no harm."""
    body = START + "st.shared.b32 [%r8], %t; fence.proxy.async.shared::cta; bar.sync 0;" + STORE.format("%a0", "%r9",
        512)
    late = "@%p31 cp.async.bulk.wait_group 0;"
    options = {"order": order, "seed": seed, "declare": SHARED, "threads": 128}
    run(body + COMMIT + "ld.shared.b32 %r0, [%r8];" + late, aligned(words(256)), **options)
    for wait_for in (COMMIT, COMMIT + "@%p31 cp.async.bulk.wait_group.read 1;",
        "@%p31 cp.async.bulk.wait_group.read 0;"):
        stops("race", body + wait_for + "bar.sync 0;\nst.shared.b32 [%r8], 0; // here\n" + COMMIT + late,
              aligned(words(256)), warp=None, match="still reads: PTX line .* cp.async.bulk.global.shared::cta",
                  **options)
    stops("race", body + EXPECT.format(512) + "\n" + COPY.format("%r9", "%a0", 512) + " // here", aligned(words(256)),
          match="copy writes shared bytes .* still reads", **options)


@in_every_order
@pytest.mark.parametrize("fences", ["", "bar.sync 0; fence.proxy.async.global;", "fence.acq_rel.cta;"])
def test_a_proxy_fence_that_is_missing_before_a_bulk_store(fences, order, seed):
    stops("proxy fence", START + f"st.shared.b32 [%r8], %t; {fences} bar.sync 0;\n" + STORE.format("%a0", "%r9", 512) +
          " // here", aligned(words(256)), threads=128, order=order, seed=seed, declare=SHARED,
          match="no fence.proxy.async since")


@in_every_order
def test_a_proxy_fence_after_the_barrier_by_the_storing_thread(order, seed):
    """In causality order the fence may also come between the barrier and the store (PTX ISA 8.9.4)."""
    out = aligned(words(128))
    run(START + "st.shared.b32 [%r8], %t; bar.sync 0; fence.proxy.async.shared::cta;" + STORE.format("%a0", "%r9",
        512) + COMMIT + "@%p31 cp.async.bulk.wait_group 0;", out, threads=128, order=order, seed=seed, declare=SHARED)
    assert out.tolist() == list(range(128))


def test_storing_what_was_never_written():
    stops("uninitialised", START + "@%p31 st.shared.b32 [%r9], 1; fence.proxy.async; bar.sync 0;\n" +
          STORE.format("%a0", "%r9", 16) + " // here", aligned(words(64)), declare=SHARED, match="never written")


def test_bulk_copy_faults():
    data = aligned(words(256))
    for statement, kind, match in (
            (COPY.format("%r9", "%a0", 40), "misaligned", "40 bytes; must be a multiple of 16"),
            (COPY.format("%r9+8", "%a0", 32), "misaligned", "multiple of 16"),
            (COPY.format("%r9", "%a0+4", 32), "misaligned", "multiple of 16"),
            (COPY.format("%r9", "%a0+1008", 32), "out of bounds", "past the end"),
            (COPY.format("%r9+4096", "%a0", 32), "out of bounds", "shared access"),
            (COPY.format("%r9", "%a0", 32).replace("[%r10]", "[%r10+16]"), "mbarrier", "no mbarrier"),
            (STORE.format("%a0+4", "%r9", 32), "misaligned", "multiple of 16"),
            (STORE.format("%a0+1024", "%r9", 32), "out of bounds", "past the end")):
        stops(kind, START + "st.shared.b32 [%r8], 0; fence.proxy.async; bar.sync 0;\n" + statement + " // here", data,
              match=match, declare=SHARED)


@in_every_order
def test_a_cta_that_exits_with_a_copy_in_flight(order, seed):
    stops("race", START + EXPECT.format(64) + COPY.format("%r9", "%a1", 64), words(32), source(), order=order,
          seed=seed, declare=SHARED, warp=None,
              match=r"the CTA exits while .* in flight: PTX line \d+: @%p31 cp.async.bulk")


def test_a_cta_that_exits_before_its_store_has_read():
    out = aligned(words(32))
    launch = run(START + "st.shared.b32 [%r8], %t; fence.proxy.async; bar.sync 0;" + STORE.format("%a0", "%r9", 128) +
                 COMMIT, out, declare=SHARED)
    assert re.search("exits while a bulk store still reads .*no wait_group.read", "\n".join(launch.warnings))
    assert out.tolist() == list(range(32))


def test_an_mbarrier_whose_initialisation_was_not_fenced():
    start = START.replace("fence.mbarrier_init.release.cluster;", "")
    launch = run(start + EXPECT.format(64) + COPY.format("%r9", "%a1", 64) + wait(), words(32), source(),
        declare=SHARED)
    assert re.search("before fence.mbarrier_init", "\n".join(launch.warnings))


# --- between CTAs ----------------------------------------------------------------------------------

CLUSTER = START + """mov.u32 %r7, %cluster_ctarank; xor.b32 %r6, %r7, 1; barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r5, %r11, %r6; mapa.shared::cluster.u32 %r4, %r10, %r6;"""
FINISH = "barrier.cluster.arrive; barrier.cluster.wait;"
OUT = "mov.u32 %r3, %ctaid.x; mad.lo.u32 %r3, %r3, {}, %t; mad.wide.u32 %d0, %r3, 4, %a0; st.global.b32 [%d0], %r0;"


@in_every_order
def test_bulk_copy_to_another_cta(order, seed):
    out = words(2 * 128)
    run(CLUSTER + """mad.lo.u32 %r1, %r7, 1000, %t; st.shared.b32 [%r8], %r1; fence.proxy.async; bar.sync 0;""" +
        EXPECT.format(512) +
        "@%p31 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r9], 512, [%r4];" +
        wait() + "ld.shared.b32 %r0, [%r12];" + OUT.format(128) + FINISH, out, threads=128, grid=2, cluster=2,
            order=order, seed=seed, declare=SHARED)
    assert out.tolist() == [1000 * (c ^ 1) + t for c in range(2) for t in range(128)]


@in_every_order
def test_multicast(order, seed):
    """CTA 1 of each cluster loads for CTAs 0 and 2 of four; the others' memory stays as it was."""
    data, out = source(), words(4 * 128)
    run(START + """mov.u32 %r7, %cluster_ctarank; st.shared.b32 [%r8], 5; fence.proxy.async; barrier.cluster.arrive;
        barrier.cluster.wait; and.b32 %r1, %r7, 1; setp.eq.u32 %p0, %r1, 0; mov.u16 %h0, 5;
        setp.ne.u32 %p1, %t, 0; @%p1 bra ON; @%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512;
        setp.eq.u32 %p2, %r7, 1; @!%p2 bra ON;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r9], [%a1], 512, [%r10],
        %h0;
        ON: @!%p0 bra DONE;""" + wait() + "DONE: ld.shared.b32 %r0, [%r8];" + OUT.format(128) + FINISH, out, data,
        threads=128, grid=4, cluster=4, order=order, seed=seed, declare=SHARED)
    assert out.tolist() == [int(data[t]) if c % 2 == 0 else 5 for c in range(4) for t in range(128)]


@in_every_order
def test_st_async_and_red_async(order, seed):
    """Values to the other CTA, counted in bytes at its barrier; then sums."""
    out = words(2 * 32)
    run(CLUSTER + "st.shared.b32 [%r12+512], 100; fence.proxy.async; barrier.cluster.arrive; barrier.cluster.wait;" +
        EXPECT.format(384) + """
        mad.lo.u32 %r1, %t, 8, %r5; mad.lo.u32 %r2, %t, 4, %r5;
        st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r1], {%t, %r7}, [%r4];
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r2+512], %t, [%r4];""" +
        wait() + """mad.lo.u32 %r1, %t, 8, %r11; ld.shared.v2.b32 {%r0, %r2}, [%r1]; mad.lo.u32 %r0, %r0, 10, %r2;
        ld.shared.b32 %r2, [%r12+512];
        mad.lo.u32 %r0, %r2, 1000, %r0;""" + OUT.format(32) + FINISH, out, grid=2, cluster=2,
        order=order, seed=seed, declare=SHARED)
    assert out.tolist() == [(100 + t) * 1000 + 10 * t + (c ^ 1) for c in range(2) for t in range(32)]


def test_st_async_needs_a_barrier_in_the_same_cta():
    stops("mbarrier", CLUSTER +
          "\nst.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %t, [%r10]; // here", grid=2, cluster=2,
              declare=SHARED, warp=None, match="different CTAs")


# --- tensor copies ---------------------------------------------------------------------------------


def tensor(array: np.ndarray, box: tuple[int, int]) -> bytes:
    """The tensor map of a uint32 matrix; box: (columns, rows)."""
    rows, columns = array.shape
    return tensormap.encode("u32", array.ctypes.data, (columns, rows), (4 * columns,), box)


TENSOR = "cp.async.bulk.tensor.2d"
MAP = "mov.b64 %d10, k_param_{}; cvta.param.u64 %d10, %d10; mov.u32 %r20, {}; mov.u32 %r21, {};"
LOAD = f"@%p31 {TENSOR}.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r9], [%d10, {{%r20, %r21}}], [%r10];"
TSTORE = f"@%p31 {TENSOR}.global.shared::cta.bulk_group [%d10, {{%r20, %r21}}], [%r9];"


@in_every_order
def test_tensor_load_and_store(order, seed):
    data, target, out = aligned(source().reshape(16, 16)), aligned(words(256).reshape(16, 16)), words(32)
    run(START + MAP.format(3, 4, 8) + EXPECT.format(128) + LOAD + wait() +
        "ld.shared.b32 %r0, [%r8]; add.u32 %r0, %r0, 1; st.shared.b32 [%r8], %r0; fence.proxy.async.shared::cta;"
        "bar.sync 0;" + MAP.format(4, 8, 2) + TSTORE + COMMIT +
        "@%p31 cp.async.bulk.wait_group 0; st.global.b32 [%o], %r0;", out, target, data, tensor(data, (8, 4)),
        tensor(target, (8, 4)), order=order, seed=seed, declare=SHARED)
    assert (target[2:6, 8:16] == data[8:12, 4:12] + 1).all() and target.sum() == target[2:6, 8:16].sum()
    assert (out.reshape(4, 8) == data[8:12, 4:12] + 1).all()


@in_every_order
def test_tensor_copies_without_their_waits_and_fences(order, seed):
    data = aligned(source().reshape(16, 16))
    options = {"order": order, "seed": seed, "declare": SHARED}
    arguments = (words(32), data, tensor(data, (8, 4)))
    load = START + MAP.format(2, 0, 0) + EXPECT.format(128) + LOAD
    stops("race", load + "\nld.shared.b32 %r0, [%r8]; // here", *arguments, match="still writes", **options)
    stops("race", load + "\nst.shared.b32 [%r8], %t; // here", *arguments, match="still writes", **options)
    written = START + MAP.format(2, 0, 0) + "st.shared.b32 [%r8], %t;"
    stops("proxy fence", written + "bar.sync 0;\n" + TSTORE + " // here", *arguments, **options)
    stops("race", written + "fence.proxy.async; bar.sync 0;" + TSTORE + COMMIT + "\nst.shared.b32 [%r8], 0; // here",
          *arguments, match="still reads", **options)


# --- cluster launch control --------------------------------------------------------------------------


@in_every_order
@pytest.mark.parametrize("cluster", [1, 2])
def test_a_persistent_kernel_takes_over_clusters_that_have_not_started(cluster, order, seed):
    """Every CTA id is worked on once, whoever does it; every request is answered."""
    out = words(12)
    body = """mov.u32 %r9, answer; mov.u32 %r10, bar; setp.eq.u32 %p31, %t, 0; mov.u32 %r7, %cluster_ctarank;
        @%p31 mbarrier.init.shared::cta.b64 [bar], 1; fence.mbarrier_init.release.cluster;
        mov.u32 %r1, %ctaid.x; sub.u32 %r1, %r1, %r7; mov.u32 %r2, 0;
        barrier.cluster.arrive; barrier.cluster.wait;
        NEXT: @%p31 mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [bar], 16;
        setp.eq.u32 %p0, %r7, 0; and.pred %p0, %p0, %p31; @!%p0 bra WORK;
        clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 [%r9], [%r10];
        WORK: add.u32 %r3, %r1, %r7; mad.wide.u32 %d0, %r3, 4, %a0; @%p31 red.global.add.u32 [%d0], 1;
        W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [bar], %r2; @!%p1 bra W;
        xor.b32 %r2, %r2, 1; ld.shared.b128 %q0, [%r9]; fence.proxy.async.shared::cta; barrier.cluster.arrive;
        barrier.cluster.wait;
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0; @!%p2 ret;
        clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r1, %r4, %r5, _}}, %q0;
        clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r6, %q0; setp.ne.u32 %p3, %r6, %r1; @%p3 trap;
        bra NEXT;""".format(".multicast::cluster::all" if cluster > 1 else "")
    launch = run(body, out, threads=64, grid=12, cluster=cluster, order=order, seed=seed,
                 declare=".shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar;")
    assert out.tolist() == [1] * 12
    assert launch.counters["ctas"] < 12


def test_the_answer_to_a_refused_request_has_no_cta():
    out = words(32)
    run("""mov.u32 %r9, answer; mov.u32 %r10, bar; setp.eq.u32 %p31, %t, 0;
        @%p31 mbarrier.init.shared::cta.b64 [bar], 1;
        fence.mbarrier_init.release.cluster; bar.sync 0; @%p31 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;
        @%p31 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r9], [%r10];
        W: mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0; @!%p1 bra W; ld.shared.b128 %q0, [%r9];
        clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r6, %q0;
        clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %q0; @%p2 trap; st.global.b32 [%o], %r6;""", out,
        declare=".shared .align 16 .b8 answer[16]; .shared .align 8 .b64 bar;")
    assert (out >= 1).all()  # the grid has CTA 0 alone
