"""Handlers of the copy engine: cp.async.bulk(.tensor), cp.reduce.async.bulk, bulk groups, st.async, red.async,
tensormap.replace, clusterlaunchcontrol (PTX ISA 9.7.9.25-28, 9.7.13.17). What a copy does to memory is in `tma.py`."""

from __future__ import annotations

import numpy as np

from . import tensormap, tma
from .address import PARAM_WINDOW, SHARED_WINDOW
from .atomics import apply_atomic
from .errors import VirtualGpuError
from .isa import Action, Const, Modifiers, decodes
from .loadstore import UINT
from .machine import Op
from .memory import CLEAN, GENERIC
from .ptx import TYPE_BYTES, Instr, Vec
from .sync import signal
from .timing.record import Copy


def read_tensormap(warp, address: int) -> tensormap.TensorMap:
    """The tensor map at a generic address: a kernel parameter, global or shared memory."""
    if address >> 56 == PARAM_WINDOW >> 56:
        offset = address - PARAM_WINDOW
        return tensormap.decode(warp.grid.params[offset:offset + 128], offset)
    if address >> 56 == SHARED_WINDOW >> 56:
        raise VirtualGpuError("tensor map", "a tensor map must lie in global, constant or parameter memory")
    warp.grid.memory.check(address, 128, 64)
    return tensormap.decode(warp.grid.memory.view(address, 128).tobytes(), address)


def lanes_of(warp, *values):
    """One tuple of ints a lane, for every active lane."""
    if warp.count == 1:
        lane = warp.leader
        return [(lane, *(v if type(v) is int else int(v[lane]) for v in values))]
    columns = [warp.per_lane(v) for v in values]
    return [(column[0][0], *(c[1] for c in column)) for column in zip(*columns, strict=True)]


def shared_offset(address: int) -> int:
    """A 32-bit shared::cluster address from a possibly generic one."""
    return address & 0xFFFFFFFF if address >> 56 else address


def _receiver(warp, address: int):
    return warp.cta.cluster.resolve(shared_offset(address), "bulk copy destination")


def _barrier_at(warp, address: int, what: str):
    cta, offset = warp.cta.cluster.resolve(shared_offset(address), what)
    return cta.mbarrier(offset, what), cta


def _credit(warp, bars, nbytes: int, what: str) -> None:
    for bar, cta in bars:
        signal(warp, bar, cta, f"{what} of CTA {warp.cta.id} warp {warp.index}")
        bar.complete_tx(nbytes)


# --- tensor loads --------------------------------------------------------------------------------


def tensor_load(warp, dst, base, coords, mbar, mask, mode, cta_group) -> None:
    """cp.async.bulk.tensor global -> shared; mask: CTAs of the multicast or None."""
    warp.units.add("TMA load")
    for row in lanes_of(warp, dst, base, mbar, 0 if mask is None else mask, *coords):
        _, d, tm_address, bar_address, m, *c = row
        _issue_load(warp, d, tm_address, bar_address, None if mask is None else m, c, mode, cta_group)


