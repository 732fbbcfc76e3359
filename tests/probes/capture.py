"""Run every probe on the GPU of this machine and write the golden files.

    python tests/probes/capture.py                  # all probes into tests/probes/golden
    python tests/probes/capture.py --out DIR --only mbarrier/

Needs cuda-bindings, NumPy and a GPU of compute capability 9.0. Probes run twice, in worker processes that are
replaced after an error or a timeout, so that one failing probe neither stops nor poisons the others; its error is
what is recorded.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from probes import all_probes  # noqa: E402
from probes.goldens import FOLDER, Golden, write  # noqa: E402
from probes.model import DATA_TYPES, SWIZZLES, Buffer, Probe, Scalar, TensorMap  # noqa: E402

TIMEOUT_S = 10.0
WORKERS = 8


class DriverError(RuntimeError):
    """A driver call that did not answer CUDA_SUCCESS."""


def call(function, *args):
    """Call the driver; its results without the status, or `DriverError`."""
    status, *results = function(*args)
    if int(status) != 0:
        raise DriverError(f"{function.__name__}: {status.name}")
    return results[0] if len(results) == 1 else tuple(results)


class Device:
    """The first GPU, in this process."""

    def __init__(self):
        from cuda.bindings import driver

        self.cu = driver
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, 0)
        context = call(driver.cuDevicePrimaryCtxRetain, self.device)
        call(driver.cuCtxSetCurrent, context)

    def provenance(self) -> dict[str, str]:
        """What the golden files say about where they come from."""
        cu, names = self.cu, self.cu.CUdevice_attribute
        major = call(cu.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device)
        minor = call(cu.cuDeviceGetAttribute, names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        gpu = call(cu.cuDeviceGetName, 100, self.device).split(b"\0")[0].decode()
        return {"gpu": gpu, "compute_capability": f"{major}.{minor}", "driver": driver,
                "cuda": str(call(cu.cuDriverGetVersion)),
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "captured_by": "tests/probes/capture.py"}

    def encode(self, spec: TensorMap, address: int) -> bytes:
        """The 128 bytes of the tensor map, encoded by the driver for a tensor at `address` (+ the map's offset)."""
        cu = self.cu
        steps = spec.element_strides or (1,) * len(spec.dims)
        tensor_map = call(
            cu.cuTensorMapEncodeTiled, cu.CUtensorMapDataType(DATA_TYPES[spec.dtype]), len(spec.dims),
            address + spec.offset, [cu.cuuint64_t(n) for n in spec.dims],
            [cu.cuuint64_t(n) for n in spec.strides or (16,)],  # the driver wants an array, even at rank 1
            [cu.cuuint32_t(n) for n in spec.box], [cu.cuuint32_t(n) for n in steps],
            cu.CUtensorMapInterleave(0), cu.CUtensorMapSwizzle(SWIZZLES[spec.swizzle]), cu.CUtensorMapL2promotion(0),
            cu.CUtensorMapFloatOOBfill(int(spec.nan_fill)))
        return ctypes.string_at(tensor_map.getPtr(), 128)

    def launch(self, probe: Probe, function, values: list) -> None:
        """Launch with `values` (ctypes objects, one a parameter) and wait for the end."""
        cu = self.cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = probe.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = probe.block
        config.sharedMemBytes = probe.shared_bytes
        if probe.cluster != (1, 1, 1):
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = attribute.value
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = probe.cluster
            attribute.value = value
            config.attrs, config.numAttrs = [attribute], 1
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        call(cu.cuLaunchKernelEx, config, function, ctypes.addressof(pointers), 0)
        call(cu.cuCtxSynchronize)

    def run(self, probe: Probe) -> Golden:
        """Load, launch, read back."""
        cu = self.cu
        golden = Golden(probe.fingerprint())
        addresses = {}
        for i, arg in enumerate(probe.args):
            if isinstance(arg, Buffer):
                addresses[i] = int(call(cu.cuMemAlloc, len(arg.data)))
                host = ctypes.create_string_buffer(arg.data, len(arg.data))
                call(cu.cuMemcpyHtoD, addresses[i], ctypes.addressof(host), len(arg.data))
        values = []
        for i, arg in enumerate(probe.args):
            if isinstance(arg, Buffer):
                values.append(ctypes.c_uint64(addresses[i]))
            elif isinstance(arg, Scalar):
                values.append({4: ctypes.c_uint32, 8: ctypes.c_uint64}[arg.size](arg.value))
            else:
                encoded = self.encode(arg, addresses[arg.buffer])
                golden.maps.append(bytes(8) + encoded[8:])
                values.append((ctypes.c_uint8 * 128).from_buffer_copy(encoded))
        text = ctypes.create_string_buffer(probe.ptx.encode())
        module = call(cu.cuModuleLoadData, ctypes.addressof(text))
        self.launch(probe, call(cu.cuModuleGetFunction, module, b"probe"), values)
        for i, arg in enumerate(probe.args):
            if isinstance(arg, Buffer):
                if arg.output:
                    host = ctypes.create_string_buffer(len(arg.data))
                    call(cu.cuMemcpyDtoH, ctypes.addressof(host), addresses[i], len(arg.data))
                    golden.outputs.append(host.raw)
                call(cu.cuMemFree, addresses[i])
        call(cu.cuModuleUnload, module)
        return golden


def serve() -> None:
    """The worker process: probe names on stdin, one JSON answer a line on stdout; ends at the first error."""
    device = Device()
    probes = {probe.name: probe for probe in all_probes()}
    for line in sys.stdin:
        probe = probes[line.strip()]
        try:
            golden, again = device.run(probe), device.run(probe)
            error = None if golden.outputs == again.outputs else "two runs differ"
        except Exception as failure:  # whatever it is, it is the probe's answer
            golden, error = Golden(""), f"{failure}"
        answer = {"outputs": [b.hex() for b in golden.outputs], "maps": [b.hex() for b in golden.maps], "error": error}
        print(json.dumps(answer), flush=True)
        if error:
            return


class Worker:
    """A worker process, started when needed and replaced when it ends."""

    def __init__(self):
        self.process: subprocess.Popen | None = None

    def ask(self, probe: Probe) -> Golden:
        """Run the probe in the process; an error of any kind becomes the golden's."""
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen([sys.executable, __file__, "--serve"], stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, text=True)
        process = self.process
        timer = threading.Timer(TIMEOUT_S, process.kill)
        timer.start()
        try:
            process.stdin.write(probe.name + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        timer.cancel()
        if not line:
            process.kill()
            process.wait()
            return Golden(probe.fingerprint(), error=f"no answer within {TIMEOUT_S:g} s, or the process died")
        answer = json.loads(line)
        if answer["error"]:
            process.wait()
        return Golden(probe.fingerprint(), [bytes.fromhex(h) for h in answer["outputs"]],
                      [bytes.fromhex(h) for h in answer["maps"]], answer["error"])


def capture(probes: list[Probe]) -> dict[str, Golden]:
    """Every probe's golden, by name, from several workers at once."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for probe in probes:
        waiting.put(probe)
    found: dict[str, Golden] = {}

    def work() -> None:
        worker = Worker()
        while True:
            try:
                probe = waiting.get_nowait()
            except queue.Empty:
                break
            found[probe.name] = worker.ask(probe)
        if worker.process is not None:
            worker.process.stdin.close()
            worker.process.wait()

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {probe.name: found[probe.name] for probe in probes}


def check_uniform(goldens: dict[str, Golden]) -> list[str]:
    """Names of table probes whose one-vector-a-CTA launch did not give what the one-vector-a-lane launch gave."""
    return [name for name, golden in goldens.items() if name.endswith("_uniform") and golden.error is None
            and name.replace("_uniform", "_lanes") in goldens
            and golden.outputs != goldens[name.replace("_uniform", "_lanes")].outputs]


def main() -> int:
    """Capture, write, report; 1 if a probe failed that should not have."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the golden files")
    parser.add_argument("--only", default="", help="only probes whose name contains this text")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return 0
    probes = [probe for probe in all_probes() if options.only in probe.name]
    provenance = Device().provenance()
    print(json.dumps(provenance))
    goldens = capture(probes)
    options.out.mkdir(parents=True, exist_ok=True)
    for group in dict.fromkeys(probe.group for probe in probes):
        write(options.out / f"{group}.json", provenance,
              {probe.name: goldens[probe.name] for probe in probes if probe.group == group})
    wrong = [probe.name for probe in probes if goldens[probe.name].error is not None and not probe.may_stop]
    for probe in probes:
        if goldens[probe.name].error:
            print(f"{probe.name}: {goldens[probe.name].error}" + (" (an answer)" if probe.may_stop else ""))
    unequal = check_uniform(goldens)
    for name in unequal:
        print(f"{name}: differs from its _lanes launch")
    print(f"{len(probes)} probes, {len(wrong)} unexpected")
    return 1 if wrong or unequal else 0


if __name__ == "__main__":
    sys.exit(main())
