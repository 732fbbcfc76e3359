"""cvt between every pair of types the compiler uses: integers, f32, f64, f16, bf16, tf32, e4m3, e5m2."""

from __future__ import annotations

import numpy as np

from .floats import pairs
from .model import Probe
from .operands import BFLOAT16, FLOAT16, FLOAT64, INT16, INT32, INT64, floats32, vectors
from .tables import Family, table_probes

INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")
ROUNDINGS = ("rn", "rz", "rm", "rp")


def from_f32() -> list[Family]:
    """f32 to integers, to narrower floats, to integral f32."""
    one, two = floats32(1, 192), floats32(2)
    to32 = [f"cvt.{r}.{t}.f32 d, a" for t in ("s32", "u32") for r in INTEGER_ROUNDINGS]
    to32 += [f"cvt.{r}.{t}.f32 d, a" for r in ("rzi.ftz", "rni.sat") for t in ("s32", "u32")]
    to32 += [f"cvt.rzi.{t}.f32 d, a" for t in ("s8", "u8", "s16", "u16")]
    to32 += [f"cvt.rni.sat.{t}.f32 d, a" for t in ("s8", "u8", "s16", "u16")]
    integral = [f"cvt.{r}.f32.f32 d, a" for r in (*INTEGER_ROUNDINGS, "rni.ftz", "sat", "ftz.sat")]
    narrow = [f"cvt.{r}.f16.f32 d, a" for r in ("rn", "rz", "rm", "rp")]
    narrow += [f"cvt.{r}.f16.f32 d, a" for r in ("rn.ftz", "rn.sat", "rn.relu", "rz.relu")]
    narrow += [f"cvt.{r}{m}.bf16.f32 d, a" for r in ("rn", "rz") for m in ("", ".relu")]
    packed = [f"cvt.{r}{m}.{t}.f32 d, a, b" for t in ("f16x2", "bf16x2") for r in ("rn", "rz") for m in ("", ".relu")]
    eight = [f"cvt.rn.satfinite{m}.{t}.f32 d, a, b" for t in ("e4m3x2", "e5m2x2") for m in ("", ".relu")]
    return [Family("f32_to_integer", 32, one, tuple(to32)),
            Family("f32_to_64", 64, one, tuple(f"cvt.{r}.{t}.f32 d, a" for t in ("s64", "u64")
                                               for r in INTEGER_ROUNDINGS) + ("cvt.f64.f32 d, a",)),
            Family("f32_integral", 32, one, tuple(integral)), Family("f32_to_16", 16, one, tuple(narrow)),
            Family("f32_pair_to_16x2", 32, two, tuple(packed)), Family("f32_pair_to_8x2", 16, two, tuple(eight)),
            Family("f32_to_tf32", 32, one, tuple(f"cvt.{r}.tf32.f32 d, a"
                                                 for r in ("rna", "rn", "rz.relu")))]


def from_integers() -> list[Family]:
    """Integers to floats."""
    word, wide, half = vectors(INT32, np.uint32, 1), vectors(INT64, np.uint64, 1, 64), vectors(INT16, np.uint16, 1, 64)
    return [
        Family("integer_to_f32", 32, word, (*(f"cvt.{r}.f32.{t} d, a" for t in ("s32", "u32") for r in ROUNDINGS),
                                            *(f"cvt.rn.f32.{t} d, a" for t in ("s8", "u8")))),
        Family("integer_to_16", 16, word, ("cvt.rn.f16.s32 d, a", "cvt.rn.f16.u32 d, a", "cvt.rz.f16.u32 d, a",
                                           "cvt.rn.bf16.s32 d, a", "cvt.rn.bf16.u32 d, a")),
        Family("integer_to_f64", 64, word, ("cvt.rn.f64.s32 d, a", "cvt.rn.f64.u32 d, a")),
        Family("integer16_to_f32", 32, half, ("cvt.rn.f32.s16 d, a", "cvt.rn.f32.u16 d, a")),
        Family("integer64_to_f32", 32, wide, (*(f"cvt.{r}.f32.{t} d, a" for t in ("s64", "u64") for r in ROUNDINGS),)),
        Family("integer64_to_f64", 64, wide, (*(f"cvt.{r}.f64.{t} d, a" for t in ("s64", "u64") for r in ROUNDINGS),)),
    ]


def from_small_floats() -> list[Family]:
    """f16, bf16, e4m3 and e5m2 to wider types and to one another."""
    half, brain = vectors(FLOAT16, np.uint16, 1), vectors(BFLOAT16, np.uint16, 1)
    every_pair = (np.arange(128, dtype=np.uint16) | (np.arange(128, dtype=np.uint16) + 128) << 8,)
    double = vectors(FLOAT64, np.uint64, 1, 64)
    eight = tuple(f"cvt.rn{m}.f16x2.{t} d, a" for t in ("e4m3x2", "e5m2x2") for m in ("", ".relu"))
    return [
        Family("f16_to_f32", 32, half, ("cvt.f32.f16 d, a", "cvt.ftz.f32.f16 d, a", "cvt.sat.f32.f16 d, a", *(
            f"cvt.{r}.{t}.f16 d, a" for r in INTEGER_ROUNDINGS for t in ("s32", "u32")))),
        Family("f16_to_f16", 16, half, (*(f"cvt.{r}.f16.f16 d, a" for r in INTEGER_ROUNDINGS), "cvt.sat.f16.f16 d, a",
                                        "cvt.rzi.s16.f16 d, a", "cvt.rni.u16.f16 d, a")),
        Family("bf16_to_f32", 32, brain, ("cvt.f32.bf16 d, a", "cvt.rzi.s32.bf16 d, a", "cvt.rni.u32.bf16 d, a")),
        Family("pair_8_to_f16x2", 32, every_pair, eight),
        Family("pair_f16x2_to_8", 16, pairs(FLOAT16, 1), tuple(
            f"cvt.rn.satfinite{m}.{t}.f16x2 d, a" for t in ("e4m3x2", "e5m2x2") for m in ("", ".relu"))),
        Family("f64_to_32", 32, double, (*(f"cvt.{r}.f32.f64 d, a" for r in ROUNDINGS), "cvt.rn.ftz.f32.f64 d, a",
                                         "cvt.rzi.s32.f64 d, a", "cvt.rni.u32.f64 d, a")),
        Family("f64_to_64", 64, double, ("cvt.rzi.s64.f64 d, a", "cvt.rmi.u64.f64 d, a", "cvt.rni.f64.f64 d, a",
                                         "cvt.rpi.f64.f64 d, a")),
        Family("f64_to_16", 16, double, ("cvt.rn.f16.f64 d, a", "cvt.rz.f16.f64 d, a", "cvt.rn.bf16.f64 d, a")),
    ]


def probes() -> list[Probe]:
    """All of this module's probes."""
    families = [*from_f32(), *from_integers(), *from_small_floats()]
    return [probe for family in families for probe in table_probes("convert", family)]
