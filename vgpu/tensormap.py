"""The 128-byte tensor map: decoding, encoding, and `tensormap.replace`.

The layout was read off maps that the CUDA driver encoded (580.159.04 on an H200, tests/data/tensormap_samples.json)
and maps that CuTeDSL's host code built; it is not documented. Only the first 64 bytes matter: the driver keeps
figures of its own in the rest, CuTeDSL leaves it unset. The constraints are those of cuTensorMapEncodeTiled (CUDA
driver API, "Tensor Map Object Management") and of PTX ISA 9.4, 9.7.10.28.5.1.

Dimensions are innermost first, as in PTX: dimension 0 is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from .errors import VirtualGpuError

MAP_BYTES = 128  # size of a tensor map
HEAD_BYTES = 64  # the bytes that describe the tensor
MAX_TILE_BYTES = 232448  # most dynamic shared memory of a CTA on sm_90 and sm_100; a larger box is refused [inferred:
# the driver refused 262144 bytes and took 32768]


class ElementType(NamedTuple):
    """A tensor map's element type."""

    name: str  # PTX name
    driver: int  # CUtensorMapDataType
    replace: int  # operand of tensormap.replace.elemtype (PTX ISA 9.4, table 36)
    code: int  # the map's type field
    tf32: bool  # the map's tf32 bit
    bits: int
    floating: bool
    chunk_data: int = 16  # bytes of data in every 16 of shared memory; the rest is a gap (PTX ISA 5.5.1.1.1)


ELEMENT_TYPES = (
    ElementType("u8", 0, 0, 0, False, 8, False),
    ElementType("u16", 1, 1, 1, False, 16, False),
    ElementType("u32", 2, 2, 2, False, 32, False),
    ElementType("s32", 3, 3, 3, False, 32, False),
    ElementType("u64", 4, 4, 4, False, 64, False),
    ElementType("s64", 5, 5, 5, False, 64, False),
    ElementType("f16", 6, 6, 6, False, 16, True),
    ElementType("f32", 7, 7, 7, False, 32, True),
    ElementType("f64", 8, 9, 9, False, 64, True),
    ElementType("bf16", 9, 10, 10, False, 16, True),
    ElementType("f32.ftz", 10, 8, 8, False, 32, True),
    ElementType("tf32", 11, 11, 7, True, 32, True),
    ElementType("tf32.ftz", 12, 12, 8, True, 32, True),
    ElementType("b4x16", 13, 13, 11, False, 4, False),
    ElementType("b4x16_p64", 14, 14, 12, False, 4, False, 8),
    ElementType("b6x16_p32", 15, 15, 13, False, 6, False, 12),
)
TYPE_BY_NAME = {t.name: t for t in ELEMENT_TYPES}
_TYPE_BY_CODE = {(t.code, t.tf32): t for t in ELEMENT_TYPES}
_TYPE_BY_DRIVER = {t.driver: t for t in ELEMENT_TYPES}
_TYPE_BY_REPLACE = {t.replace: t for t in ELEMENT_TYPES}
PADDED_BOX = 128  # elements of dimension 0 of the types with gaps: the box; size and coordinate are multiples of it

INTERLEAVES = (0, 16, 32)  # bytes, by code
SWIZZLES = (0, 32, 64, 128)  # bytes, by code
SWIZZLE_ATOMS = (16, 32, None, 64)  # bytes, by code: 32 as CuTeDSL's host code writes it [measured], 64 by the numbers
# of tensormap.replace.swizzle_atomicity [inferred]; 2 there, 32 bytes with 8-byte halves flipped, is not modelled
PROMOTIONS = (0, 64, 128, 256)  # bytes, by code
_SWIZZLE_OF_DRIVER = {0: (0, 16), 1: (32, 16), 2: (64, 16), 3: (128, 16), 4: (128, 32), 6: (128, 64)}  # (bytes, atom)


