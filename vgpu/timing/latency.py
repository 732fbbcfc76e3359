"""Issue and result latencies of instruction classes, in SM cycles, for the static schedule of a basic block.

PTX is not machine code: moves, packing and address-space casts usually vanish in the assembler and cost nothing here.
Dependent add and fma chains: measured on an H200 (`vgpu.validation`, family latency); the other classes are assumed
from published Hopper microbenchmarks (arXiv 2402.13499) and used for both chips.
"""

from __future__ import annotations

FREE = {"mov", "cvta", "createpolicy", "pragma"}
CYCLES = {
    "mul": 4, "mad": 4, "fma": 4, "div": 40, "rem": 40, "setp": 4.5, "selp": 4.5,
    "shfl": 23, "vote": 10, "elect": 6, "match": 30, "redux": 20,
    "popc": 12, "bfind": 12, "brev": 12, "cvt": 6, "mapa": 12, "isspacep": 6,
    "rcp": 20, "sqrt": 24, "rsqrt": 20, "ex2": 18, "lg2": 18, "sin": 20, "cos": 20, "tanh": 20,
}
DEFAULT = 4.5  # add, logic, fma
SPECIAL_REGISTER = 20
PARAMETER = 25  # ld.param
BRANCH = 4  # a branch's resolution


def result_latency(opcode: tuple[str, ...], reads_special: bool) -> float:
    """Cycles from issue to a dependent instruction's issue."""
    if reads_special:
        return SPECIAL_REGISTER
    if opcode[0] == "ld" and "param" in opcode:
        return PARAMETER
    if opcode[0] in FREE:
        return 0
    return CYCLES.get(opcode[0], DEFAULT)


def issue_cost(opcode: tuple[str, ...]) -> float:
    """Issue slots of one warp instruction."""
    return 0 if opcode[0] in FREE else 1
