# SPDX-License-Identifier: Apache-2.0
"""When the routes go onto LMCache's own server, and when not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="needs LMCache and torch in the environment")

from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.internal_api_server import api_server

from semkv.engine_hooks import settings
from semkv.engine_hooks.direct import serve
from semkv.engine_hooks.direct.routes import Ranks


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LMCache's app as it was, and no rank of another test."""
    before = list(api_server.app.router.routes)
    monkeypatch.setattr(serve, "_ranks", Ranks())
    yield
    api_server.app.router.routes[:] = before
    if hasattr(api_server.app.state, "semkv_direct"):
        del api_server.app.state.semkv_direct


def config(**changes: Any) -> Any:
    chosen = {"internal_api_server_enabled": True, "internal_api_server_host": "127.0.0.1"}
    return LMCacheEngineConfig.from_defaults(**{**chosen, **changes})


def served() -> list[str]:
    return [route.path for route in api_server.app.router.routes if getattr(route, "path", "").startswith("/memory/")]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"internal_api_server_enabled": False}, "internal_api_server_enabled is false"),
        ({"internal_api_server_host": "0.0.0.0"}, "internal_api_server_host is 0.0.0.0"),
        ({"internal_api_server_host": "some.host"}, "internal_api_server_host is some.host"),
        ({"internal_api_server_socket_path_prefix": "/tmp/x"}, "internal_api_server_socket_path_prefix"),
    ],
)
@pytest.mark.usefixtures("ours")
def test_what_stands_in_the_way_is_said_in_one_line(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SEMKV_DIRECT", "1")
    monkeypatch.setattr(logging.getLogger("semkv"), "propagate", True)
    serve.serve_scheduler(config(**changes), 1)
    assert served() == []
    assert [said in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.usefixtures("ours")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_one_app_for_the_process_and_only_when_asked_for(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SEMKV_DIRECT", raising=False)
    monkeypatch.delenv("SEMKV_NATS_URL", raising=False)
    serve.serve_scheduler(config(internal_api_server_host=host), 2)
    serve.serve_rank(config(internal_api_server_host=host), 0, object())  # type: ignore[arg-type]
    assert served() == [] and not serve._ranks.storage and not settings.enabled()
    monkeypatch.setenv("SEMKV_DIRECT", "1")
    assert settings.enabled() and not settings.on_the_bus()
    serve.serve_rank(config(internal_api_server_host=host), 0, object())  # type: ignore[arg-type]
    serve.serve_scheduler(config(internal_api_server_host=host, internal_api_server_port_start=7100), 2)
    assert sorted(served()) == ["/memory/evict", "/memory/prefetch"]
    named = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "[::1]"}[host]
    serve.serve_rank(config(internal_api_server_host=host), 1, None)
    assert (list(serve._ranks.storage), serve._ranks.passive) == ([0], {1})
    serve.forget_rank(0)
    serve.forget_rank(1)
    assert not serve._ranks.storage and not serve._ranks.passive
    assert api_server.app.state.semkv_direct == {0: f"http://{named}:7101", 1: f"http://{named}:7102"}


def test_a_switch_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(settings.SettingError, match="SEMKV_DIRECT='perhaps'"):
        settings.direct({"SEMKV_DIRECT": "perhaps"})
