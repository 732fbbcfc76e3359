"""A CuTeDSL GEMM with every variation that the virtual GPU has to execute: C[m, n, l] = A[m, k, l] * B[n, k, l]^T.

Dense or block-scaled, one or two CTAs an MMA, clusters with multicast, a persistent loop over tiles with as many
accumulator stages as fit, C stored by TMA or by the threads, operands with k or m, n contiguous. Six warps: 0 to 3
store, 4 multiplies, 5 loads. It is written for tests: sizes must fit the tile unless C is stored by TMA.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.blackwell_helpers as blackwell
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.tensor_utils import LayoutEnum

WARP, MMA_WARP, LOAD_WARP = 32, 4, 5
STORED, TMEM_READY = 1, 2  # named barriers
ATOM = 128  # rows of a block of scale factors: 128 rows, 4 scales each, 512 bytes
ATOM_WORDS = 256  # the block as 16-bit elements


@dataclass(frozen=True)
class Config:
    """tile: (m, n) of one MMA. pair: two CTAs an MMA. cluster: CTAs along m and n. majors: of A and B. sf_vec: elements
    that share a scale, 0 without scales. clusters: how many the grid has; each takes every so-manieth tile."""

    ab: type = cutlass.Float16
    c: type = cutlass.Float32
    acc: type = cutlass.Float32
    tile: tuple[int, int] = (128, 128)
    pair: bool = False
    cluster: tuple[int, int] = (1, 1)
    majors: tuple[str, str] = ("k", "k")
    sf: type | None = None
    sf_vec: int = 0
    tma_store: bool = True
    clusters: int = 148
    stages: int = 3

    @property
    def group(self) -> Any:
        return tcgen05.CtaGroup.TWO if self.pair else tcgen05.CtaGroup.ONE

    @property
    def tile_k(self) -> int:
        """k of a stage: 128 bytes of a row."""
        return 1024 // self.ab.width

    @property
    def cta_m(self) -> int:
        return self.tile[0] // (2 if self.pair else 1)

    @property
    def sfb_rows(self) -> int:
        """Rows of B whose scales a tile loads: whole blocks."""
        return -(-self.tile[1] // ATOM) * ATOM

    @property
    def sf_blocks_k(self) -> int:
        """Blocks of scales along k of a stage."""
        return self.tile_k // (4 * self.sf_vec)

    @property
    def accumulators(self) -> int:
        """Stages of the accumulator: two where tensor memory has room for them beside the scales."""
        return 1 if self.sf_vec and self.tile[1] > 192 else 2

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """(m, n) that a cluster computes at a time."""
        return self.cta_m * self.cluster[0], self.tile[1] * self.cluster[1]


class Maps(NamedTuple):
    """Copy atoms and their coordinate tensors; those of the scales are None without scales."""

    a: Any
    mA: Any
    b: Any
    mB: Any
    sfa: Any
    mSFA: Any
    sfb: Any
    mSFB: Any
    c: Any
    mC: Any


class Layouts(NamedTuple):
    """Shared memory, with stages last."""

    a: Any
    b: Any
    sfa: Any
    sfb: Any
    c: Any


class Pipelines(NamedTuple):
    """full/empty barriers of the operands' stages and of the accumulators."""

    tiles: Any
    accumulators: Any


class Work(NamedTuple):
    """Where a CTA stands: coord (v, m, n) in the cluster, tiles of C in units of the cluster's, k-tiles."""

    coord: Any
    cluster_index: Any
    tiles: Any
    k_tiles: Any


def make_mma(config: Config) -> cute.TiledMma:
    majors = [OperandMajorMode.K if major == "k" else OperandMajorMode.MN for major in config.majors]
    if config.sf_vec:
        return blackwell.make_blockscaled_trivial_tiled_mma(
            config.ab, config.ab, *majors, config.sf, config.sf_vec, config.group, config.tile)
    return blackwell.make_trivial_tiled_mma(config.ab, config.ab, *majors, config.acc, config.group, config.tile)


def make_sfb_mma(config: Config) -> cute.TiledMma:
    """The MMA by which B's scales are laid out: whole blocks, and all of N in each CTA of a pair."""
    return blackwell.make_blockscaled_trivial_tiled_mma(
        config.ab, config.ab, OperandMajorMode.K, OperandMajorMode.K, config.sf, config.sf_vec, tcgen05.CtaGroup.ONE,
        (config.cta_m, config.sfb_rows))


