"""Global and shared memory: bounds, alignment, and which bytes were ever written.

Global addresses are host addresses. A read or write must lie inside a buffer that is known: the storage of a
live CPU tensor of torch (found when an unknown address is first touched), or one named by `GlobalMemory.register`.

Shared memory of a CTA is one byte array. Addresses are those of the shared::cluster window: the CTA's rank in bits
24 and up, the byte offset below. The first 1024 bytes are reserved, as on hardware since sm_90 (CUDA programming
guide: 1 KB per CTA is taken by the system), so offset 0 is never valid.
"""

from __future__ import annotations

import bisect
import ctypes
import gc
import sys
import weakref

import numpy as np

from .errors import VirtualGpuError

RESERVED = 1024  # bytes at the start of every CTA's shared window
RANK_SHIFT = 24  # a shared::cluster address is rank << 24 | offset
OFFSET_MASK = (1 << RANK_SHIFT) - 1

# state of a shared byte
UNWRITTEN, GENERIC, CLEAN, BARRIER = 0, 1, 2, 3


class Buffer:
    """One allocation of global memory: bytes [base, base + size)."""

    __slots__ = ("base", "end", "data", "alive", "views")

    def __init__(self, base: int, size: int, alive=None):
        self.base = base
        self.end = base + size
        self.data = np.frombuffer((ctypes.c_uint8 * size).from_address(base), dtype=np.uint8)
        self.alive = alive  # weak reference to the tensor that keeps the memory; None: the caller does
        self.views: dict = {}  # see `access.typed`


def _storages(torch) -> list[Buffer]:
    """The storages of all live CPU tensors."""
    class IsTensor(dict):
        """type -> whether it is a tensor's; there are many objects and few types."""

        def __missing__(self, kind: type) -> bool:
            self[kind] = issubclass(kind, torch.Tensor)
            return self[kind]

    found, is_tensor = [], IsTensor()
    for obj in [o for o in gc.get_objects() if is_tensor[type(o)]]:
        try:
            if obj.device.type != "cpu" or obj.layout != torch.strided:
                continue
            storage = obj.untyped_storage()
            base, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):
            continue
        if base and size:
            found.append(Buffer(base, size, weakref.ref(obj)))
    return found


class GlobalMemory:
    """Every buffer a kernel may touch, sorted by address."""

    def __init__(self):
        self._bases: list[int] = []
        self._buffers: list[Buffer] = []
        self._last: Buffer | None = None
        self._named: list[Buffer] = []
        self._owners: dict[int, object] = {}  # what keeps the memory of a named buffer, by address

    def register(self, address: int, size: int, owner=None) -> None:
        """Make `size` bytes at host address `address` known. `owner` or the caller keeps them alive until `forget`."""
        if size <= 0:
            raise ValueError(f"size: {size} bytes; must be at least 1")
        self._named.append(Buffer(address, size))
        if owner is not None:
            self._owners[address] = owner
        self._index(self._named + self._buffers)

    def registered(self, address: int) -> bool:
        """Does a buffer made known by `register` start at `address`?"""
        return any(b.base == address for b in self._named)

    def forget(self, address: int) -> None:
        """Drop a buffer made known by `register`."""
        self._named = [b for b in self._named if b.base != address]
        self._owners.pop(address, None)
        self.refresh()

    def refresh(self) -> None:
        """Forget buffers whose tensor is gone; called at each launch."""
        self._index([b for b in self._buffers if b in self._named or (b.alive is not None and b.alive() is not None)])

    def _index(self, buffers: list[Buffer]) -> None:
        unique = {}
        for b in buffers + self._named:
            if b.base not in unique or unique[b.base].end < b.end:
                unique[b.base] = b
        self._buffers = [unique[k] for k in sorted(unique)]
        self._bases = [b.base for b in self._buffers]
        self._last = None

    def _scan(self) -> None:
        """Learn the storages of all live CPU tensors."""
        torch = sys.modules.get("torch")
        if torch is None:
            return
        with torch._C.DisableTorchFunction():  # a mode may say of CPU tensors that they are elsewhere
            self._index(self._buffers + _storages(torch))

    def _lookup(self, address: int) -> Buffer | None:
        i = bisect.bisect_right(self._bases, address) - 1
        return self._buffers[i] if i >= 0 and address < self._buffers[i].end else None

    def buffer(self, address: int, size: int) -> Buffer:
        """The buffer that holds [address, address + size), or an `out of bounds` error."""
        b = self._last
        if b is not None and b.base <= address and address + size <= b.end:
            return b
        b = self._lookup(address)
        if b is None or address + size > b.end:
            self._scan()
            b = self._lookup(address)
        if b is None or address + size > b.end:
            raise VirtualGpuError("out of bounds", self._explain(address, size))
        self._last = b
        return b

    def _explain(self, address: int, size: int) -> str:
        out = f"global access of {size} bytes at {address:#x} is in no known buffer"
        i = bisect.bisect_right(self._bases, address) - 1
        near = [self._buffers[j] for j in (i, i + 1) if 0 <= j < len(self._buffers)]
        if near:
            b = min(near, key=lambda x: min(abs(address - x.base), abs(address - x.end)))
            where = f"{b.base - address} bytes before" if address < b.base else f"{address + size - b.end} bytes past"
            out += f"; nearest: {where} the {'start' if address < b.base else 'end'} of [{b.base:#x}, {b.end:#x})"
        return out

    def view(self, address: int, size: int) -> np.ndarray:
        """uint8[size], a writable view of global memory at `address`."""
        b = self.buffer(address, size)
        return b.data[address - b.base:address - b.base + size]

    def check(self, address: int, size: int, align: int, lane: int | None = None) -> None:
        """Raise unless the access is aligned to `align` bytes and in bounds."""
        if address % align:
            raise VirtualGpuError("misaligned", f"global address {address:#x} is not a multiple of {align}", lane=lane)
        try:
            self.buffer(address, size)
        except VirtualGpuError as e:
            raise e.place(lane=lane) from None