def _issue_load(warp, dst, tm_address, bar_address, mask, coords, mode, cta_group) -> None:
    cluster = warp.cta.cluster
    tm = read_tensormap(warp, tm_address)
    nbytes, room = tma.tile_bytes(tm, mode), tma.shared_bytes(tm, mode)
    cta, offset = _receiver(warp, dst)
    bar_rank = shared_offset(bar_address) >> 24
    bar_offset = bar_address & 0xFFFFFF
    if mask is None:
        targets = [(cta, bar_rank)]
        if bar_rank != cta.rank and not (cta_group == 2 and bar_rank ^ 1 == cta.rank):
            raise VirtualGpuError("mbarrier", f"the copy's mbarrier is in CTA rank {bar_rank}, its destination in rank "
                                  f"{cta.rank}; allowed: the same{' or its pair' if cta_group == 2 else ''}")
    else:
        targets = [(cluster.resolve(r << 24, "multicast")[0], r & ~1 | bar_rank & 1 if cta_group == 2 else r)
                   for r in range(16) if mask >> r & 1]
        if not targets:
            raise VirtualGpuError("out of bounds", "multicast copy with an empty CTA mask")
    bars = [(cluster.ctas[r].mbarrier(bar_offset, "tensor copy"), cluster.ctas[r]) for _, r in targets]
    gmem = warp.grid.memory

    def run() -> None:
        box = tma.read_tile(tm, coords, gmem) if mode == "tile" else tma.read_rows(tm, coords, gmem)
        for t, _ in targets:
            tma.write_tile(tm, box, t.smem, offset)
        _credit(warp, bars, nbytes, "TMA load")

    for t, _ in targets:
        t.smem.check(offset, room, tma.TENSOR_ALIGN)
        t.load_bytes += nbytes
    count_load(warp, tm.address, nbytes, len(targets))
    if warp.trace is not None:
        note_copy(warp, nbytes, [t for t, _ in targets], bars, tm.address, copy_key(tm, coords))
    cluster.issue(Op("copy", run, warp, [(t, offset, offset + room, True) for t, _ in targets]))


def copy_key(tm, coords) -> int:
    """A number for the tile of a tensor, the same for every copy of it: the address of its first element."""
    signed = [c - (1 << 32) if c >> 31 else c for c in coords]
    steps = (tm.type.bits / 8, *tm.strides)
    return tm.address + int(sum(c * s for c, s in zip(signed, steps, strict=False)))


def note_copy(warp, nbytes: int, targets, bars, tensor: int, key: int) -> None:
    """Record a copy for the timing model."""
    warp.note("copy", Copy(nbytes, tuple(t.rank for t in targets), tuple((c.rank, b.offset) for b, c in bars), tensor))
    warp.keys.append(key)


def count_load(warp, tensor: int, nbytes: int, receivers: int) -> None:
    """Add a copy to the counters: bytes read (once) and delivered (to every receiver)."""
    c = warp.grid.counters
    c["tma_load_instructions"] += 1
    c["tma_load_bytes"] += nbytes
    c["tma_delivered_bytes"] += nbytes * receivers
    warp.grid.tensor_bytes[tensor] += nbytes


@decodes("cp.async.bulk.tensor")
def decode_tensor(i: Instr) -> Action:
    m = Modifiers(i, 4)
    m.need("1d", "2d", "3d", "4d", "5d")
    loads = i.opcode[5].startswith("shared")
    hint = m.take("L2::cache_hint") is not None
    mode = m.take("tile::gather4", "tile::scatter4", "tile", "im2col", "im2col::w", "im2col::w::128",
                  "im2col_no_offs") or "tile"
    tma.check_mode(mode)
    if not loads:
        m.need("global")
        m.need("shared::cta")
        m.need("bulk_group")
        m.done()
        tensor, source = i.operands[0], i.operands[1]
        return Action(tensor_store, (), (source, tensor.base, tensor.coords[0], Const(mode)), (32, 64, 32, 0))
    m.need("shared::cluster", "shared::cta")
    m.need("global")
    m.need("mbarrier::complete_tx::bytes")
    multicast = m.take("multicast::cluster") is not None
    group = 2 if m.take("cta_group::1", "cta_group::2") == "cta_group::2" else 1
    m.done()
    rest = list(i.operands[3:])
    if hint:
        rest.pop()
    mask = rest.pop(0) if multicast else Const(None)
    if rest:
        raise i.error("unsupported", "im2col offsets")
    tensor = i.operands[1]
    src = (i.operands[0], tensor.base, tensor.coords[0], i.operands[2], mask, Const(mode), Const(group))
    return Action(tensor_load, (), src, (32, 64, 32, 32, 16, 0, 0))


# --- stores and bulk groups ------------------------------------------------------------------------