class Field(NamedTuple):
    """Bits [low, low + width) of a map read as one little-endian integer."""

    low: int
    width: int

    def get(self, bits: int) -> int:
        return bits >> self.low & (1 << self.width) - 1

    def put(self, bits: int, value: int) -> int:
        mask = (1 << self.width) - 1 << self.low
        return bits & ~mask | value << self.low & mask


_ADDRESS = Field(0, 64)
_MAKER = Field(64, 4)  # 0 from the driver, 2 from CuTeDSL
_RANK = Field(68, 3)
_TYPE = Field(71, 4)
_INTERLEAVE = Field(75, 2)
_SWIZZLE = Field(77, 2)
_FILL = Field(79, 1)
_TF32 = Field(80, 1)
_PROMOTION = Field(81, 2)
_ATOM = Field(83, 2)
_WINDOW = Field(85, 1)  # a hint: 128 KiB of mapped memory follow the address
_STRIDE_LOW = tuple(Field(96 + 32 * i, 32) for i in range(4))  # of dimension i + 1, in units of 16 bytes
_STRIDE_HIGH = tuple(Field(224 + 4 * i, 4) for i in range(4))
_SIZE = tuple(Field(256 + 32 * i, 32) for i in range(5))
_STEP = tuple(Field(416 + 3 * i, 3) for i in range(5))
_BOX = tuple(Field(440 + 8 * i, 8) for i in range(5))
_FIELDS = (_ADDRESS, _MAKER, _RANK, _TYPE, _INTERLEAVE, _SWIZZLE, _FILL, _TF32, _PROMOTION, _ATOM, _WINDOW,
           *_STRIDE_LOW, *_STRIDE_HIGH, *_SIZE, *_STEP, *_BOX)
_KNOWN_BITS = sum((1 << f.width) - 1 << f.low for f in _FIELDS)


class Geometry(NamedTuple):
    """One box of a map, in the terms a copy needs.

    shape and strides describe the box in global memory as an array of bytes, outermost dimension first, the last one
    the bytes of a row; reach is the distance in bytes from its first byte to one past its last; last holds per
    dimension (innermost first) the largest coordinate with which the box is inside the tensor; bit_steps per dimension
    the distance of neighbouring elements, in bits. tile_bytes: the box without gaps, as the mbarrier is
    credited; row_bytes: a row with the gaps of its type, as it lies in shared memory; shared_row: from one row to
    the next in shared memory, the swizzle's width where there is one [measured: H200]; shared_bytes: all its rows.
    """

    counts: tuple[int, ...]
    row_bytes: int
    tile_bytes: int
    shared_row: int
    shared_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    reach: int
    last: tuple[int, ...]
    bit_steps: tuple[int, ...]


