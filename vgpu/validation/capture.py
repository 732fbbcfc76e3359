"""Measure the timing kernels on the GPU of this machine and write their times.

    python -m vgpu.validation.capture                          # all families into h200_times.json beside this file
    python -m vgpu.validation.capture --out FILE --family l2 --family dram

Needs cuda-bindings, NumPy and a GPU of compute capability 9.0. Each family runs in a process of its own, which is
replaced after an error or a timeout; what failed is recorded with its error, the rest goes on.

Before anything is timed, the stream is held by a kernel that spins, so that all launches are queued when the first
one starts: the times are the GPU's, not the host's. "Cold" inputs are not in the L2: every one of the back-to-back
launches has inputs of its own, and before each repetition FLUSH_BYTES of other data are read (not written, so that no
dirty lines are left to be written back).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from .kernels import (
    FAMILIES,
    Buffer,
    Scalar,
    TensorMap,
    TimingKernel,
    all_kernels,
    assemble,
    contents,
    load_stream,
    output,
)

TIMES = Path(__file__).with_name("h200_times.json")
REPETITIONS = 40
PERCENTILES = {"p10": 10, "median": 50, "p90": 90}
SYNC_TIMEOUT_S = 5.0  # a kernel that runs longer hangs
WORKER_TIMEOUT_S = 100.0
SINGLE_SPIN_US = 60
FLUSH = load_stream("flush", "test", 1056, 8, 8, cold=False)
FLUSH_BYTES = FLUSH.buffers[0].nbytes
SPIN_ARGS = (output(32), Scalar("ns", 0))
SPIN = assemble(SPIN_ARGS, """
    mov.u64 %d_clock0, %clock64;
    mov.u64 %d_timer0, %globaltimer;
    cvt.u64.u32 %d_ns, %r_ns;
    SPIN:
    mov.u64 %d_clock1, %clock64;
    mov.u64 %d_timer1, %globaltimer;
    sub.s64 %d_spent, %d_timer1, %d_timer0;
    setp.lt.u64 %p_more, %d_spent, %d_ns;
    @%p_more bra SPIN;
    st.global.v2.b64 [%d_out], {%d_clock0, %d_timer0};
    st.global.v2.b64 [%d_out+16], {%d_clock1, %d_timer1};""")


class DriverError(RuntimeError):
    """A driver call that did not answer CUDA_SUCCESS, or a kernel that does not end: the context is lost."""


def call(function, *args):
    """Call the driver; its results without the status, or `DriverError`."""
    status, *results = function(*args)
    if int(status) != 0:
        raise DriverError(f"{getattr(function, '__name__', function)}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


class Gpu:
    """The first GPU, in this process, with one stream."""

    def __init__(self):
        from cuda.bindings import driver

        self.cu = driver
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, 0)
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, self.device))
        self.stream = call(driver.cuStreamCreate, 1)  # not synchronised with the null stream
        self.events = [call(driver.cuEventCreate, 0) for _ in range(2)]
        self.spin_out = self.allocate(32)
        self.spin_function = self.load(SPIN)
        self.flush_function = self.load(FLUSH.ptx)
        buffers = [self.allocate(b.nbytes) for b in FLUSH.buffers]
        self.fill(buffers[0], FLUSH_BYTES, 1)
        self.flush_values = parameters([*map(ctypes.c_uint64, buffers), ctypes.c_uint32(FLUSH.args[-1].value)])
        self.flush_config = self.config(FLUSH)

    def attribute(self, name: str) -> int:
        """A device attribute by its name without the prefix."""
        return call(self.cu.cuDeviceGetAttribute, getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"),
                    self.device)

    def allocate(self, nbytes: int) -> int:
        """The address of new device memory."""
        return int(call(self.cu.cuMemAlloc, nbytes))

    def fill(self, address: int, nbytes: int, value: int) -> None:
        """Set bytes."""
        call(self.cu.cuMemsetD8, address, value, nbytes)

    def upload(self, address: int, data: np.ndarray) -> None:
        """Host to device."""
        call(self.cu.cuMemcpyHtoD, address, data.ctypes.data, data.nbytes)

    def download(self, address: int, nbytes: int) -> np.ndarray:
        """u8[nbytes] from the device."""
        data = np.empty(nbytes, np.uint8)
        call(self.cu.cuMemcpyDtoH, data.ctypes.data, address, nbytes)
        return data

    def load(self, ptx: str):
        """The function `timing` of a module, allowed all the shared memory there is."""
        text = ctypes.create_string_buffer(ptx.encode())
        function = call(self.cu.cuModuleGetFunction, call(self.cu.cuModuleLoadData, ctypes.addressof(text)), b"timing")
        name = self.cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(self.cu.cuFuncSetAttribute, function, name, self.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"))
        return function

    def config(self, kernel: TimingKernel):
        """The driver's launch configuration of a kernel."""
        cu = self.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = kernel.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.block
        config.sharedMemBytes, config.hStream = kernel.shared_bytes, self.stream
        attributes = []
        if kernel.cluster != (1, 1, 1):
            attributes.append(self._attribute("CLUSTER_DIMENSION"))
            value = attributes[-1].value
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = kernel.cluster
            attributes[-1].value = value
        if kernel.pdl:
            attributes.append(self._attribute("PROGRAMMATIC_STREAM_SERIALIZATION"))
            value = attributes[-1].value
            value.programmaticStreamSerializationAllowed = 1
            attributes[-1].value = value
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def _attribute(self, name: str):
        attribute = self.cu.CUlaunchAttribute()
        attribute.id = getattr(self.cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        return attribute

    def launch(self, function, config, values) -> None:
        """Queue a launch with the parameters made by `parameters`."""
        call(self.cu.cuLaunchKernelEx, config, function, values[0], 0)

    def flush(self) -> None:
        """Queue the reading of FLUSH_BYTES, which replaces what is in the L2."""
        self.launch(self.flush_function, self.flush_config, self.flush_values)

    def spin(self, us: float, shared_bytes: int = 0) -> None:
        """Queue a kernel that holds the stream. With the next kernel's shared memory, so that the SMs' division
        between L1 and shared memory need not change in between."""
        config = self.cu.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = 1
        config.blockDimX = config.blockDimY = config.blockDimZ = 1
        config.sharedMemBytes, config.hStream = shared_bytes, self.stream
        values = parameters([ctypes.c_uint64(self.spin_out), ctypes.c_uint32(int(1000 * us))])
        self.launch(self.spin_function, config, values)

    def clock_mhz(self) -> float:
        """The SM clock during the latest spin, from %clock64 and %globaltimer."""
        clock0, timer0, clock1, timer1 = self.download(self.spin_out, 32).view(np.uint64).tolist()
        return 1000 * (clock1 - clock0) / (timer1 - timer0)

    def record(self, which: int) -> None:
        """Queue an event."""
        call(self.cu.cuEventRecord, self.events[which], self.stream)

    def elapsed_us(self) -> float:
        """Between the two events."""
        return 1000 * call(self.cu.cuEventElapsedTime, *self.events)

    def synchronize(self) -> None:
        """Wait for the stream, at most SYNC_TIMEOUT_S."""
        end = time.perf_counter() + SYNC_TIMEOUT_S
        while (status := self.cu.cuStreamQuery(self.stream)[0]) != self.cu.CUresult.CUDA_SUCCESS:
            if status != self.cu.CUresult.CUDA_ERROR_NOT_READY:
                raise DriverError(f"kernel: {status.name}")
            if time.perf_counter() > end:
                raise DriverError(f"kernel: still running after {SYNC_TIMEOUT_S} s")


def parameters(values: list) -> tuple[int, object]:
    """ctypes objects, one a parameter, to the driver's array of pointers: (its address, what must be kept alive)."""
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    return ctypes.addressof(pointers), (pointers, values)


class Loaded:
    """A kernel on the GPU: function, buffers, one set of parameters for each of its back-to-back launches."""

    def __init__(self, gpu: Gpu, kernel: TimingKernel):
        self.gpu, self.kernel = gpu, kernel
        self.addresses: dict[str, list[int]] = {}
        self.function, self.config = gpu.load(kernel.ptx), gpu.config(kernel)
        for buffer in kernel.buffers:
            self._place(buffer)
        self.values = [self._values(i) for i in range(kernel.launches)]

    def _place(self, buffer: Buffer) -> None:
        copies = self.kernel.launches if buffer.fresh else 1
        pitch = -(-buffer.nbytes // 1024) * 1024
        base = self.gpu.allocate(pitch * copies)
        self.addresses[buffer.name] = [base + i * pitch for i in range(copies)]
        if buffer.role == "input":
            self.gpu.upload(base, contents(buffer))
            for address in self.addresses[buffer.name][1:]:
                call(self.gpu.cu.cuMemcpyDtoD, address, base, buffer.nbytes)
        else:
            self.gpu.fill(base, buffer.nbytes, 0)

    def _values(self, launch: int) -> tuple[int, object]:
        values = []
        for arg in self.kernel.args:
            if isinstance(arg, Scalar):
                values.append(ctypes.c_uint32(arg.value))
                continue
            addresses = self.addresses[arg.buffer.name if isinstance(arg, TensorMap) else arg.name]
            address = addresses[launch % len(addresses)]
            values.append(self._encode(arg, address) if isinstance(arg, TensorMap) else ctypes.c_uint64(address))
        return parameters(values)

    def _encode(self, tensor: TensorMap, address: int):
        """The 128 bytes that the driver makes of a tensor map."""
        cu = self.gpu.cu
        encoded = call(
            cu.cuTensorMapEncodeTiled, cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT16, 2, address,
            [cu.cuuint64_t(n) for n in tensor.sizes], [cu.cuuint64_t(tensor.pitch)],
            [cu.cuuint32_t(n) for n in tensor.box], [cu.cuuint32_t(1)] * 2, cu.CUtensorMapInterleave(0),
            cu.CUtensorMapSwizzle({0: 0, 32: 1, 64: 2, 128: 3}[tensor.swizzle]), cu.CUtensorMapL2promotion(0),
            cu.CUtensorMapFloatOOBfill(0))
        return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))

    def launch(self, which: int = 0) -> None:
        """Queue a launch with the `which`-th set of inputs."""
        self.gpu.launch(self.function, self.config, self.values[which])

    def check(self) -> None:
        """Run once on a poisoned output. Raises ValueError if it is not what the kernel must compute."""
        [address] = self.addresses["out"]
        want = np.ascontiguousarray(self.kernel.expected()).reshape(-1)
        self.gpu.fill(address, want.nbytes, 255)
        call(self.gpu.cu.cuCtxSynchronize)
        self.launch()
        self.gpu.synchronize()
        got = self.gpu.download(address, want.nbytes).view(want.dtype)
        wrong = np.flatnonzero(got != want)
        if wrong.size:
            i = wrong[0]
            raise ValueError(f"{wrong.size} of {want.size} wrong outputs; out[{i}] is {got[i]}, not {want[i]}")

    def cycles(self) -> int:
        """Between the two readings of the clock in the latest launch."""
        start, stop = self.gpu.download(self.addresses["clock"][0], 16).view(np.uint64).tolist()
        if not 0 < start < stop:
            raise ValueError(f"clock readings {start} and {stop}")
        return stop - start

    def free(self) -> None:
        """Give the memory back."""
        for addresses in self.addresses.values():
            call(self.gpu.cu.cuMemFree, addresses[0])


