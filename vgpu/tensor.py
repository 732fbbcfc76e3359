"""Handlers of tcgen05: allocation, loads and stores, copies, MMA, commit (PTX ISA 9.7.16).

MMA, cp, shift and commit of a CTA (of a pair, for cta_group::2) enter one queue and leave it in order, as in the
hardware's issue queue; what they compute is in `mma.py` and `tmem_copy.py`.
"""

from __future__ import annotations

import numpy as np

from . import mma, tmem_copy
from .descriptor import scale_vector
from .errors import VirtualGpuError
from .isa import Action, Const, Flow, Modifiers, decodes
from .machine import Op
from .ptx import Instr, Mem, Vec
from .sync import signal
from .tmem import COLUMNS

MAX_REGISTERS = 128


def group_of(m: Modifiers) -> int:
    """The number after .cta_group::"""
    return int(m.need("cta_group::1", "cta_group::2")[-1])


def queue_of(warp, group: int) -> int:
    """CTA rank whose tensor queue the instruction enters."""
    rank = warp.cta.rank
    used = warp.grid.__dict__.setdefault("cta_group", group)
    if used != group:
        raise VirtualGpuError("tensor memory", f".cta_group::{group} in a kernel that uses .cta_group::{used}; all "
                              "tcgen05 instructions of a kernel must agree")
    if group == 2 and warp.cta.cluster.size % 2:
        raise VirtualGpuError("tensor memory", f".cta_group::2 in a cluster of {warp.cta.cluster.size} CTAs")
    return rank & ~1 if group == 2 else rank


def group_ctas(warp, group: int) -> list:
    """The CTA, or both CTAs of its pair, even rank first."""
    if group == 1:
        return [warp.cta]
    even = warp.cta.rank & ~1
    return warp.cta.cluster.ctas[even:even + 2]


# --- allocation --------------------------------------------------------------------------------


def alloc(warp, resume, dst, columns, group):
    """tcgen05.alloc: first fit; waits while not enough columns are free."""
    warp.require_converged("tcgen05.alloc")
    queue_of(warp, group)
    n = warp.uniform(columns, "number of columns")
    cta = warp.cta
    if warp.trace is not None:
        warp.note("alloc")
    if n not in (32, 64, 128, 256, 512):
        raise VirtualGpuError("tensor memory", f"alloc of {n} columns; allowed: 32, 64, 128, 256, 512")
    if not cta.alloc_permit:
        raise VirtualGpuError("tensor memory", "alloc after relinquish_alloc_permit")
    if n > cta.last_alloc:
        raise VirtualGpuError("tensor memory", f"alloc of {n} columns after one of {cta.last_alloc}: the number may "
                              "not increase")
    target = warp.uniform(dst, "alloc destination") & 0xFFFFFFFF
    if _grant(warp, n, group, target):
        return resume
    cta.alloc_waiters.append((warp, n, group, target))
    return warp.park(resume, f"{n} free columns of tensor memory")


def _grant(warp, n: int, group: int, dst: int) -> bool:
    """Allocate n columns and write their address to shared memory, if there is room."""
    cta = warp.cta
    start = _first_fit(cta.tmem.owner, n)
    if start is None:
        return False
    cta.last_alloc = n
    cta.allocations[start] = (n, group)
    cta.freed.clear()
    cta.tmem.owner[start:start + n] = start
    cta.tmem.written[:, start:start + n] = False
    target, offset = cta.cluster.resolve(dst, "tcgen05.alloc")
    target.smem.check(offset, 4, 4)
    where = slice(offset, offset + 4)
    target.smem.mark_generic(where, warp.index, cta.cluster.next_sequence())
    target.smem.data[where] = np.frombuffer(start.to_bytes(4, "little"), np.uint8)
    cta.cluster.progress += 1
    return True


def _first_fit(owner, n: int) -> int | None:
    for start in range(0, COLUMNS - n + 1, n):
        if (owner[start:start + n] == -1).all():
            return start
    return None