class SharedMemory:
    """One CTA's shared memory.

    data: uint8[limit], poisoned with 0xff; state: uint8[limit], one of UNWRITTEN, GENERIC (written by ordinary
    stores, not yet fenced for the asynchronous proxy), CLEAN, BARRIER (an mbarrier object).
    Offsets are byte offsets in the CTA's window (rank bits removed).
    """

    def __init__(self, size: int, rank: int = 0):
        self.rank = rank
        self.limit = RESERVED + size
        self.data = np.full(self.limit, 0xFF, np.uint8)
        self.state = np.zeros(self.limit, np.uint8)
        self.views: dict = {}  # see `access.typed`
        self.dirty: list[tuple] = []  # (warp, sequence number, index into state, low, high) of GENERIC bytes

    def check(self, offset: int, size: int, align: int, lane: int | None = None) -> None:
        """Raise unless [offset, offset + size) is inside the window and offset a multiple of `align`."""
        if offset % align:
            raise VirtualGpuError("misaligned", f"shared address {offset:#x} is not a multiple of {align}", lane=lane)
        if offset < RESERVED or offset + size > self.limit:
            raise VirtualGpuError(
                "out of bounds", f"shared access of {size} bytes at {offset:#x}; the CTA has "
                f"[{RESERVED:#x}, {self.limit:#x})", lane=lane)

    def require_written(self, index, what: str) -> None:
        """Raise `uninitialised` if a byte that `index` (slice or array of offsets) selects was never written."""
        state = self.state[index]
        if not state.all():
            first = int(np.argmin(state))
            offset = int(np.ravel(np.arange(self.limit)[index])[first])
            raise VirtualGpuError("uninitialised", f"{what} reads shared byte {offset:#x}, which was never written")

    def require_async_visible(self, index, what: str) -> None:
        """For a read through the asynchronous proxy (TMA store, tcgen05.mma/cp): every byte written, and every
        ordinary store followed by fence.proxy.async (PTX ISA, memory consistency model: proxies)."""
        state = self.state[index]
        if state.min(initial=CLEAN) == CLEAN and state.max(initial=CLEAN) == CLEAN:
            return
        self.require_written(index, what)
        self.require_fenced(index, what)
        raise VirtualGpuError("mbarrier", f"{what} reads an mbarrier object as data")

    def require_fenced(self, index, what: str) -> None:
        """Raise `proxy fence` if an ordinary store to a byte of `index` is not followed by fence.proxy.async."""
        if type(index) is slice and not self._dirty_within(index.start, index.stop):
            return
        dirty = np.ravel(self.state[index]) == GENERIC
        if dirty.any():
            offset = int(np.ravel(np.arange(self.limit)[index])[int(np.argmax(dirty))])
            raise VirtualGpuError(
                "proxy fence", f"{what} reads shared byte {offset:#x}, written by an ordinary store with no "
                "fence.proxy.async since")

    def _dirty_within(self, low: int, high: int) -> bool:
        return any(record[3] < high and low < record[4] for record in self.dirty)

    def mark_generic(self, index, warp: int, sequence: int) -> None:
        """Record an ordinary store by `warp` to the bytes `index`."""
        if self.state[index].max(initial=0) == BARRIER:
            raise VirtualGpuError("mbarrier", "an ordinary store overwrites a live mbarrier object (no mbarrier.inval)")
        self.state[index] = GENERIC
        low, high = (index.start, index.stop) if type(index) is slice else (int(index.min()), int(index.max()) + 1)
        self.dirty.append((warp, sequence, index, low, high))

    def mark_async(self, index) -> None:
        """Record a write by an asynchronous unit (TMA load, bulk copy) to the bytes `index`."""
        if self.state[index].max(initial=0) == BARRIER:
            raise VirtualGpuError("mbarrier", "an asynchronous copy overwrites a live mbarrier object")
        self.state[index] = CLEAN

    def proxy_fence(self, warp: int, synced: int) -> None:
        """fence.proxy.async by `warp`, which last synchronised with others at sequence number `synced`."""
        keep = []
        for record in self.dirty:
            writer, sequence, index = record[:3]
            if writer == warp or (type(sequence) is int and sequence <= synced):
                part = self.state[index]
                self.state[index] = np.where(part == GENERIC, CLEAN, part)
            else:
                keep.append(record)
        self.dirty = keep
