"""The arithmetic of the virtual GPU against exact models written from the PTX ISA, one lane at a time.

Integers are Python's, floating-point numbers are fractions, and rounding is a search for the two neighbours among a
format's codes. Every registered opcode is compared with its model, and its uniform, array, mixed and template forms
with one another. What the ISA leaves open (NaN payloads, division by zero) follows an H200, as the table says.
"""

from __future__ import annotations

import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch

from vgpu import alu
from vgpu.alu_base import BITS, DTYPE
from vgpu.errors import VirtualGpuError

LANES = 32
NAMES = sorted({key[0] for key in alu.opcodes()})
APPROXIMATE = {"approx", "full"}


def keys_of(name: str) -> list[tuple[str, ...]]:
    return [key for key in alu.opcodes() if key[0] == name]


# --- operands -----------------------------------------------------------------------------------------------

_SINGLES = np.array([
    0.0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 3, 6, 0.25, 0.75, 448, 464, 57344, 61440, 65504, 65519, 65520, 2147483648.0,
    2147483520.0, 4294967296.0, -2147483648.0, 9.223372e18, 1.8446744e19, 1e-5, 6e-8, 2.9e-8, 3.4e38, np.inf, -np.inf,
    127.5, 255.5, -128.5, 32767.5, 65535.5], np.float32)
_SINGLE_BITS = [int(x) for x in _SINGLES.view(np.uint32)] + [
    0x7FC12345, 0xFFC12345, 0x7F812345, 0x00000001, 0x807FFFFF, 0x00800000, 0x3F800001, 0x3F7FFFFF, 0xFF7FFFFF]
_DOUBLE_BITS = [int(x) for x in _SINGLES.astype(np.float64).view(np.uint64)] + [
    0x7FF8000000012345, 0xFFF0000000000001, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF,
    0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x0000000100000001]
_HALF_BITS = [0, 0x8000, 0x3C00, 0xBC00, 0x3800, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01, 0x7C01, 1, 0x8001, 0x03FF,
              0x0400, 0x3F80, 0xBF80, 0x7F80, 0xFF80, 0x7FC1, 0x7F7F, 0x0080, 0x007F, 0x4049]
_AMOUNTS = [0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255]


def _edges(bits: int) -> list[int]:
    top = 1 << bits - 1
    return [x & (1 << bits) - 1 for x in (top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, *_AMOUNTS)]


def operands(kinds: tuple[str, ...], seed: int, amounts: tuple[int, ...] = ()) -> list[np.ndarray]:
    """32 lanes for each source: edge values, special numbers, near and equal pairs, random bits."""
    rng = np.random.default_rng(seed)
    out = []
    for position, kind in enumerate(kinds):
        if kind == "pred":
            out.append(rng.integers(0, 2, LANES).astype(bool))
            continue
        bits = BITS[kind]
        if bits == 128:
            column = np.empty(LANES, object)
            column[:] = [int.from_bytes(rng.bytes(16), "little") for _ in range(LANES)]
            out.append(column)
            continue
        special = {16: _HALF_BITS, 32: _SINGLE_BITS, 64: _DOUBLE_BITS}.get(bits, [])
        pair = [int(a) << 16 | int(b) for a, b in rng.choice(_HALF_BITS, (12, 2))] if bits == 32 else []
        pool = _edges(bits) + special + special + pair
        column = [int(rng.choice(np.array(pool, object))) if rng.random() < 0.7 else
                  int(rng.integers(0, 1 << bits, dtype=np.uint64, endpoint=False)) if bits < 64 else
                  int.from_bytes(rng.bytes(8), "little") for _ in range(LANES)]
        if position and kinds[0] == kind:
            flip = (0, 1, 1 << bits - 1)
            column = [int(out[0][i]) ^ flip[i % 3] if rng.random() < 0.2 else x for i, x in enumerate(column)]
        if position in amounts:
            column = [int(rng.choice(_AMOUNTS)) for _ in column]
        out.append(np.array(column, DTYPE[kind]))
    return out


def sources(key: tuple[str, ...], seed: int) -> list:
    """Operands of an opcode; a lop3 table is a literal, and bit field positions stay within a byte."""
    kinds = alu.entry(key).src
    amounts = {"bfe": (1, 2), "bfi": (2, 3), "fns": (2,), "szext": (1,), "bmsk": (0, 1), "shf": (2,), "shl": (1,),
               "shr": (1,)}
    out = operands(kinds, seed, amounts.get(key[0], ()))
    if key[0] == "lop3":
        out[3] = int(np.random.default_rng(seed).integers(0, 256))
    if key[0] == "fns":
        out[1] = out[1] & np.uint32(31)
        out[2][::2] = -out[2][::2]
    return out


def lane(args: list, i: int) -> list[int]:
    return [a.item(i) if isinstance(a, np.ndarray) else a for a in args]


# --- exact floating point -----------------------------------------------------------------------------------

FIELDS = {"f64": (11, 52), "f32": (8, 23), "f16": (5, 10), "bf16": (8, 7), "tf32": (8, 10), "e5m2": (5, 2),
          "e4m3": (4, 3), "e2m1": (2, 1), "e2m3": (2, 3), "e3m2": (3, 2)}
SIZE = {name: 1 + sum(fields) for name, fields in FIELDS.items()}
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x3FFFF, "e5m2": 0x7F, "e4m3": 0x7F, "e2m1": 7,
       "e2m3": 0x1F, "e3m2": 0x1F}
ELEMENT = {"f16x2": "f16", "bf16x2": "bf16", "f32x2": "f32"}
INFINITE = math.inf


def size_of(code: int, name: str) -> Fraction:
    """The number of a code without sign, as if the format had no infinities."""
    exponent, mantissa = FIELDS[name]
    field, fraction = code >> mantissa, Fraction(code & (1 << mantissa) - 1, 1 << mantissa)
    bias = (1 << exponent - 1) - 1
    return (fraction + (field > 0)) * Fraction(2) ** (max(field, 1) - bias)


def largest_of(name: str) -> int:
    exponent, mantissa = FIELDS[name]
    if name in ("e2m1", "e2m3", "e3m2"):
        return (1 << exponent + mantissa) - 1
    return 0x7E if name == "e4m3" else ((1 << exponent) - 1 << mantissa) - 1


def number(bits: int, name: str):
    """(sign, magnitude) of a bit pattern, None for NaN."""
    sign, code = bits >> SIZE[name] - 1 & 1, bits & (1 << SIZE[name] - 1) - 1
    if code > largest_of(name):
        return (sign, INFINITE) if code == largest_of(name) + 1 and name != "e4m3" else None
    return sign, size_of(code, name)


