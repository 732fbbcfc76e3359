"""Handlers: mbarrier, bar/barrier, barrier.cluster, fences (PTX ISA 9.7.13)."""

from __future__ import annotations

import numpy as np

from .address import SHARED_WINDOW, WINDOW_SHIFT
from .barrier import MBarrier, NamedBarrier
from .collective import members
from .errors import VirtualGpuError
from .isa import Action, Const, Flow, Modifiers, Slot, decodes, operand_count
from .memory import BARRIER, CLEAN, OFFSET_MASK, RANK_SHIFT
from .ptx import SINK, Imm, Instr, Mem

SHARED = ("shared::cta", "shared::cluster", "shared")


# --- mbarrier ----------------------------------------------------------------------------------


def shared_address(address: int, what: str) -> int:
    """A 32-bit shared address from a possibly generic one."""
    window = address >> WINDOW_SHIFT
    if window == SHARED_WINDOW >> WINDOW_SHIFT:
        return address & 0xFFFFFFFF
    if window or address >> 32:
        raise VirtualGpuError("out of bounds", f"{what}: address {address:#x} is not in shared memory")
    return address


def locate(warp, address, what: str):
    """The mbarrier at a shared address (shared::cta, shared::cluster or generic), and its CTA."""
    cta, offset = warp.cta.cluster.resolve(shared_address(address, what), what)
    return cta.mbarrier(offset, what), cta


def own(warp, address, what: str) -> int:
    """The offset of a shared address in the executing CTA; another's is an error."""
    address = shared_address(address, what)
    if address >> RANK_SHIFT != warp.cta.rank:
        raise VirtualGpuError("mbarrier", f"{what} on another CTA's barrier (address {address:#x}); allowed: the own")
    return address & OFFSET_MASK


def signal(warp, bar: MBarrier, cta, who: str) -> None:
    """Note an arrival; warn where an asynchronous unit or another CTA uses a barrier whose init was not fenced."""
    bar.sources[who] += 1
    if not bar.fenced and (cta is not warp.cta or not who.startswith("warp")):
        warp.grid.warn(f"the mbarrier at {bar.offset:#x} is used by {who} before fence.mbarrier_init (or a proxy "
                       "fence) made its initialisation visible")
        bar.fenced = True


def init(warp, address, count) -> None:
    """mbarrier.init"""
    for (_, a), (_, c) in _pairs(warp, address, count):
        offset = own(warp, a, "mbarrier.init")
        cta = warp.cta
        cta.smem.check(offset, 8, 8)
        old = cta.mbarriers.get(offset)
        if old is not None:
            if old.waiters or old.tx:
                raise VirtualGpuError("mbarrier", f"init of the mbarrier at {offset:#x} while it is in use")
            warp.grid.warn(f"init of the mbarrier at {offset:#x}, where there is one already (mbarrier.inval first)")
        cta.conflict(offset, offset + 8, True, "mbarrier.init")
        cta.mbarriers[offset] = MBarrier(offset, c, warp.index)
        if warp.trace is not None:
            warp.note("init", (cta.rank, offset), c)
        cta.smem.state[offset:offset + 8] = BARRIER


def inval(warp, address) -> None:
    """mbarrier.inval"""
    for _, a in _distinct(warp, address):
        offset = own(warp, a, "mbarrier.inval")
        bar = warp.cta.mbarrier(offset, "mbarrier.inval")
        if bar.waiters:
            raise VirtualGpuError("mbarrier", f"inval of the mbarrier at {offset:#x} while a warp waits for it")
        del warp.cta.mbarriers[offset]
        warp.cta.smem.state[offset:offset + 8] = CLEAN
        warp.cta.smem.data[offset:offset + 8] = 0xFF


def _pairs(warp, address, other):
    """[(lane, address), (lane, other)] of the active lanes; one where both are the same in all lanes."""
    if isinstance(address, np.ndarray) or isinstance(other, np.ndarray):
        return _lanes(warp, address, other)
    return [((warp.leader, warp.uniform(address, "address")), (warp.leader, warp.uniform(other, "operand")))]


def _lanes(warp, address, other):
    """[(lane, address), (lane, other)] of all active lanes."""
    return list(zip(warp.per_lane(address), warp.per_lane(other), strict=True))


