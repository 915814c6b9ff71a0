# SPDX-License-Identifier: Apache-2.0
"""The gateway against its own OpenAPI page: made-up requests, good and bad, get answers that the page allows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from semkv.consumers.gateway.app import create_app
from semkv.consumers.gateway.main import server
from semkv.consumers.gateway.settings import GatewaySettings
from semkv.consumers.rank import RankWorker
from tests.consumers.rank.stand_in import StandInStorage

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture
def served(settings: GatewaySettings, rank_of: Callable[..., RankWorker]) -> Iterator[str]:
    """A gateway with an engine behind it, on a thread of its own: schemathesis calls it over HTTP."""
    rank_of(StandInStorage(disk=set(range(1, 100))))
    uv = server(replace(settings, port=0, wait_limit_s=1.0))
    thread = threading.Thread(target=lambda: asyncio.run(uv.serve()))
    thread.start()
    while not uv.started:
        assert thread.is_alive()
        thread.join(0.01)
    yield f"http://127.0.0.1:{uv.servers[0].sockets[0].getsockname()[1]}"
    uv.should_exit = True
    thread.join()


def operations() -> list[str]:
    paths = create_app(GatewaySettings()).openapi()["paths"]
    # Event streams do not end; they have tests of their own.
    return [f"{method.upper()} {path}" for path, ops in paths.items() for method in ops if path != "/memory/events"]


def test_the_page_describes_every_route() -> None:
    schema = create_app(GatewaySettings()).openapi()
    assert set(schema["paths"]) == {
        "/memory/prefetch", "/memory/evict", "/memory/retain", "/memory/release", "/memory/locate",
        "/memory/commands/{command_id}", "/memory/engines", "/memory/events", "/memory/traces/{trace_id}", "/healthz",
        "/metrics",
    }  # fmt: skip
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description") or operation.get("summary"), (method, path)


def test_it_keeps_to_its_own_page(served: str) -> None:
    schema = schemathesis.openapi.from_url(f"{served}/openapi.json").exclude(path="/memory/events")
    tried: dict[str, set[int]] = {}

    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in schemathesis.GenerationMode:
            strategy = operation.as_strategy(generation_mode=mode)
            # A route without parameters cannot be called wrongly.
            with contextlib.suppress(Unsatisfiable):
                _try(strategy, tried)
    assert set(tried) == set(operations())
    for path in ("prefetch", "evict", "retain", "locate"):
        assert {200, 400} <= tried[f"POST /memory/{path}"], tried
    print({name: sorted(codes) for name, codes in tried.items()})


def _try(strategy: st.SearchStrategy, tried: dict[str, set[int]]) -> None:
    @settings(max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(case=strategy)
    def one(case: object) -> None:
        response = case.call()  # type: ignore[attr-defined]
        name = f"{case.operation.method.upper()} {case.operation.path}"  # type: ignore[attr-defined]
        tried.setdefault(name, set()).add(response.status_code)
        assert response.status_code != 500, response.text
        # 502, 503 and 504 are answers of a gateway, and are on the page; 500 never is.
        case.validate_response(  # type: ignore[attr-defined]
            response, excluded_checks=[schemathesis.checks.not_a_server_error]
        )

    one()
