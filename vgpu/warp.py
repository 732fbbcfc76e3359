"""A warp: 32 lanes in lock-step, one register file, a stack of divergent paths.

A register holds one Python int when all lanes agree (most address arithmetic and control does) and an array of 32
otherwise. At a divergent branch the lanes that take the longer way run first, in the same register file; registers that
the waiting lanes still need are saved and merged where the paths meet (the branch's immediate post-dominator).
"""

from __future__ import annotations

import sys

import numpy as np

from .errors import VirtualGpuError

PARKED, YIELD, DONE, RUNNING = -1, -2, -3, 0
NOWHERE = -4  # the meeting point of lanes that have not diverged
LANES = np.arange(32, dtype=np.uint32)
FULL = np.ones(32, np.bool_)
FULL.setflags(write=False)
QUANTUM = 20_000  # blocks a warp may run before another gets a turn
LONGEST_SPIN = 64  # blocks of a loop that is looked at whether it spins without changing anything

SPECIAL = {
    "%tid": "w.tid[0]", "%tid.x": "w.tid[0]", "%tid.y": "w.tid[1]", "%tid.z": "w.tid[2]",
    "%ntid.x": "w.ntid[0]", "%ntid.y": "w.ntid[1]", "%ntid.z": "w.ntid[2]",
    "%ctaid.x": "w.ctaid[0]", "%ctaid.y": "w.ctaid[1]", "%ctaid.z": "w.ctaid[2]",
    "%nctaid.x": "w.nctaid[0]", "%nctaid.y": "w.nctaid[1]", "%nctaid.z": "w.nctaid[2]",
    "%laneid": "w.lanes", "%warpid": "w.index", "%nwarpid": "w.nwarps",
    "%cluster_ctarank": "w.cta.rank", "%cluster_nctarank": "w.cta.cluster.size",
    "%cluster_ctaid.x": "w.cta.cluster_ctaid[0]", "%cluster_ctaid.y": "w.cta.cluster_ctaid[1]",
    "%cluster_ctaid.z": "w.cta.cluster_ctaid[2]",
    "%cluster_nctaid.x": "w.cta.cluster.shape[0]", "%cluster_nctaid.y": "w.cta.cluster.shape[1]",
    "%cluster_nctaid.z": "w.cta.cluster.shape[2]",
    "%clusterid.x": "w.cta.cluster.id[0]", "%clusterid.y": "w.cta.cluster.id[1]", "%clusterid.z": "w.cta.cluster.id[2]",
    "%nclusterid.x": "w.nclusters[0]", "%nclusterid.y": "w.nclusters[1]", "%nclusterid.z": "w.nclusters[2]",
    "%is_explicit_cluster": "(w.cta.cluster.size > 1)",
    "%smid": "w.cta.sm", "%nsmid": "w.grid.device.sms", "%gridid": "w.grid.serial",
    "%clock": "w.clock(32)", "%clock64": "w.clock(64)", "%clock_hi": "(w.clock(64) >> 32)",
    "%globaltimer": "w.clock(64)", "%globaltimer_lo": "w.clock(32)", "%globaltimer_hi": "(w.clock(64) >> 32)",
    "%aggr_smem_size": "w.cta.shared_bytes", "%reserved_smem_offset_begin": "0", "%reserved_smem_offset_end": "1024",
    "%reserved_smem_offset_cap": "1024",
    "%lanemask_eq": "w.lanemask('eq')", "%lanemask_lt": "w.lanemask('lt')", "%lanemask_le": "w.lanemask('le')",
    "%lanemask_gt": "w.lanemask('gt')", "%lanemask_ge": "w.lanemask('ge')",
    "%dynamic_smem_size": "w.grid.config.shared_bytes", "%total_smem_size": "w.cta.shared_bytes",
}


def merge(mask, new, old, dtype):
    """new where `mask`, old elsewhere; stays uniform where both agree."""
    if new is old or mask is True:
        return new
    if mask is False:
        return old
    if new is None or old is None:  # undefined on one path: nobody may read it there
        return old if new is None else new
    if type(new) is int and type(old) is int and new == old:
        return new
    if type(new) is bool and type(old) is bool and new == old:
        return new
    if dtype is object:
        out = np.empty(32, object)
        for i in range(32):
            pick = new if mask[i] else old
            out[i] = pick[i] if isinstance(pick, np.ndarray) else pick
        return out
    out = np.empty(32, dtype)
    out[...] = old
    np.copyto(out, np.asarray(new, dtype), where=mask)
    return out