def issue_store(warp, lane: int, run, spans) -> None:
    """Put a store of one thread in flight, in that thread's open bulk group."""
    op = Op("store", run, warp, spans)
    if warp.trace is not None:
        warp.note("store", sum(high - low for _, low, high, _ in spans), lane)
    warp.cta.cluster.issue(op)
    warp.bulk_open.setdefault(lane, []).append(op)


def tensor_store(warp, src, base, coords, mode) -> None:
    """cp.async.bulk.tensor shared -> global"""
    warp.units.add("TMA store")
    for lane, s, tm_address, *c in lanes_of(warp, src, base, *coords):
        tm = read_tensormap(warp, tm_address)
        _store_tile(warp, lane, tm, shared_offset(s), c, mode)


def _store_tile(warp, lane, tm, source, coords, mode) -> None:
    cta, offset = warp.cta.cluster.resolve(source, "tensor store")
    grid, room = warp.grid, tma.shared_bytes(tm, mode)
    cta.smem.check(offset, room, tma.TENSOR_ALIGN)
    cta.smem.require_fenced(tma.touched(tm, offset, mode), "a tensor store")

    def run() -> None:
        function = tma.store_tile if mode == "tile" else tma.scatter4
        function(tm, coords, cta.smem, offset, grid.memory)
        grid.counters["global_writes"] += 1

    count_store(warp, tm.address, tma.tile_bytes(tm, mode))
    issue_store(warp, lane, run, [(cta, offset, offset + room, False)])


def count_store(warp, tensor: int, nbytes: int) -> None:
    """Add a store to the counters."""
    c = warp.grid.counters
    c["tma_store_instructions"] += 1
    c["tma_store_bytes"] += nbytes
    warp.grid.tensor_bytes[tensor] += nbytes


def tensor_reduce(warp, src, base, coords, op) -> None:
    """cp.reduce.async.bulk.tensor shared -> global"""
    warp.units.add("TMA store")
    for lane, s, tm_address, *c in lanes_of(warp, src, base, *coords):
        tm = read_tensormap(warp, tm_address)
        cta, offset = warp.cta.cluster.resolve(shared_offset(s), "tensor reduction")
        room = tma.shared_bytes(tm)
        cta.smem.check(offset, room, tma.TENSOR_ALIGN)
        cta.smem.require_fenced(tma.touched(tm, offset), "a tensor reduction")

        def run(tm=tm, c=c, cta=cta, offset=offset) -> None:
            tma.reduce_tile(tm, c, cta.smem, offset, warp.grid.memory, op)
            warp.grid.counters["global_writes"] += 1

        count_store(warp, tm.address, tma.tile_bytes(tm))
        issue_store(warp, lane, run, [(cta, offset, offset + room, False)])


REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


@decodes("cp.reduce.async.bulk.tensor")
def decode_tensor_reduce(i: Instr) -> Action:
    m = Modifiers(i, 5)
    m.need("1d", "2d", "3d", "4d", "5d")
    m.need("global")
    m.need("shared::cta")
    op = m.need(*REDUCTIONS)
    m.take("tile")
    m.need("bulk_group")
    m.take("L2::cache_hint")
    m.done()
    tensor = i.operands[0]
    return Action(tensor_reduce, (), (i.operands[1], tensor.base, tensor.coords[0], Const(op)), (32, 64, 32, 0))


def commit_group(warp) -> None:
    """cp.async.bulk.commit_group: per thread."""
    for lane in np.flatnonzero(warp.mask).tolist():
        if warp.trace is not None and warp.bulk_open.get(lane):
            warp.note("commit_group", lane)
        warp.bulk_groups.setdefault(lane, []).append(warp.bulk_open.pop(lane, []))


