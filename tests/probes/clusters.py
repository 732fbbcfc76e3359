"""Clusters: distributed shared memory, remote mbarrier arrivals, copies between CTAs, multicast, cluster barriers."""

from __future__ import annotations

from .assembler import Kernel, Recorder
from .model import Buffer, Probe, Scalar, TensorMap, random_bytes
from .tma import POISON

IMAGE = 1024
REGISTERS = ("%cluster_ctarank", "%cluster_nctarank", "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_ctaid.z",
             "%cluster_nctaid.x", "%cluster_nctaid.y", "%cluster_nctaid.z", "%clusterid.x", "%clusterid.y",
             "%clusterid.z", "%nclusterid.x", "%nclusterid.y", "%nclusterid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z",
             "%nctaid.x", "%nctaid.y", "%nctaid.z")


class ClusterKernel:
    """The common beginning and end of a cluster kernel whose CTAs each dump IMAGE bytes of shared memory.

    Shared memory: the image, poisoned with POISON + rank, then one mbarrier of the given arrival count.
    """

    def __init__(self, *parameters: str, arrivals: int = 1):
        self.k = k = Kernel("u64", *parameters, shared=True)
        self.tid = k.b32("mov.u32 $, %tid.x;")
        self.rank = k.b32("mov.u32 $, %cluster_ctarank;")
        self.base = k.b32("mov.u32 $, smem;")
        self.barrier = k.b32(f"add.u32 $, {self.base}, {IMAGE};")
        self.out = k.element(k.pointer(0), self.rank, IMAGE)
        word = k.b32(f"add.u32 $, {self.rank}, {POISON:#x};")
        with k.words(str(IMAGE)) as offset:
            address = k.b32(f"add.u32 $, {self.base}, {offset};")
            k(f"st.shared.b32 [{address}], {word};")
        with k.thread(self.tid):
            k.barrier_init(self.barrier, arrivals)
        k("fence.proxy.async;")
        k.cluster_sync()

    def peer(self, address: str, distance: int = 1) -> str:
        """The same shared address in CTA rank ^ distance."""
        other = self.k.b32(f"xor.b32 $, {self.rank}, {distance};")
        return self.k.b32(f"mapa.shared::cluster.u32 $, {address}, {other};")

    def expect(self, count: int | str) -> None:
        """Arrive on the own barrier, expecting `count` bytes."""
        self.k(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{self.barrier}], {count};")

    def finish(self) -> str:
        """Dump the image, keep the CTA alive until the whole cluster is done; the text."""
        self.k("bar.sync 0;")
        self.k.shared_to_global(self.out, self.base, str(IMAGE))
        self.k.cluster_sync()
        return self.k.text()


