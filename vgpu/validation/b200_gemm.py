"""Plain NVFP4 GEMMs in CuTeDSL that imitate kernels with published B200 timings: C[m, n] = A[m, k] * B[n, k]^T.

A and B are e2m1 with one e4m3 scale per 16 k. A CTA computes one 128 x `tile_n` tile of C (a `splits`-th of k), in one
of two ways:

    specialised       warps 0..3 store, warp 4 multiplies, warp 5 loads ahead, `stages` k-tiles deep; 16-byte stores
    not specialised   warp 0 does, k-tile by k-tile: acquire a stage, load (`ahead` k-tiles further), wait, copy scales,
                      multiply, commit; then four warps store one element at a time

With more than one split the tiles are fp32 in a workspace [splits, m, n], which a second kernel sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
import numpy as np
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.cute.runtime import make_ptr

AB_TYPE, SF_TYPE = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
WARP, TILE_M, TILE_K, MMA_K, SF_VEC = 32, 128, 256, 64, 16
SFB_ROWS = 128  # an atom of scales has 128 rows, whatever the tile
ALIGNMENT = 1024  # bytes; the 128-byte swizzle repeats after as many
TMEM_COLUMNS = 256
TMEM_READY = 1  # named barrier: the storing warps have allocated tensor memory
SUM_THREADS, SUM_ELEMENTS = 256, 4  # of the summing kernel: threads of a CTA, consecutive elements of a thread


@dataclass(frozen=True)
class Config:
    """tile_n: 64 or 128. stages: k-tiles in shared memory. splits: parts of k, each a CTA. ahead: k-tiles by which the
    one warp's loads run ahead of its MMAs, below `stages`."""

    tile_n: int = 128
    stages: int = 4
    specialised: bool = True
    splits: int = 1
    ahead: int = 0

    @property
    def tile(self) -> tuple[int, int, int]:
        """(m, n, k) of a CTA's tile."""
        return TILE_M, self.tile_n, TILE_K

    @property
    def stage_bytes(self) -> int:
        """Bytes of A, B, SFA and SFB in one k-tile."""
        return (TILE_M + self.tile_n) * TILE_K // 2 + (TILE_M + SFB_ROWS) * TILE_K // SF_VEC

    @property
    def mma_warp(self) -> int:
        """The warp that multiplies."""
        return 4 if self.specialised else 0

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARP * (6 if self.specialised else 4)

    @property
    def vector(self) -> int:
        """Elements in one store."""
        return 16 * 8 // self.c_type.width if self.specialised else 1

    @property
    def c_type(self) -> Any:
        """fp16, or fp32 in the workspace."""
        return cutlass.Float16 if self.splits == 1 else cutlass.Float32

    @property
    def store_columns(self) -> int:
        """Accumulator columns in registers at a time."""
        return 32 if self.specialised else self.tile_n


class Operands(NamedTuple):
    """One thing for each of the four inputs."""

    a: Any
    b: Any
    sfa: Any
    sfb: Any


class Cta(NamedTuple):
    """What the warps share. coord: (tile of m, tile of n, split); smem: (MMA, MMA_MN, MMA_K, STAGE) each."""

    coord: Any
    k_tiles: Any  # of this split
    smem: Operands
    full: Any  # mbarriers [stages]: TMA's bytes have come
    empty: Any  # [stages]: the MMAs have read the stage
    done: Any  # [1]: the accumulator is complete
    tmem: Any  # shared word with the address of tensor memory


def make_mma(tile_n: int) -> cute.TiledMma:
    """tcgen05.mma of kind mxf4nvf4 with one scale per 16 numbers, one CTA."""
    shape = (TILE_M, tile_n, MMA_K)
    return cute.make_tiled_mma(
        tcgen05.MmaMXF4NVF4Op(SF_TYPE, shape, tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM))