def dealloc(warp, address, columns, group) -> None:
    """tcgen05.dealloc"""
    warp.require_converged("tcgen05.dealloc")
    queue_of(warp, group)
    start = warp.uniform(address, "tensor memory address")
    n = warp.uniform(columns, "number of columns")
    cta = warp.cta
    if cta.freed.get(start) == (n, group):  # PTX ISA 9.7.16.7 forbids it, shipped kernels do it
        warp.grid.warn(f"tcgen05.dealloc of {n} columns at {start:#x}, which are freed already")
        return
    if cta.allocations.get(start) != (n, group):
        raise VirtualGpuError("tensor memory", f"dealloc of {n} columns at {start:#x}; allocated: "
                              f"{ {s: c for s, (c, _) in cta.allocations.items()} }")
    for queue in cta.cluster.tensor.values():
        for op in queue:
            if any(c is cta and low < start + n and start < high for c, low, high, _ in op.columns):
                raise VirtualGpuError("race", f"dealloc while an operation on these columns is in flight: "
                                      f"{op.describe()}")
    for w in cta.warps:
        for load in w.unwaited_loads:
            if load.low < start + n and start < load.high:
                warp.grid.warn("tensor memory is freed while a tcgen05.ld has not been waited for (tcgen05.wait::ld): "
                               f"warp {w.index}, {load.describe()}")
                break
    cta.freed[start] = cta.allocations.pop(start)
    cta.tmem.owner[start:start + n] = -1
    waiters, cta.alloc_waiters = cta.alloc_waiters, []
    for waiter in waiters:
        if _grant(*waiter):
            waiter[0].wake()
        else:
            cta.alloc_waiters.append(waiter)


def relinquish(warp) -> None:
    """tcgen05.relinquish_alloc_permit"""
    warp.cta.alloc_permit = False


@decodes("tcgen05.alloc")
def decode_alloc(i: Instr) -> Action:
    m = Modifiers(i, 2)
    group = group_of(m)
    m.need("sync")
    m.need("aligned")
    m.take("shared::cta")
    m.need("b32")
    m.done()
    return Action(alloc, (), (i.operands[0], i.operands[1], Const(group)), (32, 32, 0), Flow.BLOCK)


@decodes("tcgen05.dealloc", "tcgen05.relinquish_alloc_permit")
def decode_dealloc(i: Instr) -> Action:
    m = Modifiers(i, 2)
    group = group_of(m)
    m.need("sync")
    m.need("aligned")
    m.take("b32")
    m.done()
    if i.opcode[1] == "relinquish_alloc_permit":
        return Action(relinquish)
    return Action(dealloc, (), (i.operands[0], i.operands[1], Const(group)), (32, 32, 0))


# --- ld, st -------------------------------------------------------------------------------------


def cells(shape: str, repeat: int, split: int) -> tuple[np.ndarray, np.ndarray]:
    """(lane[32, registers], column[32, registers]) relative to the address, by PTX ISA 9.7.16.2.3."""
    t = np.arange(32)[:, None]
    per = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    r = np.arange(per * repeat)[None, :]
    if shape == "32x32b":
        lane, column = t + 0 * r, r + 0 * t
    elif shape == "16x64b":
        lane, column = (t & 1) * 8 + (t >> 2) + 0 * r, ((t >> 1) & 1) + 2 * r
    elif shape == "16x128b":
        lane, column = (t >> 2) + 8 * (r & 1), (t & 3) + 4 * (r >> 1)
    elif shape == "16x256b":
        lane, column = (t >> 2) + 8 * ((r >> 1) & 1), 2 * (t & 3) + (r & 1) + 8 * (r >> 2)
    else:
        lane, column = t % 16 + 0 * r, r + (t >= 16) * split
    return lane, column


