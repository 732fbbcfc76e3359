"""Timing kernels: PTX text for sm_90a, how to launch it, what it must compute.

    for kernel in all_kernels():
        arguments, outputs = host_arguments(kernel)          # numpy arrays, ints and encoded tensor maps
        vgpu.launch(kernel.ptx, kernel.entry, kernel.grid, kernel.block, arguments, cluster=kernel.cluster,
                    shared_bytes=kernel.shared_bytes)
        assert (outputs["out"] == kernel.expected().reshape(-1).view("u1")).all()

Every kernel stresses one part of the machine and writes a result that only a kernel which did the work can write. The
members of a family alternate between the roles "fit" (may set constants of a timing model) and "test" (may not).
Almost every kernel reads %clock64 twice in one warp and CTA 0 stores both readings: the in-kernel time.

Registers are named %<kind>_<name>: p predicate, h 16, r 32, d 64 bits, f float; `assemble` declares those it meets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

LINE = 128  # bytes that a warp reads at once, 4 a lane
DATA = 1024  # offset of the data in dynamic shared memory, after the barriers
MAX_SHARED = 232_448  # bytes of dynamic shared memory a CTA may have on sm_90
MAP_COLUMNS = 64  # boxes side by side in a tensor of the TMA kernels, each 128 bytes wide
ADD, XOR = 0x9E3779B1, 0x5BD1E995  # operands of the integer chains
F16_INTEGERS = np.arange(-3, 4).astype(np.float16).view(np.uint16)


@dataclass(frozen=True)
class Buffer:
    """A pointer parameter. role: 'input', 'output' or 'clock' (two u64 readings of %clock64, an output too).

    fill: 'words' (hashed u32), 'halves' (float16 integers in -3..3), 'chain' (pointer chase, see `chain`), 'zeros'.
    fresh: back-to-back launches each get a copy of their own, so that nothing they read is in the L2.
    """

    name: str
    nbytes: int
    role: str = "input"
    fill: str = "zeros"
    fresh: bool = False


@dataclass(frozen=True)
class Scalar:
    """A u32 parameter."""

    name: str
    value: int


@dataclass(frozen=True)
class TensorMap:
    """A .b8[128] parameter: a 2-D tensor of 16-bit words in `buffer`, with a box 128 bytes wide or unswizzled.

    sizes and box: elements, innermost first. pitch: bytes from row to row. swizzle: bytes.
    """

    name: str
    buffer: Buffer
    sizes: tuple[int, int]
    pitch: int
    box: tuple[int, int]
    swizzle: int


@dataclass(frozen=True)
class TimingKernel:
    """One kernel to be timed.

    role: 'fit' or 'test'. args: one a parameter, in order. launches: how many are queued back to back. pdl: launched
    with programmatic stream serialization. cold: its inputs are not in the L2 when it starts. time_of: the figure that
    is the time of this kernel, 'single' (two events around one launch), 'back_to_back' (two events around all
    launches, divided by their number) or 'in_kernel' (between the two readings of %clock64 by warp `clock_warp` of
    CTA 0). expected: computes the contents of the buffer `out`.
    """

    name: str
    family: str
    role: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Buffer | Scalar | TensorMap, ...]
    expected: Callable[[], np.ndarray] | None
    time_of: str
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    launches: int = 50
    pdl: bool = False
    cold: bool = False
    clock_warp: int | None = None
    entry: str = "timing"

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers among the arguments, tensor maps' included, each once."""
        found = {}
        for arg in self.args:
            buffer = arg.buffer if isinstance(arg, TensorMap) else arg
            if isinstance(buffer, Buffer):
                found[buffer.name] = buffer
        return tuple(found.values())

    def fingerprint(self) -> str:
        """A hash of everything that the measured time depends on."""
        said = repr((self.ptx, self.grid, self.block, self.args, self.cluster, self.shared_bytes, self.launches,
                     self.pdl, self.cold))
        return hashlib.sha256(said.encode()).hexdigest()[:16]


# --- contents of buffers ------------------------------------------------------------------------------------


def hashed(count: int) -> np.ndarray:
    """`count` u32 words without a pattern that memory or power management could profit from."""
    i = np.arange(count, dtype=np.uint32)
    return (i * np.uint32(ADD)) ^ (i >> np.uint32(11)) * np.uint32(XOR)


