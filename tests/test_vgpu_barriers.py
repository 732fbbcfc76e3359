"""Barriers of the virtual GPU: named, mbarriers, clusters, kernels whose CTAs wait for each other, deadlocks."""

import re
import time

import numpy as np
import pytest
from kernels import lanes, run, stops, words

import vgpu

ORDERS = [("copies", 0), ("tensor", 0), ("random", 0), ("random", 1), ("random", 2)]
BAR = ".shared .align 8 .b64 bar; .shared .align 8 .b64 bar2;"
INIT = """setp.eq.u32 %p31, %t, 0; @%p31 mbarrier.init.shared::cta.b64 [bar], {count};
    fence.mbarrier_init.release.cluster; bar.sync 0;"""


def spin(parity: str, bar: str = "[bar]", label: str = "W", predicate: str = "%p30") -> str:
    """A loop around mbarrier.try_wait.parity."""
    return (f"{label}: mbarrier.try_wait.parity.shared::cta.b64 {predicate}, {bar}, {parity};"
            f"@!{predicate} bra {label};")


# --- named barriers --------------------------------------------------------------------------------


@pytest.mark.parametrize("order, seed", ORDERS)
def test_bar_sync_orders_shared_memory(order, seed):
    out = words(128)
    run("""mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 4, %r9; st.shared.b32 [%r8], %t; bar.sync 0;
        xor.b32 %r1, %t, 127; mad.lo.u32 %r8, %r1, 4, %r9; ld.shared.b32 %r0, [%r8]; barrier.cta.sync.aligned 0;
        st.shared.b32 [%r8], 0; st.global.b32 [%o], %r0;""", out, threads=128, order=order, seed=seed,
        declare=".shared .align 4 .b8 buf[512];")
    assert out.tolist() == [t ^ 127 for t in range(128)]


@pytest.mark.parametrize("order, seed", ORDERS)
def test_named_barriers_with_counts_hand_a_buffer_back_and_forth(order, seed):
    """Warp 0 produces, warps 1 and 2 consume; bar.arrive does not wait. Warp 3 takes no part."""
    out = words(64 * 5)
    run("""mov.u32 %r9, buf; mad.lo.u32 %r8, %lane, 4, %r9; mov.u32 %r1, 0;
        setp.eq.u32 %p0, %warp, 3; @%p0 ret;
        setp.eq.u32 %p1, %warp, 0; @%p1 bra PRODUCER;
        CONSUMER: bar.sync 1, 96; ld.shared.b32 %r2, [%r8]; bar.arrive 2, 96;
        sub.u32 %r3, %t, 32; mad.lo.u32 %r3, %r1, 64, %r3; mad.wide.u32 %d0, %r3, 4, %a0; st.global.b32 [%d0], %r2;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 5; @%p2 bra CONSUMER; ret;
        PRODUCER: mad.lo.u32 %r2, %r1, 1000, %lane; st.shared.b32 [%r8], %r2; bar.arrive 1, 96;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 5; @!%p2 ret;
        bar.sync 2, 96; bra PRODUCER;""", out, threads=128, order=order, seed=seed,
        declare=".shared .align 4 .b8 buf[128];")
    assert out.tolist() == [1000 * i + t % 32 for i in range(5) for t in range(64)]


def test_bar_red():
    """Results in every lane of every warp; exited warps do not vote."""
    out = words(96)
    run("""setp.eq.u32 %p9, %warp, 2; @%p9 ret;
        and.b32 %r1, %t, 3; setp.eq.u32 %p0, %r1, 0; setp.lt.u32 %p1, %t, 64; setp.eq.u32 %p2, %t, 63;
        setp.gt.u32 %p3, %t, 70;
        bar.red.popc.u32 %r2, 0, %p0; bar.red.and.pred %p4, 0, %p1; bar.red.or.pred %p5, 3, 64, %p2;
        barrier.red.or.pred %p6, 0, %p3; barrier.cta.red.popc.aligned.u32 %r3, 0, !%p0;
        selp.u32 %r4, 100, 0, %p4; selp.u32 %r5, 1000, 0, %p5; selp.u32 %r6, 5, 0, %p6; mad.lo.u32 %r0, %r3, 10000, %r2;
        add.u32 %r0, %r0, %r4; add.u32 %r0, %r0, %r5; add.u32 %r0, %r0, %r6;
        st.global.b32 [%o], %r0;""", out, threads=96)
    assert out.tolist() == [48 * 10000 + 16 + 1100] * 64 + [0] * 32