def wait_group(warp, n, read) -> None:
    """cp.async.bulk.wait_group(.read) n: all but the n latest groups of each thread are done.

    The virtual GPU completes them here whole: for .read, too, although then only their shared memory is free."""
    for lane in np.flatnonzero(warp.mask).tolist():
        groups = warp.bulk_groups.get(lane, [])
        if warp.trace is not None and groups:
            warp.note("wait_group", lane, n)
        finished = len(groups) - n
        for group in groups[:max(0, finished)]:
            for op in group:
                warp.cta.cluster.finish_store(op)
        if finished > 0:
            warp.bulk_groups[lane] = groups[finished:]


@decodes("cp.async.bulk.commit_group", "cp.async.bulk.wait_group")
def decode_groups(i: Instr) -> Action:
    m = Modifiers(i, 4)
    read = m.take("read") is not None
    m.done()
    if i.opcode[3] == "commit_group":
        return Action(commit_group)
    return Action(wait_group, (), (Const(i.operands[0].value), Const(read)))


# --- plain bulk copies -------------------------------------------------------------------------------


def bulk_load(warp, dst, src, size, mbar, mask) -> None:
    """cp.async.bulk global -> shared"""
    warp.units.add("bulk load")
    cluster, gmem = warp.cta.cluster, warp.grid.memory
    for _, d, s, n, b, m in lanes_of(warp, dst, src, size, mbar, 0 if mask is None else mask):
        cta, offset = _receiver(warp, d)
        ranks = [cta.rank] if mask is None else [r for r in range(16) if m >> r & 1]
        targets = [cluster.resolve(r << 24, "multicast")[0] for r in ranks]
        bar_offset = shared_offset(b) & 0xFFFFFF
        bars = [(t.mbarrier(bar_offset, "bulk copy"), t) for t in targets]
        if mask is None:
            bars = [_barrier_at(warp, b, "bulk copy")]

        def run(targets=targets, offset=offset, s=s, n=n, bars=bars) -> None:
            for t in targets:
                tma.bulk_load(gmem, s, t.smem, offset, n)
            _credit(warp, bars, n, "bulk copy")

        check_bulk(n, s, offset)
        for t in targets:
            t.smem.check(offset, n, 16)
            t.load_bytes += n
        count_load(warp, gmem.buffer(s, n).base, n, len(targets))
        if warp.trace is not None:
            note_copy(warp, n, targets, bars, gmem.buffer(s, n).base, s)
        cluster.issue(Op("copy", run, warp, [(t, offset, offset + n, True) for t in targets]))


def check_bulk(size: int, *addresses: int) -> None:
    """A bulk copy's size and addresses must be multiples of 16."""
    if size % 16:
        raise VirtualGpuError("misaligned", f"bulk copy of {size} bytes; must be a multiple of 16")
    for a in addresses:
        if a % 16:
            raise VirtualGpuError("misaligned", f"bulk copy address {a:#x}; must be a multiple of 16")


def bulk_store(warp, dst, src, size, byte_mask) -> None:
    """cp.async.bulk shared -> global"""
    warp.units.add("bulk store")
    for lane, d, s, n, m in lanes_of(warp, dst, src, size, 0 if byte_mask is None else byte_mask):
        cta, offset = warp.cta.cluster.resolve(shared_offset(s), "bulk store")
        mask = None if byte_mask is None else m
        check_bulk(n, d, offset)
        cta.smem.check(offset, n, 16)
        cta.smem.require_async_visible(slice(offset, offset + n), "a bulk store")
        warp.grid.memory.check(d, n, 16)

        def run(d=d, cta=cta, offset=offset, n=n, mask=mask) -> None:
            tma.bulk_store(cta.smem, offset, warp.grid.memory, d, n, mask)
            warp.grid.counters["global_writes"] += 1

        count_store(warp, warp.grid.memory.buffer(d, n).base, n)
        issue_store(warp, lane, run, [(cta, offset, offset + n, False)])


