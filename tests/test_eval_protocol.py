"""eval.py as a subprocess on plain torch submissions, and the parts of it that need no process of their own."""

import base64
import json
import math
import os
import re
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import eval as harness
import task
from reference import generate_input

EVAL = Path(harness.__file__)
SMALL = "m=2,n=8,k=32"
SMALL_LINE = "m: 2; n: 8; k: 32; l: 1; seed: 1111"

RIGHT = """
from reference import ref_kernel
from task import input_t, output_t

def custom_kernel(data: input_t) -> output_t:
    return data[6].copy_(ref_kernel(data))
"""


def faulty(body: str) -> str:
    """A submission whose ``custom_kernel`` has this body; ``calls`` lists the data of its calls, this one included."""
    lines = "".join(f"    {line}\n" for line in ["calls.append(data)", *body.strip().splitlines()])
    head = "import os, sys, torch\nfrom reference import ref_kernel\ncalls, kept = [], []\n"
    return f"{head}def custom_kernel(data):\n{lines}"


FAULTY = {
    "cached": ("kept.append(ref_kernel(data))\nreturn kept[0]", "elements mismatch"),
    "cached by copy": ("data[6].copy_(ref_kernel(calls[0]))\nreturn data[6]", "elements mismatch"),
    "not written": ("return data[6]", r"16 of 16 elements mismatch.*\n16 elements of c were never written"),
    "last row missing": ("data[6][:1] = ref_kernel(data)[:1]\nreturn data[6]", "8 elements of c were never written"),
    "float32": ("return ref_kernel(data, torch.float64).float()", "dtype is torch.float32, expected torch.float16"),
    "empty list": ("return []", "the output is a list"),
    "nothing": ("data[6].copy_(ref_kernel(data))", "the output is a NoneType"),
    "raises": ("raise RuntimeError('no such tile')", r"RuntimeError: no such tile \(submission.py, line 6\)"),
    "changes a": (
        "out = ref_kernel(data)\ndata[0].view(torch.uint8)[1, 3, 0] ^= 1\nreturn out",
        "^the submission changed its input a$",
    ),
    "changes padding": (
        "data[5].view(torch.uint8)[31, 3, 0, 3, 0, 0] ^= 1\nreturn ref_kernel(data)",
        "^the submission changed its input sfb_permuted$",
    ),
    "after c": (
        "c = data[6].copy_(ref_kernel(data))\nc.as_strided((1,), (1,), c.storage_offset() + 16)[0] = 0\nreturn c",
        "^memory after c was written$",
    ),
    "before c": (
        "c = data[6].copy_(ref_kernel(data))\nc.as_strided((1,), (1,), c.storage_offset() - 1)[0] = 0\nreturn c",
        "^memory before c was written$",
    ),
    "leaves": ("sys.exit(0)", "SystemExit: 0"),
    "leaves at once": ("os._exit(0)", "the submission's process ended before it answered"),
}


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    path = tmp_path / "submission.py"
    path.write_text(RIGHT)
    return path


def run(*arguments: object, environment: dict[str, str] | None = None, pass_fds: tuple[int, ...] = ()):
    """eval.py with these arguments; POPCORN_* only as given."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("POPCORN")}
    return subprocess.run(
        [sys.executable, str(EVAL), *map(str, arguments)],
        env=inherited | (environment or {}),
        pass_fds=pass_fds,
        capture_output=True,
        text=True,
        timeout=120,
    )


def run_popcorn(mode: str, lines: str, submission: Path, seed: str | None = None) -> tuple[int, list[tuple[str, str]]]:
    """eval.py under the organisers' protocol: the exit status and the ``key: value`` lines in order."""
    case_file = submission.with_name("cases.txt")
    case_file.write_text(lines)
    reader, writer = os.pipe()
    environment = {"POPCORN_FD": str(writer)} | ({} if seed is None else {"POPCORN_SEED": seed})
    options = ("--device", "cpu", "--submission", submission)
    try:
        done = run(mode, case_file, *options, environment=environment, pass_fds=(writer,))
    finally:
        os.close(writer)
    with os.fdopen(reader) as file:
        pairs = [tuple(line.rstrip("\n").split(": ", 1)) for line in file]
    return done.returncode, pairs


def run_json(submission: Path, *arguments: object) -> tuple[int, dict]:
    target = submission.with_name("result.json")
    done = run(*arguments, "--device", "cpu", "--submission", submission, "--json", target)
    return done.returncode, json.loads(target.read_text())


