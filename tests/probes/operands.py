"""Operand vectors: edge values crossed with each other, then random bits. Legacy NumPy streams, frozen for ever."""

from __future__ import annotations

import numpy as np

INT32 = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x00FF00FF,
         0x12345678, 0x7FFFFFFE, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xAAAAAAAA, 0xFFFF8000, 0xFFFFFF80, 0xFFFFFFFE,
         0xFFFFFFFF]
INT64 = [*INT32[:16], 0xFFFFFFFF, 0x100000000, 0x7FFFFFFF80000000, 0x7FFFFFFFFFFFFFFF, 0x8000000000000000,
         0x8000000000000001, 0xFFFFFFFF80000000, 0xFFFFFFFFFFFFFFFE, 0xFFFFFFFFFFFFFFFF, 0x0123456789ABCDEF]
INT16 = [0, 1, 2, 7, 15, 16, 17, 31, 127, 128, 255, 256, 0x7FFF, 0x8000, 0x8001, 0xFF80, 0xFFFE, 0xFFFF]
FLOAT32 = [0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,
           0xFFA00000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F000000,
           0xBF000000, 0x3FC00000, 0x40200000, 0xC0200000, 0x3EFFFFFF, 0x3F7FFFFF, 0x3F800001, 0x33800000, 0x4B000001,
           0x4B7FFFFF, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0xCF000001, 0x4F7FFFFF, 0x4F800000, 0x5F000000, 0xDF000000,
           0x5F800000, 0x477FE000, 0x477FF000, 0x477FEFFF, 0x38800000, 0x33000000, 0x33000001, 0x387FE000, 0x43E00000,
           0x43E80000, 0x43E80001, 0x43F00000, 0x47600000, 0x47700000, 0x3B000000, 0x3A800000, 0x3A800001, 0x3C800000,
           0x37800000, 0x37000000, 0x37000001, 0x7F7F8000, 0x7F7F7FFF, 0x3F808000, 0x3F818000, 0x437F0000, 0xC3008000,
           0x46FFFF00]
FLOAT16 = [0x0000, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0xFD00, 0x0001, 0x8001, 0x03FF,
           0x0400, 0x8400, 0x7BFF, 0xFBFF, 0x3800, 0xB800, 0x3E00, 0x4100, 0xC100, 0x3BFF, 0x3C01, 0x1000, 0x6400,
           0x67FF, 0x77FF, 0x5F00, 0x5F40, 0x5B80, 0x5BFF, 0x7B00, 0x7B80, 0x1400, 0x1401, 0x2000, 0x1C00]
BFLOAT16 = [0x0000, 0x8000, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFA0, 0x0001, 0x8001, 0x007F,
            0x0080, 0x8080, 0x7F7F, 0xFF7F, 0x3F00, 0xBF00, 0x3FC0, 0x4020, 0xC020, 0x3F7F, 0x3F81, 0x3B80, 0x4300,
            0x437F, 0x477F, 0x4F00, 0x5F00]
FLOAT64 = [0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xBFF0000000000000, 0x7FF0000000000000,
           0xFFF0000000000000, 0x7FF8000000000000, 0xFFF0000000000001, 0x0000000000000001, 0x000FFFFFFFFFFFFF,
           0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0x3FE0000000000000, 0x4004000000000000, 0xC004000000000000,
           0x41DFFFFFFFC00000, 0x41E0000000000000, 0xC1E0000000200000, 0x43E0000000000000, 0x47EFFFFFE0000000,
           0x47EFFFFFF0000000, 0x3690000000000000, 0x36A0000000000000, 0x380FFFFFE0000000, 0x3FF0000010000000,
           0x3FF0000030000000, 0x40EFFC0000000000, 0x40EFFE0000000000]


def _random(count: int, dtype: type, seed: int) -> np.ndarray:
    return np.frombuffer(np.random.RandomState(seed).bytes(count * np.dtype(dtype).itemsize), dtype).copy()


def vectors(edges: list[int], dtype: type, operands: int, count: int = 128, seed: int = 5) -> tuple[np.ndarray, ...]:
    """`operands` arrays of `count` values: with one operand every edge value, otherwise edges paired at random; the
    last quarter is random bits. dtype: an unsigned NumPy type of the operand's width."""
    random = np.random.RandomState(seed + operands)
    edge = np.array(edges, dtype)
    out = []
    for i in range(operands):
        values = _random(count, dtype, seed + 10 * i)
        if operands == 1:
            values[:min(count, len(edge))] = edge[:count]
        else:
            paired = 3 * count // 4
            values[:paired] = edge[random.randint(0, len(edge), paired)]
        out.append(values)
    return tuple(out)


def floats32(operands: int, count: int = 128, seed: int = 5) -> tuple[np.ndarray, ...]:
    """Float32 bit patterns: edges, random bits, and values near one another so that sums cancel and round."""
    out = vectors(FLOAT32, np.uint32, operands, count, seed)
    random = np.random.RandomState(seed + 99)
    tail = count // 8
    for values in out:
        values[-tail:] = (random.uniform(-4, 4, tail).astype(np.float32)).view(np.uint32)
    return out
