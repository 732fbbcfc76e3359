"""Integer, logic, comparison, selection and data movement instructions (PTX ISA 9.7.1, 9.7.2, 9.7.6 to 9.7.9).

In the texts of expressions M is the mask of the result's width, S the operands' sign bit, T and N the numbers of its
bit and of the width. `(x ^ S) - S` sign-extends, comparing `x ^ S` orders signed values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .alu_base import (
    PAIR,
    Alu,
    expression,
    lane_count,
    lanewise,
    mask,
    operation,
    packed,
    register,
    resized,
    signed,
    vector,
    width_of,
)

WORDS = "u16|u32|u64|s16|s32|s64"
SIGNED = "s16|s32|s64"
LONG = "u32|u64|s32|s64"
INTEGER = f"b16|b32|b64|{WORDS}"


def is_signed(type_name: str) -> bool:
    """True for s8 … s64 and their packed forms."""
    return type_name[0] == "s"


def bounds(type_name: str) -> tuple[int, int]:
    """Smallest and largest value of an integer type."""
    n = width_of(type_name)
    return (-(1 << n - 1), mask(n - 1)) if is_signed(type_name) else (0, mask(n))


def value(bits: int, type_name: str) -> int:
    """The value of a canonical bit pattern of an integer type."""
    return signed(bits, width_of(type_name)) if is_signed(type_name) else bits


def clamp(x: int, type_name: str) -> int:
    """The bits of the nearest value of an integer type (.sat)."""
    low, high = bounds(type_name)
    return min(max(x, low), high) & mask(width_of(type_name))


def masked(text: str) -> str:
    """Text whose value is cut to the result's width: arrays do that by themselves."""
    return f"(_ & M if type(_ := {text}) is int else _)"


def simple(type_name: str, count: int, text: str, **constants: int) -> Alu:
    """An expression whose operands and result all have one type."""
    n, kind = width_of(type_name), register(type_name)
    return expression(kind, " ".join([kind] * count), text, M=mask(n), S=1 << n - 1, T=n - 1, N=n, **constants)


def scalar(type_name: str, count: int, compute: Callable, result: str | None = None) -> Alu:
    """A lanewise instruction; `compute` takes and gives values (not bits) of the type."""
    n, kind = width_of(type_name), register(type_name)
    out = register(result) if result else kind
    ones = mask(32 if result else n)
    return lanewise(out, " ".join([kind] * count), lambda *xs: compute(*(value(x, type_name) for x in xs)) & ones)


# --- addition, multiplication -------------------------------------------------------------------------------

ARITHMETIC = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b}


@operation(f"add|sub.{WORDS}")
def _add(name, t):
    return simple(t, 2, masked("a + b" if name == "add" else "a - b"))


@operation("add|sub.sat.s32")
def _add_saturated(name):
    return lanewise("b32", "b32 b32", lambda a, b: clamp(ARITHMETIC[name](signed(a, 32), signed(b, 32)), "s32"))


@operation("add.u16x2|s16x2")
def _add_halves(_):
    return vector("b32", "b32 b32", packed(lambda a, b: a + b, "b16", "b32"))


def _product(t: str) -> tuple[str, dict[str, int]]:
    """Text for the product of two operands in twice their width, and its constants."""
    n = width_of(t)
    constants = {"MM": mask(2 * n), "S": 1 << n - 1, "M": mask(n)}
    if not is_signed(t):
        return f"({resized('a', 2 * n)} * {resized('b', 2 * n)})", constants
    wide = "(({0} ^ S) - S & MM if type({0}) is int else ({0}).astype('i" f"{n // 8}').astype('u{n // 4}'))"
    return (f"(((a ^ S) - S) * ((b ^ S) - S) & MM if type(a) is type(b) is int else "
            f"{wide.format('a')} * {wide.format('b')})"), constants


def _high(t: str) -> tuple[str, dict[str, int]]:
    text, constants = _product(t)
    n = width_of(t)
    return f"({text} >> {n} if type(a) is type(b) is int else ({text} >> {n}).astype('u{n // 8}'))", constants


def _high64(t: str) -> Callable[[int, int], int]:
    return lambda a, b: value(a, t) * value(b, t) >> 64


@operation(f"mul.lo.{WORDS}")
def _mul_lo(t):
    return simple(t, 2, masked("a * b"))


@operation(f"mad.lo.{WORDS}")
def _mad_lo(t):
    return simple(t, 3, masked(f"{masked('a * b')} + c"))


