"""Checks and times a submission to the contest's problem nvfp4_gemm, on a Blackwell GPU or on the virtual B200.

For the organisers' machinery (GPU MODE's protocol): ``eval.py MODE FILE`` with MODE test, benchmark, leaderboard or
profile. FILE has a case a line, ``m: 128; n: 256; k: 256; l: 1; seed: 1111``. Lines ``key: value`` are written to the
descriptor that POPCORN_FD names; times in them are nanoseconds; a line break in a value is written as backslash n. The
virtual device measures no times: ``benchmark.N.counters`` (JSON) tells the counted work and the modelled time instead.
POPCORN_SEED, where set, is combined with the seed of each case and never reaches the submission's environment.
Exit status: 0 all passed, 112 a case failed, 113 the case file cannot be read, 111 FILE is given but POPCORN_FD is not
(or is no open descriptor), 2 wrong usage.

For people: ``eval.py MODE`` without FILE runs the contest's cases (or those of --case) and prints a table; see --help.

What is guarded against: each submission runs in a process of its own, started without the descriptor and the seed;
every call gets inputs of its own with their own seed, and a C filled with NaN between guard bytes; every output is
checked, the timed ones too, and so are the guard bytes and that the inputs are unchanged; CuTeDSL's file cache is off;
on a GPU the L2 is flushed before each timed section.

torch and rich are imported inside the functions that use them, so that of the two processes only the submission's waits
for torch and only the other for rich.
"""

import argparse
import base64
import importlib.machinery
import importlib.util
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import modelled

os.environ["CUTE_DSL_DISABLE_FILE_CACHING"] = "1"  # before CuTeDSL is imported, here or in the submission's process

HERE = Path(__file__).resolve().parent
MODES = ("test", "benchmark", "leaderboard", "profile")
EXIT_PASS, EXIT_USAGE, EXIT_NO_DESCRIPTOR, EXIT_FAILED_CASE, EXIT_BAD_CASE_FILE = 0, 2, 111, 112, 113
SIZE_NAMES = ("m", "n", "k", "l")

CALLS_PER_ROUND = 50  # back-to-back calls between two events, as the organisers' harness makes them
SINGLE_CALLS_PER_ROUND = 10
MIN_ROUNDS, MAX_ROUNDS = 3, 200
ROUND_SECONDS = {"benchmark": 10.0, "leaderboard": 30.0}  # no new round is begun after this long
ENOUGH_RELATIVE_ERROR = 0.001
FLUSH_BUFFER_BYTES = 4 << 30
FLUSHES_BEFORE_ROUND = 8  # 32 GB written, as by the organisers
SMALL_PROBLEM = 1 << 30  # multiply-adds up to which a CPU device makes two calls instead of one
GUARD_ROWS = 128  # rows of C that the guards before and after it can hold: a whole tile stored outside shows
GUARD_PATTERN, POISON_PATTERN = 0x5A5A, 0x7EAD  # 16-bit; the poison is an fp16 NaN
INPUT_NAMES = ("a", "b", "sfa_ref", "sfb_ref", "sfa_permuted", "sfb_permuted")

EXAMPLES = """\
examples:
  python eval.py test                                   the contest's ten cases
  python eval.py test --case m=128,n=256,k=256          one case (l=1 and seed=1111 unless given)
  python eval.py benchmark --device virtual             counted work and modelled times of the benchmark cases
  python eval.py benchmark --submission a.py --submission b.py --json result.json
  python eval.py profile --case m=128,n=256,k=256       modelled breakdown, trace, picture; torch's profile on a GPU
  POPCORN_FD=1 python eval.py test cases.txt            the organisers' protocol, written to standard output

exit status:
  0 all cases passed, 112 a case failed, 113 unreadable case file, 111 FILE without POPCORN_FD, 2 wrong usage
"""


class CaseFileError(Exception):
    """A case file that cannot be opened or understood."""


class DeviceError(RuntimeError):
    """The chosen device does not exist here."""


@dataclass(frozen=True)
class Case:
    """One problem. ``seed`` is what the input is made from, ``public_seed`` what is shown."""

    m: int
    n: int
    k: int
    l: int = 1  # noqa: E741
    seed: int = 1111
    public_seed: int = 1111
    spec: str = ""

    @classmethod
    def from_values(cls, values: dict[str, int], spec: str = "") -> "Case":
        spec = spec or "; ".join(f"{name}: {value}" for name, value in values.items())
        return cls(**values, public_seed=values["seed"], spec=spec)

    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in SIZE_NAMES}

    def label(self) -> str:
        return "x".join(str(size) for size in (self.m, self.n, self.k)) + (f" l={self.l}" if self.l != 1 else "")