def _distinct(warp, address):
    if isinstance(address, np.ndarray):
        return warp.per_lane(address)
    return [(warp.leader, warp.uniform(address, "address"))]


def _note_arrivals(warp, pairs, expects: bool, fenced: bool) -> None:
    """Record arrivals for the timing model, those at one barrier together."""
    counts: dict = {}
    for (_, a), (_, value) in pairs:
        bar, cta = locate(warp, a, "mbarrier.arrive")
        total, n = counts.get((cta.rank, bar.offset), (0, 0))
        counts[cta.rank, bar.offset] = total + value, n + 1
    for key, (total, n) in counts.items():
        warp.note(*(("expect", key, total, n) if expects else ("arrive", key, total, fenced)))


def _each(warp, address, other, what: str, keep: bool, step, expects: bool = False,
          fenced: bool = False):
    """step(barrier, operand) for every active lane; the state tokens if `keep`. expects: the operand is bytes."""
    tokens = np.zeros(32, np.uint64)
    token = 0
    pairs = _pairs(warp, address, other) if warp.count == 1 else _lanes(warp, address, other)
    if warp.trace is not None:
        _note_arrivals(warp, pairs, expects, fenced)
    for (lane, a), (_, value) in pairs:
        bar, cta = locate(warp, a, what)
        if keep and cta is not warp.cta:
            raise VirtualGpuError("mbarrier", f"{what} on another CTA's barrier returns no state (use _)", lane=lane)
        signal(warp, bar, cta, f"warp {warp.index}")
        token = tokens[lane] = step(bar, value)
    warp.cta.cluster.progress += 1
    if not keep:
        return None
    return int(token) if warp.count == 1 else tokens


def arrive(warp, address, count, drop, keep, fenced=False):
    """mbarrier.arrive(_drop): each active lane arrives; returns the state token if `keep`."""
    return _each(warp, address, count, "mbarrier.arrive", keep, lambda bar, n: bar.arrive(n, drop),
                 fenced=fenced)


def arrive_expect_tx(warp, address, nbytes, drop, keep, fenced=False):
    """mbarrier.arrive(_drop).expect_tx: expect_tx(bytes), then arrive with count 1."""
    return _each(warp, address, nbytes, "mbarrier.arrive.expect_tx", keep,
                 lambda bar, n: bar.arrive_expect_tx(n, drop), expects=True)


def arrive_no_complete(warp, address, count, drop, keep, fenced=False):
    """mbarrier.arrive(_drop).noComplete: must not complete the phase."""

    def step(bar: MBarrier, n: int) -> int:
        if n >= bar.pending:
            raise VirtualGpuError("mbarrier", f".noComplete with count {n} would complete the phase of the barrier at "
                                  f"{bar.offset:#x}")
        return bar.arrive(n, drop)

    return _each(warp, address, count, "mbarrier.arrive.noComplete", keep, step)


def expect_tx(warp, address, nbytes) -> None:
    """mbarrier.expect_tx"""
    for (_, a), (_, n) in _lanes(warp, address, nbytes):
        bar, cta = locate(warp, a, "mbarrier.expect_tx")
        if warp.trace is not None:
            warp.note("expect", (cta.rank, bar.offset), n, 0)
        bar.expect_tx(n)


def complete_tx(warp, address, nbytes) -> None:
    """mbarrier.complete_tx"""
    for (_, a), (_, n) in _lanes(warp, address, nbytes):
        locate(warp, a, "mbarrier.complete_tx")[0].complete_tx(n)
    warp.cta.cluster.progress += 1


def _passed(warp, address, value: int, parity: bool) -> bool:
    bar = warp.cta.mbarrier(own(warp, address, "mbarrier wait"), "mbarrier wait")
    if not parity:
        return bar.passed_state(value)
    if value > 1:
        raise VirtualGpuError("mbarrier", f"phase parity {value}; allowed 0 and 1")
    return bar.passed(value)