@operation("mul|mad.wide.u16|u32|s16|s32")
def _mul_wide(name, t):
    narrow, text, constants = register(t), *_product(t)
    wide = f"b{2 * width_of(t)}"
    if name == "mul":
        return expression(wide, f"{narrow} {narrow}", text, **constants)
    return expression(wide, f"{narrow} {narrow} {wide}", f"({text} + c) & MM", **constants)


@operation("mul|mad.hi.u16|u32|s16|s32")
def _mul_hi(name, t):
    kind, text, constants = register(t), *_high(t)
    if name == "mul":
        return expression(kind, f"{kind} {kind}", text, **constants)
    return expression(kind, f"{kind} {kind} {kind}", f"({text} + c) & M", **constants)


@operation("mul|mad.hi.u64|s64")
def _mul_hi64(name, t):
    high = _high64(t)
    if name == "mul":
        return lanewise("b64", "b64 b64", lambda a, b: high(a, b) & mask(64))
    return lanewise("b64", "b64 b64 b64", lambda a, b, c: high(a, b) + c & mask(64))


@operation("mad.hi.sat.s32")
def _mad_hi_saturated():
    return lanewise("b32", "b32 b32 b32", lambda a, b, c: clamp((signed(a, 32) * signed(b, 32) >> 32)
                                                                + signed(c, 32), "s32"))


def _product24(half: str, t: str) -> Callable[[int, int], int]:
    """The low 32 bits of a 24-bit by 24-bit product, or its bits 47 to 16 (PTX ISA 9.7.1.6)."""
    low24 = (lambda x: signed(x & mask(24), 24)) if is_signed(t) else (lambda x: x & mask(24))
    return lambda a, b: low24(a) * low24(b) >> (16 if half == "hi" else 0)


@operation("mul24.lo|hi.u32|s32")
def _mul24(half, t):
    product = _product24(half, t)
    return lanewise("b32", "b32 b32", lambda a, b: product(a, b) & mask(32))


@operation("mad24.lo|hi.u32|s32")
def _mad24(half, t):
    product = _product24(half, t)
    return lanewise("b32", "b32 b32 b32", lambda a, b, c: product(a, b) + c & mask(32))


@operation("mad24.hi.sat.s32")
def _mad24_saturated():
    product = _product24("hi", "s32")
    return lanewise("b32", "b32 b32 b32", lambda a, b, c: clamp(product(a, b) + signed(c, 32), "s32"))


@operation(f"sad.{WORDS}")
def _sad(t):
    return scalar(t, 3, lambda a, b, c: c + abs(a - b))


# --- carries (PTX ISA 9.7.2): the carry is one more operand or result, for sub the borrow -------------------

def _carrying(name: str, t: str, takes: bool, gives: bool) -> Alu:
    n, kind = width_of(t), register(t)
    total = {
        "add": lambda a, b, carry: a + b + carry, "sub": lambda a, b, carry: a - b - carry,
        "lo": lambda a, b, c, carry: (a * b & mask(n)) + c + carry,
        "hi": lambda a, b, c, carry: (value(a, t) * value(b, t) >> n & mask(n)) + c + carry,
    }[name]
    sources = " ".join([kind] * (2 if name in ("add", "sub") else 3) + ["pred"] * takes)

    def compute(*values):
        x = total(*values) if takes else total(*values, 0)
        return (x & mask(n), x >> n != 0) if gives else x & mask(n)

    return lanewise(f"{kind} pred" if gives else kind, sources, compute)


@operation(f"add|sub.cc.{LONG}")
def _add_cc(name, t):
    return _carrying(name, t, takes=False, gives=True)


@operation(f"addc|subc.cc?.{LONG}")
def _addc(name, cc, t):
    return _carrying(name.removesuffix("c"), t, takes=True, gives=cc is not None)


@operation(f"mad.lo|hi.cc.{LONG}")
def _mad_cc(half, t):
    return _carrying(half, t, takes=False, gives=True)


@operation(f"madc.lo|hi.cc?.{LONG}")
def _madc(half, cc, t):
    return _carrying(half, t, takes=True, gives=cc is not None)


# --- division -----------------------------------------------------------------------------------------------

def _quotient(a: int, b: int) -> int:
    return a // b if (a < 0) == (b < 0) else -(-a // b)


