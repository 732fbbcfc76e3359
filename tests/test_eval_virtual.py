"""eval.py end to end on the virtual B200: compile, execute, check, count, model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CASE_KEYS = {"m", "n", "k", "l", "seed", "passed", "error", "wall_s", "counters", "measured_us", "modelled_us"}


def run(tmp_path, *arguments, code=0):
    """Run eval.py in an empty folder; returns (printed, what --json wrote)."""
    file = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "eval.py"), *arguments, "--device", "virtual", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text())


def test_test_mode(tmp_path):
    printed, report = run(tmp_path, "test", "--case", "m=128,n=256,k=256", "--case", "m=129,n=136,k=320,l=2,seed=7")
    assert "2 of 2 cases passed" in printed and "virtual B200" in printed
    assert report["geomean_us"] is None and report["geomean_kind"] is None
    for case, sizes in zip(report["cases"], [(128, 256, 256, 1, 1111), (129, 136, 320, 2, 7)], strict=True):
        assert set(case) == CASE_KEYS
        assert (case["m"], case["n"], case["k"], case["l"], case["seed"]) == sizes
        assert case["passed"] and case["error"] is None and case["measured_us"] is None
        assert case["counters"].get("warnings", True)
        assert case["counters"]["mma_instructions"] > 0
    assert all("warnings" not in case["counters"] for case in report["cases"])


def test_benchmark_models_and_says_so(tmp_path):
    """Two submissions side by side; every time is labelled modelled, none measured."""
    mine = str(ROOT / "submission.py")
    printed, reports = run(tmp_path, "benchmark", "--case", "m=128,n=128,k=512", "--submission", mine, "--submission",
                           mine)
    assert "ratio" in printed and "modelled" in printed and "error of" in printed
    assert len(reports) == 2
    for report in reports:
        case, model = report["cases"][0], report["cases"][0]["counters"]["model"]
        assert report["geomean_kind"] == "modelled" and case["measured_us"] is None
        assert case["modelled_us"] == model["call_us"] >= model["device_us"] > 0
        assert model["call_us"] == max(model["device_us"], model["floors_us"]["host"])
        assert {"DRAM", "L2 to SMs", "SM ingest", "tensor core", "launch", "host"} == set(model["floors_us"])


def test_profile_writes_trace_and_picture(tmp_path):
    printed, _ = run(tmp_path, "profile", "--case", "m=128,n=128,k=512")
    trace = json.loads((tmp_path / "profile-128x128x512.json").read_text())
    assert sum(e["name"] == "MMA" for e in trace["traceEvents"]) == 8
    assert (tmp_path / "profile-128x128x512.png").read_bytes()[:4] == b"\x89PNG"
    assert "bound by" in printed and "idle" in printed


BROKEN = {
    "half of K": ("for k_tile in cutlass.range(cta.k_tiles, unroll=1):",
                  "for k_tile in cutlass.range(cta.k_tiles // 2, unroll=1):", ""),
    "wait left out": ("cute.arch.mbarrier_wait(cta.barriers.accumulator_full, 0)", "pass", "VirtualGpuError"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_fails(tmp_path, fault):
    """The submission with one line changed: a failed case with the reason, exit status 112."""
    old, new, reason = BROKEN[fault]
    text = (ROOT / "submission.py").read_text()
    assert old in text
    path = tmp_path / "broken.py"
    path.write_text(text.replace(old, new))
    printed, report = run(tmp_path, "test", "--case", "m=128,n=128,k=1024", "--submission", str(path), code=112)
    assert "0 of 1 cases passed" in printed
    assert not report["cases"][0]["passed"] and reason in report["cases"][0]["error"]
