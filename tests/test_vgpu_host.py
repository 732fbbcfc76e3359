"""The host side of the virtual GPU: launches arrive as written, errors come out as raised, CUDA's calls are answered.

What needs CuTeDSL runs in fresh processes, because the architecture and torch's "cuda" are settled once a process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu import host
from vgpu.__main__ import main, parser
from vgpu.errors import VirtualGpuError
from vgpu.launch import LaunchConfig

ROOT = Path(__file__).resolve().parent.parent
needs_cutlass = pytest.mark.skipif(importlib.util.find_spec("nvidia_cutlass_dsl") is None,
                                   reason="needs nvidia-cutlass-dsl")
needs_bindings = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda-bindings")

PTX = """
.version 8.7
.target sm_100a
.address_size 64
.shared .align 16 .b8 table[100];
.visible .entry first(.param .u64 p) { .shared .align 8 .b64 barrier; ret; }
.visible .entry second(.param .u64 p) { ret; }
"""


# ---------------------------------------------------------------------------------------------------------------------
# Without CuTeDSL


def config(grid=(1, 1, 1), block=(32, 1, 1), cluster=(1, 1, 1), shared=0, attributes=None) -> LaunchConfig:
    return LaunchConfig(grid, block, cluster, shared, 0, attributes or {})


@pytest.fixture
def virtual() -> host.Host:
    return host.Host("sm_100a", lambda *args: None)


def launched(virtual: host.Host, name: str = "second", **attributes: int) -> host.Kernel:
    """A kernel of PTX with attributes set: dynamic=MaxDynamicSharedMemorySize, wide=NonPortableClusterSizeAllowed."""
    handle = virtual.kernel(virtual.load([PTX]), name)
    for key, number in (("dynamic", 8), ("wide", 14)):
        if key in attributes:
            virtual.set_kernel_attribute(handle, number, attributes[key])
    return virtual.by_handle(handle)


@pytest.mark.parametrize(("arch", "sms", "capability"), [
    ("sm_100a", 148, (10, 0)), ("sm_100f", 148, (10, 0)), ("sm_103a", 148, (10, 3)), ("sm_90a", 132, (9, 0))])
def test_architectures(arch, sms, capability):
    model = host.model_of(arch)
    assert (model.sms, model.capability) == (sms, capability)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100b", "100a", ""])
def test_an_architecture_that_is_not_modelled(arch):
    with pytest.raises(ValueError, match="arch: .*allowed: sm_90, sm_100, sm_103"):
        host.model_of(arch)


@needs_bindings
def test_device_attributes_have_cudas_numbers():
    from cuda.bindings.runtime import cudaDeviceAttr as attr

    model = host.model_of("sm_100a")
    expected = {  # CUDA C++ Programming Guide, technical specifications of compute capability 10.0; B200: 148 SMs
        attr.cudaDevAttrMaxThreadsPerBlock: 1024, attr.cudaDevAttrMaxBlockDimZ: 64, attr.cudaDevAttrWarpSize: 32,
        attr.cudaDevAttrMaxGridDimX: 2**31 - 1, attr.cudaDevAttrMaxGridDimY: 65535,
        attr.cudaDevAttrMaxSharedMemoryPerBlock: 48 << 10, attr.cudaDevAttrMaxSharedMemoryPerBlockOptin: 227 << 10,
        attr.cudaDevAttrMaxSharedMemoryPerMultiprocessor: 228 << 10, attr.cudaDevAttrReservedSharedMemoryPerBlock: 1024,
        attr.cudaDevAttrMaxRegistersPerBlock: 65536, attr.cudaDevAttrMaxThreadsPerMultiProcessor: 2048,
        attr.cudaDevAttrMaxBlocksPerMultiprocessor: 32, attr.cudaDevAttrMultiProcessorCount: 148,
        attr.cudaDevAttrComputeCapabilityMajor: 10, attr.cudaDevAttrComputeCapabilityMinor: 0,
        attr.cudaDevAttrPageableMemoryAccess: 1, attr.cudaDevAttrClusterLaunch: 1, attr.cudaDevAttrCooperativeLaunch: 1,
        attr.cudaDevAttrStreamPrioritiesSupported: 1, attr.cudaDevAttrManagedMemory: 1, attr.cudaDevAttrEccEnabled: 0,
        attr.cudaDevAttrTotalConstantMemory: 64 << 10, attr.cudaDevAttrMaxRegistersPerMultiprocessor: 65536,
        attr.cudaDevAttrConcurrentManagedAccess: 1, attr.cudaDevAttrUnifiedAddressing: 1, attr.cudaDevAttrIntegrated: 0,
        attr.cudaDevAttrConcurrentKernels: 1,
    }
    assert {a.name: host.device_attribute(model, int(a)) for a in expected} == {a.name: v for a, v in expected.items()}


def test_an_unknown_device_attribute_is_named():
    with pytest.raises(VirtualGpuError, match="device attribute 13 is not modelled"):
        host.device_attribute(host.BLACKWELL, 13)


@needs_bindings
def test_launch_and_kernel_attributes_have_cudas_numbers():
    from cuda.bindings import runtime

    launch, function = runtime.cudaLaunchAttributeID, runtime.cudaFuncAttribute
    assert launch.cudaLaunchAttributeCooperative == host.LAUNCH_COOPERATIVE
    assert launch.cudaLaunchAttributeClusterDimension == host.LAUNCH_CLUSTER
    assert function.cudaFuncAttributeMaxDynamicSharedMemorySize == host.FUNC_MAX_DYNAMIC_SHARED
    assert function.cudaFuncAttributeNonPortableClusterSizeAllowed == host.FUNC_NON_PORTABLE_CLUSTER
    words = {int(a): a.name.removeprefix("cudaLaunchAttribute").lower().replace("memsync", "memorysynchronization")
             for a in launch}
    for number, name in host.LAUNCH_ATTRIBUTES.items():
        assert name.replace(" ", "") == words[number]


def raw_launch(attributes=()) -> tuple[int, list]:
    """A cudaLaunchConfig_t with attributes (id, value bytes). Returns its address and what must stay alive."""
    table = b"".join(struct.pack("<I4x", number) + value.ljust(64, b"\0") for number, value in attributes)
    keep = [ctypes.create_string_buffer(table, max(len(table), 1))]
    raw = struct.pack("<6IQQQI4x", 6, 4, 2, 64, 3, 1, 123_456, 0xABCD, ctypes.addressof(keep[0]), len(attributes))
    keep.append(ctypes.create_string_buffer(raw, len(raw)))
    return ctypes.addressof(keep[1]), keep


def test_a_launch_configuration_is_decoded():
    address, keep = raw_launch([(2, struct.pack("<i", 1)), (4, struct.pack("<3I", 2, 1, 2)), (6, b"\1")])
    c = host.decode_launch(address)
    assert (c.grid, c.block, c.cluster) == ((6, 4, 2), (64, 3, 1), (2, 1, 2))
    assert (c.shared_bytes, c.stream) == (123_456, 0xABCD)
    assert {n: len(v) for n, v in c.attributes.items()} == {2: 64, 4: 64, 6: 64}
    assert c.attributes[2][0] == 1 and c.attributes[6][0] == 1


@pytest.mark.parametrize("attributes", [(), ((4, bytes(12)),)])
def test_a_launch_without_a_cluster_has_clusters_of_one(attributes):
    address, keep = raw_launch(attributes)
    assert host.decode_launch(address).cluster == (1, 1, 1)


def test_an_unknown_launch_attribute_is_named():
    address, keep = raw_launch([(7, b"")])
    with pytest.raises(VirtualGpuError, match="launch attribute 7 is not modelled"):
        host.decode_launch(address)


@pytest.mark.parametrize(("bad", "message"), [
    (dict(block=(1024, 2, 1)), r"block \(1024, 2, 1\): 2048 threads; allowed 1..1024"),
    (dict(block=(1, 0, 1)), "0 threads; allowed 1..1024"),
    (dict(block=(1, 1, 65)), "at most 64 in z"),
    (dict(grid=(0, 1, 1)), r"grid \(0, 1, 1\): each at least 1"),
    (dict(grid=(1, 65536, 1)), "y and z at most 65535"),
    (dict(grid=(1, 1, 65536)), "y and z at most 65535"),
    (dict(grid=(2**31, 1, 1)), "x at most 2147483647"),
    (dict(grid=(4, 3, 1), cluster=(2, 2, 1)), r"grid \(4, 3, 1\) is not a multiple of the cluster \(2, 2, 1\)"),
    (dict(grid=(16, 1, 1), cluster=(16, 1, 1)), r"16 CTAs; allowed 1..8 \(16 with NonPortableClusterSizeAllowed\)"),
    (dict(grid=(32, 1, 1), cluster=(32, 1, 1)), r"32 CTAs; allowed 1..8\n"),
    (dict(shared=49_153 - 100), r"49053 bytes of dynamic shared memory; allowed 49052 \(100 static, .* not set\)"),
    (dict(grid=(4737, 1, 1), attributes={2: b"\1" + bytes(63)}),
     "cooperative launch of 4737 CTAs; at most 4736 are resident"),
])
def test_a_launch_that_the_driver_would_refuse(virtual, bad, message):
    with pytest.raises(VirtualGpuError, match=message) as e:
        host.check_launch(virtual, launched(virtual), config(**bad))
    assert e.value.kind == "launch" and e.value.kernel == "second"


def test_launches_at_the_limits(virtual):
    plain = launched(virtual)
    host.check_launch(virtual, plain, config(block=(16, 1, 64), grid=(2**31 - 1, 65535, 65535)))
    host.check_launch(virtual, plain, config(grid=(8, 8, 1), cluster=(4, 2, 1), shared=49_152 - 100))
    host.check_launch(virtual, plain, config(grid=(4736, 1, 1), attributes={2: b"\1" + bytes(63)}))
    wide = launched(virtual, dynamic=232_448 - 100, wide=1)
    host.check_launch(virtual, wide, config(grid=(16, 1, 1), cluster=(16, 1, 1), shared=232_348))
    with pytest.raises(VirtualGpuError, match=r"32 CTAs; allowed 1..16\n"):
        host.check_launch(virtual, wide, config(grid=(32, 1, 1), cluster=(32, 1, 1)))
    with pytest.raises(VirtualGpuError, match="232349 bytes of dynamic shared memory; allowed 232348"):
        host.check_launch(virtual, wide, config(shared=232_349))


def test_static_shared_memory_counts_alignment_and_the_kernels_own(virtual):
    assert launched(virtual, "second").static_shared == 100
    assert launched(virtual, "first").static_shared == 104 + 8


def test_kernel_attributes(virtual):
    handle = virtual.kernel(virtual.load([PTX]), "first")
    assert virtual.kernel_attribute(handle, 1) == 112
    assert virtual.kernel_attribute(handle, 8) == 49_152 - 112
    virtual.set_kernel_attribute(handle, 8, 232_448 - 112)
    assert virtual.kernel_attribute(handle, 8) == 232_336
    with pytest.raises(VirtualGpuError, match="MaxDynamicSharedMemorySize: 232337 bytes; allowed 0..232336"):
        virtual.set_kernel_attribute(handle, 8, 232_337)
    for call in (lambda: virtual.kernel_attribute(handle, 4), lambda: virtual.set_kernel_attribute(handle, 10, 1)):
        with pytest.raises(VirtualGpuError, match="kernel attribute (4|10) is not modelled"):
            call()


def test_libraries_and_kernels_by_handle(virtual):
    library, other = virtual.load([PTX]), virtual.load([PTX.replace("100]", "200]")])
    first, second = virtual.kernel(library, "second"), virtual.kernel(other, "second")
    assert first != second and "[100]" in virtual.by_handle(first).text and "[200]" in virtual.by_handle(second).text
    with pytest.raises(VirtualGpuError, match="no kernel 'sec'"):
        virtual.kernel(library, "sec")
    virtual.unload(library)
    assert virtual.by_handle(second).name == "second"
    with pytest.raises(VirtualGpuError, match=f"{first:#x} is not a kernel handle"):
        virtual.by_handle(first)
    with pytest.raises(VirtualGpuError, match="is not known: it was compiled before vgpu.install"):
        virtual.load(None)


def test_exceptions_of_callbacks_come_out_unchanged():
    lost = VirtualGpuError("race", "made in a callback")

    def fail() -> None:
        raise lost

    callback = host._callback(fail)

    @host.raises_kept
    def call(code: int) -> str:
        if callback() != 0 and code:
            raise RuntimeError("what the DSL makes of it")
        return "returned"

    for code in (0, 1):
        with pytest.raises(VirtualGpuError) as e:
            call(code)
        assert e.value is lost and e.value.__cause__ is None
    callback()  # outside any wrapped call: must not turn up in the next one
    assert host.raises_kept(lambda: "fine")() == "fine"
    with pytest.raises(KeyError):
        host.raises_kept(lambda: {}["own error"])()


@pytest.mark.parametrize(("pipeline", "expected", "asked"), [
    ("builtin.module(cute-to-nvvm{cubin-format=bin opt-level=3})",
     "builtin.module(cute-to-nvvm{dump-ptx-path='/t/k' cubin-format=bin opt-level=3})", None),
    ("builtin.module(cute-to-nvvm{cubin-format=bin dump-ptx-path='/u/x' opt-level=3})",
     "builtin.module(cute-to-nvvm{cubin-format=bin dump-ptx-path='/t/k' opt-level=3})", "/u/x"),
    ("builtin.module(canonicalize,cse)", "builtin.module(canonicalize,cse)", None),
])
def test_the_pipeline_writes_ptx(pipeline, expected, asked):
    assert host.keep_ptx(pipeline, "/t/k") == (expected, asked)


def test_options_before_the_script_are_the_virtual_gpus():
    o = parser().parse_args(["--arch", "sm_103a", "--order", "random", "--seed", "7", "--exact", "--counters", "x.py",
                             "--seed", "1", "--help"])
    assert (o.arch, o.order, o.seed, o.exact, o.counters) == ("sm_103a", "random", 7, True, True)
    assert (o.script, o.args) == ("x.py", ["--seed", "1", "--help"])


@pytest.mark.parametrize(("argv", "code", "said"), [
    (["--help"], 0, "python -m vgpu --order random"), (["nowhere.py"], 2, "nowhere.py: no such file"),
    (["--arch", "sm_80", __file__], 2, "arch: 'sm_80'"), (["--order", "late", __file__], 2, "invalid choice: 'late'")])
def test_the_command_line_explains_itself(argv, code, said, capsys):
    with pytest.raises(SystemExit) as e:
        main(argv)
    printed = capsys.readouterr()
    assert e.value.code == code and said in printed.out + printed.err


# ---------------------------------------------------------------------------------------------------------------------
# With CuTeDSL, in processes of their own


KERNELS = '''
import cutlass
import cutlass.cute as cute

@cute.kernel
def add_kernel(a: cute.Tensor, b: cute.Tensor, s: cutlass.Int32, twice: cutlass.Constexpr):
    x, _, _ = cute.arch.thread_idx()
    y, _, _ = cute.arch.block_idx()
    b[y * 64 + x] = a[y * 64 + x] + s + (s if cutlass.const_expr(twice) else 0)

@cute.jit
def add(a: cute.Tensor, b: cute.Tensor, s: cutlass.Int32):
    add_kernel(a, b, s, False).launch(grid=[4, 1, 1], block=[64, 1, 1])

@cute.jit
def add_clustered(a: cute.Tensor, b: cute.Tensor, s: cutlass.Int32, twice: cutlass.Constexpr):
    add_kernel(a, b, s, twice).launch(grid=[4, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1], smem=100_000)

@cute.jit
def add_badly(a: cute.Tensor, b: cute.Tensor, s: cutlass.Int32):
    add_kernel(a, b, s, False).launch(grid=[3, 1, 1], block=[64, 1, 1], cluster=[2, 1, 1])

@cute.jit
def add_two(a: cute.Tensor, b: cute.Tensor, s: cutlass.Int32):
    add_kernel(a, b, s, False).launch(grid=[1, 1, 1], block=[64, 1, 1])
    add_kernel(a, b, s, True).launch(grid=[2, 1, 1], block=[64, 1, 1])
'''

RECORDING = '''
import ctypes, json, os, sys
from vgpu import host
from vgpu.errors import VirtualGpuError

records, error = [], None

def launch(text, name, config, address_of_argument):
    if error is not None:
        raise error
    read = lambda i, n: int.from_bytes(ctypes.string_at(address_of_argument(i), n), "little")
    records.append(dict(text=text, name=name, grid=config.grid, block=config.block, cluster=config.cluster,
                        shared=config.shared_bytes, stream=config.stream, args=[read(0, 8), read(1, 8), read(2, 4)]))

host.install_host("sm_100a", launch)
import torch
import kernels
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack

a, b = torch.arange(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
A, B = from_dlpack(a), from_dlpack(b)
out = {"pointers": [a.data_ptr(), b.data_ptr()]}
'''


def run(tmp_path: Path, program: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[dict, str]:
    """Run a program that prints JSON last, in a fresh process with the kernels beside it. Returns it and stderr."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)]), "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, *options, str(script), *arguments], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@needs_cutlass