@dataclass(frozen=True)
class TensorMap:
    """A decoded tensor map in tile mode.

    sizes and box in elements, strides in bytes of dimensions 1 and up, element_strides the traversal strides in
    elements (PTX ISA 5.5.3.2); interleave, swizzle and l2_promotion in bytes, 0 for none; fill_nan: elements outside
    the tensor become NaN instead of zero; swizzle_atom: bytes that the 128-byte swizzle moves as one (PTX ISA 5.5.7).
    """

    address: int
    type: ElementType
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    fill_nan: bool = False
    swizzle_atom: int = 16

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @cached_property
    def geometry(self) -> Geometry:
        """The box's shape in memory. Raises VirtualGpuError `unsupported` for an interleaved layout.

        Along dimension i > 0 a box holds ceil(box / element stride) elements; the element stride of dimension 0 is
        ignored (CUDA driver API, cuTensorMapEncodeTiled).
        """
        if self.interleave:
            raise VirtualGpuError("unsupported", f"a tensor map of {self.interleave}-byte interleave; only maps "
                                  "without interleave are modelled")
        steps = (1, *self.element_strides[1:])
        counts = tuple(-(-b // s) for b, s in zip(self.box, steps, strict=True))
        packed, rows = self.box[0] * self.type.bits // 8, prod(counts[1:])
        row_bytes = packed * 16 // self.type.chunk_data
        shared_row = max(row_bytes, self.swizzle)
        outer = [stride * step for stride, step in zip(self.strides, steps[1:], strict=True)]
        spans = [(n - 1) * stride for n, stride in zip(counts[1:], outer, strict=True)]
        last = tuple(min(size - 1 - (n - 1) * step, 2**31 - 1)
                     for size, n, step in zip(self.sizes, counts, steps, strict=True))
        return Geometry(
            counts=counts, row_bytes=row_bytes, tile_bytes=packed * rows, shared_row=shared_row,
            shared_bytes=shared_row * rows, shape=(*counts[:0:-1], packed), strides=(*outer[::-1], 1),
            reach=sum(spans) + packed, last=last,
            bit_steps=(self.type.bits, *(8 * stride for stride in self.strides)))


def _refuse(field: str, value, allowed: str) -> None:
    raise VirtualGpuError("tensor map", f"{field}: {value}; must be {allowed}")


def check(tm: TensorMap) -> TensorMap:
    """Raise VirtualGpuError `tensor map`, naming the field, unless `tm` meets the host constraints; returns `tm`."""
    _check_lengths(tm)
    _check_memory(tm)
    _check_box(tm)
    if tm.fill_nan and not tm.type.floating:
        _refuse("out-of-bounds fill", f"NaN with element type {tm.type.name}", "zero unless the type is a float's")
    return tm


def _check_lengths(tm: TensorMap) -> None:
    if not 1 <= tm.rank <= 5:
        _refuse("rank", tm.rank, "1 to 5")
    if tm.interleave and tm.rank < 3:
        _refuse("rank", f"{tm.rank} with {tm.interleave}-byte interleave", "3 to 5")
    for field, values, length in (("strides", tm.strides, tm.rank - 1), ("box", tm.box, tm.rank),
                                  ("element strides", tm.element_strides, tm.rank)):
        if len(values) != length:
            _refuse(field, f"{len(values)} of them for rank {tm.rank}", f"{length} of them")
    for field, value, allowed in (("interleave", tm.interleave, INTERLEAVES), ("swizzle", tm.swizzle, SWIZZLES),
                                  ("L2 promotion", tm.l2_promotion, PROMOTIONS),
                                  ("swizzle atom", tm.swizzle_atom, (16, 32, 64) if tm.swizzle == 128 else (16,))):
        if value not in allowed:
            _refuse(field, f"{value} bytes", f"one of {', '.join(map(str, allowed))}")


def _check_memory(tm: TensorMap) -> None:
    padded = tm.type.chunk_data != 16
    align = 32 if tm.interleave == 32 or padded else 16
    if tm.address % align or not 0 <= tm.address < 2**64:
        _refuse("global address", f"{tm.address:#x}", f"a 64-bit multiple of {align}")
    for i, size in enumerate(tm.sizes):
        if not 1 <= size <= 2**32:
            _refuse(f"size of dimension {i}", size, "1 to 2**32")
    if padded and tm.sizes[0] % PADDED_BOX:
        _refuse("size of dimension 0", f"{tm.sizes[0]} of type {tm.type.name}", f"a multiple of {PADDED_BOX}")
    if tm.type.bits == 4 and tm.sizes[0] % 2:
        _refuse("size of dimension 0", f"{tm.sizes[0]} of packed 4-bit elements", "even")
    for i, stride in enumerate(tm.strides, 1):
        if stride % align or not 0 <= stride < 2**40:
            _refuse(f"stride of dimension {i}", f"{stride} bytes", f"a multiple of {align} below 2**40")


def _check_box(tm: TensorMap) -> None:
    for i, (box, step) in enumerate(zip(tm.box, tm.element_strides, strict=True)):
        if not 1 <= box <= 256:
            _refuse(f"box of dimension {i}", box, "1 to 256")
        if not 1 <= step <= 8:
            _refuse(f"element stride of dimension {i}", step, "1 to 8")
    if tm.interleave:
        return
    if tm.type.chunk_data != 16:
        if tm.box[0] != PADDED_BOX:
            _refuse("box of dimension 0", f"{tm.box[0]} of type {tm.type.name}", str(PADDED_BOX))
        if tm.swizzle not in (0, 128) or tm.swizzle_atom > 32:
            _refuse("swizzle", f"{tm.swizzle} bytes in atoms of {tm.swizzle_atom}",
                    "none, or 128 bytes in atoms of 16 or 32")
    row = tm.box[0] * tm.type.bits
    if row % 128:
        _refuse("box of dimension 0", f"{tm.box[0]} elements, {row / 8:g} bytes", "a multiple of 16 bytes")
    if tm.swizzle and row > 8 * tm.swizzle:
        _refuse("box of dimension 0", f"{row // 8} bytes", f"at most the {tm.swizzle} bytes of the swizzle")
    if tm.geometry.shared_bytes > MAX_TILE_BYTES:
        _refuse("box", f"{tm.geometry.shared_bytes} bytes", f"at most {MAX_TILE_BYTES} bytes of shared memory")


def decode(data, address: int | None = None) -> TensorMap:
    """The tensor map in `data`, 64 or more bytes; decoded maps are cached by their first 64 bytes.

    address: where the map lies; checked for its 64-byte alignment when given.
    Raises VirtualGpuError `misaligned` (address), `tensor map` (a field outside its range or unknown), `unsupported`
    (bits set whose meaning is not known, such as those of an im2col map; a swizzle with flipped 8-byte halves).
    """
    if address is not None and address % 64:
        raise VirtualGpuError("misaligned", f"tensor map at {address:#x}; must be a multiple of 64")
    return _decode(bytes(data[:HEAD_BYTES]))


@lru_cache(maxsize=4096)
def _decode(head: bytes) -> TensorMap:
    if len(head) < HEAD_BYTES:
        _refuse("length", f"{len(head)} bytes", f"at least {HEAD_BYTES} bytes")
    bits = int.from_bytes(head, "little")
    maker = _MAKER.get(bits)
    if maker not in (0, 2):
        _refuse("low four bits of quadword 1", maker, "0 (the driver) or 2 (CuTeDSL)")
    if unknown := bits & ~_KNOWN_BITS:
        where = [i for i in range(unknown.bit_length()) if unknown >> i & 1]
        raise VirtualGpuError("unsupported", f"tensor map with bits {where} set, whose meaning is not known: an im2col "
                              "map, or no tensor map at all")
    if SWIZZLE_ATOMS[_ATOM.get(bits)] is None:
        raise VirtualGpuError("unsupported", "tensor map with a swizzle of 32-byte atoms with flipped 8-byte halves")
    rank = _RANK.get(bits) + 1
    if rank > 5:
        _refuse("rank", rank, "1 to 5")
    code = (_TYPE.get(bits), bool(_TF32.get(bits)))
    if code not in _TYPE_BY_CODE:
        _refuse("element type", f"code {code[0]}{' with the tf32 bit' if code[1] else ''}", "a known code, 0 to 13")
    if _INTERLEAVE.get(bits) == 3:
        _refuse("interleave", "code 3", "0, 1 or 2")
    strides = tuple((_STRIDE_LOW[i].get(bits) | _STRIDE_HIGH[i].get(bits) << 32) << 4 for i in range(rank - 1))
    return check(TensorMap(
        address=_ADDRESS.get(bits), type=_TYPE_BY_CODE[code],
        sizes=tuple(f.get(bits) + 1 for f in _SIZE[:rank]), strides=strides,
        box=tuple(f.get(bits) + 1 for f in _BOX[:rank]),
        element_strides=tuple(f.get(bits) + 1 for f in _STEP[:rank]),
        interleave=INTERLEAVES[_INTERLEAVE.get(bits)], swizzle=SWIZZLES[_SWIZZLE.get(bits)],
        l2_promotion=PROMOTIONS[_PROMOTION.get(bits)], fill_nan=bool(_FILL.get(bits)),
        swizzle_atom=SWIZZLE_ATOMS[_ATOM.get(bits)]))


def encode_map(tm: TensorMap) -> bytes:
    """The 128 bytes of `tm`, the first 64 as the driver writes them, the others zero. Raises as `check`."""
    check(tm)
    bits = _ADDRESS.put(0, tm.address)
    for field, value in ((_RANK, tm.rank - 1), (_TYPE, tm.type.code), (_TF32, tm.type.tf32),
                         (_INTERLEAVE, INTERLEAVES.index(tm.interleave)), (_SWIZZLE, SWIZZLES.index(tm.swizzle)),
                         (_PROMOTION, PROMOTIONS.index(tm.l2_promotion)), (_FILL, tm.fill_nan),
                         (_ATOM, SWIZZLE_ATOMS.index(tm.swizzle_atom))):
        bits = field.put(bits, int(value))
    for i, stride in enumerate(tm.strides):
        bits = _put_stride(bits, i, stride)
    for i in range(tm.rank):
        bits = _SIZE[i].put(bits, tm.sizes[i] - 1)
        bits = _BOX[i].put(bits, tm.box[i] - 1)
        bits = _STEP[i].put(bits, tm.element_strides[i] - 1)
    return bits.to_bytes(MAP_BYTES, "little")


def _put_stride(bits: int, index: int, stride: int) -> int:
    return _STRIDE_HIGH[index].put(_STRIDE_LOW[index].put(bits, stride >> 4), stride >> 36)


def encode(type: str, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int],
           element_strides: Sequence[int] | None = None, *, interleave: int = 0, swizzle: int = 0,
           l2_promotion: int = 0, fill_nan: bool = False, swizzle_atom: int = 16) -> bytes:
    """A tensor map of 128 bytes, for a kernel's parameter.

    type: a name of TYPE_BY_NAME ("u16", "f16", "b4x16", …). sizes and box: elements per dimension, innermost first.
    strides: bytes, of dimensions 1 and up. element_strides: default all 1. interleave, swizzle, l2_promotion,
    swizzle_atom: bytes.
    Raises VirtualGpuError `tensor map`, naming the field, its value and what is allowed.
    """
    if type not in TYPE_BY_NAME:
        _refuse("element type", type, f"one of {', '.join(TYPE_BY_NAME)}")
    steps = tuple(element_strides) if element_strides is not None else (1,) * len(sizes)
    return encode_map(TensorMap(address, TYPE_BY_NAME[type], tuple(sizes), tuple(strides), tuple(box), steps,
                                interleave, swizzle, l2_promotion, fill_nan, swizzle_atom))


def encode_tiled(type: int, address: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int],
                 element_strides: Sequence[int], interleave: int = 0, swizzle: int = 0, l2_promotion: int = 0,
                 oob_fill: int = 0) -> bytes:
    """As `encode`, with the enumerators of cuTensorMapEncodeTiled for type, interleave, swizzle, promotion and fill.

    Raises VirtualGpuError `unsupported` for what the driver can encode on a B200 but whose place in the map is not
    known (the swizzle with flipped 8-byte halves), `tensor map` for the rest.
    """
    if swizzle == 5:
        raise VirtualGpuError("unsupported", "swizzle 5: 32-byte atoms with flipped 8-byte halves are not modelled")
    for field, value, allowed in (("element type", type, _TYPE_BY_DRIVER), ("interleave", interleave, range(3)),
                                  ("swizzle", swizzle, _SWIZZLE_OF_DRIVER), ("L2 promotion", l2_promotion, range(4)),
                                  ("out-of-bounds fill", oob_fill, range(2))):
        if value not in allowed:
            _refuse(field, value, f"{min(allowed)} to {max(allowed)}")
    width, atom = _SWIZZLE_OF_DRIVER[swizzle]
    return encode(_TYPE_BY_DRIVER[type].name, address, sizes, strides, box, element_strides,
                  interleave=INTERLEAVES[interleave], swizzle=width, l2_promotion=PROMOTIONS[l2_promotion],
                  fill_nan=bool(oob_fill), swizzle_atom=atom)


