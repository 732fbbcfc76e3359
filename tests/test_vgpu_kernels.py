"""Small PTX kernels for what kernels in the field do: forms of instructions that compilers emit, and habits of shipped
kernels that the virtual GPU must bear, with a warning where they are not clean."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernels import aligned, lanes, run, stops, words

from vgpu import host, tensormap, tma
from vgpu.errors import VirtualGpuError
from vgpu.memory import GlobalMemory, SharedMemory

# --- tensor maps: swizzle atoms and types with gaps -------------------------------------------------------------------


def swizzled(offset, atom):
    """Shared address of a byte under the 128-byte swizzle, by PTX ISA 5.5.7: atoms of a 128-byte line are permuted by
    the line's number, as far as there are atoms."""
    line, inside = divmod(offset, 128)
    return line * 128 + (inside // atom ^ line % (128 // atom)) * atom + inside % atom


@pytest.mark.parametrize("atom", [16, 32, 64])
def test_swizzle_atoms(atom):
    data = aligned(np.arange(64 * 32, dtype=np.uint32).reshape(64, 32), 128)
    gmem, smem = GlobalMemory(), SharedMemory(16384)
    gmem.register(data.ctypes.data, data.nbytes)
    tm = tensormap.decode(tensormap.encode("u32", data.ctypes.data, (32, 64), (128,), (32, 32), swizzle=128,
                                           swizzle_atom=atom))
    assert tma.load_tile(tm, (0, 8), gmem, smem, 2048) == 4096
    box = data[8:40].copy().view(np.uint8).ravel()
    places = [2048 + swizzled(i, atom) for i in range(4096)]
    assert np.array_equal(smem.data[places], box)
    data[...] = 0
    assert tma.store_tile(tm, (0, 16), smem, 2048, gmem) == 4096
    assert np.array_equal(data[16:48].view(np.uint8).ravel(), box) and not data[:16].any() and not data[48:].any()


def test_swizzle_atoms_belong_to_128_bytes():
    for change in (dict(swizzle=64, box=(16, 32)), dict(swizzle_atom=48)):
        with pytest.raises(VirtualGpuError, match="swizzle atom"):
            tensormap.encode(**dict(type="u32", address=4096, sizes=(32, 64), strides=(128,), box=(32, 32), swizzle=128,
                                    swizzle_atom=32) | change)


@pytest.mark.parametrize("kind, bits", [("b4x16_p64", 4), ("b6x16_p32", 6)])
@pytest.mark.parametrize("swizzle", [0, 128])
def test_types_with_gaps(kind, bits, swizzle):
    """16 elements lie in 8 or 12 bytes of global memory, and at the start of 16 bytes of shared memory; rows outside
    the tensor are zero; the copy counts the bytes without gaps."""
    row = 256 * bits // 8
    data = aligned(np.random.default_rng(bits).integers(0, 256, (4, row), dtype=np.uint8), 32)
    gmem, smem = GlobalMemory(), SharedMemory(8192)
    gmem.register(data.ctypes.data, data.nbytes)
    tm = tensormap.decode(tensormap.encode(kind, data.ctypes.data, (256, 4), (row,), (128, 8), swizzle=swizzle))
    assert tma.load_tile(tm, (128, 1), gmem, smem, 1024) == 8 * 128 * bits // 8
    want = np.zeros((8, row // 2), np.uint8)
    want[:3] = data[1:, row // 2:]
    group = 2 * bits  # bytes of 16 elements
    for i, chunk in enumerate(want.reshape(-1, group)):
        at = 1024 + (swizzled(16 * i, 16) if swizzle else 16 * i)
        assert np.array_equal(smem.data[at:at + group], chunk)
        assert (smem.data[at + group:at + 16] == 0xFF).all()
    with pytest.raises(VirtualGpuError, match="multiple of 128"):
        tma.load_tile(tm, (64, 0), gmem, smem, 1024)
    with pytest.raises(VirtualGpuError, match="loads only"):
        tma.store_tile(tm, (0, 0), smem, 1024, gmem)


# --- cluster launch control -------------------------------------------------------------------------------------------

STEAL = """
    .reg .b64 %answer<2>;
    .reg .b32 %x, %y, %z, %phase;
    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %ctaid.y;
    mov.u32 %r10, 1024;
    mov.u32 %r11, 1040;
    mbarrier.init.shared.b64 [%r11], 1;
    fence.mbarrier_init.release.cluster;
    mov.u32 %phase, 0;
work:
    mad.lo.u32 %r1, %y, 3, %x;
    mad.wide.u32 %d0, %r1, 4, %a0;
    atom.global.add.u32 %r2, [%d0], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r11], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r10], [%r11];
wait:
    mbarrier.try_wait.parity.shared.b64 %p0, [%r11], %phase;
    @!%p0 bra wait;
    xor.b32 %phase, %phase, 1;
    ld.shared.v2.b64 {%answer0, %answer1}, [%r10];
    mov.b128 %q0, {%answer0, %answer1};
    FIRST
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %q0;
    fence.proxy.async.shared::cta;
    @%p1 bra work;
"""
FIRST = {
    "one by one": """
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %x, %q0;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %y, %q0;""",
    "together": "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%x, %y, %z, _}, %q0;",
}


@pytest.mark.parametrize("form", FIRST)
def test_every_tile_is_taken_once(form):
    """CTAs that take over others' work, asking for the first CTA before they know whether the request was granted, as
    CuTeDSL's schedulers do."""
    done = words(12)
    run(STEAL.replace("FIRST", FIRST[form]), done, threads=1, grid=(3, 4, 1), shared_bytes=64)
    assert done.tolist() == [1] * 12


def test_unknown_query():
    stops("unknown instruction", "clusterlaunchcontrol.query_cancel.get_last_ctaid::x.b32.b128 %r0, %q0; // here",
          warp=None)


# --- forms and habits of compilers ------------------------------------------------------------------------------------


def test_mapa_beyond_the_cluster_is_no_access():
    """Every lane maps its own rank, only those of the cluster use the address (CuTeDSL's arrivals at all CTAs)."""
    body = """
    mov.u32 %r1, counter;
    st.shared.b32 [%r1], 0;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r2, %r1, %lane;
    setp.lt.u32 %p0, %lane, 2;
    @%p0 atom.shared::cluster.add.u32 %r3, [%r2], 1;
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.b32 %r0, [%r1];
    mov.u32 %r4, %ctaid.x;
    mad.wide.u32 %d0, %r4, 4, %a0;
    st.global.b32 [%d0], %r0;
    """
    out = words(2)
    run(body, out, grid=2, cluster=2, declare=".shared .b32 counter;")
    assert out.tolist() == [2, 2]
    stops("out of bounds", "mov.u32 %r1, 1024;\nmapa.shared::cluster.u32 %r2, %r1, 7;\n"
          "ld.shared::cluster.b32 %r3, [%r2]; // here", shared_bytes=64)


def test_undefined_half_of_a_pair():
    """A register that nothing writes, packed with one that is written, taken apart, and filled in later."""
    body = """
    mov.b16 %h0, 7;
    mov.b32 %r1, {%h0, %h30};
    mov.b32 {%h1, _}, %r1;
    mov.b16 %h2, 9;
    mov.b32 {_, %h3}, %r200;
    mov.b32 %r2, {%h1, %h3};
    mov.b32 {%h4, _}, %r2;
    mov.b32 %r0, {%h4, %h2};
    """
    assert lanes(body) == [9 << 16 | 7] * 32
    stops("uninitialised", "add.u32 %r1, %r200, 1; // here")


def test_vector_registers():
    """.reg .v4, as inline assembly declares it (PTX ISA 5.4.2)."""
    body = """
    {
        .reg .v4 .b32 abcd;
        mov.b32 abcd.x, {%t};
        add.u32 abcd.y, %t, 1;
        mov.b32 abcd.z, 40;
        mul.lo.u32 abcd.w, abcd.x, abcd.y;
        mov.u32 %r1, 1024;
        mad.lo.u32 %r1, %t, 16, %r1;
        st.shared.v4.b32 [%r1], abcd;
    }
    ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%r1];
    add.u32 %r2, %r2, %r3;
    add.u32 %r2, %r2, %r4;
    add.u32 %r0, %r2, %r5;
    """
    assert lanes(body, shared_bytes=1024) == [t + t + 1 + 40 + t * (t + 1) for t in range(32)]


@pytest.mark.parametrize("statement", ["tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1;", "shfl.sync.idx.b32 %r0, %r1;",
                                       "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1;"])
def test_an_incomplete_statement_names_its_line(statement):
    stops("unknown instruction", f"{statement} // here", warp=None)


# --- tensor memory ----------------------------------------------------------------------------------------------------

ALLOC = """
    mov.u32 %r10, 1024;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r10], 32;
    ld.shared.b32 %r11, [%r10];
"""
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r11, 32;\n"


def test_loads_used_before_their_wait_warn_once_for_each_place():
    """ptxas makes the use wait for the registers, so kernels do without wait::ld; nothing else is said of it."""
    body = ALLOC + """
    mov.u32 %r2, 5;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r11], {%r2};
    tcgen05.wait::st.sync.aligned;
    mov.u32 %r5, 0;
    mov.u32 %r0, 0;
again:
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r3}, [%r11];
    add.u32 %r0, %r0, %r3;
    add.u32 %r5, %r5, 1;
    setp.lt.u32 %p0, %r5, 3;
    @%p0 bra again;
    """ + FREE + "st.global.b32 [%o], %r0;"
    out = words(32)
    warnings = run(body, out, shared_bytes=64).warnings
    assert out.tolist() == [15] * 32
    assert len(warnings) == 1 and "used before tcgen05.wait::ld" in warnings[0] and "(x3)" in warnings[0]


def test_undefined_registers_leave_tensor_memory_undefined():
    store = ALLOC + """
    mov.u32 %r2, 5;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%r11], {%r2, %r200};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%r11+COLUMN]; // here
    tcgen05.wait::ld.sync.aligned;
    """
    assert lanes(store.replace("COLUMN", "0") + FREE, shared_bytes=64) == [5] * 32
    with pytest.raises(VirtualGpuError, match="column 1, which was never written"):
        run(store.replace("COLUMN", "1") + FREE, shared_bytes=64)


def test_freeing_twice_is_a_warning_and_freeing_what_was_not_allocated_an_error():
    warnings = run(ALLOC + FREE + FREE, shared_bytes=64).warnings
    assert len(warnings) == 1 and "freed already" in warnings[0]
    stops("tensor memory", ALLOC + FREE + ALLOC + FREE.replace("%r11, 32", "%r11, 64").replace("\n", " // here\n"),
          shared_bytes=64)


def test_a_last_commit_that_nobody_waits_for():
    body = ALLOC + """
    mov.u32 %r12, 1040;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
    elect.sync %r13|%p0, -1;
    @%p0 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r12];
    """ + FREE
    warnings = run(body, shared_bytes=64).warnings
    assert any("tcgen05.commit to one of its own mbarriers is still to arrive" in w for w in warnings)


# --- the host ---------------------------------------------------------------------------------------------------------


def run_program(*arguments):
    """A Python process that finds what this one finds."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_tensors_on_the_virtual_cuda_device_have_global_addresses():
    """CuTeDSL makes generic pointers of CPU tensors, which cp.async refuses; torch.compile's import needs torch.cuda's
    functions to be distinct."""
    program = """
import vgpu
vgpu.install("sm_100a", torch_cuda=True)
import cutlass.cute, torch, torch._dynamo
from cutlass.cute.runtime import from_dlpack
on_cuda = torch.zeros(4, 4, device="cuda")
for tensor in on_cuda, on_cuda[1:].T, torch.zeros(4):
    print(from_dlpack(tensor).memspace == cutlass.cute.AddressSpace.gmem)
"""
    done = run_program("-c", program)
    assert done.stdout.split() == ["True", "True", "False"], done.stderr


def test_tensor_maps_made_by_the_host_through_the_driver():
    """Host code whose strides are known at run time only calls cuTensorMapEncodeTiled."""
    sizes, strides = (ctypes.c_uint64 * 2)(256, 64), (ctypes.c_uint64 * 1)(512)
    box, steps = (ctypes.c_uint32 * 2)(64, 8), (ctypes.c_uint32 * 2)(1, 1)
    out = (ctypes.c_uint8 * 128)()
    places = [ctypes.addressof(x) for x in (sizes, strides, box, steps)]
    host.encode_tensor_map(ctypes.addressof(out), 6, 2, 1 << 20, *places, 0, 3, 2, 0)
    assert bytes(out) == tensormap.encode("f16", 1 << 20, (256, 64), (512,), (64, 8), swizzle=128, l2_promotion=128)
    with pytest.raises(VirtualGpuError, match="box of dimension 0"):
        host.encode_tensor_map(ctypes.addressof(out), 6, 2, 1 << 20, *places, 0, 1, 2, 0)


def test_nothing_runs_after_an_error_in_a_callback():
    """Generated code may go on after a call that failed; the first error comes out."""
    calls = []

    def fail():
        calls.append("fail")
        raise VirtualGpuError("launch", "the first")

    first, second = host._callback(fail), host._callback(lambda: calls.append("second"))

    def generated():
        return first(), second()

    with pytest.raises(VirtualGpuError, match="the first"):
        host.raises_kept(generated)()
    assert calls == ["fail"]
    assert host.raises_kept(second)() == 0 and calls == ["fail", "second"]


def test_memory_from_the_driver():
    """cuMemAlloc, cuMemsetD8 to D32, cuMemFree: a kernel may use it until it is freed."""
    from cuda.bindings import driver  # conftest has installed the virtual GPU's answers

    def ask(function, *arguments):
        error, *result = function(*arguments)
        assert error == driver.CUresult.CUDA_SUCCESS
        return int(result[0]) if result else None

    address = ask(driver.cuMemAlloc, 64)
    assert address % 256 == 0
    ask(driver.cuMemsetD32, address, 0x01020304, 16)
    ask(driver.cuMemsetD8Async, address + 4, 255, 4, 0)
    ask(driver.cuMemsetD16, address + 8, 7, 2)
    out = words(4)
    place = np.array([address], np.uint64)
    body = "ld.global.b64 %d1, [%a1];\nld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d1];"
    run(body + "st.global.v4.b32 [%a0], {%r0, %r1, %r2, %r3};", out, place, threads=1)
    assert out.tolist() == [0x01020304, 0xFFFFFFFF, 0x00070007, 0x01020304]
    with pytest.raises(VirtualGpuError, match="no known buffer"):
        driver.cuMemsetD32(address, 0, 17)
    ask(driver.cuMemFree, address)
    with pytest.raises(VirtualGpuError, match="cuMemAlloc did not give"):
        driver.cuMemFree(address)
    with pytest.raises(VirtualGpuError, match="no known buffer"):
        run(body, out, place, threads=1)


TVM_FFI = """
import sys
import vgpu
vgpu.install("sm_100a", torch_cuda=CUDA)
sys.path.insert(0, TESTS)
import cutlass, cutlass.cute as cute, torch
from cutlass.cute.runtime import make_fake_compact_tensor
from cutedsl.elementwise import double
fakes = [make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), assumed_align=16) for _ in "xy"]
compiled = cute.compile(double, *fakes, options="--enable-tvm-ffi")
x = torch.arange(64, dtype=torch.float32, device=DEVICE)
y = torch.zeros(64, device=DEVICE)
compiled(x, y)
print(torch.equal(y.cpu(), 2 * x.cpu()), len(vgpu.launches()))
try:
    compiled(x, torch.zeros(8, device=DEVICE))
except Exception as e:
    print(type(e).__name__)
compiled(y, x)
print(torch.equal(x.cpu(), 2 * y.cpu()))
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_functions_of_tvm_ffi(device, tmp_path):
    """--enable-tvm-ffi: launches on the virtual GPU with CPU tensors; an error comes out and leaves nothing behind."""
    pytest.importorskip("tvm_ffi")
    program = tmp_path / "program.py"
    program.write_text(TVM_FFI.replace("CUDA", str(device == "cuda")).replace("DEVICE", repr(device))
                       .replace("TESTS", repr(str(Path(__file__).parent))))
    done = run_program(program)
    assert done.stdout.split() == ["True", "1", "VirtualGpuError", "True"], done.stderr


def test_ashift_is_refused_not_ignored():
    """.ashift changes which rows of A are multiplied; it must not run as if it were absent."""
    body = "tcgen05.mma.cta_group::1.kind::f16.ashift.collector::a::discard [%r0], [%r1], %a0, %r2, %p0;"
    with pytest.raises(VirtualGpuError, match=r"ashift .* is not modelled"):
        run(body, words(32))