def test(warp, address, value, parity, may_fail):
    """mbarrier.test_wait / try_wait: has the phase completed? try_wait may fail although it has, in random order."""
    if type(address) is not int or type(value) is not int:
        ok = np.zeros(32, np.bool_)
        for (lane, a), (_, v) in _lanes(warp, address, value):
            ok[lane] = _passed(warp, a, v, parity)
        if ok[warp.mask].all():
            warp.synced = warp.cta.cluster.sequence
        return ok
    ok = _passed(warp, address, value, parity)
    if ok:
        if may_fail and warp.grid.order == "random" and warp.grid.rng.random() < 0.25:
            return False
        warp.synced = warp.cta.cluster.sequence
        if warp.trace is not None:
            _note_wait(warp, address, 1)
    return ok


def _note_wait(warp, address, passed: int) -> None:
    """Record a wait for the timing model. passed: 1 where the phase had completed, 0 where it still runs."""
    bar, cta = locate(warp, address, "mbarrier wait")
    warp.note("wait", (cta.rank, bar.offset), bar.phase - passed)


def wait(warp, resume, address, value, parity, may_fail):
    """A spin loop around try_wait: park until the phase has completed."""
    address = warp.uniform(address, "mbarrier address")
    if not parity and type(value) is not int and value is not None:
        value = value >> np.uint64(32) << np.uint64(32)  # tokens of one phase may differ in their pending counts
    value = warp.uniform(value, "mbarrier phase")
    passed = _passed(warp, address, value, parity)
    if warp.trace is not None:
        _note_wait(warp, address, int(passed))
    if passed:
        warp.synced = warp.cta.cluster.sequence
        return resume
    bar = locate(warp, address, "mbarrier wait")[0]
    target = value if parity else value >> 32 & 1
    bar.waiters.append((warp, target))
    return warp.park(resume, "mbarrier", bar, target, warp.cta)


def pending_count(warp, state):
    """mbarrier.pending_count of a state token: 32 bits."""
    return state & 0xFFFFFFFF if type(state) is int else state.astype(np.uint32)


def _width(m: Modifiers) -> int:
    """Bits of an mbarrier's address: without a state space it is generic."""
    return 32 if m.take(*SHARED) else 64


@decodes("mbarrier.init", "mbarrier.inval")
def decode_init(i: Instr) -> Action:
    m = Modifiers(i, 2)
    width = _width(m)
    m.need("b64")
    m.done()
    if i.opcode[1] == "init":
        operand_count(i, 2)
        return Action(init, (), tuple(i.operands), (width, 32))
    operand_count(i, 1)
    return Action(inval, (), tuple(i.operands), (width,))


@decodes("mbarrier.arrive", "mbarrier.arrive_drop")
def decode_arrive(i: Instr) -> Action:
    m = Modifiers(i, 2)
    drop = i.opcode[1] == "arrive_drop"
    with_tx, no_complete = m.take("expect_tx"), m.take("noComplete")
    relaxed = m.take("release", "relaxed") == "relaxed"
    fenced = m.take("cta", "cluster") == "cluster" and not relaxed
    width = _width(m)
    m.need("b64")
    m.done()
    operands = list(i.operands)
    dst = () if isinstance(operands[0], Mem) else (operands.pop(0),)
    if len(operands) > 2 or (len(operands) < 2 and (with_tx or no_complete)):
        raise i.error("unknown instruction", f"{len(i.operands)} operands")
    keep = bool(dst) and dst[0] != SINK
    function = arrive_expect_tx if with_tx else arrive_no_complete if no_complete else arrive
    count = operands[1] if len(operands) > 1 else Imm(1)
    return Action(function, dst if keep else (), (operands[0], count, Const(drop), Const(keep), Const(fenced)),
                  (width, 32, 0, 0, 0))


