"""Published B200 timings of NVFP4 GEMMs, and the modelled times of plain kernels that imitate them.

Sources: arseniivanov's worklog on the contest's problem nvfp4_gemm (persistent CuTeDSL example, tiles 128x128 and
128x64); another public worklog (the organisers' CuTeDSL template with 1 to 5 stages). All in us a call of the contest's
harness (50 calls on distinct inputs between two events), so a call takes the longer of host and device.

What the imitations leave out or take for granted:

- The example's persistent loop: these shapes have fewer tiles than SMs, so it runs once. Its TMA store: here the
  threads store 16 bytes each.
- As the organisers published it, the template loads a k-tile only after the MMAs of the one before were issued. More
  stages could then hide no more than the MMAs, yet the published times keep falling, so loads are taken to run ahead
  by all stages but one [inferred]. The row "no load ahead" shows the other reading; it does not count.
- Split-K through a workspace that torch sums: its cost is mostly torch's, so its figures are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

import vgpu

from ..timing.chips import B200, Chip
from ..timing.model import model

SHAPES = ((128, 7168, 16384), (128, 4096, 7168), (128, 7168, 2048))  # m, n, k
SMALL = (128, 256, 1024)  # where the result is checked
CLEAR = 0.02  # published times of two variants that differ by less say nothing about their order
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SCALES = np.array([0x00, 0x38, 0x40, 0x44], np.uint8)  # e4m3 of 0, 1, 2, 3

HOST_PREPARED = 3.5  # us a call with prepared arguments [published: cutlass#3275]
HOST_TEMPLATE = 22.0  # us a call that makes five pointers and calls the compiled function [measured, on another CPU]


@dataclass(frozen=True)
class Variant:
    """A published kernel: `config` holds the fields of b200_gemm.Config; us: published, for each of SHAPES."""

    name: str
    family: str
    us: tuple[float, float, float]
    host: float
    config: dict[str, Any]


def _template(stages: int, ahead: int, *us: float) -> Variant:
    name = f"template, {stages} stage{'s'[:stages > 1]}" + ("" if stages == ahead + 1 else ", no load ahead")
    config = {"tile_n": 128, "stages": stages, "specialised": False, "ahead": ahead}
    return Variant(name, "stages" if stages == ahead + 1 else "contrast", us, HOST_TEMPLATE, config)


# The example gives shared memory to two 8 KB output buffers; 5 and 7 stages fit beside them.
VARIANTS = (
    Variant("specialised, 128x128", "tiles", (20.7, 10.6, 7.81), HOST_PREPARED, {"tile_n": 128, "stages": 5}),
    Variant("specialised, 128x64", "tiles", (19.0, 10.4, 6.53), HOST_PREPARED, {"tile_n": 64, "stages": 7}),
    _template(1, 0, 96.8, 51.6, 37.6),
    _template(2, 1, 64.9, 38.3, 32.9),
    _template(3, 2, 54.4, 33.4, 31.9),
    _template(4, 3, 50.1, 31.1, 31.4),
    _template(5, 4, 49.3, 30.8, 30.9),
    _template(5, 0, 49.3, 30.8, 30.9),
)


@dataclass(frozen=True)
class Problem:
    """Inputs in the contest's formats, and what else the kernels need."""

    arrays: tuple[np.ndarray, ...]  # a, b, sfa, sfb, c, workspace
    scales: tuple[np.ndarray, np.ndarray]  # of A and B as numbers, [rows, k/16]


