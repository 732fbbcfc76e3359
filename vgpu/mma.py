"""tcgen05.mma: D = A B^T (+ D), with operands read through descriptors and D, scale factors, perhaps A in TMEM.

Sources: PTX ISA 9.7.16.10 (operation, packing formats, datapath layouts, block scaling); CUTLASS
mma_traits_sm100_frag.hpp (scale-factor and 2x2 datapath layouts). The scale factors are read as a strict reading of
"duplicated to all 32-lane partitions" has it: the datapath of D's lanes 32 w .. 32 w + 31 reads both scale factors
from lanes 32 w .. 32 w + 31 [inferred], so a partition that was not filled shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from . import numerics
from .descriptor import (
    CHUNK,
    SCALED_KINDS,
    SWIZZLE_128B_ATOM_32B,
    InstrDescriptor,
    SharedRead,
    SmemDescriptor,
    chunk_offsets,
)
from .errors import VirtualGpuError
from .memory import SharedMemory
from .tmem import COLUMNS, TensorMemory

K_BYTES = 32  # bytes of K that one dense MMA reads of each row, in every kind
QUADRANT = 32  # lanes of TMEM that belong to one warp
BYTES_PER_CYCLE = 128  # of shared memory, for MMA operands [measured by third parties]


@dataclass(frozen=True, slots=True)
class MmaOp:
    """One tcgen05.mma as issued.

    kind: f16, tf32, f8f6f4, i8, mxf8f6f4, mxf4 or mxf4nvf4; cta_group: 1 or 2; d_tmem: TMEM address of D; b_desc,
    a_desc: 64-bit matrix descriptors; a_tmem: TMEM address of A instead of a_desc; idesc: 32-bit instruction
    descriptor; scale_vec, sfa_tmem, sfb_tmem: of the block-scaled kinds (see descriptor.scale_vector); accumulate:
    the enable-input-d predicate; disable_output_lane: 4 (cta_group 2: 8) words, bit i of word v keeps lane 32 v + i
    (words 4 to 7: of the odd CTA [inferred]) from being written; scale_input_d: D is first divided by 2**scale_input_d;
    rank: cluster rank of the issuing CTA.
    """

    kind: str
    cta_group: int
    d_tmem: int
    b_desc: int
    idesc: int
    a_desc: int | None = None
    a_tmem: int | None = None
    scale_vec: int | None = None
    sfa_tmem: int | None = None
    sfb_tmem: int | None = None
    accumulate: bool = True
    disable_output_lane: tuple[int, ...] | None = None
    scale_input_d: int | None = None
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Where a block of D lies: lanes [lane, lane + lanes) of CTA `cta` hold rows [row, row + lanes), columns
    [n_lo, n_hi) of D, from the first column of D's TMEM address on."""

    cta: int
    lane: int
    lanes: int
    row: int
    n_lo: int
    n_hi: int


@dataclass(frozen=True, slots=True)
class TmemRanges:
    """Columns [lo, hi) of TMEM that an instruction reads and writes, the same in every CTA it touches."""

    reads: tuple[tuple[int, int], ...]
    writes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Scales:
    """Scale factors of a run of MMAs. Per CTA, flat indices of TMEM cells: sfa intp[halves, rows, ops], the cell of
    each row for each half of the datapath; sfb intp[groups, N, ops], for each group of 32 rows. sfa_bytes, sfb_bytes:
    intp[ops * scale_vec], which bytes of a row's cells to use."""

    sfa: np.ndarray
    sfb: np.ndarray
    sfa_bytes: np.ndarray
    sfb_bytes: np.ndarray


@dataclass(frozen=True, slots=True)
class _Plan:
    """All that can be known before execution about a run of MMAs that accumulate into the same D."""

    count: int
    idesc: InstrDescriptor
    cta_group: int
    a: SharedRead | None
    a_cells: np.ndarray | None  # intp[halves, rows, ops * 8], flat indices of TMEM cells, if A is in TMEM
    b: SharedRead
    scales: _Scales | None
    blocks: tuple[Block, ...]
    d_column: int
    spans: tuple[tuple[str, int, int], ...]
    accumulate: bool
    scale_input_d: int
    keep: np.ndarray | None  # bool[cta_group, 128], lanes to write; None: all

    @property
    def halves(self) -> int:
        """2 where the halves of D's columns lie in different lanes (M = 128 of cta_group::2), else 1."""
        return 2 if self.cta_group == 2 and self.idesc.m == 128 else 1


