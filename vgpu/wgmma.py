"""Handlers of wgmma: Hopper's warpgroup MMA, D = A B^T (+ D) with D in registers (PTX ISA 9.7.15).

The four warps of a warpgroup issue each wgmma.mma_async together: it is in flight from the first one's issue on and
enters the queue of its warpgroup when the fourth has issued. It completes late, in order; its result registers hold
`late.Late` objects until each warp executes a wgmma.wait_group that covers it. Operands in shared memory are read when
it completes, so whatever overwrites them in between is reported. Registers with fragments of A are read at issue; that
they must not be written before the wait is checked when the kernel is translated, see `late.misuses`.

Sources: PTX ISA 9.7.15.4 (async proxy), 9.7.15.5 (fragments, canonical layouts, descriptors), 9.7.15.7 (fence, groups);
CUTLASS mma_traits_sm90_gmma.hpp (what LBO and SBO mean in each canonical layout). Exact arithmetic: the model of
MMA-Sim (arXiv 2511.10909), which its authors validated on Hopper hardware.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from operator import is_not

import numpy as np

from . import numerics
from .descriptor import (
    CHUNK,
    NO_SWIZZLE,
    SWIZZLE_32B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    SharedRead,
    SmemDescriptor,
    chunk_offsets,
)
from .errors import VirtualGpuError
from .isa import Action, Const, Flow, Modifiers, decodes, operand_count
from .late import Late
from .machine import Op
from .ptx import Imm, Instr, Vec

WARPS = 4  # of a warpgroup
M, ROWS = 64, 16  # rows of D, and of them those in the registers of one warp
K_BYTES = 32  # of a row of A or B that one MMA reads, whatever the type
BYTES_PER_CYCLE = 128  # of shared memory
F8_FRACTION = 13  # fractional bits kept for 8-bit floats, of products and of a float32 result [measured by MMA-Sim]

# element type of A -> (bytes, types B may have, types D may have); PTX ISA 9.7.15.2, 9.7.15.5.2
TYPES = {
    "f16": (2, ("f16",), ("f16", "f32")),
    "bf16": (2, ("bf16",), ("f32",)),
    "tf32": (4, ("tf32",), ("f32",)),
    "e4m3": (1, ("e4m3", "e5m2"), ("f16", "f32")),
    "e5m2": (1, ("e4m3", "e5m2"), ("f16", "f32")),
    "s8": (1, ("s8", "u8"), ("s32",)),
    "u8": (1, ("s8", "u8"), ("s32",)),
}
D_TYPES = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


@dataclass(frozen=True, slots=True)
class Form:
    """What one wgmma.mma_async computes: m64 n k, element types, signs and majorness of the operands.

    transpose_a, transpose_b: the operand is MN-major in shared memory; a_registers: A comes from registers.
    """

    n: int
    k: int
    d: str
    a: str
    b: str
    saturate: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    a_registers: bool = False

    @property
    def registers(self) -> int:
        """Accumulator registers of a thread: one for a 32-bit element, one for two of 16 bits."""
        return self.n // (4 if self.d == "f16" else 2)

    @property
    def cycles(self) -> float:
        """SM cycles at full rate: the longer of the datapath's time, n / 2 (H100's published dense peak: 989 TFLOP/s in
        f16 are 2048 multiply-adds a cycle and SM), and of reading the operands at 128 bytes a cycle [inferred]."""
        rows = self.n + (0 if self.a_registers else M)
        return max(self.n / 2, rows * K_BYTES / BYTES_PER_CYCLE)


# --- operands --------------------------------------------------------------------------------------

_SWIZZLES = (NO_SWIZZLE, SWIZZLE_128B, SWIZZLE_64B, SWIZZLE_32B)  # by the code in bits 62-63


@lru_cache(maxsize=4096)
def decode_descriptor(value: int) -> SmemDescriptor:
    """The 64-bit matrix descriptor of wgmma (PTX ISA 9.7.15.5.1.2.2). Raises `descriptor` where unused bits are set."""
    for low, high in ((14, 15), (30, 31), (46, 48), (52, 61)):
        if value >> low & (1 << high - low + 1) - 1:
            raise VirtualGpuError("descriptor", f"shared-memory matrix descriptor {value:#018x}: bits {low}-{high} are "
                                  "not 0; an address or offset does not fit its field, or it is no wgmma descriptor")
    return SmemDescriptor((value & 0x3FFF) << 4, (value >> 16 & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4,
                          value >> 49 & 7, _SWIZZLES[value >> 62 & 3])


@lru_cache(maxsize=4096)
def shared_operand(form: Form, name: str, value: int) -> SharedRead:
    """The chunks of operand A or B that descriptor `value` names: [rows, 2] along K, or MN-major [k, rows / 8]."""
    rows, transposed = (M, form.transpose_a) if name == "A" else (form.n, form.transpose_b)
    shape = (form.k, rows * TYPES[form.a][0] // CHUNK, "MN") if transposed else (rows, K_BYTES // CHUNK, "K")
    return SharedRead(f"operand {name} of wgmma.mma_async", chunk_offsets(decode_descriptor(value), *shape))


def _stack(registers) -> np.ndarray:
    """uint32[registers, 32] from values of registers."""
    out = np.empty((len(registers), 32), np.uint32)
    for row, value in zip(out, registers, strict=True):
        row[...] = value
    return out


def a_rows(registers) -> np.ndarray:
    """uint8[16, 32]: a warp's rows of A from its four registers. Register 2 j + h of lane 4 r + c holds the bytes
    16 j + 4 c and following of row r + 8 h (PTX ISA 9.7.15.5.1.1)."""
    words = _stack(registers).reshape(2, 2, 8, 4).transpose(1, 2, 0, 3)
    return np.ascontiguousarray(words).reshape(ROWS, 8).view(np.uint8)


def d_rows(registers: np.ndarray, d_type: str) -> np.ndarray:
    """[16, n] in D's type: a warp's rows of D from its registers, uint32[registers, 32]; inverse of `d_registers`."""
    per = 1 if d_type == "f16" else 2
    words = registers.reshape(-1, 2, per, 8, 4).transpose(1, 3, 0, 4, 2)
    return np.ascontiguousarray(words).reshape(ROWS, -1).view(D_TYPES[d_type])


def d_registers(rows: np.ndarray) -> np.ndarray:
    """uint32[registers, 32] from a warp's rows of D, [16, n]. Lane 4 r + c holds columns 8 j + 2 c and the next of rows
    r and r + 8, in this order for each j; two 16-bit elements share a register (PTX ISA 9.7.15.5.1.1)."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    per = 4 * words.shape[1] // rows.shape[1] // 2 or 1
    words = words.reshape(2, 8, -1, 4, per).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(words).reshape(-1, 32)


