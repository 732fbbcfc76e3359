"""What a launch did, kept for the timing model: per warp a list of events with the cycles of issue between them.

An event is (cycles since the warp's previous event, kind, details…). Kinds:

    init bar count        mbarrier.init               arrive bar n          arrivals by this warp
    expect bar bytes      expect_tx                   wait bar phase        until that phase has completed
    named n threads waits bar.sync / bar.arrive       cluster waits         barrier.cluster.arrive / wait
    copy Copy             a load or DSMEM copy        store bytes lane      a bulk store of one thread
    commit_group lane     bulk group                  wait_group lane n     bulk groups
    mma queue cycles      into the tensor queue       cp queue              tcgen05.cp
    commit queue bars     tcgen05.commit              tld bytes             tcgen05.ld; `use` waits for it
    wgmma cycles          by the first warp of a warpgroup; wgmma_commit, wgmma_wait n by each of the four
    ldg bytes             ld.global                   lds / sts bytes       shared memory
    stg bytes             st.global                   use                   a loaded register is needed
    alloc                 tcgen05.alloc               pdl_wait / pdl_launch griddepcontrol

`bar` is (CTA rank in the cluster, shared offset). Clusters that did the same but for addresses share one structure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Copy:
    """A copy into shared memory. bars: mbarriers credited with nbytes each; ranks: receiving CTAs; tensor: base address
    of the global buffer (0: from another CTA's shared memory). Its global address is kept apart, in the warp's
    `keys`."""

    nbytes: int
    ranks: tuple[int, ...]
    bars: tuple[tuple[int, int], ...]
    tensor: int


class Recorder:
    """Collects a launch. structures: distinct cluster behaviours; clusters: (structure, addresses) in launch order."""

    def __init__(self):
        self.structures: dict[tuple, int] = {}
        self.clusters: list[tuple[int, tuple]] = []

    def add(self, cluster) -> None:
        """Keep an ended cluster's events."""
        events = tuple(tuple(tuple(w.trace) for w in cta.warps) for cta in cluster.ctas)
        index = self.structures.setdefault(events, len(self.structures))
        self.clusters.append((index, tuple(tuple(tuple(w.keys) for w in cta.warps) for cta in cluster.ctas)))

    def structure(self, index: int) -> tuple:
        """events[CTA rank][warp] of a structure."""
        return list(self.structures)[index]
