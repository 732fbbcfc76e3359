"""Replay of recorded launches against a chip's constants: when each warp and unit is busy, waits, and ends.

A discrete-event simulation in SM cycles. Warps run their recorded events; mbarriers and barriers are counted as they
were executed; copies pass DRAM, L2 and the SM's port, which are first-come-first-served servers of a given bandwidth,
so a latency, bytes in flight and a bandwidth together give the throughput (Little's law) with no formula for it. MMAs
run in order in the tensor core of their SM. CTAs are placed on SMs (clusters inside a GPC) as slots become free. All
times are *modelled*.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from dataclasses import dataclass, field

from .chips import Chip


class Server:
    """A resource of fixed bandwidth, first come first served. rate: bytes per cycle."""

    __slots__ = ("rate", "free", "busy")

    def __init__(self, rate: float):
        self.rate, self.free, self.busy = rate, 0.0, 0.0

    def serve(self, t: float, nbytes: float) -> float:
        """The time at which nbytes, asked for at t, have passed."""
        start = max(t, self.free)
        self.free = start + nbytes / self.rate
        self.busy += nbytes / self.rate
        return self.free


WARP = 32
WARPGROUP = 4  # warps
STORE_QUEUE = 200  # cycles of stores that may be on their way before the next has to wait [assumed]
SMSPS = 4  # schedulers of an SM


@dataclass
class Span:
    """An interval of a unit's or warp's timeline, in cycles."""

    track: str
    name: str
    start: float
    end: float


@dataclass
class Result:
    """A modelled launch. Times in cycles from the start of the first launch.

    ends: of each grid of the chain; spans: timeline of the first cluster; waits: {warp index: {cause: cycles}} summed
    over CTAs; clocks: {(launch, warp of the first CTA): readings of %clock}; busy: {unit: cycles} (DRAM and L2 of the
    chip, all launches; tensor core and SM ingest of the busiest SM in one launch); bytes: by unit.
    """

    chip: Chip
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    waits: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))
    busy: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    ctas: int = 0
    clocks: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    def us(self, cycles: float) -> float:
        """Microseconds of a number of cycles at the chip's clock."""
        return cycles / self.chip.clock.value / 1e3


@dataclass(frozen=True)
class Recorded:
    """A recorded launch. slots: CTAs an SM can hold at once; pdl: launched with programmatic stream serialization."""

    recorder: object
    cluster_size: int
    slots: int
    pdl: bool = False


class Bar:
    """An mbarrier in the replay."""

    __slots__ = ("expected", "pending", "tx", "phase", "waiters")

    def __init__(self, count: int):
        self.expected = self.pending = count
        self.tx = self.phase = 0
        self.waiters: list = []


class Place:
    """An SM (slots for CTAs)."""

    __slots__ = ("index", "gpc", "free", "ingest", "stores", "tensor_free", "dsmem", "misses")

    def __init__(self, index: int, gpc: int, slots: int, chip: Chip):
        self.index, self.gpc, self.free = index, gpc, slots
        clock = chip.clock.value
        self.ingest = Server(chip.sm_ingest.value / clock)
        self.misses = Server(chip.sm_misses.value / clock)
        self.dsmem = Server(chip.dsmem_bandwidth.value / clock)
        self.stores = Server(1 / chip.store_line.value)
        self.tensor_free = 0.0


