# SPDX-License-Identifier: Apache-2.0
"""The compose files without an engine: valid in every profile, loopback only, hardened, and in step with the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semkv.bus.embedded import find_binary

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = Path(sys.executable).parent / "docker-compose"
pytestmark = pytest.mark.skipif(not COMPOSE.exists(), reason="docker-compose is not installed here")
ALL = ("--profile", "engine", "--profile", "agent", "--profile", "cluster")


def config(*arguments: str, **variables: str) -> dict[str, Any]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SEMKV_", "COMPOSE_"))}
    done = subprocess.run([COMPOSE, *arguments, "config", "--format", "json"], cwd=ROOT, env={**kept, **variables},
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize(
    ("profiles", "services"),
    [
        ((), {"accounts", "nats", "jaeger"}),
        (("--profile", "engine"), {"accounts", "nats", "jaeger", "engine", "gateway"}),
        (("--profile", "agent"), {"accounts", "nats", "jaeger", "engine", "gateway", "agent"}),
        (("--profile", "cluster"), {"accounts", "nats", "nats-2", "nats-3", "jaeger"}),
        (ALL, {"accounts", "nats", "nats-2", "nats-3", "jaeger", "engine", "gateway", "agent"}),
    ],
)
def test_profiles(profiles: tuple[str, ...], services: set[str]) -> None:
    assert set(config(*profiles)["services"]) == services


@pytest.mark.parametrize(("replicas", "names"), [(1, ["nats"]), (3, ["nats", "nats-2", "nats-3"])])
def test_as_many_servers_as_replicas_and_each_route_is_one(replicas: int, names: list[str], tmp_path: Path) -> None:
    services = config(*ALL, SEMKV_REPLICAS=str(replicas))["services"]
    for name in names:
        (mount,) = (v for v in services[name]["volumes"] if v["target"] == "/etc/nats/semkv.conf")
        assert mount["source"] == str(ROOT / f"docker/nats-{replicas}.conf") and mount["read_only"]
        assert not mount["bind"].get("create_host_path"), "a number without a file must not make a folder"
    text = Path(mount["source"]).read_text()
    assert re.findall(r"nats://([\w-]+):6222", text) == (names if replicas > 1 else [])
    for name in names:  # the real server reads it
        (tmp_path / "accounts").mkdir(exist_ok=True)
        (tmp_path / "accounts/accounts.conf").touch()
        (tmp_path / "semkv.conf").write_text(text)
        done = subprocess.run(
            [find_binary(), "-t", "-c", tmp_path / "semkv.conf"], env=services[name]["environment"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_every_port_is_on_loopback_and_every_service_is_bounded() -> None:
    for name, service in config(*ALL)["services"].items():
        assert int(service["mem_limit"]) > 0, name
        for port in service.get("ports", []):
            assert port["host_ip"] == "127.0.0.1", f"{name}: {port}"
        assert service["cap_drop"] == ["ALL"], name
        assert service["pids_limit"] > 0, name
        assert name == "engine" or service["cpus"] > 0, name  # the engine may have all, or SEMKV_ENGINE_CPUS
        if name not in {"agent", "accounts"}:
            assert service["healthcheck"]["test"], name


def test_what_is_kept_is_kept_in_volumes() -> None:
    services = config(*ALL)["services"]
    kept = {name: {v["target"]: v["type"] for v in service.get("volumes", [])} for name, service in services.items()}
    assert kept["engine"]["/var/lib/semkv"] == "volume", "the SSD tier"
    assert "--folder" in (command := default_command("engine")) and "/var/lib/semkv" in command
    for name in ("nats", "nats-2", "nats-3"):
        assert kept[name]["/data"] == "volume", name


def default_command(target: str) -> list[str]:
    stage = (ROOT / "docker/Dockerfile").read_text().partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
    found: list[str] = json.loads(re.findall(r"^CMD (.*)$", stage, re.M)[-1])
    return found


def test_ascend_puts_its_devices_into_the_engine() -> None:
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.ascend.yml", "--profile", "engine")
    engine = config(*files, ASCEND_IMAGE="ascend:test", MODEL="/models/m")["services"]["engine"]
    assert {device["source"] for device in engine["devices"]} == {
        "/dev/davinci0", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc",
    }  # fmt: skip
    assert engine["image"] == "ascend:test"
    assert engine["entrypoint"] == ["vllm", "serve", "/models/m"]
    assert engine["environment"]["SEMKV_NATS_URL"] == "nats://nats:4222"


def test_ascend_without_an_image_says_what_is_needed() -> None:
    command = [COMPOSE, "-f", "docker-compose.yml", "-f", "docker-compose.ascend.yml", "config", "-q"]
    kept = {key: value for key, value in os.environ.items() if key != "ASCEND_IMAGE"}
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ASCEND_IMAGE" in done.stderr or "an image with" in done.stderr


def test_the_image_and_the_environment_have_the_same_versions() -> None:
    dockerfile = (ROOT / "docker/Dockerfile").read_text()
    environment = (ROOT / "tools/environment.py").read_text()
    for pattern in (r"uv==[\d.]+", r"lmcache==[\d.]+"):
        assert set(re.findall(pattern, dockerfile)) <= set(re.findall(pattern, environment))
    assert re.search(r"0\.32\.0\+cpu", environment)
    assert "vllm-0.32.0+cpu.dist-info" in dockerfile


def test_nothing_runs_as_root() -> None:
    users = re.findall(r"^USER (\S+)", (ROOT / "docker/Dockerfile").read_text(), re.M)
    assert users[-1] == "10001:10001"