_ORDINAL_FIELDS = {"box_dim": 5, "global_dim": 5, "global_stride": 4, "element_stride": 5}
_PLAIN_FIELDS = ("global_address", "rank", "elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity",
                 "fill_mode")


def replace_field(data, field: str, ordinal: int | None, value: int) -> bytes:
    """`data` (128 bytes) with one field changed, as tensormap.replace.tile does (PTX ISA 9.4, 9.7.10.29).

    ordinal: the dimension for box_dim, global_dim and element_stride; for global_stride 0 is the stride of dimension
    1; None for the other fields. value: unsigned; `rank` takes the rank minus one; strides are bytes (as CUTLASS
    passes them since CUDA 12.5); elemtype takes the numbers of table 36, not the driver's.
    Only the field itself is checked: a map may pass through invalid states while it is rewritten.
    Raises VirtualGpuError `tensor map`, or `unsupported` for a value whose place in the map is not known.
    """
    bits = int.from_bytes(bytes(data), "little")
    if field in _ORDINAL_FIELDS:
        if ordinal not in range(_ORDINAL_FIELDS[field]):
            _refuse(f"ordinal of {field}", ordinal, f"0 to {_ORDINAL_FIELDS[field] - 1}")
        bits = _replace_dimension(bits, field, ordinal, value)
    elif field in _PLAIN_FIELDS:
        if ordinal is not None:
            _refuse(f"ordinal of {field}", ordinal, "absent")
        bits = _replace_plain(bits, field, value)
    else:
        _refuse("field", field, f"one of {', '.join((*_ORDINAL_FIELDS, *_PLAIN_FIELDS))}")
    return bits.to_bytes(len(data), "little")