# ---- the organisers' protocol ---------------------------------------------------------------------------------------


def test_protocol_of_passing_tests(submission: Path) -> None:
    status, pairs = run_popcorn("test", f"{SMALL_LINE}\nm: 1; n: 16; k: 64; l: 3; seed: 5\n", submission)
    assert status == 0
    assert pairs == [
        ("test-count", "2"),
        ("test.0.spec", SMALL_LINE),
        ("test.0.status", "pass"),
        ("test.0.message", "largest error 0"),
        ("test.1.spec", "m: 1; n: 16; k: 64; l: 3; seed: 5"),
        ("test.1.status", "pass"),
        ("test.1.message", "largest error 0"),
        ("check", "pass"),
    ]


def test_protocol_goes_on_after_a_failed_test(submission: Path) -> None:
    submission.write_text(faulty("if data[6].shape[0] == 2: raise ValueError('two\\nlines')\nreturn ref_kernel(data)"))
    status, pairs = run_popcorn("test", f"{SMALL_LINE}\nm: 1; n: 8; k: 32; l: 1; seed: 1\n", submission)
    found = dict(pairs)
    assert status == 112
    assert found["test.0.status"] == "fail"
    assert found["test.0.error"] == "ValueError: two\\nlines (submission.py, line 6)"
    assert found["test.1.status"] == "pass"
    assert found["check"] == "fail"


@pytest.mark.parametrize("mode", ["benchmark", "leaderboard"])
def test_benchmark_off_the_gpu_passes_without_times(mode: str, submission: Path) -> None:
    status, pairs = run_popcorn(mode, SMALL_LINE, submission)
    assert status == 0
    assert [key for key, _ in pairs] == [
        "benchmark-count",
        "benchmark.0.spec",
        "benchmark.0.status",
        "benchmark.0.message",
        "check",
    ]
    assert dict(pairs)["benchmark.0.status"] == "pass"


def test_failed_benchmark_is_reported(submission: Path) -> None:
    submission.write_text(faulty("return ref_kernel(data) if len(calls) == 1 else data[6]"))
    status, pairs = run_popcorn("benchmark", SMALL_LINE, submission)
    assert status == 112
    assert dict(pairs)["benchmark.0.status"] == "fail"
    assert "16 elements of c were never written" in dict(pairs)["benchmark.0.error"]
    assert dict(pairs)["check"] == "fail"


def test_profile_reports_what_torch_saw(submission: Path) -> None:
    status, pairs = run_popcorn("profile", SMALL_LINE, submission)
    report = base64.b64decode(dict(pairs)["benchmark.0.report"], b"+*").decode()
    assert status == 0
    assert "aten::mm" in report


