"""Each wait, arrival, commit and fence removed from the compiled PTX in turn: the virtual GPU must notice.

`python tests/test_mutation.py` prints the table.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import pytest
import torch
from guarded import guard

import vgpu
from vgpu.mutate import mutants

if __name__ == "__main__":
    vgpu.install("sm_100a")

import reference
import submission

# More k-tiles than stages, so that every barrier is used in more than one phase.
CONFIGS = {"128 columns": submission.CONFIG, "64 columns": submission.NARROW}
SIZE = (128, 128, (2 * submission.NARROW.stages + 1) * submission.NARROW.tile_k, 1)
RUNS = [("copies", 0), ("tensor", 0), ("random", 0), ("random", 1), ("random", 2)]

# Statements whose removal changes nothing that can be observed, and why.
HARMLESS = {
    "tcgen05.relinquish_alloc_permit": "a courtesy to other CTAs on the SM; nothing allocates afterwards",
    "griddepcontrol": "launches run one after the other here: what overlaps on hardware cannot be noticed",
    "tail": "the load warp's last waits: the accumulator's commit comes after all others in the tensor core's order, "
            "so the epilogue's wait already keeps the CTA alive; kept because nothing else in the load warp says so",
}


class Recorder:
    """Runs the submission with other PTX in place of what CuTeDSL compiled."""

    def __init__(self):
        self.data, self.guarded = guard(reference.generate_input(*SIZE, 7, "cpu", "distinct"))
        self.expected = reference.ref_kernel(self.data, dtype=torch.float64).to(torch.float16)
        self.text = self.compiled = None
        self.launch = vgpu.launch_kernel

    def __call__(self, device, text, entry, config, address_of_argument):
        self.compiled = text if self.compiled is None else self.compiled
        return self.launch(device, self.text or text, entry, config, address_of_argument)

    def outcome(self, text: str | None, order: str, seed: int) -> str:
        """'right', 'wrong result', the kind of error, or 'warning'."""
        self.text = text
        device = vgpu.device()
        device.order, device.seed = order, seed
        self.data[6].view(torch.int16).fill_(-1)
        try:
            out = submission.custom_kernel(self.data)
        except vgpu.VirtualGpuError as error:
            return error.kind
        if not reference.compare(out, self.expected)[0] or not self.guarded.untouched():
            return "wrong result"
        return "warning" if vgpu.last_launch().warnings else "right"


def table(recorder: Recorder) -> list[tuple]:
    """[(line, statement, {run: outcome})] for every mutant."""
    assert [recorder.outcome(None, *run) for run in RUNS] == ["right"] * len(RUNS)
    rows = []
    for mutant in mutants(recorder.compiled):
        rows.append((mutant.line, mutant.what, {run: recorder.outcome(mutant.text, *run) for run in RUNS}))
    return rows


def is_tail(rows: list[tuple], line: int) -> bool:
    """The second of the load warp's two waiting loops; the first is followed by its copies."""
    loops = [row[0] for row in rows if row[1].startswith("mbarrier.try_wait.parity.shared")]
    return len(loops) > 1 and line == loops[1]


def harmless(rows: list[tuple], row: tuple) -> str | None:
    """Why the removal of this statement cannot be noticed, or None if it must be."""
    for name, reason in HARMLESS.items():
        if row[1].startswith(name) or (name == "tail" and is_tail(rows, row[0])):
            return reason
    return None


@pytest.fixture(params=CONFIGS)
def recorder(request, monkeypatch):
    monkeypatch.setattr(submission, "choose_config", lambda *sizes: CONFIGS[request.param])
    monkeypatch.setattr(submission, "_prepared", ())  # records of the other configuration
    made = Recorder()
    monkeypatch.setattr(vgpu, "launch_kernel", made)
    return made


def test_every_removal_is_noticed(recorder):
    rows = table(recorder)
    assert len(rows) > 25
    kinds = {w.split(".")[0] for _, w, _ in rows}
    assert {"mbarrier", "fence", "bar", "tcgen05"} <= kinds
    for row in rows:
        noticed = any(outcome != "right" for outcome in row[2].values())
        assert noticed or harmless(rows, row), f"PTX line {row[0]}: removing {row[1]} went unnoticed"


def main() -> None:
    """Print the table of mutants."""
    from rich.console import Console
    from rich.table import Table

    made = Recorder()
    vgpu.launch_kernel = made
    rows = table(made)
    shown = Table(title=f"each synchronisation removed, problem {SIZE}")
    for column in ("line", "removed", *(f"{order} {seed}" for order, seed in RUNS), "why not noticed"):
        shown.add_column(column)
    for row in rows:
        unnoticed = all(outcome == "right" for outcome in row[2].values())
        reason = (harmless(rows, row) or "NOT EXPLAINED") if unnoticed else ""
        shown.add_row(str(row[0]), row[1][:70], *row[2].values(), reason)
    Console(width=200).print(shown)


if __name__ == "__main__":
    main()
