"""How far the timing model can be trusted: `python -m vgpu.validate` prints modelled against measured and published.

The H200's kernels (`vgpu.validation`) are run on the virtual GPU and their recordings replayed with the H200's
constants; members marked `fit` set the constants, those marked `test` only check. The B200's figures are published
timings of other people's kernels, which kernels of ours imitate (`vgpu.validation.b200`, with the sources).
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import _argument
from .launch import Device, Launch, LaunchConfig, execute
from .timing.chips import H200, Chip
from .timing.model import recorded
from .timing.simulate import Simulation
from .translate import translate
from .validation.kernels import TimingKernel, all_kernels, host_arguments

TIMES = Path(__file__).parent / "validation" / "h200_times.json"
MEDIAN_ERROR, WORST_ERROR = 0.15, 0.35  # what the model is to keep to, over the kernels marked `test`


@dataclass(frozen=True)
class Row:
    """One kernel: times in us; error = modelled / measured - 1."""

    name: str
    role: str
    measured: float
    modelled: float

    @property
    def error(self) -> float:
        """Relative; positive where the model is slow."""
        return self.modelled / self.measured - 1


def record(kernel: TimingKernel, device: Device) -> Launch:
    """Run a kernel on the virtual GPU, recorded. Raises ValueError if its output is wrong."""
    arguments, arrays = host_arguments(kernel)
    for a in arrays.values():
        device.memory.register(a.ctypes.data, a.nbytes)
    program = translate(kernel.ptx, kernel.entry)
    blob = bytearray()
    for value, p in zip(arguments, program.kernel.params, strict=True):
        blob += bytes(p.offset - len(blob)) + _argument(value, p.size, [], device)
    attributes = {6: b"\1"} if kernel.pdl else {}
    config = LaunchConfig(kernel.grid, kernel.block, kernel.cluster, kernel.shared_bytes, 0, attributes)
    launch = execute(device, program, config, bytes(blob))
    device.launches.clear()
    if kernel.expected is not None:
        expected = kernel.expected()
        if not (arrays["out"].view(expected.dtype)[:expected.size] == expected.ravel()).all():
            raise ValueError(f"kernel {kernel.name}: wrong result on the virtual GPU")
    for a in arrays.values():
        device.memory.forget(a.ctypes.data)
    return launch


def modelled(kernel: TimingKernel, launch: Launch, chip: Chip) -> float:
    """The modelled counterpart of the kernel's measured time, in us."""
    one = recorded(launch, chip)
    if kernel.time_of == "in_kernel":
        n = 1 if kernel.cold else 2
        result = Simulation(chip, [one] * n, kernel.cold).run()
        readings = result.clocks[n - 1, kernel.clock_warp]
        return result.us(readings[-1] - readings[0])
    n = 12 if kernel.pdl else 3  # dependent launches overlap deeply: their rate shows late
    result = Simulation(chip, [one] * n, kernel.cold).run()
    half = n // 2
    return result.us(result.ends[-1] - result.ends[-1 - half]) / half


def rows(chip: Chip = H200, progress=lambda items: items) -> list[Row]:
    """Every kernel, modelled against measured. Raises ValueError where a time does not belong to its kernel."""
    times = json.loads(TIMES.read_text())["kernels"]
    device = Device("sm_90a")
    device.recording = True
    out = []
    for kernel in progress(all_kernels()):
        time = times[kernel.name]
        if time["fingerprint"] != kernel.fingerprint():
            raise ValueError(f"kernel {kernel.name}: it is not the one that was measured")
        measured = time["us"][kernel.time_of]["median"]
        out.append(Row(kernel.name, kernel.role, measured, modelled(kernel, record(kernel, device), chip)))
    return out


def summary(found: list[Row], role: str) -> tuple[float, float]:
    """(median, worst) of the absolute errors of the kernels of a role."""
    errors = [abs(r.error) for r in found if r.role == role]
    return statistics.median(errors), max(errors)


def table(title: str, names: tuple[str, ...], left: int) -> Any:
    """An empty table whose first `left` columns are text."""
    from rich.table import Table

    out = Table(title=title)
    for i, name in enumerate(names):
        out.add_column(name, justify="left" if i < left else "right")
    return out


def print_h200(console: Any) -> None:
    """The H200's kernels, and the errors of those that set constants and of those that test."""
    from rich.progress import track

    found = rows(progress=lambda items: track(items, "H200 kernels", console=console, transient=True))
    out = table("H200: measured against modelled (us)", ("kernel", "role", "measured", "modelled", "difference"), 2)
    for r in found:
        out.add_row(r.name, r.role, f"{r.measured:.2f}", f"{r.modelled:.2f}", f"{100 * r.error:+.1f} %")
    console.print(out)
    for role in ("fit", "test"):
        median, worst = summary(found, role)
        console.print(f"{role}: {sum(r.role == role for r in found)} kernels, median error {100 * median:.1f} %, worst "
                      f"{100 * worst:.1f} %")


def print_b200(console: Any) -> None:
    """Published B200 times against the modelled times of imitations; needs CuTeDSL."""
    from rich.progress import track

    from .validation import b200

    found = b200.rows(progress=lambda items: track(items, "B200 variants", console=console, transient=True))
    names = ("kernel", "n, k", "bound (modelled)", "published", "modelled", "difference")
    out = table("B200, m = 128: published against modelled (us)", names, 3)
    for r in found:
        out.add_row(r.variant.name, f"{r.shape[1]}, {r.shape[2]}", r.bound, f"{r.published:.2f}", f"{r.modelled:.2f}",
                    f"{100 * r.error:+.1f} %")
    console.print(out)
    errors = [abs(r.error) for r in found if r.counts]
    console.print(f"{len(errors)} figures, median error {100 * statistics.median(errors):.1f} %, worst "
                  f"{100 * max(errors):.1f} %. Rows with \"no load ahead\" are for contrast and do not count.")
    pairs, wrong = b200.orders(found)
    console.print(f"Order of the variants: {pairs - len(wrong)} of {pairs} pairs right.")
    for pair in wrong:
        console.print(f"  wrong or level: {pair}")
    console.print(f"Host time a call: {b200.HOST_PREPARED} us (published) for the specialised kernels, "
                  f"{b200.HOST_TEMPLATE} us (measured, on a CPU of ours) for the template.")


def main() -> None:
    """Print the tables."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m vgpu.validate", description=__doc__)
    parser.add_argument("--chip", choices=("H200", "B200"), help="only this chip's table")
    chip = parser.parse_args().chip
    console = Console(width=110)
    if chip != "B200":
        print_h200(console)
    if chip != "H200":
        print_b200(console)


if __name__ == "__main__":
    main()
