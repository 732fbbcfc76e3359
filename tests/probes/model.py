"""What a probe is: one small kernel, the arguments of its one launch, and how its outputs are compared.

A probe is complete and deterministic: its fingerprint covers the PTX text, the launch and every input byte, so that a
golden output can be tied to exactly what produced it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field

import numpy as np

# CUtensorMapDataType of the CUDA driver API ("Tensor Map Object Management") and element sizes in bytes
DATA_TYPES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9,
              "f32_ftz": 10, "tf32": 11, "tf32_ftz": 12, "16u4_align8b": 13}
ELEMENT_SIZES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "f32": 4, "f64": 8, "bf16": 2,
                 "f32_ftz": 4, "tf32": 4, "tf32_ftz": 4, "16u4_align8b": 0.5}
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}  # CUtensorMapSwizzle


@dataclass(frozen=True)
class Buffer:
    """A global-memory argument, passed as a 64-bit address.

    data: its bytes before the launch. output: whether its bytes after the launch are part of the result.
    """

    data: bytes
    output: bool = False


@dataclass(frozen=True)
class Scalar:
    """An integer argument of `size` bytes (4 or 8), as an unsigned bit pattern."""

    value: int
    size: int = 4


@dataclass(frozen=True)
class TensorMap:
    """A 128-byte tensor map argument, encoded by the driver's cuTensorMapEncodeTiled.

    buffer: index of the `Buffer` argument it describes; offset: bytes from that buffer's start to the tensor's.
    dims, box, element_strides: elements, innermost first; strides: bytes, of dims 1 and up.
    nan_fill: out-of-bounds elements read as NaN instead of zero.
    """

    buffer: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: str = "none"
    element_strides: tuple[int, ...] | None = None
    nan_fill: bool = False
    offset: int = 0

    def box_bytes(self) -> int:
        """Bytes that one load writes: dim 0 ignores its element stride (no interleave), others take every n-th."""
        steps = self.element_strides or (1,) * len(self.dims)
        count = self.box[0]
        for extent, step in zip(self.box[1:], steps[1:], strict=True):
            count *= -(-extent // step)
        return int(count * ELEMENT_SIZES[self.dtype])

    def shared_bytes(self) -> int:
        """Bytes of shared memory that the box spans: with a swizzle, rows lie a whole swizzle span apart, also if the
        box is narrower [measured: with less room behind it, the copy stops with an illegal address]."""
        inner = self.box[0] * ELEMENT_SIZES[self.dtype]
        span = inner if self.swizzle == "none" else max(inner, int(self.swizzle.rstrip("B")))
        return int(self.box_bytes() / inner * span)


@dataclass(frozen=True)
class Row:
    """A run of equal-width results inside an output buffer, for messages and for approximate instructions.

    label: the instruction. offset: byte offset in output `output`. width: bits of one result. operands: one tuple of
    bit patterns a result. kind: "exact", or the float format ("f16", "bf16", "f32", two per word as "f16x2" and
    "bf16x2") in which results are compared within relative * |hardware's| + absolute.
    """

    label: str
    offset: int
    width: int
    operands: tuple[tuple[int, ...], ...]
    kind: str = "exact"
    relative: float = 0.0
    absolute: float = 0.0
    output: int = 0


@dataclass(frozen=True)
class Probe:
    """One launch of one kernel (entry `probe`)."""

    name: str
    ptx: str
    args: tuple[Buffer | Scalar | TensorMap, ...]
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    rows: tuple[Row, ...] = field(default=(), compare=False)
    may_stop: bool = False  # the question is whether hardware or driver stop here: an error is an answer

    @property
    def group(self) -> str:
        """The golden file's name: the part of the probe's name before the slash."""
        return self.name.split("/", 1)[0]

    def fingerprint(self) -> str:
        """SHA-256 over the kernel, the launch shape and all arguments, input bytes included."""
        digest = hashlib.sha256(self.ptx.encode())
        digest.update(json.dumps([self.grid, self.block, self.cluster, self.shared_bytes]).encode())
        for arg in self.args:
            digest.update(repr(arg).encode())
        return digest.hexdigest()


def random_bytes(count: int, seed: int) -> bytes:
    """`count` bytes of NumPy's legacy Mersenne Twister, whose stream is frozen across NumPy versions."""
    return np.random.RandomState(seed).bytes(count)
