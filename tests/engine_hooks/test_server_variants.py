# SPDX-License-Identifier: Apache-2.0
"""Real servers in other configurations: another hash, two ranks, no stable root, other lookup clients, no plugin."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages.finished import Finished
from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.server import VLLMServer
from tests.engine_hooks.capture import Capture
from tests.engine_hooks.test_chain_hash import by_definition
from tests.support.vllm_server import tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
TEXT = "the memory of an agent remembers what was said "


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: LMCache's sockets lie below it, and a socket's path may have 107 characters."""
    return tmp_path_factory.mktemp("v")


@dataclass
class Rig:
    """One server and what it publishes."""

    server: VLLMServer
    seen: Capture

    def known(self, answer: dict[str, Any]) -> Finished:
        """The event of an answer, which says the same as the answer."""
        (event,) = self.seen.finished(answer["id"])
        assert event.hashes_status == "known", event.reason
        assert answer["kv_transfer_params"]["chunk_hashes"] == legacy(event.chunk_hashes)
        return event


def legacy(hashes: Sequence[int]) -> list[str]:
    return [f"{value:x}" for value in hashes]


@contextlib.contextmanager
def serving(folder: Path, nats_url: str, lmcache: dict[str, Any], **options: Any) -> Iterator[VLLMServer]:
    config = LMCacheConfig(disk=folder / "disk", **lmcache)
    server = tiny_server(folder / "engine", nats_url, lmcache=config, **options)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def variant(folder: Path, lmcache: dict[str, Any], **options: Any) -> Iterator[Rig]:
    """A server in this configuration, a NATS server, and a subscriber."""
    with (
        EmbeddedServer(folder / "nats") as nats,
        Capture(nats.url) as seen,
        serving(folder, nats.url, lmcache, **options) as server,
    ):
        yield Rig(server, seen)


def complete(server: VLLMServer, prompt: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0, **options}
    return server.post("/v1/completions", body)


def tokens_of(server: VLLMServer, prompt: str) -> list[int]:
    found: list[int] = server.post("/tokenize", {"model": "tiny", "prompt": prompt})["tokens"]
    return found


def start_stream(server: VLLMServer, prompt: str, tokens: int) -> http.client.HTTPConnection:
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    return connection


def leave(connection: http.client.HTTPConnection) -> None:
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()


def test_blake3_unfull_chunks_prefix_caching_and_preemption(folder: Path) -> None:
    """Without any stable root in Python's own hash: scheduler, worker and API server agree all the same."""
    with variant(
        folder,
        {"chunk_size": 32, "save_unfull_chunk": True, "extra": {"semkv_hash_algorithm": "blake3"}},
        prefix_caching=True,
        max_model_len=512,
        arguments=["--num-gpu-blocks-override", "20", "--max-num-batched-tokens", "128"],
        environment={"PYTHONHASHSEED": "random"},
    ) as rig:
        server, seen = rig.server, rig.seen
        model = str(server.options.model)

        def wanted(text: str) -> list[int]:
            return by_definition(model, "", 32, tokens_of(server, text), unfull=True)

        text = "blake three " + TEXT * 12
        answers = [complete(server, text) for _ in range(3)]
        events = [rig.known(answer) for answer in answers]
        assert {event.chunk_hashes for event in events} == {tuple(wanted(text))}
        assert events[0].lmcache_hit_tokens == 0
        assert events[1].lmcache_hit_tokens, "the worker stores under the names that the scheduler asks for"
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1

        # A stop string: the API server computes the same.
        stop = next(
            c for c in complete(server, text, max_tokens=24)["choices"][0]["text"][2:] if c.isascii() and c > " "
        )
        answer = complete(server, text, max_tokens=24, stop=[stop])
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["kv_transfer_params"]["chunk_hashes"] == legacy(wanted(text))

        # More than the pages hold: requests are preempted, and looked up again with generated tokens in the list.
        texts = [f"preempted {number} " + TEXT * 8 for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda one: complete(server, one, max_tokens=200, ignore_eos=True), texts))
        metrics = http.client.HTTPConnection("127.0.0.1", server.port)
        metrics.request("GET", "/metrics")
        lines = metrics.getresponse().read().decode().splitlines()
        preempted = sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_preemptions_total"))
        assert preempted > 0, "this test needs preemptions"
        for one, answer in zip(texts, answers, strict=True):
            (event,) = seen.finished(answer["id"])
            assert list(event.chunk_hashes) == wanted(one)
            assert event.generated_tokens == 200


