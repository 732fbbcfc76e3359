"""The timeline of a modelled launch as a picture: a row a warp and unit, waits by cause."""

from __future__ import annotations

from pathlib import Path

from .simulate import Result

COLOURS = {"issue": "#4c72b0", "wait": "#d9d9d9", "copy": "#dd8452", "MMA": "#55a868", "cp": "#8172b3",
           "store": "#c44e52"}


def colour(name: str) -> str:
    """By the kind of span."""
    return COLOURS.get(name.split()[0].rstrip(":"), "#937860")


def write_timeline(result: Result, path: str | Path, title: str) -> None:
    """Draw the first cluster's spans to `path` (PNG or SVG by its ending), 1200 px wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    tracks = sorted({s.track for s in result.spans}, reverse=True)
    rows = {t: i for i, t in enumerate(tracks)}
    figure, axes = pyplot.subplots(figsize=(12, 1.6 + 0.36 * len(tracks)), dpi=100)
    for track, row in rows.items():
        spans = [s for s in result.spans if s.track == track]
        for kind in sorted({colour(s.name) for s in spans}):
            bars = [(result.us(s.start), max(result.us(s.end - s.start), 1e-4))
                    for s in spans if colour(s.name) == kind]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=kind, linewidth=0)
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_xlabel("modelled time, us")
    axes.set_title(f"{title}: modelled on {result.chip.name}, first cluster")
    axes.legend(handles=[Patch(color=c, label=n) for n, c in COLOURS.items()], loc="upper center",
                bbox_to_anchor=(0.5, -0.16), ncol=len(COLOURS), frameon=False)
    axes.grid(axis="x", linewidth=0.3)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
