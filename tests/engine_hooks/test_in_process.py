# SPDX-License-Identifier: Apache-2.0
"""An engine inside the caller's own process: scheduler and worker in one, forked from a process that has the plugin.

vLLM's CPU platform starts every process of a server by spawn; this is where fork and the uniprocess executor meet.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from semkv.bus.embedded import EmbeddedServer
from tests.engine_hooks.capture import Capture
from tests.support.vllm_server import tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROGRAM = """
import json, multiprocessing, os, sys, threading

def serve(model, answers):
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    transfer = KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both", engine_id="inside")
    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=1024, block_size=32,
              enable_prefix_caching=False, distributed_executor_backend="uni", kv_transfer_config=transfer)
    parameters = SamplingParams(max_tokens=3, temperature=0)
    for number in range(2):
        for text in ("one " * 100, "two " * 100):
            (out,) = llm.generate([text], parameters, use_tqdm=False)
            answers.send([out.request_id, (out.kv_transfer_params or {}).get("chunk_hashes")])
    answers.send([thread.name for thread in threading.enumerate()])
    threading.Event().wait()

from semkv.engine_hooks import plugin
plugin.register()
ours, theirs = multiprocessing.Pipe()
process = multiprocessing.get_context("fork").Process(target=serve, args=(sys.argv[1], theirs))
process.start()
theirs.close()
try:
    said = [ours.recv() for _ in range(5)]
    print("SAID", json.dumps({"said": said, "threads": threading.active_count()}), flush=True)
    sys.stdin.read()
finally:
    process.kill()
    process.join()
"""


def test_a_forked_process_with_the_whole_engine_in_it(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("i")
    with EmbeddedServer(folder / "nats") as nats, Capture(nats.url) as seen:
        server = tiny_server(folder / "e", nats.url, environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        (folder / "e" / "t").mkdir()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(server.options.model)],
                env=server.options.variables(),
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        watchdog = threading.Timer(300, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            told = next((line for line in process.stdout if line.startswith("SAID ")), None)
            assert told, (folder / "log").read_text()[-3000:]
            check(json.loads(told.removeprefix("SAID ")), seen)
        finally:
            watchdog.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()
            process.stdout.close()


def check(told: dict[str, Any], seen: Capture) -> None:
    *answers, threads = told["said"]
    assert told["threads"] == 1, "the parent has the plugin and no thread of ours"
    assert threads.count("semkv-events") == 1, "one publisher, though both roles are here"
    events = seen.wait_for(seen.events, len(answers), 15)
    assert len(events) == len(answers) == 4, "each request once"
    assert {event.instance for event in events} == {"inside"} and len({event.epoch for event in events}) == 1
    for request_id, hashes in answers:
        (event,) = [event for event in events if event.request_id == request_id]
        assert event.hashes_status == "known", event.reason
        assert event.chunk_hashes and hashes == [f"{value:x}" for value in event.chunk_hashes]
    assert all(event.lmcache_hit_tokens for event in events[2:]), "stored by the worker, found again"