def epilogue_tile(config: Config) -> Any:
    return blackwell.compute_epilogue_tile_shape(
        (config.cta_m, config.tile[1], config.tile_k), config.pair, LayoutEnum.ROW_MAJOR, config.c)


def make_layouts(config: Config) -> Layouts:
    mma, shape = make_mma(config), (*config.tile, config.tile_k)
    sfa = sfb = None
    if config.sf_vec:
        sfa = blockscaled.make_smem_layout_sfa(mma, shape, config.sf_vec, config.stages)
        sfb = blockscaled.make_smem_layout_sfb(make_sfb_mma(config), (config.cta_m, config.sfb_rows, config.tile_k),
                                               config.sf_vec, config.stages)
    return Layouts(
        blackwell.make_smem_layout_a(mma, shape, config.ab, config.stages),
        blackwell.make_smem_layout_b(mma, shape, config.ab, config.stages), sfa, sfb,
        blackwell.make_smem_layout_epi(config.c, LayoutEnum.ROW_MAJOR, epilogue_tile(config), 2))


def cluster_layout(config: Config) -> Any:
    """(v, m, n, k) of the cluster's CTAs."""
    return cute.tiled_divide(cute.make_layout((*config.cluster, 1)), (make_mma(config).thr_id.shape,))


def one_stage(layout: Any) -> Any:
    return cute.slice_(layout, (None, None, None, 0))


def stage_bytes(config: Config, layouts: Layouts) -> int:
    """What one phase of a stage's barrier waits for: the bytes of all CTAs of the MMA."""
    size = cute.size_in_bytes(config.ab, one_stage(layouts.a)) + cute.size_in_bytes(config.ab, one_stage(layouts.b))
    if config.sf_vec:
        size += 512 * config.sf_blocks_k * (1 + config.sfb_rows // ATOM)
    return size * (2 if config.pair else 1)


def scale_tensor(words: cute.Pointer, rows: Any, k: Any, batches: Any, config: Config) -> cute.Tensor:
    """Scales as 16-bit elements: (256 of a block, blocks along k, blocks along the rows of all batches)."""
    across, down = cute.ceil_div(k, 4 * config.sf_vec), cute.ceil_div(rows, ATOM) * batches
    layout = cute.make_layout((ATOM_WORDS, across, down), stride=(1, ATOM_WORDS, ATOM_WORDS * across))
    return cute.make_tensor(words, layout)


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor, sfa: cute.Pointer | None, sfb: cute.Pointer | None,
           stream: cuda_driver.CUstream, config: cutlass.Constexpr):
    """a (m, k, l), b (n, k, l), c (m, n, l), n contiguous; sfa, sfb: 16-bit pointers to scales in blocks, row blocks
    of one batch after the other."""
    mma, layouts, cluster = make_mma(config), make_layouts(config), cluster_layout(config)
    common = ((*config.tile, config.tile_k), mma, cluster.shape)
    load_a = blackwell.cluster_shape_to_tma_atom_A(config.cluster, mma.thr_id)
    load_b = blackwell.cluster_shape_to_tma_atom_B(config.cluster, mma.thr_id)
    tma_a, mA = cute.nvgpu.make_tiled_tma_atom_A(load_a, a, one_stage(layouts.a), *common)
    tma_b, mB = cute.nvgpu.make_tiled_tma_atom_B(load_b, b, one_stage(layouts.b), *common)
    tma_sfa = mSFA = tma_sfb = mSFB = None
    if cutlass.const_expr(config.sf_vec != 0):
        load = cpasync.CopyBulkTensorTileG2SOp(config.group)
        block = (cute.make_layout((ATOM_WORDS, 1, 1)), (ATOM_WORDS, 1, 1))
        m, k, batches = a.shape
        tma_sfa, mSFA = cpasync.make_tiled_tma_atom(load, scale_tensor(sfa, m, k, batches, config), *block)
        tma_sfb, mSFB = cpasync.make_tiled_tma_atom(load, scale_tensor(sfb, b.shape[0], k, batches, config), *block)
    tma_c, mC = None, c
    if cutlass.const_expr(config.tma_store):
        tma_c, mC = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), c,
                                                cute.select(layouts.c, mode=[0, 1]), epilogue_tile(config))
    tiles = (cute.ceil_div(c.shape[0], config.cluster_tile[0]), cute.ceil_div(c.shape[1], config.cluster_tile[1]),
             c.shape[2])
    maps = Maps(tma_a, mA, tma_b, mB, tma_sfa, mSFA, tma_sfb, mSFB, tma_c, mC)
    gemm(maps, tiles, cute.ceil_div(a.shape[1], config.tile_k), config).launch(
        grid=(*config.cluster, cutlass.min(cute.size(tiles), config.clusters)), block=(6 * WARP, 1, 1),
        cluster=(*config.cluster, 1), stream=stream)


