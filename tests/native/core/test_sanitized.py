# SPDX-License-Identifier: Apache-2.0
"""The C++ core under Address-, UndefinedBehavior- and ThreadSanitizer; its fence."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[2] / "native" / "core"
WIDE = platform.machine() in ("x86_64", "AMD64")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_no_byte_too_far_and_no_race(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "sanitized"
    flags = ["-std=c++20", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    flags += ["-Wall", "-Wextra", "-Werror", f"-I{CORE}"]
    # As in the project's build, one file is compiled for AVX-512 and called only where the CPU has it.
    objects = []
    for name in ("block_copier", "row_copier", "row_copy", "row_copy_avx512"):
        if name == "row_copy_avx512" and not WIDE:
            continue
        extra = ["-mavx512f"] if name == "row_copy_avx512" else ["-DSEMKV_HAVE_AVX512_FILE=1"] if WIDE else []
        objects.append(str(tmp_path / f"{name}.o"))
        subprocess.run(["g++", *flags, *extra, "-c", str(CORE / f"{name}.cpp"), "-o", objects[-1]], check=True)
    subprocess.run(["g++", *flags, str(HERE / "sanitized.cpp"), *objects, "-o", str(program)], check=True)
    # Fixed addresses: ThreadSanitizer refuses a kernel that randomises more bits than it expects.
    done = subprocess.run(["setarch", "-R", str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "SANITIZED" in done.stdout


@pytest.mark.skipif(shutil.which("g++") is None or not WIDE, reason="needs a C++ compiler, and a CPU that streams")
def test_streamed_bytes_are_fenced_before_anybody_is_told() -> None:
    """Nothing that runs shows a missing fence for certain, so it is looked for in what the compiler makes."""
    source = '#include "run_batch.h"\nvoid end(semkv::RunBatch& batch) { batch.finish(); }\n'
    command = ["g++", "-std=c++20", "-O1", "-S", "-o", "-", f"-I{CORE}", "-x", "c++", "-"]
    made = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    assert "sfence" in made
