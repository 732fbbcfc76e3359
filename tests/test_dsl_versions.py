"""The submission compiles and runs right with the contest's nvidia-cutlass-dsl as well as with the environment's."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OLDEST = "4.3.5"  # of the contest's time
SCRIPT = """
import warnings
warnings.simplefilter("error", DeprecationWarning)
from importlib.metadata import version
import torch
import vgpu
vgpu.install("sm_100a")
import reference
import submission
data = reference.generate_input(129, 136, 1088, 2, 5, "cpu", "distinct")
good, message = reference.check_implementation(data, submission.custom_kernel(data))
assert good, message
import cutlass
print(cutlass.__file__)
print(version("nvidia-cutlass-dsl"), vgpu.last_launch().warnings, len(vgpu.launches()))
"""


def run(path: list[str]) -> tuple[Path, str]:
    """Run the script with these folders first on the module path; returns cutlass' file and what it printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300,
                          cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    file, line = done.stdout.strip().splitlines()[-2:]
    return Path(file), line


def test_with_the_installed_version():
    assert run([])[1] == f"{version('nvidia-cutlass-dsl')} [] 1"


@pytest.mark.versions
def test_with_the_oldest_version(tmp_path):
    """Installed beside the environment's; a path of its own comes first, so that nothing of the newer is imported."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path),
               f"nvidia-cutlass-dsl=={OLDEST}"]
    done = subprocess.run(install, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    packages = tmp_path / "nvidia_cutlass_dsl" / "python_packages"
    assert packages.is_dir()
    file, line = run([str(packages), str(tmp_path)])
    assert file.is_relative_to(packages)
    assert line == f"{OLDEST} [] 1"