def bulk_shared(warp, dst, src, size, mbar) -> None:
    """cp.async.bulk shared::cta -> shared::cluster"""
    for _, d, s, n, b in lanes_of(warp, dst, src, size, mbar):
        source, s_offset = warp.cta.cluster.resolve(shared_offset(s), "bulk copy source")
        target, d_offset = _receiver(warp, d)
        bar = _barrier_at(warp, b, "bulk copy")
        check_bulk(n, d_offset, s_offset)
        source.smem.check(s_offset, n, 16)
        target.smem.check(d_offset, n, 16)
        source.smem.require_async_visible(slice(s_offset, s_offset + n), "a bulk copy")

        def run(source=source, s_offset=s_offset, target=target, d_offset=d_offset, n=n, bar=bar) -> None:
            tma.bulk_shared_to_shared(source.smem, s_offset, target.smem, d_offset, n)
            _credit(warp, [bar], n, "bulk copy")

        warp.grid.counters["dsmem_bytes"] += n
        if warp.trace is not None:
            note_copy(warp, n, [target], [bar], 0, 0)
        spans = [(source, s_offset, s_offset + n, False), (target, d_offset, d_offset + n, True)]
        warp.cta.cluster.issue(Op("copy", run, warp, spans))


@decodes("cp.async.bulk")
def decode_bulk(i: Instr) -> Action:
    m = Modifiers(i, 3)
    if m.rest and m.rest[0] == "prefetch":
        return _decode_prefetch(i, m)
    to = i.opcode[3]
    source = i.opcode[4]
    m.need(to)
    m.need(source)
    hint = m.take("L2::cache_hint") is not None
    operands = list(i.operands[:-1] if hint else i.operands)
    if to == "global":
        m.need("bulk_group")
        masked = m.take("cp_mask") is not None
        m.done()
        mask = operands[3] if masked else Const(None)
        return Action(bulk_store, (), (operands[0], operands[1], operands[2], mask), (64, 32, 32, 16))
    m.need("mbarrier::complete_tx::bytes")
    multicast = m.take("multicast::cluster") is not None
    m.done()
    if source.startswith("shared"):
        return Action(bulk_shared, (), tuple(operands), (32, 32, 32, 32))
    mask = operands[4] if multicast else Const(None)
    return Action(bulk_load, (), (*operands[:4], mask), (32, 64, 32, 32, 16))


def prefetch_tile(warp, base, coords) -> None:
    """cp.async.bulk.prefetch.tensor: a hint; the map must be readable."""
    for _, tm_address, *_c in lanes_of(warp, base, *coords):
        tm = read_tensormap(warp, tm_address)
        warp.grid.counters["l2_prefetch_bytes"] += tma.tile_bytes(tm)


def prefetch_bulk(warp, src, size) -> None:
    """cp.async.bulk.prefetch.L2"""
    for _, s, n in lanes_of(warp, src, size):
        check_bulk(n, s)
        warp.grid.memory.buffer(s, n)
        warp.grid.counters["l2_prefetch_bytes"] += n


def _decode_prefetch(i: Instr, m: Modifiers) -> Action:
    m.need("prefetch")
    tensor = m.take("tensor")
    m.take("L2::cache_hint")
    if tensor:
        m.need("1d", "2d", "3d", "4d", "5d")
        m.need("L2")
        m.need("global")
        mode = m.take("tile::gather4", "tile") or "tile"
        tma.check_mode(mode)
        m.done()
        return Action(prefetch_tile, (), (i.operands[0].base, i.operands[0].coords[0]), (64, 32))
    m.need("L2")
    m.need("global")
    m.done()
    return Action(prefetch_bulk, (), (i.operands[0], i.operands[1]), (64, 32))