def test_no_stable_root_and_decorated_lookup_clients(folder: Path) -> None:
    """PYTHONHASHSEED is no number: no hash is ever shown. Aborts pass through LMCache's decorators."""
    with variant(
        folder,
        {"settings": {"hit_miss_ratio": 0.5, "enable_chunk_statistics": True, "lookup_timeout_ms": 300}},
        environment={"PYTHONHASHSEED": "random"},
    ) as rig:
        server, seen = rig.server, rig.seen
        answer = complete(server, "unstable " + TEXT * 12)
        assert "chunk_hashes" not in (answer["kv_transfer_params"] or {})
        (event,) = seen.finished(answer["id"])
        assert event.hashes_status == "unstable" and event.chunk_hashes == ()
        assert "PYTHONHASHSEED" in (event.reason or "")
        stopped = complete(server, "unstable " + TEXT * 12, stop=[answer["choices"][0]["text"][-1]])
        assert "chunk_hashes" not in (stopped["kv_transfer_params"] or {})
        connection = start_stream(server, "aborted " + TEXT * 12, 3000)
        connection.getresponse().readline()
        leave(connection)
        aborted = seen.wait_for(lambda: [e for e in seen.events() if e.finish_reason == "abort"], 1, 20)
        assert aborted[-1].hashes_status == "unstable"
        assert complete(server, "still there")["choices"]
        lines = [line for line in server.log().splitlines() if "carry no chunk hashes" in line]
        assert len(lines) == 1 and "PYTHONHASHSEED" in lines[0]


def test_the_named_connector_without_plugins_and_the_sync_lookup_client(folder: Path) -> None:
    """`kv_connector_module_path` where VLLM_PLUGINS leaves semkv out; LMCache looks up synchronously; large chunks."""
    transfer = {
        "kv_connector": "SemKVConnectorV1",
        "kv_connector_module_path": "semkv.engine_hooks.connector",
        "kv_role": "kv_both",
        "engine_id": "named",
    }
    with variant(
        folder,
        {"chunk_size": 1024, "async_loading": False},
        arguments=["--kv-transfer-config", json.dumps(transfer)],
        environment={"VLLM_PLUGINS": "some_other_plugin"},
    ) as rig:
        server, seen = rig.server, rig.seen
        text = "named " + TEXT * 200
        answers = [complete(server, text) for _ in range(2)]
        events = [rig.known(answer) for answer in answers]
        for event in events:
            assert event.instance == "named" and event.chunk_size == 1024
            assert len(event.chunk_hashes) == event.prompt_tokens // 1024 >= 1
        assert events[1].lmcache_hit_tokens
        # Shutting down drains within a second: what finished just before is published.
        last = complete(server, "last words " + TEXT * 12)
        server.stop()
        seen.finished(last["id"])


def test_data_parallel_engines_publish_each_request_once(folder: Path) -> None:
    with variant(
        folder,
        # The two engines read one configuration, and two engines must not share a disk folder.
        {"settings": {"local_disk": None, "max_local_disk_size": 0.0}},
        arguments=["--data-parallel-size", "2"],
        max_model_len=1024,
    ) as rig:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda n: complete(rig.server, f"parallel {n} " + TEXT * 12), range(8)))
        events = [rig.known(answer) for answer in answers]
        time.sleep(1.0)
        assert len(rig.seen.events()) == len(answers), "exactly one event for each request"
        assert {event.instance for event in events} == {"engine_dp0", "engine_dp1"}
