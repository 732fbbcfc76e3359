"""A CuTeDSL GEMM for sm_90a, C[m, n] = A[m, k] * B[n, k]^T by warpgroup MMA, and the cases that its test runs.

`python hopper_gemm.py` compiles and runs every case on the virtual GPU and prints a line each: the case, whether C is
right, the launch's warnings. Operands come by TMA through a ring of stages; warp 0 loads, all warpgroups multiply, each
64 rows; one group of MMAs stays in flight while the stage before is released. Sizes must be multiples of the tile.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import vgpu

    vgpu.install("sm_90a")

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as hopper
import torch
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import from_dlpack
from cutlass.utils import LayoutEnum

WARPGROUP = 128  # threads


@dataclass(frozen=True)
class Case:
    """majors: the contiguous mode of A (k or m) and B (k or n). registers: A goes through registers."""

    ab: torch.dtype = torch.float16
    acc: type = cutlass.Float32
    c: torch.dtype = torch.float32
    size: tuple[int, int, int] = (128, 128, 256)
    tile: tuple[int, int, int] = (64, 128, 64)
    majors: str = "kk"
    registers: bool = False
    stages: int = 3


CASES = (
    Case(size=(256, 256, 512), tile=(128, 128, 64)),
    Case(majors="mn"),
    Case(torch.bfloat16, tile=(64, 32, 64), majors="kn"),
    Case(acc=cutlass.Float16, c=torch.float16, size=(128, 256, 128), tile=(64, 256, 64), stages=2),
    Case(torch.float8_e4m3fn, size=(128, 128, 512), tile=(64, 128, 128)),
    Case(torch.float8_e5m2, size=(128, 128, 512), tile=(128, 64, 128)),
    Case(torch.int8, cutlass.Int32, torch.int32, size=(128, 128, 512), tile=(64, 128, 128)),
    Case(registers=True, size=(128, 128, 256), tile=(128, 64, 64)),
)
ELEMENTS = {torch.float8_e4m3fn: cutlass.Float8E4M3FN, torch.float8_e5m2: cutlass.Float8E5M2}


class HopperGemm:
    """The kernel of one case."""

    def __init__(self, case: Case):
        self.case, self.tile = case, case.tile
        self.groups, self.stages = case.tile[0] // 64, case.stages

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
        self.element = a.element_type
        a_kind, b_kind = LayoutEnum.from_tensor(a), LayoutEnum.from_tensor(b)
        source = warpgroup.OperandSource.RMEM if self.case.registers else warpgroup.OperandSource.SMEM
        mma = hopper.make_trivial_tiled_mma(
            a.element_type, b.element_type, a_kind.sm90_mma_major_mode(), b_kind.sm90_mma_major_mode(), self.case.acc,
            (self.groups, 1, 1), tiler_mn=(64, self.tile[1]), a_source=source)
        a_layout = hopper.make_smem_layout_a(a_kind, self.tile, a.element_type, self.stages)
        b_layout = hopper.make_smem_layout_b(b_kind, self.tile, b.element_type, self.stages)
        load = cpasync.CopyBulkTensorTileG2SOp()
        a_atom, a_tma = cpasync.make_tiled_tma_atom(load, a, cute.slice_(a_layout, (None, None, 0)), self.tile[::2])
        b_atom, b_tma = cpasync.make_tiled_tma_atom(load, b, cute.slice_(b_layout, (None, None, 0)), self.tile[1:])

        @cute.struct
        class Storage:
            barriers: cute.struct.MemRange[cutlass.Int64, self.stages * 2]
            a: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(a_layout)], 1024]
            b: cute.struct.Align[cute.struct.MemRange[self.element, cute.cosize(b_layout)], 1024]

        self.storage = Storage
        grid = (c.shape[0] // self.tile[0], c.shape[1] // self.tile[1], 1)
        self.kernel(a_atom, a_tma, b_atom, b_tma, c, mma, a_layout, b_layout).launch(
            grid=grid, block=[WARPGROUP * self.groups, 1, 1])

    @cute.jit
    def load(self, ring, state, a_atom, a_from, a_to, b_atom, b_from, b_to):
        """The next tiles of A and B to the next free stage."""
        ring.producer_acquire(state)
        full = ring.producer_get_barrier(state)
        cute.copy(a_atom, a_from[None, state.count], a_to[None, state.index], tma_bar_ptr=full)
        cute.copy(b_atom, b_from[None, state.count], b_to[None, state.index], tma_bar_ptr=full)

    @cute.jit
    def multiply(self, mma, acc, a_shared, a, b, stage, a_copy, a_from, a_to):
        """All MMAs of a stage, as one group."""
        if cutlass.const_expr(self.case.registers):
            cute.copy(a_copy, a_from[None, None, None, stage], a_to)
        warpgroup.fence()
        for k_block in cutlass.range(cute.size(b, mode=[2]), unroll_full=True):
            if cutlass.const_expr(self.case.registers):
                a_part = a[None, None, k_block]
            else:
                a_part = a_shared[None, None, k_block, stage]
            cute.gemm(mma, acc, a_part, b[None, None, k_block, stage], acc)
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.kernel
    def kernel(self, a_atom: cute.CopyAtom, a_tma: cute.Tensor, b_atom: cute.CopyAtom, b_tma: cute.Tensor,
               c: cute.Tensor, mma: cute.TiledMma, a_layout: cute.ComposedLayout, b_layout: cute.ComposedLayout):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block_m, block_n, _ = cute.arch.block_idx()
        storage = cutlass.utils.SmemAllocator().allocate(self.storage)
        a_shared = storage.a.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        b_shared = storage.b.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        rows = self.tile[0] + self.tile[1]
        ring = pipeline.PipelineTmaAsync.create(
            barrier_storage=storage.barriers.data_ptr(), num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.groups),
            tx_count=rows * self.tile[2] * self.element.width // 8, cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)))

        a_global = cute.local_tile(a_tma, self.tile[::2], (block_m, None))
        b_global = cute.local_tile(b_tma, self.tile[1:], (block_n, None))
        c_global = cute.local_tile(c, self.tile[:2], (block_m, block_n))
        one = cute.make_layout(1)
        a_to, a_from = cpasync.tma_partition(a_atom, 0, one, cute.group_modes(a_shared, 0, 2),
                                             cute.group_modes(a_global, 0, 2))
        b_to, b_from = cpasync.tma_partition(b_atom, 0, one, cute.group_modes(b_shared, 0, 2),
                                             cute.group_modes(b_global, 0, 2))
        group = cute.arch.make_warp_uniform(thread // WARPGROUP)
        whole = mma.get_slice(cute.make_layout(self.groups, stride=WARPGROUP)(group))
        mine = mma.get_slice(thread)
        b_parts = mma.make_fragment_B(whole.partition_B(b_shared))
        if cutlass.const_expr(self.case.registers):
            atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.element)
            a_copy = cute.make_tiled_copy_A(atom, mma)
            a_parts = mma.make_fragment_A(mine.partition_A(a_shared)[None, None, None, 0])
            a_here = a_copy.get_slice(thread).partition_S(a_shared)
            a_there = a_copy.get_slice(thread).retile(a_parts)
            a_descriptors = a_parts
        else:
            a_descriptors = mma.make_fragment_A(whole.partition_A(a_shared))
            a_copy = a_here = a_there = a_parts = None
        c_mine = mine.partition_C(c_global)
        acc = cute.make_rmem_tensor(c_mine.shape, self.case.acc)

        tiles = cute.size(a_global, mode=[2])
        loaded = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        if warp_index == 0:
            for _ in cutlass.range(cutlass.min(self.stages, tiles), unroll=1):
                self.load(ring, loaded, a_atom, a_from, a_to, b_atom, b_from, b_to)
                loaded.advance()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        ring.consumer_wait(full)
        self.multiply(mma, acc, a_descriptors, a_parts, b_parts, full.index, a_copy, a_here, a_there)
        mma.set(warpgroup.Field.ACCUMULATE, True)  # what a function does to its mma, its caller does not see
        full.advance()
        for _ in cutlass.range(1, tiles, 1, unroll=1):
            ring.consumer_wait(full)
            if cutlass.const_expr(self.case.registers):
                warpgroup.wait_group(0)  # the fragments of A are in use until then
            self.multiply(mma, acc, a_descriptors, a_parts, b_parts, full.index, a_copy, a_here, a_there)
            warpgroup.wait_group(1)
            ring.consumer_release(done)
            full.advance()
            done.advance()
            if warp_index == 0 and loaded.count < tiles:
                self.load(ring, loaded, a_atom, a_from, a_to, b_atom, b_from, b_to)
                loaded.advance()
        warpgroup.wait_group(0)
        out = cute.make_rmem_tensor(acc.shape, c.element_type)
        out.store(acc.load().to(c.element_type))
        cute.autovec_copy(out, c_mine)


def operand(rows: int, columns: int, case: Case, major: str) -> tuple[torch.Tensor, torch.Tensor, cute.Tensor]:
    """Small integers: as float32, in the case's type, and that as the kernel takes it."""
    values = torch.randint(-2, 3, (rows, columns)).float()
    stored = values.to(case.ab)
    if major != "k":
        stored = stored.t().contiguous().t()
    if case.ab not in ELEMENTS:
        return values, stored, from_dlpack(stored, assumed_align=16)
    tensor = from_dlpack(stored.view(torch.uint8), assumed_align=16)
    tensor.element_type = ELEMENTS[case.ab]
    return values, stored, tensor


def run(case: Case) -> bool:
    """Is every element of C right? Small integers are exact in every format."""
    m, n, k = case.size
    torch.manual_seed(m + n + k)
    a, a_kept, a_tensor = operand(m, k, case, case.majors[0])
    b, b_kept, b_tensor = operand(n, k, case, case.majors[1])
    c = torch.full((m, n), -77, dtype=case.c)
    c_tensor = from_dlpack(c, assumed_align=16)
    cute.compile(HopperGemm(case), a_tensor, b_tensor, c_tensor)(a_tensor, b_tensor, c_tensor)
    return torch.equal(c.float(), a @ b.t())


if __name__ == "__main__":
    for each in CASES:
        print(each, "right" if run(each) else "WRONG", vgpu.last_launch().warnings)
