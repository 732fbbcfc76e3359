"""Barriers: mbarrier objects (PTX ISA 9.7.13.15), named CTA barriers (9.7.13.1), the cluster barrier (9.7.13.3)."""

from __future__ import annotations

from collections import Counter

from .errors import VirtualGpuError

MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """An mbarrier object: expected and pending arrivals, transaction bytes, phase.

    A phase completes when no arrival is pending and the transaction count is zero. `fenced` is set once the thread that
    initialised it has executed fence.mbarrier_init (or a proxy fence, or a cluster barrier): before, an asynchronous
    unit or another CTA may not see the initialisation.
    """

    def __init__(self, offset: int, count: int, warp: int):
        if not 1 <= count <= MAX_COUNT:
            raise VirtualGpuError("mbarrier", f"init count {count}; allowed 1..{MAX_COUNT}")
        self.offset, self.expected, self.pending = offset, count, count
        self.tx, self.phase = 0, 0
        self.waiters: list[tuple[object, int]] = []
        self.init_warp, self.fenced = warp, False
        self.sources: Counter = Counter()  # who has arrived, for reports

    def arrive(self, count: int = 1, drop: bool = False) -> int:
        """Count arrivals; returns the state before, an opaque token (phase << 32 | pending)."""
        state = self.state()
        if not 1 <= count <= MAX_COUNT:
            raise VirtualGpuError("mbarrier", f"arrival count {count}; allowed 1..{MAX_COUNT}")
        if count > self.pending:
            raise VirtualGpuError(
                "mbarrier", f"{count} arrivals at the barrier at {self.offset:#x}, which expects {self.pending} more "
                f"in phase {self.phase} (of {self.expected})")
        if drop:
            self.expected -= count
        self.pending -= count
        self.settle()
        return state

    def arrive_expect_tx(self, nbytes: int, drop: bool = False) -> int:
        """expect_tx, then one arrival; no phase completes between the two."""
        self._add_tx(nbytes)
        return self.arrive(1, drop)

    def add_pending(self, count: int) -> None:
        """The present phase needs `count` more arrivals (cp.async.mbarrier.arrive without .noinc)."""
        if self.pending + count > MAX_COUNT:
            raise VirtualGpuError("mbarrier", f"pending count {self.pending + count} of the barrier at "
                                  f"{self.offset:#x}; at most {MAX_COUNT}")
        self.pending += count

    def expect_tx(self, nbytes: int) -> None:
        """Add to the transaction count."""
        self._add_tx(nbytes)
        self.settle()

    def complete_tx(self, nbytes: int) -> None:
        """Subtract from the transaction count; it may be negative for a while."""
        self._add_tx(-nbytes)
        self.settle()

    def _add_tx(self, nbytes: int) -> None:
        self.tx += nbytes
        if abs(self.tx) > MAX_COUNT:
            raise VirtualGpuError("mbarrier", f"transaction count {self.tx} of the barrier at {self.offset:#x} is out "
                                  f"of range (±{MAX_COUNT})")

    def settle(self) -> None:
        """Complete the phase if it is due, and wake who waits for it."""
        if self.pending or self.tx:
            return
        self.phase += 1
        self.pending = self.expected
        waiters, self.waiters = self.waiters, []
        for warp, parity in waiters:
            if self.passed(parity):
                warp.cta.cluster.progress += 1
                warp.synced = warp.cta.cluster.sequence
                warp.wake()
            else:
                self.waiters.append((warp, parity))

    def passed(self, parity: int) -> bool:
        """test_wait.parity: has the phase with this parity completed? A fresh barrier passes parity 1."""
        return (self.phase & 1) != parity

    def passed_state(self, state: int) -> bool:
        """test_wait with a state token: has the phase in which the token was taken completed?

        Only the present and the preceding phase may be asked for (PTX ISA 9.7.13.15.16)."""
        phase = state >> 32
        if phase not in (self.phase, self.phase - 1):
            raise VirtualGpuError("mbarrier", f"a wait for phase {phase} of the barrier at {self.offset:#x}, which is "
                                  f"in phase {self.phase}; allowed: that and the one before")
        return self.phase > phase

    def state(self) -> int:
        """The opaque state token of the present phase."""
        return self.phase << 32 | self.pending

    def describe(self) -> str:
        """For reports: what is missing."""
        missing = []
        if self.pending:
            missing.append(f"{self.pending} of {self.expected} arrivals")
        if self.tx:
            missing.append(f"{self.tx} transaction bytes")
        return f"phase {self.phase}, still missing {' and '.join(missing) or 'nothing'}"


