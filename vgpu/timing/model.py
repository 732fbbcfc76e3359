"""The modelled time of a recorded launch in a chain of launches, as a benchmark harness runs it."""

from __future__ import annotations

from .chips import Chip
from .explain import Breakdown, explain
from .simulate import Recorded, Result, Simulation

CHAIN = 3  # launches simulated; the last one's period is that of a long chain
MAX_THREADS, MAX_CTAS, RESERVED_SHARED = 2048, 32, 1024  # of an SM; shared bytes the system takes of each CTA
ATTRIBUTE_PDL = 6  # cudaLaunchAttributeProgrammaticStreamSerialization


def recorded(launch, chip: Chip) -> Recorded:
    """A launch of the virtual GPU (`vgpu.Launch`, made while the device was recording) as the simulation takes it.

    Raises ValueError if it was not recorded.
    """
    if launch.recording is None:
        raise ValueError("launch: it was not recorded (set vgpu.device().recording before it)")
    x, y, z = launch.config.block
    threads = -(-x * y * z // 32) * 32
    shared = launch.counters["shared_bytes_per_cta"] + RESERVED_SHARED
    slots = max(1, min(int(chip.shared_bytes.value // shared), MAX_THREADS // threads, MAX_CTAS))
    cx, cy, cz = launch.config.cluster
    attribute = launch.config.attributes.get(ATTRIBUTE_PDL, b"")
    pdl = int.from_bytes(attribute[:4], "little") != 0  # an int; the rest is junk
    return Recorded(launch.recording, cx * cy * cz, slots, pdl)


def model(launches: list, chip: Chip, host_us: float | None = None, cold: bool = True) -> tuple[Breakdown, Result]:
    """Modelled time of one call that makes `launches`, in a stream of such calls on distinct inputs (`cold`).

    host_us: measured time of the host side of a call; the call takes the longer of host and device.
    """
    each = [recorded(launch, chip) for launch in launches]
    result = Simulation(chip, each * CHAIN, cold).run()
    period = result.ends[-1] - result.ends[-1 - len(each)]
    return explain(result, result.us(period), host_us), result
