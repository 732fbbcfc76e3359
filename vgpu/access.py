"""What the lanes of a warp read and write in one access: global, shared, local and parameter memory.

An access has one address a lane and `total` bytes, a power of two, at each. Memory is indexed through views whose
elements have `total` bytes (`typed`), which is much faster than byte by byte.
"""

from __future__ import annotations

import numpy as np

from .errors import VirtualGpuError
from .memory import BARRIER, GENERIC, RANK_SHIFT, RESERVED, SharedMemory

FLAT = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64),
        16: np.dtype(np.complex128), 32: np.dtype("V32")}  # elements are moved, never computed with
_STORED = {n: np.frombuffer(bytes([GENERIC] * n), t)[0] for n, t in FLAT.items()}
_SHIFT = {n: np.uint64(n.bit_length() - 1) for n in FLAT}
_BYTES = {n: np.arange(n, dtype=np.int64) for n in FLAT}
_USABLE = {n: bytes_ + RESERVED for n, bytes_ in _BYTES.items()}


def typed(owner, name: str, total: int) -> tuple[np.ndarray, int]:
    """(view, address of its first element): the bytes `name` ("data" or "state") of a buffer or of a shared memory, in
    elements of `total` bytes. Shared memory's view starts behind the reserved bytes."""
    found = owner.views.get((name, total))
    if found is None:
        data = getattr(owner, name)
        data, start = (data[RESERVED:], RESERVED) if isinstance(owner, SharedMemory) else (data, owner.base)
        skip = -start % total
        count = max(0, len(data) - skip) // total
        found = owner.views[name, total] = data[skip:skip + count * total].view(FLAT[total]), start + skip
    return found


def active(warp, address) -> np.ndarray:
    """uint64[active lanes]: their addresses."""
    if type(address) is int:
        return np.full(warp.count, address, np.uint64)
    if address is None:
        raise VirtualGpuError("uninitialised", "the address is read from a register that was never written")
    a = address if warp.count == 32 else address[warp.mask]
    return a if a.dtype == np.uint64 else a.astype(np.uint64)


def lane_of(warp, i: int) -> int:
    """The lane number of the i-th active lane."""
    return int(np.flatnonzero(warp.mask)[i])


def require_aligned(warp, addresses: np.ndarray, total: int) -> None:
    """Raise `misaligned` unless every address is a multiple of `total`."""
    if total > 1 and int(np.bitwise_or.reduce(addresses)) & (total - 1):
        i = int(np.argmax((addresses & np.uint64(total - 1)) != 0))
        raise VirtualGpuError("misaligned", f"address {int(addresses[i]):#x} is not a multiple of {total}",
                              lane=lane_of(warp, i))


def gather(warp, space: str, address, total: int, what: str) -> np.ndarray:
    """FLAT[total][active lanes]: what they read."""
    if space == "local":
        return _local(warp, address, total)
    addresses = active(warp, address)
    require_aligned(warp, addresses, total)
    if space in ("global", "const"):
        view, index = _global(warp, addresses, total)
        return view[index] if view is not None else _gather_scattered(warp, addresses, total)
    if space == "param":
        table = np.frombuffer(warp.grid.params, np.uint8)
        if int(addresses.max()) + total > len(table):
            raise VirtualGpuError("out of bounds", f"parameter bytes up to {int(addresses.max()) + total}; the kernel "
                                  f"has {len(table)}")
        return table[addresses.astype(np.int64)[:, None] + _BYTES[total]].view(FLAT[total])[:, 0]
    parts = shared_parts(warp, space, addresses, total, False, what)
    if len(parts) == 1:
        return _gather_shared(*parts[0][:2], total, what)
    out = np.empty(len(addresses), FLAT[total])
    for cta, relative, where in parts:
        out[where] = _gather_shared(cta, relative, total, what)
    return out


def scatter(warp, space: str, address, total: int, values: np.ndarray, what: str) -> None:
    """Write FLAT[total][active lanes]; where lanes write one address the last of them stays."""
    if space == "local":
        _local(warp, address, total, values)
        return
    addresses = active(warp, address)
    require_aligned(warp, addresses, total)
    if space == "global":
        view, index = _global(warp, addresses, total)
        if view is not None:
            view[index] = values
        else:
            _scatter_scattered(warp, addresses, values)
        counters = warp.grid.counters
        counters["global_writes"] += 1
        counters["global_store_bytes"] += values.nbytes
    elif space.startswith("shared"):
        for cta, relative, where in shared_parts(warp, space, addresses, total, True, what):
            index = mark_stored(warp, cta, relative, total)
            typed(cta.smem, "data", total)[0][index] = values[where]
    else:
        raise VirtualGpuError("unsupported", f"{what}: stores to {space} memory")


# --- local memory --------------------------------------------------------------------------------


def _local(warp, address, total: int, values=None):
    """Read, or write `values`, in the threads' own memory."""
    size = 0 if warp.local is None else warp.local.shape[1]
    addresses = active(warp, address)
    require_aligned(warp, addresses, total)
    if int(addresses.max()) + total > size:
        raise VirtualGpuError("out of bounds", f"local access up to byte {int(addresses.max()) + total}; the local "
                              f"variables of a thread have {size}", lane=lane_of(warp, int(addresses.argmax())))
    lanes = np.flatnonzero(warp.mask)[:, None]
    index = addresses.astype(np.int64)[:, None] + _BYTES[total]
    if values is None:
        return warp.local[lanes, index].view(FLAT[total])[:, 0]
    warp.local[lanes, index] = np.ascontiguousarray(values).view(np.uint8).reshape(-1, total)
    return None


# --- global memory -------------------------------------------------------------------------------


