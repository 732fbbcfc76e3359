"""Constants of the chips that the timing model knows: unit, source, and whether published, measured or assumed.

Published: `SEMI` is SemiAnalysisAI/microbench-blackwell (B200), `AI_kernels` is markdewing/AI_kernels, `ao` is
pytorch/ao#4002, `NOTE` a public B200 notes file, unverified. Measured: on an H200 (132 SMs, driver 580.159.04), by
`vgpu.validation`. Assumed: taken over from the other chip or from common practice; the comment says which.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Constant:
    """One figure. kind: 'published', 'measured' or 'assumed'."""

    value: float
    unit: str
    kind: str
    source: str

    def __post_init__(self):
        if self.kind not in ("published", "measured", "assumed"):
            raise ValueError(f"kind: {self.kind!r}; allowed: published, measured, assumed")


def published(value: float, unit: str, source: str) -> Constant:
    """A figure from a public source."""
    return Constant(value, unit, "published", source)


def measured(value: float, unit: str, source: str) -> Constant:
    """A figure measured for this project."""
    return Constant(value, unit, "measured", source)


def assumed(value: float, unit: str, source: str) -> Constant:
    """A figure nobody has published or measured; `source` says where it comes from."""
    return Constant(value, unit, "assumed", source)


@dataclass(frozen=True)
class Chip:
    """All constants of one chip."""

    name: str
    sms: Constant
    clock: Constant  # SM clock
    shared_bytes: Constant  # shared memory of an SM
    gpc_sms: Constant  # SMs of a GPC, which a cluster must fit into
    dram_bandwidth: Constant
    l2_bandwidth: Constant  # L2 to all SMs together
    sm_ingest: Constant  # L2 to one SM
    sm_misses: Constant  # DRAM to one SM
    l2_bytes: Constant
    l2_latency: Constant  # of a bulk or TMA load that hits L2, issue to mbarrier
    dram_latency: Constant  # added when it misses
    multicast_2: Constant  # delivered bytes of a multicast to 2 CTAs, in the time of a plain byte from L2
    multicast_4: Constant  # same, to 4 or more
    load_latency: Constant  # ld.global that hits L2
    load_miss_latency: Constant  # added when it misses
    dsmem_latency: Constant  # a remote arrival
    dsmem_copy_latency: Constant  # a copy into another SM, issue to mbarrier
    dsmem_bandwidth: Constant  # into one SM
    copy_issue: Constant  # issuing thread's time for one bulk or tensor copy
    store_drain: Constant  # last global store to the end of the grid
    shared_latency: Constant
    shared_bandwidth: Constant
    store_line: Constant  # an SM's time for one 128-byte line of a global store
    l2_write_lines: Constant  # such lines from all SMs together
    store_latency: Constant  # bulk store: shared memory read to its bytes in L2
    l2_write_bandwidth: Constant  # all SMs together
    alu_latency: Constant  # dependent integer or float operation; so many warps share a scheduler without loss
    mbarrier_latency: Constant  # arrive to a waiting warp running again
    mbarrier_issue: Constant  # one arrive, expect_tx or try_wait that passes
    named_barrier_latency: Constant  # last arrival to the waiting warps running again
    named_barrier_warp: Constant  # more for every warp that takes part
    cluster_barrier_latency: Constant  # last arrival to the waiting warps running again
    cluster_release: Constant  # .release at cluster scope: earlier writes must be visible to the other SM
    mma_latency: Constant  # last MMA's end to its commit's mbarrier being seen
    cp_cycles: Constant  # tcgen05.cp in the tensor core's queue
    tmem_load_latency: Constant
    tmem_load_bandwidth: Constant  # of one warp
    tmem_alloc_latency: Constant
    launch_latency: Constant  # grid start to its first instruction
    cta_launch: Constant  # a CTA after another on the same SM
    cluster_launch: Constant  # more for a cluster
    launch_interval: Constant  # between the starts of two grids, however short
    launch_gap: Constant  # end of a grid to the start of the next in the same stream
    median_error: Constant  # of the model with these constants, relative, as `vgpu.validate` finds it
    worst_error: Constant
    dependent_gap: Constant  # same with programmatic dependent launch: griddepcontrol.wait after the last CTA's end

    def constants(self) -> dict[str, Constant]:
        """Name to constant."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}


_FIT = "vgpu.validation, fitted to the kernels marked `fit`, family "