def test_exited_warps_count_for_barriers_of_the_whole_cta():
    """Before and after the others arrive, with and without a result."""
    out = words(128)
    run("""setp.eq.u32 %p0, %warp, 0; @%p0 ret;
        mov.u32 %r1, 0; DELAY: add.u32 %r1, %r1, 1; setp.eq.u32 %p1, %warp, 1; setp.lt.u32 %p2, %r1, 30000;
        and.pred %p3, %p1, %p2; @%p3 bra DELAY; @%p1 ret;
        bar.sync 5; setp.ge.u32 %p4, %t, 64; bar.red.popc.u32 %r0, 5, %p4;
        st.global.b32 [%o], %r0;""", out, threads=128)
    assert out.tolist() == [0] * 64 + [64] * 64


def test_exited_warps_do_not_count_where_a_number_is_given():
    stops("deadlock", "setp.eq.u32 %p0, %warp, 0; @%p0 ret; bar.sync 0, 64;", threads=64, warp=None,
          match=r"warp 1 waits at barrier 0: 32 of 64 threads arrived \(warps \[1\]\) at PTX line")


@pytest.mark.parametrize("body, match", [
    ("bar.sync 0, 40; // here", "not a multiple of 32"),
    ("bar.sync 16; // here", "allowed 0..15"),
    ("bar.sync %lane; // here", "differs between the active lanes"),
    ("bar.arrive 1, 96; \nbar.arrive 1, 96; // here", "arrives twice"),
    ("setp.lt.u32 %p0, %lane, 16; @!%p0 bra E; \nbar.sync 0; // here\nE: activemask.b32 %r9;", "only 16 lanes"),
    ("setp.lt.u32 %p0, %lane, 16; @!%p0 bra E; \nbarrier.sync 0; // here\nE: activemask.b32 %r9;", "16 lanes"),
    ("setp.eq.u32 %p0, %warp, 0; @%p0 bra E; bar.arrive 1, 96; E: bar.sync 2; @!%p0 ret; \nbar.sync 1, 64; // here",
     "64 threads while it waits for 96"),
    ("setp.eq.u32 %p0, %warp, 0; @%p0 bra E; bar.arrive 1, 96; E: bar.sync 2; @!%p0 ret; \n"
     "bar.red.popc.u32 %r0, 1, 96, %p0; // here", "in use by .arrive"),
])
def test_misuse_of_named_barriers(body, match):
    kind = "unsupported" if "differs" in match or match == "16 lanes" else "barrier"
    stops(kind, body, threads=64, match=match)


# --- mbarriers -------------------------------------------------------------------------------------


def test_parity_of_a_fresh_barrier():
    got = lanes(INIT.format(count=1) + """
        mbarrier.test_wait.parity.shared::cta.b64 %p0, [bar], 0;
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 1;
        selp.u32 %r1, 1, 0, %p0; selp.u32 %r2, 2, 0, %p1; or.b32 %r0, %r1, %r2;""", declare=BAR)
    assert got == [2] * 32


def test_phases_arrivals_and_tokens():
    """Four warps arrive with all lanes; each phase completes once, the token's wait agrees with the parity's."""
    out = words(128)
    run(INIT.format(count=128) + """
        mov.u32 %r1, 0; mov.u32 %r0, 0;
        LOOP: mbarrier.arrive.shared::cta.b64 %d0, [bar];
        T: mbarrier.try_wait.shared::cta.b64 %p0, [bar], %d0; @!%p0 bra T;
        and.b32 %r2, %r1, 1;
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], %r2;
        selp.u32 %r3, 1, 0, %p1; add.u32 %r0, %r0, %r3; bar.sync 0;
        add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 4; @%p2 bra LOOP;
        st.global.b32 [%o], %r0;""", out, threads=128, declare=BAR)
    assert out.tolist() == [4] * 128


def test_pending_counts_and_counted_arrivals():
    out = words(8)
    run("setp.gt.u32 %p0, %t, 0; @%p0 ret;" + """
        mbarrier.init.shared::cta.b64 [bar], 10;
        mbarrier.arrive.shared::cta.b64 %d0, [bar], 3; mbarrier.pending_count.b64 %r0, %d0;
        mbarrier.arrive.noComplete.shared::cta.b64 %d1, [bar], 2; mbarrier.pending_count.b64 %r1, %d1;
        mbarrier.arrive_drop.shared::cta.b64 %d2, [bar], 4; mbarrier.pending_count.b64 %r2, %d2;
        mbarrier.arrive.shared::cta.b64 %d3, [bar]; mbarrier.pending_count.b64 %r3, %d3;
        mbarrier.arrive.shared::cta.b64 %d4, [bar], 6; mbarrier.pending_count.b64 %r4, %d4;
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 1; selp.u32 %r5, 1, 0, %p1;
        st.global.v4.b32 [%a0], {%r0, %r1, %r2, %r3}; st.global.v2.b32 [%a0+16], {%r4, %r5};""", out, declare=BAR)
    assert out[:6].tolist() == [10, 7, 5, 1, 6, 1]  # dropped to 6 expected; both phases are over


