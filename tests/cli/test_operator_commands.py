# SPDX-License-Identifier: Apache-2.0
"""doctor, top, auth, schema and trace --jaeger, against a real nats-server and ranks on a stand-in storage."""

from __future__ import annotations

import importlib.util
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from typer.testing import CliRunner

from semkv.bus.embedded import EmbeddedServer
from semkv.cli.app import app
from semkv.cli.doctor import checks
from semkv.cli.doctor.checks import Level
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import rank_of
from tests.consumers.rank.stand_in import StandInStorage

__all__ = ["rank_of"]

ROOT = Path(__file__).resolve().parents[2]


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == code, done.output
    return done.stdout


def test_doctor_finds_nothing_wrong_with_a_live_rank(
    nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker]
) -> None:
    rank_of(StandInStorage(disk={1, 2}))
    found = lines(run("doctor", "--nats-url", nats_server.url, "--json"))
    assert not [row for row in found if row["level"] == "bad"]
    texts = " ".join(str(row["text"]) for row in found)
    for said in ("nats-server 2.", "SEMKV_COMMANDS", "SEMKV_EVENTS", "SEMKV_RESULTS", "e0: 1 storage ranks of 1"):
        assert said in texts
    assert next(row for row in found if row["topic"] == "clock")["level"] == "ok"


def test_doctor_names_each_fault_with_its_fix(
    nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_of(StandInStorage(), rank=0, world_size=3)
    rank_of(StandInStorage(), rank=1, world_size=3, probe=43)
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = lines(run("doctor", "--nats-url", nats_server.url, "--json", code=1))
    bad = {str(row["text"]): str(row["fix"]) for row in found if row["level"] == "bad"}
    assert bad["VLLM_PLUGINS='other' leaves semkv's plugin out"].startswith("VLLM_PLUGINS=other,semkv")
    assert "e0: 2 of 3 ranks answer" in bad
    assert "PYTHONHASHSEED" in bad["e0: its ranks' hashes differ in probe"]


def test_doctor_says_when_nobody_is_there(nats_server: EmbeddedServer) -> None:
    assert "no engine is live" in run("doctor", "--nats-url", nats_server.url, code=1)
    assert "nats-server -js" in run("doctor", "--nats-url", "nats://127.0.0.1:1", code=3)


def test_a_seed_that_is_no_number_is_warned_of() -> None:
    found = checks.environment({"SEMKV_NATS_URL": "nats://x", "PYTHONHASHSEED": "random"})
    assert any(row.level is Level.WARN and "random" in row.text for row in found)
    assert not any(
        row.level is Level.WARN for row in checks.environment({"SEMKV_NATS_URL": "x", "PYTHONHASHSEED": "0"})
    )


def test_top_shows_ranks_and_tiers(nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker]) -> None:
    rank_of(StandInStorage(disk={1, 2}))
    (picture,) = lines(run("top", "--nats-url", nats_server.url, "--json", "-n", "1"))
    assert [(row["instance"], row["rank"]) for row in picture["engines"]] == [("e0", 0)]  # type: ignore[index,attr-defined]
    assert "e0.0" in run("top", "--nats-url", nats_server.url, "-n", "1")


def test_auth_writes_once_and_never_over(tmp_path: Path) -> None:
    made = tmp_path / "auth"
    (files,) = lines(run("auth", "-d", str(made), "billing", "--url", "nats://127.0.0.1:4222", "--json"))
    assert set(files["env"]) == {"engine", "billing-manager", "billing-agent", "billing-observer"}  # type: ignore[arg-type]
    assert made.stat().st_mode & 0o077 == 0
    assert "not empty" in CliRunner().invoke(app, ["auth", "-d", str(made), "billing"]).output


def test_schema_prints_what_is_committed(tmp_path: Path) -> None:
    committed = json.loads((ROOT / "docs/schema/prefetch.v1.json").read_text())
    assert json.loads(run("schema", "prefetch.v1")) == committed
    run("schema", "-d", str(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "prefetch.v1.json").read_text()) == committed
    run("schema", "nonsense", code=2)


@pytest.fixture
def jaeger() -> Iterator[tuple[str, str]]:
    """The stand-in for Jaeger: its OTLP and its query address."""
    spec = importlib.util.spec_from_file_location("standin_jaeger", ROOT / "docker/standins/jaeger.py")
    assert spec and spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    servers = module.serve("127.0.0.1", 0, 0)
    otlp, query = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    yield otlp, query
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_trace_is_read_from_the_query_api(jaeger: tuple[str, str]) -> None:
    otlp, query = jaeger
    provider = TracerProvider(resource=Resource({"service.name": "agent"}))
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=f"{otlp}/v1/traces")))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("publish") as parent, tracer.start_as_current_span("process"):
        trace_id = f"{parent.get_span_context().trace_id:032x}"
    provider.shutdown()
    found = lines(run("trace", "--jaeger", query, trace_id, "--json"))
    assert [(row["name"], row["service"]) for row in found] == [("publish", "agent"), ("process", "agent")]
    assert found[1]["parent_id"] == found[0]["span_id"]
    assert "publish" in run("trace", "--jaeger", query, trace_id)
    with urllib.request.urlopen(f"{query}/api/traces/{trace_id}") as answer:
        assert len(json.load(answer)["data"][0]["spans"]) == 2
    assert "has no trace" in CliRunner().invoke(app, ["trace", "--jaeger", query, "ff" * 16]).output
    assert "32 hex digits" in CliRunner().invoke(app, ["trace", "--jaeger", query, "zz"]).output


@pytest.mark.parametrize(
    "command", ["doctor", "top", "auth", "schema", "engine", "gateway", "trace", "why", "record", "replay"]
)
def test_every_command_has_an_example(command: str) -> None:
    if command in {"why", "record", "replay"} and command not in {c.callback.__name__ for c in app.registered_commands}:
        pytest.skip(f"semkv {command} is not there yet")
    assert "Example" in run(command, "--help")