def bulk_reduce_global(warp, dst, src, size, op, kind, noftz) -> None:
    """cp.reduce.async.bulk shared -> global"""
    for lane, d, s, n in lanes_of(warp, dst, src, size):
        cta, offset = warp.cta.cluster.resolve(shared_offset(s), "bulk reduction")
        check_bulk(n, d, offset)
        cta.smem.require_async_visible(slice(offset, offset + n), "a bulk reduction")
        warp.grid.memory.check(d, n, 16)

        def run(d=d, cta=cta, offset=offset, n=n) -> None:
            tma.bulk_reduce(op, kind, cta.smem, offset, warp.grid.memory, d, n, noftz=noftz)
            warp.grid.counters["global_writes"] += 1

        count_store(warp, warp.grid.memory.buffer(d, n).base, n)
        issue_store(warp, lane, run, [(cta, offset, offset + n, False)])


def bulk_reduce_shared(warp, dst, src, size, mbar, op, kind) -> None:
    """cp.reduce.async.bulk shared::cta -> shared::cluster"""
    for _, d, s, n, b in lanes_of(warp, dst, src, size, mbar):
        source, s_offset = warp.cta.cluster.resolve(shared_offset(s), "bulk reduction source")
        target, d_offset = _receiver(warp, d)
        bar = _barrier_at(warp, b, "bulk reduction")
        check_bulk(n, d_offset, s_offset)
        source.smem.require_async_visible(slice(s_offset, s_offset + n), "a bulk reduction")
        target.smem.require_async_visible(slice(d_offset, d_offset + n), "a bulk reduction's target")

        def run(source=source, s_offset=s_offset, target=target, d_offset=d_offset, n=n, bar=bar) -> None:
            tma.bulk_reduce_shared(op, kind, source.smem, s_offset, target.smem, d_offset, n)
            _credit(warp, [bar], n, "bulk reduction")

        spans = [(source, s_offset, s_offset + n, False)]
        warp.cta.cluster.issue(Op("copy", run, warp, spans))


@decodes("cp.reduce.async.bulk")
def decode_bulk_reduce(i: Instr) -> Action:
    m = Modifiers(i, 4)
    to = m.need("global", "shared::cluster")
    m.need("shared::cta")
    op = m.need(*REDUCTIONS)
    noftz = m.take("noftz") is not None
    kind = m.need(*TYPE_BYTES)
    group = m.need("bulk_group", "mbarrier::complete_tx::bytes")
    m.take("L2::cache_hint")
    m.done()
    if (group == "bulk_group") != (to == "global"):
        raise i.error("unknown instruction", f".{group} with destination .{to}")
    if to == "global":
        return Action(bulk_reduce_global, (), (*i.operands[:3], Const(op), Const(kind), Const(noftz)),
                      (64, 32, 32, 0, 0, 0))
    return Action(bulk_reduce_shared, (), (*i.operands[:4], Const(op), Const(kind)), (32, 32, 32, 32, 0, 0))


# --- st.async, red.async ---------------------------------------------------------------------------


def store_async(warp, dst, values, mbar, size) -> None:
    """st.async: ordinary values to another CTA's shared memory, counted in bytes at its mbarrier."""
    n = size * len(values)
    noted: dict = {}
    for _, d, b, *v in lanes_of(warp, dst, mbar, *values):
        target, offset = _receiver(warp, d)
        bar = _barrier_at(warp, b, "st.async")
        if bar[1] is not target:
            raise VirtualGpuError("mbarrier", "st.async: destination and mbarrier are in different CTAs")
        target.smem.check(offset, n, n)
        raw = np.array(v, UINT[size]).view(np.uint8)

        def run(target=target, offset=offset, raw=raw, bar=bar) -> None:
            target.smem.mark_async(slice(offset, offset + n))
            target.smem.state[offset:offset + n] = CLEAN
            target.smem.data[offset:offset + n] = raw
            _credit(warp, [bar], n, "st.async")

        warp.grid.counters["dsmem_bytes"] += n
        noted[bar[1].rank, bar[0].offset] = noted.get((bar[1].rank, bar[0].offset), 0) + n
        warp.cta.cluster.issue(Op("copy", run, warp, [(target, offset, offset + n, True)]))
    if warp.trace is not None:
        for (rank, offset), nbytes in noted.items():
            warp.note("copy", Copy(nbytes, (rank,), ((rank, offset),), 0))
            warp.keys.append(0)


