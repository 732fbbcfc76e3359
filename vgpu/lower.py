"""Calls and jump tables in terms of plain instructions, before a kernel is translated (PTX ISA 7.1, 9.7.12).

The body of a device function takes the place of a call. Registers, labels and local variables of the body get a suffix
of their own at every call; a .param formal stands for the caller's .param variable, a .reg formal is moved from or to
the caller's operand. brx.idx becomes a chain of comparisons and branches, in which lanes may part.
"""

from __future__ import annotations

from dataclasses import replace

from .errors import VirtualGpuError
from .isa import Action, decodes
from .ptx import CallParam, Function, Imm, Instr, Kernel, Mem, Module, Not, Pair, Reg, Sym, Vec

RETURNS = {("ret",), ("ret", "uni")}


def lowered(module: Module, kernel: Kernel) -> Kernel:
    """`kernel` with the bodies of the functions it calls, and without brx.idx. Raises `unsupported` for recursion."""
    return _without_tables(_Inliner(module).kernel(kernel, ()))


def _rebuilt(kernel: Kernel, expand) -> Kernel:
    """A copy of `kernel`; expand(copy, statement, its number) appends what stands for each statement."""
    out = replace(kernel, body=[], labels={}, locals=dict(kernel.locals), tables=dict(kernel.tables))
    places = []
    for k, instr in enumerate(kernel.body):
        places.append(len(out.body))
        expand(out, instr, k)
    places.append(len(out.body))
    out.labels |= {label: places[k] for label, k in kernel.labels.items()}
    return out


# --- jump tables -----------------------------------------------------------------------------------------


def _without_tables(kernel: Kernel) -> Kernel:
    if not any(i.opcode[0] == "brx" for i in kernel.body):
        return kernel

    def expand(out: Kernel, instr: Instr, k: int) -> None:
        if instr.opcode[0] != "brx":
            out.body.append(instr)
            return
        index, table = instr.operands
        targets = kernel.tables.get(getattr(table, "name", None))
        if not targets:
            raise instr.error("unsupported", "brx.idx without a list of targets")

        def add(*opcode: str, operands: list, guard=None) -> None:
            out.body.append(Instr(instr.line, instr.text, opcode, operands, guard))

        past = f"$past{k}"
        if instr.guard is not None:
            add("bra", operands=[Sym(past)], guard=(instr.guard[0], not instr.guard[1]))
        add("brx", "within", operands=[index, Imm(len(targets))])
        for n, target in enumerate(targets[:-1]):
            here = Reg(f"$brx{k}", 1)
            add("setp", "eq", "u32", operands=[here, index, Imm(n)])
            add("bra", operands=[Sym(target)], guard=(here, False))
        add("bra", operands=[Sym(targets[-1])])
        out.labels[past] = len(out.body)

    return _rebuilt(kernel, expand)


def within(warp, index, count: int) -> None:
    """The index of brx.idx must be that of a target (PTX ISA 9.7.12.3: anything else is undefined)."""
    for lane, value in warp.per_lane(index):
        if value >= count:
            raise VirtualGpuError("out of bounds", f"brx.idx index {value}; the list has {count} targets", lane=lane)


@decodes("brx.within")
def decode_within(i: Instr) -> Action:
    return Action(within, (), tuple(i.operands), (32, 32))


# --- calls -----------------------------------------------------------------------------------------------