@dataclass
class Stats:
    """Durations of several runs, all in the unit of the durations given."""

    runs: int
    mean: float
    median: float
    std: float
    err: float
    best: float
    worst: float

    @classmethod
    def of(cls, durations: list[float]) -> "Stats":
        std = statistics.stdev(durations) if len(durations) > 1 else 0.0
        return cls(
            runs=len(durations),
            mean=statistics.fmean(durations),
            median=statistics.median(durations),
            std=std,
            err=std / math.sqrt(len(durations)),
            best=min(durations),
            worst=max(durations),
        )


@dataclass
class CaseResult:
    """What became of one case.

    ``wall_s`` is the wall-clock time of the whole case: making inputs, all calls (the first compiles), all checks.
    ``measured_us`` is the mean time of a call among 50 back to back, on a GPU only; ``counters["timing"]`` says more.
    ``needs_new_process`` tells that the GPU may refuse further work of this process.
    """

    error: str | None = None
    message: str = ""
    wall_s: float = 0.0
    counters: dict[str, Any] = field(default_factory=dict)
    measured_us: float | None = None
    modelled_us: float | None = None
    report: str = ""
    needs_new_process: bool = False

    @property
    def passed(self) -> bool:
        return self.error is None


@dataclass
class Report:
    """All cases of one submission on one device; ``as_json`` is what --json writes."""

    device: str
    submission: str
    mode: str
    cases: list[tuple[Case, CaseResult]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(result.passed for _, result in self.cases)

    def geomean(self) -> tuple[float | None, str | None]:
        """Geometric mean of the cases' times in us, and its kind; (None, None) unless all passed and have a time."""
        if self.cases and self.passed:
            for kind in ("measured", "modelled"):
                times = [getattr(result, f"{kind}_us") for _, result in self.cases]
                if None not in times:
                    return statistics.geometric_mean(times), kind
        return None, None

    def as_json(self) -> dict[str, Any]:
        geomean, kind = self.geomean()
        cases = [
            {
                **case.sizes(),
                "seed": case.public_seed,
                "passed": result.passed,
                "error": result.error,
                "wall_s": result.wall_s,
                "counters": result.counters,
                "measured_us": result.measured_us,
                "modelled_us": result.modelled_us,
            }
            for case, result in self.cases
        ]
        head = {"device": self.device, "submission": self.submission, "mode": self.mode}
        return {**head, "cases": cases, "geomean_us": geomean, "geomean_kind": kind}


# ---- cases ----------------------------------------------------------------------------------------------------------


def combine_seeds(public: int, secret: int) -> int:
    """One seed from two: Cantor's pairing, as the organisers do it, modulo 2^63, which is what torch can take."""
    total = public + secret
    return (total * (total + 1) // 2 + public) % 2**63


def repeat_seed(seed: int, repeat: int) -> int:
    """The seed of the ``repeat``-th call of a case (0 is the case's own); the organisers step by 42 as well."""
    return seed + 42 * repeat


def parse_case_line(line: str) -> Case:
    """``m: 128; n: 256; k: 256; l: 1; seed: 1111`` in any order; raises ValueError saying what is wrong."""
    return Case.from_values(_parse_values(line, ";", ":", required=(*SIZE_NAMES, "seed")), spec=line.strip())


def parse_case_option(text: str) -> Case:
    """``m=128,n=256,k=256[,l=1][,seed=1111]`` in any order; raises ArgumentTypeError saying what is wrong."""
    try:
        values = _parse_values(text, ",", "=", required=("m", "n", "k"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Case.from_values({"l": 1, "seed": 1111} | values)


def _parse_values(text: str, separator: str, equals: str, required: Iterable[str]) -> dict[str, int]:
    values: dict[str, int] = {}
    for part in text.split(separator):
        match = re.fullmatch(rf"\s*([a-z]+)\s*{equals}\s*([+-]?[0-9]+)\s*", part)
        if match is None:
            example = "m: 128" if equals == ":" else "m=128"
            raise ValueError(f"{part.strip()!r} in {text.strip()!r} is not of the form {example}")
        name = match[1]
        if name not in (*SIZE_NAMES, "seed") or name in values:
            raise ValueError(f"{name!r} in {text.strip()!r} is {'given twice' if name in values else 'not known'}")
        values[name] = int(match[2])
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"{text.strip()!r} lacks {', '.join(missing)}")
    return values


def read_case_file(path: str) -> list[Case]:
    """The cases of a file, lines of white space passed over. Raises CaseFileError, also when there is no case."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        cases = [parse_case_line(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise CaseFileError(f"case file {path}: {error}") from error
    if not cases:
        raise CaseFileError(f"case file {path}: no case in it")
    return cases


def default_cases(mode: str) -> list[Case]:
    """The contest's ten test cases for mode test, its three benchmark cases for the others."""
    import task

    return [Case.from_values(dict(spec)) for spec in (task.TEST_CASES if mode == "test" else task.BENCHMARK_CASES)]


# ---- one call's input and its check (in the submission's process from here on) --------------------------------------


@dataclass
class Problem:
    """What one call gets, with what is needed to check it afterwards.

    ``data``: the seven tensors of the call; its C is a window of ``buffer`` (int16), of which ``guard`` elements lie
    before C and as many after it. ``pristine``: copies of the six inputs.
    """

    data: tuple
    pristine: tuple
    buffer: Any
    guard: int

    def poison(self) -> None:
        """Fills C with NaN and its surroundings with the guard pattern."""
        self.buffer.fill_(GUARD_PATTERN)
        self.buffer[self.guard : -self.guard].fill_(POISON_PATTERN)

    def check(self, output: object) -> tuple[bool, str]:
        """Whether the call was right in every respect, and a message: all that was wrong, or the largest error."""
        import reference

        good, message = reference.check_implementation((*self.pristine, self.data[-1]), output)
        faults = [] if good else [message]
        unwritten = int((self.buffer[self.guard : -self.guard] == POISON_PATTERN).sum())
        if not good and unwritten:
            faults.append(f"{unwritten} elements of c were never written")
        changed = [n for n, now, was in zip(INPUT_NAMES, self.data, self.pristine, strict=False) if not _same(now, was)]
        if changed:
            faults.append(f"the submission changed its input {', '.join(changed)}")
        if bool((self.buffer[: self.guard] != GUARD_PATTERN).any()):
            faults.append("memory before c was written")
        if bool((self.buffer[-self.guard :] != GUARD_PATTERN).any()):
            faults.append("memory after c was written")
        return not faults, "\n".join(faults) or message


def _same(left: Any, right: Any) -> bool:
    import torch

    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def make_problem(case: Case, repeat: int, device: Any) -> Problem:
    """A fresh input for the ``repeat``-th call of ``case`` with C poisoned."""
    import torch

    import reference

    *inputs, c = reference.generate_input(**case.sizes(), seed=repeat_seed(case.seed, repeat), device=device)
    guard = GUARD_ROWS * case.n  # a multiple of 256 bytes, so C keeps the alignment that torch gives the buffer
    buffer = torch.empty(c.numel() + 2 * guard, dtype=torch.int16, device=device)
    window = buffer[guard:-guard].view(torch.float16).view(case.l, case.m, case.n).permute(1, 2, 0)
    problem = Problem((*inputs, window), tuple(tensor.clone() for tensor in inputs), buffer, guard)
    problem.poison()
    return problem


# ---- devices --------------------------------------------------------------------------------------------------------


class CpuDevice:
    """Runs a submission that is plain torch; for trying this program, and the base of the virtual device."""

    def __init__(self) -> None:
        self.torch_device: Any = "cpu"
        self.name = "cpu"

    def prepare(self) -> None:
        """What must happen before the submission is imported."""

    def call(self, kernel: Callable, problem: Problem) -> Any:
        """One complete call."""
        return kernel(problem.data)

    def counters(self) -> dict[str, Any]:
        """Work of the last call as JSON-ready values."""
        return {}

    def calls(self, case: Case) -> int:
        """How many calls a case is given unless --repeats says otherwise: a second finds state left by the first."""
        return 2 if case.m * case.n * case.k * case.l <= SMALL_PROBLEM else 1

    def test(self, kernel: Callable, case: Case, calls: int) -> CaseResult:
        """Calls on fresh inputs, each checked; stops at the first that is wrong."""
        result = CaseResult()
        for repeat in range(calls):
            problem = make_problem(case, repeat, self.torch_device)
            output = self.call(kernel, problem)
            result.counters = self.counters()
            good, result.message = problem.check(output)
            if not good:
                result.error = result.message
                break
        return result

    def benchmark(self, kernel: Callable, case: Case, calls: int, seconds: float) -> CaseResult:
        """As test: there is no GPU whose time could be taken."""
        return self.test(kernel, case, calls)

    def profile(self, kernel: Callable, case: Case) -> CaseResult:
        """One checked call under torch's profiler, CPU activity only."""
        return profile_with_torch(self, kernel, case, ["CPU"])


class VirtualDevice(CpuDevice):
    """The virtual B200: CuTeDSL's launches run on CPU tensors and their work is counted."""

    def __init__(self) -> None:
        super().__init__()
        try:
            import vgpu
        except ModuleNotFoundError as error:
            raise DeviceError(f"the virtual B200 needs the package vgpu beside eval.py: {error}") from error
        self.vgpu = vgpu
        self.host_us: float | None = None  # measured before, in a process of its own
        self.name = "virtual B200 (sm_100a, on the CPU)"

    def prepare(self) -> None:
        self.vgpu.install(arch="sm_100a")

    def call(self, kernel: Callable, problem: Problem) -> Any:
        self.vgpu.reset()
        return kernel(problem.data)

    def counters(self) -> dict[str, Any]:
        """``launches``, and the counters of the only launch, or of each in ``per_launch``; ``warnings`` if any."""
        launches = self.vgpu.launches()
        counted = [dict(launch.counters) for launch in launches]
        counters: dict[str, Any] = {"launches": len(launches)}
        counters.update(counted[0] if len(counted) == 1 else {"per_launch": counted})
        warnings = [text for launch in launches for text in launch.warnings]
        return counters | ({"warnings": warnings} if warnings else {})

    def benchmark(self, kernel: Callable, case: Case, calls: int, seconds: float) -> CaseResult:
        """As test, and the modelled time of a call in ``counters["model"]``."""
        return self.model(kernel, case, calls)[0]

    def profile(self, kernel: Callable, case: Case) -> CaseResult:
        """One checked call; the report is the model's breakdown, a trace and a picture are written."""
        result, simulation = self.model(kernel, case, 1)
        result.report = "\n".join(f"{name}: {value}" for name, value in flatten(result.counters))
        if simulation is not None:
            stem = Path(f"profile-{case.label().replace(' ', '-')}")
            files = modelled.write_pictures(simulation, stem, case.label())
            result.report = "\n".join([modelled.describe(result.counters["model"]), *(f"wrote {f}" for f in files)])
        return result

    def model(self, kernel: Callable, case: Case, calls: int) -> tuple[CaseResult, Any]:
        """The test's result with the model's, and the simulated launches (None where nothing was launched or
        recorded)."""
        device = self.vgpu.device()
        device.recording = True
        try:
            result = self.test(kernel, case, calls)
        finally:
            device.recording = False
        launches = self.vgpu.launches()
        if not result.passed or not launches or any(launch.recording is None for launch in launches):
            return result, None
        result.counters["model"], simulation = modelled.model_call(launches, self.host_us)
        result.modelled_us = result.counters["model"]["call_us"]
        return result, simulation


class NullLaunchDevice(VirtualDevice):
    """Launches do nothing: what a call costs the host, in ``counters["host_us"]``."""

    def prepare(self) -> None:
        self.vgpu.install(arch="sm_100a", null_launch=True)

    def benchmark(self, kernel: Callable, case: Case, calls: int, seconds: float) -> CaseResult:
        small = replace(case, m=min(case.m, 128), n=min(case.n, 256), k=min(case.k, 256), l=1)
        data = make_problem(small, 0, self.torch_device).data
        return CaseResult(counters={"host_us": modelled.host_us(kernel, data)})


class CudaDevice(CpuDevice):
    """A real GPU, timed with CUDA events."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        if not torch.cuda.is_available():
            raise DeviceError("torch finds no CUDA GPU here")
        index = blackwell_index()
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        torch.cuda.set_device(self.torch_device)
        major, minor = torch.cuda.get_device_capability(self.torch_device)
        self.name = f"{torch.cuda.get_device_name(self.torch_device)} (sm_{major}{minor})"

    def call(self, kernel: Callable, problem: Problem) -> Any:
        import torch

        output = kernel(problem.data)
        torch.cuda.synchronize()
        return output

    def calls(self, case: Case) -> int:
        return 2

    def benchmark(self, kernel: Callable, case: Case, calls: int, seconds: float) -> CaseResult:
        """Rounds of 50 calls back to back and 10 single ones, on inputs that are new in every round; all are checked.

        One call before them compiles. Rounds end when the mean's relative error is below 0.1 %, after ``seconds`` or
        200 rounds, but not before 3 rounds.
        """
        import torch

        result = self.test(kernel, case, 1)
        flush = torch.empty(FLUSH_BUFFER_BYTES, dtype=torch.int8, device=self.torch_device)
        back_to_back: list[float] = []
        single: list[float] = []
        groups = [(CALLS_PER_ROUND, FLUSHES_BEFORE_ROUND, back_to_back)] + [(1, 1, single)] * SINGLE_CALLS_PER_ROUND
        begin, repeat = time.perf_counter(), 1
        while result.passed and not _enough(back_to_back, time.perf_counter() - begin, seconds):
            for count, flushes, durations in groups:
                repeats = range(repeat, repeat + count)
                duration, fault = self._timed_group(kernel, case, repeats, [flush] * flushes)
                durations.append(duration)
                result.error = result.error or fault
                repeat += count
        if result.passed:
            timing = {"back_to_back_us": Stats.of(back_to_back), "single_us": Stats.of(single)}
            result.measured_us = timing["back_to_back_us"].mean
            result.counters = {"timing": {name: asdict(stats) for name, stats in timing.items()}}
        return result

    def _timed_group(
        self, kernel: Callable, case: Case, repeats: range, flushed: list[Any]
    ) -> tuple[float, str | None]:
        """Time of a call in us among calls on fresh inputs after writing all of ``flushed``, and the first fault."""
        problems = [make_problem(case, repeat, self.torch_device) for repeat in repeats]
        duration, outputs = timed_calls(kernel, problems, flushed)
        verdicts = [problem.check(output) for problem, output in zip(problems, outputs, strict=True)]
        return duration, next((message for good, message in verdicts if not good), None)

    def profile(self, kernel: Callable, case: Case) -> CaseResult:
        self.test(kernel, case, 1)  # compiles, so that the profile shows a call and not the compiler
        return profile_with_torch(self, kernel, case, ["CPU", "CUDA"])


def _enough(durations: list[float], elapsed: float, seconds: float) -> bool:
    if len(durations) < MIN_ROUNDS:
        return False
    stats = Stats.of(durations)
    return len(durations) >= MAX_ROUNDS or elapsed > seconds or stats.err < ENOUGH_RELATIVE_ERROR * stats.mean


def timed_calls(kernel: Callable, problems: list[Problem], flushed: list[Any]) -> tuple[float, list[Any]]:
    """Time of a call in us, by two CUDA events around all of them, and the outputs.

    Nothing waits between the flush and the calls: as in the contest, they are queued while the GPU still flushes.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    inputs = [problem.data for problem in problems]
    torch.cuda.synchronize()
    for buffer in flushed:
        buffer.fill_(1)
    start.record()
    outputs = [kernel(data) for data in inputs]
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / len(problems), outputs


def profile_with_torch(device: CpuDevice, kernel: Callable, case: Case, activities: list[str]) -> CaseResult:
    """One checked call under torch's profiler; the report is its table."""
    from torch.profiler import ProfilerActivity, profile

    problem = make_problem(case, 1, device.torch_device)
    with profile(activities=[getattr(ProfilerActivity, name) for name in activities]) as profiler:
        output = device.call(kernel, problem)
    good, message = problem.check(output)
    order = f"self_{'cuda' if 'CUDA' in activities else 'cpu'}_time_total"
    report = profiler.key_averages().table(sort_by=order, row_limit=20)
    return CaseResult(error=None if good else message, message=message, report=report)


def blackwell_index() -> int | None:
    """Index of the first GPU of compute capability 10.x, or None."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return next((i for i in range(count) if torch.cuda.get_device_capability(i)[0] == 10), None)


def open_device(choice: str) -> CpuDevice:
    """The device for ``auto``, ``cuda``, ``virtual``, ``null`` or ``cpu``; raises DeviceError where there is none."""
    if choice == "auto":
        device = CudaDevice() if blackwell_index() is not None else VirtualDevice()
    else:
        kinds = {"cuda": CudaDevice, "virtual": VirtualDevice, "null": NullLaunchDevice, "cpu": CpuDevice}
        device = kinds[choice]()
    device.prepare()
    return device


# ---- the submission's process ---------------------------------------------------------------------------------------


class Worker:
    """What the submission's process keeps between cases: the device, and the submission once it has been imported."""

    current: "Worker | None" = None

    def __init__(self, choice: str) -> None:
        sys.path.insert(0, str(HERE))
        import reference  # noqa: F401 (task and reference are found beside this file, not beside the submission)

        self.device = open_device(choice)
        self.kernel: Callable | None = None

    @classmethod
    def get(cls, choice: str) -> "Worker":
        if cls.current is None:
            cls.current = cls(choice)
        return cls.current

    def load(self, path: str) -> Callable:
        """``custom_kernel`` of the submission at ``path``, whose folder becomes the first on sys.path."""
        if self.kernel is None:
            sys.path.insert(0, str(Path(path).resolve().parent))
            loader = importlib.machinery.SourceFileLoader("submission", path)
            spec = importlib.util.spec_from_file_location("submission", path, loader=loader)
            module = importlib.util.module_from_spec(spec)
            sys.modules["submission"] = module
            loader.exec_module(module)
            if not callable(getattr(module, "custom_kernel", None)):
                raise AttributeError(f"{path} has no attribute 'custom_kernel' that can be called")
            self.kernel = module.custom_kernel
        return self.kernel

    def run(self, path: str, mode: str, case: Case, repeats: int | None) -> CaseResult:
        kernel = self.load(path)
        calls = repeats or self.device.calls(case)
        if mode == "test":
            return self.device.test(kernel, case, calls)
        if mode == "profile":
            return self.device.profile(kernel, case)
        return self.device.benchmark(kernel, case, calls, ROUND_SECONDS[mode])


def describe_device(choice: str) -> str:
    """The device's name, or why there is none; opens it."""
    try:
        return Worker.get(choice).device.name
    except Exception as error:
        return f"none: {error}"


def run_case(
    choice: str, path: str, mode: str, case: Case, repeats: int | None, host_us: float | None = None
) -> CaseResult:
    """One case; whatever the submission raises makes it a failed one, with the traceback on standard error."""
    begin = time.perf_counter()
    try:
        worker = Worker.get(choice)
        worker.device.host_us = host_us
        result = worker.run(path, mode, case, repeats)
    except BaseException as error:  # whatever a submission raises, KeyboardInterrupt as well, is a failed case
        if not isinstance(error, DeviceError):
            traceback.print_exception(error)
        result = CaseResult(error=describe_error(error, path))
        result.needs_new_process = Worker.current is not None and isinstance(Worker.current.device, CudaDevice)
    result.wall_s = time.perf_counter() - begin
    return result


def describe_error(error: BaseException, path: str) -> str:
    """``Type: text``, and the line of the submission where it arose, if it did."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    where = f" ({Path(path).name}, line {lines[-1]})" if lines else ""
    try:
        text = str(error)
    except Exception:
        text = "(the exception cannot be printed)"
    return f"{type(error).__name__}: {text}{where}"


class SubmissionProcess:
    """The parent's handle of the process in which one submission runs; a process that dies is replaced by a new one."""

    def __init__(self, choice: str, path: str) -> None:
        self.choice, self.path = choice, path
        self.start()

    def start(self) -> None:
        self.pool = ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)

    def device_name(self) -> str:
        return self.pool.submit(describe_device, self.choice).result()

    def run(self, mode: str, case: Case, repeats: int | None, host_us: float | None = None) -> CaseResult:
        try:
            result = self.pool.submit(run_case, self.choice, self.path, mode, case, repeats, host_us).result()
        except BrokenProcessPool:
            result = CaseResult(error="the submission's process ended before it answered", needs_new_process=True)
        if result.needs_new_process:
            self.close()
            self.start()
        return result


# ---- what is written ------------------------------------------------------------------------------------------------


class PopcornLog:
    """The organisers' protocol: lines ``key: value`` on a descriptor. Raises OSError if it is not open.

    A duplicate is written to, which no submission inherits; the descriptor itself is closed unless a standard one.
    """

    def __init__(self, descriptor: int) -> None:
        self.file = os.fdopen(os.dup(descriptor), "w", encoding="utf-8")
        if descriptor > 2:
            os.close(descriptor)

    def log(self, key: str, value: object) -> None:
        text = str(value).replace("\n", "\\n")
        print(f"{key}: {text}", file=self.file, flush=True)

    def begin(self, report: Report, count: int) -> None:
        self.prefix = "test" if report.mode == "test" else "benchmark"
        self.log(f"{self.prefix}-count", count)

    def case_begins(self, index: int, case: Case) -> None:
        self.log(f"{self.prefix}.{index}.spec", case.spec)

    def case_ends(self, index: int, case: Case, result: CaseResult) -> None:
        key = f"{self.prefix}.{index}"
        timing = result.counters.get("timing")
        if timing:
            for name in ("runs", "mean", "std", "err", "best", "worst"):
                value = timing["back_to_back_us"][name]
                self.log(f"{key}.{name}", value if name == "runs" else value * 1e3)
        elif result.counters and self.prefix == "benchmark":
            self.log(f"{key}.counters", json.dumps(result.counters))
        if result.report:
            self.log(f"{key}.report", base64.b64encode(result.report.encode(), b"+*").decode())
        self.log(f"{key}.status", "pass" if result.passed else "fail")
        if result.error is not None:
            self.log(f"{key}.error", result.error)
        else:
            warnings = [f"warning: {text}" for text in result.counters.get("warnings", [])]
            self.log(f"{key}.message", "\n".join([result.message, *warnings]))

    def end(self, report: Report) -> None:
        self.log("check", "pass" if report.passed else "fail")


class Screen:
    """For people: the device, a progress bar on a terminal, then tables and what went wrong."""

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)

    def begin(self, report: Report, count: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console.print(f"{report.submission} on {report.device}")
        terminal = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal)
        self.progress.start()
        self.bar = self.progress.add_task(report.mode, total=count)

    def case_begins(self, index: int, case: Case) -> None:
        self.progress.update(self.bar, description=case.label())

    def case_ends(self, index: int, case: Case, result: CaseResult) -> None:
        self.progress.advance(self.bar)

    def end(self, report: Report) -> None:
        self.progress.stop()
        self.console.print(results_table(report))
        if report.mode != "test" and any("launches" in result.counters for _, result in report.cases):
            self.console.print(counters_table(report))
        for case, result in report.cases:
            if result.report:
                self.console.print(f"\n{case.label()}\n{result.report}", soft_wrap=True)
            for text in result.counters.get("warnings", []):
                self.console.print(f"{case.label()}: warning: {text}", soft_wrap=True)
            if result.error is not None:
                self.console.print(f"{case.label()}: {result.error}", soft_wrap=True)
        geomean, kind = report.geomean()
        if geomean is not None:
            self.console.print(f"geometric mean {geomean:.3f} us ({kind})")
        for _, result in report.cases[:1]:
            if kind == "modelled":
                error = result.counters["model"]["error"]
                self.console.print(f"modelled times have an error of {100 * error['median']:.0f} % on the median, "
                                   f"{100 * error['worst']:.0f} % at worst (python -m vgpu.validate)")
        passed = sum(result.passed for _, result in report.cases)
        self.console.print(f"{passed} of {len(report.cases)} cases passed")

    def compare(self, reports: list[Report]) -> None:
        self.console.print(comparison_table(reports))


def comparison_table(reports: list[Report]) -> Any:
    """A row for each case, a column for each submission's time, and its ratio to the first one's."""
    from rich.table import Table

    table = Table("case", title="us a call")
    for report in reports:
        kind = report.geomean()[1] or "no time"
        table.add_column(f"{report.submission} ({kind})", justify="right")
        if report is not reports[0]:
            table.add_column("ratio", justify="right")
    times = [[r.measured_us or r.modelled_us for _, r in report.cases] for report in reports]
    labels = [case.label() for case, _ in reports[0].cases] + ["geometric mean"]
    for row, label in enumerate(labels):
        cells = []
        for report, column in zip(reports, times, strict=True):
            value = report.geomean()[0] if row == len(column) else column[row]
            first = reports[0].geomean()[0] if row == len(column) else times[0][row]
            cells.append("-" if value is None else f"{value:.2f}")
            if report is not reports[0]:
                cells.append("-" if value is None or first is None else f"{value / first:.2f}")
        table.add_row(label, *cells)
    return table


def results_table(report: Report) -> Any:
    """A row for each case: sizes, verdict, wall time, and on a GPU both timings as ``median [best, worst]``."""
    from rich.table import Table

    timed = any("timing" in result.counters for _, result in report.cases)
    modelled_times = any(result.modelled_us is not None for _, result in report.cases)
    timing_heads = ("50 back to back, us a call", "one call, L2 flushed, us") if timed else ()
    if modelled_times:
        timing_heads = ("modelled us", "host us (measured)", "bound by")
    table = Table()
    for head in (*SIZE_NAMES, "seed", "result", "wall s", *timing_heads):
        table.add_column(head, justify="left" if head == "result" else "right")
    for case, result in report.cases:
        row = [*case.sizes().values(), case.public_seed, "pass" if result.passed else "FAIL", f"{result.wall_s:.2f}"]
        for stats in result.counters.get("timing", {}).values():
            row.append(f"{stats['median']:.2f} [{stats['best']:.2f}, {stats['worst']:.2f}]")
        if model := result.counters.get("model"):
            host = model["floors_us"].get("host")
            row += [f"{model['call_us']:.2f}", "-" if host is None else f"{host:.2f}", model["bound"]]
        table.add_row(*map(str, row))
    return table


def counters_table(report: Report) -> Any:
    """A row for each counter, a column for each case; warnings and the model's figures are shown elsewhere."""
    from rich.table import Table

    columns = [dict(flatten(result.counters)) for _, result in report.cases]
    table = Table("counted work")
    for case, _ in report.cases:
        table.add_column(case.label(), justify="right")
    names = dict.fromkeys(name for column in columns for name in column)
    for name in names:
        if not name.startswith(("warnings", "model.")):
            table.add_row(name, *(str(column.get(name, "")) for column in columns))
    return table


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """(dotted name, text) of each number or text in nested counters; a list of numbers becomes its range."""
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flatten(item, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list) and value and all(isinstance(item, int | float) for item in value):
        return [(name, f"{_number(min(value))} ... {_number(max(value))} ({len(value)} values)")]
    if isinstance(value, list):
        return [pair for index, item in enumerate(value) for pair in flatten(item, f"{name}[{index}]")]
    return [(name, _number(value))]


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


# ---- command line ---------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Reads the command line; ends the process with status 2 when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="eval.py",
        description="Checks and times a submission to nvfp4_gemm on a Blackwell GPU or on the virtual B200.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=MODES, metavar="MODE", help=", ".join(MODES))
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="case file of the organisers' protocol (needs POPCORN_FD)"
    )
    parser.add_argument(
        "--case", action="append", type=parse_case_option, metavar="m=,n=,k=[,l=][,seed=]", help="a case; repeatable"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "virtual", "cpu"),
        default="auto",
        help="auto: a Blackwell GPU if there is one, otherwise the virtual B200; cpu: a submission in plain torch",
    )
    parser.add_argument(
        "--submission", action="append", metavar="PATH", help="default: submission.py beside eval.py; repeatable"
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there as JSON")
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        help="calls of each case, each with a fresh input (default: 2, on a CPU 1 where m*n*k*l > 2^30; "
        "benchmark and leaderboard on a GPU go on until the mean is steady)",
    )
    options = parser.parse_args(arguments)
    options.submission = options.submission or [str(HERE / "submission.py")]
    _refuse_bad_combinations(parser, options)
    return options