# ---------------------------------------------------------------------------------------------------- addresses

def tmem_span(address: int, columns: int, what: str, lanes: tuple[int, ...] = (0,)) -> tuple[int, int]:
    """(lane, column) of a TMEM address of `columns` columns; raises `tensor memory` where that does not fit."""
    lane, column = address >> 16 & 0xFFFF, address & 0xFFFF
    if lane not in lanes:
        raise VirtualGpuError("tensor memory", f"{what} at TMEM address {address:#010x}: lane {lane}; allowed: {lanes}")
    if column + columns > COLUMNS:
        raise VirtualGpuError(
            "tensor memory", f"{what} at TMEM address {address:#010x} covers columns [{column}, {column + columns}); "
            f"there are {COLUMNS}")
    return lane, column


def require_allocated(tmem: TensorMemory, lo: int, hi: int, what: str) -> None:
    """Raise `tensor memory` if one of the columns [lo, hi) belongs to no allocation."""
    owners = tmem.owner[lo:hi]
    if owners.min() < 0:
        column = lo + int(np.argmax(owners < 0))
        raise VirtualGpuError("tensor memory", f"{what} uses TMEM column {column}, which is not allocated")


def require_cells(tmem: TensorMemory, index: np.ndarray, what: str) -> None:
    """Raise `uninitialised` unless every cell of the flat indices was written."""
    written = tmem.written.reshape(-1).take(index)
    if not written.all():
        lane, column = divmod(int(index.ravel()[int(np.argmin(written))]), COLUMNS)
        raise VirtualGpuError(
            "uninitialised", f"{what} reads TMEM lane {lane}, column {column}, which was never written")


# ---------------------------------------------------------------------------------------------------- static plan

def _instruction(op: MmaOp) -> InstrDescriptor:
    if op.kind in SCALED_KINDS and (op.sfa_tmem is None or op.sfb_tmem is None):
        raise VirtualGpuError("descriptor", f"kind::{op.kind} needs TMEM addresses of both scale factors")
    if (op.a_desc is None) == (op.a_tmem is None):
        raise VirtualGpuError("descriptor", "A must be in shared memory or in TMEM, one of them")
    idesc = InstrDescriptor.decode(op.idesc, op.kind)
    idesc.check(op.cta_group, op.scale_vec)
    if op.scale_input_d is not None and (op.kind not in ("f16", "tf32") or not 0 <= op.scale_input_d <= 15):
        raise VirtualGpuError("descriptor", f"scale-input-d {op.scale_input_d} of kind::{op.kind}: it must be in "
                              "0..15, with kind f16 or tf32")
    return idesc