def smem_layouts(config: Config) -> Operands:
    """(MMA, MMA_MN, MMA_K, STAGE) each."""
    mma, sfb_tile = make_mma(config.tile_n), (TILE_M, SFB_ROWS, TILE_K)
    return Operands(
        blackwell.make_smem_layout_a(mma, config.tile, AB_TYPE, config.stages),
        blackwell.make_smem_layout_b(mma, config.tile, AB_TYPE, config.stages),
        blockscaled.make_smem_layout_sfa(mma, config.tile, SF_VEC, config.stages),
        blockscaled.make_smem_layout_sfb(make_mma(SFB_ROWS), sfb_tile, SF_VEC, config.stages),
    )


def one_stage(layout: Any) -> Any:
    """(MMA, MMA_MN, MMA_K)."""
    return cute.slice_(layout, (None, None, None, 0))


def shared_memory(config: Config, coord: Any, k_tiles: Any) -> Cta:
    """Lays out shared memory."""
    layouts = smem_layouts(config)

    def room(dtype: Any, layout: Any) -> Any:
        return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout)], ALIGNMENT]

    @cute.struct
    class Storage:
        full: cute.struct.MemRange[cutlass.Int64, config.stages]
        empty: cute.struct.MemRange[cutlass.Int64, config.stages]
        done: cute.struct.MemRange[cutlass.Int64, 1]
        tmem: cute.struct.MemRange[cutlass.Int32, 1]
        a: room(AB_TYPE, layouts.a)
        b: room(AB_TYPE, layouts.b)
        sfa: room(SF_TYPE, layouts.sfa)
        sfb: room(SF_TYPE, layouts.sfb)

    storage = Storage(cute.arch.get_dyn_smem(cutlass.Int8, alignment=ALIGNMENT))
    smem = Operands(
        storage.a.get_tensor(layouts.a.outer, swizzle=layouts.a.inner),
        storage.b.get_tensor(layouts.b.outer, swizzle=layouts.b.inner),
        storage.sfa.get_tensor(layouts.sfa),
        storage.sfb.get_tensor(layouts.sfb),
    )
    return Cta(coord, k_tiles, smem, storage.full.data_ptr(), storage.empty.data_ptr(), storage.done.data_ptr(),
               storage.tmem.data_ptr())


def tensor_memory(config: Config, cta: Cta) -> tuple[Any, Any, Any, Any]:
    """The allocation; accumulator (MMA, MMA_M, MMA_N); SFA, SFB (MMA, MMA_MN, MMA_K), those of odd 64-wide tiles with
    the address of their own rows."""
    mma, layouts = make_mma(config.tile_n), smem_layouts(config)
    base = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, cta.tmem)
    accumulator = cute.make_tensor(base, mma.make_fragment_C(mma.partition_shape_C(config.tile[:2])).layout)
    sfa_base = base + tcgen05.find_tmem_tensor_col_offset(accumulator)
    sfa_layout = blockscaled.make_tmem_layout_sfa(mma, config.tile, SF_VEC, one_stage(layouts.sfa))
    sfa = cute.make_tensor(cute.recast_ptr(sfa_base, dtype=SF_TYPE), sfa_layout)
    sfb_base = sfa_base + tcgen05.find_tmem_tensor_col_offset(sfa)
    sfb_layout = blockscaled.make_tmem_layout_sfb(
        make_mma(SFB_ROWS), (TILE_M, SFB_ROWS, TILE_K), SF_VEC, one_stage(layouts.sfb))
    return base, accumulator, sfa, cute.make_tensor(cute.recast_ptr(sfb_base, dtype=SF_TYPE), sfb_layout)


