"""CuTeDSL kernels of many kinds, compiled for sm_100a and executed on the virtual GPU, against exact products.

tests/cutedsl/gemm.py is one kernel with the variations as parameters. Operands are small integers (scales powers of
two), so every sum is exact and C must be right to the last bit.
"""

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutedsl.gemm import Config, launch
from cutlass.cute.runtime import from_dlpack, make_ptr

import vgpu

ORDERS = [("copies", 0), ("tensor", 0), ("random", 3)]
STREAM = cuda_driver.CUstream(0)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
TORCH = {cutlass.Float16: torch.float16, cutlass.BFloat16: torch.bfloat16, cutlass.TFloat32: torch.float32,
         cutlass.Float32: torch.float32, cutlass.Float8E4M3FN: torch.float8_e4m3fn, cutlass.Int8: torch.int8,
         cutlass.Int32: torch.int32}
_compiled = {}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def view(tensor, dtype, leading):
    """A cute.Tensor of a torch tensor (rows, columns, batch) whose dimension `leading` is contiguous."""
    raw = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    out = from_dlpack(raw, assumed_align=32)
    out.element_type = dtype
    return out.mark_layout_dynamic(leading_dim=leading)


def matrix(rows, k, batches, dtype, major, seed):
    """(values float64 [rows, k, l], cute.Tensor, storage) of integers -3..3."""
    values = torch.randint(-3, 4, (batches, rows, k), generator=generator(seed))
    stored = values.to(torch.float32).to(TORCH[dtype])
    tensor = stored.permute(1, 2, 0) if major == "k" else stored.transpose(1, 2).contiguous().permute(2, 1, 0)
    return values.permute(1, 2, 0).double(), view(tensor, dtype, 1 if major == "k" else 0), tensor