def test_transaction_bytes():
    """expect_tx and complete_tx in every order; the phase waits for arrivals and bytes."""
    steps = ("complete_tx.relaxed.cta.shared::cta.b64 [bar], 64;", "arrive.expect_tx.shared::cta.b64 _, [bar], 128;",
             "expect_tx.relaxed.cta.shared::cta.b64 [bar], 32;", "arrive.shared::cta.b64 _, [bar];",
             "complete_tx.shared::cta.b64 [bar], 32;", "complete_tx.shared::cta.b64 [bar], 64;")
    look = """mbarrier.test_wait.parity.shared::cta.b64 %p1, [bar], 0; shl.b32 %r0, %r0, 1; selp.u32 %r1, 1, 0, %p1;
        or.b32 %r0, %r0, %r1;"""
    got = lanes("setp.gt.u32 %p0, %t, 0; @%p0 bra END; mbarrier.init.shared::cta.b64 [bar], 2; mov.u32 %r0, 0;" +
                "".join(f"mbarrier.{step} {look}" for step in steps) + "END: mov.u32 %r1, 0;", declare=BAR)
    assert got[0] == 0b000001


def test_arrive_drop_with_expect_tx():
    got = lanes("mov.u32 %r0, 0; setp.gt.u32 %p0, %t, 0; @%p0 bra END;" + """mbarrier.init.shared::cta.b64 [bar], 2;
        mbarrier.arrive_drop.expect_tx.shared::cta.b64 %d0, [bar], 16; mbarrier.arrive.shared::cta.b64 _, [bar];
        mbarrier.complete_tx.shared::cta.b64 [bar], 16; mbarrier.arrive.shared::cta.b64 %d1, [bar];
        mbarrier.pending_count.b64 %r0, %d1; mbarrier.test_wait.shared::cta.b64 %p1, [bar], %d1; @!%p1 trap;
        END: mov.u32 %r1, 0;""", declare=BAR)
    assert got[0] == 1


def test_generic_addresses_of_barriers():
    got = lanes("""mov.u64 %d0, bar; cvta.shared.u64 %d1, %d0; setp.eq.u32 %p31, %t, 0;
        @%p31 mbarrier.init.b64 [%d1], 32; bar.sync 0; mbarrier.arrive.b64 %d2, [%d1];
        W: mbarrier.try_wait.b64 %p0, [%d1], %d2; @!%p0 bra W;
        mbarrier.test_wait.parity.b64 %p1, [%d1], 0; selp.u32 %r0, 1, 0, %p1; bar.sync 0;
        @%p31 mbarrier.inval.b64 [%d1];""", declare=BAR)
    assert got == [1] * 32


def test_the_memory_of_an_invalidated_barrier_is_ordinary_again():
    got = lanes(INIT.format(count=1) + """@%p31 mbarrier.inval.shared::cta.b64 [bar]; bar.sync 0;
        @%p31 st.shared.b64 [bar], 77; bar.sync 0; ld.shared.b32 %r0, [bar];""", declare=BAR)
    assert got == [77] * 32