def make_problem(m: int, n: int, k: int, splits: int) -> Problem:
    """Random e2m1 numbers, scales 0..3."""
    rng = np.random.default_rng(m + n + k)
    codes = [rng.integers(0, 4, (rows, k // 16)) for rows in (m, n)]
    packed = [rng.integers(0, 256, (rows, k // 2), dtype=np.uint8) for rows in (m, n)]
    c, work = np.full((m, n), np.nan, np.float16), np.full((splits, m, n), np.nan, np.float32)
    atoms = [in_atoms(SCALES[code]) for code in codes]
    return Problem((*packed, *atoms, c, work), tuple(code.astype(np.float64) for code in codes))


def in_atoms(scales: np.ndarray) -> np.ndarray:
    """Scales [rows, blocks] as [rows/128, blocks/4, 32, 4, 4]: 512 bytes of 128 rows and 4 blocks lie together."""
    rows, blocks = scales.shape
    return np.ascontiguousarray(scales.reshape(rows // 128, 4, 32, blocks // 4, 4).transpose(0, 3, 2, 1, 4))


def expected(problem: Problem) -> np.ndarray:
    """C [m, n] in float64."""
    def decode(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
        numbers = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], axis=-1).reshape(len(packed), -1)
        return numbers * np.repeat(scale, 16, axis=1)

    a, b = (decode(p, s) for p, s in zip(problem.arrays[:2], problem.scales, strict=True))
    return a @ b.T


def run(variant: Variant, shape: tuple[int, int, int], check: bool = False) -> list:
    """The recorded launches of one call on the virtual B200. With `check`, raises ValueError for a wrong result.

    shape: (m, n, k); with `check` a small one, as the result is computed in float64.
    """
    device = vgpu.install("sm_100a")
    from . import b200_gemm

    config = b200_gemm.Config(**variant.config)
    problem = make_problem(*shape, config.splits)
    for array in problem.arrays:
        device.memory.register(array.ctypes.data, array.nbytes)
    first, was = len(device.launches), device.recording
    device.recording = True
    try:
        b200_gemm.multiply(config, problem.arrays, *shape)
    finally:
        device.recording = was
        for array in problem.arrays:
            device.memory.forget(array.ctypes.data)
    launches = device.launches[first:]
    del device.launches[first:]
    if check and not np.allclose(problem.arrays[4].astype(np.float64), expected(problem), rtol=1e-3, atol=1e-3):
        raise ValueError(f"{variant.name}: wrong result on the virtual GPU")
    return launches


@dataclass(frozen=True)
class Row:
    """A variant on a shape (m, n, k): published and modelled us a call; error = modelled / published - 1."""

    variant: Variant
    shape: tuple[int, int, int]
    published: float
    modelled: float
    bound: str

    @property
    def error(self) -> float:
        """Relative; positive where the model is slow."""
        return self.modelled / self.published - 1

    @property
    def counts(self) -> bool:
        """False for what is shown for contrast only."""
        return self.variant.family != "contrast"


def rows(chip: Chip = B200, variants: Iterable[Variant] = VARIANTS, shapes: Iterable = SHAPES,
         progress: Callable[[list], Iterable] = iter) -> list[Row]:
    """Every variant on every shape. Raises ValueError where a kernel computes something wrong."""
    out, shapes = [], tuple(shapes)
    for variant in progress(list(variants)):
        run(variant, SMALL, check=True)
        for shape in shapes:
            breakdown, _ = model(run(variant, shape), chip, variant.host)
            published = variant.us[SHAPES.index(shape)]
            out.append(Row(variant, shape, published, breakdown.call_us, breakdown.bound))
    return out


def orders(found: list[Row]) -> tuple[int, list[str]]:
    """(pairs of variants of a family and shape whose published times differ clearly, those not so ordered)."""
    pairs, wrong = 0, []
    for a, b in combinations([r for r in found if r.counts], 2):
        if a.shape != b.shape or a.variant.family != b.variant.family:
            continue
        if abs(a.published - b.published) < CLEAR * min(a.published, b.published):
            continue
        pairs += 1
        if (a.published - b.published) * (a.modelled - b.modelled) <= 0:
            wrong.append(f"{a.variant.name} and {b.variant.name} at n, k = {a.shape[1]}, {a.shape[2]}")
    return pairs, wrong
