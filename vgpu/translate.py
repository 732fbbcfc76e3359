"""A kernel's PTX to Python: one function a basic block, `b7(w, R) -> next block`.

w is the warp, R its register file (a list; registers that live in one block only become local variables). A register
holds one Python int for all lanes or an array of 32; see `warp.py`. Statements map to lines of the generated source, so
that an exception's traceback names the PTX line at no cost while running.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from . import alu
from .errors import VirtualGpuError
from .flow import (
    BRANCHES,
    Block,
    Item,
    liveness,
    make_item,
    post_dominators,
    region,
    registers,
    schedule,
    split,
    unwaited_loads,
    unwaited_step,
)
from .isa import Action, Const, Flow, Slot, decoder
from .late import late_registers, misuses
from .lower import lowered
from .memory import RESERVED
from .ptx import SINK, Imm, Instr, Kernel, Mem, Module, Not, Pair, Reg, Special, Sym, Vec, parse
from .warp import SPECIAL, merge

DTYPES = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64, 128: object}
# Families with a target of their own.
TARGETS = {"tcgen05": ("sm_100", "sm_101", "sm_103", "sm_110"), "wgmma": ("sm_90a",)}
WIDTHS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "b128": 128}
USE = "if w.trace is not None: w.note('use')"
_serial = itertools.count()


@dataclass
class Branch:
    """What a divergent branch needs: where the paths meet again and which registers to keep for the lanes that wait.

    slots_taken / slots_other: registers that path writes and that somebody still needs afterwards.
    """

    taken: int
    other: int
    meet: int
    slots_taken: tuple[int, ...]
    slots_other: tuple[int, ...]


@dataclass
class Program:
    """A translated kernel."""

    kernel: Kernel
    module: Module
    blocks: list
    dtypes: list  # of each register slot
    filename: str
    line_items: list  # generated line -> Instr or None
    branches: list[Branch]
    shared_static: int
    shared_offsets: dict[str, int]
    local_bytes: int
    source: str
    late_slots: tuple[int, ...]  # registers that may hold `late.Late` objects

    @property
    def exit(self) -> int:
        """Index of the virtual exit block."""
        return len(self.blocks)


def canonical(imm: Imm, width: int):
    """An immediate as the unsigned bit pattern of a register of `width` bits."""
    if width == 1:
        return bool(imm.value)
    if imm.float_bits == 64 and width == 32:
        return int(np.float32(np.uint64(imm.value).view(np.float64)).view(np.uint32))
    if imm.float_bits == 32 and width == 64:
        return int(np.float64(np.uint32(imm.value).view(np.float32)).view(np.uint64))
    return imm.value & ((1 << width) - 1)


CARRY = Reg("%cc", 1)  # the carry flag, CC.CF (PTX ISA 9.7.2): written by .cc, read by addc, subc and madc


def decode_alu(instr: Instr) -> Action:
    """An arithmetic instruction's action, from the table of `alu`."""
    first, *src = instr.operands or [None]
    dst = [first.first, first.second] if isinstance(first, Pair) else [first]
    width = first.width if isinstance(first, Reg) else None
    try:
        entry = alu.lookup(instr.opcode, len(dst), len(src), width)
    except VirtualGpuError as e:
        raise e.place(line=instr.line, text=instr.text) from None
    function = entry.function
    if "cc" in instr.opcode:
        dst.append(CARRY)
    if instr.opcode[0] in ("addc", "subc", "madc"):
        src.append(CARRY)
    if len(entry.dst) > len(dst):
        dst += [SINK] * (len(entry.dst) - len(dst))
    elif len(dst) > len(entry.dst):
        raise instr.error("unknown instruction", "two destinations are not known here")
    if len(src) != len(entry.src):
        raise instr.error("unknown instruction", f"{len(src)} source operands; expected {len(entry.src)}")
    action = Action(function, tuple(dst), tuple(src), tuple(WIDTHS[s] for s in entry.src), pure=True)
    return _Template(action, entry.template) if entry.template else action


@dataclass(frozen=True)
class _Template:
    action: Action
    template: str


