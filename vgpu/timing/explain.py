"""What bounds a modelled launch: floors of each resource, achieved shares, idle time of each warp by cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .simulate import Result


@dataclass(frozen=True)
class Breakdown:
    """All times in modelled microseconds of one call.

    call_us: what the harness would see, the larger of host and device; device_us: period of the launches on the device;
    floors_us: least time each resource needs for the work; bound: the resource that decides; shares: floor / call;
    waits_us: {warp index: {cause: time}}, mean over CTAs.
    """

    call_us: float
    device_us: float
    kernel_us: float
    floors_us: dict[str, float]
    bound: str
    shares: dict[str, float]
    waits_us: dict[str, dict[str, float]]

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)


def explain(result: Result, device_us: float, host_us: float | None = None) -> Breakdown:
    """The breakdown of a simulated chain of launches.

    device_us: period of a launch in the chain. host_us: measured host time of a call, None to leave it out.
    """
    chip, launches = result.chip, len(result.ends)
    clock = chip.clock.value
    kernel = result.us(result.ends[-1] - result.starts[-1])

    def time(nbytes: float, bandwidth: float) -> float:
        return nbytes / launches / bandwidth * 1e-3 if bandwidth else 0.0  # bytes / (GB/s) in us

    floors = {
        "DRAM": time(result.bytes["DRAM"], chip.dram_bandwidth.value),
        "L2 to SMs": time(result.bytes["L2"], chip.l2_bandwidth.value),
        "SM ingest": result.busy["SM ingest"] / clock * 1e-3,
        "tensor core": result.busy["tensor core"] / clock * 1e-3,
        "launch": result.us(chip.launch_latency.value + chip.launch_gap.value),
    }
    call = max(device_us, host_us or 0.0)
    if host_us is not None:
        floors["host"] = host_us
    bound = max(floors, key=floors.get)
    if floors[bound] < 0.5 * call:
        bound = "latency"
    waits = {str(w): {cause: result.us(t) / max(1, result.ctas) for cause, t in sorted(causes.items())}
             for w, causes in sorted(result.waits.items())}
    return Breakdown(call, device_us, kernel, floors, bound, {k: v / call for k, v in floors.items()}, waits)
