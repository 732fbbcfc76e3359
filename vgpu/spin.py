"""Spin loops on memory: a warp that keeps reading the same value lets the other warps, and the other CTAs, run."""

from __future__ import annotations

import numpy as np

from .warp import YIELD


def _same(a, b) -> bool:
    return a is b or (type(a) is type(b) and bool(np.array_equal(a, b)))


def polled(warp, resume: int, slots, values: tuple) -> int:
    """Write the results of a load or atomic that ends its block, and go on at block `resume`.

    slots: register-file slots of the results, -1 for those nobody reads. Where the statement gave the same values as
    the last time this warp executed it, the warp gives way first, like after a failed mbarrier.try_wait.
    """
    for slot, value in zip(slots, values, strict=True):
        if slot >= 0:
            warp.R[slot] = value
    before = warp.polls.get(resume)
    warp.polls[resume] = values
    if before is not None and all(map(_same, before, values)):
        return give_way(warp, resume)
    warp.failed_polls = 0
    return resume


def give_way(warp, resume: int) -> int:
    """Let other warps run before this one goes on at block `resume`."""
    warp.failed_polls += 1
    warp.pc = resume
    return YIELD
