"""Registers that are written late: the results of wgmma.mma_async, until wgmma.wait_group (PTX ISA 9.7.15).

While the instruction is in flight its result registers hold `Late` objects. Compilers move such registers about (at the
end of a loop's body, before a tied operand), so moving one is no use of it; any other use is an error. The registers
where such objects may lie are known when a kernel is translated, and so are accesses that wgmma.fence or
wgmma.wait_group should have ordered.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import VirtualGpuError
from .flow import Block, Item, registers
from .ptx import Reg, Vec

ANY = "*"  # stands for all registers, before the first wgmma.fence


class Late:
    """Result register `i` of an instruction in flight; `op` describes that instruction."""

    __slots__ = ("op", "i")

    def __init__(self, op, i: int):
        self.op, self.i = op, i


def _early(late: Late, *_):
    """Whatever an instruction does with its operand ends here."""
    raise VirtualGpuError("race", "a register is used that wgmma.mma_async still writes, with no wgmma.wait_group for "
                          f"it since: {late.op.describe()}")


for _name in (
    "array", "getattr", "getitem", "iter", "len", "bool", "int", "index", "float", "invert", "neg", "eq", "ne", "lt",
    "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv",
    "mod", "rmod", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
):
    setattr(Late, f"__{_name}__", _early)


def _moved(item: Item) -> tuple[str, str] | None:
    """(to, from) of a move from register to register."""
    if item.action is None or item.instr.opcode[0] != "mov" or len(item.action.dst) != 1:
        return None
    to, source = item.action.dst[0], item.action.src[0]
    return (to.name, source.name) if isinstance(to, Reg) and isinstance(source, Reg) else None


def _closure(found: set[str], steps: list[tuple[str, str]]) -> set[str]:
    """`found` with every `to` of a step (to, source) whose source is in it."""
    before = -1
    while len(found) != before:
        before = len(found)
        found |= {to for to, source in steps if source in found}
    return found


def late_registers(items: list[Item]) -> set[str]:
    """Registers that may hold `Late` objects: results of late instructions, and what those are moved to."""
    results = {r.name for item in items if item.action is not None and item.action.late for r in item.defs}
    return _closure(results, [m for m in map(_moved, items) if m is not None]) if results else results


def _ordered(item: Item) -> set[str]:
    """Registers of a wgmma.mma_async that it accesses late: accumulators and fragments of A."""
    return {r.name for r in item.defs} | {r.name for s in item.action.src if isinstance(s, Vec) for r in registers(s)}


def misuses(blocks: list[Block]) -> dict[int, str]:
    """id of an `Item` -> what is undefined about it, on some path of the program: a wgmma.mma_async that no wgmma.fence
    precedes, or none after other instructions have accessed its registers (PTX ISA 9.7.15.7.1); a write to registers
    of one in flight (9.7.15.7.3; any wgmma.wait_group is taken to have ended them all)."""
    items = [item for b in blocks for item in b.items]
    concerned = {name for item in items if item.action.late for name in _ordered(item)}
    if not concerned:
        return {}
    concerned = _closure(concerned, [m[::-1] for m in map(_moved, items) if m is not None])
    unfenced = _forward(blocks, {ANY}, lambda item, touched: _touch(item, touched, concerned))
    overwritten = _forward(blocks, set(), _overwrite)
    out = {}
    for item in items:
        if id(item) in unfenced:
            out[id(item)] = ("registers of wgmma.mma_async are accessed by other instructions with no wgmma.fence "
                             f"since (or none precedes it): PTX line {item.instr.line}")
        elif id(item) in overwritten:
            out[id(item)] = ("registers of a wgmma.mma_async in flight are written with no wgmma.wait_group since: PTX "
                             f"line {item.instr.line}")
    return out


def _forward(blocks: list[Block], start: set[str], step: Callable[[Item, set[str]], bool]) -> set[int]:
    """ids of the items for which step(item, state) is true; it updates the state, a set that starts as `start` and is
    united where paths meet."""
    incoming: list[set[str]] = [set(start)] + [set() for _ in blocks[1:]]
    found: set[int] = set()
    todo = [b.index for b in blocks]
    while todo:
        b = blocks[todo.pop(0)]
        state = set(incoming[b.index])
        found |= {id(item) for item in b.items if step(item, state)}
        for s in b.successors:
            if not state <= incoming[s]:
                incoming[s] |= state
                todo.append(s)
    return found


def _touch(item: Item, touched: set[str], concerned: set[str]) -> bool:
    """Follow the registers accessed since the last fence through one statement; True for a wgmma that uses one."""
    if item.instr.opcode[:2] == ("wgmma", "fence"):
        touched.clear()
        return False
    if item.action.late:
        ordered = _ordered(item) | {ANY}
        missing = bool(ordered & touched)
        touched -= ordered
        return missing
    moved = _moved(item)
    if moved is not None and item.instr.guard is None:  # a move passes on what was done to the register
        to, source = moved
        (touched.add if source in touched else touched.discard)(to)
    else:
        touched |= {r.name for r in item.uses + item.defs} & concerned
    return False


def _overwrite(item: Item, flying: set[str]) -> bool:
    """Follow the registers of MMAs in flight through one statement; True for one that writes them, other than by a
    move from a register: compilers do that to registers whose value they have moved elsewhere."""
    if item.instr.opcode[:2] == ("wgmma", "wait_group"):
        flying.clear()
    elif item.action.late:
        flying |= _ordered(item)
    elif _moved(item) is None:
        return any(r.name in flying for r in item.defs)
    return False
