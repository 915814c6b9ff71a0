# SPDX-License-Identifier: Apache-2.0
"""A disk that can be held: reads of semkv's own threads wait, in every process of an engine, until it is let go.

It stands in for a slow disk. The engine's processes read `sitecustomize.py` from the folder named in `environment()`,
which wraps the function that reads files as soon as its module is imported; nothing else of semkv, LMCache or vLLM is
replaced. LMCache's own reads are not held.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SITE = """
import importlib.util, os, pathlib, sys, threading, time

_folder = pathlib.Path(__file__).parent


def _wait():
    if threading.current_thread().name.startswith("semkv-") and (_folder / "hold").exists():
        (_folder / f"waits-{os.getpid()}").touch()
        until = time.monotonic() + 120
        while (_folder / "hold").exists() and time.monotonic() < until:
            time.sleep(0.005)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "semkv.consumers.storage.files":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            read = module._read_file
            module._read_file = lambda *arguments: (_wait(), read(*arguments))[1]

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
"""


class HeldDisk:
    """`with disk.held(): ...` holds reads; `wait_for_readers(n)` returns the processes that wait in one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(_SITE)

    def environment(self) -> dict[str, str]:
        """What the engine's processes need."""
        return {"PYTHONPATH": str(self.folder)}

    @contextmanager
    def held(self) -> Iterator[None]:
        for old in self.folder.glob("waits-*"):
            old.unlink()
        (self.folder / "hold").touch()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def wait_for_readers(self, count: int, seconds: float = 60.0) -> set[int]:
        until = time.monotonic() + seconds
        while True:
            found = {int(path.name.partition("-")[2]) for path in self.folder.glob("waits-*")}
            if len(found) >= count:
                return found
            if time.monotonic() > until:
                raise TimeoutError(f"{len(found)} of {count} processes read within {seconds} s")
            time.sleep(0.02)
