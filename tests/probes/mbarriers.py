"""mbarrier objects (PTX ISA 9.7.13.15): phases, parity, states, pending counts, transaction bytes, dropped arrivals.

Each single-thread probe runs a list of steps on one barrier and records what each observing step returns.
"""

from __future__ import annotations

from collections.abc import Callable

from .assembler import Kernel, Recorder
from .model import Buffer, Probe, random_bytes


class Sequence:
    """A thread's steps on the mbarrier at shared address `at`, results recorded in order."""

    def __init__(self, kernel: Kernel, record: Recorder, at: str):
        self.k = kernel
        self.record = record
        self.at = at

    def init(self, count: int) -> None:
        """Expect `count` arrivals a phase."""
        self.k(f"mbarrier.init.shared::cta.b64 [{self.at}], {count};")

    def parity(self, form: str = "test_wait.parity") -> None:
        """Record the wait's verdict for parity 0, then for parity 1."""
        for parity in (0, 1):
            self.record.flag(self.k.pred(f"mbarrier.{form}.shared::cta.b64 $, [{self.at}], {parity};"))

    def done(self, state: str) -> None:
        """Record whether the phase that `state` belongs to is complete."""
        self.record.flag(self.k.pred(f"mbarrier.test_wait.shared::cta.b64 $, [{self.at}], {state};"))

    def arrive(self, form: str = "arrive", operand: str = "") -> str:
        """Arrive, record the pending count of the returned state, return the state."""
        state = self.k.b64(f"mbarrier.{form}.shared::cta.b64 $, [{self.at}]{operand};")
        self.record.word(self.k.b32(f"mbarrier.pending_count.b64 $, {state};"))
        return state

    def transaction(self, form: str, count: int) -> None:
        """expect_tx or complete_tx of `count` bytes."""
        self.k(f"mbarrier.{form}.relaxed.cta.shared::cta.b64 [{self.at}], {count};")


def parity_steps(s: Sequence) -> None:
    """A fresh barrier, three phases of single and counted arrivals."""
    s.init(3)
    s.parity()
    for _ in range(3):
        s.arrive()
        s.parity()
    s.arrive(operand=", 2")
    s.parity()
    s.arrive()
    s.parity()
    s.arrive(operand=", 3")
    s.parity()


def state_steps(s: Sequence) -> None:
    """Waits on the states that arrivals return."""
    s.init(2)
    first = s.arrive()
    s.done(first)
    second = s.arrive()
    s.done(first)
    s.done(second)
    third = s.arrive()
    s.done(second)
    s.done(third)
    s.arrive()
    s.done(third)


def transaction_steps(s: Sequence) -> None:
    """Bytes expected before and after they are completed; bytes alone hold a phase open."""
    s.init(1)
    s.transaction("expect_tx", 64)
    s.arrive()
    s.parity()
    s.transaction("complete_tx", 32)
    s.parity()
    s.transaction("complete_tx", 32)
    s.parity()
    s.transaction("complete_tx", 48)
    s.parity()
    s.arrive("arrive.expect_tx", ", 48")
    s.parity()
    s.arrive("arrive.expect_tx", ", 16")
    s.parity()
    s.transaction("complete_tx", 16)
    s.parity()
    s.arrive("arrive.expect_tx", ", 0")
    s.parity()


def extended_steps(s: Sequence) -> None:
    """More bytes expected while the phase is open; the largest transaction count."""
    s.init(2)
    s.transaction("expect_tx", 1048575)
    s.arrive()
    s.arrive()
    s.parity()
    s.transaction("complete_tx", 1048559)
    s.transaction("expect_tx", 32)
    s.parity()
    s.transaction("complete_tx", 48)
    s.parity()


def drop_steps(s: Sequence) -> None:
    """arrive_drop lowers the count of later phases."""
    s.init(4)
    s.arrive("arrive_drop")
    s.arrive(operand=", 3")
    s.parity()
    s.arrive(operand=", 2")
    s.parity()
    s.arrive("arrive_drop")
    s.parity()
    s.arrive()
    s.arrive()
    s.parity()


