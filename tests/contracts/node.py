# SPDX-License-Identifier: Apache-2.0
"""Node as the second language: its packages are installed once into a folder that git ignores."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".cache" / "node"
PACKAGES = {"@msgpack/msgpack": "3.1.3", "nats": "2.29.3", "@asyncapi/parser": "3.6.6"}


def missing() -> str:
    """Why Node cannot be used, or nothing; installs the packages where they are absent."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        return "node and npm are not installed: the check in a second language is left out"
    if all(_installed(name) == version for name, version in PACKAGES.items()):
        return ""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "package.json").write_text(json.dumps({"private": True, "dependencies": PACKAGES}))
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        return f"npm could not install {', '.join(PACKAGES)}: {done.stderr.strip()[-200:]}"
    return ""


def _installed(name: str) -> str:
    try:
        return str(json.loads((FOLDER / "node_modules" / name / "package.json").read_text())["version"])
    except (OSError, ValueError):
        return ""


def run(code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs JavaScript with these packages at hand."""
    command = ["node", "-e", code, *arguments]
    return subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=timeout, check=False)