def packed(rows, k, batches, seed):
    """As `matrix`, of all e2m1 numbers, two a byte, k contiguous."""
    codes = torch.randint(0, 16, (batches, rows, k), generator=generator(seed))
    raw = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    pointer = make_ptr(cutlass.Float4E2M1FN, raw.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
    return E2M1[codes].permute(1, 2, 0).double(), pointer, raw


def scales(rows, k, batches, config, seed):
    """(factors float64 [rows, k, l], pointer, storage): 0.5, 1 or 2 for every row and sf_vec elements, in blocks of
    128 rows and 4 scales: byte (m % 32) * 16 + m % 128 // 32 * 4 + s % 4."""
    count = -(-k // config.sf_vec)
    exponents = torch.randint(-1, 2, (batches, rows, count), generator=generator(seed))
    codes = exponents + 127 if config.sf is cutlass.Float8E8M0FNU else exponents * 8 + 0x38
    room = torch.zeros(batches, -(-rows // 128) * 128, -(-count // 4) * 4, dtype=torch.uint8)
    room[:, :rows, :count] = codes
    b, r, c = room.shape
    blocks = room.view(b, r // 128, 4, 32, c // 4, 4).permute(0, 1, 4, 3, 2, 5).contiguous()
    pointer = make_ptr(cutlass.Int16, blocks.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
    factors = (2.0**exponents).double().repeat_interleave(config.sf_vec, 2)[:, :, :k]
    return factors.permute(1, 2, 0), pointer, blocks


@cute.jit
def launch_packed(a: cute.Pointer, b: cute.Pointer, c: cute.Tensor, sfa: cute.Pointer, sfb: cute.Pointer,
                  size: tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32, cutlass.Int32], stream: cuda_driver.CUstream,
                  config: cutlass.Constexpr):
    """`launch` for 4-bit operands, which torch cannot hand over as tensors."""
    m, n, k, batches = size
    k = cute.assume(k, 64)
    a = cute.make_tensor(a, cute.make_ordered_layout((m, k, batches), order=(1, 0, 2)))
    b = cute.make_tensor(b, cute.make_ordered_layout((n, k, batches), order=(1, 0, 2)))
    launch(a, b, c, sfa, sfb, stream, config)


def run(config, m, n, k, batches=1, order=("copies", 0)):
    """Run the kernel on poisoned C and compare; returns the launch's counters."""
    device = vgpu.device()
    device.order, device.seed = order
    if config.ab is cutlass.Float4E2M1FN:
        (a, *arg_a), (b, *arg_b) = packed(m, k, batches, 1), packed(n, k, batches, 2)
    else:
        a, *arg_a = matrix(m, k, batches, config.ab, config.majors[0], 1)
        b, *arg_b = matrix(n, k, batches, config.ab, config.majors[1], 2)
    sfa = sfb = (None, None)
    if config.sf_vec:
        (fa, *sfa), (fb, *sfb) = scales(m, k, batches, config, 3), scales(n, k, batches, config, 4)
        a, b = a * fa, b * fb
    c = torch.full((batches, m, n), 77, dtype=TORCH[config.c]).permute(1, 2, 0)
    arguments = [arg_a[0], arg_b[0], view(c, config.c, 1), sfa[0], sfb[0]]
    function = launch
    if config.ab is cutlass.Float4E2M1FN:
        function, arguments = launch_packed, [*arguments, (m, n, k, batches)]
    if config not in _compiled:
        _compiled[config] = cute.compile(function, *arguments, STREAM, config)
    _compiled[config](*arguments, STREAM)
    expected = torch.einsum("mkl,nkl->mnl", a, b).to(TORCH[config.c])
    assert torch.equal(c, expected), f"{int((c != expected).sum())} of {c.numel()} elements differ"
    return vgpu.last_launch()


PAIR = dict(pair=True, cluster=(2, 1), tile=(256, 128))
DENSE = [
    ("one CTA", Config(), (256, 256, 192)),
    ("threads store", Config(tma_store=False), (128, 256, 128)),
    ("pair", Config(**PAIR), (256, 256, 192)),
    ("pair of 64 rows each", Config(**PAIR | {"tile": (128, 64)}), (256, 128, 128)),
    ("pair, largest tile", Config(**PAIR | {"tile": (256, 256)}), (256, 256, 128)),
    ("64 rows", Config(tile=(64, 96)), (128, 192, 128)),
    ("N 192", Config(tile=(128, 192)), (128, 384, 128)),
    ("cluster 2 x 1", Config(cluster=(2, 1)), (256, 128, 256)),
    ("cluster 2 x 2", Config(cluster=(2, 2)), (512, 256, 256)),
    ("cluster 4 x 2 of pairs", Config(pair=True, cluster=(4, 2), tile=(256, 64)), (512, 256, 256)),
    ("persistent", Config(clusters=2, tile=(128, 64)), (384, 192, 256)),
    ("persistent pairs", Config(**PAIR | {"cluster": (2, 2)}, clusters=2), (512, 768, 128)),
    ("ragged", Config(), (200, 136, 72, 2)),
    ("ragged pairs", Config(**PAIR | {"cluster": (2, 2)}), (200, 136, 72, 2)),
    ("m-major A", Config(majors=("mn", "k")), (128, 128, 128)),
    ("n-major B, pair", Config(**PAIR, majors=("k", "mn")), (256, 128, 128)),
    ("both mn-major", Config(majors=("mn", "mn")), (128, 128, 128)),
    ("mn-major tf32", Config(ab=cutlass.TFloat32, majors=("mn", "mn")), (128, 128, 64)),
    ("tf32", Config(ab=cutlass.TFloat32), (128, 128, 96)),
    ("bf16", Config(ab=cutlass.BFloat16, c=cutlass.BFloat16), (128, 128, 16)),
    ("fp16 accumulator", Config(acc=cutlass.Float16, c=cutlass.Float16), (128, 128, 64)),
    ("e4m3", Config(ab=cutlass.Float8E4M3FN), (128, 128, 256)),
    ("mn-major e4m3", Config(ab=cutlass.Float8E4M3FN, majors=("mn", "mn")), (128, 128, 256)),
    ("int8", Config(ab=cutlass.Int8, acc=cutlass.Int32, c=cutlass.Int32), (128, 128, 256)),
]
NVFP4 = dict(ab=cutlass.Float4E2M1FN, sf=cutlass.Float8E4M3FN, sf_vec=16)
MXFP4 = dict(ab=cutlass.Float4E2M1FN, sf=cutlass.Float8E8M0FNU, sf_vec=32)
MXFP8 = dict(ab=cutlass.Float8E4M3FN, sf=cutlass.Float8E8M0FNU, sf_vec=32)
SCALED = [
    ("nvfp4", Config(**NVFP4), (256, 256, 512)),
    ("nvfp4, N 64: odd tiles two columns further", Config(**NVFP4, tile=(128, 64)), (128, 256, 256)),
    ("nvfp4, N 192", Config(**NVFP4, tile=(128, 192)), (128, 576, 256)),
    ("nvfp4, N 256", Config(**NVFP4, tile=(128, 256)), (128, 256, 256)),
    ("nvfp4 pair", Config(**NVFP4, **PAIR), (256, 256, 512)),
    ("nvfp4 pair, N 64", Config(**NVFP4, **PAIR | {"tile": (256, 64)}), (256, 192, 256)),
    ("nvfp4 pair, N 192", Config(**NVFP4, **PAIR | {"tile": (256, 192)}), (512, 384, 256)),
    ("nvfp4 pair, N 256", Config(**NVFP4, **PAIR | {"tile": (256, 256)}), (256, 512, 256)),
    ("nvfp4, persistent cluster 2 x 2", Config(**NVFP4, cluster=(2, 2), clusters=1), (384, 512, 512)),
    ("nvfp4, ragged batches", Config(**NVFP4, **PAIR), (200, 136, 320, 2)),
    ("mxfp4", Config(**MXFP4), (128, 128, 512)),
    ("mxfp4 pair", Config(**MXFP4, **PAIR), (256, 128, 256)),
    ("mxfp8", Config(**MXFP8), (128, 128, 256)),
    ("mxfp8 pair, mn-major", Config(**MXFP8, **PAIR, majors=("mn", "mn")), (256, 256, 256)),
]


@pytest.mark.parametrize("config, size", [c[1:] for c in DENSE], ids=[c[0] for c in DENSE])
def test_dense(config, size):
    run(config, *size)


@pytest.mark.parametrize("config, size", [c[1:] for c in SCALED], ids=[c[0] for c in SCALED])
def test_block_scaled(config, size):
    run(config, *size)


@pytest.mark.parametrize("order", ORDERS[1:], ids=lambda o: o[0])
@pytest.mark.parametrize("name", ["pair", "cluster 4 x 2 of pairs", "persistent pairs", "ragged pairs",
                                  "nvfp4 pair, N 192", "nvfp4, persistent cluster 2 x 2", "mxfp8 pair, mn-major"])
def test_other_orders(name, order):
    """Asynchronous work may complete in any order: the same bits, and no complaint."""
    config, size = next(c[1:] for c in DENSE + SCALED if c[0] == name)
    assert run(config, *size, order=order).warnings == []