def shared_storage(config: Config, layouts: Layouts) -> type:
    def room(dtype: type, layout: Any) -> Any:
        return cute.struct.Align[cute.struct.MemRange[dtype, cute.cosize(layout) if layout is not None else 1], 1024]

    @cute.struct
    class Storage:
        tiles: cute.struct.MemRange[cutlass.Int64, 2 * config.stages]
        accumulators: cute.struct.MemRange[cutlass.Int64, 2 * config.accumulators]
        tmem: cutlass.Int32
        c: room(config.c, layouts.c.outer)
        a: room(config.ab, layouts.a.outer)
        b: room(config.ab, layouts.b.outer)
        sfa: room(cutlass.Int8, layouts.sfa)
        sfb: room(cutlass.Int8, layouts.sfb)

    return Storage


def make_pipelines(config: Config, storage: Any, layouts: Layouts) -> Pipelines:
    cluster = cluster_layout(config)
    thread = pipeline.CooperativeGroup(pipeline.Agent.Thread)
    consumers = cute.size(cluster.shape[1]) + cute.size(cluster.shape[2]) - 1  # MMAs that read what a CTA loads
    storing = 4 * WARP * (2 if config.pair else 1)
    return Pipelines(
        pipeline.PipelineTmaUmma.create(
            barrier_storage=storage.tiles.data_ptr(), num_stages=config.stages, producer_group=thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, consumers),
            tx_count=stage_bytes(config, layouts), cta_layout_vmnk=cluster),
        pipeline.PipelineUmmaAsync.create(
            barrier_storage=storage.accumulators.data_ptr(), num_stages=config.accumulators, producer_group=thread,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, storing), cta_layout_vmnk=cluster))


def tile_of(work: Work, index: Any) -> tuple[Any, Any, Any]:
    """(MMA tile along m, along n, batch) of this CTA for the cluster tile `index`."""
    down, across, _ = work.tiles
    return index % down, index // down % across, index // (down * across)


