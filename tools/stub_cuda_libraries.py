# SPDX-License-Identifier: Apache-2.0
"""Makes empty CUDA libraries, so that torch's CUDA build loads on a machine that has none and never calls them.

`python3 tools/stub_cuda_libraries.py FOLDER`, FOLDER being torch's `lib`. It reads with readelf and nm which libraries
and which versioned symbols torch's own libraries ask the loader for, and links one stub library for each name. Every
function in them returns 100, CUDA's "no device". Needs gcc and binutils. Only for the development engine on a CPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

CUDA_LIBRARY = re.compile(r"lib(cu|nv|nccl)")
CUDA_SYMBOL = re.compile(
    r"(__cuda|cu[A-Z]|cuda|cublas|cudnn|cufft|cufile|cupti|cu(rand|solver|sparse)|nccl|nvrtc|nvshmem|nvtx|nvJitLink)"
)
UNVERSIONED_HOME = "libnccl.so.2"
"""Where unversioned symbols go: NCCL is the one library of these that versions none of its own."""


class Wanted:
    """What torch's libraries ask for: libraries by name, and for each its versions and symbols."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries: set[str] = set()
        self.owners: dict[str, str] = {}
        undefined: set[str] = set()
        defined: set[str] = set()
        for library in folder.glob("lib*.so*"):
            self._read_needs(library)
            for line in _output("nm", "-D", str(library)).splitlines():
                *_, kind, symbol = line.split()
                (undefined if kind in "Uw" else defined).add(symbol.replace("@@", "@"))
        self.libraries |= {owner for owner in self.owners.values() if self._is_absent(owner)}
        self.symbols: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in self.libraries}
        provided = {symbol.partition("@")[0] for symbol in defined}
        for symbol in sorted(undefined):
            name, _, version = symbol.partition("@")
            owner = self.owners.get(version) if version else UNVERSIONED_HOME if CUDA_SYMBOL.match(name) else None
            if owner in self.symbols and name not in provided:
                self.symbols[owner][version].append(name)

    def _read_needs(self, library: Path) -> None:
        needed = re.findall(r"NEEDED.*\[(.*?)\]", _output("readelf", "-dW", str(library)))
        self.libraries |= {name for name in needed if self._is_absent(name)}
        owner = ""
        for line in _output("readelf", "-VW", str(library)).splitlines():
            if found := re.search(r"Version: 1\s+File: (\S+)", line):
                owner = found[1]
            elif owner and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                self.owners[found[1]] = owner

    def _is_absent(self, name: str) -> bool:
        return bool(CUDA_LIBRARY.match(name)) and not (self.folder / name).exists()


def link(folder: Path, name: str, symbols: dict[str, list[str]], versions: set[str]) -> None:
    """Link one stub library with `symbols` by version; `versions` without symbols are declared too."""
    functions = "\n".join(f"int {symbol}(void) {{ return 100; }}" for names in symbols.values() for symbol in names)
    script = [
        f"{version} {{ global: {' '.join(f'{s};' for s in names)} }};" for version, names in symbols.items() if version
    ]
    script += [f"{version} {{ }};" for version in sorted(versions - set(symbols))]
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary, "stub.c")
        source.write_text(functions + "\n")
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-fno-builtin",
            f"-Wl,-soname,{name}",
            "-o",
            str(folder / name),
            str(source),
        ]
        if script:
            version_script = Path(temporary, "versions.map")
            version_script.write_text("\n".join(script) + "\n")
            command.append(f"-Wl,--version-script={version_script}")
        subprocess.run(command, check=True)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    folder = Path(sys.argv[1])
    wanted = Wanted(folder)
    for name in sorted(wanted.libraries):
        versions = {version for version, owner in wanted.owners.items() if owner == name}
        link(folder, name, wanted.symbols[name], versions)
    print(f"{len(wanted.libraries)} stub libraries in {folder}")


if __name__ == "__main__":
    main()