def time_single(loaded: Loaded, repetitions: int) -> tuple[list[float], list[int]]:
    """us between two events around one launch, and cycles in the kernel where it reads the clock."""
    gpu, kernel = loaded.gpu, loaded.kernel
    us, cycles = [], []
    for _ in range(repetitions):
        gpu.flush() if kernel.cold else loaded.launch()
        gpu.spin(SINGLE_SPIN_US, kernel.shared_bytes)
        gpu.record(0)
        loaded.launch()
        gpu.record(1)
        gpu.synchronize()
        us.append(gpu.elapsed_us())
        if kernel.clock_warp is not None:
            cycles.append(loaded.cycles())
    return us, cycles


def time_back_to_back(loaded: Loaded, repetitions: int) -> tuple[list[float], float, float]:
    """us a launch, by two events around all launches; the SM clock in MHz; us of host time to queue a launch.

    A repetition counts only if all launches were queued before the spinning kernel ended.
    """
    gpu, kernel = loaded.gpu, loaded.kernel
    spin_us = 200.0 + 15 * kernel.launches
    us, clocks, queued = [], [], []
    for attempt in range(3 * repetitions):
        if kernel.cold:
            gpu.flush()
        gpu.spin(spin_us, kernel.shared_bytes)
        start = time.perf_counter()
        gpu.record(0)
        for i in range(kernel.launches):
            loaded.launch(i)
        gpu.record(1)
        host_us = 1e6 * (time.perf_counter() - start)
        gpu.synchronize()
        if host_us > spin_us:
            spin_us = 2 * host_us
        elif attempt:  # the first is a warm-up
            us.append(gpu.elapsed_us() / kernel.launches)
            clocks.append(gpu.clock_mhz())
            queued.append(host_us / kernel.launches)
        if len(us) == repetitions:
            return us, float(np.median(clocks)), float(np.median(queued))
    raise ValueError(f"only {len(us)} repetitions were queued in time")


