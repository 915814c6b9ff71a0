# SPDX-License-Identifier: Apache-2.0
"""Every command that README and the pages show is run as it stands, or stands in a short table with the reason why not.

The quick starts' own lines start the stand: a NATS server, the development engine (a real vLLM with LMCache on the CPU)
and the gateway. Only ports are changed, so that nothing collides.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tomllib
import typer

from semkv.cli.app import app
from tests.cli.conftest import environment
from tests.docs.shell import PAGES, ROOT, Command, commands

BIN = Path(sys.executable).parent
STAND_PAGE = ROOT / "docs/quickstart-operators.md"
PORTS = {"nats": "4222", "engine": "8000", "gateway": "6999"}

NOT_RUN = {
    r"\. \.venv/bin/activate": "the tests run in that environment",
    r"export SEMKV_NATS_URL=nats://nats[.-]": "names a server of the reader's",
    r"export OTEL_EXPORTER_OTLP_METRICS_ENDPOINT=|prometheus ": "needs Prometheus; what is exported has its own tests",
    r"vllm serve MODEL ": "needs a model of the reader's; the end-to-end tests serve with this option",
    r"docker (run .*VLLM_ASCEND_IMAGE|exec )": "needs an Ascend host; the compose file is held to it",
    r"docker-compose --profile ": "needs Docker and root: make test-compose runs these",
    r"nats (pub|sub|kv)\b": "the nats command is a program of its own; tests/contracts send what it sends",
    r"export OPENAI_BASE_URL=|python examples/agent\.py": "tests/examples run it on an engine that answers in words",
    r"python -m bench": "measures for minutes; short forms are tests of their own",
    r"apt-get install ": "changes the reader's machine; CI installs the same",
    r"set -a; \. ": "run by the test of `semkv auth`'s files, which reads them as a shell does",
}


def why_not(command: Command) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if re.match(start, command.text)), None)


def make_knows(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"{text} -n"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def extra_exists(text: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for wanted in re.findall(r"semkv(?:\[([\w,-]+)\])?", text):
        assert not wanted or set(wanted.split(",")) <= set(extras), text


def module_exists(text: str) -> None:
    assert importlib.util.find_spec(shlex.split(text)[2]), text


def semkv_understands(text: str) -> None:
    _, name, *arguments = shlex.split(text)
    group = typer.main.get_command(app)
    assert name in group.commands, text  # type: ignore[attr-defined]
    try:
        group.commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    except Exception as error:
        # What is only named need not be whole, and help is shown by leaving.
        if type(error).__name__ not in ("MissingParameter", "Exit"):
            raise


LOOKED_AT: dict[str, Callable[[str], None]] = {
    # What runs for long or changes the reader's machine is tried as far as that goes without.
    "make ": make_knows,
    "pip install ": extra_exists,
    "python -m semkv.": module_exists,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_is_not_run_is_at_least_right(page: Path) -> None:
    for command in commands(page):
        look = next((look for start, look in LOOKED_AT.items() if command.text.startswith(start)), None)
        if look is not None:
            look(command.text)
        elif command.shown == "inline" and command.text.startswith("semkv "):
            semkv_understands(command.text)
        elif command.shown == "inline":
            assert why_not(command) or serves(command.text), f"{command}: neither run nor in the table"


def test_the_table_has_no_row_too_many() -> None:
    every = [command for page in PAGES for command in commands(page)]
    for start in NOT_RUN:
        assert any(re.match(start, command.text) for command in every), f"nothing begins with {start}"


def serves(text: str) -> bool:
    return re.match(r"(\w+=\S+ )*(nats-server|semkv engine|semkv gateway)\b", text) is not None


class Stand:
    """A folder, ports, and what was started in it, ended by its process id."""

    def __init__(self) -> None:
        # LMCache's sockets lie below it, and their paths have to be short.
        self.folder = Path(tempfile.mkdtemp(prefix="semkv-docs-"))
        self.ports = {name: str(free_port()) for name in PORTS}
        self._started: list[subprocess.Popen[str]] = []

    def here(self, text: str) -> str:
        """The command on this stand's ports, and in this environment."""
        for name, port in PORTS.items():
            text = re.sub(rf"(?<=[ :]){port}\b", self.ports[name], text)
        return text.replace(".venv/bin/", f"{BIN}/")

    def environment(self, **more: str) -> dict[str, str]:
        return {**environment(), "PATH": f"{BIN}:{os.environ['PATH']}", **more}

    def run(self, text: str, env: dict[str, str]) -> str:
        done = subprocess.run(
            ["bash", "-c", self.here(text)], cwd=self.folder, env=self.environment(**env), capture_output=True,
            text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, text: str, ready: Callable[[], object], **env: str) -> subprocess.Popen[str]:
        """Starts what serves until it is ended, and waits until `ready` no longer raises OSError."""
        log = self.folder / f"log-{len(self._started)}"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["bash", "-c", f"exec env {self.here(text)}"], cwd=self.folder, env=self.environment(**env), stdout=out,
                stderr=out, text=True,
            )  # fmt: skip
        self._started.append(process)
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, f"{text} ended: {log.read_text()}"
            try:
                ready()
                return process
            except OSError:
                assert time.monotonic() < deadline, f"{text} is not ready: {log.read_text()}"
                time.sleep(0.1)

    def close(self) -> None:
        for process in reversed(self._started):
            end(process)
        shutil.rmtree(self.folder, ignore_errors=True)


