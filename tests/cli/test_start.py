# SPDX-License-Identifier: Apache-2.0
"""What starting the command costs: help, completion and wrong input import nothing that talks to anybody."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer

from semkv.cli.app import app
from tests.cli.conftest import environment

HEAVY = {
    "aiohttp", "cryptography", "fastapi", "httpx", "lmcache", "nats", "numpy", "openai", "opentelemetry", "torch",
    "uvicorn", "vllm",
}  # fmt: skip
MODELS = {"pydantic"}
"""Typer asks it about a command's values itself, where it is installed; the list of commands does without."""
ASK = """
import json, sys
from semkv.cli.app import main
try:
    main()
finally:
    print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})), file=sys.stderr)
"""
NAMES = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("arguments", [("--help",), ("prefetch", "--help"), ("evict",)], ids=" ".join)
def test_only_what_a_command_uses_is_imported(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK, *arguments], env=environment(), capture_output=True, text=True, check=False
    )
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "typer" in imported and imported & HEAVY == set()
    if arguments == ("--help",):
        assert all(f" {name} " in done.stdout for name in NAMES) and not imported & MODELS


def test_completion_imports_no_more() -> None:
    told = {"_SEMKV_COMPLETE": "complete_bash", "COMP_WORDS": "semkv re", "COMP_CWORD": "1"}
    ask = ASK.replace("main()\n", "sys.argv[0] = 'semkv'; main()\n")
    done = subprocess.run(
        [sys.executable, "-c", ask], env=environment(**told), capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["record", "replay"]
    assert set(json.loads(done.stderr.splitlines()[-1])) & HEAVY == set()