@decodes("st.async")
def decode_st_async(i: Instr) -> Action:
    """st.async{.weak}.shared::cluster.mbarrier::complete_tx::bytes{.v2,.v4}.type [a], b, [mbar]"""
    m = Modifiers(i, 2)
    m.take("weak")
    m.take("shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    m.take("v2", "v4")
    kind = m.need(*TYPE_BYTES)
    m.done()
    v = i.operands[1] if isinstance(i.operands[1], Vec) else Vec((i.operands[1],))
    size = TYPE_BYTES[kind]
    return Action(store_async, (), (i.operands[0], v, i.operands[2], Const(size)), (32, 8 * size, 32, 0))


def reduce_async(warp, dst, value, mbar, op, kind) -> None:
    """red.async: an atomic on another CTA's shared memory, counted in bytes at its mbarrier."""
    size = TYPE_BYTES[kind]
    for _, d, b, v in lanes_of(warp, dst, mbar, value):
        target, offset = _receiver(warp, d)
        bar = _barrier_at(warp, b, "red.async")
        target.smem.check(offset, size, size)

        def run(target=target, offset=offset, v=v, bar=bar) -> None:
            target.smem.require_written(slice(offset, offset + size), "red.async")
            view = target.smem.data[offset:offset + size]
            new = apply_atomic(op, kind, int.from_bytes(view.tobytes(), "little"), v)
            view[...] = np.frombuffer(new.to_bytes(size, "little"), np.uint8)
            if target.smem.state[offset] != GENERIC:
                target.smem.state[offset:offset + size] = CLEAN
            _credit(warp, [bar], size, "red.async")

        warp.cta.cluster.issue(Op("copy", run, warp))


@decodes("red.async")
def decode_red_async(i: Instr) -> Action:
    """red.async.relaxed.cluster{.shared::cluster}.mbarrier::complete_tx::bytes.op.type [a], b, [mbar]"""
    m = Modifiers(i, 2)
    m.drop("relaxed", "cluster", "shared::cluster")
    m.need("mbarrier::complete_tx::bytes")
    op = m.need(*REDUCTIONS)
    kind = m.need(*TYPE_BYTES)
    m.done()
    return Action(reduce_async, (), (i.operands[0], i.operands[1], i.operands[2], Const(op), Const(kind)),
                  (32, 8 * TYPE_BYTES[kind], 32, 0, 0))


# --- tensor maps on the device, cluster launch control ----------------------------------------------


def replace(warp, address, value, field, ordinal) -> None:
    """tensormap.replace on 128 bytes of global or shared memory."""
    a = warp.uniform(address, "tensor map address")
    v = warp.uniform(value, "tensormap.replace value")
    if a >> 56 == SHARED_WINDOW >> 56 or a < 1 << 32:
        cta, offset = warp.cta.cluster.resolve(shared_offset(a), "tensormap.replace")
        cta.smem.check(offset, 128, 128)
        view = cta.smem.data[offset:offset + 128]
    else:
        view = warp.grid.memory.view(a, 128)
    view[...] = np.frombuffer(tensormap.replace_field(view.tobytes(), field, ordinal, v), np.uint8)


@decodes("tensormap.replace")
def decode_replace(i: Instr) -> Action:
    m = Modifiers(i, 2)
    m.need("tile")
    field = m.need("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride", "elemtype",
                   "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode")
    m.drop("global", "shared::cta")
    m.need("b1024")
    width = 64 if m.need("b32", "b64") == "b64" else 32
    m.done()
    if len(i.operands) == 3:
        ordinal, value = Const(i.operands[1].value), i.operands[2]
    else:
        ordinal, value = Const(None), i.operands[1]
    return Action(replace, (), (i.operands[0], value, Const(field), ordinal), (64, width, 0, 0))


def tensormap_copy(warp, dst, src, size) -> None:
    """tensormap.cp_fenceproxy: 128 bytes shared -> global, with the proxy fence included."""
    d, s = warp.uniform(dst, "destination"), warp.uniform(src, "source")
    cta, offset = warp.cta.cluster.resolve(shared_offset(s), "tensormap.cp_fenceproxy")
    warp.grid.memory.view(d, size)[...] = cta.smem.data[offset:offset + size]


@decodes("tensormap.cp_fenceproxy")
def decode_tensormap_copy(i: Instr) -> Action:
    return Action(tensormap_copy, (), (i.operands[0], i.operands[1], Const(i.operands[2].value)), (64, 32, 0))


def try_cancel(warp, dst, mbar, multicast) -> None:
    """clusterlaunchcontrol.try_cancel: take over a cluster that has not been launched; 16 bytes of answer."""
    cluster, grid = warp.cta.cluster, warp.grid
    d, b = warp.uniform(dst, "response address"), warp.uniform(mbar, "mbarrier address")
    cta, offset = _receiver(warp, d)
    bar_offset = shared_offset(b) & 0xFFFFFF
    targets = cluster.ctas if multicast else [cta]

    def run() -> None:
        answer = grid.cancel_next()
        for t in targets:
            t.smem.mark_async(slice(offset, offset + 16))
            t.smem.data[offset:offset + 16] = np.frombuffer(answer, np.uint8)
            _credit(warp, [(t.mbarrier(bar_offset, "try_cancel"), t)], 16, "clusterlaunchcontrol")

    for t in targets:
        t.smem.check(offset, 16, 16)
    cluster.issue(Op("copy", run, warp, [(t, offset, offset + 16, True) for t in targets]))


CANCELED = 1 << 64  # in the response, see Grid.cancel_next


def is_canceled(warp, response) -> bool:
    """clusterlaunchcontrol.query_cancel.is_canceled"""
    return bool(warp.uniform(response, "response") & CANCELED)


def first_ctaid(warp, response, dimension):
    """clusterlaunchcontrol.query_cancel.get_first_ctaid. Of a request that was not granted it is undefined (PTX ISA
    9.7.13.17): compilers ask before they look, so the answer is then a number that no grid has."""
    value = warp.uniform(response, "response")
    ids = (0xFFFFFFFF,) * 3
    if value & CANCELED:
        ids = (value & 0xFFFFFFFF, value >> 32 & 0xFFFF, value >> 48 & 0xFFFF)
    return (*ids, 0) if dimension is None else ids[dimension]


@decodes("clusterlaunchcontrol")
def decode_clc(i: Instr) -> Action:
    if i.opcode[1] == "try_cancel":
        m = Modifiers(i, 2)
        m.need("async")
        m.drop("shared::cta")
        m.need("mbarrier::complete_tx::bytes")
        multicast = m.take("multicast::cluster::all") is not None
        m.need("b128")
        m.done()
        return Action(try_cancel, (), (i.operands[0], i.operands[1], Const(multicast)), (32, 32, 0))
    m = Modifiers(i, 1)
    m.need("query_cancel")
    what = m.need("is_canceled", "get_first_ctaid", *(f"get_first_ctaid::{d}" for d in "xyz"))
    if what == "is_canceled":
        m.need("pred")
    elif what == "get_first_ctaid":
        m.need("v4")
        m.need("b32")
    else:
        m.need("b32")
    m.need("b128")
    m.done()
    d, response = i.operands
    if what == "is_canceled":
        return Action(is_canceled, (d,), (response,), (128,))
    dimension = None if what == "get_first_ctaid" else "xyz".index(what[-1])
    return Action(first_ctaid, d.items if isinstance(d, Vec) else (d,), (response, Const(dimension)), (128, 0))