def d_blocks(idesc: InstrDescriptor, cta_group: int, lane: int) -> tuple[Block, ...]:
    """Where D lies (PTX ISA 9.7.16.10.5): layouts D (M 128), F (M 64), A (M 256) and B (M 128 of a CTA pair)."""
    m, n = idesc.m, idesc.n
    if cta_group == 1 and m == 64:
        return tuple(Block(0, QUADRANT * w + lane, 16, 16 * w, 0, n) for w in range(4))
    if cta_group == 2 and m == 128:
        return tuple(Block(v, 64 * h, 64, 64 * v, h * n // 2, (h + 1) * n // 2) for v in range(2) for h in range(2))
    return tuple(Block(v, 0, 128, 128 * v, 0, n) for v in range(cta_group))


def _storage(kind: str, fmt: str) -> tuple[str, int]:
    """How an operand lies in shared memory: (packed, padded or whole, data bytes in every 16)."""
    if kind in ("mxf4", "mxf4nvf4"):
        return "packed", CHUNK
    if fmt in ("e2m1", "e2m3", "e3m2"):
        return "padded", 8 if fmt == "e2m1" else 12
    return "whole", CHUNK


def _shared_operand(ops: Sequence[MmaOp], idesc: InstrDescriptor, name: str) -> SharedRead:
    """The chunks of A or B in each CTA: [rows, 2 chunks an op], or [K of all ops, chunks along MN] if transposed."""
    a = name == "A"
    transposed = idesc.transpose_a if a else idesc.transpose_b
    rows = (idesc.m if a else idesc.n) // ops[0].cta_group
    elements = CHUNK * idesc.k // K_BYTES  # of one chunk
    parts = []
    for op in ops:
        desc = SmemDescriptor.decode(op.a_desc if a else op.b_desc)
        if transposed and (desc.swizzle == SWIZZLE_128B_ATOM_32B) != (idesc.kind == "tf32"):
            raise VirtualGpuError(
                "descriptor", f"transposed {name} of kind::{idesc.kind} with swizzle code {desc.swizzle}: tf32 needs "
                "code 1 (128 bytes, 32-byte atoms), the other kinds any other")
        shape = (idesc.k, rows // elements, "MN") if transposed else (rows, K_BYTES // CHUNK, "K")
        parts.append(chunk_offsets(desc, *shape))
    data_bytes = _storage(idesc.kind, idesc.a_format if a else idesc.b_format)[1]
    return SharedRead(f"operand {name} of tcgen05.mma", np.concatenate(parts, axis=0 if transposed else 1), data_bytes)


def flat_cells(lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Flat indices of TMEM cells, broadcast."""
    return (lanes * COLUMNS + columns).astype(np.intp)


def _tmem_operand(ops: Sequence[MmaOp], idesc: InstrDescriptor, lane: int) -> np.ndarray:
    """Flat cells of A in TMEM: intp[halves, rows of a CTA, 8 ops]: 32 bytes of K in 8 columns of the row's lane.

    With the 2x2 datapath A is held twice, in lanes 0-63 and 64-127 [CUTLASS TmemAllocMode::Duplicated]."""
    if idesc.transpose_a:
        raise VirtualGpuError("descriptor", "A in TMEM cannot be transposed")
    columns = []
    for op in ops:
        _, column = tmem_span(op.a_tmem, 8, "matrix A", (lane,))
        columns.append(column + np.arange(8))
    rows = idesc.m // ops[0].cta_group
    row = np.arange(rows)
    lanes = row % 16 + row // 16 * QUADRANT + lane if ops[0].cta_group == 1 and rows == 64 else row
    lanes = lanes[None] + 64 * np.arange(2 if ops[0].cta_group == 2 and rows == 64 else 1)[:, None]
    return flat_cells(lanes[:, :, None], np.concatenate(columns))


def _scale_operands(ops: Sequence[MmaOp], idesc: InstrDescriptor) -> tuple[_Scales, list[tuple[str, int, int]]]:
    """Where the scale factors lie: row m of A in column m / 32, row n of B in column n / 32, lane modulo 32."""
    rows, two = idesc.m // ops[0].cta_group, ops[0].cta_group == 2 and idesc.m == 128
    across = idesc.n // 2 if two else idesc.n
    widths = (rows // QUADRANT, -(-across // QUADRANT))
    spans, starts = [], ([], [])
    for op in ops:
        for i, (name, address) in enumerate((("A", op.sfa_tmem), ("B", op.sfb_tmem))):
            # bits 31:30 carry the byte id in CuTe's addresses and are no part of the lane
            _, column = tmem_span(address & 0x3FFFFFFF, widths[i], f"scale factor {name}")
            spans.append((f"scale factor {name}", column, column + widths[i]))
            starts[i].append(column)
    row, n = np.arange(rows), np.arange(idesc.n)
    half = np.arange(2 if two else 1)[:, None, None]
    sfa = flat_cells(64 * half + row[:, None], row[:, None] // QUADRANT + np.array(starts[0]))
    group = np.arange(2 if two else 4)[:, None, None]
    inner = (n % across)[:, None]
    lanes = 64 * (n // across)[:, None] + QUADRANT * group + inner % QUADRANT
    sfb = flat_cells(lanes, inner // QUADRANT + np.array(starts[1]))
    ids = [InstrDescriptor.decode(op.idesc, op.kind) for op in ops]
    step = np.arange(ops[0].scale_vec)
    sfa_bytes = np.concatenate([4 * i + d.sfa_id + step for i, d in enumerate(ids)])
    sfb_bytes = np.concatenate([4 * i + d.sfb_id + step for i, d in enumerate(ids)])
    return _Scales(sfa, sfb, sfa_bytes, sfb_bytes), spans


def _lanes_kept(op: MmaOp) -> np.ndarray | None:
    if op.disable_output_lane is None or not any(op.disable_output_lane):
        return None
    if len(op.disable_output_lane) != 4 * op.cta_group:
        raise VirtualGpuError("descriptor", f"disable-output-lane: {len(op.disable_output_lane)} words; "
                              f"cta_group::{op.cta_group} takes {4 * op.cta_group}")
    words = np.array(op.disable_output_lane, np.uint64)[:, None]
    return ((words >> np.arange(32, dtype=np.uint64)) & np.uint64(1) == 0).reshape(op.cta_group, 128)


def _merge(spans: list[tuple[str, int, int]]) -> tuple[tuple[str, int, int], ...]:
    """Adjacent or overlapping spans of the same name as one."""
    out: list[tuple[str, int, int]] = []
    for name, lo, hi in sorted(spans):
        if out and out[-1][0] == name and lo <= out[-1][2]:
            out[-1] = (name, out[-1][1], max(hi, out[-1][2]))
        else:
            out.append((name, lo, hi))
    return tuple(out)


def _plan(ops: tuple[MmaOp, ...]) -> _Plan:
    idesc, first = _instruction(ops[0]), ops[0]
    for op in ops[1:]:
        _instruction(op)
    half_used = first.cta_group == 1 and idesc.m == 64
    d_width = idesc.n // 2 if first.cta_group == 2 and idesc.m == 128 else idesc.n
    lane, column = tmem_span(first.d_tmem, d_width, "accumulator D", (0, 16) if half_used else (0,))
    scales, others = _scale_operands(ops, idesc) if first.kind in SCALED_KINDS else (None, [])
    a_cells = None
    if first.a_tmem is not None:
        a_cells = _tmem_operand(ops, idesc, lane)
        others = others + [("matrix A", op.a_tmem & 0xFFFF, (op.a_tmem & 0xFFFF) + 8) for op in ops]
    for name, lo, hi in others:
        if lo < column + d_width and column < hi:
            raise VirtualGpuError("tensor memory", f"{name} in TMEM columns [{lo}, {hi}) overlaps the accumulator in "
                                  f"[{column}, {column + d_width})")
    return _Plan(
        count=len(ops), idesc=idesc, cta_group=first.cta_group,
        a=None if a_cells is not None else _shared_operand(ops, idesc, "A"), a_cells=a_cells,
        b=_shared_operand(ops, idesc, "B"), scales=scales, blocks=d_blocks(idesc, first.cta_group, lane),
        d_column=column, spans=_merge([*others, ("accumulator D", column, column + d_width)]),
        accumulate=first.accumulate, scale_input_d=first.scale_input_d or 0, keep=_lanes_kept(first))


def _joins(a: MmaOp, b: MmaOp) -> bool:
    """Whether `b` continues the run of `a`: it only adds to the same D, in the same way."""
    def way(op: MmaOp):
        idesc = replace(InstrDescriptor.decode(op.idesc, op.kind), sfa_id=0, sfb_id=0)
        return idesc, op.cta_group, op.d_tmem, op.scale_vec, op.a_tmem is None, op.disable_output_lane
    return b.accumulate and not b.scale_input_d and way(a) == way(b)


@lru_cache(maxsize=512)
def _plans(ops: tuple[MmaOp, ...]) -> tuple[_Plan, ...]:
    runs = [[ops[0]]]
    for op in ops[1:]:
        if _joins(runs[-1][0], op):
            runs[-1].append(op)
        else:
            runs.append([op])
    return tuple(_plan(tuple(run)) for run in runs)


# ---------------------------------------------------------------------------------------------------- execution

def execute(ops: Sequence[MmaOp], smems: Sequence[SharedMemory], tmems: Sequence[TensorMemory],
            exact: bool = False) -> None:
    """Perform MMAs in order.

    smems, tmems: those of the issuing CTA (cta_group 1) or of the pair, even rank first (cta_group 2). Consecutive
    MMAs that add to the same D are decoded and multiplied together; with `exact` each is then summed and rounded on
    its own, bit for bit (numerics.block_scaled_exact, fused_exact), else all at once in float32 (the bound is that
    of numerics.block_scaled_fast and dense_fast).

    Raises VirtualGpuError: `descriptor`, `unsupported` for what the descriptors say; `out of bounds`,
    `uninitialised`, `proxy fence`, `mbarrier` for shared memory; `tensor memory` for columns that do not exist, are
    not allocated or overlap D; `uninitialised` for TMEM cells never written.
    """
    for plan in _plans(tuple(ops)):
        if not len(smems) == len(tmems) == plan.cta_group:
            raise ValueError(f"smems, tmems: {len(smems)} and {len(tmems)}; cta_group::{plan.cta_group} needs "
                             f"{plan.cta_group} of each")
        for name, lo, hi in plan.spans:
            for tmem in tmems:
                require_allocated(tmem, lo, hi, f"{name} of tcgen05.mma")
        _execute(plan, smems, tmems, exact)


def _execute(plan: _Plan, smems: Sequence[SharedMemory], tmems: Sequence[TensorMemory], exact: bool) -> None:
    a = _read_a(plan, smems, tmems)
    b = _shared_values(plan.b, smems, plan.idesc, plan.idesc.b_format, plan.idesc.transpose_b, plan.idesc.negate_b)
    sfa = sfb = None
    if plan.scales is not None:
        sfa, sfb = _read_scales(plan, tmems)
    c = _read_d(plan, tmems) if plan.accumulate else None
    if _uniform(a, sfa, sfb):
        scales = (None, None) if sfa is None else (sfa[0], sfb[0])
        d = _multiply(plan, a[0], b, *scales, c, exact)
    else:
        d = _multiply_tiles(plan, a, b, sfa, sfb, c, exact)
    _write_d(plan, tmems, d)


def _decoded(raw: np.ndarray, kind: str, fmt: str, negate: bool) -> np.ndarray:
    """uint8[rows, bytes] as it lies in shared memory -> float32[rows, elements]."""
    how = _storage(kind, fmt)[0]
    if how == "packed":
        values = numerics.decode_packed_e2m1(raw)
    elif how == "padded":
        values = numerics.decode_padded(raw, fmt)
    else:
        values = numerics.decode(raw, fmt)
    return np.negative(values, out=values) if negate else values


def _shared_values(read: SharedRead, smems: Sequence[SharedMemory], idesc: InstrDescriptor, fmt: str, transposed: bool,
                   negate: bool) -> np.ndarray:
    """float32[rows, K of all ops]: A or B, the CTAs' parts one after the other."""
    parts = [read.gather(smem) for smem in smems]
    raw = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1 if transposed else 0)
    values = _decoded(raw, idesc.kind, fmt, negate)
    return values.T if transposed else values


def _read_a(plan: _Plan, smems: Sequence[SharedMemory], tmems: Sequence[TensorMemory]) -> np.ndarray:
    """float32[halves, M, K of all ops]; one half is enough unless A is in TMEM."""
    idesc = plan.idesc
    if plan.a is not None:
        return _shared_values(plan.a, smems, idesc, idesc.a_format, idesc.transpose_a, idesc.negate_a)[None]
    parts = []
    for tmem in tmems:
        require_cells(tmem, plan.a_cells, "matrix A of tcgen05.mma")
        parts.append(tmem.cells.reshape(-1).take(plan.a_cells).view(np.uint8))
    raw = np.concatenate(parts, axis=1)
    if _storage(idesc.kind, idesc.a_format)[0] == "padded":  # in TMEM: one element a byte (PTX ISA 9.7.16.10.4.3)
        values = numerics.decode(raw, idesc.a_format)
        return -values if idesc.negate_a else values
    return _decoded(raw, idesc.kind, idesc.a_format, idesc.negate_a)


def _read_scales(plan: _Plan, tmems: Sequence[TensorMemory]) -> tuple[np.ndarray, np.ndarray]:
    """uint8[halves, M, G] and uint8[row groups, N, G]: the scale factors as each part of the datapath sees them."""
    scales, out = plan.scales, []
    for name, index, which, axis in (("A", scales.sfa, scales.sfa_bytes, 1), ("B", scales.sfb, scales.sfb_bytes, 0)):
        parts = []
        for tmem in tmems:
            require_cells(tmem, index, f"scale factor {name} of tcgen05.mma")
            parts.append(tmem.cells.reshape(-1).take(index))
        cells = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
        raw = cells.view(np.uint8)
        out.append(raw if len(which) == raw.shape[-1] else raw.take(which, axis=-1))
    return out[0], out[1]


def _uniform(a: np.ndarray, sfa: np.ndarray | None, sfb: np.ndarray | None) -> bool:
    """Whether every part of the datapath sees the same operands, as it must in a right program."""
    if len(a) > 1 and not np.array_equal(a[0].view(np.uint32), a[1].view(np.uint32)):
        return False
    return sfa is None or ((len(sfa) == 1 or np.array_equal(sfa[0], sfa[1])) and bool((sfb[1:] == sfb[0]).all()))


def _multiply_tiles(plan: _Plan, a: np.ndarray, b: np.ndarray, sfa: np.ndarray | None, sfb: np.ndarray | None,
                    c: np.ndarray | None, exact: bool) -> np.ndarray:
    """D where parts of the datapath see different operands: each tile with what it has."""
    m, n = plan.idesc.m, plan.idesc.n
    groups = 1 if sfb is None else len(sfb)
    rows, across = m // groups, n // plan.halves
    d = np.empty((m, n), _D_TYPE[plan.idesc.d_format])
    for half in range(plan.halves):
        cols = slice(half * across, (half + 1) * across)
        for group in range(groups):
            tile = slice(group * rows, (group + 1) * rows)
            scales = (None, None) if sfa is None else (sfa[half, tile], sfb[group, cols])
            part = None if c is None else c[tile, cols]
            d[tile, cols] = _multiply(plan, a[half % len(a), tile], b[cols], *scales, part, exact)
    return d


_D_TYPE = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def _multiply(plan: _Plan, a: np.ndarray, b: np.ndarray, sfa: np.ndarray | None, sfb: np.ndarray | None,
              c: np.ndarray | None, exact: bool) -> np.ndarray:
    """D of all MMAs of the plan, in D's type; c None means zero."""
    idesc = plan.idesc
    if not exact and idesc.d_format == "f32":
        if sfa is None:
            return numerics.dense_fast(a, b, c)
        return numerics.block_scaled_fast(a, b, sfa, sfb, c, idesc.scale_format)
    d = np.zeros((len(a), len(b)), _D_TYPE[idesc.d_format]) if c is None else c
    for i in range(plan.count):
        k = slice(i * idesc.k, (i + 1) * idesc.k)
        vec = 0 if sfa is None else sfa.shape[1] // plan.count
        g = slice(i * vec, (i + 1) * vec)
        if idesc.kind == "i8":
            d = numerics.integer_dot(a[:, k], b[:, k], d, idesc.saturate)
        elif not exact:
            d = numerics.dense_fast(a[:, k], b[:, k], d.astype(np.float32)).astype(np.float16)
        elif sfa is None:
            d = numerics.fused_exact(a[:, k], b[:, k], d, idesc.a_format, idesc.b_format)
        elif vec == 1:
            d = numerics.fused_exact(a[:, k], b[:, k], d, idesc.a_format, idesc.b_format, sfa[:, i], sfb[:, i])
        else:
            d = numerics.block_scaled_exact(a[:, k], b[:, k], sfa[:, g], sfb[:, g], d, idesc.scale_format)
    return d


def _read_d(plan: _Plan, tmems: Sequence[TensorMemory]) -> np.ndarray:
    """D as it is before the MMAs, [M, N] in D's type."""
    idesc = plan.idesc
    d = np.empty((idesc.m, idesc.n), np.uint32)
    for block in plan.blocks:
        where = _place(plan, block)
        written = tmems[block.cta].written[where]
        if plan.keep is not None:
            written = written | ~plan.keep[block.cta, block.lane:block.lane + block.lanes, None]
        if not written.all():
            lane, column = divmod(int(np.argmin(written)), written.shape[1])
            raise VirtualGpuError(
                "uninitialised", f"tcgen05.mma accumulates into TMEM lane {block.lane + lane}, column "
                f"{plan.d_column + column}, which was never written")
        d[block.row:block.row + block.lanes, block.n_lo:block.n_hi] = tmems[block.cta].cells[where]
    out = d.astype(np.uint16).view(np.float16) if idesc.d_format == "f16" else d.view(_D_TYPE[idesc.d_format])
    if plan.scale_input_d:
        out = out * out.dtype.type(2.0**-plan.scale_input_d)
    return out


def _write_d(plan: _Plan, tmems: Sequence[TensorMemory], d: np.ndarray) -> None:
    """Store D. A 16-bit D takes the low half of its cell (PTX ISA 9.7.16.10.4.1), the high half becomes 0 [inferred].
    """
    cells = d.view(np.uint16).astype(np.uint32) if plan.idesc.d_format == "f16" else d.view(np.uint32)
    for block in plan.blocks:
        where = _place(plan, block)
        tmem, part = tmems[block.cta], cells[block.row:block.row + block.lanes, block.n_lo:block.n_hi]
        if plan.keep is None:
            tmem.cells[where] = part
            tmem.written[where] = True
        else:
            keep = plan.keep[block.cta, block.lane:block.lane + block.lanes]
            tmem.cells[where][keep] = part[keep]
            tmem.written[where][keep] = True


def _place(plan: _Plan, block: Block) -> tuple[slice, slice]:
    return (slice(block.lane, block.lane + block.lanes),
            slice(plan.d_column, plan.d_column + block.n_hi - block.n_lo))


# ---------------------------------------------------------------------------------------------------- accounting

def pair_ranks(op_rank: int, cta_group: int) -> tuple[int, ...]:
    return (op_rank,) if cta_group == 1 else (op_rank & ~1, op_rank | 1)


@lru_cache(maxsize=1024)
def read_ranges(op: MmaOp) -> dict[int, tuple[SharedRead, ...]]:
    """Shared memory that the MMA reads: cluster rank -> its operands, each with span [lo, hi) and chunk offsets."""
    plan = _plans((op,))[0]
    reads = tuple(read for read in (plan.a, plan.b) if read is not None)
    return {rank: reads for rank in pair_ranks(op.rank, op.cta_group)}


@lru_cache(maxsize=1024)
def tmem_ranges(op: MmaOp) -> TmemRanges:
    """TMEM columns that the MMA reads (scale factors, A, and D if it accumulates) and writes (D), in each CTA."""
    spans = _plans((op,))[0].spans
    d = tuple((lo, hi) for name, lo, hi in spans if name == "accumulator D")
    reads = tuple((lo, hi) for name, lo, hi in spans if name != "accumulator D")
    return TmemRanges(reads + d if op.accumulate else reads, d)


@lru_cache(maxsize=1024)
def flops(op: MmaOp) -> int:
    """Floating-point (or integer) operations of the MMA, over all its CTAs: 2 M N K."""
    idesc = _instruction(op)
    return 2 * idesc.m * idesc.n * idesc.k


@lru_cache(maxsize=1024)
def cycles(op: MmaOp) -> float:
    """SM cycles at full rate: the longer of the datapath's time, N / 2 for 128 rows an SM or N / 4 for 64, and of
    reading A and B from shared memory at 128 bytes a cycle. The rule fits the published issue intervals of B200
    block-scaled MMAs (SemiAnalysis, microbench-blackwell) [measured there for mxf8f6f4, inferred for other kinds]."""
    idesc = _instruction(op)
    rows = idesc.m // op.cta_group
    datapath = idesc.n / (2 if rows == 128 else 4)
    read = idesc.n // op.cta_group + (rows if op.a_tmem is None else 0)
    return max(datapath, read * K_BYTES / BYTES_PER_CYCLE)