@pytest.mark.parametrize("order, seed", ORDERS)
def test_a_ring_of_stages_between_two_warps(order, seed):
    """full and empty barriers, two stages, seven tiles; the consumer adds up what the producer wrote."""
    out = words(32)
    run("""setp.eq.u32 %p31, %t, 0; @!%p31 bra READY;
        mbarrier.init.shared::cta.b64 [bar], 32; mbarrier.init.shared::cta.b64 [bar+8], 32;
        mbarrier.init.shared::cta.b64 [bar+16], 32; mbarrier.init.shared::cta.b64 [bar+24], 32;
        READY: bar.sync 0;
        mov.u32 %r1, 0; mov.u32 %r0, 0; mov.u32 %r9, buf; mov.u32 %r10, bar;
        LOOP: and.b32 %r2, %r1, 1; shr.u32 %r3, %r1, 1; and.b32 %r3, %r3, 1;
        mad.lo.u32 %r4, %r2, 8, %r10; mad.lo.u32 %r5, %r2, 128, %r9; mad.lo.u32 %r5, %lane, 4, %r5;
        setp.eq.u32 %p0, %warp, 0; @!%p0 bra CONSUME;
        xor.b32 %r6, %r3, 1;
        E: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4+16], %r6; @!%p1 bra E;
        mad.lo.u32 %r7, %r1, 100, %lane; st.shared.b32 [%r5], %r7; mbarrier.arrive.shared::cta.b64 _, [%r4]; bra NEXT;
        CONSUME: F: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r4], %r3; @!%p1 bra F;
        ld.shared.b32 %r7, [%r5]; mad.lo.u32 %r0, %r0, 3, %r7; mbarrier.arrive.shared::cta.b64 _, [%r4+16];
        NEXT: add.u32 %r1, %r1, 1; setp.lt.u32 %p2, %r1, 7; @%p2 bra LOOP;
        @%p0 ret; mad.wide.u32 %d0, %lane, 4, %a0;
        st.global.b32 [%d0], %r0;""", out, threads=64, order=order, seed=seed,
        declare=".shared .align 8 .b64 bar[4]; .shared .align 4 .b8 buf[256];")

    def expected(lane):
        total = 0
        for i in range(7):
            total = total * 3 + 100 * i + lane
        return total & 0xFFFFFFFF

    assert out.tolist() == [expected(lane) for lane in range(32)]


ONE = "setp.gt.u32 %p0, %t, 0; @%p0 ret; mbarrier.init.shared::cta.b64 [bar], 2;"


@pytest.mark.parametrize("body, kind, match", [
    ("init.shared::cta.b64 [bar2], 0;", "mbarrier", "init count 0; allowed 1..1048575"),
    ("init.shared::cta.b64 [bar2], %r1;", "mbarrier", "init count 1048576"),
    ("init.shared::cta.b64 [bar+4], 1;", "misaligned", "not a multiple of 8"),
    ("init.shared::cta.b64 [16], 1;", "out of bounds", "shared access of 8 bytes at 0x10"),
    ("init.shared::cta.b64 [%r2], 1;", "mbarrier", "another CTA's"),
    ("arrive.shared::cta.b64 _, [bar2];", "mbarrier", "no mbarrier was initialised"),
    ("test_wait.parity.shared::cta.b64 %p1, [bar2], 0;", "mbarrier", "no mbarrier was initialised"),
    ("inval.shared::cta.b64 [bar2];", "mbarrier", "no mbarrier was initialised"),
    ("arrive.shared::cta.b64 _, [bar], 3;", "mbarrier", "3 arrivals at the barrier .* expects 2 more"),
    ("arrive.shared::cta.b64 _, [bar], 0;", "mbarrier", "arrival count 0"),
    ("arrive.noComplete.shared::cta.b64 %d0, [bar], 2;", "mbarrier", "would complete the phase"),
    ("expect_tx.relaxed.cta.shared::cta.b64 [bar], %r1;", "mbarrier", "transaction count 1048576"),
    ("arrive.expect_tx.shared::cta.b64 _, [bar], %r1;", "mbarrier", "transaction count 1048576"),
    ("test_wait.parity.shared::cta.b64 %p1, [bar], 2;", "mbarrier", "phase parity 2"),
    ("arrive.b64 _, [%d1];", "out of bounds", "8 bytes at 0x1000"),
    ("arrive.b64 _, [%d2];", "out of bounds", "not in shared memory"),
])
def test_misuse_of_mbarriers(body, kind, match):
    prepare = """mov.u32 %r1, 1048576; mov.u32 %r2, bar; add.u32 %r2, %r2, 0x1000000; mov.u64 %d1, 4096;
        mov.u64 %d2, 0x300000000000000;"""
    stops(kind, f"{ONE} {prepare}\nmbarrier.{body} // here", match=match, declare=BAR)


def test_an_old_token():
    """Only the present phase and the one before may be waited for."""
    twice = "mbarrier.arrive.shared::cta.b64 _, [bar], 2;" * 2
    stops("mbarrier", f"{ONE} mbarrier.arrive.shared::cta.b64 %d0, [bar], 2; {twice}\n"
          "mbarrier.test_wait.shared::cta.b64 %p1, [bar], %d0; // here", declare=BAR,
          match="a wait for phase 0 of the barrier .* in phase 3")


def test_the_memory_of_a_barrier_is_not_for_data():
    stops("mbarrier", ONE + "\nst.shared.b32 [bar+4], 1; // here", declare=BAR, match="overwrites a live mbarrier")
    stops("mbarrier", ONE + "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], 8;\n"
          "mbarrier.init.shared::cta.b64 [bar], 1; // here", declare=BAR, match="while it is in use")