def spread(values: list[float]) -> dict[str, float]:
    """Percentiles, rounded to 1 ns."""
    return {name: round(float(np.percentile(values, p)), 3) for name, p in PERCENTILES.items()}


def measure(gpu: Gpu, kernel: TimingKernel, repetitions: int) -> dict:
    """Check a kernel, time it, check it again; its entry in the file."""
    loaded = Loaded(gpu, kernel)
    try:
        loaded.check()
        back_to_back, mhz, queue_us = time_back_to_back(loaded, repetitions)
        single, cycles = time_single(loaded, repetitions)
        loaded.check()
    finally:
        loaded.free()
    us = {"single": spread(single), "back_to_back": spread(back_to_back)}
    if cycles:
        us["in_kernel"] = spread([c / mhz for c in cycles])
    entry = {"us": us, "sm_mhz": round(mhz, 1), "queue_us": round(queue_us, 2)}
    if kernel.cluster != (1, 1, 1):
        entry["max_active_clusters"] = call(gpu.cu.cuOccupancyMaxActiveClusters, loaded.function, loaded.config)
    return entry


def described(kernel: TimingKernel) -> dict:
    """What the file says about a kernel whether or not it could be measured."""
    return {"role": kernel.role, "time_of": kernel.time_of, "cold": kernel.cold, "launches": kernel.launches,
            "fingerprint": kernel.fingerprint()}