def end(process: subprocess.Popen[str]) -> int:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def asks(url: str) -> Callable[[], object]:
    return lambda: urllib.request.urlopen(url, timeout=2).close()


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """Started with the lines of the operators' quick start, with one request of the session `billing`."""
    pytest.importorskip("vllm")
    pytest.importorskip("lmcache")
    lines = [command.text for command in commands(STAND_PAGE)]
    made = Stand()
    try:
        nats, engine, gateway = made.ports["nats"], made.ports["engine"], made.ports["gateway"]
        made.start(line(lines, "nats-server "), lambda: socket.create_connection(("127.0.0.1", int(nats)), 2).close())
        made.start(line(lines, "semkv engine "), asks(f"http://127.0.0.1:{engine}/health"))
        made.start(line(lines, "semkv gateway "), asks(f"http://127.0.0.1:{gateway}/healthz"))
        answer = json.loads(made.run(line(lines, "curl "), {}))
        assert answer["kv_transfer_params"]["chunk_hashes"], answer
        yield made
    finally:
        made.close()


def line(lines: list[str], start: str) -> str:
    return next(text for text in lines if re.match(rf"(\w+=\S+ )*{re.escape(start)}", text))


WITH_BLOCKS = [page for page in PAGES if any(command.shown == "block" for command in commands(page))]


@pytest.mark.engine
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_run(page: Path, stand: Stand) -> None:
    # What is meant where a page names no server is the one on the usual port.
    env = {"SEMKV_NATS_URL": stand.here("nats://127.0.0.1:4222")}
    for command in commands(page):
        text = command.text
        if command.shown != "block" or why_not(command) or any(text.startswith(start) for start in LOOKED_AT):
            continue
        if serves(text):
            if page != STAND_PAGE:  # there they have been started already
                port = free_port()
                process = stand.start(text, asks(f"http://127.0.0.1:{port}/healthz"), SEMKV_GATEWAY_PORT=str(port))
                assert end(process) in (0, 130)
        elif text.startswith("export "):
            env |= dict(pair.split("=", 1) for pair in shlex.split(stand.here(text))[1:])
        elif text.startswith("curl -N"):
            stand.run(f"{text} --max-time 2 || test $? = 28", env)  # a stream ends when its reader goes
        else:
            stand.run(text, env)


@pytest.mark.engine
def test_the_session_of_the_quick_starts_goes_to_the_ssd_and_back(stand: Stand) -> None:
    """What the pages say of those commands is what is seen."""
    env = {"SEMKV_NATS_URL": f"nats://127.0.0.1:{stand.ports['nats']}"}

    def told(text: str) -> dict[str, object]:
        (rank,) = json.loads(stand.run(f"{text} --json", env))["ranks"]
        assert isinstance(rank, dict)
        return rank

    stand.run("semkv prefetch --of billing", env)
    evicted = told("semkv evict --of billing --tier cpu")["counts"]
    assert set(told("semkv locate --of billing")["chunk_tiers"][0]) == {"disk"}  # type: ignore[index]
    assert {"loaded": evicted["removed"]} == told("semkv prefetch --of billing")["counts"]  # type: ignore[index]
    assert set(told("semkv locate --of billing")["chunk_tiers"][0]) == {"cpu", "disk"}  # type: ignore[index]


@pytest.mark.engine
async def test_the_three_calls_of_the_readme(stand: Stand) -> None:
    """It waits for the session's next event, so its request is repeated until that has come."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    scope: dict[str, object] = {}
    exec(f"async def example():\n{textwrap.indent(stand.here(block), '    ')}    return chain, result", scope)
    going = asyncio.ensure_future(scope["example"]())  # type: ignore[operator]
    request = line([command.text for command in commands(STAND_PAGE)], "curl ")
    while not going.done():
        await asyncio.to_thread(stand.run, request, {})
        await asyncio.wait({going}, timeout=1)
    chain, result = await going
    assert chain and result.ok and sum(result.counts().values()) == len(chain)