class Simulation:
    """A chain of launches of recorded grids on one chip.

    launches: `Recorded` launches in stream order. cold: inputs of each launch are in DRAM, not in L2.
    """

    def __init__(self, chip: Chip, launches: list, cold: bool = True):
        self.chip, self.launches, self.cold = chip, launches, cold
        clock = chip.clock.value
        self.dram = Server(chip.dram_bandwidth.value / clock)
        self.l2 = Server(chip.l2_bandwidth.value / clock)
        self.write_requests = Server(chip.l2_write_lines.value)
        self.l2_writes = Server(chip.l2_write_bandwidth.value / clock)
        self.in_l2: dict = {}
        self.work: dict = defaultdict(float)  # (unit, launch, SM) -> cycles
        self.tensors: dict[int, int] = {}  # base address -> number, in the order of first use
        self.heap: list = []
        self.order = itertools.count()
        self.result = Result(chip)
        self.launched = float("-inf")  # start of the latest grid
        self.places: list[Place] = []
        self.grids: list[GridState] = []

    # --- events --------------------------------------------------------------------------------

    def at(self, t: float, function, *args) -> None:
        """Call function(t, *args) at time t."""
        heapq.heappush(self.heap, (t, next(self.order), function, args))

    def run(self) -> Result:
        """Run all launches to their end."""
        chip = self.chip
        slots = max(launch.slots for launch in self.launches)
        per_gpc = int(chip.gpc_sms.value)
        self.places = [Place(i, i // per_gpc, slots, chip) for i in range(int(chip.sms.value))]
        for i, launch in enumerate(self.launches):
            self.grids.append(GridState(self, i, launch))
        self.grids[0].begin(chip.launch_latency.value)
        while self.heap:
            t, _, function, args = heapq.heappop(self.heap)
            function(t, *args)
        for g in self.grids:
            if g.unfinished:
                raise RuntimeError(f"the replay of launch {g.index} stopped with {g.unfinished} clusters unfinished")
        most: dict[str, float] = {"tensor core": 0.0, "SM ingest": 0.0}
        for (unit, _, _), cycles in self.work.items():
            most[unit] = max(most[unit], cycles)
        self.result.busy |= {"DRAM": self.dram.busy, "L2": self.l2.busy, **most}
        self.result.ctas = sum(g.cta_count for g in self.grids)
        return self.result

    # --- memory --------------------------------------------------------------------------------

    def fetch(self, t: float, place: Place, targets: list, grid: int, key: int, copy, done) -> None:
        """A global load of copy.nbytes: DRAM unless in L2, then L2, then the port of each receiving SM."""
        name = (grid if self.cold else 0, key, copy.nbytes)
        self.result.bytes["L2"] += copy.nbytes
        ready = self.in_l2.get(name)
        if ready is None:
            ready = self.in_l2[name] = self.miss(t, place, copy.nbytes) + self.chip.dram_latency.value
        self.at(max(t, ready), self._from_l2, targets, copy, done)

    def miss(self, t: float, place: Place, nbytes: float) -> float:
        """The time at which nbytes that an SM asks for at t have left DRAM: limited by it and by that SM's misses."""
        self.result.bytes["DRAM"] += nbytes
        return max(self.dram.serve(t, nbytes), place.misses.serve(t, nbytes))

    def write(self, t: float, nbytes: float) -> float:
        """The time at which nbytes written at t are in L2."""
        self.result.bytes["stores"] += nbytes
        return self.l2_writes.serve(t, nbytes)

    def _from_l2(self, t: float, places, copy, done) -> None:
        n = len(places)
        chip = self.chip
        factor = 1.0 if n == 1 else n / (chip.multicast_2.value if n == 2 else chip.multicast_4.value)
        out = self.l2.serve(t, copy.nbytes * factor)
        for p, bar in places:
            arrived = max(p.ingest.serve(out - copy.nbytes / self.l2.rate, copy.nbytes), out)
            self.at(arrived + chip.l2_latency.value, done, bar)


class GridState:
    """One launch of the chain: its clusters waiting to be placed, running, ended."""

    def __init__(self, simulation: Simulation, index: int, launch):
        self.sim, self.index, self.launch = simulation, index, launch
        self.queue = deque(enumerate(launch.recorder.clusters))
        self.structures = list(launch.recorder.structures)
        self.unfinished = len(self.queue)
        self.cta_count = self.unfinished * launch.cluster_size
        self.triggered = 0
        self.begun = self.complete = False
        self.waiting: list = []  # warps in griddepcontrol.wait
        self.end = 0.0

    def begin(self, t: float) -> None:
        """The grid may place CTAs from t on, but not before the front end has launched it."""
        self.begun = True
        chip = self.sim.chip
        t = max(t, self.sim.launched + chip.launch_interval.value)
        self.sim.launched = t
        self.sim.result.starts.append(t)
        self.sim.at(t, self.place)

    def place(self, t: float) -> None:
        """Put clusters on free SMs, in order."""
        size = self.launch.cluster_size
        while self.queue and self.begun:
            found = self._find(size)
            if found is None:
                return
            for p in found:
                p.free -= 1
            number, (structure, keys) = self.queue.popleft()
            extra = self.sim.chip.cluster_launch.value if size > 1 else 0.0
            ClusterRun(self, number, structure, keys, found).start(t + extra)

    def _find(self, size: int):
        places = self.sim.places
        if size == 1:
            best = max(places, key=lambda p: p.free)
            return [best] if best.free > 0 else None
        by_gpc = defaultdict(list)
        for p in places:
            if p.free > 0:
                by_gpc[p.gpc].append(p)
        for group in sorted(by_gpc.values(), key=lambda group: -sum(p.free for p in group)):
            if len(group) >= size:
                return sorted(group, key=lambda p: -p.free)[:size]
        return None

    def trigger(self, t: float) -> None:
        """A CTA has executed launch_dependents or exited."""
        self.triggered += 1
        following = self._next()
        if self.triggered == self.cta_count and following and following.launch.pdl and not following.begun:
            following.begin(t)

    def cluster_done(self, t: float, written: float, places) -> None:
        """Free the SMs; at the last cluster, and when what it wrote is in L2, the grid is complete."""
        for p in places:
            p.free += 1
        self.unfinished -= 1
        self.end = max(self.end, t, written)
        for g in self.sim.grids:
            if g.begun and g.queue:
                g.sim.at(t + self.sim.chip.cta_launch.value, g.place)
        if self.unfinished == 0:
            self._finish(self.end + self.sim.chip.store_drain.value)

    def _finish(self, end: float) -> None:
        self.complete = True
        self.sim.result.ends.append(end)
        following = self._next()
        if following is None:
            return
        if not following.begun:
            following.begin(end + self.sim.chip.launch_gap.value)
        for warp in following.waiting:
            self.sim.at(end + self.sim.chip.dependent_gap.value, warp.resume, "previous grid")
        following.waiting = []

    def previous_complete(self) -> bool:
        """True where no earlier launch is still running."""
        return self.index == 0 or self.sim.grids[self.index - 1].complete

    def _next(self):
        grids = self.sim.grids
        return grids[self.index + 1] if self.index + 1 < len(grids) else None


class ClusterRun:
    """A cluster on its SMs."""

    def __init__(self, grid: GridState, number: int, structure: int, keys, places):
        self.grid, self.sim, self.places, self.number = grid, grid.sim, places, number
        self.bars: dict = {}
        self.named: dict = {}
        self.mma_groups: dict = defaultdict(lambda: ([], []))  # (rank, warpgroup) -> ends of its groups, who waits
        self.arrived = 0
        self.cluster_waiters: list = []
        self.cluster_phase, self.cluster_time = 0, 0.0
        self.written = 0.0
        self.shown = number == 0 and grid.index == 0
        self.triggered: set[int] = set()
        events = grid.structures[structure]
        self.warps = [WarpRun(self, rank, i, e, keys[rank][i])
                      for rank, cta in enumerate(events) for i, e in enumerate(cta)]
        self.live = len(self.warps)
        self.live_of = [len(cta) for cta in events]
        # Dependent instructions issue every alu_latency cycles, so that many warps share a scheduler without loss.
        self.crowding = max(1.0, len(events[0]) / SMSPS / self.sim.chip.alu_latency.value)

    def start(self, t: float) -> None:
        for w in self.warps:
            w.begin = t
            self.sim.at(t, w.step)

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """Keep an interval for the timeline, for the first cluster only."""
        if self.shown:
            self.sim.result.spans.append(Span(track, name, start, end))

    def bar(self, key) -> Bar:
        return self.bars[key]

    def settle(self, t: float, bar: Bar) -> None:
        """Complete a phase that is due and wake who waits."""
        if bar.pending or bar.tx:
            return
        bar.phase += 1
        bar.pending = bar.expected
        waiters, bar.waiters = bar.waiters, []
        for warp, target in waiters:
            if bar.phase > target:
                self.sim.at(t + self.sim.chip.mbarrier_latency.value, warp.resume, None)
            else:
                bar.waiters.append((warp, target))

    def arrive_cluster(self, t: float) -> None:
        """A warp arrives at the cluster barrier."""
        self.arrived += 1
        if self.arrived < self.live:
            return
        self.arrived, self.cluster_phase = 0, self.cluster_phase + 1
        self.cluster_time = t + self.sim.chip.cluster_barrier_latency.value
        waiting, self.cluster_waiters = self.cluster_waiters, []
        for w in waiting:
            self.sim.at(self.cluster_time, w.resume, None)

    def arrive(self, t: float, key, n: int = 1) -> None:
        bar = self.bars[key]
        bar.pending -= n
        self.settle(t, bar)

    def credit(self, t: float, key, nbytes: int) -> None:
        bar = self.bars[key]
        bar.tx -= nbytes
        self.settle(t, bar)

    def warp_done(self, t: float, warp) -> None:
        self.live -= 1
        self.live_of[warp.rank] -= 1
        if self.live_of[warp.rank] == 0:
            self.trigger(t, warp.rank)
        if self.live == 0:
            self.grid.cluster_done(t, self.written, self.places)

    def trigger(self, t: float, rank: int) -> None:
        if rank not in self.triggered:
            self.triggered.add(rank)
            self.grid.trigger(t)


class WarpRun:
    """A warp replaying its events."""

    def __init__(self, cluster: ClusterRun, rank: int, index: int, events, keys):
        self.cluster, self.sim, self.rank, self.index = cluster, cluster.sim, rank, index
        self.events, self.position, self.keys, self.key = events, 0, keys, 0
        self.place = cluster.places[rank]
        self.written = 0.0  # when the last store is in L2
        self.ready = 0.0  # when outstanding loads have arrived
        self.since, self.cause = None, ""
        self.copied: dict[int, int] = {}  # copies of each tensor so far
        self.groups: dict = defaultdict(deque)
        self.committed, self.mma_end = 0, 0.0  # wgmma groups; end of the warpgroup's last MMA
        self.open: dict = defaultdict(float)
        self.begin = 0.0
        self.track = f"CTA {rank} warp {index}"

    def step(self, t: float) -> None:
        """Handle events until one needs the time to pass."""
        events = self.events
        while self.position < len(events):
            event = events[self.position]
            if event[0]:
                spent = event[0] * self.cluster.crowding
                t += spent
                self.cluster.span(self.track, "issue", t - spent, t)
                self.sim.at(t, self._continue, event)
                return
            self.position += 1
            t2 = self._handle(t, event)
            if t2 is None:
                return
            if t2 > t:
                self.sim.at(t2, self.step)
                return
        self.sim.at(max(t, self.ready), self._exit)
        self.cluster.written = max(self.cluster.written, self.written)

    def _continue(self, t: float, event) -> None:
        self.position += 1
        t2 = self._handle(t, event)
        if t2 is None:
            return
        if t2 > t:
            self.sim.at(t2, self.step)
        else:
            self.step(t)

    def _exit(self, t: float) -> None:
        self.cluster.warp_done(t, self)

    def _handle(self, t: float, event):
        """The time at which the warp goes on, or None where it was parked."""
        return getattr(self, "do_" + event[1])(t, *event[2:])

    def do_clock(self, t):
        if self.cluster.number == 0 and self.rank == 0:
            self.sim.result.clocks[self.cluster.grid.index, self.index].append(t)
        return t

    # --- waiting -------------------------------------------------------------------------------

    def park(self, t: float, cause: str) -> None:
        self.since, self.cause = t, cause

    def resume(self, t: float, cause) -> None:
        """Woken: account for the wait and go on."""
        self.idle(self.since, t, cause or self.cause)
        self.step(t)

    def idle(self, start: float, end: float, cause: str) -> None:
        if end > start:
            self.sim.result.waits[self.index][cause] += end - start
            self.cluster.span(self.track, f"wait: {cause}", start, end)

    def do_init(self, t, bar, count):
        self.cluster.bars[bar] = Bar(count)
        return t + self.sim.chip.mbarrier_issue.value

    def do_arrive(self, t, bar, n, fenced=False):
        chip = self.sim.chip
        if bar[0] == self.rank:
            self.cluster.arrive(t, bar, n)
        else:
            t += chip.cluster_release.value if fenced else 0.0
            self.sim.at(t + chip.dsmem_latency.value, self.cluster.arrive, bar, n)
        return t + chip.mbarrier_issue.value

    def do_expect(self, t, bar, nbytes, arrive):
        state = self.cluster.bars[bar]
        state.tx += nbytes
        if arrive:
            state.pending -= arrive
        self.cluster.settle(t, state)
        return t + self.sim.chip.mbarrier_issue.value

    def do_wait(self, t, bar, phase):
        state = self.cluster.bars[bar]
        if state.phase > phase:
            return t + self.sim.chip.mbarrier_issue.value
        state.waiters.append((self, phase))
        self.park(t, f"mbarrier {bar[1]:#x}")
        return None

    def do_named(self, t, number, threads, waits):
        chip, key = self.sim.chip, (self.rank, number)
        state = self.cluster.named.setdefault(key, [0, []])
        state[0] += WARP
        if waits:
            state[1].append(self)
            self.park(t, f"barrier {number}")
        if state[0] >= threads:
            del self.cluster.named[key]
            late = chip.named_barrier_latency.value + chip.named_barrier_warp.value * threads / WARP
            for w in state[1]:
                self.sim.at(t + late, w.resume, None)
        return None if waits else t + chip.mbarrier_issue.value

    def do_cluster(self, t, waits, fenced=False):
        c, chip = self.cluster, self.sim.chip
        if not waits:
            t += chip.cluster_release.value if fenced else 0.0
            self.cluster_target = c.cluster_phase
            self.sim.at(t, c.arrive_cluster)
            return t
        if c.cluster_phase > self.cluster_target:
            return max(t, c.cluster_time)
        c.cluster_waiters.append(self)
        self.park(t, "cluster barrier")
        return None

    def do_use(self, t):
        if self.ready > t:
            self.idle(t, self.ready, "loaded registers")
        return max(t, self.ready)

    # --- copies --------------------------------------------------------------------------------

    def next_key(self) -> int:
        self.key += 1
        return self.keys[self.key - 1]

    def do_copy(self, t, copy):
        chip, c = self.sim.chip, self.cluster
        key = self.next_key()
        issued = t + chip.copy_issue.value
        bars = copy.bars if len(copy.bars) == len(copy.ranks) else copy.bars * len(copy.ranks)
        targets = [(c.places[r], b) for r, b in zip(copy.ranks, bars, strict=True)]
        for p, _ in targets:
            self.sim.work["SM ingest", c.grid.index, p.index] += copy.nbytes / p.ingest.rate
        start, tensor = t, self.sim.tensors.setdefault(copy.tensor, len(self.sim.tensors))
        n = self.copied[copy.tensor] = self.copied.get(copy.tensor, -1) + 1
        track, name = f"CTA {self.rank} copies of tensor {tensor}", f"copy tile {n}, {copy.nbytes} B"

        def done(now, bar):
            c.span(track, name, start, now)
            c.credit(now, bar, copy.nbytes)

        if copy.tensor:
            self.sim.fetch(issued, self.place, targets, c.grid.index, key, copy, done)
        else:
            for place, bar in targets:
                self.sim.at(place.dsmem.serve(issued, copy.nbytes) + chip.dsmem_copy_latency.value, done, bar)
        return issued

    def do_store(self, t, nbytes, lane):
        chip = self.sim.chip
        read = self.place.dsmem.serve(t + chip.copy_issue.value, nbytes) + chip.store_latency.value
        end = max(read, self.sim.write(read, nbytes))
        self.open[lane] = max(self.open[lane], end)
        self.cluster.span(f"CTA {self.rank} stores", f"store {nbytes} B", t, end)
        self.written = max(self.written, end)
        return t + chip.copy_issue.value

    def do_commit_group(self, t, lane):
        self.groups[lane].append(self.open.pop(lane, t))
        return t

    def do_wait_group(self, t, lane, n):
        groups = self.groups[lane]
        end = t
        while len(groups) > n:
            end = max(end, groups.popleft())
        self.idle(t, end, "bulk stores")
        return end

    # --- tensor core -----------------------------------------------------------------------------

    def _enter(self, t, queue, cycles, name):
        place = self.cluster.places[queue]
        start = max(t, place.tensor_free)
        place.tensor_free = start + cycles
        self.sim.work["tensor core", self.cluster.grid.index, place.index] += cycles
        self.cluster.span(f"CTA {queue} tensor core", name, start, place.tensor_free)
        return t + 1

    def do_mma(self, t, queue, cycles):
        return self._enter(t, queue, cycles, "MMA")

    def do_cp(self, t, queue):
        return self._enter(t, queue, self.sim.chip.cp_cycles.value, "cp")

    def do_commit(self, t, queue, bars):
        place = self.cluster.places[queue]
        end = max(t, place.tensor_free) + self.sim.chip.mma_latency.value
        for bar in bars:
            self.sim.at(end, self.cluster.arrive, bar)
        return t + 1

    def do_wgmma(self, t, cycles):
        """A warpgroup's MMA; recorded by its first warp."""
        after = self._enter(t, self.rank, cycles, "MMA")
        self.mma_end = self.place.tensor_free + self.sim.chip.mma_latency.value
        return after

    def do_wgmma_commit(self, t):
        self.committed += 1
        if self.index % WARPGROUP == 0:
            ends, waiters = self.cluster.mma_groups[self.rank, self.index // WARPGROUP]
            ends.append(max(t, self.mma_end))
            due = [warp for warp, target in waiters if target == len(ends)]
            waiters[:] = [w for w in waiters if w[1] > len(ends)]
            for warp in due:
                self.sim.at(ends[-1], warp.resume, None)
        return t + 1

    def do_wgmma_wait(self, t, n):
        """Until all groups but the latest n have ended. The warpgroup's first warp, which has the MMAs, may be late."""
        target = self.committed - n
        ends, waiters = self.cluster.mma_groups[self.rank, self.index // WARPGROUP]
        if target > len(ends):
            waiters.append((self, target))
            self.park(t, "warpgroup MMA")
            return None
        end = max(t, ends[target - 1]) if target > 0 else t
        self.idle(t, end, "warpgroup MMA")
        return end

    def do_tld(self, t, nbytes):
        chip = self.sim.chip
        self.ready = max(self.ready, t + chip.tmem_load_latency.value) + nbytes / chip.tmem_load_bandwidth.value
        return t + 1

    def do_alloc(self, t):
        return t + self.sim.chip.tmem_alloc_latency.value

    # --- ordinary memory -----------------------------------------------------------------------

    def do_ldg(self, t, nbytes):
        chip, sim = self.sim.chip, self.sim
        key = self.next_key()
        name = (self.cluster.grid.index if sim.cold else 0, key, nbytes)
        arrived = sim.in_l2.get(name)
        if arrived is None:
            arrived = sim.in_l2[name] = sim.miss(t, self.place, nbytes) + chip.load_miss_latency.value
        sim.result.bytes["L2"] += nbytes
        done = self.place.ingest.serve(sim.l2.serve(max(t, arrived), nbytes), nbytes)
        self.ready = max(self.ready, done + chip.load_latency.value)
        return t + 1

    def do_stg(self, t, lines, nbytes):
        """lines: 128-byte lines touched, a request each; the warp waits where the pipe lags by `STORE_QUEUE` cycles."""
        end = max(self.place.stores.serve(t, lines), self.sim.write_requests.serve(t, lines), self.sim.write(t, nbytes))
        self.written = max(self.written, end)
        resume = max(t + 1, max(self.place.stores.free, self.sim.write_requests.free) - STORE_QUEUE)
        self.idle(t + 1, resume, "store pipe")
        return resume

    def do_lds(self, t, nbytes):
        chip = self.sim.chip
        self.ready = max(self.ready, t + chip.shared_latency.value)
        return t + nbytes / chip.shared_bandwidth.value

    def do_sts(self, t, nbytes):
        return t + nbytes / self.sim.chip.shared_bandwidth.value

    # --- dependent launch ------------------------------------------------------------------------

    def do_pdl_launch(self, t):
        self.cluster.trigger(t, self.rank)
        return t

    def do_pdl_wait(self, t):
        grid = self.cluster.grid
        if grid.previous_complete():
            return t
        grid.waiting.append(self)
        self.park(t, "previous grid")
        return None
