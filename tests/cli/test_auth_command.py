# SPDX-License-Identifier: Apache-2.0
"""`semkv auth`: its files on a real server, tenants added to a running one, and what it refuses to overwrite."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from semkv.bus import connect
from semkv.bus.auth import generate, read_env
from semkv.bus.embedded import find_binary
from semkv.bus.errors import BusError
from semkv.bus.settings import BusSettings
from semkv.cli.app import app
from tests.cli.conftest import Run


def made(semkv: Run, *arguments: object) -> dict[str, Path]:
    """The environment files by user."""
    return {name: Path(file) for name, file in json.loads(semkv("auth", *arguments, "--json").stdout)["env"].items()}


def connects(env: Path) -> bool:
    """Whether the server lets that user in."""

    async def once() -> None:
        async with connect(settings=BusSettings.from_env(read_env(env)), timeout=2):
            pass

    try:
        asyncio.run(once())
    except BusError:
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


@pytest.mark.parametrize("keys", ["nkeys", "creds"])
def test_a_tenant_is_added_to_a_running_server_and_nobody_loses_their_key(
    semkv: Run, tmp_path: Path, keys: str
) -> None:
    folder = tmp_path / "auth"
    first = made(semkv, "-d", folder, "a", "--url", f"nats://127.0.0.1:{free_port()}", "--keys", keys)
    assert set(first) == {"engine", "a-manager", "a-agent", "a-observer"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.rglob("*.seed"))
    secrets = {file: file.read_bytes() for file in folder.rglob("*.seed")}
    server = subprocess.Popen([find_binary(), "-c", folder / "nats-server.conf"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while not connects(first["a-agent"]):
            assert server.poll() is None and time.monotonic() < deadline
        told = semkv("auth", "-d", folder, "b").stdout
        assert "kept: a" in told and "nats-server --signal reload" in told
        again = made(semkv, "-d", folder, "b")
        assert set(again) == {*first, "b-manager", "b-agent", "b-observer"}
        assert not connects(again["b-agent"]), "not before the server has read it"
        os.kill(server.pid, signal.SIGHUP)  # what `nats-server --signal reload` sends
        while not connects(again["b-agent"]):
            assert server.poll() is None and time.monotonic() < deadline + 30
        assert connects(first["a-agent"]) and connects(first["engine"])
    finally:
        server.terminate()
        server.wait()
    assert secrets.items() <= {file: file.read_bytes() for file in folder.rglob("*.seed")}.items()


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["auth", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    return done.stderr


def test_a_folder_keeps_its_address_keys_and_certificate(tmp_path: Path) -> None:
    folder = tmp_path / "auth"
    generate(folder, ["a"], url="tls://127.0.0.1:4222")
    pem = (folder / "tls/server.pem").read_bytes()
    assert "was made with tls://127.0.0.1:4222" in refused("-d", folder, "b", "--url", "nats://x:1")
    assert "was made with nkeys" in refused("-d", folder, "b", "--keys", "creds")
    assert "keeps its certificate" in refused("-d", folder, "b", "--host", "nats.example")
    assert not (folder / "b-agent.env").exists()
    done = CliRunner().invoke(app, ["auth", "-d", str(folder), "b", "--keys", "nkeys", "--json"])
    assert {"a-agent", "b-agent"} <= set(json.loads(done.stdout)["env"])
    assert (folder / "tls/server.pem").read_bytes() == pem


def test_a_shell_takes_a_users_file(tmp_path: Path) -> None:
    env = generate(tmp_path / "auth", ["a b; touch $HOME"], url="nats://127.0.0.1:4222").env
    (name,) = (name for name in env if name.endswith("-agent"))
    ask = f"set -a; . {env[name]}; set +a; exec {sys.executable} -c 'import os; print(os.environ[\"SEMKV_TENANT\"])'"
    told = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=False)
    assert told.stdout == "a b; touch $HOME\n", told.stderr


def test_somebody_elses_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "was not made by this command" in refused("-d", tmp_path, "a")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
