# SPDX-License-Identifier: Apache-2.0
"""`python -m bench [NAME …]`: runs the benchmarks and writes what they saw.

Each module `bench/<room>_<what>.py` has `run()`, which returns its figures as a flat dict of name to number and prints
its own table. Figures that matter are ratios within one run; the machine is named beside them. `--json FILE` keeps all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def names() -> list[str]:
    """The benchmarks there are, by module name."""
    return sorted(
        file.stem for file in HERE.glob("*_*.py") if not file.stem.startswith("_") and "def run(" in file.read_text()
    )


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Run semkv's benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; without any, all: {', '.join(names())}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(names()):
        parser.error(f"no benchmark {sorted(unknown)[0]!r}; there are {', '.join(names())}")
    results: dict[str, Any] = {"machine": machine(), "figures": {}}
    print("machine:", ", ".join(f"{key} {value}" for key, value in results["machine"].items()))
    for name in arguments.names or names():
        print(f"\n== {name}", flush=True)
        begin = time.monotonic()
        results["figures"][name] = importlib.import_module(f"bench.{name}").run()
        print(f"   ({time.monotonic() - begin:.0f} s)")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
