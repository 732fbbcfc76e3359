"""The timeline of a modelled launch as a Chrome trace, which Perfetto opens (Trace Event Format, JSON object form)."""

from __future__ import annotations

import json
from pathlib import Path

from .simulate import Result


def chrome_trace(result: Result, title: str) -> dict:
    """{"traceEvents": [...]}: a complete event ("X") for every span, a thread for every warp and unit; ts in us."""
    tracks = sorted({s.track for s in result.spans})
    number = {track: i for i, track in enumerate(tracks)}
    events = [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": f"{title} (modelled)"}}]
    events += [{"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": t}} for t, i in number.items()]
    for s in result.spans:
        events.append({
            "name": s.name, "cat": s.track.split()[-1], "ph": "X", "pid": 0, "tid": number[s.track],
            "ts": result.us(s.start), "dur": max(0.0, result.us(s.end - s.start)),
        })
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"kind": "modelled", "chip": result.chip.name}}


def write_trace(result: Result, path: str | Path, title: str) -> None:
    """Write the trace to `path`."""
    Path(path).write_text(json.dumps(chrome_trace(result, title)))