class Translator:
    """Builds the `Program` of one kernel."""

    def __init__(self, module: Module, kernel: Kernel):
        self.module, self.kernel = module, kernel
        self.templates: dict[int, str] = {}
        self.namespace: dict = {"merge": merge}
        self.constants: dict[int, str] = {}
        self.lines: list[str] = []
        self.line_items: list = [None]
        self.branches: list[Branch] = []
        self.filename = f"<vgpu {next(_serial)} {kernel.name[:40]}>"
        self._lay_out_variables()

    def _lay_out_variables(self) -> None:
        variables = list(self.module.variables.values()) + list(self.kernel.shared.values())
        offset, self.shared = RESERVED, {}
        for v in variables:
            if v.space == "shared" and not v.extern and v.size:
                offset = -(-offset // v.align) * v.align
                self.shared[v.name] = offset
                offset += v.size
        self.static = offset - RESERVED
        for v in variables:
            if v.space == "shared" and v.name not in self.shared:
                offset = -(-offset // v.align) * v.align
                self.shared[v.name] = offset
        offset, self.local = 0, {}
        for v in self.kernel.locals.values():
            offset = -(-offset // v.align) * v.align
            self.local[v.name] = offset
            offset += v.size
        self.local_bytes = offset
        self.params = {p.name: p.offset for p in self.kernel.params}

    # --- statements -> items -----------------------------------------------------------------

    def items(self) -> list[Item]:
        """Decode every statement; a guarded instruction with effects becomes a branch around it."""
        body, labels = [], {}
        at = {}
        for name, position in self.kernel.labels.items():
            at.setdefault(position, []).append(name)
        for i, instr in enumerate(self.kernel.body):
            for name in at.get(i, ()):
                labels[name] = len(body)
            if instr.opcode[0] in BRANCHES:
                body.append(make_item(instr, None))
                continue
            action, template = self._decode(instr)
            if instr.guard is not None and template is False:
                skip = f"$skip{i}"
                reg, negated = instr.guard
                body.append(make_item(Instr(instr.line, instr.text, ("bra",), [Sym(skip)], (reg, not negated)), None))
                plain = Instr(instr.line, instr.text, instr.opcode, instr.operands)
                body.append(make_item(plain, action))
                labels[skip] = len(body)
            else:
                item = make_item(instr, action)
                body.append(item)
                if template:
                    self.templates[id(item)] = template
        for name in at.get(len(self.kernel.body), ()):
            labels[name] = len(body)
        self.kernel = Kernel(self.kernel.name, self.kernel.params, [], labels, self.kernel.locals, self.kernel.shared,
                             self.kernel.tables, self.kernel.directives)
        return body

    def _decode(self, instr: Instr):
        """(action, template): template is a string, None (pure function) or False (has effects)."""
        action, template = self._look_up(instr)
        for d in action.dst:
            if not isinstance(d, Reg) and d != SINK:
                name = getattr(d, "name", getattr(d, "value", "?"))
                raise instr.error("unknown instruction", f"destination {name} is no declared register")
        return action, template

    def _look_up(self, instr: Instr):
        needed = TARGETS.get(instr.opcode[0])
        if needed is not None and not self.module.target.startswith(needed):
            raise instr.error("unknown instruction", f"{instr.opcode[0]} needs .target {' or '.join(needed)}…; the "
                              f"module is for {self.module.target}")
        found = decoder(instr.opcode)
        if found is not None:
            try:
                action = found(instr)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as e:
                what = f"this form of it is not known ({type(e).__name__}: {e})"
                raise instr.error("unknown instruction", what) from e
            return action, action.template if action.pure else False
        action = decode_alu(instr)
        if isinstance(action, _Template):
            return action.action, action.template
        return action, None

    # --- operands ------------------------------------------------------------------------------

    def bind(self, value) -> str:
        """A name in the generated code's namespace for a Python object."""
        name = self.constants.get(id(value))
        if name is None:
            name = self.constants[id(value)] = f"k{len(self.constants)}"
            self.namespace[name] = value
        return name

    def reg(self, reg: Reg) -> str:
        slot = self.slots.get(reg.name)
        if slot is not None:
            return f"R[{slot}]"
        return self.temps.setdefault(reg.name, f"t{len(self.temps)}")

    def expr(self, operand, width: int) -> str:
        """Python text for a source operand."""
        if isinstance(operand, Reg):
            return self.reg(operand) if operand.name in self.written else "None"
        if isinstance(operand, Imm):
            return repr(canonical(operand, width))
        if isinstance(operand, Slot):
            return str(self.slots.get(operand.value.name, -1))
        if isinstance(operand, Const):
            if isinstance(operand.value, (int, str, bool, tuple, type(None))):
                return repr(operand.value)
            return self.bind(operand.value)
        if isinstance(operand, Special):
            if operand.name not in SPECIAL:
                raise KeyError(f"special register {operand.name} is not modelled")
            return SPECIAL[operand.name]
        if isinstance(operand, Sym):
            return self.symbol(operand)
        if isinstance(operand, Mem):
            base = self.expr(operand.base, 64)
            if operand.offset == 0:
                return base
            mask = 0xFFFFFFFFFFFFFFFF if width == 64 else 0xFFFFFFFF
            return f"(({base} + {operand.offset & mask}) & {mask})" if operand.offset > 0 else \
                f"(({base} - {-operand.offset}) & {mask})"
        if isinstance(operand, Not):
            return f"({self.expr(operand.reg, 1)} ^ True)"
        if isinstance(operand, Vec):
            return "(" + "".join(self.expr(i, width) + ", " for i in operand.items) + ")"
        raise TypeError(f"operand {operand!r}")

    def symbol(self, sym: Sym) -> str:
        """The address of a variable in its own space."""
        if sym.name in self.params:
            return str(self.params[sym.name] + sym.offset)
        if sym.name in self.shared:
            return f"(w.shared_base + {self.shared[sym.name] + sym.offset})"
        if sym.name in self.local:
            return str(self.local[sym.name] + sym.offset)
        if sym.name in self.module.variables:
            return f"({self.bind(self.module.variables[sym.name])}.address + {sym.offset})"
        raise KeyError(f"symbol {sym.name} is not declared")

    # --- code ----------------------------------------------------------------------------------

    def emit(self, text: str, instr: Instr | None) -> None:
        self.lines.append(text)
        self.line_items.append(instr)

    def assign(self, dst: tuple, value: str) -> str:
        """Assignment text; `_` for results nobody wants."""
        names = [self.reg(d) if isinstance(d, Reg) else "_" for d in dst]
        if not names:
            return value
        return f"{', '.join(names)} = {value}"

    def call(self, item: Item, *extra: str) -> str:
        a = item.action
        args = [self.expr(s, w) for s, w in itertools.zip_longest(a.src, a.widths, fillvalue=64)]
        template = self.templates.get(id(item))
        if template:
            return template.format(*args)
        return f"{self.bind(a.function)}({', '.join(('w', *extra, *args)) if not a.pure else ', '.join(args)})"

    def statement(self, item: Item) -> None:
        a, instr = item.action, item.instr
        text = self.assign(a.dst, self.call(item))
        if instr.guard is None:
            self.check_written(item, "    ")
            self.emit(f"    {text}", instr)
            self.doubtful -= {d.name for d in a.dst}
            return
        reg, negated = instr.guard
        if reg.name in self.doubtful:
            self.emit(f"    if {self.reg(reg)} is None: {self.bind(_unwritten)}({reg.name!r})", instr)
        p = self.expr(Not(reg) if negated else reg, 1)
        old = [self.reg(d) if isinstance(d, Reg) else "None" for d in a.dst]
        for d, o in zip(a.dst, old, strict=True):
            if isinstance(d, Reg) and d.name not in self.slots and d.name not in self.defined:
                self.emit(f"    {o} = None", instr)
                self.doubtful.add(d.name)
        self.emit(f"    p = {p}", instr)
        self.emit("    if p is not False:", instr)
        self.check_written(item, "        ")
        self.emit(f"        n = {self.call(item)}", instr)
        parts = ["n"] if len(old) == 1 else [f"n[{i}]" for i in range(len(old))]
        for d, o, n in zip(a.dst, old, parts, strict=True):
            if isinstance(d, Reg):
                self.emit(f"        {o} = merge(p, {n}, {o}, {self.bind(DTYPES[d.width])})", instr)

    def check_written(self, item: Item, indent: str) -> None:
        """Code that stops where arithmetic reads a register that some path leaves unwritten. Moving it is no use of it;
        other units look for themselves."""
        if not item.action.pure or item.instr.opcode[0] == "mov":
            return
        for name in sorted({r.name for s in item.action.src for r in registers(s)} & self.doubtful):
            place = self.slots.get(name)
            text = self.temps[name] if place is None else f"R[{place}]"
            self.emit(f"{indent}if {text} is None: {self.bind(_unwritten)}({name!r})", item.instr)

    def flush(self, deferred: list) -> None:
        for name, item in deferred:
            value = self.call(item) if name is None else f"{name}.read()"
            self.emit(f"    {self.assign(item.action.dst, value)}", item.instr)
        deferred.clear()

    def block(self, b: Block) -> None:
        self.temps, self.defined = {}, set()
        self.doubtful = set(self.graph[0].live_in)  # registers that may be unwritten here
        deferred: list = []
        self.emit(f"def b{b.index}(w, R):", None)
        count = len(b.items) + (1 if b.branch else 0)
        self.emit(f"    w.instructions += {count}", None)
        times, spent, loaded = schedule(b), 0.0, set()
        unwaited = self.unwaited[b.index]
        for k, item in enumerate(b.items):
            for line in sorted(unwaited_step(item, unwaited)):
                self.emit(f"    w.used_early({line})", item.instr)
            if id(item) in self.misuses:
                self.emit(f"    w.grid.warn({self.misuses[id(item)]!r})", item.instr)
            loaded = self.emit_use(item, loaded)
            last_item = k == len(b.items) - 1 and item.action.flow in (Flow.BLOCK, Flow.POLL)
            now = times[-1] if last_item else times[k]
            if not item.action.pure and now > spent:
                self.emit(f"    w.cycles += {now - spent:g}", None)
                spent = now
            if last_item and loaded:
                self.emit(f"    {USE}", None)
            try:
                self.emit_item(b, item, deferred)
            except KeyError as e:
                raise item.instr.error("unsupported", e.args[0]) from None
            self.defined.update(r.name for r in item.defs)
        last = b.items[-1].action.flow if b.items else Flow.NEXT
        if last in (Flow.BLOCK, Flow.POLL):
            return
        self.flush(deferred)
        if times[-1] > spent:
            self.emit(f"    w.cycles += {times[-1] - spent:g}", None)
        if loaded:
            self.emit(f"    {USE}", None)
        self.terminator(b)

    def emit_use(self, item: Item, loaded: set) -> set:
        """For the timing model: note where a register that a load is still fetching is first needed."""
        if loaded & {r.name for r in item.uses}:
            self.emit(f"    {USE}", item.instr)
            loaded = set()
        if item.action is not None and item.action.loads:
            loaded = loaded | {r.name for r in item.defs}
        return loaded

    def emit_item(self, b: Block, item: Item, deferred: list) -> None:
        a, instr = item.action, item.instr
        touched = {r.name for r in item.uses + item.defs}
        pending = {r.name for _, d in deferred for r in d.defs}
        if deferred and touched & pending and instr.opcode[0] == "mov" and instr.guard is None:
            deferred.append((None, item))  # moving a register that is on its way is not a use of its value
            return
        if deferred and (touched & pending or a.flow is Flow.COLLECT):
            self.flush(deferred)
        if a.flow in (Flow.NEXT, Flow.COLLECT):
            self.statement(item)
        elif a.flow is Flow.DEFER:
            name = f"d{len(self.lines)}"
            self.emit(f"    {name} = {self.call(item)}", instr)
            deferred.append((name, item))
        else:
            self.flush(deferred)
            self.yielding(b, item)

    def yielding(self, b: Block, item: Item) -> None:
        """A BLOCK or POLL instruction; it ends its block."""
        a, instr, resume = item.action, item.instr, b.successors[0]
        if a.flow is Flow.POLL and a.spin is not None and self.is_spin(b):
            for d in a.dst:
                if isinstance(d, Reg):
                    self.emit(f"    {self.reg(d)} = True", instr)
            args = [self.expr(s, w) for s, w in itertools.zip_longest(a.src, a.widths, fillvalue=64)]
            self.emit(f"    return {self.bind(a.spin)}({', '.join(['w', str(resume), *args])})", instr)
        elif a.flow is Flow.POLL:
            self.emit(f"    ok = {self.call(item)}", instr)
            if isinstance(a.dst[0], Reg):
                self.emit(f"    {self.reg(a.dst[0])} = ok", instr)
            self.emit(f"    return w.polled(ok, {resume})", instr)
        else:
            self.emit(f"    return {self.call(item, str(resume))}", instr)

    def is_spin(self, b: Block) -> bool:
        """True where the block does nothing but poll and is repeated until the poll succeeds."""
        if len(b.items) != 1 or not isinstance(b.items[0].action.dst[0], Reg):
            return False
        test = self.graph[b.successors[0]]
        if test.items or test.branch is None or test.branch.instr.guard is None:
            return False
        reg, negated = test.branch.instr.guard
        if reg.name != b.items[0].action.dst[0].name:
            return False
        failed = test.successors[0] if negated else test.successors[1]
        for _ in range(3):
            if failed == b.index:
                return True
            through = self.graph[failed]
            if through.items or through.branch is None or through.branch.instr.guard is not None:
                return False
            failed = through.successors[0]
        return False

    def terminator(self, b: Block) -> None:
        if b.branch is None:
            self.emit(f"    return {b.successors[0]}", None)
            return
        instr = b.branch.instr
        if instr.guard is None or len(set(b.successors)) == 1:
            self.emit(f"    return {b.successors[0]}", instr)
            return
        reg, negated = instr.guard
        taken, other = b.successors
        if negated:
            taken, other = other, taken
        p = self.reg(reg)
        self.branches.append(self.divergence(taken, other, b.postdom))
        self.emit(f"    p = {p}", instr)
        self.emit(f"    if p is True: return {taken}", instr)
        self.emit(f"    if p is False: return {other}", instr)
        self.emit(f"    return w.diverge(p, {self.bind(self.branches[-1])})", instr)

    def divergence(self, taken: int, other: int, meet: int) -> Branch:
        graph = self.graph
        written = [set(), set()]
        for side, start in enumerate((taken, other)):
            for i in region(graph, start, meet):
                written[side] |= graph[i].written
        keep = graph[meet].live_in
        needed = keep | (graph[other].live_in if other != meet else frozenset())
        pick = lambda names: tuple(sorted(self.slots[n] for n in names if n in self.slots))  # noqa: E731
        return Branch(taken, other, meet, pick(written[0] & needed), pick(written[1] & keep))

    def program(self) -> Program:
        items = self.items()
        self.graph = graph = split(self.kernel, items)
        post_dominators(graph)
        liveness(graph)
        self.unwaited = unwaited_loads(graph)
        self.misuses = misuses(graph)
        self.written = {r.name for item in items for r in item.defs}
        widths: dict[str, int] = {}
        late = late_registers(items)
        crossing = set(late)
        for b in graph:
            crossing |= b.live_in
            for item in b.items:
                for r in item.uses + item.defs:
                    widths[r.name] = r.width
        self.slots = {name: i for i, name in enumerate(sorted(crossing))}
        for b in graph[:-1]:
            self.block(b)
        source = "\n".join(self.lines) + "\n"
        exec(compile(source, self.filename, "exec"), self.namespace)
        return Program(
            self.kernel, self.module, [self.namespace[f"b{b.index}"] for b in graph[:-1]],
            [DTYPES[widths.get(n, 32)] for n in self.slots], self.filename, self.line_items, self.branches,
            self.static, self.shared, self.local_bytes, source, tuple(sorted(self.slots[n] for n in late)))


def _unwritten(name: str) -> None:
    raise VirtualGpuError("uninitialised", f"register {name.split('@')[0]} is read, which was never written")


@lru_cache(maxsize=256)
def translate(text: str, entry: str | None) -> Program:
    """Translate the kernel `entry` (None: the only one) of a PTX module; cached by text and name."""
    with no_garbage_collection():
        return _translate(text, entry)


@contextlib.contextmanager
def no_garbage_collection():
    """For what makes very many objects and no cycles of them: the collector would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _translate(text: str, entry: str | None) -> Program:
    module = parse(text)
    name = entry if entry is not None else next(iter(module.kernels))
    if name not in module.kernels:
        raise VirtualGpuError("launch", f"kernel {name!r} is not in the module; it has {list(module.kernels)}")
    try:
        return Translator(module, lowered(module, module.kernels[name])).program()
    except VirtualGpuError as e:
        raise e.place(kernel=name) from None