def special_registers() -> str:
    """Every CTA records its place in grid and cluster, from thread 0."""
    k = Kernel("u64", shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    out = k.pointer(0)
    index = [k.b32(f"mov.u32 $, %ctaid.{axis};") for axis in "xyz"]
    width, height = k.b32("mov.u32 $, %nctaid.x;"), k.b32("mov.u32 $, %nctaid.y;")
    linear = k.b32(f"mad.lo.u32 $, {index[2]}, {height}, {index[1]};")
    linear = k.b32(f"mad.lo.u32 $, {linear}, {width}, {index[0]};")
    record = Recorder(k, k.element(out, linear, 4 * 32))
    with k.thread(tid):
        for register in REGISTERS:
            record.word(k.b32(f"mov.u32 $, {register};"))
        record.flag(k.pred("mov.pred $, %is_explicit_cluster;"))
        base = k.b32("mov.u32 $, smem;")
        record.word(base)
        record.word(k.b32(f"mapa.shared::cluster.u32 $, {base}, 0;"))
        last = k.b32("mov.u32 $, %cluster_nctarank;")
        last = k.b32(f"sub.u32 $, {last}, 1;")
        remote = k.b32(f"mapa.shared::cluster.u32 $, {base}, {last};")
        record.word(remote)
        record.word(k.b32(f"getctarank.shared::cluster.u32 $, {remote};"))
        record.word(k.b32(f"getctarank.shared::cluster.u32 $, {base};"))
    return k.text()


def distributed_memory() -> str:
    """Remote stores, loads and atomics; then a generic address of the peer made by mapa."""
    c = ClusterKernel()
    k = c.k
    offset = k.b32(f"shl.b32 $, {c.tid}, 2;")
    mine = k.b32(f"add.u32 $, {c.base}, {offset};")
    value = k.b32(f"mad.lo.u32 $, {c.rank}, 1000, {c.tid};")
    remote = c.peer(mine)
    k(f"st.shared::cluster.b32 [{remote}], {value};")
    byte = c.peer(k.b32(f"add.u32 $, {c.base}, {c.tid};"))
    narrow = k.b16(f"cvt.u16.u32 $, {value};")
    k(f"st.shared::cluster.b8 [{byte}+128], {narrow};")
    k.cluster_sync()
    seen = k.b32(f"ld.shared::cluster.b32 $, [{remote}];")
    k(f"st.shared.b32 [{mine}+256], {seen};")
    counter = c.peer(c.base)
    k(f"red.relaxed.cluster.shared::cluster.add.u32 [{counter}+896], {c.tid};")
    old = k.b32(f"atom.relaxed.cluster.shared::cluster.exch.b32 $, [{remote}+384], {value};")
    k(f"st.shared.b32 [{mine}+512], {old};")
    generic = k.b64("cvta.shared.u64 $, smem;")
    other = k.b32(f"xor.b32 $, {c.rank}, 1;")
    generic = k.b64(f"mapa.u64 $, {generic}, {other};")
    address = k.element(generic, offset, 1)
    k(f"st.b32 [{address}+640], {value};")
    k.cluster_sync()
    return c.finish()


def remote_arrivals() -> str:
    """Each barrier gets 32 arrivals of the peer, 4 more in one arrival with a count, and one of its own CTA."""
    c = ClusterKernel(arrivals=37)
    k = c.k
    remote = c.peer(c.barrier)
    k(f"st.shared.b32 [{c.base}], {c.rank};")
    before = k.pred(f"mbarrier.test_wait.parity.shared::cta.b64 $, [{c.barrier}], 0;")
    k(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{remote}];")
    with k.thread(c.tid, 3):
        k(f"mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{remote}], 4;",
          f"mbarrier.arrive.shared::cta.b64 _, [{c.barrier}];")
    k.wait(c.barrier, 0, ".acquire.cluster")
    after = k.pred(f"mbarrier.test_wait.parity.shared::cta.b64 $, [{c.barrier}], 1;")
    slot = k.b32(f"shl.b32 $, {c.tid}, 2;")
    slot = k.b32(f"add.u32 $, {c.base}, {slot};")
    k(f"st.shared.b32 [{slot}+256], {k.as_word(after)};")
    with k.thread(c.tid, 3):
        k(f"st.shared.b32 [{c.base}+128], {k.as_word(before)};")
    return c.finish()


def remote_copy() -> str:
    """Each CTA copies 256 bytes of its image into the peer's, signalling the peer's barrier."""
    c = ClusterKernel()
    k = c.k
    with k.thread(c.tid):
        c.expect(256 + 32)
        target, barrier = c.peer(c.base), c.peer(c.barrier)
        for there, here, size in ((512, 0, 256), (960, 256, 32)):
            k("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
              f"[{target}+{there}], [{c.base}+{here}], {size}, [{barrier}];")
    k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def remote_reduce(operation: str) -> str:
    """Each CTA reduces 128 bytes of its image (poison) into the peer's image."""
    c = ClusterKernel()
    k = c.k
    with k.thread(c.tid):
        c.expect(128)
        target, barrier = c.peer(c.base), c.peer(c.barrier)
        k(f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{operation} "
          f"[{target}+512], [{c.base}], 128, [{barrier}];")
    k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def store_async() -> str:
    """st.async of 4, 8 and 16 bytes and red.async into the peer, counted on the peer's barrier."""
    c = ClusterKernel()
    k = c.k
    with k.thread(c.tid):
        c.expect(32 * (4 + 8 + 16 + 4))
    value = k.b32(f"mad.lo.u32 $, {c.rank}, 1000, {c.tid};")
    wide = k.b64(f"mul.wide.u32 $, {value}, 0x10001;")
    barrier = c.peer(c.barrier)
    kind = "shared::cluster.mbarrier::complete_tx::bytes"

    def place(size: int) -> str:
        scaled = k.b32(f"mul.lo.u32 $, {c.tid}, {size};")
        return c.peer(k.b32(f"add.u32 $, {c.base}, {scaled};"))

    four, eight, sixteen = place(4), place(8), place(16)
    k(f"st.async.weak.{kind}.b32 [{four}], {value}, [{barrier}];",
      f"st.async.weak.{kind}.b64 [{eight}+128], {wide}, [{barrier}];",
      f"st.async.weak.{kind}.v4.b32 [{sixteen}+384], {{{value}, {c.rank}, {c.tid}, {value}}}, [{barrier}];",
      f"red.async.relaxed.cluster.{kind}.add.u32 [{four}+896], {c.tid}, [{barrier}];")
    k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def multicast_tensor(rank: int, mask: int) -> str:
    """CTA `rank` loads one 2-D box for every CTA of `mask`; only those expect it."""
    c = ClusterKernel("map", "u64")
    k = c.k
    tensor_map = k.map_address(1)
    bit = k.b32(f"shr.u32 $, {mask}, {c.rank};")
    bit = k.b32(f"and.b32 $, {bit}, 1;")
    chosen = k.pred(f"setp.ne.u32 $, {bit}, 0;")
    with k.where(chosen), k.thread(c.tid):
        c.expect(512)
    with k.thread(c.rank, rank), k.thread(c.tid):
        bits = k.b16(f"mov.b16 $, {mask};")
        x, y = k.b32("mov.b32 $, 8;"), k.b32("mov.b32 $, 1;")
        k("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
          f"[{c.base}+128], [{tensor_map}, {{{x}, {y}}}], [{c.barrier}], {bits};")
    with k.where(chosen):
        k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def multicast_slices(count: int) -> str:
    """Every CTA loads its slice (row 2 * rank on) and multicasts it to all, as a GEMM with shared operands does."""
    c = ClusterKernel("map", "u64")
    k = c.k
    tensor_map = k.map_address(1)
    with k.thread(c.tid):
        c.expect(128 * count)
        bits = k.b16(f"mov.b16 $, {(1 << count) - 1};")
        zero = k.b32("mov.b32 $, 0;")
        row = k.b32(f"shl.b32 $, {c.rank}, 1;")
        offset = k.b32(f"shl.b32 $, {c.rank}, 7;")
        target = k.b32(f"add.u32 $, {c.base}, {offset};")
        k("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
          f"[{target}], [{tensor_map}, {{{zero}, {row}}}], [{c.barrier}], {bits};")
    k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def multicast_bulk(mask: int) -> str:
    """CTA 0 copies 64 bytes of global memory to every CTA of `mask`."""
    c = ClusterKernel("u64")
    k = c.k
    source = k.pointer(1)
    bit = k.b32(f"shr.u32 $, {mask}, {c.rank};")
    bit = k.b32(f"and.b32 $, {bit}, 1;")
    chosen = k.pred(f"setp.ne.u32 $, {bit}, 0;")
    with k.where(chosen), k.thread(c.tid):
        c.expect(64)
    with k.thread(c.rank, 0), k.thread(c.tid):
        bits = k.b16(f"mov.b16 $, {mask};")
        k("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
          f"[{c.base}+32], [{source}], 64, [{c.barrier}], {bits};")
    with k.where(chosen):
        k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def one_way_copy() -> str:
    """Only CTA 1 copies, 64 bytes into CTA 0, whose barrier counts them."""
    c = ClusterKernel()
    k = c.k
    with k.thread(c.rank, 0), k.thread(c.tid):
        c.expect(64)
    with k.thread(c.rank, 1), k.thread(c.tid):
        target, barrier = c.peer(c.base), c.peer(c.barrier)
        k("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
          f"[{target}+64], [{c.base}+128], 64, [{barrier}];")
    with k.thread(c.rank, 0):
        k.wait(c.barrier, 0, ".acquire.cluster")
    return c.finish()


def probe(name: str, ptx: str, count: int, *extra: Buffer | TensorMap | Scalar) -> Probe:
    """A launch of one cluster of `count` CTAs along x, each dumping its image."""
    shape = (count, 1, 1)
    return Probe(f"cluster/{name}", ptx, (Buffer(bytes(IMAGE * count), output=True), *extra), grid=shape, cluster=shape,
                 shared_bytes=IMAGE + 16)


def probes() -> list[Probe]:
    """All of this module's probes."""
    out = []
    for grid, cluster in (((3, 1, 1), (1, 1, 1)), ((4, 2, 1), (2, 1, 1)), ((4, 4, 1), (2, 2, 1)),
                          ((2, 2, 4), (1, 2, 2)), ((4, 1, 1), (4, 1, 1))):
        count = grid[0] * grid[1] * grid[2]
        name = "x".join(map(str, grid)) + "_by_" + "x".join(map(str, cluster))
        out.append(Probe(f"cluster/registers_{name}", special_registers(), (Buffer(bytes(128 * count), output=True),),
                         grid=grid, cluster=cluster, shared_bytes=256))
    out.append(probe("distributed_memory", distributed_memory(), 2))
    out.append(probe("distributed_memory_4", distributed_memory(), 4))
    out.append(probe("remote_arrivals", remote_arrivals(), 2))
    out.append(probe("remote_copy", remote_copy(), 2))
    out.append(probe("one_way_copy", one_way_copy(), 2))
    for operation in ("add.u32", "add.s32", "add.u64", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "inc.u32",
                      "dec.u32"):
        out.append(probe(f"remote_reduce_{operation.replace('.', '_')}", remote_reduce(operation), 2))
    out.append(probe("store_async", store_async(), 2))
    source = Buffer(random_bytes(1280, 21))
    box = TensorMap(2, "u16", (40, 16), (80,), (32, 8), "64B")
    for rank, mask, count in ((0, 0b11, 2), (1, 0b01, 2), (0, 0b1011, 4), (2, 0b1111, 4), (3, 0b0110, 4)):
        out.append(probe(f"multicast_{rank}_to_{mask:0{count}b}", multicast_tensor(rank, mask), count, box, source))
    for count in (2, 4):
        slices = TensorMap(2, "u16", (40, 16), (80,), (32, 2), "64B")
        out.append(probe(f"multicast_slices_{count}", multicast_slices(count), count, slices, source))
    out.append(probe("multicast_bulk_1101", multicast_bulk(0b1101), 4, source))
    return out