def test_a_barrier_may_not_be_invalidated_while_a_warp_waits():
    stops("mbarrier", INIT.format(count=1) + "setp.eq.u32 %p0, %warp, 1; @%p0 bra OTHER;" + spin("0") + """ret;
        OTHER: mov.u32 %r1, 0; D: add.u32 %r1, %r1, 1; setp.lt.u32 %p1, %r1, 9; nanosleep.u32 1; @%p1 bra D;
        mbarrier.inval.shared::cta.b64 [bar]; // here""", threads=64, warp=1, match="while a warp waits", declare=BAR)


def test_what_a_cta_leaves_behind_is_said():
    launch = run(INIT.format(count=2) + "@%p31 mbarrier.arrive.shared::cta.b64 _, [bar];", declare=BAR)
    assert re.search("in the middle of a phase .* still missing 1 of 2 arrivals", "\n".join(launch.warnings))
    launch = run(INIT.format(count=2) + "@%p31 mbarrier.init.shared::cta.b64 [bar], 1;", declare=BAR)
    assert re.search("where there is one already", "\n".join(launch.warnings))
    assert run(INIT.format(count=2), declare=BAR).warnings == []
    launch = run("bar.arrive 3, 64;")
    assert re.search("arrivals at barrier 3 that nobody waited for: 32 of 64", "\n".join(launch.warnings))


# --- clusters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("order, seed", ORDERS)
def test_distributed_shared_memory(order, seed):
    """Each CTA reads its neighbour's shared memory, with mapa and with generic addresses, and writes into it."""
    out = words(4 * 64)
    run("""mov.u32 %r9, buf; mad.lo.u32 %r8, %t, 4, %r9; mov.u32 %r7, %cluster_ctarank; mad.lo.u32 %r6, %r7, 1000, %t;
        st.shared.b32 [%r8], %r6; st.shared.b32 [%r8+128], 0; barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        add.u32 %r5, %r7, 1; and.b32 %r5, %r5, 3; mapa.shared::cluster.u32 %r4, %r8, %r5;
        ld.shared::cluster.b32 %r1, [%r4]; getctarank.shared::cluster.u32 %r3, %r4; setp.ne.u32 %p0, %r3, %r5;
        @%p0 trap;
        cvt.u64.u32 %d0, %r8; cvta.shared.u64 %d0, %d0; mapa.u64 %d1, %d0, %r5; st.b32 [%d1+128], %r6;
        getctarank.u64 %r3, %d1; setp.ne.u32 %p0, %r3, %r5; @%p0 trap;
        isspacep.shared::cta %p1, %d1; isspacep.shared::cluster %p2, %d1; isspacep.shared::cta %p3, %d0;
        not.pred %p1, %p1; and.pred %p1, %p1, %p2; and.pred %p1, %p1, %p3; @!%p1 trap;
        barrier.cluster.arrive; barrier.cluster.wait;
        ld.shared.b32 %r2, [%r8+128]; mov.u32 %r10, %ctaid.x; mad.lo.u32 %r10, %r10, 64, %t;
        mad.wide.u32 %d2, %r10, 4, %a0; st.global.b32 [%d2], %r1; st.global.b32 [%d2+128], %r2;
        barrier.cluster.arrive; barrier.cluster.wait;""", out, grid=4, cluster=4, order=order, seed=seed,
        declare=".shared .align 4 .b8 buf[256];")
    got = out.reshape(4, 2, 32).tolist()
    for c in range(4):
        assert got[c] == [[1000 * ((c + 1) % 4) + t for t in range(32)], [1000 * ((c - 1) % 4) + t for t in range(32)]]


def test_lanes_of_one_store_may_reach_different_ctas():
    out = words(4)
    run("""mov.u32 %r9, buf; mov.u32 %r7, %cluster_ctarank; mad.lo.u32 %r8, %r7, 4, %r9;
        setp.gt.u32 %p0, %t, 3; @%p0 bra ON; mapa.shared::cluster.u32 %r4, %r8, %t; mad.lo.u32 %r5, %r7, 10, %t;
        st.shared::cluster.b32 [%r4], %r5; ON: barrier.cluster.arrive; barrier.cluster.wait;
        @%p0 ret; mad.lo.u32 %r4, %t, 4, %r9; ld.shared.b32 %r5, [%r4];
        red.global.add.u32 [%o], %r5;""", out, grid=4, cluster=4, declare=".shared .align 4 .b8 buf[16];")
    assert out.tolist() == [sum(10 * t + c for c in range(4)) for t in range(4)]