def to_bits(x, name: str, mode: str = "rn", finite: bool = False, compare=None) -> int:
    """A (sign, magnitude) rounded to a format. `compare` tells the sign of exact magnitude minus candidate."""
    if x is None:
        return NAN[name]
    sign, magnitude = x
    largest, top = largest_of(name), SIZE[name] - 1
    bounded = finite or name in ("e4m3", "e2m1", "e2m3", "e3m2")
    compare = compare or (lambda candidate: magnitude - candidate)
    if magnitude == INFINITE:
        return sign << top | (largest if bounded else largest + 1)
    low, high = 0, largest + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if compare(size_of(middle, name)) >= 0 else (low, middle)
    below, above = size_of(low, name), size_of(low + 1, name)
    half = compare((below + above) / 2)
    up = {"rn": half > 0 or (half == 0 and low & 1), "rna": half >= 0, "rz": False, "rm": sign == 1,
          "rp": sign == 0}[mode] and compare(below) > 0
    code = low + bool(up)
    return sign << top | (largest if bounded and code > largest else code)


def multiply(x, y):
    if x is None or y is None or (0 in (x[1], y[1]) and INFINITE in (x[1], y[1])):
        return None
    return x[0] ^ y[0], INFINITE if INFINITE in (x[1], y[1]) else x[1] * y[1]


def add(x, y, mode):
    if x is None or y is None:
        return None
    if INFINITE in (x[1], y[1]):
        if x[1] == y[1] and x[0] != y[0]:
            return None
        return x if x[1] == INFINITE else y
    total = x[1] * (-1) ** x[0] + y[1] * (-1) ** y[0]
    if total == 0:
        return (x[0] if x[0] == y[0] and x[1] == y[1] == 0 else int(mode == "rm")), Fraction(0)
    return int(total < 0), abs(total)


def divide(x, y):
    if x is None or y is None or (x[1] == y[1] and x[1] in (0, INFINITE)):
        return None
    if x[1] == INFINITE or y[1] == 0:
        return x[0] ^ y[0], INFINITE
    return x[0] ^ y[0], Fraction(0) if y[1] == INFINITE else x[1] / y[1]


def negate(x):
    return None if x is None else (1 - x[0], x[1])


ONE = (0, Fraction(1))


def arithmetic(name: str, values: list, mode: str):
    """The exact result of an operation on (sign, magnitude) values, and how to compare with it where irrational."""
    if name in ("add", "sub"):
        return add(values[0], values[1] if name == "add" else negate(values[1]), mode), None
    if name in ("fma", "mad"):
        return add(multiply(values[0], values[1]), values[2], mode), None
    if name == "mul":
        return multiply(*values), None
    if name in ("div", "rcp"):
        return divide(*([ONE] + values)[-2:]), None
    x = values[0]
    if x is None or x[1] == 0 or (x[0] == 0 and x[1] == INFINITE):
        return x, None
    return (None, None) if x[0] else (x, lambda candidate: x[1] - candidate * candidate)


def flush(bits: int, name: str) -> int:
    """A subnormal as a zero of its sign."""
    exponent, mantissa = FIELDS[name]
    return bits if bits >> mantissa & (1 << exponent) - 1 else bits & 1 << SIZE[name] - 1


def flush_result(bits: int, x, name: str, mode: str) -> int:
    """A result x, rounded to `bits`, as a zero of its sign if it is tiny: less than the smallest normal number after
    rounding with an exponent of unlimited range [H200: mul.rn.ftz.f32 keeps 2^-126 (1 - 2^-26), mul.rz does not]."""
    exponent, mantissa = FIELDS[name]
    if x is None or x[1] in (0, INFINITE):
        return bits
    raised = to_bits((x[0], x[1] * 2 ** 8), name, mode)  # eight exponents higher it is normal, if it can matter
    return bits if (raised & (1 << SIZE[name] - 1) - 1) >> mantissa >= 9 else bits & 1 << SIZE[name] - 1


def clamp_unit(bits: int, name: str) -> int:
    x = number(bits, name)
    if x is None or x[0]:
        return 0
    return to_bits((0, Fraction(1)), name) if x[1] > 1 else bits


def rectified(bits: int, name: str) -> int:
    x = number(bits, name)
    return NAN[name] if x is None else 0 if x[0] else bits


def nan_double(name: str, args: list[int]) -> int:
    """The f64 NaN of an operation [measured on sm_90]: an operand made quiet, the last of two, the second of three."""
    order = {"div": (0, 1), "fma": (1, 2, 0), "mad": (1, 2, 0)}.get(name, (1, 0))
    for i in order[-len(args):]:
        if number(args[i], "f64") is None:
            return args[i] | 1 << 51
    return 0xFFF8000000000000


def float_model(key, args):
    """add, sub, mul, fma, mad, div, rcp, sqrt of one format."""
    name = ELEMENT.get(key[-1], key[-1])
    mode = next((m for m in key[1:-1] if m in ("rn", "rz", "rm", "rp")), "rn")
    ftz = "ftz" in key
    bits = [flush(a, name) for a in args] if ftz else args
    exact, compare = arithmetic(key[0], [number(b, name) for b in bits], mode)
    if exact is None and name == "f64":
        return nan_double(key[0], args)
    out = to_bits(exact, name, mode, compare=compare)
    if ftz:
        out = flush(out, name) if compare else flush_result(out, exact, name, mode)
    return clamp_unit(out, name) if "sat" in key else rectified(out, name) if "relu" in key else out


def mixed_model(key, args):
    """f32 arithmetic with f16 or bf16 operands before the last."""
    mode = next((m for m in key[1:-1] if m in ("rn", "rz", "rm", "rp")), "rn")
    values = [number(a, key[-1]) for a in args[:-1]] + [number(args[-1], "f32")]
    out = to_bits(arithmetic(key[0], values, mode)[0], "f32", mode)
    return clamp_unit(out, "f32") if "sat" in key else out


def by_element(model, bits: int):
    """A model of single elements for a register that packs two of them."""

    def run(key, args):
        low = model(key, [a & (1 << bits) - 1 for a in args])
        return model(key, [a >> bits for a in args]) << bits | low

    return run


def ordered(x) -> Fraction | float:
    return -x[1] if x[0] else x[1]


def extremum_model(key, args):
    name = ELEMENT.get(key[-1], key[-1]) if key[-1] != "a,b,c" else "f32"
    top = 1 << SIZE[name] - 1
    bits = [flush(a, name) for a in args] if "ftz" in key else args
    sign = 0
    for b in bits:
        sign ^= b & top
    if "abs" in key:
        bits = [b & top - 1 for b in bits]
    numbers = [b for b in bits if number(b, name) is not None]
    if not numbers or ("NaN" in key and len(numbers) < len(bits)):
        return nan_double(key[0], args) if name == "f64" else NAN[name]
    choose = min if key[0] == "min" else max
    out = choose(numbers, key=lambda b: (ordered(number(b, name)), -(b >> SIZE[name] - 1)))
    return out | sign if "xorsign" in key else out


