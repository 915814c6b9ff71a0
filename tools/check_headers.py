# SPDX-License-Identifier: Apache-2.0
"""Checks that every tracked source file names its licence in one of its first three lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENDINGS = (".py", ".cpp", ".h", ".sh", ".js", ".mjs", ".css", "Makefile", "CMakeLists.txt", "Dockerfile")
HEADER = "SPDX-License-Identifier: Apache-2.0"


def main() -> int:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    files = [Path(name) for name in listed if name.endswith(ENDINGS) and Path(name).is_file()]
    bare = [file for file in files if HEADER not in "\n".join(file.read_text().splitlines()[:3])]
    for file in bare:
        print(f"{file}: none of the first three lines says {HEADER}", file=sys.stderr)
    return 1 if bare else 0


if __name__ == "__main__":
    sys.exit(main())