def test_launches_arrive_with_their_configuration_arguments_and_text(tmp_path):
    out, stderr = run(tmp_path, RECORDING + '''
once = cute.compile(kernels.add_clustered, A, B, 3, False)
twice = cute.compile(kernels.add_clustered, A, B, 3, True)   # after it: a kernel of a similar name
out["returned"] = [once(A, B, 3), twice(A, B, 4), once(A, B, -5)]
kernels.add(A, B, 6)
out["libraries"] = len(host._host.libraries)
kernels.add(A, B, 6)                                          # the cached executor
out["libraries again"] = len(host._host.libraries)
cute.compile(kernels.add_two, A, B, 8)(A, B, 8)
out["records"] = records
out["left"] = [f for f in os.listdir() if f.startswith("vgpu-") or f.endswith(".ptx")]
print(json.dumps(out))
''')
    records = out["records"]
    assert out["returned"] == [0, 0, 0]
    assert [r["args"] for r in records] == [
        [*out["pointers"], s & 0xFFFFFFFF] for s in (3, 4, -5, 6, 6, 8, 8)]
    assert [(r["grid"], r["cluster"], r["shared"]) for r in records] == \
        3 * [([4, 1, 1], [2, 1, 1], 100_000)] + 2 * [([4, 1, 1], [1, 1, 1], 0)] + \
        [([1, 1, 1], [1, 1, 1], 0), ([2, 1, 1], [1, 1, 1], 0)]
    assert all(r["block"] == [64, 1, 1] and r["stream"] == 0 for r in records)
    assert records[0]["text"] == records[2]["text"] != records[1]["text"]
    assert records[3]["text"] == records[4]["text"] and out["libraries"] == out["libraries again"]
    assert records[5]["text"] == records[6]["text"] and records[5]["name"] != records[6]["name"]
    for r in records:
        assert f".entry {r['name']}(" in r["text"] and ".target sm_100a" in r["text"]
    assert out["left"] == []
    assert "Warning" not in stderr and "could not load" not in stderr.lower()


