"""Control flow of a kernel: basic blocks, immediate post-dominators, live registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from .isa import Action, Flow
from .ptx import Instr, Kernel, Mem, Not, Pair, Reg, Special, Sym, Vec
from .timing.latency import BRANCH, issue_cost, result_latency

BRANCHES = {"bra", "ret", "exit"}


@dataclass
class Item:
    """A statement with its decoded action (None for branches)."""

    instr: Instr
    action: Action | None
    uses: tuple[Reg, ...] = ()
    defs: tuple[Reg, ...] = ()


@dataclass
class Block:
    """A basic block: statements, then successors. `branch` is the statement that ends it, or None to fall through."""

    index: int
    items: list[Item] = field(default_factory=list)
    branch: Item | None = None
    successors: list[int] = field(default_factory=list)
    postdom: int = -1
    live_in: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()


def registers(operand) -> list[Reg]:
    """Registers that occur in an operand."""
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Mem):
        return registers(operand.base) + [r for c in operand.coords for r in registers(c)]
    if isinstance(operand, Vec):
        return [r for i in operand.items for r in registers(i)]
    if isinstance(operand, Pair):
        return registers(operand.first) + registers(operand.second)
    if isinstance(operand, Not):
        return registers(operand.reg)
    return []


def make_item(instr: Instr, action: Action | None) -> Item:
    """Which registers a statement reads and writes."""
    uses, defs = [], []
    if action is not None:
        for s in action.src:
            uses += registers(s)
        for d in action.dst:
            defs += registers(d)
    else:
        for o in instr.operands:
            uses += registers(o)
    if instr.guard is not None:
        uses.append(instr.guard[0])
        uses += defs  # where the guard is false the old value stays
    return Item(instr, action, tuple(uses), tuple(defs))


def _is_branch(instr: Instr) -> bool:
    return instr.opcode[0] in BRANCHES


def split(kernel: Kernel, items: list[Item]) -> list[Block]:
    """Basic blocks in program order; the last one is the virtual exit, empty."""
    n = len(items)
    leaders = {0, n}
    for position in kernel.labels.values():
        leaders.add(position)
    for i, item in enumerate(items):
        ends = _is_branch(item.instr) or (item.action is not None and item.action.flow in (Flow.BLOCK, Flow.POLL))
        if ends:
            leaders.add(i + 1)
    starts = sorted(p for p in leaders if p < n)
    where = {p: b for b, p in enumerate(starts)}
    exit_block = len(starts)
    blocks = [Block(i) for i in range(exit_block + 1)]

    def target(label: str) -> int:
        if label not in kernel.labels:
            raise KeyError(label)
        p = kernel.labels[label]
        return where.get(p, exit_block)

    for b, start in enumerate(starts):
        end = starts[b + 1] if b + 1 < len(starts) else n
        block, body = blocks[b], items[start:end]
        if body and _is_branch(body[-1].instr):
            block.branch = body.pop()
        block.items = body
        block.successors = _successors(kernel, block, b + 1, exit_block, target)
    return blocks


def _successors(kernel, block: Block, following: int, exit_block: int, target) -> list[int]:
    branch = block.branch
    if branch is None:
        return [following]
    op = branch.instr.opcode[0]
    try:
        if op == "bra":
            goal = branch.instr.operands[0]
            taken = target(goal.name if isinstance(goal, Sym) else str(goal))
            return [taken] if branch.instr.guard is None else [taken, following]
    except KeyError as e:
        raise branch.instr.error("unsupported", f"branch to unknown label {e}") from None
    return [exit_block] if branch.instr.guard is None else [exit_block, following]


def post_dominators(blocks: list[Block]) -> None:
    """Fill in `postdom`: the block where paths that part at a branch meet again; the exit where they never do.

    It is the immediate post-dominator among the paths that go on: a path that only ends its lanes does not count, for
    nobody has to wait for lanes that exit. So lanes that return early leave the others together.
    """
    exit_block = len(blocks) - 1
    ends = {b.index for b in blocks if _only_ends(b)} | {exit_block}
    todo = {b.index for b in blocks} - ends
    while True:
        going = _paths_on(blocks, todo, ends)
        if not going:
            break
        _immediate(blocks, going, exit_block)
        todo -= going.keys()
    for index in todo | ends:  # ends, and loops without an exit
        blocks[index].postdom = exit_block


def _only_ends(block: Block) -> bool:
    branch = block.branch
    return (not block.items and branch is not None and branch.instr.opcode[0] in ("ret", "exit")
            and branch.instr.guard is None)


def _paths_on(blocks: list[Block], todo: set[int], ends: set[int]) -> dict[int, list[int]]:
    """Blocks of `todo` from which the main end is reached -> their successors on such paths; -1 is the end.

    The main end is the one that most blocks can reach; of several, the last.
    """
    preds: dict[int, list[int]] = {b: [] for b in todo}
    for b in todo:
        for s in blocks[b].successors:
            if s in todo:
                preds[s].append(b)
    best: set[int] = set()
    last = -1
    for b in sorted(todo):
        if not any(s in ends for s in blocks[b].successors):
            continue
        reach, stack = {b}, [b]
        while stack:
            for p in preds[stack.pop()]:
                if p not in reach:
                    reach.add(p)
                    stack.append(p)
        if len(reach) >= len(best):
            best, last = reach, b
    return {b: [s for s in blocks[b].successors if s in best] + [-1] * (b == last) for b in best}


def _immediate(blocks: list[Block], graph: dict[int, list[int]], exit_block: int) -> None:
    """Immediate post-dominators of the blocks of `graph` (Cooper, Harvey, Kennedy 2001)."""
    preds: dict[int, list[int]] = {b: [] for b in (*graph, -1)}
    for b, successors in graph.items():
        for s in successors:
            preds[s].append(b)
    order = _postorder(preds, -1)
    number = {node: i for i, node in enumerate(order)}
    idom = {-1: -1}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new = None
            for s in graph[node]:
                if s in idom:
                    new = s if new is None else _common(idom, number, s, new)
            if idom.get(node) != new:
                idom[node] = new
                changed = True
    for b in graph:
        blocks[b].postdom = idom[b] if idom[b] >= 0 else exit_block


def _postorder(edges: dict[int, list[int]], start: int) -> list[int]:
    order, seen = [], {start}
    stack = [(start, iter(edges[start]))]
    while stack:
        node, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(edges[following])))
    return order


def _common(idom: dict[int, int], number: dict[int, int], a: int, b: int) -> int:
    while a != b:
        while number[a] < number[b]:
            a = idom[a]
        while number[b] < number[a]:
            b = idom[b]
    return a


def liveness(blocks: list[Block]) -> None:
    """Fill in `live_in` and `written` of every block. Sets of registers are the bits of an integer meanwhile."""
    bit: dict[str, int] = {}
    use, define = [], []
    for b in blocks:
        u = d = 0
        for item in b.items + ([b.branch] if b.branch else []):
            u |= _bits(item.uses, bit) & ~d
            d |= _bits(item.defs, bit)
        use.append(u)
        define.append(d)
    live = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for b in reversed(blocks):
            out = 0
            for s in b.successors:
                out |= live[s]
            new = use[b.index] | out & ~define[b.index]
            if new != live[b.index]:
                live[b.index] = new
                changed = True
    names = list(bit)
    for b in blocks:
        b.live_in, b.written = _names(live[b.index], names), _names(define[b.index], names)


def _bits(registers_: tuple[Reg, ...], bit: dict[str, int]) -> int:
    """The registers as a set of bits; new ones get the next bit."""
    out = 0
    for r in registers_:
        out |= 1 << bit.setdefault(r.name, len(bit))
    return out


def _names(bits: int, names: list[str]) -> frozenset[str]:
    return frozenset(names[i] for i, digit in enumerate(reversed(f"{bits:b}")) if digit == "1")


def schedule(block: Block) -> list[float]:
    """Issue time in cycles of each statement, from the block's start; last the block's length.

    In order, one statement a cycle, each when its operands are ready (`timing.latency`). Loads and asynchronous
    instructions are accounted for where they are waited for, not here.
    """
    ready: dict[str, float] = {}
    times, now = [], 0.0
    for item in block.items + ([block.branch] if block.branch else []):
        start = max([now, *(ready.get(r.name, 0.0) for r in item.uses)])
        times.append(start)
        special = any(isinstance(o, Special) for o in item.instr.operands)
        late = result_latency(item.instr.opcode, special)
        for r in item.defs:
            ready[r.name] = start + late
        now = start + issue_cost(item.instr.opcode)
    branch = block.branch is not None and block.branch.instr.guard is not None
    times.append(now + (BRANCH if branch else 0))
    return times


def unwaited_step(item: Item, pending: dict[str, int]) -> set[int]:
    """Follow registers of tcgen05.ld that no tcgen05.wait::ld has covered yet through one statement.

    pending: register -> line of its load, updated. Returns the lines of loads whose registers are used here. Moving a
    register passes it on; it is not a use of the value (the compiler packs registers before the wait).
    """
    action = item.action
    if not pending and (action is None or action.flow is not Flow.DEFER):
        return set()
    if action is not None and action.flow is Flow.COLLECT:
        pending.clear()
        return set()
    used = {pending[r.name] for r in item.uses if r.name in pending}
    moves = action is not None and item.instr.opcode[0] == "mov" and item.instr.guard is None
    for r in item.defs:
        pending.pop(r.name, None)
        if action.flow is Flow.DEFER:
            pending[r.name] = item.instr.line
        elif moves and used:
            pending[r.name] = min(used)
    if moves:
        return set()
    for name in [n for n, line in pending.items() if line in used]:
        del pending[name]
    return used


def unwaited_loads(blocks: list[Block]) -> list[dict[str, int]]:
    """For every block, registers of tcgen05.ld that may arrive there without a wait::ld -> line of the load."""
    incoming: list[dict[str, int]] = [{} for _ in blocks]
    if not any(i.action is not None and i.action.flow is Flow.DEFER for b in blocks for i in b.items):
        return incoming
    todo = [b.index for b in blocks]
    while todo:
        b = blocks[todo.pop(0)]
        state = dict(incoming[b.index])
        for item in b.items:
            unwaited_step(item, state)
        for s in b.successors:
            new = {r: line for r, line in state.items() if r in blocks[s].live_in and r not in incoming[s]}
            if new:
                incoming[s].update(new)
                todo.append(s)
    return incoming


def region(blocks: list[Block], start: int, stop: int) -> set[int]:
    """Blocks reachable from `start` without passing `stop`."""
    seen, todo = set(), [start]
    while todo:
        b = todo.pop()
        if b == stop or b in seen:
            continue
        seen.add(b)
        todo += blocks[b].successors
    return seen
