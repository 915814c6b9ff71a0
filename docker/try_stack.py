# SPDX-License-Identifier: Apache-2.0
"""Brings the development stack up in real containers, holds the conversation, reads its trace back, takes it down.

`make test-compose`. It runs a Docker daemon of its own (own data, socket and pid file, no bridge, no firewall rules)
under a temporary folder, with the base images pulled, or made by `standins/make.sh` where they cannot be. Whatever
happens, containers, networks, volumes, the daemon and the folder are gone afterwards; `.cache/standins` stays. Needs
root and Debian's docker.io, iptables and debootstrap. Exit code 0 done, 1 something was not as promised, 2 something
is missing here. `--docker-host URL` uses a running daemon of yours instead, and its images as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = [str(ROOT / ".venv/bin/docker-compose"), "--profile", "agent", "--profile", "engine"]
TOKEN = "development-only-token"
PORTS = ("NATS", "NATS_MONITOR", "JAEGER", "OTLP", "ENGINE", "GATEWAY")
SERVICES = ("nats", "jaeger", "engine", "gateway")
LEAST_SPANS = 4


class BrokenError(Exception):
    """The stack is not as promised; the message says what."""


class Daemon:
    """A dockerd of our own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{folder}/docker.sock"

    def start(self) -> None:
        folder = self._folder
        options = [f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/docker.pid"]
        options += [f"--host={self.host}", "--bridge=none", "--iptables=false", "--ip-masq=false"]
        with (folder / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(["dockerd", *options], stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "-H", self.host, "version"], capture_output=True, check=False).returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BrokenError("dockerd did not start: " + (folder / "dockerd.log").read_text()[-1500:])
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Stack:
    """The compose project, on free ports and under a name of its own."""

    def __init__(self, host: str) -> None:
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.variables = {
            **os.environ,
            "DOCKER_HOST": host,
            # The builder that is part of the daemon: no plugin is needed.
            "DOCKER_BUILDKIT": "0",
            "SEMKV_PROJECT": f"semkv-try-{os.getpid()}",
            **{f"SEMKV_{name}_PORT": str(port) for name, port in self.ports.items()},
        }
        for name in ("SEMKV_NATS_URL", "SEMKV_REPLICAS", "SEMKV_TENANT", "NATS_IMAGE", "JAEGER_IMAGE"):
            self.variables.pop(name, None)

    def build(self) -> None:
        """Base images by pulling, else stand-ins; then ours."""
        pulled = all(
            self._quiet("docker", "pull", "-q", image)
            for image in ("python:3.11-slim-bookworm", "nats:2.15-alpine", "jaegertracing/jaeger:2.11.0")
        )
        arguments: list[str] = []
        if not pulled:
            say("base images cannot be pulled: making stand-ins")
            self.run("docker/standins/make.sh", output=False)
            arguments = ["--build-arg", "BUILD_BASE=semkv/build-base"]
        for target in ("agent", "engine"):
            say(f"building semkv/{target}:dev")
            tag = ["--target", target, "-t", f"semkv/{target}:dev"]
            self.run(
                *("docker", "build", "--network", "host", "-f", "docker/Dockerfile"),
                *(*arguments, *tag, "."),
                output=False,
            )
        if not pulled:
            self.run("docker/standins/make.sh", "jaeger", output=False)

    def up(self) -> None:
        say("bringing the stack up")
        self.compose("up", "-d", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "400", *SERVICES)

    def converse(self) -> dict[str, Any]:
        """Run the agent; its last line is JSON."""
        text = self.compose("run", "--rm", "--no-deps", "--pull", "never", "-T", "agent")
        print(text.rstrip())
        answer: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
        return answer

    def down(self) -> None:
        self.compose("down", "-v", "--remove-orphans", "--timeout", "20", check=False)

    def compose(self, *arguments: str, check: bool = True) -> str:
        return self.run(*COMPOSE, *arguments, check=check)

    def run(self, *command: str, check: bool = True, output: bool = True) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.variables, capture_output=True, text=True, check=False)
        if done.returncode and check:
            logs = ""
            if command[: len(COMPOSE)] == tuple(COMPOSE):
                logs = subprocess.run(
                    [*COMPOSE, "logs", "--no-color", "--tail", "40"],
                    cwd=ROOT, env=self.variables, capture_output=True, text=True, check=False,
                ).stdout  # fmt: skip
            raise BrokenError(f"{' '.join(command[-8:])} ended with {done.returncode}:\n"
                              f"{logs[-6000:]}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")  # fmt: skip
        return done.stdout if output else ""

    def get(self, service: str, path: str, headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports[service]}{path}", headers=dict(headers or {}))
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body.decode()

    def _quiet(self, *command: str) -> bool:
        return subprocess.run(command, env=self.variables, capture_output=True, check=False).returncode == 0