def drop_transaction_steps(s: Sequence) -> None:
    """An arrival that drops and expects bytes at once."""
    s.init(2)
    s.arrive("arrive_drop.expect_tx", ", 16")
    s.parity()
    s.arrive()
    s.parity()
    s.transaction("complete_tx", 16)
    s.parity()
    s.arrive()
    s.parity()


def no_complete_steps(s: Sequence) -> None:
    """Arrivals that must not complete the phase."""
    s.init(6)
    s.arrive("arrive.noComplete", ", 2")
    s.arrive("arrive_drop.noComplete", ", 1")
    s.parity()
    s.arrive(operand=", 3")
    s.parity()
    s.arrive(operand=", 5")
    s.parity()


def reuse_steps(s: Sequence) -> None:
    """The place of an invalidated barrier, initialised again in the middle of an odd phase."""
    s.init(1)
    s.arrive()
    s.parity()
    s.k(f"mbarrier.inval.shared::cta.b64 [{s.at}];")
    s.init(2)
    s.parity()
    s.arrive()
    s.parity()
    s.arrive()
    s.parity()


def try_steps(s: Sequence) -> None:
    """try_wait on complete phases at once, on open ones until its time limit; with the suspend-time hint."""
    s.init(1)
    s.parity("try_wait.parity")
    state = s.arrive()
    s.parity("try_wait.parity")
    for hint in ("", ", 64"):
        s.record.flag(s.k.pred(f"mbarrier.try_wait.shared::cta.b64 $, [{s.at}], {state}{hint};"))
        for parity in (0, 1):
            s.record.flag(s.k.pred(f"mbarrier.try_wait.parity.shared::cta.b64 $, [{s.at}], {parity}{hint};"))
    s.parity("test_wait.parity.acquire.cluster")
    s.parity("try_wait.parity.relaxed.cta")