@needs_cutlass
def test_errors_reach_the_caller_as_raised(tmp_path):
    out, _ = run(tmp_path, RECORDING + '''
compiled = cute.compile(kernels.add, A, B, 3)
out["same"] = []
for error in (VirtualGpuError("race", "first launch"), VirtualGpuError("race", "x"), KeyError("k"),
              KeyboardInterrupt()):
    for call in (compiled, kernels.add):
        try:
            call(A, B, 3)
        except BaseException as e:
            out["same"].append(e is error)
error = None
out["afterwards"] = compiled(A, B, 3)
try:
    cute.compile(kernels.add_badly, A, B, 3)(A, B, 3)
except VirtualGpuError as e:
    out["refused"] = str(e)
print(json.dumps(out))
''')
    assert out["same"] == [True] * 8
    assert out["afterwards"] == 0
    assert "grid (3, 1, 1) is not a multiple of the cluster (2, 1, 1)" in out["refused"]


@needs_cutlass
def test_questions_about_the_device_are_answered(tmp_path):
    out, _ = run(tmp_path, RECORDING + '''
from cuda.bindings import driver, runtime
from cutlass.utils import HardwareInfo
os.mkdir("kept")
compiled = cute.compile(kernels.add, A, B, 3, options="--keep-ptx --dump-dir=kept")
compiled(A, B, 3)
out["kept"] = [open(os.path.join("kept", f)).read().rstrip("\\0") == records[0]["text"] for f in os.listdir("kept")]
out["__ptx__"] = compiled.__ptx__.rstrip("\\0") == records[0]["text"]
info = HardwareInfo()
out["clusters"] = [info.get_max_active_clusters(n) for n in (1, 2, 4, 16)]
out["sms"] = info.get_device_multiprocessor_count()
properties = runtime.cudaGetDeviceProperties(0)[1]
out["properties"] = [properties.major, properties.multiProcessorCount, properties.sharedMemPerBlockOptin]
out["count"] = [runtime.cudaGetDeviceCount()[1], driver.cuDeviceGetCount()[1]]
out["codes"] = [int(driver.cuInit(0)[0]), int(runtime.cudaDeviceSynchronize()[0]), len(driver.cuInit(0))]
out["cuda"] = torch.cuda.is_available()
out["refused"] = []
for call in (lambda: driver.cuMemAllocHost(16), lambda: runtime.cudaMalloc(16), lambda: driver.cuDeviceGet(1),
             lambda: driver.cuLaunchKernel(None, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)):
    try:
        call()
    except VirtualGpuError as e:
        out["refused"].append(str(e))
for arch in ("sm_100a", "sm_90a"):
    try:
        host.install_host(arch, launch)
    except RuntimeError as e:
        out["again"] = str(e)
print(json.dumps(out))
''')
    assert out["kept"] == [True] and out["__ptx__"]
    assert out["clusters"] == [148, 74, 37, 9] and out["sms"] == 148
    assert out["properties"] == [10, 148, 232_448]
    assert out["count"] == [1, 1] and out["codes"] == [0, 0, 1] and out["cuda"] is False
    assert [s.split(":")[1].strip() for s in out["refused"]] == [
        "cuMemAllocHost", "cudaMalloc", "device 1; the only virtual device is 0", "cuLaunchKernel"]
    assert "'sm_90a', but CuTeDSL already compiles for 'sm_100a'" in out["again"]


