# SPDX-License-Identifier: Apache-2.0
"""What holds for every command: help with examples, exit codes, `--json`, completion; and what wrong input is told."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from semkv.bus.embedded import EmbeddedServer
from semkv.cli import bus_call
from semkv.cli.app import app
from semkv.cli.commands import engine
from semkv.cli.devengine import requirements
from semkv.cli.devengine.server import EngineStartError, VLLMServer, free_port
from tests.cli.conftest import MAIN, Bus, Run, environment
from tests.consumers.gateway.test_events import finished, publish


def run(*arguments: object, code: int = 0) -> Result:
    """`semkv ARGUMENTS…` in this process."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, f"{done.exit_code}: {done.output}"
    return done


COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NOBODY = "nats://127.0.0.1:1"
NEEDS_BUS = {
    "doctor": (), "engines": (), "top": (), "watch": (), "record": ("r.jsonl",), "locate": ("1",), "prefetch": ("1",),
    "evict": ("1",),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_the_exit_codes_and_json_is_an_option(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
    assert f"semkv {name}" in told.partition("Example")[2], "an example that names the command"
    assert "--json" in told and "Exit codes: 0 done" in told


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_completes_commands_and_values() -> None:
    """Through the script that `--show-completion` prints; only the program's place is told to bash."""
    program = Path(sys.executable).with_name("semkv")
    # Typer looks for a shell among the parents, where a machine that tests may have none: told, it does not look.
    told = {**environment(), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = subprocess.run(
        [program, "--show-completion", "bash"], capture_output=True, text=True, check=True, env=told
    ).stdout
    ask = """
for words in 'semkv re' 'semkv evict --tier ""'; do
  eval "COMP_WORDS=($words)"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _semkv_completion semkv; echo "${COMPREPLY[@]}"
done
"""
    done = subprocess.run(
        ["bash", "-c", script + ask], capture_output=True, text=True, check=True,
        env={**environment(), "PATH": f"{program.parent}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["record replay", "cpu disk remote device"]


@pytest.mark.parametrize(("name", "arguments"), NEEDS_BUS.items())
def test_without_a_server_each_says_so_in_one_line(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bus_call, "CONNECT_S", 0.2)
    done = run(name, *arguments, "--nats-url", NOBODY, code=3)
    said = done.stderr if name != "doctor" else done.stdout
    assert "127.0.0.1:1" in said and "nats-server -js" in said and "SEMKV_NATS_URL" in said
    assert name == "doctor" or len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(("name", "arguments"), NEEDS_BUS.items())
def test_an_address_that_is_none_is_bad_input(
    name: str, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'nowhere' is no NATS URL" in run(name, *arguments, "--nats-url", "nowhere", code=2).stderr


@pytest.mark.parametrize(
    "url", ["nats://127.0.0.1:99999", "nats://127.0.0.1:0", "nats://[::1", ",", "nats://u:secret@"]
)
def test_what_is_wrong_with_an_address_is_no_traceback_and_shows_no_password(url: str) -> None:
    told = run("engines", "--nats-url", url, code=2).stderr
    assert "is no NATS URL; use nats://host:4222" in told and "secret" not in told


@pytest.mark.parametrize("name", ["locate", "prefetch", "evict"])
class TestHashes:
    def test_a_bad_one_is_named_with_its_place_before_anything_is_sent(self, name: str, tmp_path: Path) -> None:
        for bad in ("0x1f", "12g4", "--hurry", "1" * 17):
            assert bad in (told := run(name, "1", bad, "--nats-url", NOBODY, code=2).stderr) and "1" in told
        (tmp_path / "list").write_text("1\nff\nzz\n")
        assert "'zz'" in run(name, "--file", tmp_path / "list", "--nats-url", NOBODY, code=2).stderr

    def test_none_at_all_and_a_file_that_is_not_there(self, name: str) -> None:
        assert "--file" in run(name, "--nats-url", NOBODY, code=2).stderr
        assert "absent.txt" in run(name, "--file", "absent.txt", "--nats-url", NOBODY, code=2).stderr

    def test_those_of_a_session_are_its_newest_requests(self, name: str, bus: Bus) -> None:
        asyncio.run(
            publish(bus.url, finished(1, "billing", (7,)), finished(2, "billing", (1, 2)), finished(3, "garden"))
        )
        told = json.loads(run(name, "--of", "billing", "--nats-url", bus.url, "--json").stdout)
        assert len(told["ranks"][0]["chunk_tiers"] if name == "locate" else told["ranks"][0]["chunk_status"]) == 2
        assert bus.storage.calls == [(name, (1, 2))]
        refused = run(name, "--of", "nobody", "--nats-url", bus.url, code=2).stderr
        assert "'nobody'" in refused and "garden, billing" in refused
        assert "--of" in run(name, "1", "--of", "billing", "--nats-url", NOBODY, code=2).stderr


def test_an_engine_or_domain_that_is_not_live_is_told_who_is(bus: Bus) -> None:
    told = run("prefetch", "1", "--instance", "engine-9", "--nats-url", bus.url, code=3).stderr
    assert "'engine-9'" in told and "live are engine-0" in told
    assert "live are engine-0" in run("locate", "1", "--domain", "abc", "--nats-url", bus.url, code=3).stderr


def test_json_is_one_object_a_line_and_nothing_else(bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (
        ("engines",), ("doctor",), ("top", "-n", "2", "--interval", "0.1"), ("locate", "1", "99"),
        ("prefetch", "1", "2"), ("evict", "1"), ("record", "new.jsonl", "--seconds", "0.2"),
        ("watch", "--seconds", "0.2"),
    ):  # fmt: skip
        done = run(*arguments, "--nats-url", bus.url, "--json")
        for line in done.stdout.splitlines():
            assert isinstance(json.loads(line), dict), done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        *(((name, *arguments, "--nats-url", NOBODY), 3) for name, arguments in NEEDS_BUS.items() if name != "doctor"),
        (("prefetch",), 2), (("prefetch", "zz"), 2), (("evict", "1", "--tier", "attic"), 2), (("engines", "--nope"), 2),
        (("nope",), 2), (("trace",), 2), (("trace", "absent.json"), 2), (("why", "--store", "absent.db"), 2),
        (("replay", "absent.jsonl"), 2), (("schema", "absent.v1"), 2), (("auth", "one", "-d", "/proc/none"), 2),
        (("gateway", "--host", "0.0.0.0"), 2), (("gateway", "--port", "70000"), 2),
        (("engine", "--chunk-size", "1"), 2), (("demo", "--plain-engine-url", "http://127.0.0.1:1"), 2),
    ],
)  # fmt: skip
def test_json_says_what_failed_too(
    arguments: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bus_call, "CONNECT_S", 0.2)
    done = run(*arguments, "--json", code=code)
    told = json.loads(done.stdout)
    assert told["exit_code"] == code and told["error"]
    assert told["error"].split()[0] in done.stderr, "people are told the same"
    assert "error" not in run(*arguments, code=code).stdout, "nothing but with --json"


def test_where_there_is_nothing_it_is_said(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    url = ("--nats-url", nats_server.url)
    told = run("top", "-n", "1", *url).stdout
    assert "no engine is live" in told and "no command has passed" in told and told.endswith("\n")
    assert "no file was kept" in run("record", tmp_path / "r", "--seconds", "0.2", *url).stderr
    assert not (tmp_path / "r").exists()
    assert json.loads(run("record", tmp_path / "r", "--seconds", "0.2", *url, "--json").stdout)["file"] is None
    assert run("replay", tmp_path / "r", code=2).stderr == f"semkv: {tmp_path / 'r'}: No such file or directory\n"


def test_watch_ends_after_as_many_messages_as_asked_for(semkv: Run, bus: Bus) -> None:
    command = [*MAIN, "watch", "--nats-url", bus.url, "--count", "1", "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None and "watching tenant default" in process.stderr.readline()
        semkv("prefetch", "1", "--nats-url", bus.url)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    (line,) = out.splitlines()
    assert json.loads(line)["type"] == "prefetch" and process.returncode == 0


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_a_port_in_use_is_said(taken: int) -> None:
    told = run("gateway", "--port", taken, "--nats-url", NOBODY, code=2).stderr
    assert f"127.0.0.1:{taken}" in told and told.count("in use") == 1 and "--port" in told
    assert len(told.splitlines()) == 1


class TestEngine:
    """What would stop it, or leave semkv out of it, is said before vLLM takes its minute to start."""

    @pytest.fixture(autouse=True)
    def starts_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        def start(*_: object, **__: object) -> NoReturn:
            raise EngineStartError("it would start now")

        monkeypatch.setattr(requirements, "missing", list)
        monkeypatch.setattr(VLLMServer, "start", start)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "semkv-engine/model").mkdir(parents=True)
        (tmp_path / "semkv-engine/model/config.json").touch()

    def test_a_port_in_use(self, taken: int) -> None:
        told = run("engine", "--port", taken, code=2).stderr
        assert f"--port: {taken} is in use" in told and len(told.splitlines()) == 1

    @pytest.mark.parametrize(("name", "value"), [("SEMKV_NATS_URL", "nats://h:0"), ("SEMKV_DIRECT", "perhaps")])
    def test_settings_that_the_hooks_would_refuse(self, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(name, value)
        told = run("engine", "--port", free_port(), code=2).stderr
        assert name in told and value.removeprefix("nats://") in told and "would start" not in told

    @pytest.mark.parametrize(
        ("arguments", "direct", "out"),
        [((), "0", True), (("--nats-url", NOBODY), "0", False), (("--plain",), "0", False), ((), "1", False)],
    )
    def test_that_semkv_stays_out_is_said_where_nobody_asked_for_it(
        self, arguments: tuple[str, ...], direct: str, out: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SEMKV_DIRECT", direct)
        told = run("engine", "--port", free_port(), *arguments, code=3).stderr
        assert ("semkv stays out" in told) is out and "would start now" in told

    def test_a_file_named_from_here_is_not_looked_for_in_the_engines_folder(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        told: dict[str, str] = {}

        def start(server: VLLMServer, **_: object) -> NoReturn:
            told.update(server.options.environment)
            raise EngineStartError("it would start now")

        monkeypatch.setattr(VLLMServer, "start", start)
        monkeypatch.setenv("SEMKV_TRACE_FILE", "spans.json")
        run("engine", "--port", free_port(), "--nats-url", NOBODY, code=3)
        assert told["SEMKV_TRACE_FILE"] == str(tmp_path / "spans.json") and told["SEMKV_NATS_URL"] == NOBODY

    def test_a_start_that_takes_long_shows_that_it_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def start(_: VLLMServer, *, progress: Callable[[float, str], None]) -> NoReturn:
            for waited_s in (1.0, 16.0, 17.0, 33.0):
                progress(waited_s, f"loading, {waited_s}")
            raise EngineStartError("it would start now")

        monkeypatch.setattr(VLLMServer, "start", start)
        told = run("engine", "--port", free_port(), "--nats-url", NOBODY, code=3).stderr.splitlines()
        assert told[1:3] == ["  16 s: loading, 16.0", "  33 s: loading, 33.0"]

    def test_the_hooks_lines_are_shown_once_each(self) -> None:
        log = "INFO 1 [semkv] hooked\n(EngineCore pid=7) INFO 2 [semkv] hooked\nelse\nWARN [semkv] patch is left out\n"
        assert engine._hooks_lines(log) == ["[semkv] hooked", "[semkv] patch is left out"]


def test_a_gateway_open_to_the_network_needs_tokens() -> None:
    assert "SEMKV_GATEWAY_TOKENS_FILE" in run("gateway", "--host", "0.0.0.0", "--nats-url", NOBODY, code=2).stderr


def test_the_gateway_says_where_it_listens_to_people() -> None:
    command = [*MAIN, "gateway", "--port", "0", "--nats-url", NOBODY]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        told = next(line for line in process.stderr if line.startswith("serving "))
        assert told.split()[1].startswith("http://127.0.0.1:") and "/ui/; Ctrl-C ends" in told
    finally:
        process.kill()
        process.communicate()


def test_the_gateway_says_where_it_listens_and_that_nats_is_away() -> None:
    command = [*MAIN, "gateway", "--port", "0", "--nats-url", NOBODY, "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        said = json.loads(process.stdout.readline())
        assert said["url"].startswith("http://127.0.0.1:") and said["page"] == said["url"] + "/ui/"
        assert said["pid"] == process.pid
        assert any("goes on trying" in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert out == ""