def _division(part: int, t: str) -> Alu:
    n, kind, signs = width_of(t), register(t), 1 << width_of(t) - 1 if is_signed(t) else 0

    def one(a, b):
        if b == 0:
            return mask(n)
        a, b = (a ^ signs) - signs, (b ^ signs) - signs
        q = _quotient(a, b)
        return (a - q * b if part else q) & mask(n)

    def many(a, b):
        zero = b == 0
        by = np.where(zero, a.dtype.type(1), b)
        negative_a, negative_b = (a >> n - 1, by >> n - 1) if is_signed(t) else (a & 0, a & 0)
        size_a, size_b = np.where(negative_a, -a, a), np.where(negative_b, -by, by)
        result = (size_a // size_b, size_a % size_b)[part]
        flip = (negative_a ^ negative_b, negative_a)[part]
        return np.where(zero, a.dtype.type(mask(n)), np.where(flip, -result, result))

    return vector(kind, f"{kind} {kind}", many, one)


@operation(f"div|rem.{WORDS}")
def _div(name, t):
    """Truncated division. By zero the quotient and the remainder are all ones [measured on sm_90]."""
    return _division(0 if name == "div" else 1, t)


# --- absolute value, minimum, maximum -----------------------------------------------------------------------

@operation(f"abs.{SIGNED}")
def _abs(t):
    return simple(t, 1, "((a ^ -(a >> T)) + (a >> T)) & M")


@operation(f"neg.{SIGNED}")
def _neg(t):
    return simple(t, 1, masked("-a"))


@operation(f"min|max.{WORDS}")
def _min(name, t):
    low, high = ("a", "b") if name == "min" else ("b", "a")
    less = f"({low} ^ S) < ({high} ^ S)" if is_signed(t) else f"{low} < {high}"
    return simple(t, 2, f"b ^ (a ^ b) * ({less})")


@operation("min|max.relu.s32")
def _min_relu(name):
    choose = min if name == "min" else max
    return lanewise("b32", "b32 b32", lambda a, b: max(choose(signed(a, 32), signed(b, 32)), 0))


@operation("min|max.u16x2|s16x2")
def _min_halves(name, t):
    choose, inside = np.minimum if name == "min" else np.maximum, np.int16 if is_signed(t) else np.uint16
    return vector("b32", "b32 b32", packed(lambda a, b: choose(a.view(inside), b.view(inside)), "b16", "b32"))


@operation("min|max.relu.s16x2")
def _min_relu_halves(name):
    choose = np.minimum if name == "min" else np.maximum
    return vector("b32", "b32 b32", packed(
        lambda a, b: np.maximum(choose(a.view(np.int16), b.view(np.int16)), 0), "b16", "b32"))


# --- bits ---------------------------------------------------------------------------------------------------

@operation("popc.b32|b64")
def _popc(t):
    return vector("b32", t, lambda a: np.bitwise_count(a).astype(np.uint32), int.bit_count)


@operation("clz.b32|b64")
def _clz(t):
    return lanewise("b32", t, lambda a: width_of(t) - a.bit_length())


@operation("brev.b32|b64")
def _brev(t):
    return lanewise(t, t, lambda a: int(f"{a:0{width_of(t)}b}"[::-1], 2))


@operation(f"bfind.shiftamt?.{LONG}")
def _bfind(shiftamt, t):
    """Position of the top non-sign bit, or the shift that brings it to the top (PTX ISA 9.7.1.18)."""

    def compute(a):
        found = (~a if a < 0 else a).bit_length() - 1
        return width_of(t) - 1 - found if shiftamt and found >= 0 else found

    return scalar(t, 1, compute, result="u32")


@operation("fns.b32")
def _fns():
    """The offset-th set bit from `base` up (offset > 0) or down, 0xFFFFFFFF if there is none (PTX ISA 9.7.1.19).

    A base beyond 31 is undefined; here it finds nothing.
    """

    def compute(bits, base, offset):
        offset = signed(offset, 32)
        candidates = [base] if offset == 0 else range(base, 32) if offset > 0 else range(base, -1, -1)
        found = [p for p in candidates if bits >> p & 1] if base < 32 else []
        nth = max(abs(offset), 1)
        return found[nth - 1] if nth <= len(found) else mask(32)

    return lanewise("b32", "b32 b32 b32", compute)


@operation("bfe.u32|u64")
def _bfe(t):
    start, length = ("b", "c") if t == "u32" else (resized("b", 64), resized("c", 64))
    kind = register(t)
    return expression(kind, f"{kind} b32 b32", f"(a >> ({start} & 255)) & ((1 << ({length} & 255)) - 1 & M)",
                      M=mask(width_of(t)))


@operation("bfe.s32|s64")
def _bfe_signed(t):
    kind, n = register(t), width_of(t)

    def compute(a, start, length):
        start, length = start & 255, length & 255
        if length == 0:
            return 0
        field = signed(a, n) >> start
        length = min(length, max(n - start, 1))
        return signed(field & mask(length), length) & mask(n)

    return lanewise(kind, f"{kind} b32 b32", compute)


@operation("bfi.b32|b64")
def _bfi(t):
    start, length = ("c", "d") if t == "b32" else (resized("c", 64), resized("d", 64))
    field = f"(((1 << ({length} & 255)) - 1 & M) << ({start} & 255) & M)"
    return expression(t, f"{t} {t} b32 b32", f"b ^ ((b ^ (a << ({start} & 255) & M)) & {field})", M=mask(width_of(t)))


@operation("szext.clamp|wrap.u32|s32")
def _szext(mode, t):
    def compute(a, n):
        n = n & 31 if mode == "wrap" else min(n, 32)
        field = a & mask(n)
        return signed(field, n) & mask(32) if n and is_signed(t) else field

    return lanewise("b32", "b32 b32", compute)


@operation("bmsk.clamp|wrap.b32")
def _bmsk(mode):
    def compute(start, n):
        limit = (lambda x: x & 31) if mode == "wrap" else (lambda x: min(x, 32))
        return mask(limit(n)) << limit(start) & mask(32)

    return lanewise("b32", "b32 b32", compute)


def _pieces(x: np.ndarray, t: str, bits: int) -> np.ndarray:
    """Registers as rows of their signed or unsigned pieces, int64."""
    inside = f"{'i' if is_signed(t) else 'u'}{bits // 8}"
    return np.ascontiguousarray(x).view(inside).reshape(len(x), -1).astype(np.int64)


@operation("dp4a.u32|s32.u32|s32")
def _dp4a(ta, tb):
    def body(a, b, c):
        return ((_pieces(a, ta, 8) * _pieces(b, tb, 8)).sum(axis=1) + c).astype(np.uint32)

    return vector("b32", "b32 b32 b32", body)


@operation("dp2a.lo|hi.u32|s32.u32|s32")
def _dp2a(half, ta, tb):
    part = slice(0, 2) if half == "lo" else slice(2, 4)

    def body(a, b, c):
        return ((_pieces(a, ta, 16) * _pieces(b, tb, 8)[:, part]).sum(axis=1) + c).astype(np.uint32)

    return vector("b32", "b32 b32 b32", body)


# --- permutation of bytes (PTX ISA 9.7.9.7) -----------------------------------------------------------------

# mode -> the selector of the generic form for each value of the two control bits
PERMUTE = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


def permute(a: int, b: int, control: int) -> int:
    """prmt.b32 on uniform operands: byte i of the result is byte `control >> 4 i & 7` of b:a, or its sign."""
    source, out = a | b << 32, 0
    for i in range(4):
        select = control >> 4 * i & 15
        byte = source >> 8 * (select & 7) & 255
        out |= (byte if select < 8 else 255 * (byte >> 7)) << 8 * i
    return out


@operation("prmt.b32")
def _prmt():
    each = lanewise("b32", "b32 b32 b32", permute).function

    def run(a, b, control):
        n = lane_count((a, b))
        if not n or type(control) is not int:
            return each(a, b, control)
        rows = np.empty((n, 2), np.uint32)
        rows[:, 0], rows[:, 1] = a, b
        select = [control >> s & 15 for s in (0, 4, 8, 12)]
        out = rows.view(np.uint8)[:, [s & 7 for s in select]]
        for i in (i for i in range(4) if select[i] > 7):
            out[:, i] = (out[:, i] >> 7) * 255
        return np.ascontiguousarray(out).view(np.uint32).reshape(n)

    return Alu(("b32",), ("b32", "b32", "b32"), run)


@operation("prmt.b32.f4e|b4e|rc8|ecl|ecr|rc16")
def _prmt_mode(mode):
    return lanewise("b32", "b32 b32 b32", lambda a, b, c: permute(a, b, PERMUTE[mode][c & 3]))


# --- logic and shifts ---------------------------------------------------------------------------------------

LOGIC = {"and": "&", "or": "|", "xor": "^"}


@operation("and|or|xor.pred|b16|b32|b64")
def _logic(name, t):
    return expression(t, f"{t} {t}", f"a {LOGIC[name]} b")


@operation("not.pred|b16|b32|b64")
def _not(t):
    return expression(t, t, "a ^ True") if t == "pred" else expression(t, t, "a ^ M", M=mask(width_of(t)))


@operation("cnot.b16|b32|b64")
def _cnot(t):
    return lanewise(t, t, lambda a: int(a == 0))


@lru_cache(maxsize=256)
def truth_table(lut: int) -> Callable:
    """The function of a lop3 look-up table, as exclusive ors of ands (its algebraic normal form)."""
    terms = []
    for term in range(8):
        inside = [v for v in range(8) if v & term == v]
        if sum(lut >> v for v in inside) & 1:
            names = [name for bit, name in ((4, "a"), (2, "b"), (1, "c")) if term & bit]
            terms.append(" & ".join(names) or str(mask(32)))
    return eval(f"lambda a, b, c: {' ^ '.join(terms) or 0}", {"__name__": __name__})


def lop3(a, b, c, lut: int):
    """lop3.b32: bit i of the result is bit `a_i b_i c_i` of the table (PTX ISA 9.7.8.6)."""
    return truth_table(lut & 255)(a, b, c)


@operation("lop3.b32")
def _lop3():
    return Alu(("b32",), ("b32", "b32", "b32", "b32"), lop3)


@operation("lop3.and|or.b32")
def _lop3_predicate(name):
    def run(a, b, c, lut, q):
        d = lop3(a, b, c, lut)
        return d, (d != 0) & q if name == "and" else (d != 0) | q

    return Alu(("b32", "pred"), ("b32", "b32", "b32", "b32", "pred"), run)


def _amount(t: str) -> str:
    """A shift amount, in 32 bits, as an array of the shifted operand's width; beyond the width it stays so."""
    n = width_of(t)
    if n == 16:
        return "(min(b, 16) if type(b) is int else (b - (b - 16) * (b > 16)).astype('u2'))"
    return "b" if n == 32 else resized("b", n)


@operation("shl.b16|b32|b64")
def _shl(t):
    """NumPy, like PTX, shifts everything out where the amount is the width or more."""
    text = f"(a << b & M if b < N else 0) if type(a) is type(b) is int else a << {_amount(t)}"
    return expression(t, f"{t} b32", text, M=mask(width_of(t)), N=width_of(t))


@operation("shr.b16|b32|b64|u16|u32|u64")
def _shr(t):
    return expression(register(t), f"{register(t)} b32", f"a >> {_amount(t)}")


@operation("shr.s16|s32|s64")
def _shr_signed(t):
    kind, n = register(t), width_of(t)
    one = "((a ^ S) - S >> b) & M"
    lanes = f"((a).view('i{n // 8}') >> min(b, T)).view('u{n // 8}')"
    amount = "(b - (b - T) * (b > T))" + ("" if n == 32 else f".astype('u{n // 8}')")
    return expression(kind, f"{kind} b32", f"({one} if type(a) is int else {lanes}) if type(b) is int else "
                      f"((a ^ S) >> {amount}) - (S >> {amount}) & M", M=mask(n), S=1 << n - 1, T=n - 1)


@operation("shf.l|r.clamp|wrap.b32")
def _shf(direction, mode):
    n = "(c & 31)" if mode == "wrap" else "(c - (c - 32) * (c > 32))"
    text = f"(b << {n}) & M | (a >> (32 - {n}))" if direction == "l" else f"(b << (32 - {n})) & M | (a >> {n})"
    return expression("b32", "b32 b32 b32", text, M=mask(32))


# --- comparison and selection (PTX ISA 9.7.6) ---------------------------------------------------------------

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
           "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_COMPARISONS = ("eq|ne", "lt|le|gt|ge", "lo|ls|hi|hs")
_COMPARED = tuple(zip(_COMPARISONS, (INTEGER, WORDS, "u16|u32|u64"), strict=True))


def _comparison(name: str, t: str) -> tuple[str, dict[str, int]]:
    if is_signed(t) and name not in ("eq", "ne"):
        return f"(a ^ S) {COMPARE[name]} (b ^ S)", {"S": 1 << width_of(t) - 1}
    return f"a {COMPARE[name]} b", {}


@operation(*(f"setp.{names}.{types}" for names, types in _COMPARED))
def _setp(name, t):
    text, constants = _comparison(name, t)
    return expression("pred", f"{register(t)} {register(t)}", text, **constants)


@operation(*(f"setp.{names}.{types}" for names, types in _COMPARED), variant=PAIR)
def _setp_pair(name, t):
    text, constants = _comparison(name, t)
    return expression("pred pred", f"{register(t)} {register(t)}", f"({text}), ({text}) ^ True", **constants)


@operation(*(f"setp.{names}.and|or|xor.{types}" for names, types in _COMPARED))
def _setp_bool(name, boolean, t):
    text, constants = _comparison(name, t)
    return expression("pred", f"{register(t)} {register(t)} pred", f"({text}) {LOGIC[boolean]} c", **constants)


@operation(*(f"setp.{names}.and|or|xor.{types}" for names, types in _COMPARED), variant=PAIR)
def _setp_bool_pair(name, boolean, t):
    text, constants = _comparison(name, t)
    op = LOGIC[boolean]
    return expression("pred pred", f"{register(t)} {register(t)} pred",
                      f"(({text}) {op} c), (({text}) ^ True) {op} c", **constants)


TRUE = {"u32": mask(32), "s32": mask(32), "f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80,
        "u16": mask(16), "s16": mask(16)}


def set_value(test: Callable, dtype: str) -> Callable:
    """A comparison's predicate as the `set` result: ones (integers) or 1.0 (floats) where true, else 0."""
    true, kind = TRUE[dtype], np.dtype(f"u{width_of(dtype) // 8}").type

    def run(*values):
        p = test(*values)
        return true * p if type(p) is bool else p * kind(true)

    return run


@operation(*(f"set.{names}.u32|s32|f32|f16|bf16.{types}" for names, types in _COMPARED))
def _set(name, dtype, t):
    return Alu((register(dtype),), (register(t),) * 2, set_value(_setp(name, t).function, dtype))


@operation(*(f"set.{names}.and|or|xor.u32|s32|f32|f16|bf16.{types}" for names, types in _COMPARED))
def _set_bool(name, boolean, dtype, t):
    test = _setp_bool(name, boolean, t).function
    return Alu((register(dtype),), (register(t), register(t), "pred"), set_value(test, dtype))


@operation(f"selp.{INTEGER}|f32|f64")
def _selp(t):
    kind = register(t)
    text = f"a if c is True else b if c is False else b ^ (a ^ b) * (c).astype('u{width_of(t) // 8}')"
    return expression(kind, f"{kind} {kind} pred", text)


def _slct(t: str, not_negative: Callable[[int], bool]) -> Alu:
    kind = register(t)
    return lanewise(kind, f"{kind} {kind} b32", lambda a, b, c: a if not_negative(c) else b)


@operation(f"slct.{INTEGER}|f32|f64.s32")
def _slct_int(t):
    return _slct(t, lambda c: c < 1 << 31)


@operation(f"slct.ftz?.{INTEGER}|f32|f64.f32")
def _slct_float(ftz, t):
    tiny = 0x00800000 if ftz else 1  # below it, a magnitude is zero
    return _slct(t, lambda c: c & mask(31) <= 0x7F800000 and (c < 1 << 31 or c & mask(31) < tiny))


# --- movement -----------------------------------------------------------------------------------------------

@operation(f"mov.pred|{INTEGER}|f32|f64|b128")
def _mov(t):
    return expression(register(t), register(t), "a")


def pack(bits: int, parts: tuple):
    """The register of `bits` bits whose pieces are `parts`, lowest first (mov.b64 d, {a, b}; PTX ISA 9.7.9.2).

    Pieces and result are uniform ints or arrays; a 128-bit result is an int or an array of Python ints.
    """
    n, size = lane_count(parts), bits // len(parts)
    if not n:
        return sum(part << size * i for i, part in enumerate(parts))
    if bits == 128:
        columns = [p.tolist() if type(p) is np.ndarray else [p] * n for p in parts]
        out = np.empty(n, object)
        out[:] = [sum(part << size * i for i, part in enumerate(row)) for row in zip(*columns, strict=True)]
        return out
    out = np.empty((n, len(parts)), f"u{size // 8}")
    for i, part in enumerate(parts):
        out[:, i] = part
    return out.view(f"u{bits // 8}").reshape(n)


def unpack(bits: int, count: int, whole) -> tuple:
    """The `count` pieces of a register of `bits` bits, lowest first (mov.b64 {a, b}, d)."""
    size = bits // count
    if type(whole) is not np.ndarray:
        return tuple(whole >> size * i & mask(size) for i in range(count))
    if bits == 128:
        return tuple(np.array([x >> size * i & mask(size) for x in whole], f"u{size // 8}") for i in range(count))
    pieces = np.ascontiguousarray(whole).view(f"u{size // 8}").reshape(-1, count)
    return tuple(pieces[:, i].copy() for i in range(count))
