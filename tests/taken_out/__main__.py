# SPDX-License-Identifier: Apache-2.0
"""`make test-taken-out`: the end-to-end tests once for each part, without it. Ends with 1 if they pass all the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

from rich.console import Console

PARTS = ("hooks", "subscriber", "registration")
SUITE = "tests/end_to_end/test_main_job.py"


def main() -> int:
    console = Console()
    unnoticed = []
    for part in PARTS:
        begin = time.monotonic()
        console.print(f"{SUITE} without the {part} …")
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--no-header", "-rf", SUITE],
            env={**os.environ, "SEMKV_TAKEN_OUT": part},
            capture_output=True,
            text=True,
            check=False,
        )
        failed = re.findall(r"^FAILED \S+::(\S+)", run.stdout, re.MULTILINE)
        for name in failed:
            console.print(f"  fails, as it should: {name}", highlight=False)
        console.print(f"  {run.stdout.strip().splitlines()[-1]} ({time.monotonic() - begin:.0f} s)", highlight=False)
        # 1 is pytest's "tests failed": an engine that does not even start proves nothing.
        if run.returncode != 1 or not failed:
            console.print(run.stdout[-4000:], markup=False, highlight=False)
            unnoticed.append(part)
    if unnoticed:
        console.print(f"[bold red]not noticed: {', '.join(unnoticed)}[/]")
        return 1
    console.print(f"the end-to-end tests notice that each is missing: {', '.join(PARTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
