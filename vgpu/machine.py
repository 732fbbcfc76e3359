"""CTAs, clusters and grids: who runs when, and the queues of the asynchronous units.

Asynchronous work completes late: an operation stays in its queue while any warp of its cluster can still run; then the
queue empties one operation at a time, in the order the policy says. So a wait that is missing meets data that is not
there yet, and an access that overlaps an operation in flight is reported when it is issued.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from functools import cached_property

from .barrier import ClusterBarrier, MBarrier, NamedBarrier
from .errors import VirtualGpuError
from .memory import GlobalMemory, SharedMemory
from .tmem import TensorMemory
from .warp import DONE, YIELD, Warp, generated_line

ORDERS = ("copies", "tensor", "random")
SPIN_ROUNDS = 200  # rounds in which every running warp only polled, before the cluster counts as stalled
STALL_ROUNDS = 50  # times the whole grid may be stalled without progress before it is a deadlock


class Op:
    """One asynchronous operation in flight.

    kind: 'copy', 'store', 'mma', 'cp', 'commit', 'shift'. spans: [(cta, low, high, writes)] of shared memory.
    run: does it. where: (program, generated line) of the instruction that issued it.
    """

    __slots__ = ("kind", "run", "spans", "where", "warp", "done", "payload", "columns")

    def __init__(self, kind, run, warp, spans=(), payload=None, columns=()):
        self.kind, self.run, self.warp, self.spans = kind, run, warp, spans
        self.payload, self.columns = payload, columns
        self.where = generated_line(warp.program)
        self.done = False

    def retire(self) -> None:
        """It is no longer in flight."""
        for cta, _, _, writes in self.spans:
            (cta.writing if writes else cta.reading).pop(self, None)
        self.done = True

    def describe(self) -> str:
        """The instruction that issued it, with its line."""
        instr = self.where
        place = f"PTX line {instr.line}: {instr.text.split(';')[0].strip()[:90]}" if instr else "an earlier instruction"
        return f"{place} (CTA {self.warp.cta.id}, warp {self.warp.index})"


class Cta:
    """A CTA: shared memory, tensor memory, barriers, warps. `rank` is %cluster_ctarank."""

    def __init__(self, cluster, rank: int, ctaid: tuple[int, int, int], sm: int):
        self.cluster, self.rank, self.id, self.sm = cluster, rank, ctaid, sm
        grid = cluster.grid
        program, config = grid.program, grid.config
        self.shared_bytes = program.shared_static + config.shared_bytes + max(
            0, max(program.shared_offsets.values(), default=0) - 1024 - program.shared_static)
        self.smem = SharedMemory(self.shared_bytes, rank)
        self.mbarriers: dict[int, MBarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.writing: dict[Op, list] = {}  # operations in flight that write this shared memory, with their spans
        self.reading: dict[Op, list] = {}  # those that read it
        self.alloc_permit = True
        self.allocations: dict[int, tuple[int, int]] = {}  # start column -> (columns, cta_group)
        self.freed: dict[int, tuple[int, int]] = {}  # likewise, freed since the last allocation
        self.last_alloc = 512
        self.alloc_waiters: list = []
        self.exited = False
        self.load_bytes = 0
        shape = cluster.shape
        self.cluster_ctaid = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
        bx, by, bz = config.block
        threads = bx * by * bz
        self.warps = [Warp(self, i, program, threads) for i in range((threads + 31) // 32)]
        self.threads = threads
        self.live = len(self.warps)

    @cached_property
    def tmem(self) -> TensorMemory:
        """The CTA's tensor memory; few kernels use it."""
        return TensorMemory()

    def mbarrier(self, offset: int, what: str) -> MBarrier:
        """The barrier object at a byte offset of this CTA's shared memory."""
        if self.exited:
            raise VirtualGpuError("race", f"{what} touches the shared memory of CTA {self.id}, which has exited")
        bar = self.mbarriers.get(offset)
        if bar is None:
            self.smem.check(offset, 8, 8)
            raise VirtualGpuError("mbarrier", f"{what}: no mbarrier was initialised at shared offset {offset:#x}")
        return bar

    def conflict(self, low: int, high: int, writes: bool, what: str) -> None:
        """Raise `race` if [low, high) overlaps an operation in flight and one of the two writes."""
        for op, spans in self.writing.items():
            for lo, hi in spans:
                if low < hi and lo < high:
                    raise self.overlap(low, high, writes, what, op, "writes")
        if writes:
            for op, spans in self.reading.items():
                for lo, hi in spans:
                    if low < hi and lo < high:
                        raise self.overlap(low, high, writes, what, op, "reads")

    @staticmethod
    def overlap(low: int, high: int, writes: bool, what: str, op: Op, other: str) -> VirtualGpuError:
        """The error for an access that overlaps an operation in flight."""
        return VirtualGpuError(
            "race", f"{what} {'writes' if writes else 'reads'} shared bytes [{low:#x}, {high:#x}), which an operation "
            f"in flight still {other}: {op.describe()}")

    def check_end(self) -> None:
        """Called when the last warp has exited: nothing may be left in flight or allocated."""
        self.exited = True
        grid = self.cluster.grid
        for op in [*self.writing, *self.reading]:
            if op.kind == "store":
                grid.warn(f"CTA exits while a bulk store still reads its shared memory (no wait_group.read): "
                          f"{op.describe()}")
            else:
                raise VirtualGpuError("race", f"the CTA exits while an operation on its shared memory is in flight: "
                                      f"{op.describe()}").place(cta=self.id, kernel=grid.program.kernel.name)
        if self.allocations:
            raise VirtualGpuError("tensor memory", f"the CTA exits with tensor memory allocated: columns "
                                  f"{sorted(self.allocations)}").place(cta=self.id, kernel=grid.program.kernel.name)
        for named in self.named.values():
            if named.warps:
                grid.warn(f"CTA exits with arrivals at barrier {named.number} that nobody waited for: "
                          f"{named.describe()}")
        for bar in self.mbarriers.values():
            if bar.tx or bar.pending != bar.expected:
                grid.warn(f"CTA exits in the middle of a phase of the mbarrier at {bar.offset:#x}: {bar.describe()}")


