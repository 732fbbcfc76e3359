"""python -m vgpu [options] script.py ARGS: run a program whose CuTeDSL launches happen on the virtual GPU."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from pathlib import Path

import vgpu

from .machine import ORDERS

EXAMPLES = """\
examples:
  python -m vgpu examples/dense_gemm.py --mnkl 256,256,64,1
  python -m vgpu --order random --seed 7 --counters my_kernel.py
"""


def parser() -> argparse.ArgumentParser:
    """The command line: options of the virtual GPU, then the script and its own arguments."""
    p = argparse.ArgumentParser(
        prog="python -m vgpu", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EXAMPLES,
        description="Run a program whose CuTeDSL launches happen on the virtual GPU, with CPU tensors. The program may "
                    "use torch's cuda device: it stands for the CPU.")
    p.add_argument("--arch", default="sm_100a", help="architecture to compile for (default: sm_100a)")
    p.add_argument("--order", default=ORDERS[0], choices=ORDERS, help="in which asynchronous work completes")
    p.add_argument("--seed", type=int, default=0, help="seed of --order random (default: 0)")
    p.add_argument("--exact", action="store_true", help="MMA results bit for bit as on hardware; slower")
    p.add_argument("--counters", action="store_true", help="print the last launch's counters at the end, as JSON")
    p.add_argument("script", help="a Python file")
    p.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="its arguments")
    return p


def print_counters() -> None:
    """The last launch: kernel, grid, counters and warnings."""
    if not vgpu.launches():
        print("no launch happened on the virtual GPU")
        return
    last = vgpu.last_launch()
    print(json.dumps({"launches": len(vgpu.launches()), "kernel": last.kernel, "grid": last.config.grid,
                      "counters": last.counters, "warnings": last.warnings}, indent=2))


def main(argv: list[str] | None = None) -> None:
    """Install the virtual GPU and run the script as __main__."""
    p = parser()
    options = p.parse_args(argv)
    if not Path(options.script).is_file():
        p.error(f"{options.script}: no such file")
    try:
        vgpu.install(options.arch, options.order, options.seed, options.exact, torch_cuda=True)
    except (ValueError, ImportError) as e:
        p.error(str(e))
    sys.argv = [options.script, *options.args]
    sys.path[0] = str(Path(options.script).resolve().parent)
    try:
        runpy.run_path(options.script, run_name="__main__")
    finally:
        if options.counters:
            print_counters()


if __name__ == "__main__":
    main()
