"""The copy engine: tensor copies through a tensor map (TMA) and plain bulk copies, as pure functions.

No scheduling here: each function performs one copy at once. A load returns the bytes that complete_tx credits to the
mbarrier, a store the bytes written to global memory. Coordinates are innermost first, s32, negative ones as Python
ints or as 32-bit patterns. Shared offsets are byte offsets in a CTA's window.

Section numbers are those of PTX ISA 9.4. Marks: [DOC] documented, [measured] on an H200 (tests/probes), [reported]
measured by others on real hardware, [inferred] none of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from .errors import VirtualGpuError
from .memory import CLEAN, GlobalMemory, SharedMemory
from .tensormap import PADDED_BOX, Geometry, TensorMap

TENSOR_ALIGN = 128  # shared address of a tensor copy (CUDA programming guide, table of TMA alignments)
BULK_ALIGN = 16  # addresses and size of a bulk copy (9.7.10.28.4.1)
CHUNK = np.dtype("V16")  # the swizzle moves 16-byte chunks
GRANULE = 16  # bytes; the innermost coordinate is a multiple, and stores clip rows to a multiple [measured]
NAN_FILL = 0x7FF7  # the out-of-bounds NaN, repeated in every 16 bits whatever the type [measured]


class Region(NamedTuple):
    """The part of a box that lies inside the tensor."""

    slices: tuple[slice, ...]  # within the box as `Geometry.shape`
    shape: tuple[int, ...]
    address: int  # of its first byte
    reach: int  # bytes from its first to one past its last


# ---------------------------------------------------------------------------------------------------------------------
# shared memory: spans and swizzle


def check_mode(mode: str) -> None:
    """Raise `unsupported` for an im2col load mode, `unknown instruction` for no load mode at all."""
    if mode in ("tile", "tile::gather4", "tile::scatter4"):
        return
    if mode.startswith("im2col"):
        raise VirtualGpuError("unsupported", f"load mode .{mode}; .tile, .tile::gather4, .tile::scatter4 are modelled")
    raise VirtualGpuError("unknown instruction", f"load mode .{mode}")


def tile_bytes(tm: TensorMap, mode: str = "tile") -> int:
    """Bytes of one copy: those of its box, which are also those credited to the mbarrier [measured]. The gaps of the
    types that have them do not count [inferred from NVIDIA's kernels, which expect so many bytes]."""
    return tm.geometry.tile_bytes * (1 if mode == "tile" else 4)


def shared_bytes(tm: TensorMap, mode: str = "tile") -> int:
    """Bytes of shared memory that one copy spans. Rows narrower than the swizzle lie its width apart; the bytes between
    are not written, but must be there: with less room the hardware stops [measured]."""
    return tm.geometry.shared_bytes * (1 if mode == "tile" else 4)


def touched(tm: TensorMap, offset: int, mode: str = "tile") -> slice | np.ndarray:
    """Index of the shared bytes that one copy at `offset` reads or writes: a slice, or an array if there are gaps."""
    nbytes, g = tile_bytes(tm, mode), tm.geometry
    return slice(offset, offset + nbytes) if g.row_bytes == g.shared_row else _places(tm, offset, nbytes)


def swizzle_offsets(base_offset: int, nbytes: int, swizzle: int, atom: int = 16, row: int = 0) -> np.ndarray:
    """Where the 16-byte chunks of a dense box at shared offset `base_offset` lie: int64[nbytes / 16] byte offsets.

    swizzle: 0, 32, 64 or 128 bytes. The XOR takes absolute address bits: 32: bit 4 ^= bit 7; 64: bits 5-4 ^= bits
    8-7; 128: bits 6-4 ^= bits 9-7 (5.5.7, tables of the swizzling modes and of the base offset). atom: bytes that the
    128-byte swizzle moves as one; 32: bits 6-5 ^= bits 8-7; 64: bit 6 ^= bit 7. row: bytes of one row where they are
    fewer than the swizzle's, else 0; such rows lie `swizzle` bytes apart [measured].
    """
    return base_offset + 16 * _chunk_order(base_offset >> 4 & 63, nbytes >> 4, swizzle, atom, row >> 4)


@lru_cache(maxsize=512)
def _chunk_order(phase: int, count: int, swizzle: int, atom: int = 16, row: int = 0) -> np.ndarray:
    """intp[count]: chunk i of a box goes to chunk order[i] from its start; without `row` also the other way round.

    phase: the start's address in chunks, modulo 64 (1024 bytes, after which every pattern repeats). row: in chunks.
    """
    chunk = np.arange(count, dtype=np.intp)
    if row:
        chunk = chunk // row * (swizzle >> 4) + chunk % row
    chunk += phase
    moved = chunk ^ (chunk >> 3 & swizzle // atom - 1) * (atom >> 4) if swizzle else chunk
    order = moved - phase
    order.setflags(write=False)
    return order


def _order(tm: TensorMap, offset: int, nbytes: int) -> np.ndarray:
    """`_chunk_order` for a box of `tm` (or several, one behind the other)."""
    g = tm.geometry
    row = g.row_bytes >> 4 if g.row_bytes != g.shared_row else 0
    return _chunk_order(offset >> 4 & 63, nbytes >> 4, tm.swizzle, tm.swizzle_atom, row)


def _places(tm: TensorMap, offset: int, nbytes: int) -> np.ndarray:
    """intp[nbytes]: where in shared memory the bytes of a box lie."""
    return ((offset + 16 * _order(tm, offset, nbytes))[:, None] + np.arange(16)).ravel()


def _box_order(tm: TensorMap, array: np.ndarray, offset: int, nbytes: int) -> np.ndarray:
    """uint8[nbytes]: the bytes of `array` (a CTA's data or state) at a box's place, in the order of the box."""
    g = tm.geometry
    part = array[offset:offset + nbytes // g.row_bytes * g.shared_row]
    if not tm.swizzle:
        return part
    return part.view(CHUNK).take(_order(tm, offset, nbytes)).view(np.uint8)


def write_tile(tm: TensorMap, box: np.ndarray, smem: SharedMemory, offset: int) -> int:
    """Write the dense bytes `box` (of `read_tile` or `read_rows`) to shared memory, swizzled; returns their number.

    Raises `misaligned` unless offset is a multiple of 128, `out of bounds`, `mbarrier`.
    """
    nbytes, g = box.size, tm.geometry
    if g.row_bytes != g.shared_row:
        smem.check(offset, nbytes // g.row_bytes * g.shared_row, TENSOR_ALIGN)
        places = _places(tm, offset, nbytes)
        smem.mark_async(places)
        smem.data[places] = box
        return nbytes
    smem.check(offset, nbytes, TENSOR_ALIGN)
    span = slice(offset, offset + nbytes)
    smem.mark_async(span)
    if tm.swizzle:
        box.view(CHUNK).take(_order(tm, offset, nbytes), out=smem.data[span].view(CHUNK), mode="clip")
    else:
        smem.data[span] = box
    return nbytes


# ---------------------------------------------------------------------------------------------------------------------
# global memory: the box and its part inside the tensor


def _inside(tm: TensorMap, g: Geometry, coords: Sequence[int]) -> int | None:
    """Address of the box at `coords` if all of it is inside the tensor, else None (as for coordinates to refuse)."""
    if len(coords) != len(g.last):
        return None
    bits = 0
    for c, last, step in zip(coords, g.last, g.bit_steps, strict=True):
        if not 0 <= c <= last:
            return None
        bits += c * step
    if bits & 127:  # strides are multiples of 16 bytes
        _refuse_start(tm, coords[0])
    return tm.address + (bits >> 3)


def _refuse_start(tm: TensorMap, coordinate: int) -> None:
    raise VirtualGpuError("misaligned", f"coordinate {coordinate} of dimension 0, {coordinate * tm.type.bits / 8:g} "
                          f"bytes from the tensor's start; must be a multiple of {GRANULE} bytes, "
                          f"{8 * GRANULE // tm.type.bits} elements of {tm.type.name}")


def _signed(tm: TensorMap, coords: Sequence[int]) -> list[int]:
    """`coords`, s32 values or their 32-bit patterns, as s32 values. Raises `misaligned` unless the first one is a
    multiple of 16 bytes: the hardware stops with an illegal instruction [measured; for 4-bit elements inferred]."""
    if len(coords) != tm.rank or not all(-2**31 <= c < 2**32 for c in coords):
        raise VirtualGpuError("tensor map", f"coordinates {tuple(coords)}; must be {tm.rank} s32 values")
    out = [c - 2**32 if c >= 2**31 else c for c in coords]
    if out[0] * tm.type.bits % (8 * GRANULE):
        _refuse_start(tm, out[0])
    return out


def _region(tm: TensorMap, g: Geometry, coords: Sequence[int], granule: int = 1) -> Region | None:
    """The part of the box at `coords` (s32) inside the tensor; None when there is none.

    granule: bytes; rows that end inside one are taken up to its end.
    """
    bits, slices, spans = 0, [], 0
    for i, (c, size, n, step) in enumerate(zip(coords, tm.sizes, g.counts, tm.element_strides, strict=True)):
        step = step if i else 1
        low, high = max(0, -(c // step)), min(n, (size - 1 - c) // step + 1)
        if low >= high:
            return None
        bits += (c + low * step) * g.bit_steps[i]
        if i == 0:
            low, high = low * tm.type.bits >> 3, -(-(high * tm.type.bits >> 3) // granule) * granule
            spans += high - low
        else:
            spans += (high - low - 1) * step * tm.strides[i - 1]
        slices.append(slice(low, high))
    slices.reverse()
    return Region(tuple(slices), tuple(s.stop - s.start for s in slices), tm.address + (bits >> 3), spans)


def _view(gmem: GlobalMemory, g: Geometry, address: int, shape: tuple[int, ...], reach: int) -> np.ndarray:
    """uint8 view of a box, or a part of one, in global memory; `out of bounds` unless one known buffer holds it."""
    buffer = gmem.buffer(address, reach)
    return np.ndarray(shape, np.uint8, buffer.data, address - buffer.base, g.strides)


def read_tile(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory) -> np.ndarray:
    """uint8: the box at `coords`, row after row, dimension 0 fastest; elements outside the tensor are filled.

    tf32 elements are rounded to nearest even, NaN to 0x7fffe000, before the fill; no type's subnormals are flushed,
    those of f32.ftz and tf32.ftz neither [measured]. The types with gaps are spread out, the gaps filled with 0xff
    (uninitialised: 5.5.1.1.1).
    """
    if tm.type.chunk_data == 16:
        return _packed_tile(tm, coords, gmem)
    if coords[0] % PADDED_BOX:
        raise VirtualGpuError("misaligned", f"coordinate {coords[0]} of dimension 0; must be a multiple of "
                              f"{PADDED_BOX} for type {tm.type.name}")
    packed = _packed_tile(tm, coords, gmem).reshape(-1, tm.type.chunk_data)
    box = np.full((len(packed), 16), 0xFF, np.uint8)
    box[:, :tm.type.chunk_data] = packed
    return box.reshape(-1)


def _packed_tile(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory) -> np.ndarray:
    """uint8: `read_tile` without gaps, as the box lies in global memory."""
    g = tm.geometry
    address = _inside(tm, g, coords)
    if address is not None:
        box = _view(gmem, g, address, g.shape, g.reach).flatten()
        return _round_tf32(box) if tm.type.tf32 else box
    box = np.full(prod(g.shape) >> 1, NAN_FILL if tm.fill_nan else 0, np.uint16).view(np.uint8).reshape(g.shape)
    region = _region(tm, g, _signed(tm, coords))
    if region is not None:
        part = _view(gmem, g, region.address, region.shape, region.reach)
        box[region.slices] = _round_tf32(part.flatten()).reshape(region.shape) if tm.type.tf32 else part
    return box.reshape(-1)


def read_rows(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory) -> np.ndarray:
    """uint8[tile_bytes(tm, "tile::gather4")]: four rows of a 2-D tensor.

    coords: the column, then the four rows, the order that the syntax table of 9.7.10.28.5.3 and CUTLASS use (5.5.3.4
    has the two dimensions the other way round).
    """
    return np.concatenate([read_tile(tm, part, gmem) for part in _four_rows(tm, coords)])


def _four_rows(tm: TensorMap, coords: Sequence[int]) -> list[tuple[int, int]]:
    if tm.rank != 2 or tm.box[1] != 1:
        raise VirtualGpuError("tensor map", f"rank {tm.rank}, box {tm.box} with .tile::gather4 or .tile::scatter4; "
                              "must be rank 2 with a box of one row (5.5.3.4)")
    if len(coords) != 5:
        raise VirtualGpuError("tensor map", f"{len(coords)} coordinates for four rows; must be the column and 4 rows")
    return [(coords[0], row) for row in coords[1:]]


def _round_tf32(box: np.ndarray) -> np.ndarray:
    """uint8 bytes of float32 values, rounded to the 10 mantissa bits of tf32."""
    bits = box.view(np.uint32)
    rounded = bits + (0xFFF + (bits >> 13 & 1)) & 0xFFFFE000
    return np.where(bits & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFE000), rounded).astype(np.uint32).view(np.uint8)


# ---------------------------------------------------------------------------------------------------------------------
# tensor copies


def load_tile(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory, smem: SharedMemory, offset: int) -> int:
    """cp.async.bulk.tensor global → shared, .tile: the box at `coords` to shared `offset`; returns the box's bytes.

    Elements outside the tensor are filled and counted [measured]. Raises `out of bounds` when the part inside the
    tensor is not in one known buffer, `misaligned`, `mbarrier`.
    """
    write_tile(tm, read_tile(tm, coords, gmem), smem, offset)
    return tile_bytes(tm)


def load_tile_multicast(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory, smems: Sequence[SharedMemory],
                        offset: int) -> int:
    """As `load_tile`, to the same offset of several CTAs; returns the bytes that each CTA gets."""
    return _multicast(tm, read_tile(tm, coords, gmem), smems, offset)


def gather4(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory, smem: SharedMemory, offset: int) -> int:
    """cp.async.bulk.tensor.2d, .tile::gather4: rows coords[1:5] from column coords[0], one below the other."""
    write_tile(tm, read_rows(tm, coords, gmem), smem, offset)
    return tile_bytes(tm, "tile::gather4")


def gather4_multicast(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory, smems: Sequence[SharedMemory],
                      offset: int) -> int:
    """As `gather4`, to the same offset of several CTAs; returns the bytes that each CTA gets."""
    return _multicast(tm, read_rows(tm, coords, gmem), smems, offset)


def _multicast(tm: TensorMap, box: np.ndarray, smems: Sequence[SharedMemory], offset: int) -> int:
    for smem in smems:
        write_tile(tm, box, smem, offset)
    return box.size * tm.type.chunk_data // 16


def store_tile(tm: TensorMap, coords: Sequence[int], smem: SharedMemory, offset: int, gmem: GlobalMemory) -> int:
    """cp.async.bulk.tensor shared → global, .tile; returns the bytes written to global memory.

    Elements outside the tensor are dropped (CUDA programming guide), their shared bytes not read [inferred]. But a row
    is clipped to whole granules of 16 bytes: one that ends inside a granule is written up to the granule's end, past
    the tensor [measured]; those bytes count as written, and must be in the buffer. tf32 is stored as it is [inferred].
    Coordinates must not be negative (9.7.10.28.5.1, restrictions of the .global.shared::cta direction; the hardware
    stops [measured]). Raises `tensor map` for one that is, `misaligned`, `out of bounds`, `uninitialised`, `proxy
    fence`.
    """
    g = tm.geometry
    address = _inside(tm, g, coords)
    if address is None or g.row_bytes != g.shared_row or tm.type.chunk_data != 16:
        return _store_parts(tm, [coords], smem, offset, gmem)
    smem.check(offset, g.tile_bytes, TENSOR_ALIGN)
    smem.require_async_visible(slice(offset, offset + g.tile_bytes), "a TMA store")
    box = _box_order(tm, smem.data, offset, g.tile_bytes)
    _view(gmem, g, address, g.shape, g.reach)[...] = box.reshape(g.shape)
    return g.tile_bytes


def scatter4(tm: TensorMap, coords: Sequence[int], smem: SharedMemory, offset: int, gmem: GlobalMemory) -> int:
    """cp.async.bulk.tensor.2d, .tile::scatter4: four rows to rows coords[1:5] from column coords[0] on.

    As `store_tile`; negative coordinates are refused too (allowed on sm_107f only, 9.7.10.28.5.1).
    """
    return _store_parts(tm, _four_rows(tm, coords), smem, offset, gmem)


def reduce_tile(tm: TensorMap, coords: Sequence[int], smem: SharedMemory, offset: int, gmem: GlobalMemory,
                op: str) -> int:
    """cp.reduce.async.bulk.tensor, .tile: global = global `op` shared; returns the bytes reduced.

    op: add, min, max, inc, dec, and, or, xor, on the map's element type (9.7.10.28.5.4). f32 keeps subnormals, f32.ftz
    flushes them [measured]. Raises as `store_tile`, and `unsupported` for a pair of op and type
    that the instruction lacks, or a box whose elements overlap in memory.
    """
    kind = _tensor_kind(op, tm.type.name)
    width = np.dtype(_UNSIGNED[kind])

    def combine(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        pair = (np.ascontiguousarray(a).view(width) for a in (old, new))
        return _combine(op, kind, *pair, flush=tm.type.name == "f32.ftz").view(np.uint8)

    return _store_parts(tm, [coords], smem, offset, gmem, combine)


def _store_parts(tm: TensorMap, parts: Sequence[Sequence[int]], smem: SharedMemory, offset: int, gmem: GlobalMemory,
                 combine=None) -> int:
    """Store boxes that follow each other in shared memory, each clipped to the tensor; combine(old, new): reduce."""
    g = tm.geometry
    if tm.type.chunk_data != 16:
        raise VirtualGpuError("tensor map", f"a store of type {tm.type.name}; types with gaps are for loads only")
    nbytes = g.tile_bytes * len(parts)
    smem.check(offset, g.shared_bytes * len(parts), TENSOR_ALIGN)
    data = _box_order(tm, smem.data, offset, nbytes).reshape(len(parts), *g.shape)
    state = _box_order(tm, smem.state, offset, nbytes).reshape(data.shape)
    written = 0
    for k, coords in enumerate(parts):
        signed = _signed(tm, coords)
        if min(signed) < 0:
            raise VirtualGpuError("tensor map", f"coordinates {tuple(signed)} of a store; must not be negative")
        region = _region(tm, g, signed, GRANULE)
        if region is None:
            continue
        if (state[k][region.slices] != CLEAN).any():
            where = _places(tm, offset, nbytes).reshape(data.shape)
            smem.require_async_visible(where[k][region.slices].ravel(), "a TMA store")
        view = _view(gmem, g, region.address, region.shape, region.reach)
        if combine is not None:
            _check_apart(region.shape, g.strides)
        view[...] = data[k][region.slices] if combine is None else combine(view, data[k][region.slices])
        written += view.size
    return written


def _check_apart(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """`unsupported` if rows of the box can overlap in memory: the order of their reductions would matter."""
    extent = shape[-1]
    for stride, n in sorted(zip(strides[:-1], shape[:-1], strict=True)):
        if n > 1 and stride < extent:
            raise VirtualGpuError("unsupported", f"a tensor reduction whose box overlaps itself: stride {stride} bytes "
                                  f"over {extent} bytes")
        extent += (n - 1) * stride


def prefetch_tile(tm: TensorMap, coords: Sequence[int], gmem: GlobalMemory, mode: str = "tile") -> None:
    """cp.async.bulk.prefetch.tensor: no effect; the addressed part must be in a known buffer all the same."""
    check_mode(mode)
    for part in _four_rows(tm, coords) if mode == "tile::gather4" else [coords]:
        region = _region(tm, tm.geometry, _signed(tm, part))
        if region is not None:
            gmem.buffer(region.address, region.reach)


# ---------------------------------------------------------------------------------------------------------------------
# bulk copies


def _check_size(size: int) -> None:
    if size % BULK_ALIGN:
        raise VirtualGpuError("misaligned", f"bulk copy of {size} bytes; must be a multiple of {BULK_ALIGN}")


def bulk_load(gmem: GlobalMemory, address: int, smem: SharedMemory, offset: int, size: int) -> int:
    """cp.async.bulk global → shared (9.7.10.28.4.1); returns `size`, the bytes credited to the mbarrier."""
    return bulk_load_multicast(gmem, address, (smem,), offset, size)


def bulk_load_multicast(gmem: GlobalMemory, address: int, smems: Sequence[SharedMemory], offset: int,
                        size: int) -> int:
    """As `bulk_load`, to the same offset of several CTAs; returns the bytes that each CTA gets."""
    _check_size(size)
    gmem.check(address, size, BULK_ALIGN)
    source = gmem.view(address, size)
    for smem in smems:
        _put_shared(smem, offset, source)
    return size


def _put_shared(smem: SharedMemory, offset: int, source: np.ndarray) -> None:
    smem.check(offset, source.size, BULK_ALIGN)
    span = slice(offset, offset + source.size)
    smem.mark_async(span)
    smem.data[span] = source


def _get_shared(smem: SharedMemory, offset: int, size: int, what: str) -> np.ndarray:
    smem.check(offset, size, BULK_ALIGN)
    span = slice(offset, offset + size)
    smem.require_async_visible(span, what)
    return smem.data[span]


def bulk_store(smem: SharedMemory, offset: int, gmem: GlobalMemory, address: int, size: int,
               byte_mask: int | None = None) -> int:
    """cp.async.bulk shared → global; returns the bytes written.

    byte_mask (.cp_mask): bit i says whether byte i of every 16 is copied; bytes that are not are not read either.
    """
    _check_size(size)
    gmem.check(address, size, BULK_ALIGN)
    target = gmem.view(address, size)
    if byte_mask is None:
        target[:] = _get_shared(smem, offset, size, "a bulk store")
        return size
    smem.check(offset, size, BULK_ALIGN)
    picked = np.flatnonzero(byte_mask >> np.arange(16) & 1)
    index = (np.arange(offset, offset + size, 16)[:, None] + picked).ravel()
    smem.require_async_visible(index, "a bulk store")
    target.reshape(-1, 16)[:, picked] = smem.data[index].reshape(size // 16, picked.size)
    return index.size


def bulk_shared_to_shared(src_smem: SharedMemory, src: int, dst_smem: SharedMemory, dst: int, size: int) -> int:
    """cp.async.bulk shared::cta → shared::cluster; returns `size`, the bytes credited to the mbarrier.

    Raises `unsupported` when both are the same CTA: the destination has to be another one (9.7.10.28.4.1).
    """
    _check_size(size)
    _check_other(src_smem, dst_smem)
    _put_shared(dst_smem, dst, _get_shared(src_smem, src, size, "a bulk copy"))
    return size


def _check_other(src_smem: SharedMemory, dst_smem: SharedMemory) -> None:
    if src_smem is dst_smem:
        raise VirtualGpuError("unsupported", "a bulk copy from shared::cta to the same CTA; the destination must be "
                              "another CTA of the cluster")


def bulk_reduce(op: str, kind: str, smem: SharedMemory, offset: int, gmem: GlobalMemory, address: int, size: int, *,
                noftz: bool = False) -> int:
    """cp.reduce.async.bulk shared → global: global = global `op` shared; returns the bytes reduced.

    kind: the type without its dot. add on f16 and bf16 needs .noftz, rounds to nearest even and keeps subnormals; add
    on f32 keeps them without it, too [measured] (9.7.10.28.4.2 of PTX ISA 9.4; up to 9.3 the text says otherwise).
    Raises `unsupported` for another pair of op and kind.
    """
    if kind not in _GLOBAL_KINDS.get(op, ()):
        raise VirtualGpuError("unsupported", f"cp.reduce.async.bulk.global.{op}.{kind}: no such pair")
    if noftz and (op, kind) not in (("add", "f16"), ("add", "bf16"), ("add", "f32")):
        raise VirtualGpuError("unsupported", f".noftz with {op}.{kind}; it goes with add on f16, bf16 and f32")
    if op == "add" and kind in ("f16", "bf16") and not noftz:
        raise VirtualGpuError("unsupported", f"cp.reduce.async.bulk.add.{kind} without .noftz, which it requires")
    _check_size(size)
    gmem.check(address, size, BULK_ALIGN)
    target = gmem.view(address, size)
    source = _get_shared(smem, offset, size, "a bulk reduction")
    width = np.dtype(_UNSIGNED[kind])
    result = _combine(op, kind, target.view(width), source.view(width))
    target[:] = result.view(np.uint8)
    return size


def bulk_reduce_shared(op: str, kind: str, src_smem: SharedMemory, src: int, dst_smem: SharedMemory, dst: int,
                       size: int) -> int:
    """cp.reduce.async.bulk shared::cta → shared::cluster; returns `size`, the bytes credited to the mbarrier."""
    if kind not in _SHARED_KINDS.get(op, ()):
        raise VirtualGpuError("unsupported", f"cp.reduce.async.bulk.shared::cluster.{op}.{kind}: no such pair")
    _check_size(size)
    _check_other(src_smem, dst_smem)
    width = np.dtype(_UNSIGNED[kind])
    new = _get_shared(src_smem, src, size, "a bulk reduction").view(width)
    old = _get_shared(dst_smem, dst, size, "a bulk reduction").view(width)
    _put_shared(dst_smem, dst, _combine(op, kind, old, new).view(np.uint8))
    return size


def bulk_prefetch(gmem: GlobalMemory, address: int, size: int) -> None:
    """cp.async.bulk.prefetch.L2: no effect; alignment, size and bounds are checked all the same."""
    _check_size(size)
    gmem.check(address, size, BULK_ALIGN)


# ---------------------------------------------------------------------------------------------------------------------
# reductions

_UNSIGNED = {"u32": "u4", "s32": "u4", "b32": "u4", "u64": "u8", "s64": "u8", "b64": "u8", "f16": "u2", "bf16": "u2",
             "f32": "u4", "f64": "u8"}
_INTEGERS = {"u32": "u4", "s32": "i4", "u64": "u8", "s64": "i8"}
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_GLOBAL_KINDS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"), "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",), "dec": ("u32",), "and": ("b32", "b64"), "or": ("b32", "b64"), "xor": ("b32", "b64")}
_SHARED_KINDS = {
    "add": ("u32", "s32", "u64"), "min": ("u32", "s32"), "max": ("u32", "s32"), "inc": ("u32",), "dec": ("u32",),
    "and": ("b32",), "or": ("b32",), "xor": ("b32",)}
_BIT_KINDS = {"u32": "b32", "s32": "b32", "u64": "b64", "s64": "b64"}


def _tensor_kind(op: str, name: str) -> str:
    """The kind that a tensor reduction `op` uses for the map's element type, or `unsupported`."""
    kind = _BIT_KINDS.get(name, name) if op in _BITWISE else name.removesuffix(".ftz")
    if kind not in _GLOBAL_KINDS.get(op, ()) or kind == "f64":
        raise VirtualGpuError("unsupported", f"cp.reduce.async.bulk.tensor.{op} on element type {name}: no such pair")
    return kind


def _combine(op: str, kind: str, old: np.ndarray, new: np.ndarray, flush: bool = False) -> np.ndarray:
    """old `op` new, element by element, on bit patterns (unsigned, of the kind's width)."""
    if op in _BITWISE:
        return _BITWISE[op](old, new)
    if op == "inc":
        return np.where(old >= new, np.uint32(0), old + np.uint32(1))
    if op == "dec":
        return np.where((old == 0) | (old > new), new, old - np.uint32(1))
    if kind in _INTEGERS:
        if op == "add":
            return old + new
        signed = np.dtype(_INTEGERS[kind])
        pick = np.minimum if op == "min" else np.maximum
        return pick(old.view(signed), new.view(signed)).view(old.dtype)
    if op == "add":
        return _add_floats(kind, old, new, flush)
    return _pick_halves(op, kind, old, new)


def _add_floats(kind: str, old: np.ndarray, new: np.ndarray, flush: bool) -> np.ndarray:
    """Sum rounded to nearest even. NaN results are the canonical NaN [measured for f16, bf16, f32]."""
    with np.errstate(all="ignore"):
        if kind == "f64":
            return (old.view(np.float64) + new.view(np.float64)).view(np.uint64)
        if kind == "f32":
            if flush:
                old, new = _flush(old), _flush(new)
            total = (old.view(np.float32) + new.view(np.float32)).view(np.uint32)
            total = np.where(total & 0x7FFFFFFF > 0x7F800000, np.uint32(0x7FFFFFFF), total)
            return _flush(total) if flush else total
        if kind == "f16":
            total = (old.view(np.float16) + new.view(np.float16)).view(np.uint16)
            return np.where(total & 0x7FFF > 0x7C00, np.uint16(0x7FFF), total)
        # float32 has more than 2 · 8 + 2 bits: rounding the sum twice is rounding it once
        wide = [(a.astype(np.uint32) << 16).view(np.float32) for a in (old, new)]
        total = (wide[0] + wide[1]).view(np.uint32)
    rounded = (total + (0x7FFF + (total >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(total & 0x7FFFFFFF > 0x7F800000, np.uint16(0x7FFF), rounded)


def _flush(bits: np.ndarray) -> np.ndarray:
    """float32 bits with subnormals replaced by zero of the same sign."""
    return np.where(bits & 0x7F800000 == 0, bits & 0x80000000, bits).astype(np.uint32)


def _pick_halves(op: str, kind: str, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """min or max of f16 or bf16, as PTX's min and max: a NaN loses, -0 is less than +0 [measured]."""
    infinity = 0x7C00 if kind == "f16" else 0x7F80
    nan_old, nan_new = (a & 0x7FFF > infinity for a in (old, new))
    key_old, key_new = (np.where(a >> 15, ~a, a | 0x8000) for a in (old, new))
    take_new = key_new < key_old if op == "min" else key_new > key_old
    picked = np.where(take_new, new, old)
    picked = np.where(nan_old, new, np.where(nan_new, old, picked))
    return np.where(nan_old & nan_new, np.uint16(0x7FFF), picked)