class Load:
    """A tcgen05.ld in flight: it reads tensor memory when it is waited for, or when a register is needed earlier."""

    __slots__ = ("warp", "tmem", "lane", "column", "low", "high", "packed", "instr", "done")

    def __init__(self, warp, tmem, lane, column, packed):
        self.warp, self.tmem, self.lane, self.column, self.packed = warp, tmem, lane, column, packed
        self.low, self.high = int(column.min()), int(column.max()) + 1
        from .warp import generated_line

        self.instr = generated_line(warp.program)
        self.done = False

    def describe(self) -> str:
        """The instruction, with its line."""
        return f"PTX line {self.instr.line}" if self.instr else "an earlier instruction"

    def read(self):
        """The registers' values: called at wait::ld, before a register is used, or at the end of the basic block."""
        self.done = True
        if not self.tmem.written[self.lane, self.column].all():
            bad = np.argwhere(~self.tmem.written[self.lane, self.column])[0]
            raise VirtualGpuError("uninitialised", f"tcgen05.ld reads tensor memory lane "
                                  f"{int(self.lane[tuple(bad)])}, column {int(self.column[tuple(bad)])}, which was "
                                  "never written", lane=int(bad[0]))
        values = self.tmem.cells[self.lane, self.column].T
        if self.packed:
            low, high = values[0::2] & 0xFFFF, values[1::2] << 16
            values = low | high
        values = np.ascontiguousarray(values)
        return values[0] if len(values) == 1 else tuple(values)


def _place(warp, address, shape, repeat, split, packed, what):
    """(tmem, lanes, columns) that a ld or st touches, checked."""
    warp.require_converged(what)
    taddr = warp.uniform(address, "tensor memory address")
    quadrant = 32 * (warp.index % 4)
    start_lane, start = taddr >> 16 & 0x7F, taddr & 0xFFFF
    lane_in = start_lane % 32
    if shape != "32x32b" and lane_in not in (0, 16):
        raise VirtualGpuError("tensor memory", f"lane {start_lane} of the address; {shape} starts at a multiple of 16")
    if shape == "32x32b" and lane_in:
        raise VirtualGpuError("tensor memory", f"lane {start_lane} of the address; 32x32b starts at a multiple of 32")
    if start_lane >= 32 and start_lane // 32 * 32 != quadrant:
        raise VirtualGpuError("tensor memory", f"warp {warp.index} may access lanes {quadrant}..{quadrant + 31} only; "
                              f"the address names lane {start_lane}")
    lane, column = cells(shape, repeat * (2 if packed else 1), split)
    lane, column = lane + lane_in + quadrant, column + start
    if column.max() >= COLUMNS:
        raise VirtualGpuError("tensor memory", f"column {int(column.max())}; tensor memory has {COLUMNS}")
    tmem = warp.cta.tmem
    if (tmem.owner[column.min():column.max() + 1] == -1).any():
        raise VirtualGpuError("tensor memory", f"columns {int(column.min())}..{int(column.max())} are not all "
                              "allocated")
    return tmem, lane, column


def _check_queue(warp, low: int, high: int, what: str, writes: bool) -> None:
    """Raise where a tensor core operation in flight touches these columns."""
    for queue in warp.cta.cluster.tensor.values():
        for op in queue:
            for cta, lo, hi, w in op.columns:
                if cta is warp.cta and lo < high and low < hi and (w or writes):
                    raise VirtualGpuError("race", f"{what} on tensor memory columns {low}..{high - 1}, which an "
                                          f"operation in flight still {'writes' if w else 'reads'}: {op.describe()}")


def load(warp, address, shape, repeat, split, packed):
    """tcgen05.ld"""
    tmem, lane, column = _place(warp, address, shape, repeat, split, packed, "tcgen05.ld")
    warp.units.add("tcgen05.ld")
    out = Load(warp, tmem, lane, column, packed)
    _check_queue(warp, out.low, out.high, "tcgen05.ld", False)
    if not warp.unwaited_loads:
        warp.cta.cluster.unwaited += 1
    warp.unwaited_loads.append(out)
    c = warp.grid.counters
    c["tcgen05_ld"] += 1
    c["tcgen05_ld_bytes"] += 4 * column.size
    if warp.trace is not None:
        warp.note("tld", 4 * column.size)
    return out