def sequence_probe(name: str, steps: Callable[[Sequence], None]) -> Probe:
    """One thread runs `steps`."""
    k = Kernel("u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    record = Recorder(k, k.pointer(0))
    with k.thread(tid):
        steps(Sequence(k, record, base))
    return Probe(f"mbarrier/{name}", k.text(), (Buffer(b"\xA5" * 4 * (record.count + 2), output=True),),
                 shared_bytes=64)


def bulk_transactions() -> Probe:
    """Three bulk copies complete one phase; both parities before and after."""
    k = Kernel("u64", "u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    record = Recorder(k, k.pointer(0))
    source = k.pointer(1)
    with k.thread(tid):
        k.barrier_init(base, 1)
        s = Sequence(k, record, base)
        s.transaction("expect_tx", 96)
        s.parity()
        for i in range(3):
            k("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
              f"[{base}+{64 + 32 * i}], [{source}+{32 * i}], 32, [{base}];")
        s.parity()
        s.arrive()
        k.wait(base, 0)
        s.parity()
        for i in range(24):
            record.word(k.b32(f"ld.shared.b32 $, [{base}+{64 + 4 * i}];"))
    args = (Buffer(b"\xA5" * 4 * (record.count + 2), output=True), Buffer(random_bytes(96, 31)))
    return Probe("mbarrier/bulk_transactions", k.text(), args, shared_bytes=256)


def ring() -> Probe:
    """A producer warp and three consumer warps pass 11 items through 3 slots with full and empty barriers."""
    slots, items, consumers = 3, 11, 3
    k = Kernel("u64", "u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    out, source = k.pointer(0), k.pointer(1)
    lane = k.b32(f"and.b32 $, {tid}, 31;")
    warp = k.b32(f"shr.u32 $, {tid}, 5;")
    with k.thread(tid):
        for i in range(slots):
            k(f"mbarrier.init.shared::cta.b64 [{base}+{16 * i}], 32;",
              f"mbarrier.init.shared::cta.b64 [{base}+{16 * i + 8}], {consumers};")
    k("bar.sync 0;")
    total, item, slot, phase = (k.b32("mov.b32 $, 0;") for _ in range(4))
    top = k.label()
    k.lines.append(f"{top}:")
    full = k.b32(f"mad.lo.u32 $, {slot}, 16, {base};")
    empty = k.b32(f"add.u32 $, {full}, 8;")
    cell = k.b32(f"mad.lo.u32 $, {slot}, 128, {base};")
    cell = k.b32(f"mad.lo.u32 $, {lane}, 4, {cell};")
    with k.thread(warp):
        k.wait(empty, k.b32(f"xor.b32 $, {phase}, 1;"))
        place = k.b32(f"mad.lo.u32 $, {item}, 32, {lane};")
        value = k.b32(f"ld.global.b32 $, [{k.element(source, place, 4)}];")
        k(f"st.shared.b32 [{cell}+256], {value};", f"mbarrier.arrive.shared::cta.b64 _, [{full}];")
    with k.where(k.pred(f"setp.ne.u32 $, {warp}, 0;")):
        k.wait(full, phase)
        reader = k.b32(f"mad.lo.s32 $, {warp}, -4, {cell};")  # another lane's value, one further for each warp
        first = k.pred(f"setp.lt.u32 $, {lane}, {warp};")
        k(f"@{first} add.u32 {reader}, {reader}, 128;")
        value = k.b32(f"ld.shared.b32 $, [{reader}+256];")
        k(f"mad.lo.u32 {total}, {total}, 5, {value};", "bar.warp.sync 0xffffffff;")
        with k.thread(lane):
            k(f"mbarrier.arrive.shared::cta.b64 _, [{empty}];")
    k(f"add.u32 {slot}, {slot}, 1;")
    wrap = k.pred(f"setp.eq.u32 $, {slot}, {slots};")
    k(f"@{wrap} mov.b32 {slot}, 0;", f"@{wrap} xor.b32 {phase}, {phase}, 1;", f"add.u32 {item}, {item}, 1;")
    more = k.pred(f"setp.lt.u32 $, {item}, {items};")
    k(f"@{more} bra {top};")
    k(f"st.global.b32 [{k.element(out, tid, 4)}], {total};")
    args = (Buffer(bytes(512), output=True), Buffer(random_bytes(items * 128, 32)))
    return Probe("mbarrier/ring", k.text(), args, block=(128, 1, 1), shared_bytes=1024)


def all_lanes() -> Probe:
    """Every thread of two warps arrives in four phases and waits on the state its arrival returned."""
    k = Kernel("u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    out = k.pointer(0)
    with k.thread(tid):
        k(f"mbarrier.init.shared::cta.b64 [{base}], 64;")
    k("bar.sync 0;")
    cell = k.b32(f"mad.lo.u32 $, {tid}, 4, {base};")
    other = k.b32(f"xor.b32 $, {tid}, 37;")
    other = k.b32(f"mad.lo.u32 $, {other}, 4, {base};")
    value = k.b32(f"add.u32 $, {tid}, 1;")
    for phase in range(4):
        k(f"st.shared.b32 [{cell}+{64 + 256 * (phase % 2)}], {value};")
        state = k.b64(f"mbarrier.arrive.shared::cta.b64 $, [{base}];")
        top = k.label()
        k.lines.append(f"{top}:")
        done = k.pred(f"mbarrier.try_wait.shared::cta.b64 $, [{base}], {state};")
        k(f"@!{done} bra {top};")
        seen = k.b32(f"ld.shared.b32 $, [{other}+{64 + 256 * (phase % 2)}];")
        k(f"mad.lo.u32 {value}, {seen}, 3, {value};")
    k(f"st.global.b32 [{k.element(out, tid, 4)}], {value};")
    return Probe("mbarrier/all_lanes", k.text(), (Buffer(bytes(256), output=True),), block=(64, 1, 1), shared_bytes=640)


def probes() -> list[Probe]:
    """All of this module's probes."""
    steps = {"parity": parity_steps, "state": state_steps, "transactions": transaction_steps,
             "extended_transactions": extended_steps, "drop": drop_steps,
             "drop_transaction": drop_transaction_steps, "no_complete": no_complete_steps,
             "reuse": reuse_steps, "try_wait": try_steps}
    return [*(sequence_probe(name, run) for name, run in steps.items()), bulk_transactions(), ring(), all_lanes()]