def sign_model(key, args):
    name = ELEMENT.get(key[-1], key[-1])
    bits, top = flush(args[0], name) if "ftz" in key else args[0], 1 << SIZE[name] - 1
    if number(bits, name) is None:
        return bits | 1 << 51 if name == "f64" else NAN[name]
    return bits & top - 1 if key[0] == "abs" else bits ^ top


# --- exact integers -----------------------------------------------------------------------------------------

def wide(t: str) -> int:
    return 32 if t.endswith("x2") else 1 if t == "pred" else int(t.lstrip("usbf"))


def read(bits: int, t: str) -> int:
    n = wide(t)
    bits &= (1 << n) - 1
    return bits - (1 << n) if t[0] == "s" and bits >> n - 1 else bits


def limits(t: str) -> tuple[int, int]:
    n = wide(t)
    return (-(1 << n - 1), (1 << n - 1) - 1) if t[0] == "s" else (0, (1 << n) - 1)


def held(x: int, t: str) -> int:
    low, high = limits(t)
    return max(low, min(high, x))


def quotient(a: int, b: int) -> int:
    return int(math.copysign(1, a) * math.copysign(1, b)) * (abs(a) // abs(b))


def bit(x: int, i: int) -> int:
    return x >> i & 1


def int_arithmetic(key, args):
    """The family of + - * / on one integer type, and min, max, abs, neg, sad."""
    t, mods = key[-1], key[1:-1]
    a, b, c = ([read(x, t) for x in args] + [0, 0])[:3]
    n, name = wide(t), key[0]
    if name == "mul":
        return {"lo": a * b, "hi": a * b >> n, "wide": a * b}[mods[0]]
    if name == "mad":
        if mods[0] == "wide":
            return a * b + args[2]
        out = {"lo": a * b, "hi": a * b >> n}[mods[0]] + c
        return held(out, t) if "sat" in mods else out
    if name in ("div", "rem"):
        if b == 0:
            return -1
        return quotient(a, b) if name == "div" else a - b * quotient(a, b)
    out = {"add": lambda: a + b, "sub": lambda: a - b, "min": lambda: min(a, b), "max": lambda: max(a, b),
           "abs": lambda: abs(a), "neg": lambda: -a, "sad": lambda: c + abs(a - b)}[name]()
    return held(out, t) if "sat" in mods else max(out, 0) if "relu" in mods else out


def halves_model(key, args):
    t = key[-1][:3]
    inner = (*key[:-1], t)
    low = int_arithmetic(inner, [a & 0xFFFF for a in args]) & 0xFFFF
    return (int_arithmetic(inner, [a >> 16 for a in args]) & 0xFFFF) << 16 | low


def carry_model(key, args):
    """add.cc, addc, mad.cc … with the carry as an operand and a result."""
    t = key[-1]
    n = wide(t)
    takes = int(args.pop()) if key[0] in ("addc", "subc", "madc") else 0
    if key[0][:3] == "sub":
        total = args[0] - args[1] - takes
    elif key[0][:3] == "add":
        total = args[0] + args[1] + takes
    else:
        product = read(args[0], t) * read(args[1], t)
        part = product if "lo" in key else product >> n
        total = (part & (1 << n) - 1) + args[2] + takes
    out = total & (1 << n) - 1
    return (out, not 0 <= total < 1 << n) if "cc" in key else out


def mul24_model(key, args):
    def low(x):
        x &= 0xFFFFFF
        return x - (1 << 24) if key[-1] == "s32" and x >> 23 else x

    product = low(args[0]) * low(args[1])
    part = product >> 16 if key[1] == "hi" else product
    if "sat" in key:
        return held(read(part, "s32") + read(args[2], "s32"), "s32")
    return part + (args[2] if key[0] == "mad24" else 0)


def bits_model(key, args):
    """popc, clz, brev, bfind."""
    t = key[-1]
    n, a = wide(t), args[0]
    positions = [i for i in range(n) if bit(a, i)]
    if key[0] == "popc":
        return len(positions)
    if key[0] == "clz":
        return n - 1 - max(positions, default=-1)
    if key[0] == "brev":
        return sum(1 << n - 1 - i for i in positions)
    sign = bit(a, n - 1) if t[0] == "s" else 0
    found = max((i for i in range(n) if bit(a, i) != sign), default=None)
    return -1 if found is None else n - 1 - found if "shiftamt" in key else found


def field_model(key, args):
    """bfe and bfi, bit by bit."""
    t = key[-1]
    n = wide(t)
    if key[0] == "bfi":
        a, b, start, length = args
        return sum((bit(a, i - start) if start <= i < start + length else bit(b, i)) << i for i in range(n))
    a, start, length = args
    sign = bit(a, min(start + length - 1, n - 1)) if t[0] == "s" and length else 0
    return sum((bit(a, start + i) if i < length and start + i < n else sign) << i for i in range(n))


def fns_model(key, args):
    bits, base, offset = args[0], args[1], read(args[2], "s32")
    if offset == 0:
        return base if bit(bits, base) else -1
    left = abs(offset)
    position = base
    while 0 <= position < 32:
        left -= bit(bits, position)
        if left == 0:
            return position
        position += 1 if offset > 0 else -1
    return -1


def szext_model(key, args):
    a, n = args[0], args[1] & 31 if key[1] == "wrap" else min(args[1], 32)
    sign = bit(a, n - 1) if key[-1] == "s32" and n else 0
    return sum((bit(a, i) if i < n else sign) << i for i in range(32))


def bmsk_model(key, args):
    start, n = (x & 31 if key[1] == "wrap" else min(x, 32) for x in args)
    return sum(1 << i for i in range(start, min(start + n, 32)))


def dot_model(key, args):
    ta, tb = key[-2:]
    size = 8 if key[0] == "dp4a" else 16
    a = [read(args[0] >> size * i, ta[0] + str(size)) for i in range(32 // size)]
    b = [read(args[1] >> 8 * i, tb[0] + "8") for i in range(4)]
    b = b[2:] if key[1] == "hi" else b
    return args[2] + sum(x * y for x, y in zip(a, b, strict=False))


def prmt_model(key, args):
    """The table of modes of PTX ISA 9.7.9.7, from the most significant byte down."""
    a, b, c = args
    source = [(a | b << 32) >> 8 * i & 255 for i in range(8)]
    if len(key) == 2:
        out = [source[c >> s & 7] if not c >> s & 8 else 255 * (source[c >> s & 7] >> 7) for s in (12, 8, 4, 0)]
    else:
        i = c & 3
        picks = {"f4e": [i + 3, i + 2, i + 1, i], "b4e": [(i - 3) % 8, (i - 2) % 8, (i - 1) % 8, i], "rc8": [i] * 4,
                 "ecl": [max(j, i) for j in (3, 2, 1, 0)], "ecr": [min(j, i) for j in (3, 2, 1, 0)],
                 "rc16": [2 * (i & 1) + 1, 2 * (i & 1)] * 2}[key[2]]
        out = [source[p] for p in picks]
    return int.from_bytes(bytes(out), "big")


def lop3_model(key, args):
    a, b, c, table = args[:4]
    d = sum(bit(table, 4 * bit(a, i) + 2 * bit(b, i) + bit(c, i)) << i for i in range(32))
    if len(key) == 2:
        return d
    return d, (d != 0 and args[4]) if key[1] == "and" else (d != 0 or args[4])


def logic_model(key, args):
    n = wide(key[-1])
    a, b = ([int(x) for x in args] + [0])[:2]
    out = {"and": a & b, "or": a | b, "xor": a ^ b, "not": ~a, "cnot": int(a == 0)}[key[0]] & (1 << n) - 1
    return bool(out) if key[-1] == "pred" else out


def shift_model(key, args):
    n = wide(key[-1])
    if key[0] == "shf":
        amount = args[2] & 31 if key[2] == "wrap" else min(args[2], 32)
        both = args[1] << 32 | args[0]
        return both << amount >> 32 if key[1] == "l" else both >> amount
    amount = min(args[1], n)
    return args[0] << amount if key[0] == "shl" else read(args[0], key[-1]) >> amount


# --- comparison, selection ----------------------------------------------------------------------------------

def holds(name: str, a, b) -> bool:
    """A comparison of numbers; None is NaN."""
    if name in ("num", "nan"):
        return (a is None or b is None) == (name == "nan")
    if a is None or b is None:
        return len(name) == 3
    return {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b, "lo": a < b,
            "ls": a <= b, "hi": a > b, "hs": a >= b}[name[:2]]


def compared(key, args, t: str) -> bool:
    if t in FIELDS:
        bits = [flush(a, t) for a in args[:2]] if "ftz" in key else args[:2]
        values = [number(b, t) for b in bits]
        return holds(key[1], *(v if v is None else ordered(v) for v in values))
    return holds(key[1], *(read(a, t) for a in args[:2]))


def combined(key, p: bool, args) -> bool:
    name = next((m for m in key[2:] if m in ("and", "or", "xor")), None)
    return p if name is None else {"and": p and args[2], "or": p or args[2], "xor": p != args[2]}[name]


def setp_model(key, args):
    pair = key[-1] == "p|q"
    t = key[-2] if pair else key[-1]
    if t in ("f16x2", "bf16x2"):
        halves = ([a & 0xFFFF for a in args[:2]], [a >> 16 for a in args[:2]])
        return tuple(bool(combined(key, compared(key, h, ELEMENT[t]), args)) for h in halves)
    p = compared(key, args, t)
    return (bool(combined(key, p, args)), bool(combined(key, not p, args))) if pair else bool(combined(key, p, args))


ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C003C00, "bf16x2": 0x3F803F80}


def set_model(key, args):
    true = ONES.get(key[-2], (1 << wide(key[-2])) - 1 if key[-2] not in ONES else 0)
    p = setp_model(key, args)
    if not isinstance(p, tuple):
        return true if p else 0
    return (true & 0xFFFF if p[0] else 0) | (true & 0xFFFF0000 if p[1] else 0)


def slct_model(key, args):
    if key[-1] == "s32":
        return args[0] if read(args[2], "s32") >= 0 else args[1]
    x = number(flush(args[2], "f32") if "ftz" in key else args[2], "f32")
    return args[0] if x is not None and ordered(x) >= 0 else args[1]


def class_model(key, args):
    x = number(args[0], key[-1])
    tiny = x is not None and 0 < x[1] < size_of(1 << FIELDS[key[-1]][1], key[-1])
    finite = x is not None and x[1] != INFINITE
    return {"finite": finite, "infinite": x is not None and not finite, "number": x is not None,
            "notanumber": x is None, "normal": finite and not tiny, "subnormal": tiny}[key[1]]


def copysign_model(key, args):
    top = 1 << wide(key[-1]) - 1
    return args[0] & top | args[1] & top - 1


# --- conversions --------------------------------------------------------------------------------------------

INTEGERS = {s + n for s in "us" for n in ("8", "16", "32", "64")}


def whole(x, mode: str) -> int:
    """The integer of a (sign, magnitude) under rni, rzi, rmi or rpi."""
    v = ordered(x)
    return {"rni": round(v), "rzi": math.trunc(v), "rmi": math.floor(v), "rpi": math.ceil(v)}[mode]


def to_integer(key, args):
    """Float to integer: nearest value of the type; a NaN by the rule of PTX ISA 9.7.9.21."""
    dtype, stype = key[-2:]
    x = number(flush(args[0], stype) if "ftz" in key else args[0], stype)
    if x is None:
        plain = stype != "f64" and wide(dtype) != 64
        out = 0 if plain else limits(dtype)[0] if dtype[0] == "s" else 1 << wide(dtype) - 1
    elif x[1] == INFINITE:
        out = limits(dtype)[1 - x[0]]
    else:
        out = held(whole(x, key[1]), dtype)
    return out & (1 << max(wide(dtype), 16)) - 1


def from_integer(key, args):
    dtype, stype = key[-2:]
    v = read(args[0], stype)
    out = to_bits((int(v < 0), Fraction(abs(v))), dtype, key[1])
    return clamp_unit(out, dtype) if "sat" in key else out


def integer_to_integer(key, args):
    dtype, stype = key[-2:]
    v = read(args[0], stype)
    v = held(v, dtype) if "sat" in key else read(v, dtype)
    return v & (1 << max(wide(dtype), 16)) - 1


def double_nan(bits: int, dtype: str) -> int:
    """An f64 NaN in a narrower format: sign, quiet bit, top of the payload [measured on sm_90]."""
    exponent, mantissa = FIELDS[dtype]
    payload = (bits & (1 << 52) - 1) >> 52 - mantissa
    return (bits >> 63) << SIZE[dtype] - 1 | ((1 << exponent) - 1) << mantissa | 1 << mantissa - 1 | payload


def widened_nan(bits: int, stype: str) -> int:
    exponent, mantissa = FIELDS[stype]
    payload = (bits & (1 << mantissa) - 1) << 52 - mantissa
    return (bits >> SIZE[stype] - 1) << 63 | 0x7FF8 << 48 | payload


def float_to_float(key, args):
    dtype, stype = key[-2:]
    bits, ftz = args[0], "ftz" in key
    if len(key) == 3 and dtype == stype and dtype in ("f32", "f64"):
        return bits
    if stype == "bf16" and dtype == "f32" and not ftz:
        return bits << 16
    if ftz and stype == "f32" and dtype != "f16":
        bits = 0x7FFFFFFF if number(bits, "f32") is None else flush(bits, "f32")
    x = number(bits, stype)
    integral = key[1] in ("rni", "rzi", "rmi", "rpi")
    if x is None and dtype == "f64":
        out = widened_nan(bits, stype)
    elif x is None and stype == "f64":
        out = double_nan(bits, dtype)
    else:
        if integral and x is not None and x[1] != INFINITE:
            x = x[0], Fraction(abs(whole(x, key[1])))
        mode = next((m for m in key[1:] if m in ("rn", "rz", "rm", "rp")), "rn")
        out = to_bits(x, dtype, mode, finite="satfinite" in key)
        out = flush_result(out, x, dtype, mode) if ftz and dtype == "f32" else out
    return clamp_unit(out, dtype) if "sat" in key else rectified(out, dtype) if "relu" in key else out


def small(x, name: str, key) -> int:
    out = to_bits(x, name, "rn", finite=True)
    return 0 if "relu" in key and out >> SIZE[name] - 1 else out


def tf32_model(key, args):
    if number(args[0], "f32") is None and key[1] == "rna" and "satfinite" not in key:
        return args[0] & 0xFFFFE000
    out = to_bits(number(args[0], "f32"), "tf32", key[1], finite="satfinite" in key)
    return (rectified(out, "tf32") if "relu" in key else out) << 13


def scale_model(key, args):
    """ue8m0 by magnitude: the power of two below (rz) or above (rp)."""
    def one(bits, name):
        x = number(bits, name)
        if x is None:
            return 0xFF
        over = 0xFE if "satfinite" in key else 0xFF
        if x[1] == INFINITE:
            return over
        codes = [c for c in range(256) if (Fraction(2) ** (c - 127) <= x[1] if key[1] == "rz" else
                                           Fraction(2) ** (c - 127) >= x[1])]
        found = (max(codes, default=0) if key[1] == "rz" else min(codes, default=255))
        return min(found, over)

    if key[-1] == "bf16x2":
        return one(args[0] >> 16, "bf16") << 8 | one(args[0] & 0xFFFF, "bf16")
    return one(args[0], "f32") << 8 | one(args[1], "f32")


def narrow_pair(key, args):
    """Two numbers to a packed format, the first one or the upper half on top."""
    target = key[-2].removesuffix("x2")
    source = ELEMENT.get(key[-1], key[-1])
    high, low = (args[0] >> 16, args[0] & 0xFFFF) if key[-1] in ELEMENT else args
    step = 4 if target == "e2m1" else SIZE[target] if SIZE[target] > 8 else 8
    if target in ("f16", "bf16"):
        high, low = (float_to_float((*key[:-2], target, source), [x]) for x in (high, low))
    else:
        high, low = (small(number(x, source), target, key) for x in (high, low))
    return high << step | low


def widen_pair(key, args):
    target, source = ELEMENT[key[-2]], key[-1].removesuffix("x2")
    step, size = (4, 4) if source == "e2m1" else (8, SIZE[source] if source[0] == "e" else 8)
    out = 0
    for i in range(2):
        bits = args[0] >> step * i
        if source == "ue8m0":
            bits &= 255
            half = NAN["bf16"] if bits == 255 else to_bits((0, Fraction(2) ** (bits - 127)), "bf16")
        else:
            half = to_bits(number(bits & (1 << size) - 1, source), target, finite="satfinite" in key)
        out |= (rectified(half, target) if "relu" in key else half) << 16 * i
    return out


def pack_model(key, args):
    t = key[3]
    n = wide(t)
    pair = (held(read(args[0], "s32"), t) & (1 << n) - 1) << n | held(read(args[1], "s32"), t) & (1 << n) - 1
    return (args[2] << 2 * n | pair if len(args) == 3 else pair) & 0xFFFFFFFF


def cvt_model(key, args):
    if key[1] == "pack":
        return pack_model(key, args)
    dtype, stype = key[-2:]
    if dtype in INTEGERS:
        return integer_to_integer(key, args) if stype in INTEGERS else to_integer(key, args)
    if stype in INTEGERS:
        return from_integer(key, args)
    if dtype == "ue8m0x2":
        return scale_model(key, args)
    if dtype == "tf32":
        return tf32_model(key, args)
    if dtype.endswith("x2"):
        return widen_pair(key, args) if stype[0] in "eu" else narrow_pair(key, args)
    return float_to_float(key, args)


# --- every opcode's model -----------------------------------------------------------------------------------

def model_of(key):
    """The model of an opcode: (key, operands of one lane) -> result."""
    name, last = key[0], key[-1]
    packed = {"f16x2": 16, "bf16x2": 16, "f32x2": 32}.get(last)
    floats = last in FIELDS or packed or last == "a,b,c"
    if name in ("add", "sub", "fma") and last in ("f16", "bf16") and key[-2] == "f32":
        return mixed_model
    if name in ("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt", "min", "max", "abs", "neg") and floats:
        model = extremum_model if name in ("min", "max") else sign_model if name in ("abs", "neg") else float_model
        return by_element(model, packed) if packed else model
    if "cc" in key or name in ("addc", "subc", "madc"):
        return carry_model
    if name in ("add", "sub", "mul", "mad", "div", "rem", "min", "max", "abs", "neg", "sad"):
        return halves_model if last.endswith("x2") else int_arithmetic
    table = {
        "mul24": mul24_model, "mad24": mul24_model, "popc": bits_model, "clz": bits_model, "brev": bits_model,
        "bfind": bits_model, "bfe": field_model, "bfi": field_model, "fns": fns_model, "szext": szext_model,
        "bmsk": bmsk_model, "dp4a": dot_model, "dp2a": dot_model, "prmt": prmt_model, "lop3": lop3_model,
        "and": logic_model, "or": logic_model, "xor": logic_model, "not": logic_model, "cnot": logic_model,
        "shl": shift_model, "shr": shift_model, "shf": shift_model, "setp": setp_model, "set": set_model,
        "slct": slct_model, "testp": class_model, "copysign": copysign_model, "cvt": cvt_model,
        "mov": lambda key, args: args[0], "selp": lambda key, args: args[0] if args[2] else args[1],
    }
    return table[name]


def as_tuple(x) -> tuple:
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("name", NAMES)
def test_every_opcode_equals_its_exact_model(name):
    for n, key in enumerate(keys_of(name)):
        if APPROXIMATE & set(key) or name == "rsqrt":
            continue
        entry, args, model = alu.entry(key), sources(key, n), model_of(key)
        got = as_tuple(entry.function(*args))
        for i in range(LANES):
            values = lane(args, i)
            want = as_tuple(model(key, list(values)))
            for kind, g, w in zip(entry.dst, got, want, strict=True):
                w = w if kind == "pred" else w & (1 << BITS[kind]) - 1
                found = g.item(i) if isinstance(g, np.ndarray) else g
                assert found == w, f"{'.'.join(key)} {[hex(v) for v in values]}: {found:#x}, exactly {w:#x}"


def check_kind(value, kind: str, key) -> None:
    if isinstance(value, np.ndarray):
        assert value.dtype == DTYPE[kind] and value.shape == (LANES,), (key, value.dtype, value.shape)
    else:
        assert type(value) is (bool if kind == "pred" else int), (key, type(value))
        assert kind == "pred" or 0 <= value < 1 << BITS[kind], (key, value)


def same(x, y) -> bool:
    return bool(np.all(np.broadcast_to(x, LANES) == np.broadcast_to(y, LANES)))


def forms(args: list, fixed: int | None):
    """Operand lists that mean the same with one operand, all but one, or all of them uniform."""
    uniform = lane(args, 5)
    for position in range(len(args)):
        yield [u if i == position else a for i, (u, a) in enumerate(zip(uniform, args, strict=True))]
        yield [a if i == position else u for i, (u, a) in enumerate(zip(uniform, args, strict=True))]
    yield uniform


def spread(args: list, fixed: int | None) -> list:
    """Uniform operands as arrays."""
    out = []
    for i, a in enumerate(args):
        if isinstance(a, np.ndarray) or i == fixed:
            out.append(a)
        else:
            column = np.empty(LANES, np.bool_ if isinstance(a, bool) else object)
            column[:] = a
            out.append(column)
    return out


@pytest.mark.parametrize("name", NAMES)
def test_uniform_array_mixed_and_template_forms_agree(name):
    fixed = 3 if name == "lop3" else None
    for n, key in enumerate(keys_of(name)):
        entry, args = alu.entry(key), sources(key, 1000 + n)
        before = [a.copy() if isinstance(a, np.ndarray) else a for a in args]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for form in forms(args, fixed):
                arrays = [a.astype(DTYPE[k]) if isinstance(a, np.ndarray) else a
                          for a, k in zip(spread(form, fixed), entry.src, strict=True)]
                want = as_tuple(entry.function(*arrays))
                got = [as_tuple(entry.function(*form))]
                if entry.template:
                    names = {f"x{i}": v for i, v in enumerate(form)}
                    got.append(as_tuple(eval(entry.template.format(*names), dict(names))))
                    literal = [f"x{i}" if isinstance(v, np.ndarray) else repr(v) for i, v in enumerate(form)]
                    got.append(as_tuple(eval(entry.template.format(*literal), dict(names))))
                for results in got:
                    for kind, w, g in zip(entry.dst, want, results, strict=True):
                        assert same(w, g), (key, form)
                        check_kind(g, kind, key)
                        assert isinstance(g, np.ndarray) <= any(isinstance(a, np.ndarray) for a in form), key
        for a, b in zip(args, before, strict=True):
            assert np.array_equal(a, b), f"{key} changed an operand"


# --- approximations -----------------------------------------------------------------------------------------

def _safe(function, *xs):
    try:
        return function(*xs)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


EXACT_FUNCTIONS = {
    "rcp": lambda x: 1 / x, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x), "sin": math.sin, "cos": math.cos,
    "lg2": math.log2, "ex2": lambda x: 2.0 ** x, "tanh": math.tanh, "div": lambda a, b: a / b,
}


@pytest.mark.parametrize("name", sorted(EXACT_FUNCTIONS))
def test_approximations_are_within_one_unit_of_the_function(name):
    rng = np.random.default_rng(3)
    for key in keys_of(name):
        t = key[-1]
        if not APPROXIMATE & set(key) or t.endswith("x2"):
            continue
        fmt = {"f32": np.float32, "f64": np.float64, "f16": np.float16}.get(t)
        values = [np.abs(rng.standard_normal(LANES)) + 0.1 for _ in alu.entry(key).src]
        if fmt is None:
            values = [(v.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for v in values]
            out = (alu.entry(key).function(*values).astype(np.uint32) << 16).view(np.float32)
            inputs = [(v.astype(np.uint32) << 16).view(np.float32) for v in values]
        else:
            inputs = [v.astype(fmt) for v in values]
            bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[np.dtype(fmt).itemsize]
            out = alu.entry(key).function(*(v.view(bits) for v in inputs)).view(fmt)
        unit = {"f32": 2.0**-23, "f64": 2.0**-20 if "ftz" in key else 2.0**-52, "f16": 2.0**-10, "bf16": 2.0**-7}[t]
        for i in range(LANES):
            want = EXACT_FUNCTIONS[name](*(float(v[i]) for v in inputs))
            assert abs(float(out[i]) - want) <= unit * max(abs(want), 2.0**-14), (key, [float(v[i]) for v in inputs])


@pytest.mark.parametrize("opcode, given, want", [
    ("rcp.approx.f32", 0x80000000, 0xFF800000), ("rcp.approx.ftz.f32", 0x00000001, 0x7F800000),
    ("rcp.approx.f32", 0xFF800000, 0x80000000), ("sqrt.approx.f32", 0x80000000, 0x80000000),
    ("sqrt.approx.f32", 0xBF800000, 0x7FFFFFFF), ("rsqrt.approx.f32", 0x80000000, 0xFF800000),
    ("rsqrt.approx.ftz.f32", 0x7F800000, 0x00000000), ("lg2.approx.f32", 0x00000000, 0xFF800000),
    ("lg2.approx.f32", 0xC0000000, 0x7FFFFFFF), ("ex2.approx.ftz.f32", 0xFF800000, 0x00000000),
    ("ex2.approx.f32", 0x41200000, 0x44800000), ("sin.approx.f32", 0x7F800000, 0x7FFFFFFF),
    ("cos.approx.f32", 0x00000000, 0x3F800000), ("tanh.approx.f32", 0xFF800000, 0xBF800000),
    ("tanh.approx.f16", 0x7C00, 0x3C00), ("ex2.approx.f16", 0x4000, 0x4400),
    ("ex2.approx.ftz.bf16", 0x4040, 0x4100), ("ex2.approx.f16x2", 0x40004200, 0x44004800),
    ("rcp.approx.ftz.f64", 0x4000000000000000, 0x3FE0000000000000),
    ("rsqrt.approx.f64", 0x4010000000000000, 0x3FE0000000000000),
])
def test_approximations_at_special_values(opcode, given, want):
    assert alu.lookup(tuple(opcode.split("."))).function(given) == want


def test_division_by_huge_numbers_is_zero_only_in_the_approximate_form():
    a, b = 0x7F000000, 0x7F000000  # 2^127 / 2^127
    assert alu.lookup(("div", "approx", "f32")).function(a, b) == 0
    assert alu.lookup(("div", "full", "f32")).function(a, b) == 0x3F800000
    assert alu.lookup(("div", "approx", "f32")).function(0x7F800000, b) == 0x7FFFFFFF


# --- against other libraries --------------------------------------------------------------------------------

@pytest.mark.parametrize("opcode, operands, want", [
    ("mul.rn.ftz.f32", (0x00800400, 0x3F7FF800), 0x00800000), ("mul.rn.ftz.f32", (0x80800400, 0x3F7FF800), 0x80800000),
    ("mul.rz.ftz.f32", (0x00800400, 0x3F7FF800), 0x00000000), ("mul.rz.f32", (0x00800400, 0x3F7FF800), 0x007FFFFF),
    ("mul.rp.ftz.f32", (0x00800400, 0x3F7FF800), 0x00800000), ("mul.rp.ftz.f32", (0x80800400, 0x3F7FF800), 0x80000000),
    ("mul.rm.ftz.f32", (0x00800400, 0x3F7FF800), 0x00000000), ("mul.rm.ftz.f32", (0x80800400, 0x3F7FF800), 0x80800000),
    ("mul.rn.ftz.f32", (0x00801000, 0x3F7FE000), 0x00000000), ("mul.rn.f32", (0x00801000, 0x3F7FE000), 0x007FFFFE),
    ("mul.rp.ftz.f32", (0x00800000, 0x3F7FFFFF), 0x00000000), ("mul.rp.ftz.f32", (0x00800001, 0x3F7FFFFF), 0x00800001),
    ("fma.rn.ftz.f32", (0x00800400, 0x3F7FF800, 0), 0x00800000),
    ("fma.rz.ftz.f32", (0x00800400, 0x3F7FF800, 0), 0x00000000),
    ("mul.ftz.f16", (0x8400, 0x3BFF), 0x8000), ("mul.ftz.f16", (0x0401, 0x3BFE), 0x0400),
    ("fma.rn.ftz.f16", (0x0400, 0x3BFF, 0), 0x0000), ("mul.f16", (0x2000, 0x1FFF), 0x0400),
    ("mul.ftz.f16x2", (0x20008400, 0x1FFF3BFF), 0x00008000),
    ("cvt.rn.ftz.f32.f64", (0x380FFFFFE0000000,), 0), ("cvt.rn.ftz.f32.f64", (0xB80FFFFFF0000000,), 0x80800000),
    ("cvt.rp.ftz.f32.f64", (0xB80FFFFFF0000000,), 0x80000000), ("cvt.rm.ftz.f32.f64", (0x380FFFFFFFFFFFFF,), 0),
    ("cvt.rn.f32.f64", (0x380FFFFFE0000000,), 0x00800000), ("cvt.rn.f32.f64", (0x7FF4123456789ABC,), 0x7FE091A2)])
def test_tiny_results_are_flushed_as_on_an_h200(opcode, operands, want):
    """Measured: flushed is what would be below the smallest normal number with an exponent of unlimited range."""
    function = alu.lookup(tuple(opcode.split("."))).function
    assert function(*operands) == want
    kinds = alu.lookup(tuple(opcode.split("."))).src
    lanes = [np.full(32, v, f"u{int(kind[1:]) // 8}") for v, kind in zip(operands, kinds, strict=True)]
    assert (function(*lanes) == want).all()


def test_f16_arithmetic_equals_numpy_on_a_million_pairs():
    rng = np.random.default_rng(1)
    a, b = rng.integers(0, 1 << 16, (2, 1 << 20), dtype=np.uint16)
    for name, op in (("add", np.add), ("mul", np.multiply), ("sub", np.subtract)):
        got = alu.lookup((name, "f16")).function(a, b).view(np.float16)
        with np.errstate(all="ignore"):
            want = op(a.view(np.float16), b.view(np.float16))
        assert np.array_equal(got, want, equal_nan=True)


def test_small_formats_equal_torch():
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), (rng.standard_normal(1 << 16) * np.exp2(rng.integers(-20, 12, 1 << 16)))
                        .astype(np.float32)])
    x = x[np.isfinite(x)]
    source = torch.from_numpy(x)
    for name, kind, top in (("e4m3x2", torch.float8_e4m3fn, 448), ("e5m2x2", torch.float8_e5m2, 57344)):
        got = alu.lookup(("cvt", "rn", "satfinite", name, "f32")).function(np.zeros_like(x).view(np.uint32),
                                                                       x.view(np.uint32))
        want = source.clamp(-top, top).to(kind).view(torch.uint8).numpy()
        assert np.array_equal(got, want.astype(np.uint16))
        back = alu.lookup(("cvt", "rn", "f16x2", name)).function(got)
        assert np.array_equal((back & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32),
                              torch.from_numpy(want).view(kind).to(torch.float32).numpy())
    got = alu.lookup(("cvt", "rn", "bf16", "f32")).function(x.view(np.uint32))
    assert np.array_equal(got, source.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    got = alu.lookup(("cvt", "rn", "f16", "f32")).function(x.view(np.uint32))
    assert np.array_equal(got.view(np.float16), source.to(torch.float16).numpy())


def test_e2m1_nibbles_and_their_numbers():
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    bits = np.arange(256, dtype=np.uint8)
    halves = alu.lookup(("cvt", "rn", "f16x2", "e2m1x2")).function(bits)
    sign = lambda nibble: (-1) ** (nibble >> 3) * values[nibble & 7]  # noqa: E731
    for b in range(256):
        pair = np.array([halves[b]], np.uint32).view(np.float16)
        assert (float(pair[0]), float(pair[1])) == (sign(b & 15), sign(b >> 4))
    singles = [np.array([sign(n) for n in (bits >> s & 15).tolist()], np.float32).view(np.uint32) for s in (4, 0)]
    back = alu.lookup(("cvt", "rn", "satfinite", "e2m1x2", "f32")).function(*singles)
    negative_zero = (bits & 15 == 8) | (bits >> 4 == 8)
    assert np.array_equal(back[~negative_zero], bits[~negative_zero]) and back.dtype == np.uint8


def test_fma_rounds_once():
    """a * b + c just above the middle of two f32 numbers, by less than float64 can add to the middle."""
    one_ulp, tiny = 0x3F800001, 0x00000001
    a, b = 0x3F800001, 0x3F000000  # (1 + 2^-23) / 2
    got = alu.lookup(("fma", "rn", "f32")).function(a, b, tiny)
    assert got == 0x3F000001  # exact product, then the tiny addend does not move it
    middle = 0x4B800000  # 2^24; 2^24 + 1 is a middle
    assert alu.lookup(("fma", "rn", "f32")).function(0x3F800000, 0x3F800000, middle) == middle
    assert alu.lookup(("fma", "rn", "f32")).function(one_ulp, 0x3F800000, middle) == middle + 1
    assert alu.lookup(("fma", "rp", "f32")).function(tiny, tiny, 0x3F800000) == 0x3F800001
    assert alu.lookup(("fma", "rz", "f32")).function(tiny, tiny | 0x80000000, 0x3F800000) == 0x3F7FFFFF


# --- examples of the documents ------------------------------------------------------------------------------

@pytest.mark.parametrize("opcode, given, want", [
    ("fns.b32", (0xAAAAAAAA, 3, 1), 3), ("fns.b32", (0xAAAAAAAA, 3, 0xFFFFFFFF), 3), ("fns.b32", (0xAAAAAAAA, 2, 1), 3),
    ("fns.b32", (0xAAAAAAAA, 2, 0xFFFFFFFF), 1), ("bmsk.wrap.b32", (1, 2), 6), ("szext.wrap.u32", (0xFFFFFFFF, 0), 0),
    ("lop3.b32", (0b1100, 0b1010, 0b1111, 0x80), 0b1000), ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x1A), 0x1A),
    ("lop3.b32", (0xF0, 0xCC, 0xAA, 0x40), 0x40), ("prmt.b32", (0x33221100, 0x77665544, 0x5410), 0x55441100),
    ("dp4a.s32.s32", (0xFF01FF01, 0x02020202, 10), 10), ("div.u32", (7, 0), 0xFFFFFFFF),
    ("rem.s32", (7, 0), 0xFFFFFFFF),
    ("div.s32", (0x80000000, 0xFFFFFFFF), 0x80000000), ("rem.s32", (0xFFFFFFF9, 3), 0xFFFFFFFF),
    ("cvt.rn.f16x2.f32", (0x3F800000, 0x40000000), 0x3C004000),
    ("cvt.pack.sat.u8.s32.b32", (300, 5, 0x1234), 0x1234FF05),
    ("shr.s32", (0x80000000, 40), 0xFFFFFFFF), ("shl.b32", (1, 32), 0), ("shl.b64", (1, 4294967295), 0),
    ("shf.l.wrap.b32", (0x80000000, 1, 1), 3), ("copysign.f32", (0x80000000, 0x3F800000), 0xBF800000),
])
def test_documented_examples(opcode, given, want):
    assert alu.lookup(tuple(opcode.split("."))).function(*given) == want