@needs_cutlass
@pytest.mark.parametrize("arch", ["sm_90a", "sm_103a"])
def test_other_architectures(tmp_path, arch):
    out, _ = run(tmp_path, RECORDING.replace("sm_100a", arch) + '''
kernels.add(A, B, 3)
print(json.dumps([line for line in records[0]["text"].splitlines() if ".target" in line]))
''')
    assert len(out) == 1 and out[0].split()[1].rstrip(",") == arch


@needs_cutlass
def test_cutlass_imported_first_for_another_architecture(tmp_path):
    out, _ = run(tmp_path, '''
import json, os
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
import cutlass
from vgpu import host
try:
    host.install_host("sm_100a", None)
except RuntimeError as e:
    print(json.dumps([str(e), host._host is None]))
''')
    assert "arch: 'sm_100a', but CuTeDSL already compiles for 'sm_90a'" in out[0]
    assert "call vgpu.install before importing cutlass, or set CUTE_DSL_ARCH=sm_100a" in out[0] and out[1]


@needs_cutlass
def test_a_kernel_from_the_dsls_file_cache_is_compiled_again(tmp_path):
    program = RECORDING.replace("from vgpu", "import cutlass\nfrom vgpu", 1) + '''
kernels.add(A, B, 3)
print(json.dumps([len(records), ".entry" in records[0]["text"]]))
'''
    assert [run(tmp_path, program)[0] for _ in range(2)] == 2 * [[1, True]]