def _refuse_bad_combinations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.file and options.case:
        parser.error("FILE and --case exclude each other")
    if options.file and len(options.submission) > 1:
        parser.error("the protocol with FILE takes one submission")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: at least 1 is needed")
    if options.json and not Path(options.json).absolute().parent.is_dir():
        parser.error(f"--json {options.json}: no such folder")
    if options.json and Path(options.json).is_dir():
        parser.error(f"--json {options.json}: is a folder; a file's name is needed")
    for case in options.case or ():
        if case.k % 16 or min(case.m, case.n, case.k, case.l) < 1:
            parser.error(f"--case {case.label()}: m, n, l must be at least 1, k a positive multiple of 16")
    for path in options.submission:
        if not Path(path).is_file():
            parser.error(f"--submission {path}: no such file")


def take_environment() -> tuple[str | None, str | None]:
    """POPCORN_FD and POPCORN_SEED, removed from the environment so that no submission can read them."""
    return os.environ.pop("POPCORN_FD", None) or None, os.environ.pop("POPCORN_SEED", None) or None


def measure_host_us(device: str, path: str, case: Case) -> float | None:
    """Measured host time of a call, where times are modelled; None elsewhere, or where it could not be taken."""
    if not device.startswith("virtual"):
        return None
    process = SubmissionProcess("null", str(Path(path).resolve()))
    try:
        return process.run("benchmark", case, 1).counters.get("host_us")
    finally:
        process.close()