# --- lookup, pack, unpack -----------------------------------------------------------------------------------

@pytest.mark.parametrize("opcode, message", [
    ("add.q32", r"add\.q32: \.q32 is not known after add"), ("frobnicate.b32", "no instruction frobnicate"),
    ("add.sat.f64", r"\.f64 is not known after add\.sat"), ("cvt.rn.f16x2", "incomplete"),
    ("cvt.rn.ftz.satfinite.e4m3x2.f32", "not known after cvt"), ("fma.f32", r"\.f32 is not known after fma"),
    ("cvt.rs.f16x2.f32", r"\.rs is not known after cvt"),
])
def test_unknown_opcodes_and_modifiers_are_refused(opcode, message):
    with pytest.raises(VirtualGpuError, match=message) as caught:
        alu.lookup(tuple(opcode.split(".")))
    assert caught.value.kind == "unknown instruction"


def test_lookup_finds_the_variants_of_operand_count():
    assert alu.lookup(("setp", "lt", "s32"), destinations=2).function(0xFFFFFFFF, 0) == (True, False)
    assert alu.lookup(("setp", "lt", "s32")).dst == ("pred",)
    assert alu.lookup(("max", "f32"), sources=3).function(0x3F800000, 0x40000000, 0x7FC00000) == 0x40000000
    assert alu.lookup(("max", "NaN", "f32"), sources=3).function(0x3F800000, 0x40000000, 0x7FC00000) == 0x7FFFFFFF
    one, other = (("cvt", "rn", *order, "f16x2", "f32") for order in (("relu", "satfinite"), ("satfinite", "relu")))
    assert alu.lookup(one) is alu.lookup(other)


