"""The host side of submission.py: what it refuses and how it says so, its sizes and caches, the PTX it compiles to.

No GPU and no driver is needed.
"""

import ctypes
import os
import re
import subprocess
import sys
import threading
import weakref
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import submission
from submission import CONFIG, NARROW, Config, choose_config, validate, why_not
from vgpu import host

ROOT = Path(submission.__file__).parent
M, N, K, L = 129, 136, 320, 3
NAMES = ("a", "b", "sfa_ref", "sfb_ref", "sfa_permuted", "sfb_permuted", "c")


def packed(rows, k, batches):
    """[rows, k/2, batches] float4_e2m1fn_x2, K-major."""
    numbers = torch.randint(0, 256, (batches, rows, k // 2), dtype=torch.uint8)
    return numbers.permute(1, 2, 0).view(torch.float4_e2m1fn_x2)


def scales(rows, k, batches):
    """The scales in plain and in permuted order; no element of one is related to the other."""
    plain = torch.zeros((batches, rows, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    atoms = torch.zeros((batches, -(-rows // 128), -(-k // 64), 32, 4, 4), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return plain.permute(1, 2, 0), atoms.permute(3, 4, 1, 5, 2, 0)


def make_data(m=M, n=N, k=K, batches=L):
    """The contest's seven tensors on the CPU, by name."""
    sfa, sfa_permuted = scales(m, k, batches)
    sfb, sfb_permuted = scales(n, k, batches)
    c = torch.full((batches, m, n), 7.0, dtype=torch.float16).permute(1, 2, 0)
    tensors = (packed(m, k, batches), packed(n, k, batches), sfa, sfb, sfa_permuted, sfb_permuted, c)
    return dict(zip(NAMES, tensors, strict=True))


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch):
    """No test goes the short way for what another has launched."""
    monkeypatch.setattr(submission, "_prepared", ())


@pytest.fixture
def launches(monkeypatch):
    """Replaces compiling and launching by a list of the launches (words, stream)."""
    seen = []

    def kernel(arguments, stream):
        pointers = arguments.__c_pointers__()
        words = [ctypes.c_int64.from_address(pointer).value for pointer in pointers]
        seen.append((words, int(stream)))

    success = submission.cuda_runtime.cudaError_t.cudaSuccess
    monkeypatch.setattr(submission, "compile_kernel", lambda config, device: kernel)
    monkeypatch.setattr(submission.cuda_runtime, "cudaStreamSynchronize", lambda stream: (success,))
    return seen


# --- Config and why_not ----------------------------------------------------------------------------------------------


def test_stages_fill_the_shared_memory():
    operand_bytes = 128 * 256 // 2  # 128 rows of 256 4-bit numbers
    scale_bytes = 128 * 256 // 16  # one byte for 16 numbers
    stage = 2 * operand_bytes + 2 * scale_bytes
    assert CONFIG.stage_bytes == stage
    assert CONFIG.shared_bytes == 1024 + CONFIG.stages * stage
    assert CONFIG.shared_bytes <= 227 * 1024 < CONFIG.shared_bytes + stage


def test_stages_of_the_narrow_tile():
    stage = 128 * 128 + 64 * 128 + 2 * 128 * 16  # A, B, then SFA and whole atoms of SFB
    assert NARROW.stage_bytes == stage
    assert NARROW.shared_bytes == 1024 + NARROW.stages * stage
    assert NARROW.shared_bytes <= 227 * 1024 < NARROW.shared_bytes + stage
    assert NARROW.tmem_columns == 128  # 64 for the accumulator, 16 for SFA, 16 for SFB
    assert 8 * (2 * NARROW.stages + 1) + 4 <= submission.TILE_ALIGNMENT


@pytest.mark.parametrize(
    ("size", "sms", "config"),
    [
        ((128, 7168, 1), 148, NARROW),  # 56 tiles of 128 columns, or 112 of 64
        ((128, 74 * 128, 1), 148, NARROW),
        ((128, 74 * 128 + 8, 1), 148, CONFIG),
        ((128, 7168, 1), 132, NARROW),
        ((128, 7168, 1), 111, CONFIG),
        ((128, 7168, 2), 148, CONFIG),
        ((2304, 4608, 1), 148, CONFIG),
        ((1, 8, 1), 148, NARROW),
    ],
)
def test_the_narrow_tile_where_half_of_the_sms_would_idle(size, sms, config):
    assert choose_config(*size, sms=sms) == config


@pytest.mark.parametrize(("extra", "stages"), [(-1, 0), (0, 1), (36863, 1), (36864, 2), (3 * 36864, 4)])
def test_stages_follow_from_the_shared_memory(extra, stages):
    config = Config(shared_memory=1024 + 36864 + extra)
    assert config.stages == stages
    assert (why_not(config, 128, 128, 256, 1) is None) == (stages > 0)


def test_the_barriers_fit_before_the_tiles():
    barrier_bytes = 8 * (2 * CONFIG.stages + 1) + 4
    assert barrier_bytes <= submission.TILE_ALIGNMENT


def test_tmem_holds_accumulator_and_scales():
    used = 128 + 4 * (128 // 32) + 4 * (128 // 32)  # accumulator columns, then 4 k-blocks of SFA and of SFB
    assert used <= CONFIG.tmem_columns < 2 * used
    assert CONFIG.tmem_columns & (CONFIG.tmem_columns - 1) == 0


@pytest.mark.parametrize(
    "size",
    [(1, 8, 64, 1), (127, 136, 192, 3), (128, 256, 256, 1), (129, 8, 16384, 65535), (2**20, 65535 * 128, 64, 2)],
)
def test_why_not_accepts(size):
    assert why_not(CONFIG, *size) is None


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((0, 8, 64, 1), "m = 0: must be from 1"),
        ((2**31, 8, 64, 1), "m = 2147483648: must be from 1"),
        ((128, 0, 64, 1), "n = 0: must be a multiple of 8"),
        ((128, 100, 64, 1), "n = 100: must be a multiple of 8"),
        ((1, 65536 * 128, 64, 1), "n = 8388608: must be a multiple of 8 from 8 to 8388480"),
        ((128, 8, 0, 1), "k = 0: must be a multiple of 64"),
        ((128, 8, 96, 1), "k = 96: must be a multiple of 64"),
        ((128, 8, 64, 0), "l = 0: must be from 1 to 65535"),
        ((128, 8, 64, 65536), "l = 65536: must be from 1 to 65535"),
        ((2**20, 8, 2**15, 1), "a batch has 2147483648 bytes of scales, must be below 2^31"),
    ],
)
def test_why_not_refuses_a_size(size, reason):
    assert reason in why_not(CONFIG, *size)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tile_m", 64, "tile (64, 128, 256)"),
        ("tile_n", 32, "tile (128, 32, 256)"),
        ("tile_k", 0, "tile (128, 128, 0)"),
        ("mma_k", 32, "mma_k = 32: must be 64"),
        ("sf_vec_size", 0, "sf_vec_size = 0: must be 16"),
        ("cluster", (2, 1), "cluster (2, 1): must be (1, 1)"),
        ("epilogue_warps", 8, "epilogue_warps = 8: must be 4"),
        ("store_columns", 48, "store_columns = 48: must be 16, 32 or 64"),
        ("shared_memory", 232449, "shared_memory = 232449: a CTA can have 232448"),
        ("shared_memory", 100, "shared_memory = 100: one stage needs 37888"),
    ],
)
def test_why_not_refuses_a_configuration(field, value, reason, monkeypatch):
    compiled = []
    monkeypatch.setattr(submission.cute, "compile", lambda *arguments: compiled.append(arguments))
    config = Config(**{field: value})
    assert reason in why_not(config, 128, 128, 256, 1)
    with pytest.raises(ValueError, match=re.escape(reason)):
        submission.compile_kernel(config, torch.device("cpu"))
    assert not compiled


# --- Refused inputs --------------------------------------------------------------------------------------------------


def resized(tensor, nbytes):
    """The same view of a storage that was cut to ``nbytes``."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(nbytes)
    return copy


def moved(tensor, nbytes):
    """A copy whose first element lies ``nbytes`` after an aligned address."""
    size = tensor.element_size()
    memory = torch.zeros(tensor.numel() * size + 64, dtype=torch.uint8)
    offset = -memory.data_ptr() % 16 + nbytes
    flat = memory[offset : offset + tensor.numel() * size].view(tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


REFUSED = {
    "not a tensor": ("b", lambda t: [1, 2], TypeError, "b: is a list, allowed is a strided torch.Tensor"),
    "sparse": ("c", lambda t: torch.zeros(2, 2).to_sparse(), TypeError, "c: is a torch.sparse_coo, allowed is a"),
    "dtype of a": ("a", lambda t: t.view(torch.uint8), TypeError, "a: dtype is torch.uint8, allowed is torch.float4"),
    "dtype of scales": (
        "sfa_permuted",
        lambda t: t.view(torch.float8_e4m3fnuz),
        TypeError,
        "sfa_permuted: dtype is torch.float8_e4m3fnuz, allowed is torch.float8_e4m3fn",
    ),
    "dtype of c": ("c", lambda t: t.float(), TypeError, "c: dtype is torch.float32, allowed is torch.float16"),
    "rank": ("b", lambda t: t[:, :, 0], ValueError, "b: rank is 2 (shape (136, 160)), allowed is [n, k/2, l]"),
    "rank of scales": (
        "sfb_permuted",
        lambda t: t[..., 0],
        ValueError,
        "sfb_permuted: rank is 5 (shape (32, 4, 2, 4, 5)), allowed is [32, 4, ceil(n/128), 4, ceil(k/64), l]",
    ),
    "device of a": ("a", lambda t: t.to("meta"), ValueError, "a: is on device meta, allowed are cuda and cpu"),
    "device of c": ("c", lambda t: t.to("meta"), ValueError, "c: is on device meta, allowed is cpu, where a is"),
    "device of unread scales": ("sfb_ref", lambda t: t.to("meta"), ValueError, "sfb_ref: is on device meta"),
    "m": ("a", lambda t: t[:0], ValueError, "a (0, 160, 3), b (136, 160, 3): m = 0: must be from 1"),
    "n": ("b", lambda t: t[:132], ValueError, "b (132, 160, 3): n = 132: must be a multiple of 8"),
    "k": ("a", lambda t: t[:, :144], ValueError, "a (129, 144, 3), b (136, 160, 3): k = 288: must be a multiple of 64"),
    "l": ("a", lambda t: t[:, :, :0], ValueError, "a (129, 160, 0), b (136, 160, 3): l = 0: must be from 1"),
    "k of b": ("b", lambda t: packed(N, 256, L), ValueError, "b: shape is (136, 128, 3), allowed is (136, 160, 3)"),
    "l of b": ("b", lambda t: packed(N, K, 1), ValueError, "b: shape is (136, 160, 1), allowed is (136, 160, 3)"),
    "m of c": ("c", lambda t: t[:128], ValueError, "c: shape is (128, 136, 3), allowed is (129, 136, 3) = [m, n, l]"),
    "k of sfa_ref": ("sfa_ref", lambda t: t[:, :16], ValueError, "sfa_ref: shape is (129, 16, 3), allowed is (129, 20"),
    "too few scale rows": (
        "sfa_permuted",
        lambda t: t[:, :, :1],
        ValueError,
        "sfa_permuted: shape is (32, 4, 1, 4, 5, 3), allowed is (32, 4, 2, 4, 5, 3)",
    ),
    "too few scale columns": (
        "sfb_permuted",
        lambda t: t[:, :, :, :, :4],
        ValueError,
        "sfb_permuted: shape is (32, 4, 2, 4, 4, 3), allowed is (32, 4, 2, 4, 5, 3)",
    ),
    "strides of a": (
        "a",
        lambda t: t.permute(1, 0, 2).view(torch.uint8).contiguous().permute(1, 0, 2).view(torch.float4_e2m1fn_x2),
        ValueError,
        "a: strides are (3, 387, 1), allowed are (160, 1, 20640)",
    ),
    "strides of scales": (
        "sfa_permuted",
        lambda t: t.view(torch.uint8).contiguous().view(torch.float8_e4m3fn),
        ValueError,
        "sfa_permuted: strides are (480, 120, 60, 15, 3, 1), allowed are (16, 4, 2560, 1, 512, 5120)",
    ),
    "padded rows of c": (
        "c",
        lambda t: torch.zeros(L, M, N + 8, dtype=torch.float16)[:, :, :N].permute(1, 2, 0),
        ValueError,
        "c: strides are (144, 1, 18576), allowed are (136, 1, 17544)",
    ),
    "storage of scales": (
        "sfb_permuted",
        lambda t: resized(t, 2 * 5 * 512 * 3 - 1),
        ValueError,
        "sfb_permuted: its storage holds 15359 bytes from its first element on, needed are 15360",
    ),
    "storage of c": ("c", lambda t: resized(t, 16), ValueError, "c: its storage holds 16 bytes"),
    "address of a": ("a", lambda t: moved(t, 8), ValueError, "8, allowed are multiples of 16"),
    "address of scales": ("sfa_permuted", lambda t: moved(t, 1), ValueError, "1, allowed are multiples of 16"),
    "address of c": ("c", lambda t: moved(t, 2), ValueError, "2, allowed are multiples of 16"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_happens(case, launches):
    name, spoil, error, message = REFUSED[case]
    data = make_data()
    c = data["c"]
    data[name] = spoil(data[name])
    with pytest.raises(error) as caught:
        submission.custom_kernel(tuple(data.values()))
    assert message in str(caught.value)
    assert name in str(caught.value)
    assert not launches
    assert bool((c == 7).all())


@pytest.mark.parametrize(
    ("data", "was"), [(None, "NoneType"), (torch.zeros(7), "Tensor"), ((), "0 of them"), ((1,) * 8, "8 of them")]
)
def test_refused_when_not_seven(data, was):
    with pytest.raises(ValueError, match=f"data: is {was}, allowed is a tuple of a, b, sfa_ref, .*, c"):
        validate(data)


# --- Accepted inputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(M, N, K, L), (1, 8, 64, 1), (128, 256, 256, 1), (127, 8, 192, 2)])
def test_accepted_and_launched_once(size, launches):
    data = make_data(*size)
    assert submission.custom_kernel(tuple(data.values())) is data["c"]
    addresses = [data[name].data_ptr() for name in ("a", "b", "sfa_permuted", "sfb_permuted", "c")]
    assert launches == [([*addresses, *size], 0)]


def test_a_list_of_tensors_is_accepted(launches):
    submission.custom_kernel(list(make_data().values()))
    assert len(launches) == 1


def test_strides_of_single_elements_do_not_matter():
    data = make_data(1, 8, 64, 1)
    data["a"] = data["a"].as_strided((1, 32, 1), (12345, 1, 777))
    data["c"] = data["c"].as_strided((1, 8, 1), (3, 1, 5))
    assert validate(tuple(data.values()))[:4] == (1, 8, 64, 1)


def test_what_is_remembered_is_not_the_address_storage_or_dtype():
    good = make_data()
    for _ in range(2):  # the second time the layout is remembered
        assert validate(tuple(good.values()))[:4] == (M, N, K, L)
    for name, spoil in (
        ("a", lambda t: moved(t, 4)),
        ("c", lambda t: resized(t, 64)),
        ("b", lambda t: t.view(torch.uint8)),
        ("sfa_ref", lambda t: t.view(torch.int8)),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            validate(tuple({**good, name: spoil(good[name])}.values()))
    assert validate(tuple(good.values()))[:4] == (M, N, K, L)


def test_expected_strides_are_those_of_the_contest():
    """Memory [l, rest_mn, rest_k, 32, 4, 4], seen by the contest as [32, 4, rest_mn, 4, rest_k, l]."""
    _, _, _, _, sfa, sfb, c = submission.expected_layouts(M, N, K, L)
    data = make_data()
    for (shape, strides), name in ((sfa, "sfa_permuted"), (sfb, "sfb_permuted"), (c, "c")):
        assert (shape, strides) == (tuple(data[name].shape), data[name].stride())


# --- Devices, streams, compilation -----------------------------------------------------------------------------------


@pytest.fixture
def forget_devices():
    submission.require_device.cache_clear()
    yield
    submission.require_device.cache_clear()


def answer(monkeypatch, *answers):
    """Makes the CUDA runtime give these answers in turn, and returns the list of what it was asked."""
    asked, left = [], list(answers)

    def attribute(which, device):
        asked.append((int(which), device))
        return left.pop(0)

    monkeypatch.setattr(submission.cuda_runtime, "cudaDeviceGetAttribute", attribute)
    return asked


def test_cpu_tensors_need_a_device_that_reads_them(monkeypatch, forget_devices):
    errors = submission.cuda_runtime.cudaError_t
    cpu = torch.device("cpu")
    asked = answer(
        monkeypatch, (errors.cudaErrorInsufficientDriver, None), (errors.cudaSuccess, 0), (errors.cudaSuccess, 1)
    )
    with pytest.raises(RuntimeError, match="no CUDA device .cudaErrorInsufficientDriver.; needed is .* 10.x"):
        submission.require_device(cpu)
    with pytest.raises(RuntimeError, match="the tensors are on the CPU, which the CUDA device cannot read"):
        submission.require_device(cpu)
    for _ in range(3):  # only a success is remembered
        submission.require_device(cpu)
    assert asked == [(88, 0)] * 3  # cudaDevAttrPageableMemoryAccess


@pytest.mark.parametrize(
    ("capability", "accepted"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_cuda_tensors_need_compute_capability_10(capability, accepted, monkeypatch, forget_devices):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda", 1)
    if accepted:
        assert submission.require_device(device) is None
    else:
        number = ".".join(map(str, capability))
        with pytest.raises(RuntimeError, match=f"cuda:1 has compute capability {number}; needed is .* 10.x"):
            submission.require_device(device)


def test_without_a_device_nothing_is_compiled(monkeypatch, forget_devices):
    compiled = []
    monkeypatch.setattr(submission, "_compiled", {})
    monkeypatch.setattr(submission.cute, "compile", lambda *arguments: compiled.append(arguments))
    answer(monkeypatch, (submission.cuda_runtime.cudaError_t.cudaErrorNoDevice, None))
    with pytest.raises(RuntimeError, match="there is no CUDA device"):
        submission.custom_kernel(tuple(make_data().values()))
    assert not compiled


def test_a_failed_kernel_is_reported_for_cpu_tensors(monkeypatch, launches):
    error = submission.cuda_runtime.cudaError_t.cudaErrorIllegalAddress
    monkeypatch.setattr(submission.cuda_runtime, "cudaStreamSynchronize", lambda stream: (error,))
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        submission.custom_kernel(tuple(make_data().values()))


def test_the_current_stream_is_read_at_every_call(monkeypatch, launches):
    streams, asked = [11, 22, 22, 33], []

    def current_stream(device):
        asked.append(device)
        return SimpleNamespace(cuda_stream=streams[len(asked) - 1])

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    data = tuple(make_data().values())
    device = torch.device("cuda", 1)
    for _ in streams:
        submission.run(data, validate(data)._replace(device=device))
    assert [stream for _, stream in launches] == streams
    assert asked == [device] * len(streams)


@pytest.mark.parametrize(("current", "switched"), [(0, True), (1, False)])
def test_the_device_is_switched_only_if_it_is_another(current, switched, monkeypatch):
    device, entered, ran = torch.device("cuda", 1), [], []

    @contextmanager
    def switch(to):
        entered.append(to)
        yield

    data = tuple(make_data().values())
    problem = validate(data)._replace(device=device)
    monkeypatch.setattr(submission, "validate", lambda data: problem)
    monkeypatch.setattr(submission, "run", lambda data, problem: ran.append(list(entered)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", switch)
    assert submission.custom_kernel(data) is data[6]
    assert ran == [[device] if switched else []]


def test_compiled_once_for_a_configuration_process_and_device(monkeypatch):
    compiled, process = [], [os.getpid()]

    def slow_compile(*arguments):
        threading.Event().wait(0.05)  # long enough for the other threads to arrive
        compiled.append(arguments)
        return len(compiled)

    @contextmanager
    def switch(to):
        yield

    monkeypatch.setattr(submission, "_compiled", {})
    monkeypatch.setattr(submission, "require_device", lambda device: None)
    monkeypatch.setattr(submission.cute, "compile", slow_compile)
    monkeypatch.setattr(submission.os, "getpid", lambda: process[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = torch.device("cpu")
    results = []

    def work():
        results.append(submission.compile_kernel(CONFIG, cpu))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 8
    assert submission.compile_kernel() == 1  # the organisers' harness calls it so
    assert submission.compile_kernel(CONFIG, torch.device("cuda", 0)) == 2
    assert submission.compile_kernel(CONFIG, torch.device("cuda", 1)) == 3
    assert submission.compile_kernel(Config(store_columns=32), cpu) == 4
    process[0] += 1
    assert submission.compile_kernel(CONFIG, cpu) == 5
    assert len(compiled) == 5


def test_import_needs_no_driver():
    script = (
        "import submission, torch\n"
        "assert 'libcuda.so' not in open('/proc/self/maps').read()\n"
        "assert not torch.cuda.is_initialized() and not submission._compiled\n"
        "print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "imported\n", done.stderr


# --- The short way ---------------------------------------------------------------------------------------------------


class Entry:
    """In the place of a compiled function and its C entry: records the launches (words, stream) of both."""

    def __init__(self, error=0):
        self.error, self.entered, self.called = error, [], []

    def enter(self, address):
        pointers = (ctypes.c_void_p * 11).from_address(address)
        words = [ctypes.c_int64.from_address(pointer).value for pointer in pointers[:10]]
        self.entered.append((words[:9], words[9]))
        ctypes.c_int32.from_address(pointers[10]).value = self.error

    def call(self, arguments, stream):
        words = [ctypes.c_int64.from_address(pointer).value for pointer in arguments.__c_pointers__()]
        self.called.append((words, int(stream)))


@pytest.fixture
def prepare(monkeypatch, launches):
    """Prepares data for the short way, with an Entry that it returns."""

    def prepare(data, device=None, error=0):
        entry = Entry(error)
        problem = validate(tuple(data.values()))
        problem = problem._replace(device=device or problem.device)
        prepared = submission.Prepared(tuple(data.values()), problem, entry.call, entry.enter)
        monkeypatch.setattr(submission, "_prepared", (prepared,))
        return entry

    return prepare


def words_of(data, size=(M, N, K, L)):
    return [*(data[name].data_ptr() for name in ("a", "b", "sfa_permuted", "sfb_permuted", "c")), *size]


@pytest.mark.parametrize("kind", [tuple, list])
def test_other_tensors_of_the_same_layout_go_the_short_way(kind, prepare, launches):
    entry = prepare(make_data())
    inputs = [make_data() for _ in range(3)]
    for data in inputs:
        assert submission.custom_kernel(kind(data.values())) is data["c"]
    assert entry.entered == [(words_of(data), 0) for data in inputs]
    assert not entry.called and not launches


@pytest.mark.parametrize("case", REFUSED)
def test_the_short_way_refuses_the_same(case, prepare, launches):
    name, spoil, error, message = REFUSED[case]
    data = make_data()
    entry = prepare(data)
    c = data["c"]
    data[name] = spoil(data[name])
    with pytest.raises(error) as caught:
        submission.custom_kernel(tuple(data.values()))
    assert message in str(caught.value)
    assert not entry.entered and not launches
    assert bool((c == 7).all())


def made_anew(tensor):
    """The tensor's storage is given up and made anew, too small."""
    nbytes = tensor.untyped_storage().nbytes()
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(nbytes - 1)


CHANGES = {
    "resize_": lambda t: t.resize_(t.shape[0] - 1, *t.shape[1:]),
    "set_ to another layout": lambda t: t.set_(t.untyped_storage(), 0, t.shape, t.contiguous().stride()),
    "set_ to another offset": lambda t: t.set_(torch.zeros(t.numel() + 1, dtype=t.dtype).untyped_storage(), 1, t.shape,
                                               t.stride()),
    "as_strided_": lambda t: t.as_strided_((1, *t.shape[1:]), t.stride()),
    "transpose_": lambda t: t.transpose_(0, 1),
    "data": lambda t: setattr(t, "data", t.data[:-1]),
    "storage cut": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1),
    "storage given up": lambda t: t.untyped_storage().resize_(0),
    "storage made anew": made_anew,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["c", "sfa_permuted"])
def test_a_change_in_place_is_seen(name, change, prepare, launches):
    data = make_data()
    tensors = tuple(data.values())
    entry = prepare(data)
    submission.custom_kernel(tensors)
    tensor, version = data[name], data[name]._version
    CHANGES[change](tensor)
    assert tensor is tensors[NAMES.index(name)] and tensor._version >= version
    with pytest.raises(ValueError, match=f"^{name}: "):
        submission.custom_kernel(tensors)
    assert len(entry.entered) == 1 and not launches


@pytest.mark.parametrize("data", [None, torch.zeros(7), (), (1,) * 8, (1,) * 7, dict.fromkeys(NAMES)])
def test_the_short_way_refuses_what_is_not_seven_tensors(data, prepare):
    entry = prepare(make_data())
    with pytest.raises((TypeError, ValueError)):
        submission.custom_kernel(data)
    assert not entry.entered


def test_another_layout_is_validated_and_launched(prepare, launches):
    entry = prepare(make_data())
    other = make_data(1, 8, 64, 1)
    submission.custom_kernel(tuple(other.values()))
    assert launches == [(words_of(other, (1, 8, 64, 1)), 0)] and not entry.entered


def test_a_refused_launch_is_tried_as_the_dsl_does_it(prepare):
    data = make_data()
    entry = prepare(data, error=719)
    submission.custom_kernel(tuple(data.values()))
    assert entry.entered == entry.called == [(words_of(data), 0)]


def test_a_failed_kernel_is_reported_the_short_way(monkeypatch, prepare):
    data = make_data()
    prepare(data)
    error = submission.cuda_runtime.cudaError_t.cudaErrorIllegalAddress
    monkeypatch.setattr(submission.cuda_runtime, "cudaStreamSynchronize", lambda stream: (error,))
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        submission.custom_kernel(tuple(data.values()))


@pytest.mark.parametrize("current", [0, 1])
def test_the_short_way_reads_device_and_stream_at_every_call(current, monkeypatch, prepare):
    data, device, now = make_data(), torch.device("cuda", 1), [current]
    streams = {1: [11, 0x7F0012345670, 22]}

    @contextmanager
    def switch(to):
        before, now[0] = now[0], to.index
        yield
        now[0] = before

    def synchronize(stream):
        raise AssertionError("a CUDA graph cannot capture this")

    entry = prepare(data, device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "device", switch)
    monkeypatch.setattr(submission, "raw_stream", lambda index: streams[now[0]].pop(0) if index == 1 else None)
    monkeypatch.setattr(submission.cuda_runtime, "cudaStreamSynchronize", synchronize)
    for _ in range(3):
        submission.custom_kernel(tuple(data.values()))
    assert [stream for _, stream in entry.entered] == [11, 0x7F0012345670, 22]
    assert now == [current]


def test_launches_at_the_same_time_use_different_blocks(prepare):
    inputs = [make_data() for _ in range(4)]
    entry = prepare(inputs[0])
    together, enter = threading.Barrier(4), entry.enter

    def enter_together(address):
        together.wait(30)  # all blocks are filled
        enter(address)
        together.wait(30)

    submission._prepared[0].entry = enter_together

    def work(data):
        for _ in range(20):
            submission.custom_kernel(tuple(data.values()))

    threads = [threading.Thread(target=work, args=(data,)) for data in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = sorted(words_of(data) for data in inputs for _ in range(20))
    assert sorted(words for words, _ in entry.entered) == wanted
    assert len(submission._prepared[0].blocks) == 4


def test_calls_leave_nothing_behind(prepare):
    inputs = [tuple(make_data().values()) for _ in range(5)]
    prepare(make_data())
    submission._prepared[0].entry = lambda address: None

    def blocks_after(calls):
        for index in range(calls):
            submission.custom_kernel(inputs[index % 5])
        return sys.getallocatedblocks()

    assert abs(blocks_after(20_000) - blocks_after(1000)) < 50
    assert len(submission._prepared[0].blocks) == 1


def test_tensors_are_not_kept(prepare):
    data = make_data()
    prepare(data)
    submission.custom_kernel(tuple(data.values()))
    gone = [weakref.ref(tensor) for tensor in data.values()]
    data.clear()
    assert [reference() for reference in gone] == [None] * 7


@pytest.fixture(scope="module")
def kernel():
    """The kernel, compiled on the virtual GPU and called once."""
    submission.custom_kernel(tuple(make_data(1, 8, 64, 1).values()))
    return submission.compile_kernel(choose_config(1, 8, 1), torch.device("cpu"))


def test_the_compiled_kernel_has_the_entry(kernel):
    assert submission.c_entry(kernel) is kernel.capi_func


@pytest.fixture
def seen_launches(monkeypatch):
    """The configurations and arguments that arrive at the virtual GPU, which does not run them."""
    seen = []
    monkeypatch.setattr(
        host.installed(), "launch", lambda text, name, config, address: seen.append((config, address(0)))
    )
    return seen


def test_the_entry_launches_what_the_public_way_does(kernel, seen_launches):
    tensors = tuple(make_data(130, 264, 128, 2).values())
    submission.custom_kernel(tensors)
    (prepared,) = submission._prepared
    block = prepared.fill(tensors)
    block.words[submission.STREAM] = 0x5550
    prepared.launch(block)
    (public, _), (short, _) = seen_launches
    assert public.grid == short.grid == (2, 5, 2)
    assert (public.block, public.shared_bytes) == (short.block, short.shared_bytes)
    assert (public.stream, short.stream) == (0, 0x5550)


def test_an_error_of_the_virtual_gpu_reaches_the_caller(kernel, monkeypatch):
    tensors = tuple(make_data(1, 8, 64, 1).values())
    submission.custom_kernel(tensors)
    assert len(submission._prepared) == 1
    monkeypatch.setattr(submission, "validate", None)  # the long way is closed

    def fail(*arguments):
        raise ZeroDivisionError("in the kernel")

    with monkeypatch.context() as patch:
        patch.setattr(host.installed(), "launch", fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="in the kernel"):
                submission.custom_kernel(tensors)
    tensors[6].fill_(7)
    submission.custom_kernel(tensors)  # and nothing of it is left
    assert not bool((tensors[6] == 7).any())


def test_without_guards_every_call_goes_the_long_way(kernel, monkeypatch, seen_launches):
    def no_guard(*tensors):
        raise ImportError("this torch has none")

    monkeypatch.setattr(submission, "make_guard", no_guard)
    for _ in range(2):
        submission.custom_kernel(tuple(make_data().values()))
    assert len(seen_launches) == 2 and submission._prepared == ()


def test_prepared_problems_are_few_and_the_newest_first(kernel, seen_launches):
    for m in range(1, submission.PREPARED_LIMIT + 5):
        submission.custom_kernel(tuple(make_data(m, 8, 64, 1).values()))
    sizes = [prepared.sizes[0] for prepared in submission._prepared]
    assert sizes == list(range(submission.PREPARED_LIMIT + 4, 4, -1))


def test_a_forked_process_prepares_anew(kernel, seen_launches):
    submission.custom_kernel(tuple(make_data().values()))
    assert submission._prepared
    if not (child := os.fork()):
        os._exit(len(submission._prepared))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert submission._prepared


# --- The compiled kernel ---------------------------------------------------------------------------------------------


COMPILE = """
import submission, torch
submission.require_device = lambda device: None
try:
    submission.compile_kernel(device=torch.device("cpu"))
except DeprecationWarning:
    raise
except Exception as error:  # 4.3.5 loads the module at once and finds no driver, after it has written the PTX
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory):
    """The text that the compiler makes of the kernel; a deprecation warning is an error."""
    folder = tmp_path_factory.mktemp("ptx")
    keep = {"CUTE_DSL_KEEP_PTX": "1"} if version("nvidia-cutlass-dsl") == "4.3.5" else {"CUTE_DSL_KEEP": "ptx"}
    environment = {**os.environ, **keep, "CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_DUMP_DIR": str(folder)}
    environment["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    files = list(folder.glob("*.ptx"))
    assert done.returncode == 0 and len(files) == 1, done.stdout + done.stderr
    return files[0].read_bytes().rstrip(b"\0").decode()


def test_ptx_target(ptx):
    assert re.search(r"^\.target sm_100a$", ptx, re.MULTILINE)
    assert re.search(rf"^\.reqntid {CONFIG.threads}(, 1, 1)?$", ptx, re.MULTILINE)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        (r"mbarrier\.init", 2 * CONFIG.stages + 1),
        (r"mbarrier\.arrive\.expect_tx", 1),
        (r"cp\.async\.bulk\.tensor\.3d\.shared", 2),
        (r"cp\.async\.bulk\.tensor\.4d\.shared", 2),
        (r"cp\.async\.bulk\.tensor\.3d\.global\.shared::cta", 2),
        (r"cp\.async\.bulk\.tensor", 6),
        (r"cp\.async\.bulk\.commit_group", 1),
        (r"cp\.async\.bulk\.wait_group\s+0;", 1),
        (r"fence\.proxy\.async\.shared::cta;", 2),
        (r"bar\.warp\.sync", 2),
        (r"griddepcontrol\.wait", 1),
        (r"griddepcontrol\.launch_dependents", 1),
        (r"tcgen05\.cp\.cta_group::1\.32x128b\.warpx4", 2 * CONFIG.k_blocks),
        (r"tcgen05\.mma\.cta_group::1\.kind::mxf4nvf4\.block_scale", CONFIG.k_blocks),
        (r"tcgen05\.commit", 2),
        (r"tcgen05\.alloc", 1),
        (r"tcgen05\.relinquish_alloc_permit", 1),
        (r"tcgen05\.dealloc", 1),
        (r"tcgen05\.ld\.sync\.aligned\.32x32b\.x64\.b32", 2),
        (r"tcgen05\.wait::ld", 2),
        (r"st\.shared\.v4\.b32", CONFIG.tile_n // 8),
        (r"st\.shared", CONFIG.tile_n // 8),
        (r"st\.global", 0),
        (r"\b(div|rem)\.", 0),
        (r"\.local\b", 0),
    ],
)
def test_ptx_instruction_counts(ptx, pattern, count):
    assert len(re.findall(pattern, ptx)) == count


def test_one_thread_of_a_warp_stores(ptx):
    """Between each barrier of a warp and the TMA store after it a thread is elected, and the others jump."""
    for block in ptx.split("bar.warp.sync")[1:]:
        election = re.search(r"elect\.sync\s+%r\d+\|(%p\d+)", block)
        jump = re.search(r"@!?%p\d+ bra", block)
        assert election.start() < jump.start() < block.index("cp.async.bulk.tensor.3d.global")


def test_the_load_warp_expects_the_bytes_of_a_stage(ptx):
    register = re.search(r"mbarrier\.arrive\.expect_tx[^\[]*\[[^\]]*\], (%r\d+)", ptx).group(1)
    assert re.search(rf"mov\.(b|u)32\s+{register}, {CONFIG.stage_bytes};", ptx)