def _global(warp, addresses: np.ndarray, total: int):
    """(view, index) of the lanes' elements; (None, None) where they lie in several buffers."""
    memory = warp.grid.memory
    try:
        b = memory.buffer(int(addresses[0]), total)
    except VirtualGpuError as e:
        e.lane = lane_of(warp, 0)
        raise
    view, origin = typed(b, "data", total)
    index = (addresses - np.uint64(origin)) >> _SHIFT[total]
    if int(index.max()) < len(view):
        return view, index.view(np.int64)
    for i, a in enumerate(addresses.tolist()):
        try:
            memory.buffer(a, total)
        except VirtualGpuError as e:
            e.lane = lane_of(warp, i)
            raise
    return None, None


def _gather_scattered(warp, addresses, total: int) -> np.ndarray:
    memory = warp.grid.memory
    return np.concatenate([memory.view(a, total) for a in addresses.tolist()]).view(FLAT[total])


def _scatter_scattered(warp, addresses, values) -> None:
    memory, total = warp.grid.memory, values.itemsize
    for a, row in zip(addresses.tolist(), np.ascontiguousarray(values).view(np.uint8).reshape(-1, total), strict=True):
        memory.view(a, total)[...] = row


# --- shared memory -------------------------------------------------------------------------------


def shared_parts(warp, space: str, addresses: np.ndarray, total: int, writes: bool, what: str) -> list:
    """[(cta, addresses relative to its first usable byte, which lanes)], one a CTA, checked.

    "shared" reaches the executing CTA only, "shared::cluster" all of the cluster.
    """
    cluster = warp.cta.cluster
    rank = warp.cta.rank if space == "shared" else int(addresses[0]) >> RANK_SHIFT
    cta, _ = cluster.resolve(rank << RANK_SHIFT, what)
    relative = addresses - np.uint64(rank << RANK_SHIFT | RESERVED)
    if int(relative.max()) <= cta.smem.limit - RESERVED - total:
        parts = [(cta, relative, slice(None))]
    else:
        parts = _split(warp, space, addresses, total, what)
    for cta, relative, _ in parts:
        if cta.exited:
            raise VirtualGpuError("race", f"{what} touches the shared memory of CTA {cta.id}, which has exited")
        if cta.writing or (writes and cta.reading):
            _check_inflight(cta, relative, total, writes, what)
    return parts


def _split(warp, space: str, addresses: np.ndarray, total: int, what: str) -> list:
    """The parts of an access to several CTAs, or the error of the first lane whose address is wrong."""
    parts = {}
    for i, a in enumerate(addresses.tolist()):
        rank, lane = a >> RANK_SHIFT, lane_of(warp, i) if len(addresses) == warp.count else None
        if space == "shared" and rank != warp.cta.rank:
            raise VirtualGpuError("out of bounds", f"{what}: shared address {a:#x} is not in the window of the "
                                  "executing CTA (.shared::cluster reaches the others)", lane=lane)
        cta, offset = warp.cta.cluster.resolve(a, what)
        cta.smem.check(offset, total, 1, lane)
        parts.setdefault(rank, []).append(i)
    return [(warp.cta.cluster.ctas[rank], addresses[where] - np.uint64(rank << RANK_SHIFT | RESERVED), where)
            for rank, where in parts.items()]


def gather_rows(warp, addresses: np.ndarray, total: int, what: str) -> np.ndarray:
    """uint8[addresses, total]: rows of the executing CTA's shared memory, not one a lane."""
    ((cta, relative, _),) = shared_parts(warp, "shared", addresses, total, False, what)
    return _gather_shared(cta, relative, total, what).view(np.uint8).reshape(-1, total)


def _check_inflight(cta, relative: np.ndarray, total: int, writes: bool, what: str) -> None:
    """Raise `race` where a lane's bytes overlap an operation in flight and one of the two writes."""
    offsets = relative + np.uint64(RESERVED)
    low, high = int(offsets.min()), int(offsets.max()) + total
    groups = [("writes", cta.writing)] + ([("reads", cta.reading)] if writes else [])
    for other, ops in groups:
        for op, spans in ops.items():
            for lo, hi in spans:
                if low < hi and lo < high and ((offsets < hi) & (offsets + np.uint64(total) > lo)).any():
                    raise cta.overlap(low, high, writes, what, op, other)


def _gather_shared(cta, relative: np.ndarray, total: int, what: str) -> np.ndarray:
    index = (relative >> _SHIFT[total]).view(np.int64)
    if not typed(cta.smem, "state", total)[0][index].view(np.uint8).all():
        cta.smem.require_written(byte_index(relative, total), what)
    return typed(cta.smem, "data", total)[0][index]


def byte_index(relative: np.ndarray, total: int) -> np.ndarray:
    """int64[lanes, total]: offsets of every byte."""
    return relative.view(np.int64)[:, None] + _USABLE[total]


def mark_stored(warp, cta, relative: np.ndarray, total: int) -> np.ndarray:
    """Note an ordinary store: the bytes are written, and the asynchronous proxy does not see them yet. Returns the
    index of the elements in the typed views."""
    smem = cta.smem
    index = (relative >> _SHIFT[total]).view(np.int64)
    low, high = int(relative.min()) + RESERVED, int(relative.max()) + RESERVED + total
    state = typed(smem, "state", total)[0]
    if cta.mbarriers and low < max(cta.mbarriers) + 8 and min(cta.mbarriers) < high and (
            state[index].view(np.uint8) == BARRIER).any():
        raise VirtualGpuError("mbarrier", "an ordinary store overwrites a live mbarrier object (mbarrier.inval first)")
    state[index] = _STORED[total]
    writer = warp.index if cta is warp.cta else (warp.cta.rank, warp.index)
    smem.dirty.append((writer, warp.cta.cluster.next_sequence(), byte_index(relative, total), low, high))
    return index
