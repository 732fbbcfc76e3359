"""Descriptors of the tensor core: the 64-bit shared-memory matrix descriptor and the 32-bit instruction descriptor.

Sources: PTX ISA 9.7.16.3 (strides, canonical layouts), 9.7.16.4.1 and 9.7.16.4.2 (the two descriptors), 9.7.16.2.1
(shapes), 9.7.16.10.1 (transpose, negate), 9.7.16.10.7 (scale factors); the comments of CUTLASS' mma_sm100_desc.hpp
and mma_traits_sm100.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .errors import VirtualGpuError
from .memory import CLEAN, RESERVED, SharedMemory

NO_SWIZZLE, SWIZZLE_128B_ATOM_32B, SWIZZLE_128B, SWIZZLE_64B, SWIZZLE_32B = 0, 1, 2, 4, 6
CHUNK = 16  # bytes; the unit of every descriptor address and of every operand read

# code -> (bytes of a row of the swizzle atom, rows of an MN-major atom, mask of the XORed bits, lowest XORed bit);
# the bits that are XORed in start at address bit 7 in every mode
_SWIZZLE = {
    NO_SWIZZLE: (16, 8, 0, 4),
    SWIZZLE_128B_ATOM_32B: (128, 4, 0b11, 5),
    SWIZZLE_128B: (128, 8, 0b111, 4),
    SWIZZLE_64B: (64, 8, 0b11, 4),
    SWIZZLE_32B: (32, 8, 0b1, 4),
}


def _fault(message: str) -> VirtualGpuError:
    return VirtualGpuError("descriptor", message)


def _field(value: int, low: int, high: int) -> int:
    """Bits low..high (both included) of `value`."""
    return (value >> low) & ((1 << (high - low + 1)) - 1)


@dataclass(frozen=True, slots=True)
class SmemDescriptor:
    """Where a matrix lies in a CTA's shared memory (PTX ISA 9.7.16.4.1). All distances are bytes.

    start: offset of element (0, 0) in the CTA's shared window; leading: LBO; stride: SBO; base_offset: 0..7, the
    phase of the swizzle pattern where it does not start at its natural boundary; swizzle: the 3-bit code.
    """

    start: int
    leading: int
    stride: int
    base_offset: int
    swizzle: int

    @classmethod
    def decode(cls, value: int) -> SmemDescriptor:
        """Decode 64 bits; raises VirtualGpuError(`descriptor`) for an encoding that PTX does not allow."""
        return _decode_smem(value)


@lru_cache(maxsize=4096)
def _decode_smem(value: int) -> SmemDescriptor:
    where = f"shared-memory matrix descriptor {value:#018x}"
    if not 0 <= value < 1 << 64:
        raise _fault(f"{where}: not a 64-bit value")
    if _field(value, 46, 48) != 0b001:
        raise _fault(f"{where}: bits 46-48 are {_field(value, 46, 48):#05b}; sm_100 needs 0b001")
    if _field(value, 53, 60):
        raise _fault(f"{where}: bits 53-60 are {_field(value, 53, 60):#x}; they must be 0")
    for low in (14, 30):
        if _field(value, low, low + 1):
            raise _fault(f"{where}: bits {low}-{low + 1} are not 0; an address or offset does not fit its 14-bit field")
    if _field(value, 52, 52):
        raise _fault(f"{where}: absolute leading-dimension addresses (bit 52) exist on sm_103a only")
    swizzle = _field(value, 61, 63)
    if swizzle not in _SWIZZLE:
        raise _fault(f"{where}: swizzle code {swizzle}; it must be 0, 1, 2, 4 or 6")
    return SmemDescriptor(_field(value, 0, 13) << 4, _field(value, 16, 29) << 4, _field(value, 32, 45) << 4,
                          _field(value, 49, 51), swizzle)


@lru_cache(maxsize=4096)
def chunk_offsets(desc: SmemDescriptor, rows: int, chunks: int, major: str = "K") -> np.ndarray:
    """Byte offset in the shared window of every 16-byte chunk of a matrix: intp[rows, chunks], read-only.

    major "K": `rows` rows of the matrix, `chunks` chunks along K. major "MN" (the transposed operand): `rows`
    values of k, `chunks` chunks along M or N. The canonical layouts are PTX ISA 9.7.16.3.3's, with the 32-byte-atom
    mode of CUTLASS. Swizzling XORs bits of the final address [DOC 5.5.7], so a start address advanced inside the
    swizzle atom needs no change elsewhere; a base offset shifts the phase of the XOR [inferred].
    """
    width, k_rows, mask, bit = _SWIZZLE[desc.swizzle]
    row, chunk = np.arange(rows)[:, None], np.arange(chunks)[None, :]
    if major == "K":
        if desc.swizzle == SWIZZLE_128B_ATOM_32B:
            raise _fault("128-byte swizzle with 32-byte atoms is defined for MN-major operands only")
        step = desc.leading if desc.swizzle == NO_SWIZZLE else CHUNK
        offsets = row % 8 * width + row // 8 * desc.stride + chunk * step
    elif desc.swizzle == NO_SWIZZLE:
        offsets = chunk * desc.stride + row % 8 * CHUNK + row // 8 * desc.leading
    else:
        across = width // CHUNK
        offsets = (chunk % across * CHUNK + chunk // across * desc.leading
                   + row % k_rows * width + row // k_rows * desc.stride)
    offsets = offsets + desc.start
    offsets = (offsets ^ ((((offsets >> 7) - desc.base_offset) & mask) << bit)).astype(np.intp)
    offsets.flags.writeable = False
    return offsets


_ALL_CLEAN = np.uint64(CLEAN * 0x0101010101010101)  # eight state bytes


class SharedRead:
    """One operand of an asynchronous unit in shared memory.

    what: the operand's name for messages; offsets: intp[..., chunks], byte offsets of its 16-byte chunks in the CTA's
    window; data_bytes: how many bytes at the start of each chunk are data (the rest is padding that need not be
    written); lo, hi: the span [lo, hi) of all chunks.
    """

    __slots__ = ("what", "offsets", "data_bytes", "lo", "hi", "_index")

    def __init__(self, what: str, offsets: np.ndarray, data_bytes: int = CHUNK):
        self.what = what
        self.offsets = offsets
        self.data_bytes = data_bytes
        self.lo, self.hi = int(offsets.min()), int(offsets.max()) + CHUNK
        self._index = offsets >> 4

    def gather(self, smem: SharedMemory) -> np.ndarray:
        """uint8[..., 16 * chunks]: the chunks' bytes. Raises `out of bounds`, `uninitialised`, `proxy fence` or
        `mbarrier` like SharedMemory.require_async_visible."""
        if self.lo < RESERVED or self.hi > smem.limit:
            raise VirtualGpuError(
                "out of bounds", f"{self.what} covers shared bytes [{self.lo:#x}, {self.hi:#x}) of CTA rank "
                f"{smem.rank}, which has [{RESERVED:#x}, {smem.limit:#x})")
        whole = smem.limit & ~(CHUNK - 1)
        state = smem.state[:whole].view(np.complex128).take(self._index)  # complex128: 16 bytes moved as one item
        if (state.view(np.uint64) != _ALL_CLEAN).any():
            data = (self.offsets[..., None] + np.arange(self.data_bytes)).ravel()
            smem.require_async_visible(data, f"{self.what}, CTA rank {smem.rank},")
        return smem.data[:whole].view(np.complex128).take(self._index).view(np.uint8)


# kind -> (K of one dense MMA, element types by code)
_F16 = {0: "f16", 1: "bf16"}
_F8 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
KINDS: dict[str, tuple[int, dict[int, str]]] = {
    "f16": (16, _F16),
    "tf32": (8, {2: "tf32"}),
    "f8f6f4": (32, _F8),
    "i8": (32, {0: "u8", 1: "s8"}),
    "mxf8f6f4": (32, _F8),
    "mxf4": (64, {1: "e2m1"}),
    "mxf4nvf4": (64, {1: "e2m1"}),
}
SCALED_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_D_FORMATS = {0: "f16", 1: "f32", 2: "s32"}
_D_OF_KIND = {"f16": (0, 1), "tf32": (1,), "f8f6f4": (0, 1), "i8": (2,)}


@dataclass(frozen=True, slots=True)
class InstrDescriptor:
    """What one tcgen05.mma computes (PTX ISA 9.7.16.4.2, tables 42 to 44).

    d_format is f16, f32 or s32; a_format and b_format name the element type; k is the K of the instruction.
    scale_format (ue4m3, ue8m0), sfa_id and sfb_id (byte of the 32-bit cell) are those of the block-scaled kinds.
    """

    kind: str
    m: int
    n: int
    k: int
    d_format: str
    a_format: str
    b_format: str
    negate_a: bool
    negate_b: bool
    transpose_a: bool
    transpose_b: bool
    saturate: bool = False
    scale_format: str | None = None
    sfa_id: int = 0
    sfb_id: int = 0

    @classmethod
    def decode(cls, value: int, kind: str) -> InstrDescriptor:
        """Decode 32 bits for `.kind::kind`. Raises `descriptor` for reserved or illegal codes, `unsupported` for
        sparse operands and K = 96."""
        return _decode_instr(value, kind)

    def check(self, cta_group: int, scale_vec: int | None = None) -> None:
        """Raise `descriptor` unless shape, cta_group and scale vector go together (PTX ISA tables 39, 49, 50, 55).

        scale_vec: scale factors per row and instruction (1, 2 or 4), None for the kinds without block scaling.
        """
        _check_shape(self, cta_group)
        _check_transpose(self, cta_group)
        _check_scales(self, scale_vec)


@lru_cache(maxsize=1024)
def _decode_instr(value: int, kind: str) -> InstrDescriptor:
    if kind not in KINDS:
        raise VirtualGpuError("unsupported", f"tcgen05.mma.kind::{kind}")
    where = f"instruction descriptor {value:#010x} of kind::{kind}"
    if not 0 <= value < 1 << 32:
        raise _fault(f"{where}: not a 32-bit value")
    if _field(value, 2, 2):
        raise VirtualGpuError("unsupported", f"{where}: sparse operands are not modelled")
    return (_decode_scaled if kind in SCALED_KINDS else _decode_dense)(value, kind, where)


def _reserved(value: int, where: str, *fields: tuple[int, int]) -> None:
    for low, high in fields:
        if _field(value, low, high):
            raise _fault(f"{where}: bits {low}-{high} are {_field(value, low, high)}; they must be 0")


def _element(codes: dict[int, str], code: int, operand: str, where: str) -> str:
    if code not in codes:
        known = ", ".join(f"{c} ({name})" for c, name in codes.items())
        raise _fault(f"{where}: type {code} of matrix {operand}; allowed: {known}")
    return codes[code]


def _decode_dense(value: int, kind: str, where: str) -> InstrDescriptor:
    k, codes = KINDS[kind]
    # bit 29 is reserved; cuDNN's kernels for sm_100 set it (CuTeDSL: "k_dim, reserved in SM100"): it changes nothing
    _reserved(value, where, (0, 1), (6, 6), (23, 23), (30, 31))
    d_code = _field(value, 4, 5)
    if d_code not in _D_OF_KIND[kind]:
        raise _fault(f"{where}: type {d_code} of matrix D; allowed: {_D_OF_KIND[kind]}")
    out = InstrDescriptor(
        kind=kind, m=_field(value, 24, 28) << 4, n=_field(value, 17, 22) << 3, k=k, d_format=_D_FORMATS[d_code],
        a_format=_element(codes, _field(value, 7, 9), "A", where),
        b_format=_element(codes, _field(value, 10, 12), "B", where),
        negate_a=bool(_field(value, 13, 13)), negate_b=bool(_field(value, 14, 14)),
        transpose_a=bool(_field(value, 15, 15)), transpose_b=bool(_field(value, 16, 16)),
        saturate=bool(_field(value, 3, 3)))
    if kind == "i8" and (out.negate_a or out.negate_b):
        raise _fault(f"{where}: integer operands cannot be negated")
    if kind != "i8" and out.saturate:
        raise _fault(f"{where}: saturation (bit 3) is for integers")
    if kind == "f16" and out.d_format == "f16" and (out.a_format, out.b_format) != ("f16", "f16"):
        raise _fault(f"{where}: a 16-bit D needs A and B of type f16, not {out.a_format} and {out.b_format}")
    return out


def _decode_scaled(value: int, kind: str, where: str) -> InstrDescriptor:
    k, codes = KINDS[kind]
    _reserved(value, where, (0, 1), (3, 3), (6, 6), (24, 26))
    if _field(value, 31, 31):
        raise VirtualGpuError("unsupported", f"{where}: bit 31 (K = 96) exists on sm_103a only")
    # bit 12 is B's third type bit for mxf8f6f4; the 4-bit kinds ignore it (CuTeDSL sets it: "irrelevant for SM100")
    b_code = _field(value, 10, 12 if kind == "mxf8f6f4" else 11)
    out = InstrDescriptor(
        kind=kind, m=_field(value, 27, 28) << 7, n=_field(value, 17, 22) << 3, k=k, d_format="f32",
        a_format=_element(codes, _field(value, 7, 9), "A", where), b_format=_element(codes, b_code, "B", where),
        negate_a=bool(_field(value, 13, 13)), negate_b=bool(_field(value, 14, 14)),
        transpose_a=bool(_field(value, 15, 15)), transpose_b=bool(_field(value, 16, 16)),
        scale_format="ue8m0" if _field(value, 23, 23) else "ue4m3",
        sfa_id=_field(value, 29, 30), sfb_id=_field(value, 4, 5))
    if kind != "mxf4nvf4" and out.scale_format != "ue8m0":
        raise _fault(f"{where}: kind::{kind} takes ue8m0 scale factors only (bit 23 must be 1)")
    return out


def _check_shape(d: InstrDescriptor, cta_group: int) -> None:
    if cta_group not in (1, 2):
        raise _fault(f"cta_group::{cta_group}; it must be 1 or 2")
    rows = {1: (128,) if d.kind in SCALED_KINDS else (64, 128), 2: (128, 256)}[cta_group]
    if d.m not in rows:
        raise _fault(f"M = {d.m}; kind::{d.kind} with cta_group::{cta_group} allows {rows}")
    step = 8 * cta_group
    if d.kind == "i8":
        step = 32 if cta_group == 2 else (8 if d.n <= 32 else 16)
    if not step <= d.n <= 256 or d.n % step:
        raise _fault(f"N = {d.n}; kind::{d.kind} with cta_group::{cta_group} allows multiples of {step} up to 256")


def _check_transpose(d: InstrDescriptor, cta_group: int) -> None:
    if d.kind in ("mxf4", "mxf4nvf4") and (d.transpose_a or d.transpose_b):
        raise _fault(f"kind::{d.kind} cannot transpose its operands (bits 15, 16)")
    step = 16 * cta_group
    if d.transpose_b and d.kind in ("f8f6f4", "mxf8f6f4", "i8") and d.n % step:
        raise _fault(f"N = {d.n}; a transposed 8-bit B with cta_group::{cta_group} needs a multiple of {step}")


def _check_scales(d: InstrDescriptor, scale_vec: int | None) -> None:
    allowed = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}.get(d.kind, (None,))
    if scale_vec not in allowed:
        raise _fault(f"scale_vec::{scale_vec}X; kind::{d.kind} allows {allowed}")
    if scale_vec == 2 and d.scale_format == "ue4m3":
        raise _fault("ue4m3 scale factors need scale_vec::4X")
    ids = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,), None: (0,)}[scale_vec]
    for name, value in (("A", d.sfa_id), ("B", d.sfb_id)):
        if value not in ids:
            raise _fault(f"scale factor {name} id {value}; scale_vec::{scale_vec}X allows {ids}")


def scale_vector(kind: str, qualifier: str | None) -> int | None:
    """Scale factors per row and instruction that `.scale_vec::NX` or `.blockN` (None: absent) means for `kind`.

    PTX ISA 9.7.16.10.7.1: .block16 is 4X; .block32 is 1X for mxf8f6f4 and 2X for the 4-bit kinds; mxf4nvf4 must
    name one. None for the kinds without block scaling.
    """
    if kind not in SCALED_KINDS:
        if qualifier is not None:
            raise _fault(f"kind::{kind} takes no {qualifier}")
        return None
    default = {"mxf8f6f4": 1, "mxf4": 2}.get(kind)
    names = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4,
             "block32": 1 if kind == "mxf8f6f4" else 2, None: default}
    out = names.get(qualifier)
    if out is None:
        raise _fault(f"scale vector {qualifier} of kind::{kind}; allowed: scale_vec::1X, 2X, 4X, block16, block32")
    return out
