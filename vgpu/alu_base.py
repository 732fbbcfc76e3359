"""What an arithmetic instruction is, the registry of all of them, and the four ways to write one.

A value is a Python int (the same in all lanes, canonical unsigned bits) or an array of lanes of dtype uint8 … uint64;
a predicate is a bool or an array of np.bool_. The four ways: `expression` (Python text that works on both), `vector`
(a NumPy body on arrays), `floating` (the same for floating point) and `lanewise` (Python on one lane).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "b128": 128}
DTYPE = {
    "pred": np.dtype(np.bool_), "b8": np.dtype(np.uint8), "b16": np.dtype(np.uint16), "b32": np.dtype(np.uint32),
    "b64": np.dtype(np.uint64), "b128": np.dtype(object),
}
_PACKED = {"u16x2": 32, "s16x2": 32, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16,
           "e2m3x2": 16, "e3m2x2": 16, "e2m1x2": 8, "ue8m0x2": 16}


@dataclass(frozen=True)
class Alu:
    """One instruction's arithmetic.

    dst, src: register kinds ("pred", "b8" … "b128") of the results and of the operands, in PTX operand order.
    function: operands -> result, or a tuple where `dst` has several. Any mix of uniform and array operands; uniform
    results where all operands are uniform; never changes an operand.
    template: the same as Python text, operands as {0}, {1} …, each a name or an int literal; None: call `function`.
    It uses nothing but builtins, and may assign the local name `_`.
    """

    dst: tuple[str, ...]
    src: tuple[str, ...]
    function: Callable
    template: str | None = None


def width_of(type_name: str) -> int:
    """Bits of a PTX type: 32 for s32, f16x2, tf32 …, 1 for pred."""
    if type_name == "pred":
        return 1
    return _PACKED.get(type_name) or int(re.fullmatch(r"[a-z]+(\d+)", type_name).group(1))


def register(type_name: str) -> str:
    """The register kind that holds a PTX type: "b32" for s32 or f16x2."""
    return "pred" if type_name == "pred" else f"b{32 if type_name == 'tf32' else width_of(type_name)}"


def mask(bits: int) -> int:
    """All ones in `bits` bits."""
    return (1 << bits) - 1


def signed(value: int, bits: int) -> int:
    """The two's complement value of a canonical bit pattern."""
    return value - (value >> (bits - 1) << bits)


# --- the registry -------------------------------------------------------------------------------------------

# opcode -> (builder, choices); a variant of operand count has one more item, see `PAIR` and `TRIPLE`
REGISTRY: dict[tuple[str, ...], tuple[Callable, tuple]] = {}
PAIR = "p|q"  # the form with two destinations
TRIPLE = "a,b,c"  # the form with three sources


def expand(pattern: str) -> Iterator[tuple[tuple[str, ...], tuple]]:
    """All opcodes of a pattern and the choices each made.

    A pattern is an opcode whose parts may list alternatives ("s32|u32") and be optional ("ftz?": None if absent). Only
    these parts are choices, and the marked ones: "f32!" is always there, "~" never (None).
    """
    parts = []
    for text in pattern.split("."):
        names = [None] if text == "~" else text.rstrip("?!").split("|")
        free = text == "~" or text[-1] in "?!" or len(names) > 1
        parts.append(([None] * text.endswith("?") + names, free))
    for combination in itertools.product(*(names for names, _ in parts)):
        opcode = tuple(part for part in combination if part is not None)
        yield opcode, tuple(c for c, (_, free) in zip(combination, parts, strict=True) if free)


def operation(*patterns: str, variant: str | None = None):
    """Register the decorated builder, `choices -> Alu`, for every opcode of the patterns."""

    def enter(build: Callable) -> Callable:
        for pattern in patterns:
            for opcode, choices in expand(pattern):
                key = opcode if variant is None else (*opcode, variant)
                if key in REGISTRY:
                    raise ValueError(f"{'.'.join(key)} is registered twice")
                REGISTRY[key] = (build, choices)
        return build

    return enter


# --- writing an instruction ---------------------------------------------------------------------------------

def _kinds(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def expression(dst: str, src: str, text: str, **constants: int) -> Alu:
    """An instruction as Python text over the operands a, b, c, d and upper-case constants.

    The text may name an operand several times, but not divide by one.
    """
    for name, value in constants.items():
        text = re.sub(rf"\b{name}\b", str(value), text)
    template = "(" + re.sub(r"\b([a-d])\b", lambda m: f"{{{ord(m.group()) - ord('a')}}}", text) + ")"
    names = "abcd"[:len(src.split())]
    function = eval(f"lambda {', '.join(names)}: {template.format(*names)}", {"__name__": __name__})
    return Alu(_kinds(dst), _kinds(src), function, template)


def resized(name: str, bits: int) -> str:
    """Text for an operand as an array of another width; ints stay as they are."""
    return f"({name} if type({name}) is int else ({name}).astype('u{bits // 8}'))"


def lane_count(values: tuple) -> int:
    """Lanes of the array operands; 0 where all are uniform."""
    for v in values:
        if type(v) is np.ndarray:
            return len(v)
    return 0


def lanewise(dst: str, src: str, scalar: Callable) -> Alu:
    """An instruction computed in Python lane by lane (about 10 us on arrays: for rare instructions)."""
    results = _kinds(dst)
    types = [DTYPE[k] for k in results]

    def run(*values):
        n = lane_count(values)
        if not n:
            return scalar(*values)
        out = list(map(scalar, *(v.tolist() if type(v) is np.ndarray else [v] * n for v in values)))
        if len(types) == 1:
            return np.array(out, types[0])
        return tuple(np.array(column, t) for column, t in zip(zip(*out, strict=True), types, strict=True))

    return Alu(results, _kinds(src), run)


def _arrays(values: tuple, kinds: list[tuple[np.dtype, int]], n: int) -> list[np.ndarray]:
    out = []
    for v, (dtype, ones) in zip(values, kinds, strict=True):
        if type(v) is not np.ndarray:
            uniform = np.empty(n or 1, dtype)
            uniform.fill(v & ones)
            out.append(uniform)
        else:
            out.append(v if v.dtype == dtype else v.astype(dtype))
    return out


def _uniform(result, results: tuple[str, ...]):
    if len(results) == 1:
        return result.item(0)
    return tuple(r.item(0) for r in result)


def vector(dst: str, src: str, body: Callable, scalar: Callable | None = None) -> Alu:
    """An instruction as a NumPy body on arrays of the operands' dtypes; `scalar` (optional) for uniform operands."""
    results, sources = _kinds(dst), _kinds(src)
    kinds = [(DTYPE[k], mask(BITS[k])) for k in sources]

    def run(*values):
        n = lane_count(values)
        if n:
            return body(*_arrays(values, kinds, n))
        return scalar(*values) if scalar else _uniform(body(*_arrays(values, kinds, 0)), results)

    return Alu(results, sources, run)


def floating(dst: str, src: str, body: Callable) -> Alu:
    """Like `vector`, for bodies whose floating-point exceptions must stay silent."""
    inner = vector(dst, src, body).function

    def run(*values):
        with np.errstate(all="ignore"):
            return inner(*values)

    return Alu(_kinds(dst), _kinds(src), run)


def packed(body: Callable, element: str, result: str) -> Callable:
    """A body on elements ("b16") made to work on registers ("b32") that pack several, low bits first."""
    inside, outside = DTYPE[element], DTYPE[result]
    return lambda *arrays: body(*(np.ascontiguousarray(a).view(inside) for a in arrays)).view(outside)
