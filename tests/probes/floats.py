"""Floating-point arithmetic and comparisons over operand tables: f32, f64, f16, bf16 and their packed pairs."""

from __future__ import annotations

import numpy as np

from .model import Probe
from .operands import BFLOAT16, FLOAT16, FLOAT64, floats32, vectors
from .tables import Family, Tolerance, table_probes

ROUNDINGS = ("rn", "rz", "rm", "rp")
ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
UNORDERED = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def pairs(edges: list[int], operands: int) -> tuple[np.ndarray, ...]:
    """Packed pairs of 16-bit values: 32-bit words whose halves are edges paired at random."""
    low = vectors(edges, np.uint16, operands + 1, seed=21)
    high = vectors(edges, np.uint16, operands + 1, seed=63)
    return tuple(a.astype(np.uint32) | b.astype(np.uint32) << 16 for a, b in zip(low, high, strict=True))[:operands]


def compare(kind: str, result: str = "selp.b32 d, 1, 0, p", modifier: str = "") -> tuple[str, ...]:
    """setp of every ordered and unordered comparison, as 1 or 0."""
    return tuple(f"setp.{c}{modifier}.{kind} p, a, b; {result}" for c in (*ORDERED, *UNORDERED))


def families_f32() -> list[Family]:
    """Exactly rounded f32 instructions."""
    one, two, three = (floats32(n) for n in (1, 2, 3))
    add = tuple(f"{op}.{r}.f32 d, a, b" for op in ("add", "sub", "mul") for r in ROUNDINGS)
    flush = tuple(f"{op}.{r}.ftz.f32 d, a, b" for op in ("add", "mul") for r in ("rn", "rz"))
    return [
        Family("arithmetic_f32", 32, two, (
            *add, *flush, "add.f32 d, a, b", "mul.f32 d, a, 0f3FB8AA3B", "sub.ftz.f32 d, a, b", "add.sat.f32 d, a, b",
            "mul.sat.f32 d, a, b", "mul.ftz.sat.f32 d, a, b")),
        Family("fma_f32", 32, three, (*(f"fma.{r}.f32 d, a, b, c" for r in ROUNDINGS), "fma.rn.ftz.f32 d, a, b, c",
                                      "fma.rn.sat.f32 d, a, b, c", "fma.rp.ftz.f32 d, a, b, c")),
        Family("minmax_f32", 32, two, (
            *(f"{op}{mode}.f32 d, a, b" for op in ("min", "max")
              for mode in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")),
            "copysign.f32 d, a, b")),
        Family("minmax3_f32", 32, three, ("slct.f32.f32 d, a, b, c", "slct.f32.s32 d, a, b, c",
                                          "setp.lt.f32 p, a, b; selp.f32 d, a, c, p")),
        Family("unary_f32", 32, one, ("neg.f32 d, a", "abs.f32 d, a", "neg.ftz.f32 d, a", "abs.ftz.f32 d, a", *(
            f"testp.{c}.f32 p, a; selp.b32 d, 1, 0, p" for c in ("finite", "infinite", "number", "notanumber", "normal",
                                                                "subnormal")))),
        Family("compare_f32", 32, two, (
            *compare("f32"), *compare("f32", modifier=".ftz"), "set.lt.f32.f32 d, a, b", "set.geu.u32.f32 d, a, b",
            "setp.gt.f32 q, a, 0f3F800000; setp.lt.and.f32 p, a, b, q; selp.b32 d, 1, 0, p")),
        Family("divide_f32", 32, two, (*(f"div.{r}.f32 d, a, b" for r in ROUNDINGS), "div.rn.ftz.f32 d, a, b")),
        Family("root_f32", 32, one, (*(f"{op}.{r}.f32 d, a" for op in ("rcp", "sqrt") for r in ROUNDINGS),
                                     "rcp.rn.ftz.f32 d, a", "sqrt.rn.ftz.f32 d, a")),
    ]


def families_f64() -> list[Family]:
    """f64 instructions."""
    one, two = vectors(FLOAT64, np.uint64, 1, 64), vectors(FLOAT64, np.uint64, 2, 64)
    three = vectors(FLOAT64, np.uint64, 3, 64)
    return [
        Family("arithmetic_f64", 64, two, (*(f"{op}.{r}.f64 d, a, b" for op in ("add", "mul") for r in ROUNDINGS),
                                           "sub.rn.f64 d, a, b", "min.f64 d, a, b", "max.f64 d, a, b",
                                           "div.rn.f64 d, a, b", "copysign.f64 d, a, b")),
        Family("fma_f64", 64, three, tuple(f"fma.{r}.f64 d, a, b, c" for r in ("rn", "rz"))),
        Family("unary_f64", 64, one, ("neg.f64 d, a", "abs.f64 d, a", "rcp.rn.f64 d, a", "sqrt.rn.f64 d, a")),
        Family("compare_f64", 32, two, compare("f64")),
    ]


def families_half() -> list[Family]:
    """f16 and bf16, single and packed."""
    out = []
    for kind, edges in (("f16", FLOAT16), ("bf16", BFLOAT16)):
        two, three = vectors(edges, np.uint16, 2), vectors(edges, np.uint16, 3)
        packed2, packed3 = pairs(edges, 2), pairs(edges, 3)
        minmax = tuple(f"{op}{mode}.{{}} d, a, b" for op in ("min", "max") for mode in ("", ".NaN", ".xorsign.abs",
                                                                                       ".NaN.xorsign.abs"))
        add = ("add.{} d, a, b", "sub.{} d, a, b", "mul.{} d, a, b", "add.rn.{} d, a, b")
        if kind == "f16":
            add += ("add.ftz.{} d, a, b", "mul.sat.{} d, a, b", "sub.ftz.sat.{} d, a, b", "mul.ftz.{} d, a, b",
                    "min.ftz.{} d, a, b", "max.ftz.NaN.{} d, a, b")
        fma = ("fma.rn.{} d, a, b, c", "fma.rn.relu.{} d, a, b, c")
        if kind == "f16":
            fma += ("fma.rn.ftz.{} d, a, b, c", "fma.rn.sat.{} d, a, b, c", "fma.rn.ftz.relu.{} d, a, b, c")
        for width, name, binary, ternary in ((16, kind, two, three), (32, f"{kind}x2", packed2, packed3)):
            unary = ("neg.{} d, a", "abs.{} d, a")
            out.append(Family(f"arithmetic_{name}", width, binary, tuple(
                text.format(name) for text in (*add, *minmax, *unary))))
            out.append(Family(f"fma_{name}", width, ternary, tuple(text.format(name) for text in fma)))
        out.append(Family(f"compare_{kind}", 32, two, compare(kind)))
        out.append(Family(f"compare_{kind}x2", 32, packed2, tuple(
            f"setp.{c}.{kind}x2 p|q, a, b; selp.b32 d, 1, 0, p; selp.b32 t, 2, 0, q; or.b32 d, d, t"
            for c in (*ORDERED, *UNORDERED))))
        out.append(Family(f"set_{kind}x2", 32, packed2, tuple(
            f"set.{c}.{kind}x2.{kind}x2 d, a, b" for c in ("lt", "neu"))))
    return out


def families_approximate() -> list[Family]:
    """Approximate instructions. The virtual GPU computes them more exactly than the hardware; the tolerances are the
    error bounds of the PTX ISA (9.7.3: rcp, sqrt, rsqrt, sin, cos, lg2, ex2, tanh; 9.7.4 for f16 and bf16) plus half
    a unit in the last place for the virtual GPU's own rounding. The ISA's bound in ulp times 2^-23 is the relative one.
    """
    unit = 2.0**-23
    f32 = {
        "rcp.approx.f32 d, a": Tolerance("f32", 1.5 * unit), "rcp.approx.ftz.f32 d, a": Tolerance("f32", 1.5 * unit),
        "sqrt.approx.f32 d, a": Tolerance("f32", 1.5 * unit), "sqrt.approx.ftz.f32 d, a": Tolerance("f32", 1.5 * unit),
        "rsqrt.approx.f32 d, a": Tolerance("f32", 2.0**-22.9 + unit / 2),
        "rsqrt.approx.ftz.f32 d, a": Tolerance("f32", 2.0**-22.9 + unit / 2),
        "ex2.approx.f32 d, a": Tolerance("f32", 2.5 * unit, 2.0**-149),
        "ex2.approx.ftz.f32 d, a": Tolerance("f32", 2.5 * unit),
        "lg2.approx.f32 d, a": Tolerance("f32", 2.0**-22 + unit / 2, 2.0**-22),
        "lg2.approx.ftz.f32 d, a": Tolerance("f32", 2.0**-22 + unit / 2, 2.0**-22),
        "tanh.approx.f32 d, a": Tolerance("f32", 2.0**-11 + unit / 2),
    }
    binary = {f"div.{form}.f32 d, a, b": Tolerance("f32", 2.5 * unit)
              for form in ("approx", "full", "approx.ftz", "full.ftz")}
    half = {"ex2.approx.f16": Tolerance("f16", 2.0**-9.9 + 2.0**-11, 2.0**-24),
            "tanh.approx.f16": Tolerance("f16", 2.0**-11, 2.0**-10.987)}
    brain = {"ex2.approx.ftz.bf16": Tolerance("bf16", 2.0**-7 + 2.0**-9),
             "tanh.approx.bf16": Tolerance("bf16", 2.0**-9, 2.0**-8)}
    trig = {f"{op}.approx{ftz}.f32 d, a": Tolerance("f32", unit / 2, 2.0**-20.5) for op in ("sin", "cos")
            for ftz in ("", ".ftz")}
    angles = np.random.RandomState(8).uniform(-2 * np.pi, 2 * np.pi, 64).astype(np.float32)
    angles[:6] = [0.0, -0.0, np.pi, -np.pi, np.pi / 2, 1e-30]
    quotients = tuple(v[(v & 0x7F800000 > 0x30000000) & (v & 0x7F800000 < 0x4F000000)][:64] for v in floats32(2, 512))
    out = [Family("approximate_f32", 32, floats32(1), tuple(f32), f32),
           Family("approximate_divide_f32", 32, quotients, tuple(binary), binary),
           Family("approximate_trigonometry_f32", 32, (angles.view(np.uint32),), tuple(trig), trig)]
    for kind, table, edges in (("f16", half, FLOAT16), ("bf16", brain, BFLOAT16)):
        single = {f"{text} d, a": bound for text, bound in table.items()}
        packed = {f"{text}x2 d, a": Tolerance(f"{kind}x2", bound.relative, bound.absolute)
                  for text, bound in table.items()}
        out.append(Family(f"approximate_{kind}", 16, vectors(edges, np.uint16, 1), tuple(single), single))
        out.append(Family(f"approximate_{kind}x2", 32, pairs(edges, 1), tuple(packed), packed))
    return out


def probes() -> list[Probe]:
    """All of this module's probes."""
    exact = [probe for family in [*families_f32(), *families_f64()] for probe in table_probes("float", family)]
    half = [probe for family in families_half() for probe in table_probes("half", family)]
    return exact + half + [p for family in families_approximate() for p in table_probes("approximate", family)]
