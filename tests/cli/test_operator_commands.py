# SPDX-License-Identifier: Apache-2.0
"""top, schema and trace --jaeger, against a real nats-server and ranks on a stand-in storage."""

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
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import rank_of
from tests.consumers.rank.stand_in import StandInStorage

__all__ = ["rank_of"]

ROOT = Path(__file__).resolve().parents[2]


def lines(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def run(*arguments: str, code: int = 0, env: dict[str, str] | None = None) -> str:
    done = CliRunner().invoke(app, list(arguments), env=env)
    assert done.exit_code == code, done.output
    return done.stdout


def test_top_shows_ranks_and_tiers(nats_server: EmbeddedServer, rank_of: Callable[..., RankWorker]) -> None:
    rank_of(StandInStorage(disk={1, 2}))
    (picture,) = lines(run("top", "--nats-url", nats_server.url, "--json", "-n", "1"))
    assert [(row["instance"], row["rank"]) for row in picture["engines"]] == [("e0", 0)]  # type: ignore[index,attr-defined]
    assert "e0.0" in run("top", "--nats-url", nats_server.url, "-n", "1")


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
    assert "publish" in run("trace", trace_id, env={"SEMKV_JAEGER_URL": query})