class _Inliner:
    def __init__(self, module: Module):
        self.functions = module.functions
        self.calls = 0

    def kernel(self, kernel: Kernel, callers: tuple[str, ...]) -> Kernel:
        """A copy without calls. callers: names of the functions whose bodies are being expanded."""
        if not any(_callee(i) in self.functions for i in kernel.body):
            return kernel

        def expand(out: Kernel, instr: Instr, _) -> None:
            name = _callee(instr)
            if name not in self.functions:
                out.body.append(instr)
            elif name in callers:
                raise instr.error("unsupported", f"recursive call of {name}")
            else:
                self.expand(out, instr, self.functions[name], (*callers, name))

        return _rebuilt(kernel, expand)

    def expand(self, out: Kernel, call: Instr, function: Function, callers: tuple[str, ...]) -> None:
        """Append the body of `function` in place of `call`."""
        if function.error is not None:
            raise function.error
        body = self.kernel(function.kernel, callers)
        if body.shared:
            raise call.error("unsupported", f"a .shared variable inside the function {body.name}")
        self.calls += 1
        copy = _Copy(body, f"@call{self.calls}")
        end = f"$end{copy.suffix}"
        if call.guard is not None:
            reg, negated = call.guard
            out.body.append(Instr(call.line, call.text, ("bra",), [Sym(end)], (reg, not negated)))
        results, arguments = _actuals(call)
        out.body += copy.bind(call, function.arguments, arguments, to_formal=True)
        after = copy.bind(call, function.results, results, to_formal=False)
        base, back = len(out.body), f"$return{copy.suffix}"
        for instr in body.body:
            if instr.opcode in RETURNS:
                out.body.append(Instr(instr.line, instr.text, ("bra",), [Sym(back)], copy.guard(instr)))
            else:
                operands = [copy.operand(o) for o in instr.operands]
                out.body.append(Instr(instr.line, instr.text, instr.opcode, operands, copy.guard(instr)))
        out.labels |= {label + copy.suffix: base + k for label, k in body.labels.items()}
        out.tables |= {n + copy.suffix: [t + copy.suffix for t in targets] for n, targets in body.tables.items()}
        out.locals |= {n + copy.suffix: replace(v, name=n + copy.suffix) for n, v in body.locals.items()}
        out.labels[back] = len(out.body)
        out.body += after
        out.labels[end] = len(out.body)


def _callee(instr: Instr) -> str | None:
    """The name of the function that a call names."""
    if instr.opcode[0] != "call":
        return None
    return next((o.name for o in instr.operands if isinstance(o, Sym)), None)


def _actuals(call: Instr) -> tuple[tuple, tuple]:
    """(results, arguments) of `call (results), name, (arguments)`."""
    at = next(k for k, o in enumerate(call.operands) if isinstance(o, Sym))
    lists = [o.items for o in (call.operands[0], call.operands[-1]) if isinstance(o, Vec)]
    return (lists[0] if at else ()), (lists[-1] if at < len(call.operands) - 1 else ())


class _Copy:
    """One copy of a function's body: which names become which."""

    def __init__(self, body: Kernel, suffix: str):
        self.suffix, self.own = suffix, {*body.labels, *body.tables, *body.locals}
        self.params: dict[str, str] = {}

    def bind(self, call: Instr, formals: list, actuals: tuple, to_formal: bool) -> list[Instr]:
        """Connect formal and actual parameters; the moves that registers need."""
        if len(formals) != len(actuals):
            raise call.error("unsupported", f"{len(actuals)} parameters for {len(formals)} of the function")
        moves = []
        for formal, actual in zip(formals, actuals, strict=True):
            if isinstance(actual, CallParam) and not isinstance(formal, Reg):
                self.params[formal.name] = actual.name
            elif isinstance(formal, Reg) and not isinstance(actual, CallParam):
                pair = [self.operand(formal), actual] if to_formal else [actual, self.operand(formal)]
                kind = "pred" if formal.width == 1 else f"b{formal.width}"
                moves.append(Instr(call.line, call.text, ("mov", kind), pair))
            else:
                raise call.error("unsupported", f"{actual} for the function's parameter {formal.name}")
        return moves

    def guard(self, instr: Instr):
        return None if instr.guard is None else (self.operand(instr.guard[0]), instr.guard[1])

    def operand(self, o):
        """The operand as the caller's body has it."""
        if isinstance(o, Reg):
            return Reg(o.name + self.suffix, o.width)
        if isinstance(o, CallParam):
            return CallParam(o.name + self.suffix)
        if isinstance(o, Sym):
            if o.name in self.params:
                return CallParam(self.params[o.name])
            return Sym(o.name + self.suffix, o.offset) if o.name in self.own else o
        if isinstance(o, Mem):
            return Mem(self.operand(o.base), o.offset, tuple(self.operand(c) for c in o.coords))
        if isinstance(o, Vec):
            return Vec(tuple(self.operand(i) for i in o.items))
        if isinstance(o, Pair):
            return Pair(self.operand(o.first), self.operand(o.second))
        return Not(self.operand(o.reg)) if isinstance(o, Not) else o