def check(stack: Stack) -> None:
    """The conversation, its trace in Jaeger, the gateway, and that nothing runs as root."""
    told = stack.converse()
    claim(told["prefetch"] == "succeeded" and told["chunks"] > 0, f"the prefetch succeeded: {told}")
    claim(told["hit_tokens"] > 0, f"the turn after it hit {told['hit_tokens']} tokens")
    claim(bool(told["trace_id"]), f"the result names its trace: {told['trace_id']}")
    services, spans = trace_of(stack, told["trace_id"])
    claim(len(spans) >= LEAST_SPANS and len(services) > 1, f"Jaeger has it: {len(spans)} spans of {sorted(services)}")
    claim(any("disk" in name for name in spans), "one span is the load from the disk")
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    ranks = stack.get("GATEWAY", "/memory/engines", bearer)["engines"]
    claim(len(ranks) == 1 and ranks[0]["instance"] == "engine", f"the gateway sees {len(ranks)} rank")
    try:
        stack.get("GATEWAY", "/memory/engines")
        raise BrokenError("the gateway answered without a token")
    except urllib.error.HTTPError as error:
        claim(error.code == 401, "the gateway refuses who shows no token")
    for service in ("engine", "gateway"):
        user = stack.compose("exec", "-T", service, "id", "-u").strip()
        claim(user == "10001", f"{service} runs as user {user}")


def trace_of(stack: Stack, trace_id: str) -> tuple[set[str], list[str]]:
    """Services and span names of a trace, once both sides have exported theirs (they do so in batches)."""
    services: set[str] = set()
    names: list[str] = []
    for _ in range(60):
        try:
            found = stack.get("JAEGER", f"/api/v3/traces/{trace_id}").get("result", {}).get("resourceSpans", [])
        except urllib.error.HTTPError:
            found = []
        services = {
            entry["value"].get("stringValue", "")
            for resource in found
            for entry in resource["resource"]["attributes"]
            if entry["key"] == "service.name"
        }
        names = [span["name"] for resource in found for scope in resource["scopeSpans"] for span in scope["spans"]]
        if len(names) >= LEAST_SPANS and len(services) > 1:
            break
        time.sleep(0.5)
    return services, names


def claim(holds: bool, text: str) -> None:
    print(f"  {'✓' if holds else '✗'} {text}", flush=True)
    if not holds:
        raise BrokenError(text)


def say(text: str) -> None:
    print(f"  {text} …", flush=True)


def free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def missing() -> list[str]:
    """What this machine lacks, with the way out."""
    lines = [
        f"{name} is missing: apt-get install {package}"
        for name, package in (("dockerd", "docker.io"), ("docker", "docker.io"), ("iptables", "iptables"),
                              ("debootstrap", "debootstrap"))
        if shutil.which(name) is None
    ]  # fmt: skip
    if os.geteuid() != 0:
        lines.append("a Docker daemon of our own needs root; or give --docker-host URL")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docker-host", help="a running daemon to use, with its images as they are")
    chosen = parser.parse_args().docker_host
    if not chosen and (lines := missing()):
        print("\n".join(lines), file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="semkv-docker-"))
    daemon = Daemon(folder)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if not chosen:
            daemon.start()
        stack = Stack(chosen or daemon.host)
        try:
            if not chosen:
                stack.build()
            stack.up()
            check(stack)
        finally:
            stack.down()
        left = stack.run("docker", "ps", "-aq", "--filter", f"name={stack.variables['SEMKV_PROJECT']}").split()
        claim(not left, "nothing of the stack is left")
    except BrokenError as error:
        print(f"the stack is not as promised: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