def load_views(config: Config, cta: Cta, atoms: Operands, tensors: Operands) -> list[tuple[Any, Any]]:
    """For each operand the shared ((atom, rest), STAGE) and the global side ((atom, rest), k_tiles) of its copies."""
    mma, sfb_mma = make_mma(config.tile_n).get_slice(0), make_mma(SFB_ROWS).get_slice(0)
    tile_m, tile_n, _ = cta.coord
    sides = ((mma.partition_A, TILE_M, tile_m), (mma.partition_B, config.tile_n, tile_n),
             (mma.partition_A, TILE_M, tile_m), (sfb_mma.partition_B, SFB_ROWS, tile_n * config.tile_n // SFB_ROWS))
    views = []
    for atom, tensor, smem, (partition, rows, tile) in zip(atoms, tensors, cta.smem, sides, strict=True):
        tiles = cute.local_tile(tensor[None, None, 0], (rows, TILE_K), (tile, None))  # (rows, tile_k, k_tiles)
        smem_view, gmem_view = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(smem, 0, 3), cute.group_modes(partition(tiles), 0, 3))
        views.append((cute.filter_zeros(smem_view), cute.filter_zeros(gmem_view)))
    return views


@cute.jit
def load_tile(config: cutlass.Constexpr, cta: Cta, atoms: Operands, views: Any, k_tile: Any, state: Any):
    """Waits for a free stage and issues its four loads."""
    cute.arch.mbarrier_wait(cta.empty + state.index, state.phase)
    full = cta.full + state.index
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(full, config.stage_bytes)
    for i in cutlass.range_constexpr(len(views)):
        smem, gmem = views[i]
        cute.copy(atoms[i], gmem[None, cta.coord[2] * cta.k_tiles + k_tile], smem[None, state.index], tma_bar_ptr=full)


@cute.jit
def load_tail(config: cutlass.Constexpr, cta: Cta, state: Any):
    """The CTA may not end before the last arrivals at `empty`."""
    for _ in cutlass.range(config.stages, unroll=1):
        cute.arch.mbarrier_wait(cta.empty + state.index, state.phase)
        state.advance()


@cute.jit
def load_warp(config: cutlass.Constexpr, cta: Cta, atoms: Operands, tensors: Operands):
    """Loads as far ahead as there are stages."""
    views = load_views(config, cta, atoms, tensors)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    for k_tile in cutlass.range(cta.k_tiles, unroll=1):
        load_tile(config, cta, atoms, views, k_tile, state)
        state.advance()
    load_tail(config, cta, state)


class Multiplier(NamedTuple):
    """What the MMAs of a k-tile need."""

    mma: Any
    accumulator: Any
    a: Any  # (MMA, MMA_M, MMA_K, STAGE)
    b: Any
    sfa: Any  # (MMA, MMA_M, MMA_K) in tensor memory
    sfb: Any
    copies: Any  # (copy, source descriptors (.., STAGE), destination) of SFA and SFB


def scale_copy(smem: cute.Tensor, tmem: cute.Tensor) -> tuple[Any, Any, Any]:
    """tcgen05.cp of scales: copy, source descriptors (.., STAGE), destination."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(tcgen05.CtaGroup.ONE), SF_TYPE)
    smem, tmem = cute.filter_zeros(smem), cute.filter_zeros(tmem)
    copy = tcgen05.make_s2t_copy(atom, tmem)
    thread = copy.get_slice(0)
    return copy, tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(smem)), thread.partition_D(tmem)


def multiplier(config: Config, cta: Cta) -> Multiplier:
    """The MMA and its operands."""
    _, accumulator, sfa, sfb = tensor_memory(config, cta)
    copies = scale_copy(cta.smem.sfa, sfa), scale_copy(cta.smem.sfb, sfb)
    mma = make_mma(config.tile_n)
    return Multiplier(mma, accumulator, mma.make_fragment_A(cta.smem.a), mma.make_fragment_B(cta.smem.b), sfa, sfb,
                      copies)


def own_rows(config: Config, pointer: Any, tile_n: Any) -> Any:
    """Odd 64-wide tiles begin in the middle of an atom of scales: two columns (of 32 rows) further."""
    if config.tile_n == SFB_ROWS:
        return pointer
    words = cute.recast_ptr(pointer, dtype=cutlass.Int32) + cutlass.Int32(2) * (tile_n % 2)
    return cute.recast_ptr(words, dtype=SF_TYPE)


@cute.jit
def multiply_tile(config: cutlass.Constexpr, cta: Cta, it: Multiplier, k_tile: Any, state: Any):
    """Waits for a stage, multiplies it, and frees it when the MMAs have read it."""
    cute.arch.mbarrier_wait(cta.full + state.index, state.phase)
    for i in cutlass.range_constexpr(len(it.copies)):
        copy, source, target = it.copies[i]
        cute.copy(copy, source[None, None, None, None, state.index], target)
    for k_block in cutlass.range_constexpr(TILE_K // MMA_K):
        block = (None, None, k_block, state.index)
        it.mma.set(tcgen05.Field.SFA, it.sfa[None, None, k_block].iterator)
        it.mma.set(tcgen05.Field.SFB, own_rows(config, it.sfb[None, None, k_block].iterator, cta.coord[1]))
        it.mma.set(tcgen05.Field.ACCUMULATE, k_tile > 0 if k_block == 0 else True)  # the first overwrites
        cute.gemm(it.mma, it.accumulator, it.a[block], it.b[block], it.accumulator)
    with cute.arch.elect_one():
        tcgen05.commit(cta.empty + state.index)


@cute.jit
def mma_warp(config: cutlass.Constexpr, cta: Cta):
    """Multiplies what the load warp has loaded."""
    cute.arch.barrier(barrier_id=TMEM_READY, number_of_threads=5 * WARP)
    it = multiplier(config, cta)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
    for k_tile in cutlass.range(cta.k_tiles, unroll=1):
        multiply_tile(config, cta, it, k_tile, state)
        state.advance()
    with cute.arch.elect_one():
        tcgen05.commit(cta.done)


@cute.jit
def load_and_multiply(config: cutlass.Constexpr, cta: Cta, atoms: Operands, tensors: Operands):
    """One warp for both: every k-tile is loaded, `ahead` of its turn, waited for, multiplied."""
    views, it = load_views(config, cta, atoms, tensors), multiplier(config, cta)
    produced = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    consumed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
    for k_tile in cutlass.range(cutlass.min(config.ahead, cta.k_tiles), unroll=1):
        load_tile(config, cta, atoms, views, k_tile, produced)
        produced.advance()
    for k_tile in cutlass.range(cta.k_tiles, unroll=1):
        if k_tile + config.ahead < cta.k_tiles:
            load_tile(config, cta, atoms, views, k_tile + config.ahead, produced)
            produced.advance()
        multiply_tile(config, cta, it, k_tile, consumed)
        consumed.advance()
    with cute.arch.elect_one():
        tcgen05.commit(cta.done)


@cute.jit
def store_tile(config: cutlass.Constexpr, cta: Cta, mC: cute.Tensor):
    """Stores the accumulator; thread t has row t of the tile. mC: (m, n, splits)."""
    _, accumulator, _, _ = tensor_memory(config, cta)
    thread, _, _ = cute.arch.thread_idx()
    columns = config.store_columns
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), cutlass.Float32)
    chunks = cute.flat_divide(accumulator[(None, None), 0, 0], (TILE_M, columns))
    load = tcgen05.make_tmem_copy(atom, chunks[None, None, 0, 0])
    source = load.get_slice(thread).partition_S(chunks)  # (T2R, T2R_M, T2R_N, 1, chunk)
    numbers = cute.make_rmem_tensor(((columns, 1), 1, 1), cutlass.Float32)
    out = cute.make_rmem_tensor((config.vector, columns // config.vector), config.c_type)  # (vector, vectors)
    tile_m, tile_n, split = cta.coord
    vectors = cute.flat_divide(mC[tile_m * TILE_M + thread, None, split], (config.vector,))  # (vector, n / vector)
    cute.arch.mbarrier_wait(cta.done, 0)
    for chunk in cutlass.range_constexpr(config.tile_n // columns):
        cute.copy(load, source[None, None, None, 0, chunk], numbers)
        cute.arch.fence_view_async_tmem_load()
        out.store(numbers.load().to(config.c_type).reshape(out.shape))
        for i in cutlass.range_constexpr(columns // config.vector):
            first = (tile_n * config.tile_n + chunk * columns) // config.vector
            cute.autovec_copy(out[None, i], vectors[None, first + i])


@cute.kernel
def gemm(atoms: Operands, tensors: Operands, mC: cute.Tensor, k_tiles: cutlass.Int32, config: cutlass.Constexpr):
    """One CTA: set-up, then each warp its part."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    cta = shared_memory(config, cute.arch.block_idx(), k_tiles)
    if warp == config.mma_warp:
        for i in cutlass.range_constexpr(len(atoms)):
            cpasync.prefetch_descriptor(atoms[i])
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(cta.full + stage, 1)
                cute.arch.mbarrier_init(cta.empty + stage, 1)
            cute.arch.mbarrier_init(cta.done, 1)
    if warp == 0:
        cute.arch.alloc_tmem(TMEM_COLUMNS, cta.tmem)
        cute.arch.relinquish_tmem_alloc_permit()
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()

    if cutlass.const_expr(config.specialised):
        if warp == 5:
            load_warp(config, cta, atoms, tensors)
        if warp == 4:
            mma_warp(config, cta)
        if warp < 4:
            cute.arch.barrier(barrier_id=TMEM_READY, number_of_threads=5 * WARP)
            store_tile(config, cta, mC)
    else:
        if warp == 0:
            load_and_multiply(config, cta, atoms, tensors)
        store_tile(config, cta, mC)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, cta.tmem), TMEM_COLUMNS)