def evaluate(options: argparse.Namespace, path: str, cases: list[Case], listener: PopcornLog | Screen) -> Report:
    """Runs all cases on one submission and tells the listener as it goes."""
    process = SubmissionProcess(options.device, str(Path(path).resolve()))
    try:
        report = Report(process.device_name(), path, options.mode)
        listener.begin(report, len(cases))
        host = measure_host_us(report.device, path, cases[0]) if options.mode != "test" else None
        for index, case in enumerate(cases):
            listener.case_begins(index, case)
            result = process.run(options.mode, case, options.repeats, host)
            report.cases.append((case, result))
            listener.case_ends(index, case, result)
        listener.end(report)
    finally:
        process.close()
    return report


def choose_cases(options: argparse.Namespace, secret: int | None) -> list[Case]:
    """The cases of the file, of --case, or the contest's, with the secret seed combined in; may raise CaseFileError."""
    cases = read_case_file(options.file) if options.file else options.case or default_cases(options.mode)
    if secret is None:
        return cases
    return [replace(case, seed=combine_seeds(case.seed, secret)) for case in cases]


def open_listener(options: argparse.Namespace, descriptor: str | None) -> PopcornLog | Screen:
    """Where the results go. Raises OSError, ValueError or OverflowError if FILE is given without an open descriptor."""
    if not options.file:
        return Screen()
    if descriptor is None:
        raise ValueError("not set; it names the descriptor that results are written to (1 is standard output)")
    return PopcornLog(int(descriptor))


