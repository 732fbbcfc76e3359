"""PTX text to instructions: parameters, registers, variables, labels, statements (PTX ISA chapters 4, 5, 10, 11).

The parser knows the grammar, not what instructions mean. Registers and labels declared inside a `{ … }` scope (inline
assembly) get a suffix of their own, so that two scopes never share a name.
"""

from __future__ import annotations

import bisect
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache

from .errors import VirtualGpuError

TYPE_BYTES = {
    "b8": 1, "s8": 1, "u8": 1, "b16": 2, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "b32": 4, "s32": 4, "u32": 4,
    "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "s64": 8, "u64": 8, "f64": 8, "b128": 16, "pred": 1,
}
VECTORS = {"v2": "xy", "v4": "xyzw"}  # a vector register's parts (PTX ISA 5.4.2)


@dataclass(frozen=True, slots=True)
class Reg:
    """A register; `width` in bits, 1 for predicates."""

    name: str
    width: int


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal. `value` is a signed int, or the bits of a float when `float_bits` is 32 or 64."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Sym:
    """The address of a variable, parameter or function, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CallParam:
    """A .param variable declared inside a kernel's body: an argument or the result of a call."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset], with the coordinate vectors of a tensor copy in `coords`."""

    base: object
    offset: int = 0
    coords: tuple = ()


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, …}."""

    items: tuple


@dataclass(frozen=True, slots=True)
class Pair:
    """a|b, two destinations."""

    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Not:
    """!p as an operand."""

    reg: object


SINK = Sym("_")


@dataclass(slots=True)
class Instr:
    """One statement. `opcode` is split at the dots; `guard` is (predicate register, negated) or None."""

    line: int
    text: str
    opcode: tuple[str, ...]
    operands: list
    guard: tuple[Reg, bool] | None = None

    def error(self, kind: str, message: str) -> VirtualGpuError:
        """An error placed at this line."""
        return VirtualGpuError(kind, message).place(line=self.line, text=self.text)


@dataclass(slots=True)
class Variable:
    """A .shared, .global, .const or .local variable, or a parameter.

    storage, address: the memory of a .global or .const variable and its host address, once it has been launched.
    """

    name: str
    space: str
    align: int
    size: int
    offset: int = 0
    init: bytes = b""
    extern: bool = False
    storage: object = None
    address: int = 0


@dataclass(slots=True)
class Kernel:
    """One .entry: parameters with offsets, body, labels (name -> index of the next statement)."""

    name: str
    params: list[Variable]
    body: list[Instr] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    locals: dict[str, Variable] = field(default_factory=dict)
    shared: dict[str, Variable] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Function:
    """A .func with a body (`kernel`, without parameters); or the `error` that stops those who call it.

    arguments, results: a Variable for a .param, a Reg for a .reg.
    """

    kernel: Kernel
    arguments: list[Variable | Reg] = field(default_factory=list)
    results: list[Variable | Reg] = field(default_factory=list)
    error: VirtualGpuError | None = None


@dataclass(slots=True)
class Module:
    """A PTX module: target, module-level variables, kernels and functions by name."""

    target: str
    version: str
    variables: dict[str, Variable]
    kernels: dict[str, Kernel]
    functions: dict[str, Function]


_COMMENT = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.S)
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVE = re.compile(r"\.(?:loc|file)\b")
_NAME = r"[A-Za-z_$%][\w$.]*"
_STATEMENT = re.compile(r"(?:@\s*(?P<not>!?)\s*(?P<guard>[\w%$]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.S)
_SUM = re.compile(rf"({_NAME})\s*([+-])\s*(-?\w+)$")
_REGISTERS = re.compile(r"\.reg\s*((?:\.\w+\s*)+)(.*)", re.S)
_ALIGN = re.compile(r"\.align\s+(\d+)")
_POINTER = re.compile(r"\.ptr\b(\s*\.(?:global|shared|const|local)\b)?(\s*\.align\s+\d+)?")
_FLOAT32 = re.compile(r"0[fF]([0-9a-fA-F]{8})$")
_FLOAT64 = re.compile(r"0[dD]([0-9a-fA-F]{16})$")
_INT = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_DECIMAL = re.compile(r"-?\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)$")


def strip_comments(text: str) -> str:
    """The text without comments, line numbers unchanged."""

    def replace(m: re.Match) -> str:
        found = m.group()
        if found[0] == '"':
            return found
        return " " + "\n" * found.count("\n")

    return _COMMENT.sub(replace, text)


def split_commas(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "[{(":
            depth += 1
        elif ch in "]})":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    if last:
        out.append(last)
    return out


class _Scanner:
    """Statements of a body: yields ('{',), ('}',), ('label', name), ('stmt', text), each with its line."""

    def __init__(self, text: str, start: int):
        self.text, self.pos = text, start
        self.newlines = [m.start() for m in re.finditer("\n", text)]

    def line(self, pos: int) -> int:
        return bisect.bisect_left(self.newlines, pos) + 1

    def __iter__(self):
        text, n = self.text, len(self.text)
        while self.pos < n:
            ch = text[self.pos]
            if ch.isspace() or ch == ";":
                self.pos += 1
                continue
            start = self.pos
            if ch in "{}":
                self.pos += 1
                yield ch, "", self.line(start)
                continue
            m = _LABEL.match(text, start)
            if m:
                self.pos = m.end()
                yield "label", m.group(1), self.line(start)
                continue
            if _LINE_DIRECTIVE.match(text, start):
                end = text.find("\n", start)
                self.pos = n if end < 0 else end
                continue
            end = text.find(";", start)
            quote = text.find('"', start, end)
            if quote >= 0:
                end = text.find(";", text.find('"', quote + 1))
            if end < 0:
                raise VirtualGpuError("unsupported", f"unterminated statement: {text[start:start + 80]!r}").place(
                    line=self.line(start))
            self.pos = end + 1
            yield "stmt", text[start:end].strip(), self.line(start)


@dataclass(slots=True)
class _Scope:
    """Names declared between braces. `suffix` makes them different from the same names of other scopes."""

    suffix: str
    labels: set[str]
    registers: dict[str, int] = field(default_factory=dict)  # name -> width
    families: dict[str, tuple[int, int]] = field(default_factory=dict)  # prefix of %r<N> -> (width, N)
    vectors: dict[str, str] = field(default_factory=dict)  # name -> its parts' names; the parts are registers
    variables: set[str] = field(default_factory=set)
    call_params: set[str] = field(default_factory=set)

    def width(self, name: str) -> int | None:
        """The width of a register declared here, else None."""
        found = self.registers.get(name)
        if found is not None:
            return found
        prefix = name.rstrip("0123456789")
        while prefix != name:  # a prefix may itself end in digits: t2<4> declares t20 .. t23
            if prefix in self.families:
                width, count = self.families[prefix]
                number = name[len(prefix):]
                return width if int(number) < count and (number == "0" or number[0] != "0") else None
            prefix += name[len(prefix)]
        return None


class _BodyParser:
    """The statements of one kernel or function. registers: those of a function's parameter list, with their widths."""

    def __init__(self, kernel: Kernel, registers: dict[str, int] | None = None):
        self.kernel, self.formals = kernel, registers or {}
        self.scopes: list[_Scope] = []
        self.count = 0

    def push(self, labels: set[str]) -> None:
        suffix = f"@{self.count}" if self.scopes else ""
        self.count += 1
        self.scopes.append(_Scope(suffix, labels, {} if self.scopes else dict(self.formals)))

    # --- names -----------------------------------------------------------------------------------

    def register(self, name: str) -> Reg | None:
        for scope in reversed(self.scopes):
            width = scope.width(name)
            if width is not None:
                return Reg(name + scope.suffix, width)
        return None

    def name(self, name: str) -> Sym | CallParam:
        """A name that is not a register's."""
        for scope in reversed(self.scopes):
            if name in scope.call_params:
                return CallParam(name + scope.suffix)
            if name in scope.variables or name in scope.labels:
                return Sym(name + scope.suffix)
        return Sym(name)

    def label(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope.labels:
                return name + scope.suffix
        return name

    # --- declarations ----------------------------------------------------------------------------

    def declare_registers(self, text: str) -> None:
        m = _REGISTERS.match(text)
        types = m.group(1).replace(".", " ").split()
        vector = VECTORS.get(types[0]) if len(types) == 2 else None
        if len(types) > 1 and vector is None or types[-1] not in TYPE_BYTES:
            raise VirtualGpuError("unsupported", f"registers of type .{' .'.join(types)}")
        width = 1 if types[-1] == "pred" else TYPE_BYTES[types[-1]] * 8
        scope = self.scopes[-1]
        for name in split_commas(m.group(2)):
            if vector and re.fullmatch(_NAME, name):
                scope.vectors[name] = vector
                scope.registers |= {f"{name}.{part}": width for part in vector}
                continue
            family = re.match(rf"({_NAME})\s*<\s*(\d+)\s*>$", name)
            if family:
                scope.families[family.group(1)] = (width, int(family.group(2)))
            elif re.fullmatch(_NAME, name):
                scope.registers[name] = width
            else:
                raise VirtualGpuError("unsupported", f"register name {name!r}")

    def directive(self, text: str) -> None:
        scope = self.scopes[-1]
        if text.startswith(".reg"):
            self.declare_registers(text)
        elif text.startswith((".local", ".shared")):
            v = parse_variable(text)
            scope.variables.add(v.name)
            v.name += scope.suffix
            (self.kernel.locals if v.space == "local" else self.kernel.shared)[v.name] = v
        elif text.startswith(".param"):
            scope.call_params.add(parse_variable(text).name)
        elif text.startswith(".branchtargets"):
            raise VirtualGpuError("unsupported", "directive .branchtargets without a label")
        elif not text.startswith((".pragma", ".callprototype", ".calltargets")):
            raise VirtualGpuError("unsupported", f"directive {text.split()[0]} inside a kernel")

    # --- operands --------------------------------------------------------------------------------

    def operand(self, text: str):
        if text == "_":
            return SINK
        first = text[:1]
        if first == "[":
            return self.memory(text)
        if first in ("{", "("):
            return Vec(tuple(self.operand(t) for t in split_commas(text[1:-1])))
        if first == "!":
            return Not(self.operand(text[1:].strip()))
        if "|" in text:
            a, b = text.split("|")
            return Pair(self.operand(a.strip()), self.operand(b.strip()))
        reg = self.register(text)
        if reg is not None:
            return reg
        parts = next((scope.vectors[text] for scope in reversed(self.scopes) if text in scope.vectors), None)
        if parts is not None:
            return Vec(tuple(self.register(f"{text}.{part}") for part in parts))
        number = parse_number(text)
        if number is not None:
            return number
        if first == "%":
            return Special(text)
        if text == "WARP_SZ":
            return Imm(32)
        if re.fullmatch(_NAME, text):
            return self.name(text)
        m = _SUM.match(text)
        if m and self.register(m.group(1)) is None:
            return Sym(self.name(m.group(1)).name, self.offset(m))
        raise VirtualGpuError("unsupported", f"operand not understood: {text!r}")

    @staticmethod
    def offset(m: re.Match) -> int:
        number = parse_number(m.group(3))
        if number is None or number.float_bits:
            raise VirtualGpuError("unsupported", f"offset not understood: {m.group(3)!r}")
        return -number.value if m.group(2) == "-" else number.value

    def memory(self, text: str) -> Mem:
        if text[-1] != "]":
            raise VirtualGpuError("unsupported", f"operand not understood: {text!r}")
        base, *rest = split_commas(text[1:-1])
        coords = tuple(self.operand(p) for p in rest)
        m = _SUM.match(base)
        if m:
            return Mem(self.register(m.group(1)) or self.name(m.group(1)), self.offset(m), coords)
        return Mem(self.operand(base), 0, coords)

    def statement(self, text: str, line: int) -> None:
        if text.startswith("."):
            self.directive(text)
            return
        m = _STATEMENT.fullmatch(text)
        if m is None:
            raise VirtualGpuError("unsupported", "statement not understood")
        guard = None
        if m.group("guard"):
            reg = self.register(m.group("guard"))
            if reg is None or reg.width != 1:
                raise VirtualGpuError("unsupported", f"guard {m.group('guard')} is not a predicate register")
            guard = (reg, bool(m.group("not")))
        operands = [self.operand(t) for t in split_commas(m.group("operands"))]
        self.kernel.body.append(Instr(line, text, tuple(m.group("opcode").split(".")), operands, guard))

    def parse(self, text: str, start: int) -> int:
        """Parse from the opening brace at `start`; returns the position after the closing one."""
        scanner = _Scanner(text, start)
        pending_label = None
        scope_labels = iter(self._collect_labels(text, start))
        for kind, value, line in scanner:
            try:
                if kind == "{":
                    self.push(next(scope_labels))
                elif kind == "}":
                    self.scopes.pop()
                    if not self.scopes:
                        return scanner.pos
                elif kind == "label":
                    pending_label = self.label(value)
                    self.kernel.labels[pending_label] = len(self.kernel.body)
                elif value.startswith(".branchtargets") and pending_label is not None:
                    targets = split_commas(value[len(".branchtargets"):])
                    self.kernel.tables[pending_label] = [self.label(t) for t in targets]
                else:
                    self.statement(value, line)
            except VirtualGpuError as e:
                raise e.place(kernel=self.kernel.name, line=line, text=value) from None
            except (KeyError, AttributeError, ValueError, TypeError) as e:
                raise VirtualGpuError("unsupported", f"statement not understood ({e})").place(
                    kernel=self.kernel.name, line=line, text=value) from e
        raise VirtualGpuError("unsupported", "kernel body without a closing brace").place(
            kernel=self.kernel.name, line=scanner.line(start), text="{")

    def _collect_labels(self, text: str, start: int) -> list[set[str]]:
        """Labels of every scope in the order the scopes open, so that forward branches resolve."""
        found: list[set[str]] = []
        stack: list[int] = []
        for kind, value, line in _Scanner(text, start):
            if kind == "{":
                stack.append(len(found))
                found.append(set())
            elif kind == "}":
                stack.pop()
                if not stack:
                    break
            elif kind == "label":
                if value in found[stack[-1]]:
                    raise VirtualGpuError("unsupported", f"label {value} is declared twice").place(
                        kernel=self.kernel.name, line=line, text=value)
                found[stack[-1]].add(value)
        return found


def parse_number(text: str) -> Imm | None:
    """An integer (decimal, 0x, 0b, octal), 0f/0d float or decimal float literal (PTX ISA 4.5); None if it is none."""
    m = _INT.match(text)
    if m:
        digits = m.group(2)
        octal = digits[0] == "0" and digits.isdigit()
        value = int(digits, 8 if octal else 0)
        return Imm(-value if m.group(1) else value)
    m = _FLOAT32.match(text)
    if m:
        return Imm(int(m.group(1), 16), 32)
    m = _FLOAT64.match(text)
    if m:
        return Imm(int(m.group(1), 16), 64)
    if _DECIMAL.match(text):
        return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


def parse_variable(text: str) -> Variable:
    """`.shared .align 16 .b8 name[64]` and its like, with its initialiser (PTX ISA 5.4)."""
    extern = ".extern" in text
    decl, _, init = text.partition("=")
    space = re.search(r"\.(shared|global|const|local|param)", decl)
    align = _ALIGN.search(decl)
    types = [t for t in re.findall(r"\.(\w+)", decl) if t in TYPE_BYTES]
    m = re.search(rf"\s({_NAME})\s*((?:\[\s*\d*\s*\])*)\s*$", decl.strip())
    if not space or not types or not m:
        raise VirtualGpuError("unsupported", f"declaration not understood: {text.strip()!r}")
    element = TYPE_BYTES[types[-1]]
    size = element
    for dim in re.findall(r"\[\s*(\d*)\s*\]", m.group(2)):
        size *= int(dim) if dim else 0
    data = _initialiser(init, types[-1])
    return Variable(m.group(1), space.group(1), int(align.group(1)) if align else element, max(size, len(data)),
                    init=data, extern=extern)


def _initialiser(text: str, kind: str) -> bytes:
    """The bytes of `{1, 2, …}` or a single value; nested braces are flattened, row-major."""
    element, out = TYPE_BYTES[kind], b""
    for part in split_commas(re.sub(r"[{}]", " ", text)):
        number = parse_number(part)
        if number is None:
            raise VirtualGpuError("unsupported", f"initialiser not understood: {part!r}")
        value = number.value
        if number.float_bits == 64 and element == 4:
            value = struct.unpack("<I", struct.pack("<f", struct.unpack("<d", struct.pack("<Q", value))[0]))[0]
        out += (value & ((1 << 8 * element) - 1)).to_bytes(element, "little")
    return out


def _entry_params(text: str) -> list[Variable]:
    params, offset = [], 0
    for decl in split_commas(text):
        v = parse_variable(_POINTER.sub(" ", decl))  # .ptr … .align speaks of what the pointer points to
        offset = -(-offset // v.align) * v.align
        v.offset = offset
        offset += v.size
        params.append(v)
    return params


_TOP = re.compile(
    r"\.version\s+(?P<version>[\d.]+)|\.target\s+(?P<target>[\w, ]+)|\.address_size\s+\d+"
    r"|(?P<entry>(?:\.visible\s+|\.weak\s+)?\.entry\s+(?P<name>[\w$]+))"
    r"|(?P<func>(?:\.(?:visible|weak|extern)\s+)*\.func\b)"
    r"|(?P<var>(?:\.(?:visible|weak|extern|common)\s+)*\.(?:shared|global|const)\b)"
    r"|\.file[^\n]*|\.section\s+\S+\s*(?P<section>\{)|\.alias[^;]*;|\.pragma[^;]*;")


def _matching(text: str, start: int, pair: str) -> int:
    depth = 0
    for i in range(start, len(text)):
        if text[i] == pair[0]:
            depth += 1
        elif text[i] == pair[1]:
            depth -= 1
            if depth == 0:
                return i
    raise VirtualGpuError("unsupported", f"unbalanced {pair}")


def _find(text: str, what: str, start: int) -> int:
    found = text.find(what, start)
    if found < 0:
        raise VirtualGpuError("unsupported", f"module-level statement without {what!r}")
    return found


def _parse_entry(module: Module, text: str, m: re.Match) -> int:
    kernel = Kernel(m.group("name"), [])
    pos = m.end()
    brace = _find(text, "{", pos)
    paren = text.find("(", pos, brace)
    if paren >= 0:
        end = _matching(text, paren, "()")
        kernel.params = _entry_params(text[paren + 1:end])
        brace = _find(text, "{", end)
        pos = end + 1
    for name, values in re.findall(r"\.(\w+)\s*([\d,\s]*)", text[pos:brace]):
        kernel.directives[name] = tuple(int(v) for v in values.replace(",", " ").split())
    module.kernels[kernel.name] = kernel
    return _BodyParser(kernel).parse(text, brace)


@lru_cache(maxsize=64)
def parse(source: str) -> Module:
    """A module's text to a `Module`. Raises VirtualGpuError with the line of what is not understood."""
    text = strip_comments(source)
    module = Module("", "", {}, {}, {})
    pos = 0
    while True:
        while pos < len(text) and text[pos].isspace():
            pos += 1
        if pos >= len(text) or text[pos] == "\0":
            return module
        try:
            pos = _module_statement(module, text, pos)
        except VirtualGpuError as e:
            raise e.place(line=text.count("\n", 0, pos) + 1, text=text[pos:pos + 80].split("\n")[0]) from None


def _module_statement(module: Module, text: str, pos: int) -> int:
    """Understand the directive, variable, function or kernel at `pos`; returns the position after it."""
    m = _TOP.match(text, pos)
    if not m:
        raise VirtualGpuError("unsupported", "module-level statement not understood")
    if m.group("version"):
        module.version = m.group("version")
    if m.group("target"):
        module.target = m.group("target").split(",")[0].strip()
    if m.group("entry"):
        return _parse_entry(module, text, m)
    if m.group("var"):
        end = _find(text, ";", pos)
        v = parse_variable(text[pos:end])
        module.variables[v.name] = v
        return end + 1
    if m.group("func"):
        return _parse_function(module, text, m.end())
    if m.group("section"):
        return _matching(text, m.end() - 1, "{}") + 1
    return m.end()


_FUNCTION = re.compile(r"\s*(?:\((?P<results>[^)]*)\))?\s*(?P<name>[\w$]+)\s*(?:\((?P<arguments>[^)]*)\))?", re.S)


def _formals(text: str | None) -> list[Variable | Reg]:
    """A function's parameters: .param variables or .reg registers."""
    out: list[Variable | Reg] = []
    for decl in split_commas(text or ""):
        v = parse_variable(_POINTER.sub(" ", decl.replace(".reg", ".param")))
        out.append(Reg(v.name, 1 if ".pred" in decl else 8 * v.size) if ".reg" in decl else v)
    return out


def _parse_function(module: Module, text: str, pos: int) -> int:
    """A .func with its body, or its declaration alone. What is not understood of it stops those who call it."""
    brace, semicolon = text.find("{", pos), text.find(";", pos)
    if brace < 0 and semicolon < 0:
        raise VirtualGpuError("unsupported", "function without a body")
    if semicolon >= 0 and (brace < 0 or semicolon < brace):
        return semicolon + 1
    end = _matching(text, brace, "{}") + 1
    m = _FUNCTION.match(text, pos, brace)
    if m is None:
        raise VirtualGpuError("unsupported", "function without a name")
    function = Function(Kernel(m.group("name"), []))
    try:
        function.arguments, function.results = _formals(m.group("arguments")), _formals(m.group("results"))
        registers = {r.name: r.width for r in function.arguments + function.results if isinstance(r, Reg)}
        _BodyParser(function.kernel, registers).parse(text, brace)
    except VirtualGpuError as e:
        function.error = e
    module.functions[function.kernel.name] = function
    return end