def test_a_conversion_extends_to_the_width_of_its_register():
    args = np.array([0, 0x7F, 0x80, 0x1FF] * 8, np.uint32)
    for opcode, want in (("s8", [0, 0x7F, 0xFFFFFF80, 0xFFFFFFFF]), ("u8", [0, 0x7F, 0x80, 0xFF])):
        entry = alu.lookup(("cvt", opcode, "u32"), width=32)
        assert entry.dst == ("b32",)
        assert entry.function(args).tolist() == want * 8 and entry.function(args).dtype == np.uint32
        assert [entry.function(int(a)) for a in args[:4]] == want
        assert [alu.lookup(("cvt", opcode, "u32"), width=8).function(int(a)) for a in args[:4]] == [
            w & 0xFF for w in want]
    wide_source = alu.lookup(("cvt", "s64", "s32")).function(np.full(LANES, 0x1234567880000000, np.uint64))
    assert wide_source.tolist() == [0xFFFFFFFF80000000] * LANES


@pytest.mark.parametrize("bits, count", [(16, 2), (32, 2), (32, 4), (64, 2), (64, 4), (64, 8), (128, 2), (128, 4)])
def test_pack_and_unpack(bits, count):
    size = bits // count
    rng = np.random.default_rng(bits + count)
    parts = [np.array([int.from_bytes(rng.bytes(8), "little") & (1 << size) - 1 for _ in range(LANES)],
                      f"u{size // 8}") for _ in range(count)]
    want = [sum(int(p[i]) << size * j for j, p in enumerate(parts)) for i in range(LANES)]
    packed = alu.pack(bits, tuple(parts))
    assert packed.tolist() == want and (bits == 128 or packed.dtype == f"u{bits // 8}")
    for part, back in zip(parts, alu.unpack(bits, count, packed), strict=True):
        assert np.array_equal(part, back) and back.dtype == part.dtype and back.flags.c_contiguous
    uniform = tuple(p.item(3) for p in parts)
    assert alu.pack(bits, uniform) == want[3] and alu.unpack(bits, count, want[3]) == uniform
    mixed = alu.pack(bits, (uniform[0], *parts[1:]))
    assert mixed.tolist() == [w >> size << size | uniform[0] for w in want]
