"""Tensor copies by TMA (PTX ISA, cp.async.bulk.tensor): loads, stores and reductions, every swizzle, ragged edges.

The innermost coordinate is always a multiple of 16 bytes, except where a probe asks what happens if it is not.
"""

from __future__ import annotations

import numpy as np

from .assembler import Kernel
from .model import ELEMENT_SIZES, SWIZZLES, Buffer, Probe, Scalar, TensorMap, random_bytes

POISON = 0xC3C3C3C3  # what shared memory holds where a load writes nothing
SPAN = {"none": 64, "32B": 32, "64B": 64, "128B": 128}  # inner box bytes used here for each swizzle
EVICT_FIRST = 0x12F0000000000000


def pad(value: int, multiple: int) -> int:
    """`value` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def dense_strides(dims: tuple[int, ...], size: int, gap: int = 16) -> tuple[int, ...]:
    """Byte strides of dims 1 and up, each multiple of 16, with at least `gap` unused bytes after each row."""
    strides, step = [], int(pad(int(dims[0] * size) + gap, 16))
    for extent in dims[1:]:
        strides.append(step)
        step *= extent
    return tuple(strides)


def footprint(dims: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Bytes of memory that a tensor of these strides takes, the gap after the last row included."""
    return strides[-1] * dims[-1] if strides else dims[0] * 8