@cute.kernel
def gemm(maps: Maps, tiles: tuple, k_tiles: cutlass.Int32, config: cutlass.Constexpr):
    """Set-up, then each warp its role; the pair frees tensor memory when both CTAs are done with it."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    layouts = make_layouts(config)
    storage = cutlass.memory.SmemAllocator().allocate(shared_storage(config, layouts))
    pipelines = make_pipelines(config, storage, layouts)
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    work = Work(cluster_layout(config).get_flat_coord(rank), cute.arch.block_idx()[2], tiles, k_tiles)
    sA = storage.a.get_tensor(layouts.a.outer, swizzle=layouts.a.inner)
    sB = storage.b.get_tensor(layouts.b.outer, swizzle=layouts.b.inner)
    if cutlass.const_expr(config.cluster != (1, 1)):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()

    if warp == LOAD_WARP:
        load(config, maps, pipelines.tiles, work, sA, sB, storage)
    if warp == MMA_WARP:
        cute.arch.barrier(barrier_id=TMEM_READY, number_of_threads=5 * WARP)
        if work.coord[0] == 0:  # of a pair, the even CTA multiplies for both
            multiply(config, pipelines.tiles, pipelines.accumulators, work, sA, sB, storage)
    if warp < MMA_WARP:
        if warp == 0:
            cute.arch.alloc_tmem(512, storage.tmem.ptr, is_two_cta=config.pair)
        cute.arch.barrier(barrier_id=TMEM_READY, number_of_threads=5 * WARP)
        store(config, maps, pipelines.accumulators, work, storage)
    if cutlass.const_expr(config.cluster != (1, 1)):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=config.pair)
        cute.arch.dealloc_tmem(tmem_base(storage), 512, is_two_cta=config.pair)


def tmem_base(storage: Any) -> Any:
    return cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, storage.tmem.ptr)


def operand_views(config: Config, maps: Maps, coord: Any, where: Any, sA: Any, sB: Any) -> tuple[Any, Any, Any, Any]:
    """Shared side (.., STAGE) and global side (.., k_tiles) of the copies of A and of B for one tile."""
    mma, cluster = make_mma(config).get_slice(coord[0]), cluster_layout(config)
    tile_m, tile_n, batch = where
    out = []
    for atom, tensor, smem, partition, rows, tile, peers in (
        (maps.a, maps.mA, sA, mma.partition_A, config.tile[0], tile_m, 2),
        (maps.b, maps.mB, sB, mma.partition_B, config.tile[1], tile_n, 1),
    ):
        pieces = cute.local_tile(tensor[None, None, batch], (rows, config.tile_k), (tile, None))
        out += cpasync.tma_partition(
            atom, coord[peers], cute.make_layout(cluster.shape[peers]), cute.group_modes(smem, 0, 3),
            cute.group_modes(partition(pieces), 0, 3))
    return tuple(out)


def scale_views(config: Config, atom: Any, tensor: Any, room: Any, rows: int) -> tuple[Any, Any]:
    """Shared side (block, blocks of a stage, STAGE) and global side (block, along k, along rows) of scale copies."""
    blocks = config.sf_blocks_k * rows // ATOM
    layout = cute.make_layout(((ATOM_WORDS, 1, 1), blocks, config.stages),
                              stride=((1, 0, 0), ATOM_WORDS, ATOM_WORDS * blocks))
    smem = cute.make_tensor(cute.recast_ptr(room.data_ptr(), dtype=cutlass.Int16), layout)
    pieces = cute.local_tile(tensor, (ATOM_WORDS, 1, 1), (0, None, None))
    return cpasync.tma_partition(atom, 0, cute.make_layout(1), smem, cute.group_modes(pieces, 0, 3))


@cute.jit
def load_scales(config: cutlass.Constexpr, atom, views, rows: cutlass.Constexpr, first, k_tile, state, bar):
    """The blocks of one stage: rows / 128 blocks from block `first` on, for each block of k."""
    smem, gmem = views
    for k in cutlass.range_constexpr(config.sf_blocks_k):
        for r in cutlass.range_constexpr(rows // ATOM):
            cute.copy(atom, gmem[None, k_tile * config.sf_blocks_k + k, first + r],
                      smem[None, r * config.sf_blocks_k + k, state.index], tma_bar_ptr=bar)


@cute.jit
def load(config: cutlass.Constexpr, maps, tiles, work, sA, sB, storage):
    """Fills the stages, tile after tile; A is shared along the cluster's n, B along its m."""
    cluster, coord = cluster_layout(config), work.coord
    mask_a = cpasync.create_tma_multicast_mask(cluster, coord, mcast_mode=2)
    mask_b = cpasync.create_tma_multicast_mask(cluster, coord, mcast_mode=1)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.stages)
    _, _, step = cute.arch.grid_dim()
    for index in cutlass.range(work.cluster_index, cute.size(work.tiles), step, unroll=1):
        down, across, batch = tile_of(work, index)
        tile_m = down * cute.size(cluster.shape[1]) + coord[1]
        tile_n = across * cute.size(cluster.shape[2]) + coord[2]
        smem_a, gmem_a, smem_b, gmem_b = operand_views(config, maps, coord, (tile_m, tile_n, batch), sA, sB)
        for k_tile in cutlass.range(work.k_tiles, unroll=1):
            tiles.producer_acquire(state)
            bar = tiles.producer_get_barrier(state)
            cute.copy(maps.a, gmem_a[None, k_tile], smem_a[None, state.index], tma_bar_ptr=bar,
                      mcast_mask=mask_a if cutlass.const_expr(config.cluster[1] > 1) else None)
            cute.copy(maps.b, gmem_b[None, k_tile], smem_b[None, state.index], tma_bar_ptr=bar,
                      mcast_mask=mask_b if cutlass.const_expr(cute.size(cluster.shape[1]) > 1) else None)
            if cutlass.const_expr(config.sf_vec != 0):
                blocks_m = cute.size(maps.mSFA, mode=[2]) // work.tiles[2]
                blocks_n = cute.size(maps.mSFB, mode=[2]) // work.tiles[2]
                sfa = scale_views(config, maps.sfa, maps.mSFA, storage.sfa, ATOM)
                first = tile_m * (config.tile[0] // ATOM) + coord[0]
                load_scales(config, maps.sfa, sfa, ATOM, batch * blocks_m + first, k_tile, state, bar)
                sfb = scale_views(config, maps.sfb, maps.mSFB, storage.sfb, config.sfb_rows)
                first = tile_n * config.tile[1] // ATOM
                load_scales(config, maps.sfb, sfb, config.sfb_rows, batch * blocks_n + first, k_tile, state, bar)
            state.advance()
    tiles.producer_tail(state)


def scale_copy(config: Config, smem: Any, tmem: Any) -> tuple[Any, Any, Any]:
    """tcgen05.cp of the scales of a stage: the copy, source descriptors (.., STAGE), destination."""
    atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(config.group), config.sf)
    smem, tmem = cute.filter_zeros(smem), cute.filter_zeros(tmem)
    copy = tcgen05.make_s2t_copy(atom, tmem)
    thread = copy.get_slice(0)
    return copy, tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(smem)), thread.partition_D(tmem)


