# SPDX-License-Identifier: Apache-2.0
"""The plugin: what it does in a process, what it leaves alone, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from semkv.engine_hooks import attach, post_import, settings
from semkv.engine_hooks.request_ids import api_id
from semkv.engine_hooks.request_labels import read_labels

CHECK = """
import sys, threading
from semkv.engine_hooks import plugin
from semkv.engine_hooks.post_import import waiting
plugin.register(); plugin.register()
heavy = [name for name in ("torch", "lmcache", "vllm", "zmq", "nats") if name in sys.modules]
print(heavy, threading.active_count(), sorted(waiting()))
"""


def run(url: str | None) -> str:
    environment = {"PATH": "/usr/bin:/bin", **({"SEMKV_NATS_URL": url} if url is not None else {})}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_register_imports_nothing_heavy_and_starts_no_thread() -> None:
    heavy, threads, waiting = run("nats://127.0.0.1:4222").split(" ", 2)
    assert (heavy, threads) == ("[]", "1")
    assert "kv_connector.factory" in waiting and "output_processor" in waiting


@pytest.mark.parametrize("url", [None, "", "  "])
def test_without_a_url_nothing_is_hooked(url: str | None) -> None:
    assert run(url) == "[] 1 []"


def test_the_entry_point_is_registered() -> None:
    from importlib.metadata import entry_points

    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "semkv"]
    assert found.value == "semkv.engine_hooks.plugin:register"
    assert callable(found.load())


def test_when_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("semkv_t_one", "semkv_t_two"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    seen: list[str] = []
    post_import.when_imported("semkv_t_one", lambda module: seen.append(f"{module.__name__} {module.value}"))
    post_import.when_imported("semkv_t_two", lambda module: 1 / 0)
    assert not seen and set(post_import.waiting()) >= {"semkv_t_one", "semkv_t_two"}
    import semkv_t_one  # type: ignore[import-not-found]
    import semkv_t_two  # type: ignore[import-not-found]

    assert seen == ["semkv_t_one 1"]
    assert semkv_t_two.value == 1, "a hook that fails leaves the module usable"
    assert type(semkv_t_one.__loader__).__name__ == "SourceFileLoader"
    post_import.when_imported("semkv_t_one", lambda module: seen.append("again"))
    assert seen[-1] == "again"
    assert not post_import.waiting() or "semkv_t_one" not in post_import.waiting()
    for name in ("semkv_t_one", "semkv_t_two"):
        sys.modules.pop(name)


def vllm_config(**extra: Any) -> Any:
    transfer = SimpleNamespace(get_from_extra_config=extra.get)
    return SimpleNamespace(kv_transfer_config=transfer)


def connector(name: str, module: str = "m", bases: tuple[type, ...] = ()) -> type:
    return type(name, bases, {"__module__": module})


@pytest.mark.parametrize(
    ("name", "extra", "word"),
    [
        ("MultiConnector", {}, "MultiConnector"),
        ("LMCacheMPConnector", {}, "LMCacheConnectorV1"),
        ("LMCacheConnectorV1", {"use_native": True}, "use_native"),
    ],
)
def test_refused_connectors_are_named(name: str, extra: dict[str, Any], word: str) -> None:
    reason = attach.refusal(vllm_config(**extra), connector(name))
    assert reason is not None and word in reason and "\n" not in reason


def test_what_is_lmcaches_and_what_is_not() -> None:
    assert attach.refusal(vllm_config(), connector("LMCacheConnectorV1")) is None
    assert attach.is_lmcache(connector("LMCacheConnectorV1"))
    assert attach.is_lmcache(connector("Own", bases=(connector("LMCacheConnectorV1Dynamic"),)))
    assert attach.is_lmcache(connector("LMCacheAscendConnectorV1Dynamic", "lmcache_ascend.integration.vllm.x"))
    assert not attach.is_lmcache(connector("NixlConnector"))
    assert attach.refusal(vllm_config(), connector("NixlConnector")) is None


def test_a_refused_connector_is_built_as_vllm_would(caplog: pytest.LogCaptureFixture) -> None:
    factory = SimpleNamespace(get_connector_class=lambda _config: connector("MultiConnector"))
    assert attach.prepare(factory, vllm_config()) is False
    assert len([record for record in caplog.records if "not hooked" in record.getMessage()]) == 1


def test_vllms_own_error_is_not_hidden() -> None:
    def fails(_config: Any) -> Any:
        raise ValueError("no such connector")

    assert attach.prepare(SimpleNamespace(get_connector_class=fails), vllm_config()) is False


@pytest.mark.parametrize(
    ("engine", "answered", "choice"),
    [
        ("chatcmpl-8cd7f79ec88198cd-846809fb", "chatcmpl-8cd7f79ec88198cd", 0),
        ("cmpl-b95e5ab82effa197-0-85c6984a", "cmpl-b95e5ab82effa197", 0),
        ("cmpl-b95e5ab82effa197-3-85c6984a", "cmpl-b95e5ab82effa197", 3),
        ("2_chatcmpl-8cd7f79ec88198cd-846809fb", "chatcmpl-8cd7f79ec88198cd", 2),
        ("2_cmpl-b95e5ab82effa197-0-85c6984a", "cmpl-b95e5ab82effa197", 2),
        ("7-1a2b3c4d", "7", 0),
        ("1_7-1a2b3c4d", "7", 1),
        ("chatcmpl-my-own-id-1_1-0-1a2b3c4d", "chatcmpl-my-own-id-1_1-0", 0),
        ("chatcmpl-" + "a" * 32 + "_4-1a2b3c4d", "chatcmpl-" + "a" * 32, 4),
        ("3_of_my_own-1a2b3c4d", "3_of_my_own", 0),
        ("", "", 0),
    ],
)
def test_api_ids(engine: str, answered: str, choice: int) -> None:
    assert api_id(engine) == (answered, choice)


def test_api_ids_without_vllms_suffix() -> None:
    assert api_id("chatcmpl-0123abcd-0123abcd", suffixed=False).request_id == "chatcmpl-0123abcd-0123abcd"
    assert api_id("cmpl-x-0", suffixed=False) == ("cmpl-x", 0)


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER_TRACE = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"


@pytest.mark.parametrize(
    ("params", "headers", "expected"),
    [
        (None, None, (None, None, None)),
        ({"semkv": {"session": "s", "traceparent": TRACE}}, None, ("s", TRACE, None)),
        ({"semkv": {"session": "s"}}, {"traceparent": TRACE, "tracestate": "a=b"}, ("s", TRACE, "a=b")),
        (
            {"semkv": {"traceparent": TRACE}},
            {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
            (None, TRACE, None),
        ),
        ({"semkv": {"session": "", "traceparent": TRACE + "x"}}, None, (None, None, None)),
        ({"semkv": {"session": "a\nb"}}, None, (None, None, None)),
        ({"semkv": {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"}}, None, (None, None, None)),
        ({"semkv": "text"}, None, (None, None, None)),
        ("text", None, (None, None, None)),
    ],
)
def test_labels(params: Any, headers: Any, expected: tuple[Any, Any, Any]) -> None:
    request = SimpleNamespace(kv_transfer_params=params, trace_headers=headers)
    labels = read_labels(request, trust_tenant=False)
    assert (labels.session, labels.traceparent, labels.tracestate) == expected and labels.tenant is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("SEMKV_HASH_RECORDS", "0"), ("SEMKV_EVENT_RING", "many"), ("SEMKV_RETURN_HASHES", "perhaps")],
)
def test_bad_settings_are_named(name: str, value: str) -> None:
    with pytest.raises(settings.SettingError, match=name):
        settings.HookSettings.from_env({name: value})


def test_settings() -> None:
    assert settings.HookSettings.from_env({}) == settings.HookSettings()
    read = settings.HookSettings.from_env(
        {"SEMKV_HASH_RECORDS": "5", "SEMKV_TRUST_REQUEST_TENANT": "1", "SEMKV_TENANT": "t", "SEMKV_RETURN_HASHES": "0"}
    )
    assert (read.records, read.trust_tenant, read.tenant, read.return_hashes) == (5, True, "t", False)
