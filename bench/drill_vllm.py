# SPDX-License-Identifier: Apache-2.0
"""A real vLLM with prefix caching under pressure on DDR and SSD, with the patches on LMCache's storage and without.

The same run twice, in processes of their own: requests whose beginning vLLM's own cache often holds, a DDR pool and a
disk quota smaller than what they need, prefetches and evicts beside them. Every output is compared with that of an
engine without any cache, and at quiet points memory, references, quota and files are. With the patches it ends well;
without them it dies, hangs, answers wrongly or leaves LMCache's memory in disorder: `how` says which.

`python -m bench.drill_vllm --seconds 180`. Exit code 0 only if it ended well with the patches and not without.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from semkv.cli.devengine.model import make_model
from semkv.cli.devengine.requirements import preload_libraries

SILENCE_S = 60.0
START_S = 300.0
ENGINE = Path(__file__).with_name("_drill_engine.py")


@dataclass(frozen=True)
class Run:
    """How one run went: `how` is "well", or what happened instead; `without` likewise once the patches were out."""

    how: str
    seconds: float
    counts: dict[str, int]
    without: str = ""
    log: str = ""

    @property
    def well(self) -> bool:
        return self.how == "well"


def environment() -> dict[str, str]:
    """What vLLM and LMCache need on a CPU; nothing of semkv's or the caller's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SEMKV_", "LMCACHE_", "VLLM_"))}
    if libraries := preload_libraries(Path(sys.prefix)):
        kept["LD_PRELOAD"] = ":".join(libraries)
    return kept | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_PLUGINS": "",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONHASHSEED": "0",
    }


def drill(folder: Path, *, patched: bool, seconds: float, without_s: float = 0, seed: int = 1) -> Run:
    """One run in `folder`, which should be a temporary one with a short path; then `without_s` without the patches."""
    (folder / "t").mkdir(parents=True)
    task = {
        "model": str(make_model(folder / "model")),
        "folder": str(folder),
        "patched": patched,
        "seconds": seconds,
        "without_s": without_s,
        "seed": seed,
    }
    log = folder / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(ENGINE), json.dumps(task)],
            env=environment() | {"TMPDIR": str(folder / "t"), "PROMETHEUS_MULTIPROC_DIR": str(folder / "t")},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    try:
        run = _follow(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    return replace(run, log=log.read_text(errors="replace"))


def _follow(process: subprocess.Popen[bytes]) -> Run:
    """Read what the run says until it ends; one that says nothing for a minute hangs."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    out = process.stdout
    assert out is not None

    def read() -> None:
        for line in out:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    began, patience, requests = time.monotonic(), START_S, 0
    with_patches: Run | None = None

    def ended(how: str, counts: dict[str, int]) -> Run:
        if with_patches is not None:
            return replace(with_patches, without=how)
        return Run(how, time.monotonic() - began, counts)

    while True:
        try:
            line = lines.get(timeout=patience)
        except queue.Empty:
            return ended(f"hangs after {requests} requests", {"requests": requests})
        if not line:
            return ended(f"died with code {process.wait()} after {requests} requests", {"requests": requests})
        said = _object(line)
        if said is None:
            continue  # the engine's own words
        if "ready" in said:
            began, patience = time.monotonic(), SILENCE_S
        requests = said.get("at", requests)
        if said.get("without") is True:
            with_patches = ended("well", said["counts"])
        elif "ended" in said:
            return ended(said.get("without") or said.get("error") or said["ended"], said["counts"])


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    as_wanted = True
    with tempfile.TemporaryDirectory(prefix="semkv-") as folder:
        for patched in (True, False):
            run = drill(Path(folder, str(int(patched))), patched=patched, seconds=chosen.seconds, seed=chosen.seed)
            as_wanted &= run.well is patched
            print(f"{'with' if patched else 'without'} the patches, after {run.seconds:.0f} s: {run.how}")
            print(json.dumps(run.counts, indent=2), flush=True)
            if not run.well:
                print("\n".join(run.log.splitlines()[-12:]))
    return 0 if as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
