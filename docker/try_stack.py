# SPDX-License-Identifier: Apache-2.0
"""Brings the development stack up in real containers, holds the conversation, reads its trace back, takes it down.

`make test-compose`. It runs a Docker daemon of its own (own data, socket and pid file, no default bridge, no firewall
rules) under a temporary folder, with the base images pulled, or made by `standins/make.sh` where they cannot be. First
the stack with one NATS server, then with three. Whatever happens, containers, networks, volumes, mounts, the daemon and
the folder are gone afterwards; `.cache/standins` stays. Needs root and Debian's docker.io, tini, iptables and
debootstrap. Exit code 0 done, 1 something was not as promised, 2 something is missing here. `--docker-host URL` uses a
running daemon of yours instead, and its images as they are. `--keep-images` keeps the daemon's images in
`.cache/docker` (about 5 GB), so that the next run builds only what has changed; `make clean` removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = str(ROOT / ".venv/bin/docker-compose")
TOKEN = "development-only-token"
PORTS = ("NATS", "NATS_MONITOR", "JAEGER", "OTLP", "ENGINE", "GATEWAY")
ONE = {"nats", "jaeger", "engine", "gateway"}
NODES = ("nats", "nats-2", "nats-3")
STREAMS = {"SEMKV_COMMANDS", "KV_semkv_engines", "SEMKV_EVENTS", "SEMKV_RESULTS"}
LEAST_SPANS = 4
KEPT = ROOT / ".cache/docker"
BEGAN = time.monotonic()


class BrokenError(Exception):
    """The stack is not as promised; the message says what."""


class Daemon:
    """A dockerd of our own."""

    def __init__(self, folder: Path, data: Path | None = None) -> None:
        """Its images are in `data`, which is kept, or go with the folder."""
        self._folder = folder
        self._data = data or folder / "data"
        self._lock: TextIO | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{folder}/docker.sock"

    def start(self) -> None:
        folder = self._folder
        self._data.mkdir(parents=True, exist_ok=True)
        self._lock = (self._data.parent / f"{self._data.name}.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BrokenError(
                f"{self._data} is in use by another run: wait for it, or leave --keep-images out"
            ) from None
        options = [f"--data-root={self._data}", f"--exec-root={folder}/exec", f"--pidfile={folder}/docker.pid"]
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
        for mount in (*mounts_below(self._folder), *mounts_below(self._data)):  # it leaves network namespaces mounted
            subprocess.run(["umount", mount], capture_output=True, check=False)
        if self._lock is not None:
            self._lock.close()


class Stack:
    """The compose project, on free ports and under a name of its own."""

    def __init__(self, host: str) -> None:
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.project = f"semkv-try-{os.getpid()}"
        self.profiles: tuple[str, ...] = ()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SEMKV_", "OTEL_"))}
        for name in ("NATS_IMAGE", "JAEGER_IMAGE", "COMPOSE_FILE", "COMPOSE_PROFILES", "COMPOSE_PROJECT_NAME"):
            kept.pop(name, None)
        self.variables = {
            **kept,
            "DOCKER_HOST": host,
            # The builder that is part of the daemon: no plugin is needed.
            "DOCKER_BUILDKIT": "0",
            "SEMKV_PROJECT": self.project,
            **{f"SEMKV_{name}_PORT": str(port) for name, port in self.ports.items()},
        }

    def tidy(self) -> None:
        """Leave out what a run that was killed has left in kept images, and images of days ago."""
        for kind in (("container",), ("volume",), ("volume", "-a"), ("network",), ("image", "--filter", "until=72h")):
            self.run("docker", kind[0], "prune", "-f", *kind[1:], check=False)

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

    def up(self, *profiles: str) -> dict[str, str]:
        """Start all of these profiles' services and wait; returns the health of each, or its state."""
        self.profiles = profiles
        say(f"bringing up profiles {', '.join(profiles)}")
        self.compose("up", "-d", "--no-build", "--pull", "never", "--wait", "--wait-timeout", "400")
        rows = [json.loads(line) for line in self.compose("ps", "--format", "json").splitlines()]
        return {row["Service"]: row["Health"] or row["State"] for row in rows}

    def agent(self, *command: str) -> str:
        """Run the agent's container, by default with its conversation."""
        return self.run(COMPOSE, "--profile", "agent", "run", "--rm", "-T", "agent", *command)

    def down(self) -> None:
        self.run(
            *(COMPOSE, "--profile", "*", "down", "-v", "--remove-orphans", "--timeout", "20"),
            check=False,
        )

    def left(self) -> list[str]:
        """What the daemon still has of the project."""
        ours = ("-q", "--filter", f"label=com.docker.compose.project={self.project}")
        kinds = (("docker", "ps", "-a"), ("docker", "network", "ls"), ("docker", "volume", "ls"))
        return [line for kind in kinds for line in self.run(*kind, *ours).split()]

    def compose(self, *arguments: str) -> str:
        return self.run(COMPOSE, *(part for name in self.profiles for part in ("--profile", name)), *arguments)

    def run(self, *command: str, check: bool = True, output: bool = True) -> str:
        done = subprocess.run(command, cwd=ROOT, env=self.variables, capture_output=True, text=True, check=False)
        if done.returncode and check:
            logs = ""
            if command[0] == COMPOSE:
                logs = subprocess.run(
                    [COMPOSE, "--profile", "*", "logs", "--no-color", "--tail", "40"],
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


def converse(stack: Stack) -> str:
    """The conversation and what it claims; returns its trace's id."""
    text = stack.agent()
    print(text.rstrip())
    told = json.loads(text.strip().splitlines()[-1])
    claim(told["prefetch"] == "succeeded" and told["chunks"] > 0, f"the prefetch succeeded: {told}")
    claim(told["hit_tokens"] > 0, f"the turn after it hit {told['hit_tokens']} tokens")
    claim(bool(told["trace_id"]), f"the result names its trace: {told['trace_id']}")
    return str(told["trace_id"])


def check_one(stack: Stack) -> None:
    """The stack with one NATS server: conversation, trace in Jaeger, gateway, accounts, users."""
    health = stack.up("engine")
    claim(health == dict.fromkeys(ONE, "healthy"), f"healthy: {', '.join(sorted(health))}")
    claim(refuses_strangers(stack.ports["NATS"]), "NATS lets in nobody without a key")
    trace_id = converse(stack)
    services, spans = trace_of(stack, trace_id)
    claim(len(spans) >= LEAST_SPANS and len(services) > 1, f"Jaeger has it: {len(spans)} spans of {sorted(services)}")
    claim(any("disk" in name for name in spans), "one span is the load from the disk")
    told = [json.loads(line) for line in stack.agent("semkv", "doctor", "--json").splitlines()]
    claim(
        not [line for line in told if line["level"] == "bad"],
        f"`semkv doctor` finds nothing wrong in {len(told)} things",
    )
    shown = stack.agent("semkv", "trace", trace_id)
    claim("kv.tier.load" in shown, "`semkv trace` shows it:")
    print(shown.rstrip())
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    ranks = stack.get("GATEWAY", "/memory/engines", bearer)["engines"]
    claim(len(ranks) == 1 and ranks[0]["instance"] == "engine", f"the gateway sees {len(ranks)} rank")
    shown_there = stack.get("GATEWAY", f"/memory/traces/{trace_id}", bearer)
    claim(trace_id in json.dumps(shown_there), "the gateway's page can show the trace")
    claim("semkv" in stack.get("GATEWAY", "/ui/"), "and the page is there")
    try:
        stack.get("GATEWAY", "/memory/engines")
        raise BrokenError("the gateway answered without a token")
    except urllib.error.HTTPError as error:
        claim(error.code == 401, "the gateway refuses who shows no token")
    for service in ("engine", "gateway"):
        user = stack.compose("exec", "-T", service, "id", "-u").strip()
        claim(user == "10001", f"{service} runs as user {user}")


def check_three(stack: Stack) -> None:
    """The stack with three NATS servers: the same conversation, and every stream on all of them."""
    stack.variables["SEMKV_NATS_URL"] = ",".join(f"nats://{node}:4222" for node in NODES)
    stack.variables["SEMKV_REPLICAS"] = str(len(NODES))
    health = stack.up("cluster", "engine")
    claim(health == dict.fromkeys(ONE | set(NODES), "healthy"), f"healthy: {', '.join(sorted(health))}")
    converse(stack)
    for node in NODES:
        where = "http://127.0.0.1:8222/jsz?accounts=true&streams=true&config=true"
        told = json.loads(stack.compose("exec", "-T", node, "wget", "-q", "-O", "-", where))
        streams = {
            stream["name"]: stream["config"]["num_replicas"]
            for account in told.get("account_details", [])
            for stream in account.get("stream_detail", [])
        }
        claim(streams == dict.fromkeys(STREAMS, len(NODES)), f"{node} has a replica of {', '.join(sorted(streams))}")


def refuses_strangers(port: int) -> bool:
    """Whether the server asks for a key, and ends who shows none."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as plain, plain.makefile("rwb") as stream:
        told = json.loads(stream.readline().partition(b" ")[2])
        stream.write(b'CONNECT {"verbose":false}\r\nPING\r\n')
        stream.flush()
        return bool(told.get("auth_required")) and b"Authorization" in stream.readline()


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
    print(f"  {text} …  ({time.monotonic() - BEGAN:.0f} s)", flush=True)


def free_ports(count: int) -> list[int]:
    listeners = [socket.socket() for _ in range(count)]
    try:
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def traces_of(folder: Path) -> list[str]:
    """What a daemon in this folder has on this machine: processes, mounts, and bridges of whichever daemon."""
    found = mounts_below(folder) + mounts_below(KEPT)
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(f"process {entry.name}")
    return found + [entry.name for entry in Path("/sys/class/net").glob("br-*")]


def mounts_below(folder: Path) -> list[str]:
    """The innermost first."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [mount for mount in reversed(mounts) if mount.startswith(f"{folder}/")]


def missing() -> list[str]:
    """What this machine lacks, with the way out."""
    needed = {
        "dockerd": "docker.io", "docker": "docker.io", "docker-init": "tini", "iptables": "iptables",
        "debootstrap": "debootstrap",
    }  # fmt: skip
    lines = [
        f"{name} is missing: apt-get install {package}"
        for name, package in needed.items()
        if shutil.which(name) is None
    ]
    if os.geteuid() != 0:
        lines.append("a Docker daemon of our own needs root; or give --docker-host URL")
    return lines


def try_stack(stack: Stack, checks: Iterable[Callable[[Stack], None]]) -> None:
    """Each check on a stack of its own, taken down before the next."""
    for check in checks:
        try:
            check(stack)
        finally:
            stack.down()
        left = stack.left()
        claim(not left, f"containers, networks and volumes are gone {' '.join(left)}".rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docker-host", help="a running daemon to use, with its images as they are")
    parser.add_argument("--only", choices=("one", "three"), help="with one NATS server, or with three, and not both")
    parser.add_argument("--keep-images", action="store_true", help="for the next run, in .cache/docker")
    chosen = parser.parse_args()
    if not chosen.docker_host and (lines := missing()):
        print("\n".join(lines), file=sys.stderr)
        return 2
    checks = {"one": check_one, "three": check_three}
    wanted = [checks[chosen.only]] if chosen.only else list(checks.values())
    folder = Path(tempfile.mkdtemp(prefix="semkv-docker-"))
    before = traces_of(folder)
    daemon = Daemon(folder, KEPT if chosen.keep_images else None)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        try:
            if not chosen.docker_host:
                daemon.start()
            stack = Stack(chosen.docker_host or daemon.host)
            if not chosen.docker_host:
                stack.tidy()
                stack.build()
            try_stack(stack, wanted)
        finally:
            daemon.stop()
            # Half a million files in the images: `rm` takes a quarter of the time that Python does.
            subprocess.run(["rm", "-rf", "--one-file-system", str(folder)], capture_output=True, check=False)
        if not chosen.docker_host:
            left = [name for name in traces_of(folder) if name not in before]
            claim(not left and not folder.exists(), f"the daemon left nothing {' '.join(left)}".rstrip())
    except BrokenError as error:
        print(f"the stack is not as promised: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