@decodes("mbarrier.expect_tx", "mbarrier.complete_tx")
def decode_tx(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.drop("relaxed", "cta", "cluster")
    width = _width(m)
    m.need("b64")
    m.done()
    operand_count(i, 2)
    return Action(expect_tx if i.opcode[1] == "expect_tx" else complete_tx, (), tuple(i.operands), (width, 32))


@decodes("mbarrier.test_wait", "mbarrier.try_wait")
def decode_wait(i: Instr) -> Action:
    m = Modifiers(i, 2)
    parity = m.take("parity") is not None
    m.drop("acquire", "relaxed", "cta", "cluster")
    width = _width(m)
    m.need("b64")
    m.done()
    may_fail = i.opcode[1] == "try_wait"
    operand_count(i, *((3, 4) if may_fail else (3,)))
    src = (i.operands[1], i.operands[2], Const(parity), Const(may_fail))
    return Action(test, (i.operands[0],), src, (width, 32 if parity else 64, 0, 0), Flow.POLL, wait)


@decodes("mbarrier.pending_count")
def decode_pending(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("b64")
    m.done()
    operand_count(i, 2)
    return Action(pending_count, (i.operands[0],), (i.operands[1],), (64,))


# --- bar / barrier -----------------------------------------------------------------------------


def _apart(warp, what: str) -> VirtualGpuError:
    """A barrier without .aligned may be reached by the lanes of a warp one after the other; not here."""
    return VirtualGpuError("unsupported", f"{what} by {warp.count} lanes of a warp: it waits for the other lanes, "
                           "which run only after them here")


def _arrive(warp, number, threads, kind: str, aligned: bool) -> NamedBarrier:
    """The warp arrives at a named barrier of its CTA."""
    if aligned:
        warp.require_converged(f"bar.{kind}")
    elif not warp.converged():
        raise _apart(warp, f"barrier.{kind}")
    number = warp.uniform(number, "barrier number")
    if not 0 <= number <= 15:
        raise VirtualGpuError("barrier", f"barrier {number}; allowed 0..15")
    bar = warp.cta.named.get(number)
    if bar is None:
        bar = warp.cta.named[number] = NamedBarrier(number)
    bar.arrive(warp, None if threads is None else warp.uniform(threads, "barrier thread count"), kind)
    if warp.trace is not None:
        warp.note("named", number, bar.threads or 32 * len(warp.cta.warps), kind != "arrive")
    warp.cta.cluster.progress += 1
    return bar


def _is_complete(warp, bar: NamedBarrier) -> bool:
    """Release the barrier if all are there."""
    cta = warp.cta
    if not bar.complete(len(cta.warps) - cta.live):
        return False
    cta.cluster.release(bar)
    return True


def bar_sync(warp, resume, number, threads, aligned):
    """bar.sync / barrier.sync"""
    bar = _arrive(warp, number, threads, "sync", aligned)
    return resume if _is_complete(warp, bar) else warp.park(resume, "named barrier", bar)


def bar_arrive(warp, number, threads, aligned) -> None:
    """bar.arrive / barrier.arrive"""
    _is_complete(warp, _arrive(warp, number, threads, "arrive", aligned))


def bar_red(warp, resume, slot, operation, number, threads, p, aligned):
    """bar.red.{popc,and,or}: `slot` receives the result in the register file when the barrier completes."""
    if p is None:
        raise VirtualGpuError("uninitialised", "the predicate of bar.red was never written")
    bar = _arrive(warp, number, threads, "red", aligned)
    active = np.broadcast_to(np.asarray(p), (32,))[warp.mask]
    bar.votes.append((warp, slot, operation, int(np.count_nonzero(active)), len(active)))
    return resume if _is_complete(warp, bar) else warp.park(resume, "named barrier", bar)


@decodes("bar", "barrier")
def decode_bar(i: Instr) -> Action:
    m = Modifiers(i, 1)
    m.take("cta")
    aligned = m.take("aligned") is not None or i.opcode[0] == "bar"
    kind = m.need("sync", "arrive", "red")
    if kind == "red":
        return _decode_red(i, m, aligned)
    m.done()
    operand_count(i, *((1, 2) if kind == "sync" else (2,)))
    threads = i.operands[1] if len(i.operands) > 1 else Const(None)
    src = (i.operands[0], threads, Const(aligned))
    if kind == "sync":
        return Action(bar_sync, (), src, (32, 32, 0), Flow.BLOCK)
    return Action(bar_arrive, (), src, (32, 32, 0))


def _decode_red(i: Instr, m: Modifiers, aligned: bool) -> Action:
    operation = m.need("popc", "and", "or")
    m.need("u32" if operation == "popc" else "pred")
    m.done()
    operand_count(i, 3, 4)
    dst, number, *rest = i.operands
    threads = rest[0] if len(rest) == 2 else Const(None)
    return Action(bar_red, (dst,), (Slot(dst), Const(operation), number, threads, rest[-1], Const(aligned)),
                  (32, 0, 32, 32, 1, 0), Flow.BLOCK)


def warp_sync(warp, mask) -> None:
    """bar.warp.sync: the lanes run in lock-step; those the mask names must be here."""
    members(warp, mask, "bar.warp.sync")


@decodes("bar.warp.sync")
def decode_warp_sync(i: Instr) -> Action:
    Modifiers(i, 3).done()
    operand_count(i, 1)
    return Action(warp_sync, (), (i.operands[0],), (32,))


# --- cluster barrier, fences ---------------------------------------------------------------------


def cluster_arrive(warp, aligned, relaxed) -> None:
    """barrier.cluster.arrive"""
    _all_of_warp(warp, aligned, "barrier.cluster.arrive")
    warp.cta.cluster.progress += 1
    if not relaxed:
        fence_mbarrier_init(warp)
    warp.cta.cluster.barrier.arrive(warp)
    if warp.trace is not None:
        warp.note("cluster", False, not relaxed)


def _all_of_warp(warp, aligned: bool, what: str) -> None:
    if aligned:
        warp.require_converged(what)
    elif not warp.converged():
        raise _apart(warp, what)


def cluster_wait(warp, resume, aligned):
    """barrier.cluster.wait"""
    _all_of_warp(warp, aligned, "barrier.cluster.wait")
    bar, phase = warp.cta.cluster.barrier, warp.cluster_phase
    if phase is None:
        raise VirtualGpuError("barrier", "barrier.cluster.wait without barrier.cluster.arrive before")
    warp.cluster_phase = None
    if warp.trace is not None:
        warp.note("cluster", True)
    if bar.phase > phase:
        warp.synced = warp.cta.cluster.sequence
        return resume
    bar.waiters.append(warp)
    return warp.park(resume, "cluster barrier", bar)


@decodes("barrier.cluster")
def decode_cluster(i: Instr) -> Action:
    m = Modifiers(i, 2)
    kind = m.need("arrive", "wait")
    relaxed = kind == "arrive" and m.take("relaxed") is not None
    m.take("release" if kind == "arrive" else "acquire")
    aligned = m.take("aligned") is not None
    m.done()
    operand_count(i, 0)
    if kind == "arrive":
        return Action(cluster_arrive, (), (Const(aligned), Const(relaxed)))
    return Action(cluster_wait, (), (Const(aligned),), (), Flow.BLOCK)


def fence_none(warp) -> None:
    """A fence whose effect the virtual GPU's in-order memory already has."""


def fence_mbarrier_init(warp) -> None:
    """fence.mbarrier_init: this warp's initialisations are visible to the cluster and the asynchronous proxy."""
    for bar in warp.cta.mbarriers.values():
        if bar.init_warp == warp.index:
            bar.fenced = True


def fence_proxy_async(warp) -> None:
    """fence.proxy.async: ordinary stores before it are visible to the asynchronous units."""
    own_cta = warp.cta
    for cta in own_cta.cluster.ctas:
        writer = warp.index if cta is own_cta else (own_cta.rank, warp.index)
        cta.smem.proxy_fence(writer, warp.synced)
    fence_mbarrier_init(warp)


@decodes("fence", "membar")
def decode_fence(i: Instr) -> Action:
    m = Modifiers(i, 1)
    if m.take("mbarrier_init"):
        m.need("release")
        m.need("cluster")
        m.done()
        return Action(fence_mbarrier_init)
    if m.take("proxy"):
        return _decode_proxy(i, m)
    if i.opcode[0] == "membar":
        m.need("cta", "gl", "sys")
    else:
        m.take("sc", "acq_rel", "acquire", "release")
        m.drop("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        m.need("cta", "cluster", "gpu", "sys")
    m.done()
    operand_count(i, 0)
    return Action(fence_none)


def _decode_proxy(i: Instr, m: Modifiers) -> Action:
    kind = m.need("alias", "async", "async::generic", "tensormap::generic")
    space = m.take("global", "shared::cta", "shared::cluster") if kind == "async" else None
    if kind.endswith("::generic"):
        m.need("acquire", "release")
        m.drop("sync_restrict::shared::cta", "sync_restrict::shared::cluster")
        m.need("cta", "cluster", "gpu", "sys")
    m.done()
    if kind == "async" and space != "global":
        return Action(fence_proxy_async)
    return Action(fence_none)