H200 = Chip(
    name="H200",
    sms=published(132, "", "CUDA device properties"),
    clock=measured(1.98, "GHz", "nvidia-smi during the captures"),
    shared_bytes=published(233_472, "B", "CUDA programming guide, compute capability 9.0"),
    gpc_sms=assumed(16, "", "132 SMs in 8 GPCs of 16 or 18; the smaller, so that clusters of 16 fit"),
    dram_bandwidth=measured(4200, "GB/s", _FIT + "dram"),
    l2_bandwidth=measured(9800, "GB/s", _FIT + "l2, wgmma"),
    sm_ingest=measured(149, "GB/s", "bulk copies from L2 into one SM"),
    sm_misses=measured(88, "GB/s", _FIT + "dram"),
    l2_bytes=published(60e6, "B", "CUDA device properties"),
    l2_latency=measured(225, "cycles", _FIT + "l2, tma"),
    dram_latency=measured(560, "cycles", _FIT + "dram"),
    multicast_2=measured(1.55, "", _FIT + "multicast"),
    multicast_4=measured(2.0, "", _FIT + "multicast"),
    load_latency=measured(275, "cycles", _FIT + "latency"),
    load_miss_latency=measured(400, "cycles", _FIT + "latency"),
    dsmem_latency=measured(150, "cycles", _FIT + "barrier"),
    dsmem_copy_latency=measured(690, "cycles", _FIT + "dsmem"),
    dsmem_bandwidth=measured(69, "GB/s", _FIT + "dsmem"),
    copy_issue=measured(21, "cycles", _FIT + "tma"),
    store_drain=assumed(600, "cycles", "a store's way to L2 and back; together with launch_gap fitted to empty grids"),
    shared_latency=measured(19, "cycles", _FIT + "latency"),
    shared_bandwidth=published(128, "B/cycle", "CUDA programming guide: 32 banks of 4 bytes"),
    store_line=measured(2.2, "cycles", "row stores of 16 bytes by 56 CTAs, once, beside the kernels of the tree"),
    l2_write_lines=measured(30.3, "lines/cycle", _FIT + "epilogue: 3.7 cycles a line with 112 CTAs"),
    store_latency=measured(100, "cycles", _FIT + "epilogue"),
    l2_write_bandwidth=measured(4200, "GB/s", _FIT + "epilogue"),
    alu_latency=measured(4.5, "cycles", _FIT + "latency"),
    mbarrier_latency=measured(33, "cycles", _FIT + "barrier"),
    mbarrier_issue=assumed(8, "cycles", "one shared-memory request"),
    named_barrier_latency=measured(18, "cycles", _FIT + "barrier"),
    named_barrier_warp=measured(1.5, "cycles", _FIT + "barrier"),
    cluster_barrier_latency=measured(92, "cycles", _FIT + "barrier"),
    cluster_release=measured(283, "cycles", _FIT + "barrier"),
    mma_latency=measured(60, "cycles", _FIT + "wgmma"),
    cp_cycles=assumed(16, "cycles", "no tcgen05.cp on this chip"),
    tmem_load_latency=assumed(100, "cycles", "no tensor memory on this chip"),
    tmem_load_bandwidth=assumed(128, "B/cycle", "no tensor memory on this chip"),
    tmem_alloc_latency=assumed(100, "cycles", "no tensor memory on this chip"),
    launch_latency=assumed(1000, "cycles", "matters only for the first grid of a chain"),
    cta_launch=measured(360, "cycles", _FIT + "launch"),
    cluster_launch=measured(100, "cycles", _FIT + "launch"),
    launch_interval=measured(1450, "cycles", _FIT + "launch"),
    launch_gap=measured(2950, "cycles", _FIT + "launch"),
    dependent_gap=measured(1045, "cycles", _FIT + "launch"),
    median_error=measured(0.05, "", "vgpu.validate, kernels marked `test`"),
    worst_error=measured(0.35, "", "vgpu.validate, kernels marked `test`"),
)

_H200 = "as on the H200 (no B200 figure published), in cycles"

B200 = replace(
    H200,
    name="B200",
    sms=published(148, "", "ao"),
    clock=published(1.965, "GHz", "SEMI, boost clock"),
    shared_bytes=published(233_472, "B", "CUDA programming guide, compute capability 10.0"),
    gpc_sms=assumed(16, "", "148 SMs in 8 GPCs of 16 to 20; the smallest"),
    dram_bandwidth=published(7200, "GB/s", "SEMI tma2d_throughput, 64 KB in flight an SM: 7.06-7.26 TB/s"),
    l2_bandwidth=published(13_300, "GB/s", "SEMI tma2dmcast_throughput, pairs of SMs sharing data"),
    sm_ingest=assumed(148, "GB/s", "75 B/cycle as on the H200"),
    sm_misses=assumed(148, "GB/s", "no limit below sm_ingest: with the H200's, 56 SMs would not reach the published "
                      "timings"),
    l2_bytes=published(126.5e6, "B", "SEMI"),
    l2_latency=assumed(225, "cycles", _H200),
    dram_latency=published(565, "cycles", "AI_kernels: DRAM 860 less L2 295"),
    multicast_2=published(0.985, "", "SEMI: 13.1 of 13.3 TB/s delivered"),
    multicast_4=published(0.66, "", "SEMI: 8.6-9 of 13.3 TB/s delivered"),
    load_latency=published(295, "cycles", "AI_kernels"),
    load_miss_latency=published(565, "cycles", "AI_kernels: DRAM 860 less L2 295"),
    l2_write_lines=assumed(30.3 * 148 / 132, "lines/cycle", "the H200's, by SMs"),
    l2_write_bandwidth=assumed(4200 * 148 / 132, "GB/s", "the H200's, by SMs"),
    mma_latency=published(140, "cycles", "SEMI umma_latency: II n + 132...148 for cta_group 1, M 128"),
    cp_cycles=assumed(16, "cycles", "2 KB written to tensor memory at 128 B/cycle; NOTE: 68-75, for a larger shape, "
                      "unverified"),
    tmem_load_latency=assumed(100, "cycles", "CUTLASS comments; a public kernel claims 420, low confidence"),
    tmem_load_bandwidth=assumed(128, "B/cycle", "one column of 32 lanes a cycle and warp"),
    tmem_alloc_latency=assumed(100, "cycles", "one trip to shared memory and back"),
    median_error=measured(0.1, "", "vgpu.validate, published timings"),
    worst_error=measured(0.35, "", "vgpu.validate, published timings"),
)

CHIPS = {"B200": B200, "H200": H200}
