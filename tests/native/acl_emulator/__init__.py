# SPDX-License-Identifier: Apache-2.0
"""The emulated ACL runtime under the real torch_npu: builds it, installs torch_npu on its own, runs programs.

torch_npu must not be installed into an environment that has no CANN: it breaks `import torch` there. It goes into a
folder of its own that only the programs started here see.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from semkv.native.transfer.accelerator import CANN_FOLDERS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TORCH_NPU = "torch-npu==2.13.0"
EMPTY_LIBRARIES = ("acl_op_compiler", "acl_tdt_channel", "ge_runner", "graph", "hccl")


class UnavailableError(RuntimeError):
    """What is missing to run torch_npu on the emulation."""


def torch_npu_folder() -> Path:
    """A folder that holds torch_npu, installed on first use (44 MB)."""
    if named := os.environ.get("SEMKV_TORCH_NPU"):
        return Path(named)
    folder = ROOT / ".cache" / "torch_npu"
    if (folder / "torch_npu").is_dir():
        return folder
    uv = Path(sys.executable).with_name("uv")
    installer = [str(uv), "pip"] if uv.exists() else [sys.executable, "-m", "pip"]
    partial = folder.with_name("torch_npu.partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [*installer, "install", "--quiet", "--target", str(partial), "--no-deps", TORCH_NPU]
    if uv.exists():
        command[3:3] = ["--python", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise UnavailableError(f"{TORCH_NPU} cannot be installed: {done.stderr.strip()}")
    partial.rename(folder)
    return folder


def build(folder: Path) -> Path:
    """Compiles the runtime's libraries into `folder`."""
    if shutil.which("g++") is None:
        raise UnavailableError("no C++ compiler for the emulated ACL runtime")
    no_ops = (HERE / "no_ops.txt").read_text(encoding="utf-8").split()
    stubs = folder / "no_ops.cpp"
    stubs.write_text("".join(f'extern "C" long {name}() {{ return 0; }}\n' for name in no_ops), encoding="utf-8")
    compiler = ["g++", "-shared", "-fPIC", "-std=c++20", "-O1", "-pthread"]
    _run(
        [*compiler, "-o", str(folder / "libascendcl.so"), str(HERE / "emulated_acl.cpp"), str(stubs)], "libascendcl.so"
    )
    empty = folder / "empty.cpp"
    empty.write_text("", encoding="utf-8")
    for name in EMPTY_LIBRARIES:
        library = f"lib{name}.so"
        link = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl"]
        _run([*compiler, "-o", str(folder / library), str(empty), *link], library)
    return folder


def _run(command: list[str], library: str) -> None:
    done = subprocess.run([*command, f"-Wl,-soname,{library}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{library} does not compile: {done.stderr}")


def run_program(
    program: Path, libraries: Path, arguments: list[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with torch_npu on the emulated runtime."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": os.pathsep.join([str(torch_npu_folder()), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    for name in CANN_FOLDERS:
        environment.pop(name, None)  # the emulation has no kernels, whatever else is installed here
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
