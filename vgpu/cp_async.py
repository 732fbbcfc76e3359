"""Handlers of cp.async, the copies of single threads from global to shared memory (PTX ISA 9.7.9.25.3).

The data is read when the copy is issued and lands when the thread waits for it: an access without the wait meets what
was in shared memory before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .access import FLAT, active, gather, lane_of, mark_stored, require_aligned, shared_parts, typed
from .errors import VirtualGpuError
from .isa import CACHE_HINTS, Action, Const, Modifiers, decodes, operand_count
from .machine import Op
from .ptx import Imm, Instr, Reg
from .sync import locate


@dataclass
class Piece:
    """What one cp.async copied: data[i] goes to addresses[i] on behalf of lanes[i]. group: the lane's commit_group it
    belongs to (it is open while that many have been committed)."""

    lanes: np.ndarray
    addresses: np.ndarray
    data: np.ndarray
    group: np.ndarray


class Copies:
    """A warp's copies under way; commits[lane]: groups committed so far."""

    def __init__(self) -> None:
        self.commits = np.zeros(32, np.int64)
        self.pieces: list[Piece] = []


def _copies(warp) -> Copies:
    if warp.async_copies is None:
        warp.async_copies = Copies()
    return warp.async_copies


def copy(warp, dst, src, size, source_size) -> None:
    """cp.async: bytes beyond source_size are zero."""
    lanes = np.flatnonzero(warp.mask)
    addresses = active(warp, dst)
    require_aligned(warp, addresses, size)
    shared_parts(warp, "shared", addresses, size, True, "cp.async")
    counts = active(warp, source_size)
    if int(counts.max()) > size:
        i = int(counts.argmax())
        raise VirtualGpuError("out of bounds", f"cp.async source size {int(counts[i])} exceeds {size}",
                              lane=lane_of(warp, i))
    if int(counts.min()) == size:
        data = gather(warp, "global", src, size, "cp.async")
    else:
        data = _partial(warp, active(warp, src), counts, size)
    copies = _copies(warp)
    copies.pieces.append(Piece(lanes, addresses, data, copies.commits[lanes]))


def _partial(warp, sources: np.ndarray, counts: np.ndarray, size: int) -> np.ndarray:
    rows = np.zeros((len(sources), size), np.uint8)
    memory = warp.grid.memory
    for i, (a, n) in enumerate(zip(sources.tolist(), counts.tolist(), strict=True)):
        if n:
            memory.check(a, n, size, lane_of(warp, i))
            rows[i, :n] = memory.view(a, n)
    return rows.view(FLAT[size])[:, 0]


def copy_unless(warp, dst, src, size, ignore) -> None:
    """cp.async with the predicate that leaves the source unread."""
    copy(warp, dst, src, size, np.where(np.broadcast_to(np.asarray(ignore), (32,)), np.uint32(0), np.uint32(size)))


def commit(warp) -> None:
    """cp.async.commit_group"""
    _copies(warp).commits[warp.mask] += 1


def wait(warp, n) -> None:
    """cp.async.wait_group n: all but the n latest groups of each thread have landed."""
    copies = _copies(warp)
    _land(warp, [(p, warp.mask[p.lanes] & (p.group < copies.commits[p.lanes] - n)) for p in copies.pieces])


def wait_all(warp) -> None:
    """cp.async.wait_all: committed or not."""
    _land(warp, [(p, warp.mask[p.lanes]) for p in _copies(warp).pieces])


def _land(warp, chosen) -> None:
    """Write the chosen part of each piece to shared memory; the rest stays under way."""
    rest = []
    for piece, now in chosen:
        if now.any():
            _write(warp, piece.addresses[now], piece.data[now])
        if not now.all():
            later = ~now
            rest.append(Piece(piece.lanes[later], piece.addresses[later], piece.data[later], piece.group[later]))
    warp.async_copies.pieces = rest


def _write(warp, addresses: np.ndarray, data: np.ndarray) -> None:
    total = data.dtype.itemsize
    for cta, relative, where in shared_parts(warp, "shared", addresses, total, True, "cp.async"):
        index = mark_stored(warp, cta, relative, total)
        typed(cta.smem, "data", total)[0][index] = data[where]


def arrive(warp, address, noinc) -> None:
    """cp.async.mbarrier.arrive: each thread arrives when its copies so far have landed. Without .noinc the pending
    count grows by one first, so that the phase needs no more arrivals than before."""
    copies, cluster = _copies(warp), warp.cta.cluster
    mine = [(p, warp.mask[p.lanes]) for p in copies.pieces]
    targets = [locate(warp, a, "cp.async.mbarrier.arrive")[0] for _, a in warp.per_lane(address)]
    for bar in targets:
        if not noinc:
            bar.add_pending(1)
    taken = [Piece(p.lanes[m], p.addresses[m], p.data[m], p.group[m]) for p, m in mine]
    _drop(copies, mine)

    def run() -> None:
        for piece in taken:
            _write(warp, piece.addresses, piece.data)
        for bar in targets:
            bar.sources[f"cp.async of warp {warp.index}"] += 1
            bar.arrive(1)

    cluster.issue(Op("copy", run, warp))


def _drop(copies: Copies, chosen) -> None:
    copies.pieces = [Piece(p.lanes[~m], p.addresses[~m], p.data[~m], p.group[~m]) for p, m in chosen if not m.all()]


@decodes("cp.async.ca", "cp.async.cg")
def decode_copy(i: Instr) -> Action:
    m = Modifiers(i, 2)
    level = m.need("ca", "cg")
    hint = m.take("L2::cache_hint")
    m.need("shared", "shared::cta")
    m.need("global")
    m.drop(*CACHE_HINTS)
    m.done()
    operands = list(i.operands[:-1] if hint else i.operands)
    size = operands[2].value if len(operands) > 2 and isinstance(operands[2], Imm) else 0
    if size not in ((16,) if level == "cg" else (4, 8, 16)) or len(operands) > 4:
        raise i.error("unknown instruction", f"cp.async.{level} of {size} bytes; 16, and with .ca 4 or 8")
    source = operands[3] if len(operands) == 4 else Imm(size)
    function = copy_unless if isinstance(source, Reg) and source.width == 1 else copy
    return Action(function, (), (operands[0], operands[1], Const(size), source), (32, 64, 0, 32))


@decodes("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all")
def decode_groups(i: Instr) -> Action:
    Modifiers(i, 3).done()
    operand_count(i, 1 if i.opcode[2] == "wait_group" else 0)
    if i.opcode[2] == "commit_group":
        return Action(commit)
    if i.opcode[2] == "wait_all":
        return Action(wait_all)
    return Action(wait, (), (Const(i.operands[0].value),))


@decodes("cp.async.mbarrier.arrive")
def decode_arrive(i: Instr) -> Action:
    m = Modifiers(i, 4)
    noinc = m.take("noinc") is not None
    m.take("shared", "shared::cta")
    m.need("b64")
    m.done()
    return Action(arrive, (), (i.operands[0], Const(noinc)), (32, 0))