class NamedBarrier:
    """bar/barrier n of a CTA: collects warps until `threads` have arrived, then releases those that wait.

    A warp arrives whole (PTX ISA 9.7.13.1: the barrier waits for all its threads that have not exited and counts the
    warp). A barrier used without a thread count is for all threads of the CTA; exited warps count as arrived then, and
    only then (9.7.12: exit).
    """

    def __init__(self, number: int):
        self.number = number
        self.threads = 0  # expected, set by the first arrival
        self.whole = False  # for all threads of the CTA
        self.kind = ""  # how the first warp used it
        self.warps: list[tuple[object, bool]] = []  # (warp, does it wait)
        self.votes: list[tuple[object, int, str, int, int]] = []  # of .red: (warp, slot, operation, trues, threads)

    @property
    def arrived(self) -> int:
        """Threads that have arrived, whole warps."""
        return 32 * len(self.warps)

    def arrive(self, warp, threads: int | None, kind: str) -> None:
        """One warp arrives. threads: None for all of the CTA; kind: sync, arrive or red."""
        whole = threads is None
        threads = 32 * len(warp.cta.warps) if whole else threads
        if threads % 32 or threads <= 0:
            raise VirtualGpuError("barrier", f"thread count {threads} of barrier {self.number} is not a multiple of 32")
        if self.warps and threads != self.threads:
            raise VirtualGpuError("barrier", f"barrier {self.number} is used with {threads} threads while it waits for "
                                  f"{self.threads}")
        if self.warps and (kind == "red") != (self.kind == "red"):
            raise VirtualGpuError("barrier", f"barrier {self.number}: .{kind} while it is in use by .{self.kind}")
        if any(w is warp for w, _ in self.warps):
            raise VirtualGpuError("barrier", f"warp {warp.index} arrives twice at barrier {self.number} in one phase")
        self.threads, self.whole, self.kind = threads, whole, kind
        self.warps.append((warp, kind != "arrive"))

    def complete(self, exited: int) -> bool:
        """Have all arrived? exited: warps of the CTA that have ended."""
        return bool(self.warps) and self.arrived + (32 * exited if self.whole else 0) >= self.threads

    def release(self, sequence: int) -> list:
        """Reset, give the results of .red, and return the warps that waited."""
        trues, total = sum(v[3] for v in self.votes), sum(v[4] for v in self.votes)
        for warp, slot, operation, _, _ in self.votes:
            if slot >= 0:
                warp.R[slot] = {"popc": trues, "and": trues == total, "or": trues > 0}[operation]
        waiting = [w for w, waits in self.warps if waits]
        for w, _ in self.warps:
            w.synced = sequence
        self.warps, self.votes = [], []
        return waiting

    def describe(self) -> str:
        """For reports."""
        return f"{self.arrived} of {self.threads} threads arrived (warps {sorted(w.index for w, _ in self.warps)})"


class ClusterBarrier:
    """barrier.cluster: every thread of the cluster arrives once a phase, then may wait."""

    def __init__(self, warps: int):
        self.warps, self.arrived, self.phase = warps, set(), 0
        self.waiters: list = []

    def arrive(self, warp) -> None:
        """One warp arrives."""
        if warp.cluster_phase is not None:
            raise VirtualGpuError("barrier", "barrier.cluster.arrive twice without barrier.cluster.wait between")
        self.arrived.add((warp.cta.rank, warp.index))
        warp.cluster_phase = self.phase
        self.settle()

    def settle(self) -> None:
        """Release the waiters once all warps that have not exited are here."""
        if len(self.arrived) < self.warps or not self.arrived:
            return
        self.phase += 1
        self.arrived = set()
        waiters, self.waiters = self.waiters, []
        for w in waiters:
            w.cta.cluster.progress += 1
            w.synced = w.cta.cluster.sequence
            w.wake()

    def leave(self, warp) -> None:
        """A warp has exited: it no longer counts."""
        self.warps -= 1
        self.arrived.discard((warp.cta.rank, warp.index))
        self.settle()

    def describe(self) -> str:
        """For reports."""
        missing = self.warps - len(self.arrived)
        return f"{len(self.arrived)} of {self.warps} warps arrived, {missing} missing"