@cute.kernel
def add_splits(mWork: cute.Tensor, mC: cute.Tensor, splits: cutlass.Constexpr):
    """C = sum over the splits. mWork: (4, m n / 4, splits) fp32; mC: (4, m n / 4) fp16."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    i = block * SUM_THREADS + thread
    parts = cute.make_rmem_tensor((SUM_ELEMENTS, splits), cutlass.Float32)
    for split in cutlass.range_constexpr(splits):
        cute.autovec_copy(mWork[None, i, split], parts[None, split])
    total = parts[None, 0].load()
    for split in cutlass.range_constexpr(1, splits):
        total = total + parts[None, split].load()
    out = cute.make_rmem_tensor((SUM_ELEMENTS,), cutlass.Float16)
    out.store(total.to(cutlass.Float16))
    cute.autovec_copy(out, mC[None, i])


def operand(numbers: Any, scales: Any, rows: Any, k: Any) -> tuple[Any, Any]:
    """Numbers (rows, k, 1), k contiguous, and their scales in atoms of 128 rows and 4 scales."""
    tensor = cute.make_tensor(numbers, cute.make_layout((rows, k, 1), stride=(k, 1, rows * k)))
    return tensor, cute.make_tensor(scales, blockscaled.tile_atom_to_shape_SF(tensor.shape, SF_VEC))


@cute.jit
def launch(pointers: Operands, c: cute.Pointer, work: cute.Pointer, m: cutlass.Int32, n: cutlass.Int32,
           k: cutlass.Int32, stream: cuda_driver.CUstream, config: cutlass.Constexpr):
    """One CTA a tile of C and split, then the sum."""
    k, n = cute.assume(k, TILE_K), cute.assume(n, 64)
    mA, mSFA = operand(pointers.a, pointers.sfa, m, k)
    mB, mSFB = operand(pointers.b, pointers.sfb, n, k)
    out = c if cutlass.const_expr(config.splits == 1) else work
    mC = cute.make_tensor(out, cute.make_layout((m, n, config.splits), stride=(n, 1, m * n)))

    layouts, mma, sfb_mma = smem_layouts(config), make_mma(config.tile_n), make_mma(SFB_ROWS)
    cluster = cute.tiled_divide(cute.make_layout((1, 1, 1)), (mma.thr_id.shape,)).shape
    load = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE)
    make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
    sfb_tile = (TILE_M, SFB_ROWS, TILE_K)
    pairs = (
        make_a(load, mA, one_stage(layouts.a), config.tile, mma, cluster),
        make_b(load, mB, one_stage(layouts.b), config.tile, mma, cluster),
        make_a(load, mSFA, one_stage(layouts.sfa), config.tile, mma, cluster, internal_type=cutlass.Int16),
        make_b(load, mSFB, one_stage(layouts.sfb), sfb_tile, sfb_mma, cluster, internal_type=cutlass.Int16),
    )
    atoms, tensors = Operands(*[p[0] for p in pairs]), Operands(*[p[1] for p in pairs])
    gemm(atoms, tensors, mC, k // TILE_K // config.splits, config).launch(
        grid=(m // TILE_M, n // config.tile_n, config.splits), block=(config.threads, 1, 1),
        smem=config.stages * config.stage_bytes + ALIGNMENT, stream=stream)
    if cutlass.const_expr(config.splits > 1):
        vectors = m * n // SUM_ELEMENTS
        parts = cute.make_layout((SUM_ELEMENTS, vectors, config.splits), stride=(1, SUM_ELEMENTS, m * n))
        mOut = cute.make_tensor(c, cute.make_layout((SUM_ELEMENTS, vectors), stride=(1, SUM_ELEMENTS)))
        add_splits(cute.make_tensor(work, parts), mOut, config.splits).launch(
            grid=(vectors // SUM_THREADS, 1, 1), block=(SUM_THREADS, 1, 1), stream=stream)


def why_not(config: Config, m: int, n: int, k: int) -> str | None:
    """Why the kernel cannot compute C[m, n] with this k; None if it can."""
    if not 0 <= config.ahead < config.stages:
        return f"ahead = {config.ahead}: must be from 0 to {config.stages - 1}, below the stages"
    if m % TILE_M or n % SFB_ROWS or k % (TILE_K * config.splits):
        return f"m, n, k = {m}, {n}, {k}: must be multiples of {TILE_M}, {SFB_ROWS}, {TILE_K * config.splits}"
    return None


def pointers(addresses: Sequence[int]) -> tuple[Operands, Any, Any]:
    """The launch's pointers from the addresses of a, b, sfa, sfb, c, workspace."""
    types = (AB_TYPE, AB_TYPE, SF_TYPE, SF_TYPE, cutlass.Float16, cutlass.Float32)
    made = [make_ptr(t, a, cute.AddressSpace.gmem, assumed_align=16)
            for t, a in zip(types, addresses, strict=True)]
    return Operands(*made[:4]), made[4], made[5]


@cache
def compiled(config: Config) -> Any:
    """The launch function, compiled once a configuration, for any size."""
    return cute.compile(launch, *pointers([0] * 6), 0, 0, 0, cuda_driver.CUstream(0), config)


def multiply(config: Config, arrays: Sequence[np.ndarray], m: int, n: int, k: int) -> None:
    """C = A B^T. arrays: a [m, k/2] and b [n, k/2] (packed e2m1), sfa, sfb (e4m3 in atoms), c [m, n] fp16, workspace
    [splits, m, n] fp32; their memory must be known to the virtual GPU. Raises ValueError for sizes that do not fit."""
    if reason := why_not(config, m, n, k):
        raise ValueError(reason)
    compiled(config)(*pointers([a.ctypes.data for a in arrays]), m, n, k, cuda_driver.CUstream(0))