def test_secret_seed_is_combined_and_hidden(submission: Path) -> None:
    secret = 2**40 + 3
    seen = submission.with_name("seen")
    submission.write_text(
        faulty(
            "assert not [name for name in os.environ if name.startswith('POPCORN')]\n"
            f"with open({str(seen)!r}, 'ab') as file: file.write(bytes(data[0].view(torch.uint8).flatten().tolist()))\n"
            "return ref_kernel(data)"
        )
    )
    status, pairs = run_popcorn("test", SMALL_LINE, submission, seed=str(secret))
    assert status == 0
    total = 1111 + secret
    seed = (total * (total + 1) // 2 + 1111) % 2**63
    expected = b""
    for repeat in range(2):
        a = generate_input(2, 8, 32, 1, seed + 42 * repeat, device="cpu")[0]
        expected += bytes(a.view(torch.uint8).flatten().tolist())
    assert seen.read_bytes() == expected
    assert str(seed) not in str(pairs) and str(secret) not in str(pairs)


def test_submission_does_not_inherit_the_descriptor(submission: Path, tmp_path: Path) -> None:
    case_file, log = tmp_path / "cases.txt", tmp_path / "log"
    case_file.write_text(SMALL_LINE)
    submission.write_text(
        faulty(
            f"status = os.stat({str(log)!r})\n"
            "opened = [os.stat(f'/proc/self/fd/{d}') for d in range(64) if os.path.exists(f'/proc/self/fd/{d}')]\n"
            "assert len(opened) >= 3 and not any(os.path.samestat(status, other) for other in opened)\n"
            "return ref_kernel(data)"
        )
    )
    with log.open("w") as file:
        environment = {"POPCORN_FD": str(file.fileno())}
        options = ("--device", "cpu", "--submission", submission)
        done = run("test", case_file, *options, environment=environment, pass_fds=(file.fileno(),))
    assert done.returncode == 0, done.stderr
    assert log.read_text().endswith("check: pass\n")


def test_descriptor_one_is_standard_output(submission: Path, tmp_path: Path) -> None:
    case_file = tmp_path / "cases.txt"
    case_file.write_text(SMALL_LINE)
    submission.write_text(RIGHT + "    print('never')\n" + "print('from the submission')\n")
    options = ("--device", "cpu", "--submission", submission)
    done = run("test", case_file, *options, environment={"POPCORN_FD": "1"})
    assert done.returncode == 0
    assert {"test.0.status: pass", "check: pass", "from the submission"} <= set(done.stdout.splitlines())


# ---- exit statuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("descriptor", [None, "", "99", "-1", "first", str(2**70)])
def test_case_file_without_open_descriptor_is_111(descriptor: str | None, submission: Path, tmp_path: Path) -> None:
    case_file = tmp_path / "cases.txt"
    case_file.write_text(SMALL_LINE)
    environment = {} if descriptor is None else {"POPCORN_FD": descriptor}
    done = run("test", case_file, "--submission", submission, environment=environment)
    assert done.returncode == 111
    assert "POPCORN_FD" in done.stderr


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ("", "no case in it"),
        ("\n  \n", "no case in it"),
        ("m: 2; n: 8; k: 32; l: 1", "lacks seed"),
        ("m: 2; n: 8; k: 32; l: 1; seed: 1; q: 3", "'q' in .* is not known"),
        ("m: 2; m: 2; n: 8; k: 32; l: 1; seed: 1", "'m' in .* is given twice"),
        ("m: 2; n: 8; k: thirty; l: 1; seed: 1", "'k: thirty' in .* is not of the form m: 128"),
        (f"{SMALL_LINE}\nm=2,n=8,k=32", "is not of the form m: 128"),
    ],
)
def test_unreadable_case_file_is_113(lines: str, text: str, tmp_path: Path) -> None:
    case_file = tmp_path / "cases.txt"
    case_file.write_text(lines)
    with pytest.raises(harness.CaseFileError, match=text):
        harness.read_case_file(str(case_file))