def load_ptx(rank: int, space: str = "shared::cluster", hint: bool = False) -> str:
    """Parameters: map, out, the tensor's buffer (not read), image bytes, destination offset, bytes, coordinates.

    Poisons the shared image, loads one box into it, copies the image to `out`. The mbarrier follows the image.
    """
    k = Kernel("map", "u64", "u64", "u32", "u32", "u32", *["u32"] * rank, shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    tensor_map = k.map_address(0)
    out, image, offset, expected = k.pointer(1), k.scalar(3), k.scalar(4), k.scalar(5)
    coordinates = ", ".join(k.scalar(6 + i) for i in range(rank))
    if hint:
        k(f"prefetch.tensormap [{tensor_map}];")
    barrier = k.b32(f"add.u32 $, {base}, {image};")
    target = k.b32(f"add.u32 $, {base}, {offset};")
    k.fill_shared(base, image, hex(POISON))
    with k.thread(tid):
        k.barrier_init(barrier, 1)
    k("fence.proxy.async.shared::cta;", "bar.sync 0;")
    with k.thread(tid):
        k(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [{barrier}], {expected};")
        suffix, policy = "", ""
        if hint:
            suffix, policy = ".L2::cache_hint", ", " + k.b64(f"mov.b64 $, {EVICT_FIRST:#x};")
        k(f"cp.async.bulk.tensor.{rank}d.{space}.global.tile.mbarrier::complete_tx::bytes{suffix} "
          f"[{target}], [{tensor_map}, {{{coordinates}}}], [{barrier}]{policy};")
    k.wait(barrier, 0)
    k.shared_to_global(out, base, image)
    return k.text()


def store_ptx(rank: int, operation: str | None = None) -> str:
    """Parameters: map, target (the tensor's buffer), source, image bytes, source offset, coordinates.

    Copies `source` into shared memory and stores (or reduces) one box from it through the map.
    """
    k = Kernel("map", "u64", "u64", "u32", "u32", *["u32"] * rank, shared=True)
    tid = k.b32("mov.u32 $, %tid.x;")
    base = k.b32("mov.u32 $, smem;")
    tensor_map = k.map_address(0)
    source, image, offset = k.pointer(2), k.scalar(3), k.scalar(4)
    coordinates = ", ".join(k.scalar(5 + i) for i in range(rank))
    start = k.b32(f"add.u32 $, {base}, {offset};")
    k.global_to_shared(base, source, image)
    k("fence.proxy.async.shared::cta;", "bar.sync 0;")
    with k.thread(tid):
        name = f"cp.reduce.async.bulk.tensor.{rank}d" if operation else f"cp.async.bulk.tensor.{rank}d"
        action = f".{operation}" if operation else ""
        k(f"{name}.global.shared::cta{action}.tile.bulk_group [{tensor_map}, {{{coordinates}}}], [{start}];",
          "cp.async.bulk.commit_group;", "cp.async.bulk.wait_group 0;")
    return k.text()


def load_probe(name: str, tensor: dict, coordinates: tuple[int, ...], *, offset: int = 0, seed: int = 1,
               data: bytes | None = None, may_stop: bool = False, group: str = "tma_load", expected: int | None = None,
               **kernel) -> Probe:
    """One load of `tensor` (fields of `TensorMap`) at `coordinates` to shared offset `offset`.

    expected: transaction bytes, those of the box if not given. kernel: options of `load_ptx`.
    """
    size = ELEMENT_SIZES[tensor["dtype"]]
    dims = tensor["dims"]
    strides = tensor.get("strides") or dense_strides(dims, size)
    spec = TensorMap(buffer=2, **{**tensor, "strides": strides})
    image = pad(offset + spec.shared_bytes() + 64, 64)
    source = data or random_bytes(footprint(dims, strides), seed)
    args = (spec, Buffer(bytes(image), output=True), Buffer(source), Scalar(image), Scalar(offset),
            Scalar(expected or spec.box_bytes()), *(Scalar(c & 0xFFFFFFFF) for c in coordinates))
    return Probe(f"{group}/{name}", load_ptx(len(dims), **kernel), args, block=(64, 1, 1), shared_bytes=image + 16,
                 may_stop=may_stop)


def swizzle_loads() -> list[Probe]:
    """Every swizzle with three element types; shared destinations off the swizzle's natural alignment; narrow boxes."""
    probes = []
    for dtype in ("u8", "u16", "f32"):
        for swizzle in SWIZZLES:
            size = ELEMENT_SIZES[dtype]
            inner = SPAN[swizzle] // size
            tensor = dict(dtype=dtype, dims=(inner + 16 // size - 3, 20), box=(inner, 16), swizzle=swizzle)
            probes.append(load_probe(f"2d_{dtype}_{swizzle}", tensor, (16 // size, 2)))
    for swizzle, offsets in {"none": (128,), "32B": (128,), "64B": (128, 256), "128B": (128, 384, 896)}.items():
        for offset in offsets:
            tensor = dict(dtype="u16", dims=(SPAN[swizzle] // 2, 12), box=(SPAN[swizzle] // 2, 9), swizzle=swizzle)
            probes.append(load_probe(f"2d_u16_{swizzle}_at_{offset}", tensor, (0, 1), offset=offset))
    for swizzle, inner in (("32B", 16), ("64B", 16), ("64B", 48), ("128B", 16), ("128B", 64), ("128B", 96)):
        tensor = dict(dtype="u8", dims=(inner + 13, 18), box=(inner, 16), swizzle=swizzle)
        probes.append(load_probe(f"2d_u8_{swizzle}_inner_{inner}", tensor, (16, 1)))
    return probes


def rank_loads() -> list[Probe]:
    """Ranks 1, 3, 4, 5, inside the tensor and hanging over its edges."""
    probes = []
    shapes = {1: ((80,), (32,)), 3: ((40, 6, 5), (32, 4, 3)), 4: ((20, 4, 4, 3), (16, 3, 2, 2)),
              5: ((20, 3, 3, 3, 3), (16, 2, 2, 2, 2))}
    for rank, (dims, box) in shapes.items():
        for swizzle in SWIZZLES:
            if box[0] * 2 > SPAN[swizzle] and swizzle != "none":
                continue
            tensor = dict(dtype="u16", dims=dims, box=box, swizzle=swizzle)
            probes.append(load_probe(f"{rank}d_u16_{swizzle}", tensor, (8, *[1] * (rank - 1))))
        tensor = dict(dtype="u16", dims=dims, box=box)
        probes.append(load_probe(f"{rank}d_u16_low_edge", tensor, (-8, *[-1] * (rank - 1))))
        high = ((dims[0] - box[0]) // 8 * 8 + 8, *(d - b + 1 for d, b in zip(dims[1:], box[1:], strict=True)))
        probes.append(load_probe(f"{rank}d_u16_high_edge", tensor, high))
    return probes


def edge_loads() -> list[Probe]:
    """Out-of-bounds elements on each side of a 13 x 10 tensor read through an 8 x 8 box of f32."""
    sides = {"left": (-4, 1), "right": (8, 1), "last": (12, 1), "below": (4, -5), "above": (4, 7), "corner": (-4, -1),
             "far_corner": (12, 9), "all_left": (-8, 0), "all_right": (16, 0), "all_above": (0, 10),
             "far_away": (-2147483648, 2147483647)}
    probes = []
    for side, at in sides.items():
        tensor = dict(dtype="f32", dims=(13, 10), box=(8, 8), swizzle="32B")
        probes.append(load_probe(f"2d_f32_outside_{side}", tensor, at))
    for dtype, inner in (("u8", 32), ("f16", 16), ("bf16", 16), ("f32", 8), ("f64", 4)):
        tensor = dict(dtype=dtype, dims=(inner // 2 - 1, 5), box=(inner, 4), nan_fill=dtype != "u8")
        probes.append(load_probe(f"2d_{dtype}_{'zero' if dtype == 'u8' else 'nan'}_fill", tensor, (-inner // 2, -1)))
    return probes


def stride_loads() -> list[Probe]:
    """Element (traversal) strides, also over the edges."""
    probes = []
    for steps, at in (((1, 2), (0, 0)), ((1, 2), (8, -3)), ((1, 3), (0, 6)), ((2, 1), (0, 0)), ((2, 2), (8, 1))):
        tensor = dict(dtype="u16", dims=(24, 14), box=(16, 8), element_strides=steps)
        name = f"2d_u16_steps_{steps[0]}_{steps[1]}_at_{at[0]}_{at[1]}".replace("-", "m")
        probes.append(load_probe(name, tensor, at))
    tensor = dict(dtype="u16", dims=(16, 7, 7), box=(16, 4, 5), element_strides=(1, 2, 2), swizzle="32B")
    probes.append(load_probe("3d_u16_steps_1_2_2_32B", tensor, (0, 1, 0)))
    return probes


def special_loads() -> list[Probe]:
    """Float types with conversions, the other element types, the shared::cta destination, a cache hint."""
    bits = [0, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x3F800FFF, 0x3F801000, 0x3F803000, 0x3F801001,
            0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345]
    floats = np.array(bits * 8, np.uint32).tobytes()
    probes = []
    for dtype in ("f32", "f32_ftz", "tf32", "tf32_ftz"):
        tensor = dict(dtype=dtype, dims=(16, 8), box=(16, 4), strides=(64,))
        probes.append(load_probe(f"2d_{dtype}_special_values", tensor, (0, 1), data=floats))
    for dtype in ("u32", "s32", "u64", "s64", "f16", "bf16"):
        inner = 32 // ELEMENT_SIZES[dtype]
        tensor = dict(dtype=dtype, dims=(inner + 1, 9), box=(inner, 4), swizzle="32B")
        probes.append(load_probe(f"2d_{dtype}", tensor, (inner // 2, 6)))
    tensor = dict(dtype="u16", dims=(40, 9), box=(32, 4), swizzle="64B")
    probes.append(load_probe("2d_u16_shared_cta", tensor, (8, 1), space="shared::cta"))
    probes.append(load_probe("2d_u16_cache_hint", tensor, (8, 1), hint=True))
    return probes


def store_probe(name: str, tensor: dict, coordinates: tuple[int, ...], *, offset: int = 0, operation: str | None = None,
                source: bytes | None = None, target: bytes | None = None, may_stop: bool = False,
                group: str | None = None) -> Probe:
    """One store (or reduction) of a box into a tensor that lies inside a buffer with 64 guard bytes on each side."""
    size = ELEMENT_SIZES[tensor["dtype"]]
    dims = tensor["dims"]
    strides = tensor.get("strides") or dense_strides(dims, size)
    spec = TensorMap(buffer=1, offset=64, **{**tensor, "strides": strides})
    image = pad(offset + spec.shared_bytes(), 64)
    memory = footprint(dims, strides)
    inner = target if target is not None else b"\xA5" * memory
    buffer = Buffer(b"\xA5" * 64 + inner.ljust(memory, b"\xA5") + b"\xA5" * 64, output=True)
    content = source if source is not None else random_bytes(image, 2)
    args = (spec, buffer, Buffer(content.ljust(image, b"\0")), Scalar(image), Scalar(offset),
            *(Scalar(c & 0xFFFFFFFF) for c in coordinates))
    group = group or ("tma_reduce" if operation else "tma_store")
    return Probe(f"{group}/{name}", store_ptx(len(dims), operation), args, block=(64, 1, 1), shared_bytes=image,
                 may_stop=may_stop)


def store_probes() -> list[Probe]:
    """Stores: every swizzle, off-phase sources, every edge, every rank."""
    probes = []
    for dtype in ("u8", "u16", "f32"):
        for swizzle in SWIZZLES:
            size = ELEMENT_SIZES[dtype]
            inner = SPAN[swizzle] // size
            tensor = dict(dtype=dtype, dims=(inner + 16 // size - 3, 10), box=(inner, 8), swizzle=swizzle)
            probes.append(store_probe(f"2d_{dtype}_{swizzle}", tensor, (16 // size, 1)))
    for swizzle, offset in (("64B", 128), ("128B", 128), ("128B", 640)):
        tensor = dict(dtype="u16", dims=(SPAN[swizzle] // 2, 9), box=(SPAN[swizzle] // 2, 9), swizzle=swizzle)
        probes.append(store_probe(f"2d_u16_{swizzle}_from_{offset}", tensor, (0, 0), offset=offset))
    for side, at in {"right": (8, 1), "above": (4, 7), "far_corner": (12, 9), "all_right": (16, 0),
                     "all_above": (0, 10)}.items():
        tensor = dict(dtype="f32", dims=(13, 10), box=(8, 8), swizzle="32B")
        probes.append(store_probe(f"2d_f32_outside_{side}", tensor, at))
    tensor = dict(dtype="f16", dims=(24, 6), box=(16, 4), swizzle="32B")
    probes.append(store_probe("2d_f16_whole_granules_right", tensor, (16, 3)))
    for dims, box in (((21,), (16,)), ((11, 4, 3), (8, 3, 2)), ((11, 3, 3, 3), (8, 2, 2, 2)),
                      ((11, 2, 3, 2, 3), (8, 2, 2, 2, 2))):
        rank = len(dims)
        tensor = dict(dtype="u16", dims=dims, box=box)
        high = (8, *(d - b + 1 for d, b in zip(dims[1:], box[1:], strict=True)))
        probes.append(store_probe(f"{rank}d_u16", tensor, (8, *[1] * (rank - 1))))
        probes.append(store_probe(f"{rank}d_u16_high_edge", tensor, high))
    for swizzle, inner in (("32B", 16), ("64B", 48), ("128B", 64)):
        tensor = dict(dtype="u8", dims=(inner + 13, 10), box=(inner, 8), swizzle=swizzle)
        probes.append(store_probe(f"2d_u8_{swizzle}_inner_{inner}", tensor, (16, 1)))
    tensor = dict(dtype="u16", dims=(8, 12), box=(8, 8), element_strides=(1, 2))
    probes.append(store_probe("2d_u16_steps_1_2", tensor, (0, 1)))
    return probes


def float_pairs(dtype: str, count: int) -> tuple[bytes, bytes]:
    """Two operand arrays of `count` elements: signed zeros, subnormals, infinities, NaNs, ties, then random bits."""
    special = {"f32": [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x3F800000, 0xBF800000,
                       0x33800000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001],
               "f16": [0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x1000, 0x7BFF, 0x7C00, 0xFC00,
                       0x7E00, 0x7C01],
               "bf16": [0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3B80, 0x7F7F, 0x7F80, 0xFF80,
                        0x7FC0, 0x7F81]}[dtype]
    kind = np.uint32 if dtype == "f32" else np.uint16
    random = np.random.RandomState(7)
    a = np.frombuffer(random.bytes(count * kind().itemsize), kind).copy()
    b = np.frombuffer(random.bytes(count * kind().itemsize), kind).copy()
    grid = [(x, y) for x in special for y in special][:count - 16]
    a[:len(grid)], b[:len(grid)] = zip(*grid, strict=True)
    return a.tobytes(), b.tobytes()


def reduce_probes() -> list[Probe]:
    """Reductions through a tensor map: sums with rounding, subnormals and NaN; integer and bitwise operations."""
    probes = []
    for dtype, inner in (("f32", 16), ("f16", 32), ("bf16", 32)):
        rows = 256 // inner
        source, target = float_pairs(dtype, 256)
        tensor = dict(dtype=dtype, dims=(inner, rows), strides=(inner * ELEMENT_SIZES[dtype],), box=(inner, rows))
        for operation in ("add",) if dtype == "f32" else ("add", "min", "max"):
            probes.append(store_probe(f"2d_{dtype}_{operation}", tensor, (0, 0), operation=operation, source=source,
                                      target=target))
    tensor = dict(dtype="f32", dims=(11, 6), box=(8, 4), swizzle="32B")
    probes.append(store_probe("2d_f32_add_ragged", tensor, (4, 3), operation="add",
                              source=np.arange(1, 33, dtype=np.float32).tobytes(),
                              target=np.arange(0, 96, dtype=np.float32).tobytes()))
    for dtype, operations in (("u32", ("add", "min", "max", "inc", "dec", "and", "or", "xor")), ("s32", ("min", "max")),
                              ("u64", ("add",))):
        for operation in operations:
            size = ELEMENT_SIZES[dtype]
            tensor = dict(dtype=dtype, dims=(8, 6), strides=(8 * size,), box=(8, 6))
            probes.append(store_probe(f"2d_{dtype}_{operation}", tensor, (16 // size, 1), operation=operation,
                                      source=random_bytes(48 * size, 3), target=random_bytes(48 * size, 4)))
    return probes


def stops() -> list[Probe]:
    """What the hardware or the driver refuses: innermost coordinates and shared addresses off their alignment, fills
    and element types that do not go together. Each probe records what happens."""
    probes = []
    ask = dict(may_stop=True, group="stops")
    for dtype, x in (("u8", 8), ("u8", -3), ("u16", 1), ("u16", 4), ("f32", 2), ("f32", -1), ("u64", 1)):
        size = ELEMENT_SIZES[dtype]
        tensor = dict(dtype=dtype, dims=(96 // size, 6), box=(32 // size, 4))
        name = f"tma_load_{dtype}_x_{x}".replace("-", "m")
        probes.append(load_probe(name, tensor, (x, 1), **ask))
    tensor = dict(dtype="u16", dims=(48, 4, 3), box=(16, 2, 2), swizzle="32B")
    probes.append(load_probe("tma_load_3d_x_2", tensor, (2, 1, 1), **ask))
    tensor = dict(dtype="u16", dims=(48,), box=(16,))
    probes.append(load_probe("tma_load_1d_x_1", tensor, (1,), **ask))
    tensor = dict(dtype="u16", dims=(48, 6), box=(16, 4))
    probes.append(store_probe("tma_store_x_1", tensor, (1, 1), **ask))
    probes.append(store_probe("tma_store_x_m1", tensor, (-1, 1), **ask))
    tensor = dict(dtype="u32", dims=(24, 6), box=(8, 4))
    probes.append(store_probe("tma_reduce_x_1", tensor, (1, 1), operation="add", **ask))
    for name, at in {"left": (-4, 1), "below": (4, -5), "corner": (-4, -1)}.items():
        tensor = dict(dtype="f32", dims=(13, 10), box=(8, 8), swizzle="32B")
        probes.append(store_probe(f"tma_store_outside_{name}", tensor, at, **ask))
        probes.append(store_probe(f"tma_reduce_outside_{name}", tensor, at, operation="add", **ask))
    tensor = dict(dtype="u8", dims=(64, 6), box=(48, 4), swizzle="64B")
    probes.append(load_probe("tma_load_narrow_box_expecting_whole_rows", tensor, (0, 1), expected=256, **ask))
    for swizzle in SWIZZLES:
        for offset in (16, 32, 64):
            tensor = dict(dtype="u16", dims=(SPAN[swizzle] // 2, 6), box=(SPAN[swizzle] // 2, 4), swizzle=swizzle)
            probes.append(load_probe(f"tma_load_{swizzle}_to_{offset}", tensor, (0, 1), offset=offset, **ask))
    tensor = dict(dtype="u16", dims=(32, 6), box=(32, 4))
    probes.append(load_probe("tma_load_to_8", tensor, (0, 1), offset=8, **ask))
    probes.append(store_probe("tma_store_from_16", tensor, (0, 1), offset=16, **ask))
    probes.append(store_probe("tma_store_from_64", tensor, (0, 1), offset=64, **ask))
    tensor = dict(dtype="u16", dims=(9, 5), box=(8, 4), nan_fill=True)
    probes.append(load_probe("map_u16_nan_fill", tensor, (0, -1), **ask))
    tensor = dict(dtype="16u4_align8b", dims=(128, 9), strides=(64,), box=(64, 4), swizzle="32B")
    probes.append(load_probe("map_16u4_before_sm100", tensor, (0, 1), **ask))
    tensor = dict(dtype="u16", dims=(64, 6), box=(32, 4), swizzle="32B")
    probes.append(load_probe("map_box_wider_than_swizzle", tensor, (0, 1), **ask))
    tensor = dict(dtype="u16", dims=(64, 6), box=(12, 4))
    probes.append(load_probe("map_box_of_24_bytes", tensor, (0, 1), **ask))
    return probes


def probes() -> list[Probe]:
    """All of this module's probes."""
    return [*swizzle_loads(), *rank_loads(), *edge_loads(), *stride_loads(), *special_loads(), *store_probes(),
            *reduce_probes(), *stops()]