def scale_tmem(config: Config, storage: Any, accumulator: Any, layouts: Layouts) -> tuple[Any, Any]:
    """The scales of A and of B in tensor memory, behind the accumulators."""
    shape = (*config.tile, config.tile_k)
    base = tmem_base(storage) + tcgen05.find_tmem_tensor_col_offset(accumulator)
    sfa = cute.make_tensor(cute.recast_ptr(base, dtype=config.sf), blockscaled.make_tmem_layout_sfa(
        make_mma(config), shape, config.sf_vec, one_stage(layouts.sfa)))
    base = base + tcgen05.find_tmem_tensor_col_offset(sfa)
    sfb = cute.make_tensor(cute.recast_ptr(base, dtype=config.sf), blockscaled.make_tmem_layout_sfb(
        make_sfb_mma(config), (config.cta_m, config.sfb_rows, config.tile_k), config.sf_vec, one_stage(layouts.sfb)))
    return sfa, sfb


def accumulators(config: Config, storage: Any) -> Any:
    """(MMA, MMA_M, MMA_N, STAGE) in tensor memory."""
    mma = make_mma(config)
    shape = mma.partition_shape_C(config.tile)
    layout = mma.make_fragment_C(cute.append(shape, config.accumulators)).layout
    return cute.make_tensor(cute.recast_ptr(tmem_base(storage), dtype=config.acc), layout)


@cute.jit
def multiply(config: cutlass.Constexpr, tiles, accumulated, work, sA, sB, storage):
    """The MMAs of every tile."""
    mma, layouts = make_mma(config), make_layouts(config)
    a, b = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
    acc = accumulators(config, storage)
    if cutlass.const_expr(config.sf_vec != 0):
        sfa, sfb = scale_tmem(config, storage, acc, layouts)
        copy_a = scale_copy(config, storage.sfa.get_tensor(layouts.sfa, dtype=config.sf), sfa)
        copy_b = scale_copy(config, storage.sfb.get_tensor(layouts.sfb, dtype=config.sf), sfb)
    full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.stages)
    result = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, config.accumulators)
    _, _, step = cute.arch.grid_dim()
    for index in cutlass.range(work.cluster_index, cute.size(work.tiles), step, unroll=1):
        across = tile_of(work, index)[1] * config.cluster[1] + work.coord[2]
        accumulated.producer_acquire(result)
        mma.set(tcgen05.Field.ACCUMULATE, False)
        for _ in cutlass.range(work.k_tiles, unroll=1):
            tiles.consumer_wait(full)
            stage = (None, None, None, None, full.index)
            if cutlass.const_expr(config.sf_vec != 0):
                cute.copy(copy_a[0], copy_a[1][stage], copy_a[2])
                cute.copy(copy_b[0], copy_b[1][stage], copy_b[2])
            for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
                if cutlass.const_expr(config.sf_vec != 0):
                    mma.set(tcgen05.Field.SFA, sfa[None, None, k].iterator)
                    mma.set(tcgen05.Field.SFB, shifted(config, sfb[None, None, k].iterator, across))
                block = (None, None, k, full.index)
                target = acc[None, None, None, result.index]
                cute.gemm(mma, target, a[block], b[block], target)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            tiles.consumer_release(full)
            full.advance()
        accumulated.producer_commit(result)
        result.advance()
    accumulated.producer_tail(result)


