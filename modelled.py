"""Modelled times for eval.py: what a call would take on a B200, by the timing model of vgpu. Never a measurement.

A call takes the longer of its host side, measured here with launches that do nothing, and its launches on the device,
replayed from what they executed on the virtual B200 in a chain of calls on distinct inputs, as the contest's harness
makes them.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOST_BATCHES, HOST_CALLS = 15, 100  # the median of so many means of so many calls


def host_us(kernel: Callable, data: Any) -> float:
    """Measured microseconds that ``kernel(data)`` takes on the host; its launches must do nothing."""
    for _ in range(HOST_CALLS):
        kernel(data)
    means = []
    for _ in range(HOST_BATCHES):
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            kernel(data)
        means.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    return statistics.median(means)


def model_call(launches: list, host: float | None) -> tuple[dict[str, Any], Any]:
    """The breakdown of one call that makes ``launches`` (recorded by vgpu) as JSON-ready values, and the simulation.

    ``call_us`` is the modelled time; ``error`` the model's own, median and worst, as `vgpu.validate` found it.
    """
    from vgpu.timing.chips import B200
    from vgpu.timing.model import model

    breakdown, simulation = model(launches, B200, host)
    error = {"median": B200.median_error.value, "worst": B200.worst_error.value}
    return {**breakdown.as_dict(), "chip": B200.name, "error": error}, simulation


def describe(model: dict[str, Any]) -> str:
    """The breakdown as text: what bounds the call, the floor of each resource, idle time of each warp by cause."""
    lines = [f"modelled {model['call_us']:.2f} us a call (error: median {100 * model['error']['median']:.0f} %, worst "
             f"{100 * model['error']['worst']:.0f} %), bound by {model['bound']}; device {model['device_us']:.2f} us, "
             f"kernel alone {model['kernel_us']:.2f} us"]
    lines.append("  resource        floor us   share of the call")
    for name, floor in sorted(model["floors_us"].items(), key=lambda item: -item[1]):
        lines.append(f"  {name:14s} {floor:9.2f}   {100 * model['shares'][name]:5.1f} %")
    lines.append("  idle, us a CTA (modelled)")
    for warp, causes in model["waits_us"].items():
        shown = ", ".join(f"{cause} {us:.2f}" for cause, us in sorted(causes.items(), key=lambda item: -item[1])[:4])
        lines.append(f"  warp {warp}: {shown}")
    return "\n".join(lines)


def write_pictures(simulation: Any, stem: Path, title: str) -> list[Path]:
    """The timeline as ``STEM.json`` (for Perfetto) and ``STEM.png``; returns their paths."""
    from vgpu.timing.perfetto import write_trace
    from vgpu.timing.plot import write_timeline

    trace, picture = stem.with_suffix(".json"), stem.with_suffix(".png")
    write_trace(simulation, trace, title)
    write_timeline(simulation, picture, title)
    return [trace, picture]