GPU_PROGRAM = '''
import json, math, sys
import torch
import cuda.bindings.driver as cuda
import cutlass.torch as cutlass_torch
import cutlass.cute as cute
import kernels
from cutlass.cute.runtime import from_dlpack
try:
    from cutlass.testing import JitArguments, benchmark
except ImportError:
    from cutlass.cute.testing import JitArguments, benchmark

assert __name__ == "__main__" and torch.cuda.is_available()
out = {"argv": sys.argv[1:], "capability": torch.cuda.get_device_capability(), "count": torch.cuda.device_count()}
original = torch.arange(256, dtype=torch.int32)
a, b = original.cuda(), torch.zeros(256, dtype=torch.int32, device="cuda")
before = b.cpu()
stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
assert int(stream) == int(cutlass_torch.default_stream()) == 0
A, B = from_dlpack(a), from_dlpack(b)
compiled = cute.compile(kernels.add, A, B, 3)
compiled(A, B, 3)
torch.cuda.synchronize()
out["right"] = torch.equal(b.cpu(), original + 3) and not before.any().item()
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
start.record(), end.record()
out["time"] = [math.isnan(start.elapsed_time(end)),
               math.isnan(benchmark(compiled, kernel_arguments=JitArguments(A, B, 3), iterations=2,
                                    warmup_iterations=1))]
generator = torch.Generator(device="cuda").manual_seed(5)
made = [a, a.to("cuda:0"), torch.ones(2, device=0), a[3:].view(torch.float32), a + 1, torch.empty_like(a),
        torch.nn.Linear(2, 2).cuda().weight, original.to("cuda", torch.float16), original.to(a),
        torch.empty_like(original, device="cuda"), torch.randint(9, (3,), device="cuda", generator=generator),
        torch.ones(2, device=torch.device("cuda", 0)), torch.cat([a, a]), *a.split(128)]
with torch.device("cuda"):
    made.append(torch.zeros(3))
torch.set_default_device("cuda")
made.append(torch.zeros(3))
torch.set_default_device("cpu")
kept = [original, b.cpu(), a.to("cpu"), torch.zeros(3), torch.ones(256, dtype=torch.int32).copy_(a),
        a.to(torch.ones(1)), torch.zeros_like(a, device="cpu")]
out["cuda"] = [t.is_cuda and t.device == torch.device("cuda", 0) and t.get_device() == 0 for t in made]
out["cpu"] = [t.is_cuda or t.device.type != "cpu" for t in kept]
out["identity"] = [a.cuda() is a, original.cpu() is original, a.data_ptr() != original.data_ptr()]
print(json.dumps(out))
'''