class Cluster:
    """The CTAs that run together, their ready warps and asynchronous queues."""

    def __init__(self, grid, cluster_id: tuple[int, int, int], first_sm: int):
        self.grid, self.id, self.shape = grid, cluster_id, grid.config.cluster
        sx, sy, sz = self.shape
        self.size = sx * sy * sz
        self.ready: list[Warp] = []
        self.progress = 0
        self.sequence = 0
        self.copies: list[Op] = []
        self.stores: list[Op] = []
        self.tensor: dict[int, deque[Op]] = {}
        self.prepared: dict = {}  # MMAs and copies by their operands, see tensor.Prepared
        self.unwaited = 0  # warps with a tcgen05.ld not waited for
        self.ctas: list[Cta] = []
        for rank in range(self.size):
            place = (rank % sx, rank // sx % sy, rank // (sx * sy))
            ctaid = tuple(i * s + p for i, s, p in zip(cluster_id, self.shape, place, strict=True))
            self.ctas.append(Cta(self, rank, ctaid, (first_sm + rank) % grid.device.sms))
        self.live = sum(len(c.warps) for c in self.ctas)
        self.barrier = ClusterBarrier(self.live)
        for c in self.ctas:
            self.ready += c.warps
        self.spins = 0

    def make_ready(self, warp: Warp) -> None:
        """A parked warp may run again."""
        self.ready.append(warp)

    def next_sequence(self) -> int:
        """A number that grows with every synchronisation and store, to order them."""
        self.sequence += 1
        return self.sequence

    def resolve(self, address: int, what: str) -> tuple[Cta, int]:
        """A shared::cluster address to (CTA, offset)."""
        rank = address >> 24
        if rank >= self.size:
            raise VirtualGpuError("out of bounds", f"{what}: shared address {address:#x} names CTA rank {rank}; the "
                                  f"cluster has {self.size}")
        return self.ctas[rank], address & 0xFFFFFF

    # --- asynchronous operations ---------------------------------------------------------------

    def track(self, op: Op) -> None:
        """From now on the operation's accesses are in flight, after checking them against those that are."""
        for cta, low, high, writes in op.spans:
            cta.conflict(low, high, writes, op.kind)
        for cta, low, high, writes in op.spans:
            (cta.writing if writes else cta.reading).setdefault(op, []).append((low, high))

    def issue(self, op: Op, queue=None) -> None:
        """Put an operation in flight and in its queue. queue: of a tensor core, a CTA rank or (rank, warpgroup)."""
        self.track(op)
        if queue is not None:
            self.tensor.setdefault(queue, deque()).append(op)
        elif op.kind == "store":
            self.stores.append(op)
        else:
            self.copies.append(op)

    def complete(self, op: Op) -> None:
        """Do an operation that has left its queue."""
        op.retire()
        self.progress += 1
        try:
            op.run()
        except VirtualGpuError as e:
            where = op.where
            raise e.place(kernel=self.grid.program.kernel.name, line=where.line if where else None,
                          text=where.text if where else None, cta=op.warp.cta.id, warp=op.warp.index) from None

    def finish_store(self, op: Op) -> None:
        """Complete a bulk store now, if it has not been."""
        if not op.done:
            (self.stores if op in self.stores else self.copies).remove(op)
            self.complete(op)

    def _candidates(self) -> list:
        heads = [q for q in self.tensor.values() if q]
        order = self.grid.order
        if order == "copies":
            if self.copies:
                return [(self.copies, 0)]
            if heads:
                return [(heads[0], 0)]
            return [(self.stores, 0)] if self.stores else []
        if order == "tensor":
            if heads:
                return [(heads[-1], 0)]
            if self.stores:
                return [(self.stores, len(self.stores) - 1)]
            return [(self.copies, len(self.copies) - 1)] if self.copies else []
        found = [(q, 0) for q in heads]
        found += [(self.copies, i) for i in range(len(self.copies))]
        found += [(self.stores, i) for i in range(len(self.stores))]
        return found

    def drain(self) -> bool:
        """Complete operations until a warp can run; False if there was nothing to complete."""
        any_done = False
        while True:
            found = self._candidates()
            if not found:
                return any_done
            queue, i = found[0] if len(found) == 1 else self.grid.rng.choice(found)
            if isinstance(queue, deque):
                self._drain_tensor(queue)
            else:
                self.complete(queue.pop(i))
            any_done = True
            if any(not w.failed_polls for w in self.ready):
                return True
            if self.ready:
                return True

    def _drain_tensor(self, queue: deque) -> None:
        """Complete the head; consecutive MMAs on one accumulator, or copies, go together (they are in order anyway)."""
        op = queue.popleft()
        if op.payload is None:
            self.complete(op)
            return
        batch = [op]
        while queue and queue[0].kind == op.kind and queue[0].payload.batches_with(op.payload):
            batch.append(queue.popleft())
        for other in batch[1:]:
            other.retire()
        op.payload.batch = [o.payload for o in batch]
        self.complete(op)

    def pending(self) -> bool:
        """Is anything in flight?"""
        return bool(self.copies or self.stores or any(self.tensor.values()))

    # --- scheduling ----------------------------------------------------------------------------

    def advance(self) -> bool:
        """Run until all warps have exited (True) or none can go on without another cluster (False)."""
        grid = self.grid
        while self.live:
            batch, self.ready = self.ready, []
            grid.arrange(batch)
            before = self.progress
            for w in batch:
                outcome = w.run()
                if outcome == DONE:
                    self.exit_warp(w)
                elif outcome == YIELD:
                    self.ready.append(w)
            if self.live == 0:
                break
            if self.progress != before:
                self.spins = 0
            if any(not w.failed_polls for w in self.ready) and self.progress != before:
                continue
            fresh = [w for w in self.ready if not w.failed_polls and w not in batch]
            if fresh:
                continue
            if self.drain():
                self.spins = 0
                continue
            self.spins += 1
            if not self.ready or self.spins > SPIN_ROUNDS:
                self.spins = 0
                return False
        self.finish()
        return True

    def exit_warp(self, warp: Warp) -> None:
        """Account for a warp that has ended."""
        self.live -= 1
        self.progress += 1
        cta = warp.cta
        cta.live -= 1
        self.grid.count_warp(warp)
        self.barrier.leave(warp)
        for bar in cta.named.values():
            if bar.complete(len(cta.warps) - cta.live):
                self.release(bar)
        if cta.live == 0:
            cta.check_end()

    def release(self, bar: NamedBarrier) -> None:
        """Let the warps that wait at a named barrier go on."""
        self.progress += 1
        for w in bar.release(self.next_sequence()):
            if w.waiting is not None:
                w.wake()

    def finish(self) -> None:
        """All warps have exited: what is still in flight completes."""
        while self.pending():
            self.drain()
        self.grid.count_cluster(self)


def ctas_per_sm(program, config) -> int:
    """CTAs of a kernel that an SM holds at once: 2048 threads, 32 CTAs, 228 KB of shared memory of which each CTA has
    1 KB reserved (CUDA C++ programming guide, compute capability 10.0); registers are not known."""
    x, y, z = config.block
    threads = -(-x * y * z // 32) * 32
    return max(1, min(32, 2048 // threads, 228 * 1024 // (program.shared_static + config.shared_bytes + 1024)))


class Grid:
    """One launch: clusters in order, one at a time unless they wait for each other."""

    _serials = iter(range(1, 1 << 62))

    def __init__(self, device, program, config, params: bytes, order: str, seed: int, exact: bool,
                 recorder=None):
        if order not in ORDERS:
            raise ValueError(f"order: {order!r}; allowed: {', '.join(ORDERS)}")
        self.device, self.program, self.config, self.params = device, program, config, params
        self.order, self.rng, self.exact = order, random.Random(seed), exact
        self.serial = next(self._serials)
        self.recorder = recorder  # timing.record.Recorder, or None
        self.memory: GlobalMemory = device.memory
        self.counters: Counter = Counter()
        self.by_warp: Counter = Counter()
        self.units: dict[int, set] = {}
        self.tensor_bytes: Counter = Counter()
        self.sm_bytes: Counter = Counter()
        self.warnings: dict[str, int] = {}
        self._ticks = 0
        self.cancelled: set[int] = set()

    def ticks(self) -> int:
        """Monotonic, for %clock; grows by one at each reading."""
        self._ticks += 1
        return self._ticks

    def warn(self, message: str) -> None:
        """Record a diagnostic that does not stop the launch."""
        self.warnings[message] = self.warnings.get(message, 0) + 1

    def arrange(self, warps: list) -> None:
        """Order in which ready warps run."""
        if self.order == "tensor":
            warps.reverse()
        elif self.order == "random":
            self.rng.shuffle(warps)

    def count_warp(self, warp: Warp) -> None:
        """Add an exited warp's work."""
        self.by_warp[warp.index] += warp.instructions
        self.units.setdefault(warp.index, set()).update(warp.units)

    def count_cluster(self, cluster: Cluster) -> None:
        """Add an ended cluster's work."""
        self.counters["clusters"] += 1
        self.counters["ctas"] += cluster.size
        if self.recorder is not None:
            self.recorder.add(cluster)
        for cta in cluster.ctas:
            self.sm_bytes[cta.sm] += cta.load_bytes

    def cluster_ids(self):
        """Cluster coordinates, x fastest."""
        nx, ny, nz = (g // c for g, c in zip(self.config.grid, self.config.cluster, strict=True))
        size = self.config.cluster[0] * self.config.cluster[1] * self.config.cluster[2]
        for i in range(nx * ny * nz):
            if i not in self.cancelled:
                self.started = i
                yield (i % nx, i // nx % ny, i // (nx * ny)), i * size % self.device.sms

    def cancel_next(self) -> bytes:
        """clusterlaunchcontrol: take the next cluster off the launch queue.

        Returns 16 bytes: x of its first CTA (4), y and z (2 each), bit 0 of the next word set if granted. PTX keeps
        them opaque; so NVIDIA's cuDNN kernels read them.
        """
        nx, ny, nz = (g // c for g, c in zip(self.config.grid, self.config.cluster, strict=True))
        i = max(self.cancelled | {self.started}) + 1
        if i >= nx * ny * nz:
            return bytes(16)
        self.cancelled.add(i)
        ids = [p * c for p, c in zip((i % nx, i // nx % ny, i // (nx * ny)), self.config.cluster, strict=True)]
        return b"".join(v.to_bytes(n, "little") for v, n in zip((*ids, 1, 0), (4, 2, 2, 4, 4), strict=True))

    def run(self) -> None:
        """Execute the whole grid."""
        clusters = self.cluster_ids()
        active: deque[Cluster] = deque()
        size = self.config.cluster[0] * self.config.cluster[1] * self.config.cluster[2]
        room = max(1, self.device.sms * ctas_per_sm(self.program, self.config) // size)
        stalls, exhausted = 0, False
        while True:
            if not exhausted and (not active or (stalls and len(active) < room)):
                nxt = next(clusters, None)
                if nxt is None:
                    exhausted = True
                else:
                    active.appendleft(Cluster(self, *nxt))
            if not active:
                return
            cluster = active[0]
            before = (cluster.progress, self.counters["global_writes"])
            if cluster.advance():
                active.popleft()
                stalls = 0
                continue
            active.rotate(-1)
            moved = (cluster.progress, self.counters["global_writes"]) != before
            stalls = 1 if moved else stalls + 1
            full = exhausted or len(active) >= room
            if full and stalls > STALL_ROUNDS * len(active) or (full and stalls > len(active) and
                                                               not any(c.ready for c in active)):
                raise self.deadlock(active)

    def deadlock(self, clusters) -> VirtualGpuError:
        """An error that lists what every warp waits for."""
        from .report import deadlock_report

        return VirtualGpuError("deadlock", deadlock_report(clusters)).place(kernel=self.program.kernel.name)
