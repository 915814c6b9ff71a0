# SPDX-License-Identifier: Apache-2.0
"""`semkv demo --engine-url`: what is refused before anything is asked, and what is said when nobody is there."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from semkv.cli.demo.stack import attach
from semkv.cli.devengine.server import EngineStartError


class Models(BaseHTTPRequestHandler):
    """A stand-in for an engine's `/v1/models`, the first thing that is asked."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": self.server.model}]}).encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """Two engines, which serve model a and model b."""
    servers = []
    for model in "ab":
        server = ThreadingHTTPServer(("127.0.0.1", 0), Models)
        server.model = model  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
    yield [f"http://127.0.0.1:{server.server_address[1]}" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def test_the_served_model_is_asked_for(engines: list[str]) -> None:
    endpoints = attach(engines[0], None, "nats://127.0.0.1:4222")
    assert (endpoints.served, endpoints.own, endpoints.plain_engine) == ("a", False, None)


def test_engines_of_two_models_are_not_compared(engines: list[str]) -> None:
    with pytest.raises(EngineStartError, match=r"serves 'b'.*'a'"):
        attach(engines[0], engines[1], "nats://127.0.0.1:4222")


def test_options_that_need_an_engine_say_so(semkv) -> None:
    assert "--engine-url" in semkv("demo", "--nats-url", "nats://127.0.0.1:1", code=2).stderr
    assert "--engine-url" in semkv("demo", "--plain-engine-url", "http://127.0.0.1:1", code=2).stderr


def test_an_engine_that_is_not_there_is_named(semkv) -> None:
    assert "no vLLM answers at http://127.0.0.1:1" in semkv("demo", "--engine-url", "http://127.0.0.1:1", code=3).stderr


def test_without_nats_the_demo_ends_in_one_line(semkv, engines: list[str]) -> None:
    told = semkv("demo", "--engine-url", engines[0], "--nats-url", "nats://127.0.0.1:1", code=3)
    assert "127.0.0.1:1" in told.stderr
