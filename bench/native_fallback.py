# SPDX-License-Identifier: Apache-2.0
"""LMCache 0.5.6's torch fallback beside our transfers: paged KV to chunk objects and back on a CPU.

`run()` prints the table and returns the figures. The fallback is measured in a process of its own (`_native_fallback`),
since another LMCache is installed here; ours, memcpy and the streaming copy run there too, in the same rounds. The
wheel is unpacked on first use into `.cache/lmcache-0.5.6` (17 MB fetched), or found where SEMKV_BENCH_LMCACHE says. If
it cannot be had, one line says so and there are no figures.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LMCACHE = "0.5.6"
SAYS = "FIGURES "


class MissingError(RuntimeError):
    """The fallback cannot be measured here; the message says why."""


def lmcache_folder() -> Path:
    """A folder that holds the pinned LMCache and nothing else, unpacked on first use."""
    if named := os.environ.get("SEMKV_BENCH_LMCACHE"):
        folder = Path(named)
        if not (folder / "lmcache").is_dir():
            raise MissingError(f"SEMKV_BENCH_LMCACHE={named} holds no lmcache: name a folder with an unpacked wheel")
        return folder
    folder = ROOT / ".cache" / f"lmcache-{LMCACHE}"
    if (folder / "lmcache").is_dir():
        return folder
    uv = Path(sys.executable).with_name("uv")
    installer = [uv, "pip", "install", "--python", sys.executable] if uv.exists() else [sys.executable, "-m", "pip"]
    if not uv.exists():
        installer.append("install")
    # Its requirements are those of the LMCache installed here; its wheel needs no CUDA for the fallback.
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    command = [*installer, "--quiet", "--no-deps", "--only-binary", ":all:", "--target", partial, f"lmcache=={LMCACHE}"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise MissingError(
            f"lmcache=={LMCACHE} cannot be installed ({reason}); unpack its wheel and name the folder "
            "in SEMKV_BENCH_LMCACHE"
        )
    partial.rename(folder)
    return folder


MALLOC = {
    "kept": {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)},
    "returned": {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)},
}
STATES = {"kept": ("cold", "hot"), "returned": ("cold",)}
WAYS = ("op", "worker", "slots")


def run() -> dict[str, float]:
    """Figures by name; `….over_ours` is the fallback's time over ours, `….over_streaming` over the streaming copy's."""
    try:
        folder = lmcache_folder()
    except MissingError as missing:
        print(f"LMCache {LMCACHE}'s fallback is left out: {missing}")
        return {}
    figures: dict[str, float] = {}
    for way, states in STATES.items():
        figures |= _measured(folder, way, states)
    _show(figures)
    return figures


def _measured(folder: Path, way: str, states: tuple[str, ...]) -> dict[str, float]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "LMCACHE_LOG_LEVEL": "WARNING",
        **MALLOC[way],
    }
    command = [sys.executable, "-m", "bench._native_fallback", way, *states]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = [line.removeprefix(SAYS) for line in done.stdout.splitlines() if line.startswith(SAYS)]
    if done.returncode or not lines:
        raise RuntimeError(f"LMCache {LMCACHE}'s fallback was not measured: {done.stdout}{done.stderr}")
    return dict(json.loads(lines[0]))


def _show(figures: dict[str, float]) -> None:
    """A line for each format, direction and number of threads."""
    settings = list(dict.fromkeys(".".join(key.split(".")[:2]) for key in figures))
    columns = [(way, malloc, state) for way in WAYS for malloc in STATES for state in STATES[malloc]]
    print(f"LMCache {LMCACHE}'s fallback, its time over ours; cold or hot, its temporaries' memory kept or returned")
    print(
        f"{'format':26} {'threads':>9} {'':8}{'ours':>6}{'streaming':>10} (of memcpy)  op kept over streaming", end=""
    )
    print("".join(f"{' '.join(column):>22}" for column in columns))
    for setting in settings:
        name, threads = setting.split(".")
        for direction in ("gather", "scatter"):
            ours = figures[f"{setting}.kept.cold.ours_{direction}.of_memcpy"]
            streaming = figures[f"{setting}.kept.cold.streaming.of_memcpy"]
            limit = figures[f"{setting}.kept.cold.{direction}.op.over_streaming"]
            cells = [
                figures.get(f"{setting}.{malloc}.{state}.{direction}.{way}.over_ours") for way, malloc, state in columns
            ]
            shown = "".join(f"{'-' if cell is None else f'{cell:.1f}':>22}" for cell in cells)
            print(f"{name:26} {threads:>9} {direction:8}{ours:6.2f}{streaming:10.2f} {limit:35.1f}{shown}")


if __name__ == "__main__":
    run()