def store(warp, address, values, shape, repeat, split, unpacked) -> None:
    """tcgen05.st: written here; wait::st orders it before what follows.

    A register that was never written makes its cell unwritten: kernels store such values, for which a compiler has no
    definition, where nobody reads them.
    """
    tmem, lane, column = _place(warp, address, shape, repeat, split, unpacked, "tcgen05.st")
    _check_queue(warp, int(column.min()), int(column.max()) + 1, "tcgen05.st", True)
    defined = np.array([v is not None for v in values])
    rows = np.stack([np.broadcast_to(np.asarray(0xFFFFFFFF if v is None else v, np.uint32), (32,)) for v in values])
    if unpacked:
        rows, defined = np.stack([rows & 0xFFFF, rows >> 16], 1).reshape(-1, 32), np.repeat(defined, 2)
    tmem.cells[lane, column] = rows.T
    tmem.written[lane, column] = defined
    warp.grid.counters["tcgen05_st"] += 1


def wait_loads(warp) -> None:
    """tcgen05.wait::ld"""
    if warp.unwaited_loads:
        warp.unwaited_loads.clear()
        warp.cta.cluster.unwaited -= 1
    if warp.trace is not None:
        warp.note("use")


def wait_stores(warp) -> None:
    """tcgen05.wait::st: stores are done when issued here."""