@pytest.mark.parametrize("order, seed", ORDERS)
def test_remote_arrivals(order, seed):
    """Every CTA arrives at a barrier of CTA 0, which alone may wait for it."""
    out = words(1)
    run("""mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p31, %t, 0;
        @%p31 mbarrier.init.shared::cta.b64 [bar], 4; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive; barrier.cluster.wait;
        mov.u32 %r1, bar; mov.u32 %r3, 0; mapa.shared::cluster.u32 %r2, %r1, %r3;
        @%p31 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r2];
        setp.ne.u32 %p0, %r7, 0; @%p0 bra END;""" + spin("0") + """st.global.b32 [%a0], 5;
        END: barrier.cluster.arrive;
        barrier.cluster.wait;""", out, grid=4, cluster=4, order=order, seed=seed, declare=BAR)
    assert out[0] == 5


REMOTE = """mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p31, %t, 0; @%p31 mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster; barrier.cluster.arrive; barrier.cluster.wait; xor.b32 %r6, %r7, 1;
    mov.u32 %r1, bar; mapa.shared::cluster.u32 %r2, %r1, %r6; setp.eq.u32 %p0, %r7, 1; @%p0 bra END;\n{}
    END: barrier.cluster.arrive; barrier.cluster.wait;"""


@pytest.mark.parametrize("statement, kind, match", [
    ("mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r2], 0; // here", "mbarrier", "another CTA's barrier"),
    ("mbarrier.arrive.shared::cluster.b64 %d0, [%r2]; // here", "mbarrier", "returns no state"),
    ("ld.shared.b32 %r0, [%r2]; // here", "out of bounds", "not in the window of the executing CTA"),
    ("atom.shared::cta.add.u32 %r0, [%r2], 1; // here", "out of bounds", "not in the window of the executing CTA"),
    ("mov.u32 %r3, 2; mapa.shared::cluster.u32 %r2, %r1, %r3; st.shared::cluster.b32 [%r2], 0; // here",
     "out of bounds", "names CTA rank 2; the cluster has 2|CTA rank"),
])
def test_what_cannot_be_done_to_another_cta(statement, kind, match):
    stops(kind, REMOTE.format(statement), grid=2, cluster=2, declare=BAR, match=match)


def test_an_exited_cta_has_no_shared_memory():
    body = """mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p0, %r7, 1; barrier.cluster.arrive; barrier.cluster.wait;
        @%p0 ret;
        mov.u32 %r1, 0; D: add.u32 %r1, %r1, 1; nanosleep.u32 1; setp.lt.u32 %p1, %r1, 50; @%p1 bra D;
        mov.u32 %r9, buf; mov.u32 %r3, 1; mapa.shared::cluster.u32 %r4, %r9, %r3;
        {} // here"""
    for access in ("ld.shared::cluster.b32 %r0, [%r4];", "st.shared::cluster.b32 [%r4], %t;",
                   "atom.shared::cluster.add.u32 %r0, [%r4], 1;", "mbarrier.arrive.shared::cluster.b64 _, [%r4];"):
        stops("race", body.format("\n" + access), grid=2, cluster=2, declare=".shared .align 8 .b64 buf;",
              match=r"of CTA \(1, 0, 0\), which has exited")


@pytest.mark.parametrize("body, match", [
    ("\nbarrier.cluster.wait; // here", "without barrier.cluster.arrive"),
    ("barrier.cluster.arrive; \nbarrier.cluster.arrive; // here", "arrive twice"),
    ("setp.lt.u32 %p0, %t, 5; @!%p0 bra E; \nbarrier.cluster.arrive.aligned; // here\nE: activemask.b32 %r9;",
"only 5 lanes"), ])
def test_misuse_of_the_cluster_barrier(body, match):
    stops("barrier", body, match=match)


def test_exited_warps_count_for_the_cluster_barrier():
    out = words(2)
    run("""setp.ne.u32 %p0, %warp, 0; @%p0 ret; mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p1, %r7, 1; @%p1 ret;
        barrier.cluster.arrive; barrier.cluster.wait; st.global.b32 [%a0], 3;""", out, threads=96, grid=2, cluster=2)
    assert out.tolist() == [3, 0]


# --- CTAs that wait for each other -------------------------------------------------------------------


@pytest.mark.parametrize("order, seed", ORDERS)
@pytest.mark.parametrize("load", ["ld.global.b32", "ld.acquire.gpu.global.b32", "ld.volatile.global.b32",
                                  "ld.relaxed.gpu.global.b32",
                                  "atom.acquire.gpu.global.or.b32"])
