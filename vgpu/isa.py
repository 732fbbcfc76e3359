"""The instruction table: opcode -> decoder -> `Action`.

A decoder is called once, when a kernel is translated. It checks every modifier and says which function executes the
instruction, with which operands. Decoders live in the file of the hardware unit they belong to and register here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from .ptx import Instr


class Flow(Enum):
    """What the instruction does to the warp's control flow."""

    NEXT = "next"  # function(warp, *sources) -> results; go on
    BLOCK = "block"  # function(warp, resume, *sources) -> next block, or a negative code after parking the warp
    POLL = "poll"  # function(warp, *sources) -> bool result; a failed poll gives the other warps a turn
    DEFER = "defer"  # function(warp, *sources) -> object whose .read() gives the results later (tcgen05.ld)
    COLLECT = "collect"  # completes the deferred results, then function(warp, *sources) (tcgen05.wait::ld)


@dataclass(frozen=True)
class Action:
    """How to execute one instruction.

    dst: result operands (Reg or SINK). src: operands (Reg, Imm, Mem, Special, Sym, Not, Vec) or `Const`.
    widths: register width in bits of each source, for immediates and addresses.
    pure: function(*sources), with no warp and no effects. template: the same as Python text, operands as {0}, {1} …
    loads: the results come from memory; for the timing model, which lets the first use of them wait.
    spin: for POLL, the BLOCK function to use where the poll is the whole body of a spin loop.
    late: the results are `late.Late` objects until another instruction replaces them (wgmma).
    """

    function: Callable
    dst: tuple = ()
    src: tuple = ()
    widths: tuple = ()
    flow: Flow = Flow.NEXT
    spin: Callable | None = None
    pure: bool = False
    loads: bool = False
    late: bool = False
    template: str | None = None


@dataclass(frozen=True)
class Const:
    """A Python object handed to the function as it is."""

    value: object


class Slot(Const):
    """Stands for the register-file slot of a result that is written later (-1: nobody reads it)."""


DECODERS: dict[tuple[str, ...], Callable[[Instr], Action]] = {}


def decodes(*opcodes: str):
    """Register a decoder for opcodes given as dotted prefixes, e.g. `@decodes("mbarrier.init")`."""

    def register(function):
        for name in opcodes:
            DECODERS[tuple(name.split("."))] = function
        return function

    return register


def decoder(opcode: tuple[str, ...]) -> Callable[[Instr], Action] | None:
    """The decoder registered for the longest prefix of `opcode`."""
    for n in range(len(opcode), 0, -1):
        found = DECODERS.get(opcode[:n])
        if found is not None:
            return found
    return None


class Modifiers:
    """The modifiers after an opcode's name, taken one by one; what is left over is an error."""

    def __init__(self, instr: Instr, skip: int):
        self.instr = instr
        self.rest = list(instr.opcode[skip:])

    def take(self, *names: str) -> str | None:
        """The first of `names` that is present, removed; None if none is."""
        for name in names:
            if name in self.rest:
                self.rest.remove(name)
                return name
        return None

    def need(self, *names: str) -> str:
        """Like `take`, but one of `names` must be there."""
        found = self.take(*names)
        if found is None:
            raise self.instr.error("unknown instruction", f"expects one of {', '.join('.' + n for n in names)}")
        return found

    def drop(self, *names: str) -> None:
        """Remove hints that change nothing the virtual GPU models."""
        self.rest = [m for m in self.rest if m not in names]

    def done(self) -> None:
        """Raise if a modifier was not understood."""
        if self.rest:
            raise self.instr.error("unknown instruction", f"modifier .{self.rest[0]} is not known here")


CACHE_HINTS = (
    "ca", "cg", "cs", "cv", "lu", "wb", "wt", "nc", "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first",
    "L1::evict_last", "L1::no_allocate", "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B",
    "L2::128B", "L2::256B",
)


def operand_count(instr: Instr, *allowed: int) -> None:
    """Raise unless the instruction has one of the allowed numbers of operands."""
    if len(instr.operands) not in allowed:
        raise instr.error("unknown instruction", f"{len(instr.operands)} operands; expected {allowed}")
