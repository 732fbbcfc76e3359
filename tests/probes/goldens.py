"""Golden files: what a real GPU answered, with where and when it was asked.

One JSON file a group. Outputs and encoded tensor maps are blobs; equal blobs are kept once; all of a file's blobs are
one LZMA stream, written in base 85.
"""

from __future__ import annotations

import base64
import json
import lzma
from dataclasses import dataclass, field
from pathlib import Path

from .model import Probe

FOLDER = Path(__file__).resolve().parent / "golden"
PROVENANCE = ("gpu", "compute_capability", "driver", "cuda", "date", "captured_by")
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
COLUMNS = 116


class GoldenError(Exception):
    """A golden file is missing, or belongs to another version of the probe."""


@dataclass
class Golden:
    """One probe's record: outputs of the `Buffer` arguments that are outputs, in order; the tensor maps as encoded by
    the driver with the address field zeroed; or the error that came instead."""

    fingerprint: str
    outputs: list[bytes] = field(default_factory=list)
    maps: list[bytes] = field(default_factory=list)
    error: str | None = None


def write(path: Path, provenance: dict[str, str], goldens: dict[str, Golden]) -> None:
    """Write one group's file."""
    blobs: dict[bytes, int] = {}

    def number(blob: bytes) -> int:
        return blobs.setdefault(blob, len(blobs))

    lines = []
    for name, golden in goldens.items():
        entry = {"fingerprint": golden.fingerprint, "outputs": [number(b) for b in golden.outputs],
                 "maps": [number(b) for b in golden.maps], "error": golden.error}
        lines.append(f"  {json.dumps(name)}: {json.dumps(entry)}")
    packed = lzma.compress(b"".join(blobs), format=lzma.FORMAT_RAW, filters=FILTERS)
    data = base64.b85encode(packed).decode()
    rows = [data[i:i + COLUMNS] for i in range(0, len(data), COLUMNS)]
    sections = [f' "provenance": {json.dumps(provenance)}', ' "probes": {\n' + ",\n".join(lines) + "\n }",
                f' "sizes": {json.dumps([len(b) for b in blobs])}',
                ' "data": [\n' + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"]
    path.write_text("{\n" + ",\n".join(sections) + "\n}\n")


def read(path: Path) -> tuple[dict[str, str], dict[str, Golden]]:
    """Provenance and goldens of one group's file."""
    if not path.exists():
        raise GoldenError(f"no golden file {path.name}: run capture.py on a GPU (see README.md)")
    content = json.loads(path.read_text())
    packed = base64.b85decode("".join(content["data"]))
    stream = lzma.decompress(packed, format=lzma.FORMAT_RAW, filters=FILTERS)
    blobs, start = [], 0
    for size in content["sizes"]:
        blobs.append(stream[start:start + size])
        start += size
    goldens = {name: Golden(entry["fingerprint"], [blobs[i] for i in entry["outputs"]],
                            [blobs[i] for i in entry["maps"]], entry["error"])
               for name, entry in content["probes"].items()}
    return content["provenance"], goldens


def golden_of(probe: Probe, goldens: dict[str, Golden]) -> Golden:
    """The probe's golden, or a `GoldenError` if there is none or it was captured from another version of the probe."""
    golden = goldens.get(probe.name)
    if golden is None:
        raise GoldenError(f"{probe.name}: not in golden file {probe.group}.json: capture it on a GPU")
    if golden.fingerprint != probe.fingerprint():
        raise GoldenError(f"{probe.name}: the probe changed since its golden was captured: capture it again on a GPU")
    return golden
