"""Hardware probes: small PTX kernels run once on a real GPU, whose outputs the virtual GPU must reproduce."""

from __future__ import annotations

from .model import Probe


def all_probes() -> list[Probe]:
    """Every probe, in a fixed order; names are unique."""
    from . import bulk, clusters, conversions, floats, integers, mbarriers, memory, stops, tma, warps

    modules = (tma, bulk, clusters, mbarriers, warps, integers, floats, conversions, memory, stops)
    probes = [probe for module in modules for probe in module.probes()]
    names = [probe.name for probe in probes]
    if len(set(names)) != len(names):
        raise ValueError(f"probe names repeat: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return probes