def _replace_dimension(bits: int, field: str, ordinal: int, value: int) -> int:
    if field == "global_stride":
        if value % 16 or not 0 <= value < 2**40:
            _refuse(f"stride of dimension {ordinal + 1}", f"{value} bytes", "a multiple of 16 below 2**40")
        return _put_stride(bits, ordinal, value)
    fields, most = {"box_dim": (_BOX, 256), "global_dim": (_SIZE, 2**32), "element_stride": (_STEP, 8)}[field]
    if not 1 <= value <= most:
        _refuse(f"{field} of dimension {ordinal}", value, f"1 to {most}")
    return fields[ordinal].put(bits, value - 1)


def _replace_plain(bits: int, field: str, value: int) -> int:
    if field == "elemtype":
        return _replace_type(bits, value)
    if field == "swizzle_atomicity":
        if value == 2:
            raise VirtualGpuError("unsupported", "swizzle_atomicity 2: flipped 8-byte halves are not modelled")
        if value not in (0, 1, 3):
            _refuse(field, value, "0 to 3")
        return _ATOM.put(bits, value)
    if field == "swizzle_mode" and value == 4:
        raise VirtualGpuError("unsupported", "swizzle_mode 4 (96 bytes) needs sm_103a (PTX ISA 9.4, 9.7.10.29)")
    if field == "global_address":
        if value % 16 or not 0 <= value < 2**64:
            _refuse("global address", f"{value:#x}", "a 64-bit multiple of 16")
        return _ADDRESS.put(bits, value)
    place, most = {"rank": (_RANK, 4), "interleave_layout": (_INTERLEAVE, 2), "swizzle_mode": (_SWIZZLE, 3),
                   "fill_mode": (_FILL, 1)}[field]
    if not 0 <= value <= most:
        _refuse(field, value, f"0 to {most}")
    return place.put(bits, value)


def _replace_type(bits: int, value: int) -> int:
    if value not in _TYPE_BY_REPLACE:
        _refuse("elemtype", value, "0 to 15")
    kind = _TYPE_BY_REPLACE[value]
    return _TF32.put(_TYPE.put(bits, kind.code), int(kind.tf32))