def test_missing_case_file_is_113(submission: Path) -> None:
    done = run("test", "no such file", "--submission", submission, environment={"POPCORN_FD": "1"})
    assert done.returncode == 113
    assert "no such file" in done.stderr
    submission.with_name("cases.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(harness.CaseFileError):
        harness.read_case_file(str(submission.with_name("cases.txt")))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "required: MODE"),
        (["race"], "invalid choice: 'race'"),
        (["test", "--case", "m=1,n=8"], "lacks k"),
        (["test", "--case", "m=1,n=8,k=x"], "'k=x' in 'm=1,n=8,k=x' is not of the form m=128"),
        (["test", "cases.txt", "--case", SMALL], "FILE and --case exclude each other"),
        (["test", "cases.txt", "--submission", "{}", "--submission", "{}"], "takes one submission"),
        (["test", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["test", "--submission", "missing.py"], "--submission missing.py: no such file"),
        (["test", "--json", "missing/result.json", "--submission", "{}"], "--json missing/result.json: no such folder"),
        (["test", "--repeats", "0", "--submission", "{}"], "--repeats 0: at least 1"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], text: str, submission: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as raised:
        harness.parse_arguments([argument.replace("{}", str(submission)) for argument in arguments])
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_descriptor_without_case_file_is_2(submission: Path) -> None:
    assert run("test", "--submission", submission, environment={"POPCORN_FD": "1"}).returncode == 2


def test_bad_secret_seed_is_2(submission: Path) -> None:
    done = run("test", "--submission", submission, environment={"POPCORN_SEED": "x1"})
    assert done.returncode == 2
    assert "POPCORN_SEED" in done.stderr


# ---- for people -----------------------------------------------------------------------------------------------------


def test_without_a_file_the_ten_contest_cases_run(submission: Path) -> None:
    status, report = run_json(submission, "test")
    assert status == 0
    sizes = [(case["m"], case["n"], case["k"]) for case in report["cases"]]
    assert sizes == [(spec["m"], spec["n"], spec["k"]) for spec in task.TEST_CASES]
    assert len(sizes) == 10 and (2304, 4608, 7168) in sizes
    assert all(case["passed"] and case["l"] == 1 and case["seed"] == 1111 for case in report["cases"])


def test_other_modes_run_the_benchmark_cases() -> None:
    for mode in ("benchmark", "leaderboard", "profile"):
        sizes = [(case.m, case.n, case.k, case.l, case.seed) for case in harness.default_cases(mode)]
        assert sizes == [(128, 7168, 16384, 1, 1111), (128, 4096, 7168, 1, 1111), (128, 7168, 2048, 1, 1111)]


def test_json_has_exactly_the_documented_keys(submission: Path) -> None:
    status, report = run_json(submission, "benchmark", "--case", SMALL, "--case", "k=64,n=8,m=1,l=2,seed=9")
    assert status == 0
    assert list(report) == ["device", "submission", "mode", "cases", "geomean_us", "geomean_kind"]
    assert (report["device"], report["submission"], report["mode"]) == ("cpu", str(submission), "benchmark")
    assert report["geomean_us"] is None and report["geomean_kind"] is None
    first, second = report["cases"]
    assert 0 < first.pop("wall_s") < 60
    assert first == {
        "m": 2, "n": 8, "k": 32, "l": 1, "seed": 1111, "passed": True, "error": None,
        "counters": {}, "measured_us": None, "modelled_us": None,
    }  # fmt: skip
    assert [second[name] for name in ("m", "n", "k", "l", "seed")] == [1, 8, 64, 2, 9]


def test_several_submissions_give_a_list_and_do_not_share_modules(tmp_path: Path) -> None:
    paths = []
    for name, factor in (("first", 1), ("second", 2)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "factor.py").write_text(f"FACTOR = {factor}\n")
        paths.append(folder / f"{name}.py")
        source = RIGHT.replace("ref_kernel(data)", "ref_kernel(data) * FACTOR")
        paths[-1].write_text(f"from factor import FACTOR\n{source}")
    target = tmp_path / "result.json"
    options = [part for path in paths for part in ("--submission", path)]
    done = run("test", "--case", SMALL, "--device", "cpu", "--json", target, *options)
    reports = json.loads(target.read_text())
    assert done.returncode == 112
    assert [report["submission"] for report in reports] == [str(path) for path in paths]
    assert [report["cases"][0]["passed"] for report in reports] == [True, False]


def test_table_says_device_verdicts_and_errors(submission: Path) -> None:
    submission.write_text(faulty("if data[6].shape[0] == 1: raise ValueError('[no] row')\nreturn ref_kernel(data)"))
    cases = ("--case", SMALL, "--case", "m=1,n=8,k=32,l=3")
    done = run("test", *cases, "--device", "cpu", "--submission", submission)
    assert done.returncode == 112
    assert done.stdout.startswith(f"{submission} on cpu\n")
    assert re.search(r"2 .* 8 .* 32 .* 1 .* 1111 .* pass", done.stdout)
    assert re.search(r"1 .* 8 .* 32 .* 3 .* 1111 .* FAIL", done.stdout)
    assert "1x8x32 l=3: ValueError: [no] row (submission.py, line 6)\n" in done.stdout
    assert done.stdout.endswith("1 of 2 cases passed\n")
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("fault", FAULTY, ids=str)
def test_faulty_submission_is_a_failed_case(fault: str, submission: Path) -> None:
    body, text = FAULTY[fault]
    submission.write_text(faulty(body))
    status, report = run_json(submission, "test", "--case", SMALL)
    (case,) = report["cases"]
    assert status == 112
    assert case["passed"] is False
    assert re.search(text, case["error"]), case["error"]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module' \(submission.py, line 1\)"),
        ("def custom(data): pass", "AttributeError: .* no attribute 'custom_kernel'"),
        ("def custom_kernel(data:", "SyntaxError"),
    ],
)
def test_submission_that_cannot_be_imported_is_a_failed_case(source: str, text: str, submission: Path) -> None:
    submission.write_text(source)
    status, report = run_json(submission, "test", "--case", SMALL)
    assert status == 112
    assert re.search(text, report["cases"][0]["error"])


def test_cases_after_a_death_run_in_a_new_process(submission: Path) -> None:
    submission.write_text(faulty("if data[6].shape[0] == 2: os.kill(os.getpid(), 9)\nreturn ref_kernel(data)"))
    status, report = run_json(submission, "test", "--case", SMALL, "--case", "m=1,n=8,k=32")
    assert status == 112
    assert [case["passed"] for case in report["cases"]] == [False, True]