# --- arithmetic --------------------------------------------------------------------------------------


def products(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray | None, count: int, exact: bool) -> np.ndarray:
    """D of `count` MMAs that add to the same accumulator. a: float32[64, count k], b: float32[n, count k], element
    values; c: [64, n] in D's type, None for zero. Returns D's type.

    Fast: float32 products (bound: numerics.dense_fast; of 8-bit floats the hardware keeps less, see F8_FRACTION), a
    16-bit D rounded after each MMA. Exact: bit for bit as MMA-Sim's WGMMA.
    """
    if not exact and form.d == "f32":
        return numerics.dense_fast(a, b, c)
    d = np.zeros((M, form.n), D_TYPES[form.d]) if c is None else c
    for i in range(count):
        k = slice(i * form.k, (i + 1) * form.k)
        if form.d == "s32":
            d = numerics.integer_dot(a[:, k], b[:, k], d, form.saturate)
        elif not exact:
            d = numerics.dense_fast(a[:, k], b[:, k], d.astype(np.float32)).astype(np.float16)
        else:
            d = exact_product(form, a[:, k], b[:, k], d)
    return d


def exact_product(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One MMA of floats, bit for bit. a: float32[64, k], b: float32[n, k], c: float32 or float16[64, n]; returns c's
    type.

    8-bit floats: products and C are truncated to 13 fractional bits, a float32 result to 13 bits of its mantissa.
    """
    if TYPES[form.a][0] > 1:
        return numerics.fused_exact(a, b, c, form.a, form.b)
    d = numerics.fused_exact(a, b, c, form.a, form.b, fraction=F8_FRACTION)
    if form.d == "f32":
        bits = d.view(np.uint32)
        bits[~np.isnan(d)] &= np.uint32(0xFFFFFFFF << 23 - F8_FRACTION & 0xFFFFFFFF)
        d += np.float32(0)
    return d


# --- the instruction ---------------------------------------------------------------------------------


class Warpgroup:
    """Four warps of a CTA. queue: key of its queue; joining: number -> MMA that not all four have issued; done: how
    many have completed; waiters: warps in wgmma.wait_group."""

    __slots__ = ("queue", "joining", "done", "waiters")

    def __init__(self, queue):
        self.queue, self.joining, self.done, self.waiters = queue, {}, 0, []

    def advance(self, n: int) -> None:
        """n more MMAs have completed: warps that wait for no later one go on."""
        self.done += n
        waiters, self.waiters = self.waiters, []
        for warp in waiters:
            if self.done >= warp.wgmma.waited:
                settle(warp)
                warp.wake()
            else:
                self.waiters.append(warp)


class Issued:
    """What a warp has issued to its warpgroup. count: MMAs; commits: groups; groups: `count` at the end of each group
    that was not waited for; waited: how many MMAs have been."""

    __slots__ = ("group", "count", "commits", "groups", "waited")

    def __init__(self, group: Warpgroup):
        self.group, self.count, self.commits, self.waited = group, 0, 0, 0
        self.groups: deque[int] = deque()


class Multiply:
    """One wgmma.mma_async of a warpgroup: number `index`, in commit group number `commit`; payload of its queue entry.

    operands: what all four warps must agree on, (form, descriptor of A or None, descriptor of B, accumulate). entry:
    its `Op`. reads: operands in shared memory. a: rows of A from registers. joined: warps that have issued it. d: the
    result, once it has run (None too where it ran together with the next one, which continued it). For each warp: c,
    the accumulator before, an MMA or uint32[registers, 32]; late, the result registers in flight, until another MMA
    continues them or the warp has waited; parts, see `registers`.
    """

    __slots__ = ("operands", "index", "commit", "group", "entry", "reads", "a", "joined", "batch", "d", "c", "late",
                 "parts")

    def __init__(self, operands: tuple, index: int, commit: int, group: Warpgroup):
        self.operands, self.index, self.commit, self.group = operands, index, commit, group
        form, a, b, _ = operands
        self.reads = [shared_operand(form, "A", a)] if a is not None else []
        self.reads.append(shared_operand(form, "B", b))
        self.a = np.empty((M, K_BYTES), np.uint8) if a is None else None
        self.c, self.late, self.parts = [None] * WARPS, [None] * WARPS, [None] * WARPS
        self.joined, self.batch, self.d = 0, [self], None

    def describe(self) -> str:
        """The instruction, with its line."""
        return self.entry.describe()

    def batches_with(self, first: Multiply) -> bool:
        """True if this one may run in one call with `first` and those between: it continues the one just before it."""
        before = self.c[0]
        return (self.commit == first.commit and self.operands[0] == first.operands[0] and type(before) is Multiply
                and before.index == self.index - 1 and all(c is before for c in self.c))

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """float32[64, k] and float32[n, k]: the elements of A and B."""
        form, smem, out = self.operands[0], self.entry.warp.cta.smem, []
        raw = [read.gather(smem) for read in self.reads]
        if self.a is not None:
            raw.insert(0, self.a)
        for part, fmt, negate, transposed in zip(raw, (form.a, form.b), (form.negate_a, form.negate_b),
                                                 (form.transpose_a, form.transpose_b), strict=True):
            values = numerics.decode(part, fmt)
            if negate:
                np.negative(values, out=values)
            out.append(values.T if transposed else values)
        return out[0], out[1]

    def start(self) -> np.ndarray | None:
        """[64, n] in D's type: the accumulator before; None for zero."""
        form, _, _, accumulate = self.operands
        if not accumulate:
            return None
        first = self.c[0]
        if all(c is first for c in self.c):
            return first.result()
        return np.concatenate([c.result()[ROWS * i:ROWS * (i + 1)] if type(c) is Multiply else d_rows(c, form.d)
                               for i, c in enumerate(self.c)])

    def result(self) -> np.ndarray:
        """D, which must be there."""
        if self.d is None:
            raise VirtualGpuError("race", "the accumulator is a copy of registers taken in flight, before a later MMA "
                                  f"changed them: {self.describe()}")
        return self.d

    def run(self) -> None:
        """Compute this MMA and those of its batch, which continue it."""
        batch, self.batch = self.batch, None
        values = [op.values() for op in batch]
        a, b = values[0] if len(batch) == 1 else (np.concatenate(v, axis=1) for v in zip(*values, strict=True))
        exact = self.entry.warp.grid.exact
        batch[-1].d = products(self.operands[0], a, b, self.start(), len(batch), exact)
        for op in batch:
            op.a = op.c = op.entry.run = op.entry.payload = None
        self.group.advance(len(batch))

    def registers(self, quarter: int) -> np.ndarray:
        """uint32[registers, 32] of a warp of the warpgroup."""
        if self.parts[quarter] is None:
            self.parts[quarter] = d_registers(self.d[ROWS * quarter:ROWS * (quarter + 1)])
        return self.parts[quarter]


def _issued(warp, what: str) -> Issued:
    """The warp's record; checks that its whole warp is here and that it belongs to a warpgroup."""
    warp.require_converged(what)
    if warp.wgmma is None:
        first = warp.index - warp.index % WARPS
        warps = warp.cta.warps[first:first + WARPS]
        if len(warps) < WARPS or warp.count < 32:
            raise VirtualGpuError("barrier", f"{what} needs all 128 threads of a warpgroup, here warps {first} to "
                                  f"{first + WARPS - 1}")
        group = Warpgroup((warp.cta.rank, first // WARPS))
        for w in warps:
            w.wgmma = Issued(group)
    return warp.wgmma


def multiply(warp, form, registers, a, b, scale_d):
    """wgmma.mma_async: returns `Late` objects for the accumulator registers."""
    state, quarter = _issued(warp, "wgmma.mma_async"), warp.index % WARPS
    accumulate = bool(warp.uniform(scale_d, "scale-d"))
    desc_a = None if form.a_registers else warp.uniform(a, "A descriptor")
    op = _join(warp, state, (form, desc_a, warp.uniform(b, "B descriptor"), accumulate))
    if form.a_registers:
        op.a[ROWS * quarter:ROWS * (quarter + 1)] = a_rows(a)
    if accumulate:
        op.c[quarter] = _accumulator(form, registers, quarter)
    if warp.trace is not None and quarter == 0:
        warp.note("wgmma", form.cycles)
    warp.units.add("MMA")
    state.count += 1
    op.joined += 1
    if op.joined == WARPS:
        del state.group.joining[op.index]
        warp.cta.cluster.tensor.setdefault(state.group.queue, deque()).append(op.entry)
    late = op.late[quarter] = tuple([Late(op, i) for i in range(len(registers))])
    return late


def _join(warp, state: Issued, operands: tuple) -> Multiply:
    """The MMA that the other warps of the warpgroup issue too; the first of them puts its reads in flight."""
    group, cta = state.group, warp.cta
    op = group.joining.get(state.count)
    if op is None:
        op = Multiply(operands, state.count, state.commits, group)
        op.entry = Op("mma", op.run, warp, [(cta, read.lo, read.hi, False) for read in op.reads], op)
        cta.cluster.track(op.entry)
        group.joining[state.count] = op
        c, form = warp.grid.counters, operands[0]
        c["mma_instructions"] += 1
        c["mma_cycles"] += form.cycles
        c["mma_flops"] += 2 * M * form.n * form.k
    elif op.operands != operands:
        raise VirtualGpuError("descriptor", "the warps of a warpgroup must issue the same wgmma.mma_async with the "
                              f"same descriptors; warp {op.entry.warp.index}: {_show(op.operands)} at {op.describe()}; "
                              f"warp {warp.index}: {_show(operands)}")
    if cta.smem.dirty:
        for read in op.reads:
            cta.smem.require_fenced(slice(read.lo, read.hi), read.what)
    return op


def _show(operands: tuple) -> str:
    form, a, b, accumulate = operands
    return (f"m{M}n{form.n}k{form.k}, A {'registers' if a is None else f'{a:#018x}'}, B {b:#018x}, scale-d "
            f"{int(accumulate)}")


def _accumulator(form: Form, registers, quarter: int) -> Multiply | np.ndarray:
    """The accumulator before the MMA: values, or that of an MMA of the same shape in flight, whose order is guaranteed
    (PTX ISA 9.7.15.7.1)."""
    first = registers[0]
    if type(first) is not Late:
        return _stack(registers)
    op = first.op
    before = op.operands[0]
    if (before.n, before.k, before.d) != (form.n, form.k, form.d):
        raise VirtualGpuError("race", f"the accumulator is that of an MMA of another shape in flight: {op.describe()}")
    late, op.late[quarter] = op.late[quarter], None
    if late is None or any(map(is_not, registers, late)):
        raise VirtualGpuError("race", "the accumulator is only a part, or a copy, of that of an MMA in flight: "
                              f"{op.describe()}")
    return op


def settle(warp) -> None:
    """Give the registers of the MMAs that the warp has waited for their values."""
    R, waited, quarter = warp.R, warp.wgmma.waited, warp.index % WARPS
    for slot in warp.program.late_slots:
        value = R[slot]
        if type(value) is Late and value.op.index < waited and value.op.d is not None:
            value.op.late[quarter] = None
            R[slot] = value.op.registers(quarter)[value.i]


def fence(warp) -> None:
    """wgmma.fence: orders accesses to registers; where it is missing is found at translation, see `late.misuses`."""
    _issued(warp, "wgmma.fence")


def commit(warp) -> None:
    """wgmma.commit_group: the MMAs since the last one are a group."""
    state = _issued(warp, "wgmma.commit_group")
    state.groups.append(state.count)
    state.commits += 1
    if warp.trace is not None:
        warp.note("wgmma_commit")


def wait(warp, resume, n):
    """wgmma.wait_group: until all but the latest n groups have completed."""
    state = _issued(warp, "wgmma.wait_group")
    if warp.trace is not None:
        warp.note("wgmma_wait", n)
    while len(state.groups) > n:
        state.waited = state.groups.popleft()
    missing = state.waited - state.group.done
    if missing <= 0:
        settle(warp)
        return resume
    state.group.waiters.append(warp)
    return warp.park(resume, f"{missing} wgmma.mma_async (one starts when all four warps have issued it)")


# --- decoding ----------------------------------------------------------------------------------------


def _form(i: Instr, m: Modifiers, a_registers: bool) -> Form:
    """Shape and types from the modifiers, checked."""
    m.need("sync")
    m.need("aligned")
    saturate = m.take("satfinite") is not None
    shape = re.fullmatch(r"m64n(\d+)k(\d+)", m.rest.pop(0)) if m.rest else None
    if shape is None or len(m.rest) != 3:
        raise i.error("unknown instruction", "expects .m64nNkK and the types of D, A and B")
    d, a, b = m.rest
    n, k = int(shape[1]), int(shape[2])
    if a not in TYPES:
        raise i.error("unsupported", f"matrix A of type {a}; modelled: {', '.join(TYPES)}")
    size, b_types, d_types = TYPES[a]
    if b not in b_types or d not in d_types:
        raise i.error("unknown instruction", f"D {d}, A {a}, B {b}; for this A: B {b_types}, D {d_types}")
    step = 16 if d == "s32" and n > 24 else 8
    if not 8 <= n <= 256 or n % step or k * size != K_BYTES:
        raise i.error("unknown instruction", f"m64n{n}k{k} of {a}: K must be {K_BYTES // size}, N a multiple of {step} "
                      "up to 256")
    if saturate and d != "s32":
        raise i.error("unknown instruction", ".satfinite is for integers")
    return Form(n, k, d, a, b, saturate, a_registers=a_registers)


def _immediates(i: Instr, form: Form) -> dict[str, bool]:
    """The immediates after scale-d, as fields of `Form`."""
    names = [] if form.d == "s32" else ["negate_a", "negate_b"]
    if form.a in ("f16", "bf16"):
        names += ["transpose_b"] if form.a_registers else ["transpose_a", "transpose_b"]
    operand_count(i, 4 + len(names))
    out = {}
    for name, imm in zip(names, i.operands[4:], strict=True):
        allowed = (1, -1) if name.startswith("negate") else (0, 1)
        if not isinstance(imm, Imm) or imm.value not in allowed:
            what = name.replace("negate", "imm-scale").replace("transpose", "imm-trans").replace("_", "-")
            raise i.error("unknown instruction", f"{what}: allowed {allowed}")
        out[name] = imm.value == allowed[1]
    return out


@decodes("wgmma.mma_async")
def decode_multiply(i: Instr) -> Action:
    m = Modifiers(i, 2)
    if m.take("sp"):
        raise i.error("unsupported", "sparse wgmma.mma_async is not modelled")
    d, a, b, scale_d = i.operands[:4]
    form = _form(i, m, isinstance(a, Vec))
    fields = {name: getattr(form, name) for name in form.__slots__} | _immediates(i, form)
    form = Form(**fields)
    if len(d.items) != form.registers or (form.a_registers and len(a.items) != 4):
        raise i.error("unknown instruction", f"{len(d.items)} accumulator registers; m64n{form.n} in {form.d} has "
                      f"{form.registers}, and A in registers has 4")
    return Action(multiply, d.items, (Const(form), d, a, b, scale_d), (0, 32, 32 if form.a_registers else 64, 64, 1),
                  late=True)


@decodes("wgmma.fence", "wgmma.commit_group")
def decode_fence(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("sync")
    m.need("aligned")
    m.done()
    operand_count(i, 0)
    return Action(fence if i.opcode[1] == "fence" else commit)


@decodes("wgmma.wait_group")
def decode_wait(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("sync")
    m.need("aligned")
    m.done()
    operand_count(i, 1)
    if not isinstance(i.operands[0], Imm):
        raise i.error("unknown instruction", "wgmma.wait_group takes a constant")
    return Action(wait, (), (Const(i.operands[0].value),), (0,), Flow.BLOCK)