def generated_line(program):
    """The PTX statement being executed, from the Python stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == program.filename:
            return program.line_items[frame.f_lineno]
        frame = frame.f_back
    return None


class Frame:
    """Lanes that wait where two paths meet, or for the first path to finish before they run the second."""

    __slots__ = ("meet", "mask", "count", "leader", "saved", "other", "other_mask", "results", "branch", "outer")

    def __init__(self, meet, mask, count, leader, outer):
        self.meet, self.mask, self.count, self.leader, self.outer = meet, mask, count, leader, outer
        self.other = -1
        self.results = None


class Warp:
    """One warp of a CTA. `index`: warp number in the CTA; `instructions`: PTX statements executed."""

    def __init__(self, cta, index: int, program, threads: int):
        self.cta, self.grid, self.index, self.program = cta, cta.cluster.grid, index, program
        self.blocks, self.exit = [*program.blocks, Warp.leave], program.exit
        self.R = [None] * len(program.dtypes)
        self.pc, self.meet = 0, NOWHERE
        self.frames: list[Frame] = []
        alive = min(32, threads - 32 * index)
        self.mask = FULL if alive == 32 else (alive > LANES)
        self.count, self.leader = alive, 0
        self.lanes = LANES
        self.instructions = 0
        self.cycles = 0.0  # of issue, by the static schedule of each block; see flow.schedule
        self.noted = 0.0
        self.trace: list | None = [] if self.grid.recorder is not None else None
        self.keys: list[int] = []  # global addresses of the copies and loads in `trace`
        self.waiting_at = None
        self.waiting: tuple | None = None  # what the warp is parked on, for the deadlock report
        self.failed_polls = 0
        self.watch: tuple | None = None  # (block, registers) after a whole turn, see `spin`
        self.synced = 0  # sequence number of the last synchronisation, see SharedMemory.proxy_fence
        self.unwaited_loads: list = []  # tcgen05.ld with no wait::ld yet
        self.bulk_groups: dict = {}  # lane -> list of committed groups; each a list of operations
        self.bulk_open: dict = {}  # lane -> operations not committed yet
        self.async_copies = None  # cp.async, see cp_async.py
        self.wgmma = None  # what this warp has issued to its warpgroup, see wgmma.py
        self.polls: dict[int, tuple] = {}  # block -> what its strong load or atomic gave last, see spin.py
        self.cluster_phase: int | None = None  # of barrier.cluster between arrive and wait
        self.units: set[str] = set()
        self.call_params: dict[str, dict[int, object]] = {}
        self._identify(threads)

    def _identify(self, threads: int) -> None:
        config = self.grid.config
        self.ntid, self.nctaid, self.ctaid = config.block, config.grid, self.cta.id
        self.nwarps = (threads + 31) // 32
        self.nclusters = tuple(g // c for g, c in zip(config.grid, config.cluster, strict=True))
        linear = LANES + np.uint32(32 * self.index)
        bx, by, _ = config.block
        if by == 1 and config.block[2] == 1:
            self.tid = (linear, 0, 0)
        else:
            self.tid = (linear % bx, linear // bx % by, linear // (bx * by))
        self.shared_base = self.cta.rank << 24
        size = self.program.local_bytes
        self.local = np.zeros((32, size), np.uint8) if size else None

    # --- execution -----------------------------------------------------------------------------

    def run(self) -> int:
        """Run until the warp parks, gives way or ends; returns PARKED, YIELD or DONE."""
        try:
            outcome = self.spin() if self.watch is not None else RUNNING
            if outcome == RUNNING:
                outcome = self.steps(QUANTUM)
        except VirtualGpuError as e:
            raise self.locate(e, e) from e.__cause__
        except Exception as e:
            raise self.locate(self.explain(e), e) from e
        if outcome == RUNNING:
            self.watch = self.pc, list(self.R)
            return YIELD
        return outcome

    def steps(self, count: int) -> int:
        """Run at most `count` blocks; RUNNING if that was not the end."""
        blocks, R, pc = self.blocks, self.R, self.pc
        for _ in range(count):
            if pc == self.meet:
                pc = self.reconverge()
                continue
            pc = blocks[pc](self, R)
            if pc < 0:
                return pc
        self.pc = pc
        return RUNNING

    def spin(self) -> int:
        """After a whole turn: does the warp come back to the state where it was? Then it polls memory and gives way."""
        pc, registers = self.watch
        for _ in range(LONGEST_SPIN):
            outcome = self.steps(1)
            if outcome != RUNNING:
                break
            if self.pc == pc and all(a is b or np.array_equal(a, b) for a, b in zip(self.R, registers, strict=True)):
                self.failed_polls += 1
                return YIELD
        self.watch, self.failed_polls = None, 0
        return outcome

    def reconverge(self) -> int:
        """At the meeting point of the top frame: run the other path, or merge and go on with all lanes."""
        f, R, dtypes = self.frames[-1], self.R, self.program.dtypes
        if f.other >= 0:
            mine = self.mask
            f.results = [(slot, R[slot], mine) for slot, _ in f.saved]
            for slot, old in f.saved:
                R[slot] = old
            f.saved = [(slot, R[slot]) for slot in f.branch.slots_other]
            pc, f.other = f.other, -1
            self.set_mask(f.other_mask)
            return pc
        mine = self.mask
        for slot, old in f.saved:
            new = R[slot]
            if new is not old:
                R[slot] = merge(mine, new, old, dtypes[slot])
        if f.results:
            for slot, value, mask in f.results:
                if value is not R[slot]:
                    R[slot] = merge(mask, value, R[slot], dtypes[slot])
        self.frames.pop()
        self.mask, self.count, self.leader, self.meet = f.mask, f.count, f.leader, f.outer
        return f.meet

    def leave(self, R) -> int:
        """The active lanes have exited: whoever waits for them goes on without them; DONE if there is nobody.

        It stands behind the last block, so that a jump to the exit calls it.
        """
        gone, dtypes = self.mask, self.program.dtypes
        for f in self.frames:
            f.mask = f.mask & ~gone
            f.count, f.leader = int(np.count_nonzero(f.mask)), int(f.mask.argmax())
        while self.frames:
            f = self.frames[-1]
            for slot, old in f.saved:
                R[slot] = old
            if f.other >= 0:
                pc, f.other, f.saved = f.other, -1, []
                self.set_mask(f.other_mask)
                return pc
            for slot, value, mask in f.results or ():
                R[slot] = merge(mask, value, R[slot], dtypes[slot])
            self.frames.pop()
            self.mask, self.count, self.leader, self.meet = f.mask, f.count, f.leader, f.outer
            if f.count:
                return f.meet
        return DONE

    def set_mask(self, mask) -> None:
        self.mask = mask
        self.count = int(np.count_nonzero(mask))
        self.leader = int(mask.argmax())

    def diverge(self, p, branch) -> int:
        """Branch on a predicate that may differ between lanes; returns the block to run next."""
        taken_mask = p & self.mask
        n = int(np.count_nonzero(taken_mask))
        if n == self.count:
            return branch.taken
        if n == 0:
            return branch.other
        f = Frame(branch.meet, self.mask, self.count, self.leader, self.meet)
        R = self.R
        if branch.taken == branch.meet:
            mask, pc, slots = self.mask & ~taken_mask, branch.other, branch.slots_other
        else:
            mask, pc, slots = taken_mask, branch.taken, branch.slots_taken
            if branch.other != branch.meet:
                f.other, f.other_mask, f.branch = branch.other, self.mask & ~taken_mask, branch
        f.saved = [(slot, R[slot]) for slot in slots]
        self.frames.append(f)
        self.meet = branch.meet
        self.set_mask(mask)
        return pc

    def polled(self, ok, resume: int) -> int:
        """After a poll that ends a block: go on if it succeeded, else let other warps run first."""
        if ok is True or (ok is not False and bool(ok[self.leader])):
            self.failed_polls = 0
            return resume
        self.failed_polls += 1
        self.pc = resume
        return YIELD

    def park(self, resume: int, *why) -> int:
        """Stop here until somebody calls `wake`."""
        self.pc, self.waiting = resume, why
        self.waiting_at = generated_line(self.program)
        return PARKED

    def note(self, kind: str, *details) -> None:
        """Add an event to the recording for the timing model; call only where `trace` is not None."""
        self.trace.append((round(self.cycles - self.noted, 1), kind, *details))
        self.noted = self.cycles

    def wake(self) -> None:
        """Make a parked warp ready again."""
        self.waiting = None
        self.failed_polls = 0
        self.cta.cluster.make_ready(self)

    # --- helpers for handlers ------------------------------------------------------------------

    def uniform(self, value, what: str) -> int:
        """The value all active lanes agree on, as an int."""
        if type(value) is int:
            return value
        if value is None:
            raise VirtualGpuError("uninitialised", f"{what} is read from a register that was never written")
        if isinstance(value, (bool, np.bool_)):
            return int(value)
        active = value[self.mask]
        if (active != active[0]).any():
            lane = int(np.flatnonzero(self.mask)[int(np.argmax(active != active[0]))])
            raise VirtualGpuError("unsupported", f"{what} differs between the active lanes", lane=lane)
        return int(active[0])

    def per_lane(self, value) -> list[tuple[int, int]]:
        """[(lane, value)] of the active lanes."""
        lanes = np.flatnonzero(self.mask).tolist()
        if isinstance(value, np.ndarray):
            return [(lane, int(value[lane])) for lane in lanes]
        if value is None:
            raise VirtualGpuError("uninitialised", "a register that was never written is read")
        return [(lane, int(value)) for lane in lanes]

    def alive(self) -> np.ndarray:
        """bool[32]: the lanes that have not exited."""
        return self.frames[0].mask if self.frames else self.mask

    def converged(self) -> bool:
        """Are all lanes that have not exited active?"""
        return not self.frames or self.count == self.frames[0].count

    def require_converged(self, what: str) -> None:
        """For .aligned instructions: all lanes that have not exited must be here."""
        if not self.converged():
            missing = self.alive() & ~self.mask
            raise VirtualGpuError("barrier", f"{what} is executed by only {self.count} lanes of the warp",
                                  lane=int(missing.argmax()))

    def used_early(self, line: int) -> None:
        """Registers of the tcgen05.ld at a PTX line are used with no tcgen05.wait::ld since. The use waits for their
        values, so these loads are over; the warning remains."""
        self.grid.warn("registers of tcgen05.ld are used before tcgen05.wait::ld (their values arrive, but nothing "
                       f"orders the read of tensor memory): PTX line {line}")
        left = [load for load in self.unwaited_loads if load.instr is None or load.instr.line != line]
        if self.unwaited_loads and not left:
            self.cta.cluster.unwaited -= 1
        self.unwaited_loads = left

    def lanemask(self, kind: str):
        one = np.uint32(1) << LANES
        if kind == "eq":
            return one
        below = one - np.uint32(1)
        return {"lt": below, "le": below | one, "gt": ~(below | one), "ge": ~below}[kind]

    def clock(self, width: int) -> int:
        """A counter that grows with the work done; it is not a time."""
        if self.trace is not None:
            self.note("clock")
        return self.grid.ticks() & ((1 << width) - 1)

    def generated_line(self, error: BaseException):
        """The PTX statement whose generated line raised `error`."""
        tb, found = error.__traceback__, None
        while tb is not None:
            if tb.tb_frame.f_code.co_filename == self.program.filename:
                found = self.program.line_items[tb.tb_lineno] if tb.tb_lineno < len(self.program.line_items) else None
            tb = tb.tb_next
        return found

    def locate(self, error: VirtualGpuError, original: BaseException) -> VirtualGpuError:
        instr = self.generated_line(original)
        return error.place(
            kernel=self.program.kernel.name, line=instr.line if instr else None, text=instr.text if instr else None,
            cta=self.cta.id, warp=self.index, lane=self.leader if self.count == 1 else None)

    def explain(self, error: Exception) -> VirtualGpuError:
        """Turn a Python error of generated code into one of ours."""
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, (TypeError, UnboundLocalError)) and ("NoneType" in text or "UnboundLocal" in text):
            return VirtualGpuError("uninitialised", "a register is read that was never written")
        return VirtualGpuError("internal", f"the virtual GPU failed on this instruction ({text})")