@decodes("tcgen05.ld", "tcgen05.st")
def decode_ld(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("sync")
    m.need("aligned")
    shape = m.need("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    repeat = int(m.need(*(f"x{1 << k}" for k in range(8)))[1:])
    packed = m.take("pack::16b", "unpack::16b") is not None
    m.need("b32")
    m.done()
    is_load = i.opcode[1] == "ld"
    operands = list(i.operands)
    vector = operands.pop(0) if is_load else operands.pop()
    registers = vector.items if isinstance(vector, Vec) else (vector,)
    expected = repeat * {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}[shape]
    if len(registers) != expected or expected > MAX_REGISTERS:
        raise i.error("unknown instruction", f"{len(registers)} registers; .{shape}.x{repeat} has {expected}, at most "
                      f"{MAX_REGISTERS}")
    split = operands[1].value if len(operands) > 1 else 0
    extra = (Const(shape), Const(repeat), Const(split), Const(packed))
    if is_load:
        return Action(load, registers, (operands[0], *extra), (32, 0, 0, 0, 0), Flow.DEFER, loads=True)
    return Action(store, (), (operands[0], Vec(tuple(registers)), *extra), (32, 32, 0, 0, 0, 0))


@decodes("tcgen05.wait::ld", "tcgen05.wait::st")
def decode_wait(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("sync")
    m.need("aligned")
    m.done()
    if i.opcode[1] == "wait::ld":
        return Action(wait_loads, flow=Flow.COLLECT)
    return Action(wait_stores)


def fence(warp) -> None:
    """tcgen05.fence: orders; the queue's order and the barriers already do here."""


@decodes("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def decode_fence(i: Instr) -> Action:
    return Action(fence)


# --- MMA -----------------------------------------------------------------------------------------


class Batch:
    """Payload of an MMA in the queue: the operation, and after batching those that run together with it."""

    __slots__ = ("op", "batch", "key")

    def __init__(self, op):
        self.op, self.batch = op, [self]
        self.key = (op.kind, op.cta_group, op.d_tmem, op.rank)

    def batches_with(self, other: Batch) -> bool:
        """True if this one may run in one call with an earlier one: same accumulator, and it accumulates."""
        return self.key == other.key and self.op.accumulate


class CopyBatch:
    """Payload of a tcgen05.cp in the queue, as `Batch`."""

    __slots__ = ("op", "batch", "key")

    def __init__(self, op):
        self.op, self.batch = op, [self]
        self.key = (op.shape, op.multicast, op.src_format, op.cta_group, op.rank)

    def batches_with(self, other: CopyBatch) -> bool:
        """True if both may run in one call."""
        return self.key == other.key


class Prepared:
    """What the queue needs to know of an MMA or copy; kept by the cluster, since a pipeline repeats its operands.

    spans: shared memory read, as Op.spans; columns: tensor memory, [(cta, low, high, writes)].
    """

    __slots__ = ("op", "queue", "ctas", "spans", "columns", "cycles", "flops")

    def __init__(self, cluster, op, queue: int, ctas: list, reads, ranges, cycles: float = 0.0, flops: int = 0):
        self.op, self.queue, self.ctas, self.cycles, self.flops = op, queue, ctas, cycles, flops
        self.spans = [(cluster.ctas[rank], read.lo, read.hi, False) for rank, part in reads.items() for read in part]
        self.columns = [(c, low, high, writes) for c in ctas
                        for writes, part in ((False, ranges.reads), (True, ranges.writes)) for low, high in part]


def multiply(warp, d, a, b, idesc, scale_a, scale_b, accumulate, settings, disable) -> None:
    """tcgen05.mma, dense and block-scaled; a is a descriptor or a tensor memory address."""
    key = (warp.cta.rank, d, a, b, idesc, scale_a, scale_b, accumulate, settings, disable)
    cache = warp.cta.cluster.prepared
    try:
        prepared = cache.get(key)
    except TypeError:  # an operand differs between lanes, or is held as an array
        prepared = _prepare_mma(warp, *key[1:])
    else:
        if prepared is None:
            prepared = cache[key] = _prepare_mma(warp, *key[1:])
    for _ in range(warp.count):
        _issue_mma(warp, prepared)


def _prepare_mma(warp, d, a, b, idesc, scale_a, scale_b, accumulate, settings, disable) -> Prepared:
    warp.units.add("MMA")
    kind, group, scale_vec, a_in_tmem, scale_d = settings
    queue, ctas, u = queue_of(warp, group), group_ctas(warp, group), warp.uniform
    op = mma.MmaOp(
        kind=kind, cta_group=group, scale_vec=scale_vec,
        a_desc=None if a_in_tmem else u(a, "A descriptor"), a_tmem=u(a, "A address") if a_in_tmem else None,
        b_desc=u(b, "B descriptor"), idesc=u(idesc, "instruction descriptor"), d_tmem=u(d, "D address"),
        sfa_tmem=None if scale_a is None else u(scale_a, "scale A address"),
        sfb_tmem=None if scale_b is None else u(scale_b, "scale B address"),
        accumulate=bool(u(accumulate, "enable-input-d")),
        disable_output_lane=None if disable is None else tuple(u(x, "disable-output-lane") for x in disable),
        scale_input_d=scale_d, rank=warp.cta.rank)
    return Prepared(warp.cta.cluster, op, queue, ctas, mma.read_ranges(op), mma.tmem_ranges(op), mma.cycles(op),
                    mma.flops(op))


def _issue_mma(warp, prepared: Prepared) -> None:
    payload, ctas, grid = Batch(prepared.op), prepared.ctas, warp.grid

    def run() -> None:
        mma.execute([p.op for p in payload.batch], [c.smem for c in ctas], [c.tmem for c in ctas], grid.exact)

    c = grid.counters
    c["mma_instructions"] += 1
    c["mma_cycles"] += prepared.cycles
    c["mma_flops"] += prepared.flops
    if warp.trace is not None:
        warp.note("mma", prepared.queue, prepared.cycles)
    _issue(warp, "mma", run, prepared, payload)


def _issue(warp, kind: str, run, prepared: Prepared, payload=None) -> None:
    """Check an operation of the tensor core and put it in its queue."""
    cluster = warp.cta.cluster
    if cluster.unwaited:
        _check_loads(prepared.columns)
    for cta, low, high, _ in prepared.spans:
        if cta.smem.dirty:
            cta.smem.require_fenced(slice(low, high), f"tcgen05.{kind}")
    cluster.issue(Op(kind, run, warp, prepared.spans, payload, prepared.columns), prepared.queue)


def _check_loads(columns) -> None:
    """An MMA that writes columns a tcgen05.ld has not been waited for."""
    for cta, low, high, writes in columns:
        if not writes:
            continue
        for w in cta.warps:
            for ld in w.unwaited_loads:
                if ld.low < high and low < ld.high:
                    text = (f"an MMA overwrites tensor memory columns {low}..{high - 1}, which warp {w.index} loads "
                            f"with no tcgen05.wait::ld since: {ld.describe()}")
                    if ld.done:
                        cta.cluster.grid.warn(text)
                    else:
                        raise VirtualGpuError("race", text)


BLOCK_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")
DENSE_KINDS = ("f16", "tf32", "f8f6f4", "i8")


@decodes("tcgen05.mma")
def decode_mma(i: Instr) -> Action:
    m = Modifiers(i, 2)
    if m.take("sp", "ws"):
        raise i.error("unsupported", "sparse and weight-stationary MMA are not modelled")
    group = group_of(m)
    kind = m.need(*(f"kind::{k}" for k in BLOCK_KINDS + DENSE_KINDS)).removeprefix("kind::")
    scaled = m.take("block_scale") is not None
    qualifier = m.take("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
    m.rest = [x for x in m.rest if not x.startswith("collector::")]
    if m.take("ashift"):
        raise i.error("unsupported", ".ashift (rows of A in tensor memory shifted by one) is not modelled")
    m.done()
    if scaled != (kind in BLOCK_KINDS):
        raise i.error("unknown instruction", f".kind::{kind} {'with' if scaled else 'without'} .block_scale")
    scale_vec = scale_vector(kind, qualifier)
    return _mma_action(i, kind, group, scaled, scale_vec)


def _mma_action(i: Instr, kind, group, scaled, scale_vec) -> Action:
    d, a, b, idesc, *rest = i.operands
    a_in_tmem = isinstance(a, Mem)
    scale_a = scale_b = Const(None)
    disable, scale_d = Const(None), None
    if scaled:
        scale_a, scale_b, accumulate = rest
    else:
        if rest and isinstance(rest[0], Vec):
            disable = rest.pop(0)
        accumulate = rest[0]
        scale_d = rest[1].value if len(rest) > 1 else None
    settings = Const((kind, group, scale_vec, a_in_tmem, scale_d))
    src = (d, a, b, idesc, scale_a, scale_b, accumulate, settings, disable)
    return Action(multiply, (), src, (32, 32 if a_in_tmem else 64, 64, 32, 32, 32, 1, 0, 32))


# --- cp, shift, commit ---------------------------------------------------------------------------


def copy(warp, address, desc, shape, multicast, source, group) -> None:
    """tcgen05.cp shared -> tensor memory; cta_group::2: in both CTAs, from the same offset of each."""
    key = (warp.cta.rank, address, desc, shape, multicast, source, group)
    cache = warp.cta.cluster.prepared
    try:
        prepared = cache.get(key)
    except TypeError:
        prepared = _prepare_copy(warp, *key[1:])
    else:
        if prepared is None:
            prepared = cache[key] = _prepare_copy(warp, *key[1:])
    payload, ctas = CopyBatch(prepared.op), prepared.ctas

    def run() -> None:
        tmem_copy.execute_copies([p.op for p in payload.batch], [c.smem for c in ctas], [c.tmem for c in ctas])

    warp.grid.counters["tcgen05_cp"] += 1
    if warp.trace is not None:
        warp.note("cp", prepared.queue)
    _issue(warp, "cp", run, prepared, payload)


def _prepare_copy(warp, address, desc, shape, multicast, source, group) -> Prepared:
    warp.units.add("MMA")
    op = tmem_copy.CopyOp(shape=shape, taddr=warp.uniform(address, "tensor memory address"),
                          s_desc=warp.uniform(desc, "descriptor"), multicast=multicast, src_format=source,
                          cta_group=group, rank=warp.cta.rank)
    return Prepared(warp.cta.cluster, op, queue_of(warp, group), group_ctas(warp, group),
                    tmem_copy.copy_read_ranges(op), tmem_copy.copy_tmem_ranges(op))


@decodes("tcgen05.cp")
def decode_cp(i: Instr) -> Action:
    m = Modifiers(i, 2)
    group = group_of(m)
    shape = m.need("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = m.take("warpx2::02_13", "warpx2::01_23", "warpx4")
    source = m.take("b8x16.b6x16_p32", "b8x16.b4x16_p64")
    if m.take("b8x16"):
        source = m.need("b6x16_p32", "b4x16_p64")
    m.done()
    src = (i.operands[0], i.operands[1], Const(shape), Const(multicast), Const(source), Const(group))
    return Action(copy, (), src, (32, 64, 0, 0, 0, 0))


def shift(warp, address, group) -> None:
    """tcgen05.shift.down"""
    taddr = warp.uniform(address, "tensor memory address")
    ctas = group_ctas(warp, group)

    def run() -> None:
        tmem_copy.execute_shift(taddr, [c.tmem for c in ctas])

    prepared = Prepared(warp.cta.cluster, None, queue_of(warp, group), ctas, {}, tmem_copy.shift_tmem_ranges(taddr))
    _issue(warp, "shift", run, prepared)


@decodes("tcgen05.shift")
def decode_shift(i: Instr) -> Action:
    m = Modifiers(i, 2)
    group = group_of(m)
    m.need("down")
    m.done()
    return Action(shift, (), (i.operands[0], Const(group)), (32, 0))


def commit(warp, mbar, mask, group) -> None:
    """tcgen05.commit: one arrival when all earlier MMA, cp and shift of this thread are done."""
    queue = queue_of(warp, group)
    cluster = warp.cta.cluster
    address = warp.uniform(mbar, "mbarrier address")
    address = address & 0xFFFFFFFF if address >> 56 else address
    if mask is None:
        ranks = [address >> 24]
    else:
        bits = warp.uniform(mask, "CTA mask")
        ranks = [r for r in range(16) if bits >> r & 1]
    targets = [cluster.resolve(r << 24, "tcgen05.commit")[0] for r in ranks]
    bars = [(c.mbarrier(address & 0xFFFFFF, "tcgen05.commit"), c) for c in targets]

    def run() -> None:
        for bar, c in bars:
            if c.exited and c is warp.cta:  # nobody waits for it; shipped kernels leave their last one like that
                warp.grid.warn("a CTA exits while a tcgen05.commit to one of its own mbarriers is still to arrive")
                continue
            if c.exited:
                raise VirtualGpuError("race", f"tcgen05.commit arrives at a barrier of CTA {c.id}, which has exited")
            signal(warp, bar, c, f"tcgen05.commit of CTA {warp.cta.id} warp {warp.index}")
            bar.arrive(1)

    warp.grid.counters["tcgen05_commit"] += 1
    if warp.trace is not None:
        warp.note("commit", queue, tuple((c.rank, b.offset) for b, c in bars))
    cluster.issue(Op("commit", run, warp), queue)


@decodes("tcgen05.commit")
def decode_commit(i: Instr) -> Action:
    m = Modifiers(i, 2)
    group = group_of(m)
    m.need("mbarrier::arrive::one")
    m.take("shared::cluster")
    multicast = m.take("multicast::cluster") is not None
    m.need("b64")
    m.done()
    mask = i.operands[1] if multicast else Const(None)
    return Action(commit, (), (i.operands[0], mask, Const(group)), (32, 16, 0))