def test_a_flag_that_another_cta_sets(order, seed, load):
    """CTA 0 waits for the last CTA, which is launched later."""
    data, flag, out = words(32), words(1), words(32)
    poll = f"{load} %r1, [%a2]" + (", 0;" if "atom" in load else ";")
    run(f"""mov.u32 %r9, %ctaid.x; mad.wide.u32 %d1, %t, 4, %a1; setp.eq.u32 %p0, %r9, 0; @%p0 bra WAIT;
        setp.ne.u32 %p1, %r9, 5; @%p1 ret; mul.lo.u32 %r2, %t, 7; st.global.b32 [%d1], %r2; bar.sync 0;
        fence.acq_rel.gpu;
        setp.eq.u32 %p2, %t, 0; @%p2 st.release.gpu.global.b32 [%a2], 1; ret;
        WAIT: {poll} setp.eq.u32 %p3, %r1, 0; @%p3 bra WAIT;
        ld.global.b32 %r2, [%d1]; st.global.b32 [%o], %r2;""", out, data, flag, grid=6, order=order, seed=seed)
    assert out.tolist() == [7 * t for t in range(32)]


def test_more_ctas_than_sms_wait_for_each_other():
    """An SM holds several small CTAs."""
    count = words(1)
    run("""setp.ne.u32 %p0, %t, 0; @%p0 ret; red.release.gpu.global.add.u32 [%a0], 1;
        W: ld.acquire.gpu.global.b32 %r1, [%a0]; setp.lt.u32 %p1, %r1, 300; @%p1 bra W;""", count, grid=300)
    assert count[0] == 300


@pytest.mark.parametrize("wait", ["ld.acquire.gpu.global.b32 %r1, [%a1];",
    "ld.global.b32 %r1, [%a1]; nanosleep.u32 20;"])
def test_a_grid_wide_barrier_of_atomics(wait):
    """All CTAs are resident at once and wait for each other three times."""
    out, count = words(24 * 3), words(1)
    run(f"""mov.u32 %r9, %ctaid.x; mov.u32 %r5, 0; setp.eq.u32 %p0, %t, 0;
        LOOP: bar.sync 0; @!%p0 bra JOIN;
        atom.add.release.gpu.global.u32 %r1, [%a1], 1; mad.lo.u32 %r2, %r5, 24, 24;
        WAIT: {wait} setp.lt.u32 %p1, %r1, %r2; @%p1 bra WAIT;
        mad.lo.u32 %r3, %r5, 24, %r9; mad.wide.u32 %d0, %r3, 4, %a0; st.global.b32 [%d0], %r1;
        JOIN: bar.sync 0; add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 3;
        @%p2 bra LOOP;""", out, count, threads=64, grid=24)
    assert all(24 * (i + 1) <= v <= 24 * 3 for i, row in enumerate(out.reshape(3, 24)) for v in row)


def test_a_lock_of_compare_and_swap():
    out, lock = words(1), words(1)
    run("""setp.ne.u32 %p0, %t, 0; @%p0 ret;
        LOCK: atom.acquire.gpu.global.cas.b32 %r1, [%a1], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra LOCK;
        ld.global.b32 %r2, [%a0]; add.u32 %r2, %r2, 1; st.global.b32 [%a0], %r2;
        atom.release.gpu.global.exch.b32 %r3, [%a1], 0;""", out, lock, threads=96, grid=10)
    assert (out[0], lock[0]) == (10, 0)


def test_warps_of_one_cta_poll_shared_memory():
    out = words(1)
    run("""setp.eq.u32 %p31, %t, 0; @%p31 st.shared.b32 [flag], 0; bar.sync 0;
        setp.eq.u32 %p0, %warp, 0; @!%p0 bra SET;
        W: ld.volatile.shared.b32 %r1, [flag]; setp.ne.u32 %p1, %r1, 3; @%p1 bra W; @%p31 st.global.b32 [%a0], 9; ret;
        SET: mov.u32 %r2, 0; D: add.u32 %r2, %r2, 1; st.volatile.shared.b32 [flag], %r2; nanosleep.u32 1;
        setp.lt.u32 %p2, %r2, 3; @%p2 bra D;""", out, threads=64, declare=".shared .b32 flag;")
    assert out[0] == 9


# --- deadlocks -------------------------------------------------------------------------------------


def deadlock(body, *args, **options) -> str:
    """The report of a kernel that must stand still, within seconds."""
    start = time.monotonic()
    error = stops("deadlock", body, *args, warp=None, **options)
    assert time.monotonic() - start < 10
    assert "no warp can go on" in error.message
    return error.message