def nvidia_smi(fields: str) -> str:
    """What nvidia-smi says of the first GPU, or 'unknown'."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def clocks(gpu: Gpu) -> str:
    """What nvidia-smi reads while a kernel spins."""
    gpu.spin(400_000)
    text = nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu")
    gpu.synchronize()
    return text


def empty_event_pair(gpu: Gpu) -> dict[str, float]:
    """us between two events with nothing between them."""
    us = []
    for _ in range(REPETITIONS):
        gpu.spin(SINGLE_SPIN_US)
        gpu.record(0)
        gpu.record(1)
        gpu.synchronize()
        us.append(gpu.elapsed_us())
    return spread(us)


def work(names: list[str], part: Path, repetitions: int) -> None:
    """The worker process: measure kernels one by one, writing the results so far; ends at the first lost context."""
    gpu = Gpu()
    gpu.spin(300_000)  # from the idle clock to the working one
    gpu.synchronize()
    device = {name.lower(): gpu.attribute(name) for name in ("MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE", "CLOCK_RATE")}
    found = {"event_pair_us": empty_event_pair(gpu), "device": device, "kernels": {}}
    for kernel in all_kernels():
        if kernel.name not in names:
            continue
        lost = False
        try:
            entry = {"status": "ok", **measure(gpu, kernel, repetitions)}
        except Exception as error:  # whatever it is, it is this kernel's answer
            entry, lost = {"status": f"error: {error}"}, isinstance(error, DriverError)
        found["kernels"][kernel.name] = {**described(kernel), **entry}
        part.write_text(json.dumps(found))
        if lost:
            return
    found["clocks"] = clocks(gpu)
    part.write_text(json.dumps(found))


def run_family(names: list[str], repetitions: int) -> dict:
    """Measure kernels in worker processes, a new one after each failure."""
    result: dict = {"kernels": {}}
    kernels = {kernel.name: kernel for kernel in all_kernels()}
    with tempfile.TemporaryDirectory() as folder:
        while rest := [name for name in names if name not in result["kernels"]]:
            part = Path(folder) / "part.json"
            part.unlink(missing_ok=True)
            command = [sys.executable, "-m", "vgpu.validation.capture", "--worker", str(part), "--repetitions",
                       str(repetitions), *(f"--kernel={name}" for name in rest)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False)
                failure = f"the worker ended with {done.returncode}: {done.stderr.strip()[-300:]}"
            except subprocess.TimeoutExpired:
                failure = f"not finished after {WORKER_TIMEOUT_S} s"
            found = json.loads(part.read_text()) if part.exists() else {"kernels": {}}
            if not found["kernels"]:
                found["kernels"][rest[0]] = {**described(kernels[rest[0]]), "status": f"error: {failure}"}
            result = {**found, "kernels": {**result["kernels"], **found["kernels"]}}
    return result


def provenance(repetitions: int) -> dict:
    """Where the times come from."""
    return {"gpu": nvidia_smi("name"), "driver": nvidia_smi("driver_version"),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "clocks_idle": nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm"), "repetitions": repetitions,
            "flush_bytes_read": FLUSH_BYTES,
            "captured_by": "python -m vgpu.validation.capture",
            "fields": "us: per launch; sm_mhz: from %clock64 and %globaltimer just before; queue_us: host, per launch; "
                      "clocks: nvidia-smi during a spin: SM, memory, largest SM, power, temperature"}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TIMES, help="file to write (default: %(default)s)")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="only these (default: all)")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kernel", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = arguments()
    if args.worker:
        work(args.kernel, args.worker, args.repetitions)
        return
    report = {"provenance": {**provenance(args.repetitions), "clocks": {}}, "kernels": {}}
    for family in args.family or FAMILIES:
        start = time.perf_counter()
        result = run_family([k.name for k in all_kernels() if k.family == family], args.repetitions)
        report["kernels"].update(result["kernels"])
        report["provenance"].update({name: result[name] for name in ("event_pair_us", "device") if name in result})
        report["provenance"]["clocks"][family] = result.get("clocks", "not read")
        args.out.write_text(written(report))
        failed = [name for name, entry in result["kernels"].items() if entry["status"] != "ok"]
        print(f"{family}: {len(result['kernels'])} kernels, {time.perf_counter() - start:.1f} s, failed: "
              f"{', '.join(failed) or 'none'}", flush=True)


def written(report: dict) -> str:
    """JSON with one line a kernel."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in report["kernels"].items()]
    head = json.dumps(report["provenance"], indent=1)
    return f'{{"provenance": {head},\n"kernels": {{\n' + ",\n".join(lines) + "\n}}\n"


if __name__ == "__main__":
    main()