@pytest.mark.parametrize("case", ["m=2,n=8,k=40", "m=0,n=8,k=64", "m=2,n=8,k=64,l=0"])
def test_impossible_problem_is_wrong_usage(submission: Path, case: str) -> None:
    done = subprocess.run([sys.executable, str(EVAL), "test", "--submission", str(submission), "--case", case],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "k a positive multiple of 16" in done.stderr


def test_every_call_gets_fresh_input_and_file_cache_is_off(submission: Path) -> None:
    submission.write_text(
        faulty(
            "assert os.environ['CUTE_DSL_DISABLE_FILE_CACHING'] == '1'\n"
            "assert data[6].isnan().all() and data[6].data_ptr() % 16 == 0\n"
            "bytes_of = lambda call: call[0].view(torch.uint8)\n"
            "assert sum(torch.equal(bytes_of(call), bytes_of(data)) for call in calls) == 1\n"
            "assert len(calls) < 5, 'five calls'\n"
            "return ref_kernel(data)"
        )
    )
    status, report = run_json(submission, "test", "--case", SMALL, "--repeats", "5")
    assert status == 112
    assert report["cases"][0]["error"].startswith("AssertionError: five calls")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_so(submission: Path) -> None:
    done = run("test", "--case", SMALL, "--device", "cuda", "--submission", submission)
    assert done.returncode == 112
    assert "torch finds no CUDA GPU here" in done.stdout


def test_help_has_examples() -> None:
    done = run("--help")
    assert done.returncode == 0
    for text in ("python eval.py test --case m=128,n=256,k=256", "--device", "--submission", "--json", "112"):
        assert text in done.stdout


# ---- parts ----------------------------------------------------------------------------------------------------------


def test_stats_are_those_of_the_definition() -> None:
    stats = harness.Stats.of([1.0, 2.0, 6.0])
    assert (stats.runs, stats.mean, stats.median, stats.best, stats.worst) == (3, 3.0, 2.0, 1.0, 6.0)
    assert stats.std == pytest.approx(math.sqrt((4 + 1 + 9) / 2))
    assert stats.err == pytest.approx(stats.std / math.sqrt(3))
    assert harness.Stats.of([5.0]).std == 0


def timed_result(us: float) -> harness.CaseResult:
    timing = {name: asdict(harness.Stats.of([us, us])) for name in ("back_to_back_us", "single_us")}
    return harness.CaseResult(measured_us=us, counters={"timing": timing})


def test_protocol_gives_times_in_nanoseconds() -> None:
    reader, writer = os.pipe()
    log = harness.PopcornLog(writer)
    log.begin(harness.Report("gpu", "s.py", "benchmark"), 1)
    log.case_ends(0, harness.Case(1, 8, 16), timed_result(12.5))
    log.file.close()
    with os.fdopen(reader) as file:
        found = dict(line.rstrip("\n").split(": ", 1) for line in file)
    expected = {"runs": "2", "mean": "12500.0", "std": "0.0", "err": "0.0", "best": "12500.0", "worst": "12500.0"}
    assert {name: found[f"benchmark.0.{name}"] for name in expected} == expected
    assert found["benchmark.0.status"] == "pass"


def test_geomean_needs_every_case_measured_and_passed() -> None:
    report = harness.Report("gpu", "s.py", "benchmark")
    case = harness.Case(1, 8, 16)
    assert report.geomean() == (None, None)
    report.cases = [(case, timed_result(2.0)), (case, timed_result(8.0))]
    assert report.geomean() == (pytest.approx(4.0), "measured")
    report.cases.append((case, harness.CaseResult()))
    assert report.geomean() == (None, None)
    report.cases[2] = (case, harness.CaseResult(error="wrong", measured_us=1.0))
    assert report.geomean() == (None, None)


def test_screen_shows_times_and_geomean(capsys: pytest.CaptureFixture) -> None:
    screen = harness.Screen()
    report = harness.Report("gpu", "s.py", "benchmark")
    screen.begin(report, 1)
    report.cases = [(harness.Case(1, 8, 16), timed_result(12.5))]
    screen.end(report)
    out = capsys.readouterr().out
    assert out.count("12.50 [12.50, 12.50]") == 2
    assert "geometric mean 12.500 us (measured)" in out


@pytest.fixture
def fake_vgpu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for the package vgpu that records what it is asked and answers ``launches``."""
    fake = types.SimpleNamespace(asked=[], answer=[])
    fake.install = lambda **options: fake.asked.append(options)
    fake.reset = lambda: fake.asked.append("reset")
    fake.launches = lambda: fake.answer
    fake.device = lambda: types.SimpleNamespace(recording=False)
    monkeypatch.setitem(sys.modules, "vgpu", fake)
    return fake


def launch(ctas: int, *warnings: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(counters={"ctas": ctas, "tma_bytes_by_tensor": {"a": 7}}, warnings=list(warnings),
                                 recording=None)


def test_virtual_device_is_installed_and_its_counters_are_kept(fake_vgpu: types.SimpleNamespace) -> None:
    device = harness.open_device("virtual")
    assert fake_vgpu.asked == [{"arch": "sm_100a"}]
    problem = harness.make_problem(harness.Case(1, 8, 16), 0, "cpu")
    assert device.call(lambda data: data[6], problem) is problem.data[6]
    assert fake_vgpu.asked[1:] == ["reset"]
    assert device.counters() == {"launches": 0, "per_launch": []}
    fake_vgpu.answer = [launch(4)]
    assert device.counters() == {"launches": 1, "ctas": 4, "tma_bytes_by_tensor": {"a": 7}}
    fake_vgpu.answer = [launch(4, "no fence"), launch(5)]
    counters = device.counters()
    assert counters["launches"] == 2 and counters["warnings"] == ["no fence"]
    assert [one["ctas"] for one in counters["per_launch"]] == [4, 5]


def test_virtual_benchmark_shows_work_and_no_time(
    fake_vgpu: types.SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    import reference

    fake_vgpu.answer = [launch(1234567, "no fence")]
    case = harness.Case(1, 8, 16)
    result = harness.open_device("virtual").benchmark(reference.ref_kernel, case, 2, 1.0)
    assert result.passed and result.measured_us is None and result.modelled_us is None
    screen = harness.Screen()
    report = harness.Report("virtual", "s.py", "benchmark")
    screen.begin(report, 1)
    report.cases = [(case, result)]
    screen.end(report)
    out = capsys.readouterr().out
    assert "1,234,567" in out and "tma_bytes_by_tensor.a" in out
    assert "1x8x16: warning: no fence" in out
    assert not re.search(r"\bus\b|geometric", out)
    assert report.as_json()["geomean_us"] is None


def test_virtual_profile_lists_the_counters(fake_vgpu: types.SimpleNamespace) -> None:
    import reference

    fake_vgpu.answer = [launch(3)]
    result = harness.open_device("virtual").profile(reference.ref_kernel, harness.Case(1, 8, 16))
    assert result.passed
    assert result.report.splitlines() == ["launches: 1", "ctas: 3", "tma_bytes_by_tensor.a: 7"]


def test_auto_takes_a_blackwell_gpu_or_else_the_virtual_one(
    fake_vgpu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = [(9, 0), (10, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    assert harness.blackwell_index() == 1
    capabilities.pop()
    assert harness.blackwell_index() is None
    assert isinstance(harness.open_device("auto"), harness.VirtualDevice)


def test_flattened_counters_keep_names_and_ranges() -> None:
    counters = {"a": {"b": 1000, "c": "text"}, "bytes": [3, 1, 2], "per_launch": [{"ctas": 1}, {"ctas": 2}]}
    assert harness.flatten(counters) == [
        ("a.b", "1,000"),
        ("a.c", "text"),
        ("bytes", "1 ... 3 (3 values)"),
        ("per_launch[0].ctas", "1"),
        ("per_launch[1].ctas", "2"),
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("mode", ["benchmark", "leaderboard"])
def test_gpu_benchmark_measures_both_ways(mode: str, submission: Path) -> None:
    target = submission.with_name("result.json")
    options = ("--device", "cuda", "--submission", submission, "--json", target)
    done = run(mode, "--case", "m=128,n=256,k=256", *options)
    report = json.loads(target.read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = report["cases"]
    timing = case["counters"]["timing"]
    assert timing["back_to_back_us"]["runs"] >= harness.MIN_ROUNDS
    assert timing["single_us"]["runs"] == harness.SINGLE_CALLS_PER_ROUND * timing["back_to_back_us"]["runs"]
    assert 0 < timing["back_to_back_us"]["best"] <= case["measured_us"] <= timing["back_to_back_us"]["worst"]
    assert report["geomean_us"] == pytest.approx(case["measured_us"]) and report["geomean_kind"] == "measured"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_gpu_benchmark_checks_the_timed_calls(submission: Path) -> None:
    submission.write_text(faulty("return data[6] if len(calls) == 40 else ref_kernel(data)"))
    target = submission.with_name("result.json")
    done = run("benchmark", "--case", SMALL, "--device", "cuda", "--submission", submission, "--json", target)
    assert done.returncode == 112
    assert "were never written" in json.loads(target.read_text())["cases"][0]["error"]
