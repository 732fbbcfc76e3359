"""tcgen05.cp (shared memory to TMEM) and tcgen05.shift.

Sources: PTX ISA 9.7.16.2.3 (data movement shapes), 9.7.16.9.1 (decompression), 9.7.16.9.2 (cp), 9.7.16.9.3 (shift);
CUTLASS copy_traits_sm100.hpp (which lanes each shape fills).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .descriptor import CHUNK, SharedRead, SmemDescriptor, chunk_offsets
from .errors import VirtualGpuError
from .memory import SharedMemory
from .mma import QUADRANT, TmemRanges, flat_cells, pair_ranks, require_allocated, require_cells, tmem_span
from .numerics import unpack_6bit
from .tmem import COLUMNS, TensorMemory

# (shape, multicast) -> lanes that receive each row of the source: [copies, rows]
_ROWS = np.arange(128)
_LANES: dict[tuple[str, str | None], np.ndarray] = {
    ("128x256b", None): _ROWS[None],
    ("128x128b", None): _ROWS[None],
    ("4x256b", None): QUADRANT * _ROWS[None, :4],  # one lane in each quadrant, from the address's lane on
    ("64x128b", "warpx2::02_13"): np.stack([_ROWS[:64], _ROWS[:64] + 64]),
    ("64x128b", "warpx2::01_23"): np.stack([_ROWS[:64] // 32 * 64 + _ROWS[:64] % 32 + 32 * i for i in range(2)]),
    ("32x128b", "warpx4"): np.stack([_ROWS[:32] + QUADRANT * i for i in range(4)]),
}
# source format -> data bytes in every 16 of shared memory
_FORMATS: dict[str | None, int] = {None: CHUNK, "b4x16_p64": 8, "b6x16_p32": 12}
SHIFT_COLUMNS = 8  # tcgen05.shift moves 31 rows of 256 bits


@dataclass(frozen=True, slots=True)
class CopyOp:
    """One tcgen05.cp as issued.

    shape: 128x256b, 128x128b, 4x256b, 64x128b or 32x128b; taddr: TMEM address; s_desc: 64-bit matrix descriptor of
    the source (K-major; rows of 16 or 32 bytes); multicast: warpx2::02_13, warpx2::01_23, warpx4 or None;
    src_format: b4x16_p64, b6x16_p32 (decompressed to bytes) or None; rank: cluster rank of the issuing CTA.
    """

    shape: str
    taddr: int
    s_desc: int
    cta_group: int = 1
    multicast: str | None = None
    src_format: str | None = None
    rank: int = 0


@lru_cache(maxsize=1024)
def _plan(op: CopyOp) -> tuple[SharedRead, np.ndarray, int, int]:
    """The source's chunks, the flat TMEM cells [copies, rows, columns] they go to, and the span of columns."""
    lanes = _LANES.get((op.shape, op.multicast))
    if lanes is None:
        known = ", ".join(f".{s}" + (f".{m}" if m else "") for s, m in _LANES)
        raise VirtualGpuError("descriptor", f"tcgen05.cp.{op.shape} with multicast {op.multicast}; allowed: {known}")
    if op.src_format not in _FORMATS:
        raise VirtualGpuError("unsupported", f"tcgen05.cp source format {op.src_format}")
    if op.cta_group not in (1, 2):
        raise VirtualGpuError("descriptor", f"cta_group::{op.cta_group}; it must be 1 or 2")
    columns = 8 if op.shape.endswith("256b") else 4
    first = tuple(range(QUADRANT)) if op.shape == "4x256b" else (0,)
    lane, column = tmem_span(op.taddr, columns, f"tcgen05.cp.{op.shape}", first)
    offsets = chunk_offsets(SmemDescriptor.decode(op.s_desc), lanes.shape[1], columns * 4 // CHUNK)
    read = SharedRead(f"source of tcgen05.cp.{op.shape}", offsets, _FORMATS[op.src_format])
    return read, flat_cells(lane + lanes[:, :, None], column + np.arange(columns)), column, column + columns


@lru_cache(maxsize=256)
def _joint_plan(ops: tuple[CopyOp, ...]) -> tuple[SharedRead, np.ndarray, tuple[tuple[int, int], ...]] | None:
    """The plans of several copies as one, or None where two of them write the same columns."""
    reads, cells, lows, highs = zip(*(_plan(op) for op in ops), strict=True)
    spans = sorted(zip(lows, highs, strict=True))
    if any(a[1] > b[0] for a, b in zip(spans, spans[1:], strict=False)):
        return None
    offsets = np.stack([r.offsets for r in reads])
    return SharedRead(reads[0].what, offsets, reads[0].data_bytes), np.stack(cells, axis=1), tuple(spans)


def execute_copies(ops: Sequence[CopyOp], smems: Sequence[SharedMemory], tmems: Sequence[TensorMemory]) -> None:
    """Perform tcgen05.cp instructions of one shape, format and cta_group, in order.

    smems, tmems: those of the issuing CTA, or with cta_group 2 of the pair, even rank first; each CTA copies from its
    own shared memory to its own TMEM [inferred: the scale factors of A differ by CTA]. Raises VirtualGpuError as
    SharedRead.gather does, `tensor memory` for columns that do not exist or are not allocated.
    """
    plan = _joint_plan(tuple(ops))
    if plan is None:
        for op in ops:
            execute_copies([op], smems, tmems)
        return
    read, cells, spans = plan
    if not len(smems) == len(tmems) == ops[0].cta_group:
        raise ValueError(f"smems, tmems: {len(smems)} and {len(tmems)}; cta_group::{ops[0].cta_group} needs "
                         f"{ops[0].cta_group} of each")
    for smem, tmem in zip(smems, tmems, strict=True):
        for lo, hi in spans:
            require_allocated(tmem, lo, hi, f"tcgen05.cp.{ops[0].shape}")
        raw = read.gather(smem)
        if ops[0].src_format is not None:
            raw = decompress(raw, ops[0].src_format)
        tmem.cells.reshape(-1)[cells] = raw.view(np.uint32)
        tmem.written.reshape(-1)[cells] = True


def execute_copy(op: CopyOp, smems: Sequence[SharedMemory], tmems: Sequence[TensorMemory]) -> None:
    """Perform one tcgen05.cp; see `execute_copies`."""
    execute_copies([op], smems, tmems)


def decompress(raw: np.ndarray, src_format: str) -> np.ndarray:
    """16 packed elements at the start of every 16 bytes -> one element a byte (PTX ISA 9.7.16.9.1).

    uint8[..., 16 n] -> the same shape. A 6-bit element goes to bits 5:0, a 4-bit element to bits 5:2 of its byte: the
    form kind::mxf8f6f4 expects of A in TMEM (MMA-Sim; the PTX ISA shows it in figures 195 to 201 only).
    """
    chunks = raw.reshape(*raw.shape[:-1], -1, CHUNK)
    if src_format == "b6x16_p32":
        return unpack_6bit(chunks).reshape(raw.shape)
    nibbles = np.stack([chunks[..., :8] & 15, chunks[..., :8] >> 4], axis=-1)
    return (nibbles << 2).reshape(raw.shape)


def copy_read_ranges(op: CopyOp) -> dict[int, tuple[SharedRead, ...]]:
    """Shared memory that the copy reads: cluster rank -> its source, with span [lo, hi) and chunk offsets."""
    return {rank: (_plan(op)[0],) for rank in pair_ranks(op.rank, op.cta_group)}


def copy_tmem_ranges(op: CopyOp) -> TmemRanges:
    """TMEM columns that the copy writes, in each CTA."""
    _, _, lo, hi = _plan(op)
    return TmemRanges((), ((lo, hi),))


def execute_shift(taddr: int, tmems: Sequence[TensorMemory]) -> None:
    """Perform a tcgen05.shift.down on each TMEM: in the 32 lanes and 8 columns from `taddr` on, every lane but the
    last receives its successor's 32 bytes.

    The shape is 31x256b (PTX ISA 9.7.16.2.3). "Down" is toward lane 0 [CuTeDSL on .ashift: row r becomes row r + 1;
    CUTLASS: cp.4x256b then refreshes the last lane]. Raises `tensor memory` for a lane that is not a multiple of 32
    and for columns that do not exist or are not allocated, `uninitialised` for cells never written.
    """
    lane, column = tmem_span(taddr, SHIFT_COLUMNS, "tcgen05.shift", tuple(range(0, 128, QUADRANT)))
    source = flat_cells(lane + 1 + np.arange(QUADRANT - 1)[:, None], column + np.arange(SHIFT_COLUMNS))
    for tmem in tmems:
        require_allocated(tmem, column, column + SHIFT_COLUMNS, "tcgen05.shift")
        require_cells(tmem, source, "tcgen05.shift")
        flat = tmem.cells.reshape(-1)
        flat[source - COLUMNS] = flat[source]
        tmem.written.reshape(-1)[source - COLUMNS] = True


def shift_tmem_ranges(taddr: int) -> TmemRanges:
    """TMEM columns that tcgen05.shift reads and writes."""
    _, column = tmem_span(taddr, SHIFT_COLUMNS, "tcgen05.shift", tuple(range(0, 128, QUADRANT)))
    return TmemRanges(((column, column + SHIFT_COLUMNS),), ((column, column + SHIFT_COLUMNS),))