def chain(nbytes: int, hops: int) -> np.ndarray:
    """u32 words; following word[0], word[word[0] / 4], … visits `hops` different 128-byte lines and comes back."""
    words = np.zeros(nbytes // 4, np.uint32)
    lines = np.random.default_rng(hops).permutation(nbytes // LINE - 1)[:hops - 1] + 1
    path = np.concatenate(([0], lines * LINE)).astype(np.uint32)
    words[path // 4] = np.roll(path, -1)
    return words


def contents(buffer: Buffer) -> np.ndarray:
    """The initial contents of a buffer, u8[nbytes]."""
    kind, _, hops = buffer.fill.partition(":")
    if kind == "words":
        return hashed(buffer.nbytes // 4).view(np.uint8)
    if kind == "halves":
        return F16_INTEGERS[hashed(buffer.nbytes // 2) % np.uint32(7)].view(np.uint8)
    if kind == "chain":
        return chain(buffer.nbytes, int(hops)).view(np.uint8)
    return np.zeros(buffer.nbytes, np.uint8)


def host_arguments(kernel: TimingKernel) -> tuple[list, dict[str, np.ndarray]]:
    """Arguments for `vgpu.launch` and, by name, the u8 arrays behind the buffers; outputs start poisoned with 0xFF.

    An array that only a tensor map points to must be made known with `vgpu.register(array.ctypes.data, array.nbytes)`.
    """
    from .. import tensormap

    arrays = {b.name: contents(b) if b.role == "input" else np.full(b.nbytes, 255, np.uint8) for b in kernel.buffers}
    arguments: list = []
    for arg in kernel.args:
        if isinstance(arg, Buffer):
            arguments.append(arrays[arg.name])
        elif isinstance(arg, Scalar):
            arguments.append(arg.value)
        else:
            address = arrays[arg.buffer.name].ctypes.data
            arguments.append(tensormap.encode("u16", address, arg.sizes, (arg.pitch,), arg.box, swizzle=arg.swizzle))
    return arguments, arrays


# --- PTX text -----------------------------------------------------------------------------------------------

_TYPES = {"p": ".pred", "h": ".b16", "r": ".b32", "d": ".b64", "f": ".f32"}
_SPECIAL = {"tid": "%tid.x", "cta": "%ctaid.x", "ctas": "%nctaid.x", "rank": "%cluster_ctarank", "lane": "%laneid",
            "cluster": "%clusterid.x", "clusters": "%nclusterid.x"}


def assemble(args: Sequence[Buffer | Scalar | TensorMap], body: str) -> str:
    """The module text of the entry `timing`. Parameters, special registers and `%r_smem` are loaded where used."""
    load = [line for i, arg in enumerate(args) for line in _load(arg, f"timing_param_{i}", body)]
    load += [f"mov.u32 %r_{name}, {special};" for name, special in _SPECIAL.items()
             if re.search(rf"%r_{name}\b", body)]
    if "%r_smem" in body:
        load.append("mov.b32 %r_smem, smem;")
    text = "\n".join(load) + "\n" + body
    declared = sorted(set(re.findall(r"%([prdfh])_(\w+)", text)))
    registers = "\n".join(f".reg {_TYPES[kind]} %{kind}_{name};" for kind, name in declared)
    parameters = ",\n".join(_parameter(arg, f"timing_param_{i}") for i, arg in enumerate(args))
    lines = (line.strip() for line in f"{registers}\n{text}\nret;".splitlines())
    return (".version 8.6\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n"
            f".visible .entry timing(\n{parameters}\n)\n{{\n" + "\n".join(line for line in lines if line) + "\n}\n")


def _parameter(arg: Buffer | Scalar | TensorMap, name: str) -> str:
    kind = {Buffer: ".param .u64", Scalar: ".param .u32", TensorMap: ".param .align 64 .b8"}[type(arg)]
    return f"{kind} {name}" + ("[128]" if isinstance(arg, TensorMap) else "")


def _load(arg: Buffer | Scalar | TensorMap, name: str, body: str) -> list[str]:
    """The parameter to its register %d_<name> or %r_<name>, if the body uses that."""
    kind = "r" if isinstance(arg, Scalar) else "d"
    register = f"%{kind}_{arg.name}"
    if not re.search(rf"{register}\b", body):
        return []
    if isinstance(arg, Scalar):
        return [f"ld.param.b32 {register}, [{name}];"]
    if isinstance(arg, TensorMap):
        return [f"mov.b64 {register}, {name};", f"cvta.param.u64 {register}, {register};"]
    return [f"ld.param.b64 {register}, [{name}];", f"cvta.to.global.u64 {register}, {register};"]


START = "mov.u64 %d_start, %clock64;"
REMOTE_ARRIVE = "mbarrier.arrive.release.cta.shared::cluster.b64 _,"  # the scope that CuTeDSL uses; .cluster costs a
# MEMBAR.ALL.GPU before every arrival


def stop(thread: str = "%r_tid") -> str:
    """Second reading of the clock; the thread of CTA 0 where `thread` is 0 stores both."""
    return f"""
        mov.u64 %d_stop, %clock64;
        or.b32 %r_who, %r_cta, {thread};
        setp.eq.s32 %p_who, %r_who, 0;
        @%p_who st.global.v2.b64 [%d_clock], {{%d_start, %d_stop}};"""


def wait(barrier: str, parity: str, label: str) -> str:
    """Wait until the mbarrier's phase of this parity has completed."""
    return f"""
        {label}:
        mbarrier.try_wait.parity.shared::cta.b64 %p_done, [{barrier}], {parity};
        @!%p_done bra {label};"""


def loop(label: str, counter: str, limit: str | int, body: str) -> str:
    """`body` for counter = 0 … limit - 1, at least once; not unrolled, so that the machine executes what PTX says."""
    return f"""
        mov.b32 %r_{counter}, 0;
        {label}:
        .pragma "nounroll";
        {body}
        add.s32 %r_{counter}, %r_{counter}, 1;
        setp.lt.s32 %p_{counter}, %r_{counter}, {limit};
        @%p_{counter} bra {label};"""


def init_barriers(counts: Sequence[int], cluster: bool = False) -> str:
    """Thread 0 initialises one mbarrier of 8 bytes for each arrival count, from the start of shared memory."""
    inits = "\n".join(f"mbarrier.init.shared::cta.b64 [%r_smem+{8 * i}], {n};" for i, n in enumerate(counts))
    return f"""
        setp.ne.s32 %p_other, %r_tid, 0;
        @%p_other bra INITIALISED;
        {inits}
        fence.mbarrier_init.release.cluster;
        INITIALISED:
        {cluster_sync() if cluster else "bar.sync 0;"}"""


def cluster_sync(order: str = "") -> str:
    """All threads of the cluster meet. order: '' releases earlier writes, '.relaxed' does not."""
    return f"barrier.cluster.arrive{order}.aligned;\nbarrier.cluster.wait.aligned;"


def clock_buffer() -> Buffer:
    """Where the two clock readings go."""
    return Buffer("clock", 16, "clock")


def output(nbytes: int) -> Buffer:
    """The buffer `out`."""
    return Buffer("out", nbytes, "output")


# --- family launch ------------------------------------------------------------------------------------------


def empty(name: str, role: str, grid: int, block: int = 128, shared_bytes: int = 0, cluster: int = 1) -> TimingKernel:
    """A grid whose thread 0 of every CTA stores its CTA number, nothing else. Time: launch to launch."""
    out = output(4 * grid)
    body = """
        setp.ne.s32 %p_other, %r_tid, 0;
        @%p_other bra END;
        mad.wide.u32 %d_at, %r_cta, 4, %d_out;
        st.global.b32 [%d_at], %r_cta;
        END:"""
    return TimingKernel(f"launch/{name}", "launch", role, assemble((out,), body), (grid, 1, 1), (block, 1, 1), (out,),
                        lambda: np.arange(grid, dtype=np.uint32), "back_to_back", (cluster, 1, 1), shared_bytes)


def integer_chain(seed: np.ndarray, pairs: int) -> np.ndarray:
    """u32 after `pairs` times x = (x + ADD) ^ XOR."""
    x = seed.astype(np.uint32)
    for _ in range(pairs):
        x = (x + np.uint32(ADD)) ^ np.uint32(XOR)
    return x


def chain_pairs(label: str, pairs: int, unroll: int = 16) -> str:
    """PTX of `integer_chain` on %r_x."""
    return loop(label, "i", pairs // unroll,
                "add.s32 %r_x, %r_x, %r_add;\nxor.b32 %r_x, %r_x, %r_xor;\n" * unroll)


def launch_chain(name: str, role: str, pairs: int, dependent: str = "") -> TimingKernel:
    """A short computation of 132 CTAs of 128 threads, launched 50 times.

    dependent: '' plain; 'first' and 'late' with programmatic dependent launch, dependents launched at the start and
    griddepcontrol.wait before the computation or only before the store.
    """
    out, add, xor = output(4 * 132 * 128), Scalar("add", ADD), Scalar("xor", XOR)
    body = f"""
        {"griddepcontrol.launch_dependents;" if dependent else ""}
        {"griddepcontrol.wait;" if dependent == "first" else ""}
        mad.lo.s32 %r_x, %r_cta, 128, %r_tid;
        mad.wide.u32 %d_at, %r_x, 4, %d_out;
        {chain_pairs("WORK", pairs)}
        {"griddepcontrol.wait;" if dependent == "late" else ""}
        st.global.b32 [%d_at], %r_x;"""
    args = (out, add, xor)
    return TimingKernel(f"launch/{name}", "launch", role, assemble(args, body), (132, 1, 1), (128, 1, 1), args,
                        lambda: integer_chain(np.arange(132 * 128), pairs), "back_to_back", pdl=bool(dependent))


def launch_family() -> list[TimingKernel]:
    """Launch gaps, waves, clusters, programmatic dependent launch."""
    return [
        empty("empty", "fit", 132),
        empty("shared_227k", "test", 132, shared_bytes=MAX_SHARED),
        empty("waves_10", "fit", 1320, shared_bytes=MAX_SHARED),
        empty("waves_4", "test", 528, shared_bytes=MAX_SHARED),
        empty("threads_1024", "test", 264, block=1024),
        empty("cluster_2", "fit", 132, cluster=2),
        empty("cluster_4", "test", 132, cluster=4),
        empty("cluster_8", "fit", 128, cluster=8),
        launch_chain("chain_short", "fit", 160),
        launch_chain("chain_short_pdl", "fit", 160, "first"),
        launch_chain("chain_long", "test", 480),
        launch_chain("chain_long_pdl", "test", 480, "first"),
        launch_chain("chain_long_pdl_late", "test", 480, "late"),
    ]


# --- streaming through a ring of stages ---------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """A stream through shared memory: one producer thread, one consumer warp, `stages` of `nbytes`.

    grid: CTAs. count: stages filled by each CTA. resident: the whole grid cycles through that many bytes again and
    again, which are in the L2; 0: distinct bytes. cluster: CTAs that share each stage by multicast, each copying its
    part to all. box_rows: tensor copies of this many rows of 128 bytes instead of bulk copies. dependent: see
    `launch_chain`.
    """

    stages: int
    nbytes: int
    grid: int
    count: int
    resident: int = 0
    cluster: int = 1
    box_rows: int = 0
    dependent: str = ""

    @property
    def streams(self) -> int:
        """CTAs or clusters that each read data of their own."""
        return self.grid // self.cluster

    @property
    def footprint(self) -> int:
        """Bytes of the source buffer."""
        return self.resident or self.streams * self.count * self.nbytes

    @property
    def index_mask(self) -> int:
        """Applied to the index of a stage's data in the source."""
        return self.resident // self.nbytes - 1 if self.resident else 0xFFFFFFFF

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return DATA + self.stages * self.nbytes


def advance(stages: int) -> str:
    """The next stage of a ring; the parity flips when it wraps."""
    return f"""
        add.s32 %r_stage, %r_stage, 1;
        setp.eq.s32 %p_wrap, %r_stage, {stages};
        selp.b32 %r_stage, 0, %r_stage, %p_wrap;
        selp.b32 %r_flip, 1, 0, %p_wrap;
        xor.b32 %r_parity, %r_parity, %r_flip;"""


def stage_addresses(stages: int, nbytes: int) -> str:
    """%r_full, %r_empty, %r_data of %r_stage."""
    return f"""
        mad.lo.s32 %r_full, %r_stage, 8, %r_smem;
        add.s32 %r_empty, %r_full, {8 * stages};
        mad.lo.s32 %r_data, %r_stage, {nbytes}, %r_base;"""


def bulk_copies(ring: Ring) -> str:
    """The stage's data by one bulk copy, or this CTA's part of it to every CTA of the cluster."""
    part = ring.nbytes // ring.cluster
    text = f"mad.wide.u32 %d_from, %r_index, {ring.nbytes}, %d_src;\n"
    if ring.cluster == 1:
        return text + f"""
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r_data], [%d_from], {part}, [%r_full];"""
    return text + f"""
        mad.wide.u32 %d_from, %r_rank, {part}, %d_from;
        mad.lo.s32 %r_data, %r_rank, {part}, %r_data;
        mov.b16 %h_all, {(1 << ring.cluster) - 1};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r_data], [%d_from], {part}, [%r_full], %h_all;""".replace("\n            ", " ")


def tensor_copies(ring: Ring) -> str:
    """The stage's data by tensor copies of box_rows x 128 bytes; boxes are numbered along rows of MAP_COLUMNS."""
    box = ring.box_rows * LINE
    copies = ring.nbytes // box
    text = [f"mul.lo.s32 %r_box, %r_index, {copies};"]
    for j in range(copies):
        text.append(f"""
        and.b32 %r_x, %r_box, {MAP_COLUMNS - 1};
        shl.b32 %r_x, %r_x, 6;
        shr.u32 %r_y, %r_box, {MAP_COLUMNS.bit_length() - 1};
        mul.lo.s32 %r_y, %r_y, {ring.box_rows};
        add.s32 %r_to, %r_data, {j * box};
        cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"""
                    """ [%r_to], [%d_map, {%r_x, %r_y}], [%r_full];
        add.s32 %r_box, %r_box, 1;""")
    return "\n".join(text)


def producer(ring: Ring) -> str:
    """Warp 0, one lane: fill the stages in turn, each when the consumer has released it."""
    body = f"""
        {stage_addresses(ring.stages, ring.nbytes)}
        xor.b32 %r_last, %r_parity, 1;
        {wait("%r_empty", "%r_last", "RELEASED")}
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_full], {ring.nbytes};
        and.b32 %r_index, %r_next, %r_mask;
        {tensor_copies(ring) if ring.box_rows else bulk_copies(ring)}
        add.s32 %r_next, %r_next, %r_step;
        {advance(ring.stages)}"""
    return f"""
        setp.ne.s32 %p_other, %r_lane, 0;
        @%p_other bra END;
        mov.b32 %r_stage, 0;
        mov.b32 %r_parity, 0;
        mov.b32 %r_next, {"%r_cluster" if ring.cluster > 1 else "%r_cta"};
        mov.b32 %r_step, {"%r_clusters" if ring.cluster > 1 else "%r_ctas"};
        {loop("FILL", "i", "%r_count", body)}"""


def release(ring: Ring) -> str:
    """The consumer warp frees a stage, in every CTA that copies into it."""
    if ring.cluster == 1:
        return """
        setp.eq.s32 %p_one, %r_lane, 0;
        @%p_one mbarrier.arrive.shared::cta.b64 _, [%r_empty];"""
    return f"""
        setp.lt.u32 %p_one, %r_lane, {ring.cluster};
        @%p_one mapa.shared::cluster.u32 %r_remote, %r_empty, %r_lane;
        @%p_one {REMOTE_ARRIVE} [%r_remote];"""


def consumer(ring: Ring) -> str:
    """Warp 1: read one line of every stage, a different one each time, and store the sum of its words."""
    body = f"""
        {stage_addresses(ring.stages, ring.nbytes)}
        {wait("%r_full", "%r_parity", "FULL")}
        and.b32 %r_line, %r_i, {ring.nbytes // LINE - 1};
        mad.lo.s32 %r_line, %r_line, {LINE}, %r_data;
        mad.lo.s32 %r_line, %r_lane, 4, %r_line;
        ld.shared.b32 %r_word, [%r_line];
        add.s32 %r_sum, %r_sum, %r_word;
        bar.warp.sync -1;
        {release(ring)}
        {advance(ring.stages)}"""
    return f"""
        mov.b32 %r_stage, 0;
        mov.b32 %r_parity, 0;
        mov.b32 %r_sum, 0;
        {loop("DRAIN", "i", "%r_count", body)}
        redux.sync.add.s32 %r_sum, %r_sum, -1;
        {stop("%r_lane")}
        {"griddepcontrol.wait;" if ring.dependent == "late" else ""}
        mad.wide.u32 %d_at, %r_cta, 4, %d_out;
        setp.eq.s32 %p_one, %r_lane, 0;
        @%p_one st.global.b32 [%d_at], %r_sum;"""


def ring_body(ring: Ring) -> str:
    """The whole kernel."""
    barriers = [1] * ring.stages + [ring.cluster] * ring.stages
    return f"""
        {"griddepcontrol.launch_dependents;" if ring.dependent else ""}
        add.s32 %r_base, %r_smem, {DATA};
        {init_barriers(barriers, ring.cluster > 1)}
        {"griddepcontrol.wait;" if ring.dependent == "first" else ""}
        {START}
        setp.ge.u32 %p_consumer, %r_tid, 32;
        @%p_consumer bra CONSUMER;
        {producer(ring)}
        bra END;
        CONSUMER:
        {consumer(ring)}
        END:
        {cluster_sync() if ring.cluster > 1 else ""}"""


def ring_expected(ring: Ring) -> np.ndarray:
    """u32[grid]: the sums that the consumers store."""
    sums = hashed(ring.footprint // 4).reshape(-1, LINE // 4).sum(1, dtype=np.uint32)
    i = np.arange(ring.count, dtype=np.int64)
    lines = ring.nbytes // LINE
    index = (np.arange(ring.streams)[:, None] + i * ring.streams) & ring.index_mask
    line = i & lines - 1
    if ring.box_rows:
        box = index * (lines // ring.box_rows) + line // ring.box_rows
        row = box // MAP_COLUMNS * ring.box_rows + line % ring.box_rows
        which = row * MAP_COLUMNS + box % MAP_COLUMNS
    else:
        which = index * lines + line
    return np.repeat(sums[which].sum(1, dtype=np.uint32), ring.cluster)


def stream(family: str, name: str, role: str, ring: Ring, time_of: str = "back_to_back") -> TimingKernel:
    """A streaming kernel; its inputs are cold unless they are resident in the L2."""
    cold = not ring.resident
    src = Buffer("src", ring.footprint, fill="words", fresh=cold)
    out, scalars = output(4 * ring.grid), (Scalar("count", ring.count), Scalar("mask", ring.index_mask))
    source: Buffer | TensorMap = src
    if ring.box_rows:
        rows = ring.footprint // (MAP_COLUMNS * LINE)
        source = TensorMap("map", src, (MAP_COLUMNS * LINE // 2, rows), MAP_COLUMNS * LINE,
                           (LINE // 2, ring.box_rows), 128)
    args = (source, out, clock_buffer(), *scalars)
    return TimingKernel(f"{family}/{name}", family, role, assemble(args, ring_body(ring)), (ring.grid, 1, 1),
                        (64, 1, 1), args, partial(ring_expected, ring), time_of, (ring.cluster, 1, 1),
                        ring.shared_bytes, pdl=bool(ring.dependent), cold=cold, clock_warp=1)


K, M = 1 << 10, 1 << 20


def dram_family() -> list[TimingKernel]:
    """Bulk copies of distinct data from DRAM: stages, bytes a copy, CTAs; bytes of a launch in MB (10^6)."""
    make = partial(stream, "dram")
    return [
        make("ctas_16_stages_8_8k", "fit", Ring(8, 8 * K, 16, 64)),  # 8.4
        make("ctas_16_stages_4_32k", "test", Ring(4, 32 * K, 16, 16)),  # 8.4
        make("ctas_56_stages_4_16k", "fit", Ring(4, 16 * K, 56, 32)),  # 29.4
        make("ctas_56_stages_8_8k", "test", Ring(8, 8 * K, 56, 48)),  # 22.0
        make("ctas_132_stages_2_8k", "fit", Ring(2, 8 * K, 132, 24)),  # 26.0
        make("ctas_132_stages_4_8k", "test", Ring(4, 8 * K, 132, 32)),  # 34.6
        make("ctas_132_stages_8_16k", "fit", Ring(8, 16 * K, 132, 32)),  # 69.2
        make("ctas_132_stages_16_4k", "test", Ring(16, 4 * K, 132, 48)),  # 26.0
        make("ctas_132_stages_16_2k", "fit", Ring(16, 2 * K, 132, 64)),  # 17.3
        make("ctas_132_stages_4_32k", "test", Ring(4, 32 * K, 132, 12)),  # 51.9
        make("ctas_132_short", "fit", Ring(8, 8 * K, 132, 4)),  # 4.3
        make("ctas_132_shorter", "test", Ring(16, 4 * K, 132, 4)),  # 2.2
        make("ctas_264_stages_2_32k", "fit", Ring(2, 32 * K, 264, 6)),  # 51.9
        make("ctas_264_stages_4_8k", "test", Ring(4, 8 * K, 264, 16)),  # 34.6
        make("cta_1_stages_1_4k", "fit", Ring(1, 4 * K, 1, 64), "in_kernel"),
        make("cta_1_stages_2_2k", "test", Ring(2, 2 * K, 1, 96), "in_kernel"),
        make("pdl_first", "fit", Ring(8, 8 * K, 132, 9, dependent="first")),  # 9.7
        make("pdl_none", "test", Ring(8, 8 * K, 132, 9)),  # 9.7
        make("pdl_late", "test", Ring(8, 8 * K, 132, 9, dependent="late")),  # 9.7
    ]


def l2_family() -> list[TimingKernel]:
    """Bulk copies of data that stays in the L2. With one stage the time is a chain of latencies."""
    make = partial(stream, "l2")
    return [
        make("cta_1_stages_8_8k", "fit", Ring(8, 8 * K, 1, 64, 4 * M), "in_kernel"),
        make("cta_1_stages_1_1k", "fit", Ring(1, 1 * K, 1, 64, 4 * M), "in_kernel"),
        make("cta_1_stages_1_16k", "test", Ring(1, 16 * K, 1, 64, 4 * M), "in_kernel"),
        make("ctas_16_stages_4_16k", "test", Ring(4, 16 * K, 16, 64, 8 * M)),
        make("ctas_56_stages_8_8k", "test", Ring(8, 8 * K, 56, 64, 8 * M)),
        make("ctas_132_stages_8_8k", "fit", Ring(8, 8 * K, 132, 48, 8 * M)),
        make("ctas_132_stages_2_8k", "test", Ring(2, 8 * K, 132, 48, 8 * M)),
        make("ctas_132_stages_16_2k", "test", Ring(16, 2 * K, 132, 96, 8 * M)),
        make("ctas_132_stages_4_32k", "fit", Ring(4, 32 * K, 132, 16, 8 * M)),
        make("ctas_264_stages_4_8k", "test", Ring(4, 8 * K, 264, 24, 8 * M)),
    ]


def tma_family() -> list[TimingKernel]:
    """2-D tensor copies with the 128-byte swizzle: small ones, several on one barrier, L2 and DRAM."""
    make = partial(stream, "tma")
    return [
        make("cta_1_stages_1_1k", "fit", Ring(1, 1 * K, 1, 64, 4 * M, box_rows=8), "in_kernel"),
        make("cta_1_stages_1_8k", "test", Ring(1, 8 * K, 1, 64, 4 * M, box_rows=64), "in_kernel"),
        make("l2_512", "fit", Ring(16, 512, 132, 128, 8 * M, box_rows=4)),
        make("l2_1k", "test", Ring(16, 1 * K, 132, 128, 8 * M, box_rows=8)),
        make("l2_2k", "fit", Ring(16, 2 * K, 132, 96, 8 * M, box_rows=16)),
        make("l2_16k", "test", Ring(8, 16 * K, 132, 32, 8 * M, box_rows=128)),
        make("l2_4_of_1k", "fit", Ring(8, 4 * K, 132, 32, 8 * M, box_rows=8)),
        make("l2_2_of_4k", "test", Ring(8, 8 * K, 132, 32, 8 * M, box_rows=32)),
        make("dram_2_of_8k", "fit", Ring(8, 16 * K, 132, 16, box_rows=64)),  # 34.6
        make("dram_4_of_2k", "test", Ring(8, 8 * K, 132, 32, box_rows=16)),  # 34.6
    ]


def multicast_family() -> list[TimingKernel]:
    """Every CTA of a cluster copies its part of each stage into all of them; bytes delivered: grid * count * nbytes.

    An H200 holds 30 clusters of 4 such CTAs at once (`max_active_clusters`), so 128 CTAs take two waves.
    """
    make = partial(stream, "multicast")
    return [
        make("to_2_l2_8_16k", "fit", Ring(8, 16 * K, 132, 32, 8 * M, cluster=2)),
        make("to_2_l2_4_8k", "test", Ring(4, 8 * K, 132, 48, 8 * M, cluster=2)),
        make("to_4_l2_8_16k", "fit", Ring(8, 16 * K, 120, 32, 8 * M, cluster=4)),
        make("to_4_l2_4_32k", "test", Ring(4, 32 * K, 120, 16, 8 * M, cluster=4)),
        make("to_4_l2_two_waves", "test", Ring(8, 16 * K, 128, 32, 8 * M, cluster=4)),
        make("to_2_dram_8_16k", "test", Ring(8, 16 * K, 132, 32, cluster=2)),  # 34.6 read
        make("to_4_dram_8_16k", "fit", Ring(8, 16 * K, 120, 48, cluster=4)),  # 23.6 read
    ]


# --- reduction in distributed shared memory -----------------------------------------------------------------

REDUCE_THREADS, REDUCE_ROUNDS = 128, 4


def send_bulk(nbytes: int) -> str:
    """Thread 0 copies its CTA's partial sums into CTA 0's slot."""
    return f"""
        setp.ne.s32 %p_other, %r_tid, 0;
        @%p_other bra SENT;
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r_slot], [%r_base], {nbytes}, [%r_bar];
        SENT:"""


def send_stores(nbytes: int) -> str:
    """Every thread sends its partial sums, 16 bytes at a time."""
    text = []
    for offset in range(0, nbytes, 16 * REDUCE_THREADS):
        text.append(f"""
        ld.shared.v4.b32 {{%r_a, %r_b, %r_c, %r_d}}, [%r_own+{offset}];
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r_to+{offset}], """
                    "{%r_a, %r_b, %r_c, %r_d}, [%r_bar];")
    return "mad.lo.s32 %r_to, %r_tid, 16, %r_slot;\n" + "\n".join(text)


def add_slots(size: int, nbytes: int) -> str:
    """CTA 0: own partial sums plus those in the slots, stored to `out`."""
    text = []
    for offset in range(0, nbytes, 16 * REDUCE_THREADS):
        text.append(f"ld.shared.v4.f32 {{%f_s0, %f_s1, %f_s2, %f_s3}}, [%r_own+{offset}];")
        for slot in range(1, size):
            text.append(f"ld.shared.v4.f32 {{%f_v0, %f_v1, %f_v2, %f_v3}}, [%r_own+{offset + slot * nbytes}];")
            text += [f"add.rn.f32 %f_s{k}, %f_s{k}, %f_v{k};" for k in range(4)]
        text.append(f"st.global.v4.f32 [%d_at+{offset}], {{%f_s0, %f_s1, %f_s2, %f_s3}};")
    return "\n".join(text)


def reduce_body(size: int, nbytes: int, stores: bool) -> str:
    """Rounds of: all send to CTA 0, which adds; the cluster meets."""
    fill = "\n".join(f"st.shared.f32 [%r_own+{16 * REDUCE_THREADS * i + 4 * k}], %f_x;"
                     for i in range(nbytes // (16 * REDUCE_THREADS)) for k in range(4))
    round_ = f"""
        setp.eq.s32 %p_leader, %r_rank, 0;
        @%p_leader bra COLLECT;
        {send_stores(nbytes) if stores else send_bulk(nbytes)}
        bra MEET;
        COLLECT:
        setp.ne.s32 %p_other, %r_tid, 0;
        @%p_other bra EXPECTED;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_smem], {(size - 1) * nbytes};
        EXPECTED:
        and.b32 %r_parity, %r_i, 1;
        {wait("%r_smem", "%r_parity", "ARRIVED")}
        {add_slots(size, nbytes)}
        MEET:
        {cluster_sync()}"""
    return f"""
        add.s32 %r_base, %r_smem, {DATA};
        mad.lo.s32 %r_own, %r_tid, 16, %r_base;
        mad.lo.s32 %r_slot, %r_rank, {nbytes}, %r_base;
        mapa.shared::cluster.u32 %r_slot, %r_slot, 0;
        mapa.shared::cluster.u32 %r_bar, %r_smem, 0;
        mad.wide.u32 %d_at, %r_cluster, {nbytes}, %d_out;
        mad.wide.u32 %d_at, %r_tid, 16, %d_at;
        mad.lo.s32 %r_x, %r_cta, 7, %r_tid;
        cvt.rn.f32.s32 %f_x, %r_x;
        {fill}
        fence.proxy.async.shared::cta;
        {init_barriers([1], cluster=True)}
        {START}
        {loop("ROUND", "i", "%r_count", round_)}
        {stop()}"""


def reduce_expected(size: int, clusters: int, nbytes: int) -> np.ndarray:
    """f32[clusters, nbytes / 4]."""
    cta = np.arange(clusters * size).reshape(clusters, size).sum(1)
    value = 7 * cta[:, None] + size * np.arange(REDUCE_THREADS)
    row = np.repeat(value, 4, axis=1)
    return np.tile(row, (1, nbytes // (16 * REDUCE_THREADS))).astype(np.float32)


def reduction(name: str, role: str, size: int, nbytes: int, clusters: int, stores: bool = False) -> TimingKernel:
    """A cluster of `size` CTAs sums `nbytes` of floats from each in CTA 0, by bulk copies or by st.async."""
    args = (output(clusters * nbytes), clock_buffer(), Scalar("count", REDUCE_ROUNDS))
    return TimingKernel(f"dsmem/{name}", "dsmem", role, assemble(args, reduce_body(size, nbytes, stores)),
                        (size * clusters, 1, 1), (REDUCE_THREADS, 1, 1), args,
                        partial(reduce_expected, size, clusters, nbytes), "in_kernel", (size, 1, 1),
                        DATA + size * nbytes, clock_warp=0)


def dsmem_family() -> list[TimingKernel]:
    """Four rounds of a sum over the cluster."""
    return [
        reduction("bulk_2_16k", "fit", 2, 16 * K, 16),
        reduction("bulk_4_16k", "test", 4, 16 * K, 16),
        reduction("bulk_8_8k", "fit", 8, 8 * K, 8),
        reduction("bulk_8_16k", "test", 8, 16 * K, 8),
        reduction("stores_2_8k", "test", 2, 8 * K, 4, stores=True),
        reduction("stores_4_8k", "fit", 4, 8 * K, 4, stores=True),
        reduction("stores_8_4k", "test", 8, 4 * K, 4, stores=True),
    ]


# --- warpgroup MMA ------------------------------------------------------------------------------------------

K_TILE = 64  # float16 values in the 128 bytes of a swizzled row
STEPS = K_TILE // 16
DESCRIPTOR = 1 << 62 | 1024 // 16 << 32 | 1 << 16  # 128-byte swizzle, 1024 bytes from 8 rows to the next 8


def descriptor(register: str, address: str) -> str:
    """Matrix descriptor of a K-major tile with the 128-byte swizzle (PTX ISA 9.7.15.5.1)."""
    return f"""
        shr.u32 %r_encoded, {address}, 4;
        and.b32 %r_encoded, %r_encoded, 16383;
        cvt.u64.u32 {register}, %r_encoded;
        or.b64 {register}, {register}, {DESCRIPTOR};"""


def accumulators(n: int, which: int = 0) -> list[str]:
    """Names of the n / 2 accumulator registers of a thread."""
    return [f"%f_acc{which}x{i}" for i in range(n // 2)]


def wgmma(n: int, step: int, which: int = 0) -> str:
    """One m64n<n>k16, with the operands of a k-step."""
    registers = ", ".join(accumulators(n, which))
    return f"""
        add.s64 %d_stepa, %d_desca, {2 * step};
        add.s64 %d_stepb, %d_descb, {2 * step};
        wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{registers}}}, %d_stepa, %d_stepb, %p_on, 1, 1, 0, 0;"""


def clear(n: int, count: int = 1) -> str:
    """Zero the accumulators; %p_on makes every MMA add to them."""
    zero = "\n".join(f"mov.f32 {r}, 0f00000000;" for a in range(count) for r in accumulators(n, a))
    return f"{zero}\nsetp.eq.s32 %p_on, 0, 0;"


def store_sum(n: int, count: int, threads: int) -> str:
    """Every thread stores the sum of its accumulators, `threads` of them a CTA."""
    names = [r for a in range(count) for r in accumulators(n, a)]
    adds = "\n".join(f"add.rn.f32 {names[0]}, {names[0]}, {r};" for r in names[1:])
    return f"""
        {adds}
        mad.lo.s32 %r_x, %r_cta, {threads}, %r_tid;
        mad.wide.u32 %d_at, %r_x, 4, %d_out;
        st.global.f32 [%d_at], {names[0]};"""


def fragment_sums(d: np.ndarray) -> np.ndarray:
    """f32[128 * groups]: what the threads of the warpgroups hold of d[64 * groups, n], summed (PTX ISA 9.7.15.5.1.1).

    Lane l of warp w holds rows 16 w + l / 4 and that + 8, columns 8 j + 2 (l mod 4) and the next.
    """
    by_lane = d.reshape(-1, 4, 2, 8, d.shape[1] // 8, 4, 2).sum(axis=(2, 4, 6))  # group, warp, row, column pair
    return by_lane.reshape(-1).astype(np.float32)


def tile_value(row: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The integer at a place of the operand tiles."""
    return (3 * row + 5 * k) % 7 - 3


def fill_tiles(rows: int, threads: int) -> str:
    """All threads write `rows` swizzled rows of `tile_value`: 16-byte chunk c of row r lies at chunk c ^ (r mod 8)."""
    half = """
        mad.lo.s32 %r_t, %r_k, 5, %r_r3;
        rem.u32 %r_t, %r_t, 7;
        sub.s32 %r_t, %r_t, 3;
        cvt.rn.f16.s32 %h_{}, %r_t;
        add.s32 %r_k, %r_k, 1;"""
    body = f"""
        mad.lo.s32 %r_w, %r_i, {threads}, %r_tid;
        shr.u32 %r_row, %r_w, 5;
        mul.lo.s32 %r_r3, %r_row, 3;
        shr.u32 %r_k, %r_w, 2;
        xor.b32 %r_k, %r_k, %r_row;
        and.b32 %r_k, %r_k, 7;
        shl.b32 %r_k, %r_k, 3;
        and.b32 %r_t, %r_w, 3;
        mad.lo.s32 %r_k, %r_t, 2, %r_k;
        {half.format("lo")}
        {half.format("hi")}
        mov.b32 %r_t, {{%h_lo, %h_hi}};
        mad.lo.s32 %r_w, %r_w, 4, %r_base;
        st.shared.b32 [%r_w], %r_t;"""
    return f"""
        {loop("FILL", "i", rows * LINE // 4 // threads, body)}
        fence.proxy.async.shared::cta;
        bar.sync 0;"""


@dataclass(frozen=True)
class MmaLoop:
    """m64n<n>k16 from shared memory. batch: MMAs a commit group; pending: groups left unfinished when the next is
    issued; sets: accumulators used in turn; groups: warpgroups, each with 64 rows of its own and the same columns."""

    n: int
    groups: int = 1
    batch: int = STEPS
    pending: int = 0
    sets: int = 1
    count: int = 32  # of sets of K_TILE / 16 MMAs, per accumulator


def mma_body(m: MmaLoop) -> str:
    """Fill the tiles once, then MMAs only."""
    text = []
    for which in range(m.sets):
        for first in range(0, STEPS, m.batch):
            text.append("wgmma.fence.sync.aligned;")
            text += [wgmma(m.n, step, which) for step in range(first, first + m.batch)]
            text.append(f"wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned {m.pending};")
    threads = 128 * m.groups
    return f"""
        add.s32 %r_base, %r_smem, {DATA};
        {fill_tiles(64 * m.groups + m.n, threads)}
        shr.u32 %r_group, %r_tid, 7;
        mad.lo.s32 %r_a, %r_group, {64 * LINE}, %r_base;
        add.s32 %r_b, %r_base, {64 * LINE * m.groups};
        {descriptor("%d_desca", "%r_a")}
        {descriptor("%d_descb", "%r_b")}
        {clear(m.n, m.sets)}
        {START}
        {loop("MMA", "i", "%r_count", chr(10).join(text))}
        wgmma.wait_group.sync.aligned 0;
        {stop()}
        {store_sum(m.n, m.sets, threads)}"""


def mma_expected(m: MmaLoop, grid: int) -> np.ndarray:
    """f32[grid * 128 * groups]."""
    k = np.arange(K_TILE)
    rows = tile_value(np.arange(64 * m.groups + m.n)[:, None], k).astype(np.float64)
    d = rows[:64 * m.groups] @ rows[64 * m.groups:].T
    return np.tile(fragment_sums(d * (m.count * m.sets)), grid)


def mma_loop(name: str, role: str, m: MmaLoop, grid: int = 4) -> TimingKernel:
    """An MMA loop without loads. Time: in the kernel, filling excluded."""
    args = (output(4 * grid * 128 * m.groups), clock_buffer(), Scalar("count", m.count))
    return TimingKernel(f"wgmma/{name}", "wgmma", role, assemble(args, mma_body(m)), (grid, 1, 1),
                        (128 * m.groups, 1, 1), args, partial(mma_expected, m, grid), "in_kernel",
                        shared_bytes=DATA + LINE * (64 * m.groups + m.n), clock_warp=0)


@dataclass(frozen=True)
class MainLoop:
    """A GEMM main loop: D[64 groups, n] of each CTA, over `tiles` of K_TILE.

    The operands lie in memory as images of the swizzled tiles. A: the same for all CTAs. B: each CTA its own; if
    `resident`, all the same.
    """

    n: int
    groups: int
    stages: int
    tiles: int
    grid: int = 132
    resident: bool = False

    @property
    def a_bytes(self) -> int:
        """Of a tile of A."""
        return 64 * self.groups * LINE

    @property
    def b_bytes(self) -> int:
        """Of a tile of B."""
        return self.n * LINE


def main_loop_producer(g: MainLoop) -> str:
    """The last warp, one lane: two bulk copies a stage."""
    body = f"""
        {stage_addresses(g.stages, g.a_bytes + g.b_bytes)}
        xor.b32 %r_last, %r_parity, 1;
        {wait("%r_empty", "%r_last", "RELEASED")}
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r_full], {g.a_bytes + g.b_bytes};
        add.s32 %r_to, %r_data, {g.a_bytes};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r_data], [%d_a], {g.a_bytes}, [%r_full];
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r_to], [%d_b], {g.b_bytes}, [%r_full];
        add.s64 %d_a, %d_a, {g.a_bytes};
        add.s64 %d_b, %d_b, {g.b_bytes};
        {advance(g.stages)}"""
    own = "" if g.resident else f"mad.wide.u32 %d_b, %r_cta, {g.tiles * g.b_bytes}, %d_b;"
    return f"""
        setp.ne.s32 %p_other, %r_lane, 0;
        @%p_other bra END;
        {own}
        {loop("FILL", "i", "%r_count", body)}
        bra END;"""


def main_loop_consumer(g: MainLoop) -> str:
    """A warpgroup: the MMAs of a stage; when they are issued, release the stage before."""
    body = f"""
        {stage_addresses(g.stages, g.a_bytes + g.b_bytes)}
        {wait("%r_full", "%r_parity", "FULL")}
        mad.lo.s32 %r_a, %r_group, {64 * LINE}, %r_data;
        add.s32 %r_b, %r_data, {g.a_bytes};
        {descriptor("%d_desca", "%r_a")}
        {descriptor("%d_descb", "%r_b")}
        wgmma.fence.sync.aligned;
        {chr(10).join(wgmma(g.n, step) for step in range(STEPS))}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 1;
        setp.gt.s32 %p_free, %r_i, 0;
        and.pred %p_free, %p_free, %p_one;
        @%p_free mbarrier.arrive.shared::cta.b64 _, [%r_before];
        mov.b32 %r_before, %r_empty;
        {advance(g.stages)}"""
    return f"""
        shr.u32 %r_group, %r_tid, 7;
        setp.eq.s32 %p_one, %r_lane, 0;
        mov.b32 %r_before, %r_smem;
        {clear(g.n)}
        {loop("MMA", "i", "%r_count", body)}
        wgmma.wait_group.sync.aligned 0;
        {stop()}
        {store_sum(g.n, 1, 128 * g.groups)}"""


def main_loop_body(g: MainLoop) -> str:
    """Warpgroups of consumers, then the producer warp."""
    barriers = [1] * g.stages + [4 * g.groups] * g.stages
    return f"""
        add.s32 %r_base, %r_smem, {DATA};
        {init_barriers(barriers)}
        {START}
        mov.b32 %r_stage, 0;
        mov.b32 %r_parity, 0;
        setp.lt.u32 %p_consumer, %r_tid, {128 * g.groups};
        @%p_consumer bra CONSUMER;
        {main_loop_producer(g)}
        CONSUMER:
        {main_loop_consumer(g)}
        END:"""


def unswizzled(image: np.ndarray, rows: int) -> np.ndarray:
    """float64[tiles, rows, K_TILE] from the image of swizzled tiles, u8."""
    chunks = image.view(np.float16).reshape(-1, rows, 8, 8)
    where = np.arange(8) ^ (np.arange(rows) % 8)[:, None]
    return np.take_along_axis(chunks, where[None, :, :, None], axis=2).reshape(-1, rows, K_TILE).astype(np.float64)


def main_loop_expected(g: MainLoop) -> np.ndarray:
    """f32[grid * 128 * groups]."""
    a = contents(Buffer("a", g.tiles * g.a_bytes, fill="halves"))
    copies = 1 if g.resident else g.grid
    b = contents(Buffer("b", copies * g.tiles * g.b_bytes, fill="halves")).reshape(copies, -1)
    a = unswizzled(a, 64 * g.groups).transpose(1, 0, 2).reshape(64 * g.groups, -1)
    sums = [fragment_sums(a @ unswizzled(one, g.n).transpose(1, 0, 2).reshape(g.n, -1).T) for one in b]
    return np.concatenate(sums * (g.grid // copies))


def main_loop(name: str, role: str, g: MainLoop) -> TimingKernel:
    """A warp-specialised GEMM main loop, its operands by plain bulk copies."""
    cold = not g.resident
    b = Buffer("b", (1 if g.resident else g.grid) * g.tiles * g.b_bytes, fill="halves", fresh=cold)
    args = (Buffer("a", g.tiles * g.a_bytes, fill="halves"), b, output(4 * g.grid * 128 * g.groups), clock_buffer(),
            Scalar("count", g.tiles))
    return TimingKernel(f"wgmma/{name}", "wgmma", role, assemble(args, main_loop_body(g)), (g.grid, 1, 1),
                        (128 * g.groups + 32, 1, 1), args, partial(main_loop_expected, g), "back_to_back",
                        shared_bytes=DATA + g.stages * (g.a_bytes + g.b_bytes), cold=cold, clock_warp=0)


def wgmma_family() -> list[TimingKernel]:
    """MMA loops and main loops."""
    return [
        mma_loop("n128_one_by_one", "fit", MmaLoop(128, batch=1)),
        mma_loop("n256_one_by_one", "test", MmaLoop(256, batch=1)),
        mma_loop("n128_by_four", "test", MmaLoop(128)),
        mma_loop("n256_by_four", "fit", MmaLoop(256)),
        mma_loop("n128_two_sets", "test", MmaLoop(128, pending=1, sets=2)),
        mma_loop("n256_two_groups", "fit", MmaLoop(256, groups=2)),
        mma_loop("n128_two_groups", "test", MmaLoop(128, groups=2, pending=1)),
        main_loop("gemm_n128_l2", "fit", MainLoop(128, 1, 4, 32, resident=True)),
        main_loop("gemm_n128_dram", "test", MainLoop(128, 1, 6, 16)),  # 34.6
        main_loop("gemm_n256_two_groups_l2", "test", MainLoop(256, 2, 4, 16, resident=True)),
        main_loop("gemm_n256_two_groups_dram", "fit", MainLoop(256, 2, 3, 8)),  # 34.6
    ]


# --- barriers -----------------------------------------------------------------------------------------------

ROUNDS = 256


def barrier_kernel(name: str, role: str, body: str, expected: np.ndarray, threads: int, cluster: int = 1
                   ) -> TimingKernel:
    """A kernel of one CTA or one cluster, timed by its own clock in warp 0. `expected` is u32."""
    args = (output(expected.nbytes), clock_buffer(), Scalar("count", ROUNDS))
    return TimingKernel(f"barrier/{name}", "barrier", role, assemble(args, body), (cluster, 1, 1), (threads, 1, 1),
                        args, lambda: expected, "in_kernel", (cluster, 1, 1), DATA, clock_warp=0)


def store_rounds(index: str) -> str:
    """Each thread stores its number of rounds at out[index]."""
    return f"mad.wide.u32 %d_at, {index}, 4, %d_out;\nst.global.b32 [%d_at], %r_i;"


def mbarrier_ping_pong(name: str, role: str, arrivals: int) -> TimingKernel:
    """Two warps hand a turn to each other through two mbarriers, by one lane's arrival or by all 32."""
    arrive = "@%p_one mbarrier.arrive.shared::cta.b64 _, [%r_smem+{}];"
    turn = "and.b32 %r_parity, %r_i, 1;"
    ping = turn + arrive.format(0) + wait("%r_smem+8", "%r_parity", "PONGED")
    pong = turn + wait("%r_smem", "%r_parity", "PINGED") + "\n" + arrive.format(8)
    body = f"""
        {init_barriers([arrivals, arrivals])}
        setp.lt.u32 %p_one, %r_lane, {arrivals};
        {START}
        setp.ge.u32 %p_second, %r_tid, 32;
        @%p_second bra SECOND;
        {loop("PING", "i", "%r_count", ping)}
        {stop()}
        bra END;
        SECOND:
        {loop("PONG", "i", "%r_count", pong)}
        END:
        {store_rounds("%r_tid")}"""
    return barrier_kernel(name, role, body, np.full(64, ROUNDS, np.uint32), 64)


def named_ping_pong(name: str, role: str, warps: int) -> TimingKernel:
    """Two halves of the CTA, `warps` warps each, hand a turn to each other by bar.arrive and bar.sync."""
    threads = 64 * warps
    body = f"""
        bar.sync 0;
        {START}
        setp.ge.u32 %p_second, %r_tid, {threads // 2};
        @%p_second bra SECOND;
        {loop("PING", "i", "%r_count", f"bar.arrive 1, {threads};{chr(10)}bar.sync 2, {threads};")}
        {stop()}
        bra END;
        SECOND:
        {loop("PONG", "i", "%r_count", f"bar.sync 1, {threads};{chr(10)}bar.arrive 2, {threads};")}
        END:
        {store_rounds("%r_tid")}"""
    return barrier_kernel(name, role, body, np.full(threads, ROUNDS, np.uint32), threads)


def cta_barrier(name: str, role: str, threads: int) -> TimingKernel:
    """bar.sync of all threads, again and again."""
    body = f"""
        bar.sync 0;
        {START}
        {loop("MEET", "i", "%r_count", "bar.sync 0;")}
        {stop()}
        {store_rounds("%r_tid")}"""
    return barrier_kernel(name, role, body, np.full(threads, ROUNDS, np.uint32), threads)


def cluster_barrier(name: str, role: str, size: int, threads: int, order: str = "") -> TimingKernel:
    """The cluster meets, again and again."""
    body = f"""
        {cluster_sync()}
        {START}
        {loop("MEET", "i", "%r_count", cluster_sync(order))}
        {stop()}
        mad.lo.s32 %r_x, %r_cta, {threads}, %r_tid;
        {store_rounds("%r_x")}"""
    return barrier_kernel(name, role, body, np.full(threads * size, ROUNDS, np.uint32), threads, size)


def cluster_ring(name: str, role: str, size: int, arrive: str = REMOTE_ARRIVE) -> TimingKernel:
    """A turn goes round the CTAs of a cluster by remote arrivals: CTA 0 sends first, then each passes it on."""
    step = f"""
        and.b32 %r_parity, %r_i, 1;
        setp.eq.s32 %p_first, %r_rank, 0;
        @%p_first {arrive} [%r_next];
        {wait("%r_smem", "%r_parity", "TURN")}
        @!%p_first {arrive} [%r_next];"""
    body = f"""
        {init_barriers([1], cluster=True)}
        add.s32 %r_peer, %r_rank, 1;
        setp.eq.s32 %p_wrap, %r_peer, {size};
        selp.b32 %r_peer, 0, %r_peer, %p_wrap;
        mapa.shared::cluster.u32 %r_next, %r_smem, %r_peer;
        {START}
        setp.ne.s32 %p_other, %r_lane, 0;
        @%p_other bra END;
        {loop("ROUND", "i", "%r_count", step)}
        {stop()}
        {store_rounds("%r_cta")}
        END:
        {cluster_sync()}"""
    return barrier_kernel(name, role, body, np.full(size, ROUNDS, np.uint32), 32, size)


def barrier_family() -> list[TimingKernel]:
    """256 rounds each."""
    released = REMOTE_ARRIVE.replace(".cta", ".cluster")
    return [
        mbarrier_ping_pong("mbarrier_one_lane", "fit", 1),
        mbarrier_ping_pong("mbarrier_all_lanes", "test", 32),
        named_ping_pong("named_2_warps", "fit", 1),
        named_ping_pong("named_8_warps", "test", 4),
        cta_barrier("cta_128", "fit", 128),
        cta_barrier("cta_256", "test", 256),
        cta_barrier("cta_512", "test", 512),
        cta_barrier("cta_1024", "fit", 1024),
        cluster_barrier("cluster_2", "fit", 2, 128),
        cluster_barrier("cluster_4", "test", 4, 128),
        cluster_barrier("cluster_8", "test", 8, 256),
        cluster_barrier("cluster_2_relaxed", "fit", 2, 128, ".relaxed"),
        cluster_barrier("cluster_8_relaxed", "test", 8, 128, ".relaxed"),
        cluster_ring("cluster_ring_2", "fit", 2),
        cluster_ring("cluster_ring_4", "test", 4),
        cluster_ring("cluster_ring_2_released", "fit", 2, released),
        cluster_ring("cluster_ring_4_released", "test", 4, released),
    ]


# --- stores like an epilogue's, loads by threads ------------------------------------------------------------

TILE_ROWS, ROW_BYTES, PITCH = 128, 256, 14_336  # a tile of C, float16: 128 x 128 out of 7168 columns
TILES_ACROSS = PITCH // ROW_BYTES


def tile_words(grid: int, tiles: int) -> np.ndarray:
    """u32[tile, row, 16 bytes, 4]: what the store kernels write: tile, row, column, tile ^ row."""
    tile, row, column = np.meshgrid(np.arange(grid * tiles), np.arange(TILE_ROWS), np.arange(ROW_BYTES // 16),
                                    indexing="ij")
    return np.stack((tile, row, column, tile ^ row), axis=-1).astype(np.uint32)


def store_expected(grid: int, tiles: int, pitched: bool) -> np.ndarray:
    """The output of a store kernel: tiles side by side in rows of PITCH bytes, or one after the other."""
    words = tile_words(grid, tiles)
    if pitched:
        words = words.reshape(-1, TILES_ACROSS, TILE_ROWS, ROW_BYTES // 4).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(words).reshape(-1)


def place_tile() -> str:
    """%d_tile: address of tile %r_tile in rows of PITCH bytes."""
    return f"""
        div.u32 %r_down, %r_tile, {TILES_ACROSS};
        mul.lo.s32 %r_across, %r_down, {TILES_ACROSS};
        sub.s32 %r_across, %r_tile, %r_across;
        mad.wide.u32 %d_tile, %r_down, {TILE_ROWS * PITCH}, %d_out;
        mad.wide.u32 %d_tile, %r_across, {ROW_BYTES}, %d_tile;"""


def store_rows() -> str:
    """Each of 128 threads stores its own row, 16 bytes at a time."""
    stores = "\n".join(f"mov.b32 %r_column, {c};\nst.global.v4.b32 [%d_at+{16 * c}], "
                       "{%r_tile, %r_tid, %r_column, %r_mix};" for c in range(ROW_BYTES // 16))
    return f"""
        {place_tile()}
        mad.wide.u32 %d_at, %r_tid, {PITCH}, %d_tile;
        xor.b32 %r_mix, %r_tile, %r_tid;
        {stores}"""


def store_coalesced() -> str:
    """16 neighbouring threads store a row."""
    stores = "\n".join(f"""
        add.s32 %r_line, %r_row, {8 * p};
        xor.b32 %r_mix, %r_tile, %r_line;
        st.global.v4.b32 [%d_at+{8 * p * PITCH}], {{%r_tile, %r_line, %r_column, %r_mix}};"""
                       for p in range(TILE_ROWS // 8))
    return f"""
        {place_tile()}
        and.b32 %r_column, %r_tid, 15;
        shr.u32 %r_row, %r_tid, 4;
        mad.wide.u32 %d_at, %r_row, {PITCH}, %d_tile;
        mad.wide.u32 %d_at, %r_column, 16, %d_at;
        {stores}"""


def store_through_shared(copy: str) -> str:
    """The tile to shared memory, then out by one copy of thread 0, which waits for the copy before."""
    stores = "\n".join(f"""
        add.s32 %r_line, %r_row, {8 * p};
        xor.b32 %r_mix, %r_tile, %r_line;
        st.shared.v4.b32 [%r_own+{2048 * p}], {{%r_tile, %r_line, %r_column, %r_mix}};"""
                       for p in range(TILE_ROWS // 8))
    return f"""
        setp.ne.s32 %p_other, %r_tid, 0;
        @%p_other bra FREE;
        cp.async.bulk.wait_group.read 0;
        FREE:
        bar.sync 0;
        and.b32 %r_column, %r_tid, 15;
        shr.u32 %r_row, %r_tid, 4;
        mad.lo.s32 %r_own, %r_tid, 16, %r_smem;
        {stores}
        fence.proxy.async.shared::cta;
        bar.sync 0;
        @%p_other bra COPIED;
        {copy}
        cp.async.bulk.commit_group;
        COPIED:"""


def bulk_out() -> str:
    """Bulk copy of the tile to its place one after the other."""
    return f"""
        mad.wide.u32 %d_at, %r_tile, {TILE_ROWS * ROW_BYTES}, %d_out;
        cp.async.bulk.global.shared::cta.bulk_group [%d_at], [%r_smem], {TILE_ROWS * ROW_BYTES};"""


def tensor_out() -> str:
    """Tensor copy of the tile to its place in rows of PITCH bytes."""
    return f"""
        div.u32 %r_down, %r_tile, {TILES_ACROSS};
        mul.lo.s32 %r_across, %r_down, {TILES_ACROSS};
        sub.s32 %r_across, %r_tile, %r_across;
        mul.lo.s32 %r_x, %r_across, {ROW_BYTES // 2};
        mul.lo.s32 %r_y, %r_down, {TILE_ROWS};
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d_map, {{%r_x, %r_y}}], [%r_smem];"""


def tile_store(name: str, role: str, how: str, grid: int, tiles: int) -> TimingKernel:
    """`tiles` tiles of 32 KB from each CTA of 128 threads. grid * tiles is a multiple of TILES_ACROSS."""
    nbytes = grid * tiles * TILE_ROWS * ROW_BYTES
    out = output(nbytes)
    args: tuple = (out, clock_buffer(), Scalar("count", tiles))
    body = {"rows": store_rows, "coalesced": store_coalesced, "bulk": lambda: store_through_shared(bulk_out()),
            "tensor": lambda: store_through_shared(tensor_out())}[how]()
    if how == "tensor":
        tensor = TensorMap("map", out, (PITCH // 2, nbytes // PITCH), PITCH, (ROW_BYTES // 2, TILE_ROWS), 0)
        args = (tensor, *args[1:])
    text = f"""
        {START}
        mov.b32 %r_tile, %r_cta;
        {loop("TILE", "i", "%r_count", body + chr(10) + "add.s32 %r_tile, %r_tile, %r_ctas;")}
        {"cp.async.bulk.wait_group 0;" if how in ("bulk", "tensor") else ""}
        {stop()}"""
    shared = TILE_ROWS * ROW_BYTES if how in ("bulk", "tensor") else 0
    return TimingKernel(f"epilogue/{name}", "epilogue", role, assemble(args, text), (grid, 1, 1), (128, 1, 1), args,
                        partial(store_expected, grid, tiles, how != "bulk"), "back_to_back", shared_bytes=shared,
                        clock_warp=0)


LOAD_THREADS = 256


def load_expected(grid: int, unroll: int, count: int) -> np.ndarray:
    """u32[grid * 8]: sums of the words that each warp loads."""
    words = hashed(grid * LOAD_THREADS * unroll * count * 4)
    return words.reshape(unroll * count, grid * LOAD_THREADS // 32, LINE).sum(axis=(0, 2), dtype=np.uint32)


def load_stream(name: str, role: str, ctas: int, unroll: int, count: int, cold: bool) -> TimingKernel:
    """ld.global of 16 bytes a thread, `unroll` in flight, over distinct data, every word added up."""
    threads = ctas * LOAD_THREADS
    loads = "\n".join(f"ld.global.v4.b32 {{%r_a{u}, %r_b{u}, %r_c{u}, %r_d{u}}}, [%d_from+{16 * threads * u}];"
                      for u in range(unroll))
    adds = "\n".join(f"add.s32 %r_sum, %r_sum, %r_{x}{u};" for u in range(unroll) for x in "abcd")
    text = f"""
        {START}
        mad.lo.s32 %r_x, %r_cta, {LOAD_THREADS}, %r_tid;
        mad.wide.u32 %d_from, %r_x, 16, %d_src;
        mov.b32 %r_sum, 0;
        {loop("LOAD", "i", "%r_count", f"{loads}{chr(10)}add.s64 %d_from, %d_from, {16 * threads * unroll};{adds}")}
        redux.sync.add.s32 %r_sum, %r_sum, -1;
        {stop()}
        shr.u32 %r_x, %r_x, 5;
        mad.wide.u32 %d_at, %r_x, 4, %d_out;
        setp.eq.s32 %p_one, %r_lane, 0;
        @%p_one st.global.b32 [%d_at], %r_sum;"""
    src = Buffer("src", 16 * threads * unroll * count, fill="words", fresh=cold)
    args = (src, output(4 * threads // 32), clock_buffer(), Scalar("count", count))
    return TimingKernel(f"epilogue/{name}", "epilogue", role, assemble(args, text), (ctas, 1, 1),
                        (LOAD_THREADS, 1, 1), args, partial(load_expected, ctas, unroll, count), "back_to_back",
                        cold=cold, clock_warp=0)


def epilogue_family() -> list[TimingKernel]:
    """Stores of C tiles in several ways; loads by threads."""
    return [
        tile_store("rows_1_tile", "fit", "rows", 112, 1),
        tile_store("rows_8_tiles", "test", "rows", 112, 8),
        tile_store("coalesced_1_tile", "test", "coalesced", 112, 1),
        tile_store("coalesced_8_tiles", "fit", "coalesced", 112, 8),
        tile_store("bulk_8_tiles", "fit", "bulk", 112, 8),
        tile_store("tensor_1_tile", "test", "tensor", 112, 1),
        tile_store("tensor_8_tiles", "test", "tensor", 112, 8),
        load_stream("loads_l2", "fit", 264, 4, 8, cold=False),  # 34.6
        load_stream("loads_dram", "test", 264, 4, 8, cold=True),  # 34.6
        load_stream("loads_dram_deep", "fit", 528, 8, 4, cold=True),  # 69.2
    ]


# --- latencies ----------------------------------------------------------------------------------------------


def chase_global(name: str, role: str, nbytes: int, hops: int, cold: bool) -> TimingKernel:
    """One thread follows a chain through `hops` different lines of `nbytes`."""
    body = f"""
        mov.b32 %r_x, 0;
        {START}
        {loop("HOP", "i", "%r_count", "cvt.u64.u32 %d_x, %r_x; add.s64 %d_at, %d_src, %d_x;"
                                      "ld.global.b32 %r_x, [%d_at];")}
        setp.ne.s32 %p_lost, %r_x, 0;
        @%p_lost bra END;
        {stop()}
        st.global.b32 [%d_out], %r_i;
        END:"""
    args = (Buffer("src", nbytes, fill=f"chain:{hops}", fresh=cold), output(4), clock_buffer(), Scalar("count", hops))
    return TimingKernel(f"latency/{name}", "latency", role, assemble(args, body), (1, 1, 1), (1, 1, 1), args,
                        lambda: np.array([hops], np.uint32), "in_kernel", launches=10, cold=cold, clock_warp=0)


def chase_shared(name: str, role: str, threads: int, hops: int = 1024) -> TimingKernel:
    """Every thread follows a chain of its own through 32 lines of shared memory, without bank conflicts."""
    lines = 32
    body = f"""
        mad.lo.s32 %r_own, %r_tid, 4, %r_smem;
        {loop("LINK", "i", lines, f'''
        add.s32 %r_next, %r_i, 5;
        and.b32 %r_next, %r_next, {lines - 1};
        mad.lo.s32 %r_next, %r_next, {4 * threads}, %r_own;
        mad.lo.s32 %r_at, %r_i, {4 * threads}, %r_own;
        st.shared.b32 [%r_at], %r_next;''')}
        bar.sync 0;
        mov.b32 %r_x, %r_own;
        {START}
        {loop("HOP", "i", "%r_count", "ld.shared.b32 %r_x, [%r_x];" * 8)}
        sub.s32 %r_x, %r_x, %r_own;
        setp.eq.s32 %p_never, %r_x, -1;
        @%p_never bra END;
        {stop()}
        END:
        mad.wide.u32 %d_at, %r_tid, 4, %d_out;
        st.global.b32 [%d_at], %r_x;"""
    args = (output(4 * threads), clock_buffer(), Scalar("count", hops // 8))
    end = 5 * hops % lines * 4 * threads
    return TimingKernel(f"latency/{name}", "latency", role, assemble(args, body), (1, 1, 1), (threads, 1, 1), args,
                        lambda: np.full(threads, end, np.uint32), "in_kernel", launches=10,
                        shared_bytes=4 * threads * lines, clock_warp=0)


def arithmetic(name: str, role: str, step: str, value: Callable[[], np.ndarray], count: int, threads: int = 32
               ) -> TimingKernel:
    """`count` times 16 copies of `step`, which changes %r_x of each thread; it starts as the thread's number.

    value: computes u32[threads], %r_x at the end. %r_add and %r_xor hold ADD and XOR.
    """
    body = f"""
        mov.b32 %r_x, %r_tid;
        bar.sync 0;
        {START}
        {loop("WORK", "i", "%r_count", step * 16)}
        setp.eq.s32 %p_never, %r_x, %r_count;
        @%p_never bra END;
        {stop()}
        END:
        mad.wide.u32 %d_at, %r_tid, 4, %d_out;
        st.global.b32 [%d_at], %r_x;"""
    args = (output(4 * threads), clock_buffer(), Scalar("count", count), Scalar("add", ADD), Scalar("xor", XOR))
    return TimingKernel(f"latency/{name}", "latency", role, assemble(args, body), (1, 1, 1), (threads, 1, 1), args,
                        value, "in_kernel", launches=10, clock_warp=0)


ADD_XOR = "add.s32 %r_x, %r_x, %r_add;\nxor.b32 %r_x, %r_x, %r_xor;\n"
MULTIPLY_ADD = "mad.lo.s32 %r_x, %r_x, %r_add, %r_xor;\n"
FUSED = "fma.rn.f32 %r_x, %r_x, 0fBF400000, 0f3F800000;\n"  # x = 1 - 0.75 x, on the bits in %r_x


def multiply_add_expected(steps: int, threads: int) -> np.ndarray:
    """u32[threads] after `steps` times x = x ADD + XOR."""
    x = np.arange(threads, dtype=np.uint32)
    for _ in range(steps):
        x = x * np.uint32(ADD) + np.uint32(XOR)
    return x


def fused_expected(steps: int, threads: int) -> np.ndarray:
    """f32[threads], exactly rounded: the float64 result of a float32 product by -0.75 plus 1 is exact."""
    x = np.arange(threads, dtype=np.uint32).view(np.float32)
    for _ in range(steps):
        x = (1.0 - 0.75 * x.astype(np.float64)).astype(np.float32)
    return x.view(np.uint32)


def latency_family() -> list[TimingKernel]:
    """Dependent operations of one thread or one warp, then of several warps."""
    def integers(threads: int, count: int) -> Callable[[], np.ndarray]:
        return lambda: integer_chain(np.arange(threads), 16 * count)

    return [
        chase_global("global_l2_2m", "fit", 2 * M, 1024, cold=False),
        chase_global("global_l2_16m", "test", 16 * M, 1024, cold=False),
        chase_global("global_dram_32m", "fit", 32 * M, 512, cold=True),
        chase_global("global_dram_96m", "test", 96 * M, 512, cold=True),
        chase_shared("shared_1_warp", "fit", 32),
        chase_shared("shared_8_warps", "test", 256),
        arithmetic("add_xor_1_warp", "fit", ADD_XOR, integers(32, 64), 64),
        arithmetic("add_xor_8_warps", "test", ADD_XOR, integers(256, 64), 64, 256),
        arithmetic("add_xor_32_warps", "fit", ADD_XOR, integers(1024, 64), 64, 1024),
        arithmetic("add_xor_20_warps", "test", ADD_XOR, integers(640, 32), 32, 640),
        arithmetic("multiply_add", "test", MULTIPLY_ADD, lambda: multiply_add_expected(1024, 32), 64),
        arithmetic("fused_multiply_add", "fit", FUSED, lambda: fused_expected(1024, 32), 64),
    ]


FAMILIES: dict[str, Callable[[], list[TimingKernel]]] = {
    "launch": launch_family, "dram": dram_family, "l2": l2_family, "tma": tma_family, "multicast": multicast_family,
    "dsmem": dsmem_family, "wgmma": wgmma_family, "barrier": barrier_family, "epilogue": epilogue_family,
    "latency": latency_family,
}


@cache
def all_kernels() -> tuple[TimingKernel, ...]:
    """Every kernel of every family; names are unique."""
    return tuple(kernel for family in FAMILIES.values() for kernel in family())