def shifted(config: Config, pointer: Any, tile_n: Any) -> Any:
    """Odd tiles of 64 or 192 columns begin in the middle of a block of scales: two columns (of 32 rows) further."""
    if config.tile[1] % ATOM == 0:
        return pointer
    words = cute.recast_ptr(pointer, dtype=cutlass.Int32) + cutlass.Int32(2) * (tile_n % 2)
    return cute.recast_ptr(words, dtype=config.sf)


@cute.jit
def store(config: cutlass.Constexpr, maps, accumulated, work, storage):
    """Takes each accumulator to registers, frees it, converts and stores it, one epilogue tile after the other."""
    thread, _, _ = cute.arch.thread_idx()
    cluster, layouts, tile = cluster_layout(config), make_layouts(config), epilogue_tile(config)
    cta_tile = (config.cta_m, config.tile[1], config.tile_k)
    op = blackwell.get_tmem_load_op(cta_tile, LayoutEnum.ROW_MAJOR, config.c, config.acc, tile, config.pair)
    acc = accumulators(config, storage)
    parts = cute.flat_divide(acc[(None, None), 0, 0, None], tile)  # (EPI_M, EPI_N, m, n, STAGE)
    read = tcgen05.make_tmem_copy(op, parts[None, None, 0, 0, 0])
    slice_ = read.get_slice(thread)
    source = slice_.partition_S(parts)
    sC = storage.c.get_tensor(layouts.c.outer, swizzle=layouts.c.inner)
    write_op = blackwell.get_smem_store_op(LayoutEnum.ROW_MAJOR, config.c, config.acc, read)
    write = cute.make_tiled_copy_D(write_op, read)
    smem = write.get_slice(thread).partition_D(sC)
    state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, config.accumulators)
    _, _, step = cute.arch.grid_dim()
    mma = make_mma(config).get_slice(work.coord[0])
    for index in cutlass.range(work.cluster_index, cute.size(work.tiles), step, unroll=1):
        down, across, batch = tile_of(work, index)
        where = (down * cute.size(cluster.shape[1]) + work.coord[1], across * config.cluster[1] + work.coord[2])
        gC = mma.partition_C(cute.local_tile(maps.mC[None, None, batch], config.tile, where))
        pieces = cute.flat_divide(gC[(None, None), 0, 0], tile)  # (EPI_M, EPI_N, m, n)
        target = slice_.partition_D(pieces)
        numbers = cute.make_rmem_tensor(target[None, None, None, 0, 0].shape, config.acc)
        out = cute.make_rmem_tensor(numbers.shape, config.c)
        accumulated.consumer_wait(state)
        for n in cutlass.range_constexpr(cute.size(pieces, mode=[3])):
            for m in cutlass.range_constexpr(cute.size(pieces, mode=[2])):
                cute.copy(read, source[None, None, None, m, n, state.index], numbers)
                cute.arch.fence_view_async_tmem_load()
                out.store(numbers.load().to(config.c))
                if cutlass.const_expr(config.tma_store):
                    part = write.retile(out)
                    buffer = (n * cute.size(pieces, mode=[2]) + m) % 2
                    if thread < WARP:
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                    cute.arch.barrier(barrier_id=STORED, number_of_threads=4 * WARP)
                    cute.copy(write, part, smem[None, None, None, buffer])
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.barrier(barrier_id=STORED, number_of_threads=4 * WARP)
                    if thread < WARP:
                        s, g = cpasync.tma_partition(maps.c, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2),
                                                     cute.group_modes(pieces, 0, 2))
                        cute.copy(maps.c, s[None, buffer], g[None, m, n])
                        cute.arch.cp_async_bulk_commit_group()
                else:
                    cute.autovec_copy(out, target[None, None, None, m, n])
        accumulated.consumer_release(state)
        state.advance()
    if cutlass.const_expr(config.tma_store):
        cute.arch.cp_async_bulk_wait_group(0, read=True)