@needs_cutlass
def test_a_program_written_for_a_gpu_runs_unchanged(tmp_path):
    out, stderr = run(tmp_path, GPU_PROGRAM, "-m", "vgpu", "--seed", "3", arguments=("--seed", "4"))
    assert out["argv"] == ["--seed", "4"]
    assert (out["capability"], out["count"]) == ([10, 0], 1)
    assert out["right"] is True and out["time"] == [True, True]
    assert all(out["cuda"]) and not any(out["cpu"]) and all(out["identity"])
    assert "models no time" in stderr


@needs_cutlass
def test_counters_are_printed_after_the_program_even_if_it_fails(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS)
    script = tmp_path / "program.py"
    script.write_text(RECORDING.split("host.install_host")[0].split("records")[0] + '''
import torch, kernels
from cutlass.cute.runtime import from_dlpack
a = torch.arange(256, dtype=torch.int32, device="cuda")
kernels.add(from_dlpack(a), from_dlpack(a), 1)
sys.exit(5)
''')
    done = subprocess.run([sys.executable, "-m", "vgpu", "--counters", str(script)], cwd=tmp_path, capture_output=True,
                          text=True, timeout=120, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"})
    assert done.returncode == 5, done.stderr
    printed = json.loads(done.stdout)
    assert printed["launches"] == 1 and printed["grid"] == [4, 1, 1] and printed["counters"]["ctas"] == 4
    assert "add_kernel" in printed["kernel"]