def test_a_deadlock_report_says_who_waits_for_what():
    report = deadlock(INIT.format(count=3) + """
        setp.eq.u32 %p1, %warp, 1; @%p1 bra ARRIVER; setp.eq.u32 %p2, %warp, 2; @%p2 bra NAMED;""" + spin("0") + """ret;
        ARRIVER: elect.sync %r1|%p3, -1; @%p3 mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 512; ret;
        NAMED: bar.sync 7, 96;""", threads=96, declare=BAR)
    waits = re.search(r"CTA \(0, 0, 0\) warp 0 waits for parity 0 of the mbarrier at shared offset 0x400 of CTA "
                      r"\(0, 0, 0\): "
                      r"phase 0, still missing 2 of 3 arrivals and 512 transaction bytes; arrivals so far: "
                      r"warp 1 x1 at PTX "
                      r"line (\d+): mbarrier.try_wait.parity", report)
    assert waits, report
    named = re.search(r"warp 2 waits at barrier 7: 32 of 96 threads arrived \(warps \[2\]\) at PTX line "
                      r"(\d+): bar.sync 7, 96",
                      report)
    assert named and int(named[1]) > int(waits[1])
    assert "warp 1 " not in report.replace("warp 1 x1", "")


def test_a_deadlock_of_the_cluster_barrier():
    report = deadlock("""mov.u32 %r7, %cluster_ctarank; setp.eq.u32 %p0, %r7, 0; @%p0 bra OTHER;
        barrier.cluster.arrive; barrier.cluster.wait; ret; OTHER: bar.sync 1, 64;""", grid=2, cluster=2)
    assert "CTA (1, 0, 0) warp 0 waits at the cluster barrier: 1 of 2 warps arrived, 1 missing" in report
    assert "CTA (0, 0, 0) warp 0 waits at barrier 1: 32 of 64 threads" in report


def test_a_deadlock_between_ctas():
    """Two CTAs wait for flags that each would set afterwards."""
    flags = words(2)
    report = deadlock("""mov.u32 %r9, %ctaid.x; mad.wide.u32 %d0, %r9, 4, %a0; xor.b32 %r8, %r9, 1;
        mad.wide.u32 %d1, %r8, 4, %a0;
        W: ld.acquire.gpu.global.b32 %r1, [%d1]; setp.eq.u32 %p0, %r1, 0; @%p0 bra W;
        st.release.gpu.global.b32 [%d0], 1;""", flags, grid=2)
    for cta in range(2):
        assert re.search(rf"CTA \({cta}, 0, 0\) warp 0 polls without success near PTX line \d+", report), report


@pytest.mark.parametrize("body", ["L: bra L;", "L: ld.global.b32 %r1, [%a0]; setp.eq.u32 %p0, %r1, 0; @%p0 bra L;"])
def test_a_loop_without_end(body):
    assert "warp 0 polls without success near PTX line" in deadlock(body, words(1))


def test_a_long_loop_is_not_endless():
    assert lanes("mov.u32 %r0, 0; L: add.u32 %r0, %r0, 1; setp.lt.u32 %p0, %r0, 90000; @%p0 bra L;") == [90000] * 32


def test_a_lock_that_nobody_gives_back():
    lock = words(1)
    report = deadlock("""setp.ne.u32 %p0, %t, 0; @%p0 ret;
        L: atom.global.cas.b32 %r1, [%a0], 0, 1; setp.ne.u32 %p1, %r1, 0; @%p1 bra L;""", lock, grid=2)
    assert "CTA (1, 0, 0) warp 0 polls without success" in report


def test_a_wait_in_a_loop_that_also_does_something_else():
    report = deadlock(INIT.format(count=1) + """mov.u32 %r1, 0;
        W: mbarrier.try_wait.parity.shared::cta.b64 %p0, [bar], 0; add.u32 %r1, %r1, 1; @!%p0 bra W;""", declare=BAR)
    assert "polls without success" in report


def test_every_cluster_that_stands_still_is_counted():
    report = deadlock("bar.sync 0, 64;", grid=5)
    assert "… and 3 more clusters" in report


def test_tensor_memory_that_is_never_freed():
    report = deadlock("""tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512; bar.sync 0;
        tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;""", declare=".shared .b32 slot;")
    assert "waits for 512 free columns of tensor memory at PTX line" in report


def test_the_error_is_that_of_the_device_not_of_python():
    with pytest.raises(vgpu.VirtualGpuError) as caught:
        run("bar.sync 0, 64;")
    assert caught.value.kernel == "k" and "in kernel k" in str(caught.value)
    assert np.all([caught.value.line is None, caught.value.kind == "deadlock"])