def main(arguments: list[str]) -> int:
    """Runs the command line and returns the exit status."""
    descriptor, secret = take_environment()
    options = parse_arguments(arguments)
    if descriptor and not options.file:
        print("eval.py: with POPCORN_FD the case file FILE is needed", file=sys.stderr)
        return EXIT_USAGE
    if secret is not None and not secret.isdecimal():
        print("eval.py: POPCORN_SEED is not a non-negative integer", file=sys.stderr)
        return EXIT_USAGE
    try:
        listener = open_listener(options, descriptor)
    except (OSError, ValueError, OverflowError) as error:
        print(f"eval.py: POPCORN_FD: {error}. Without FILE, eval.py needs no POPCORN_FD; see --help.", file=sys.stderr)
        return EXIT_NO_DESCRIPTOR
    try:
        cases = choose_cases(options, int(secret) if secret else None)
    except CaseFileError as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return EXIT_BAD_CASE_FILE
    reports = [evaluate(options, path, cases, listener) for path in options.submission]
    if len(reports) > 1:
        listener.compare(reports)
    if options.json:
        documents = [report.as_json() for report in reports]
        text = json.dumps(documents if len(documents) > 1 else documents[0], indent=2)
        Path(options.json).write_text(text + "\n", encoding="utf-8")
    return EXIT_PASS if all(report.passed for report in reports) else EXIT_FAILED_CASE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
