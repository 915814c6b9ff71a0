# SPDX-License-Identifier: Apache-2.0
"""Direct mode without NATS on a real vLLM, both roles in one process: one app, two ports, one rank that acts once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from semkv.cli.devengine.lmcache_config import LMCacheConfig
from semkv.cli.devengine.model import make_model
from semkv.cli.devengine.server import ServerOptions
from tests.engine_hooks.direct import one_process
from tests.support.ports import free_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]


def test_both_roles_in_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    (folder / "t").mkdir()
    port = free_run(2)
    lmcache = LMCacheConfig(
        disk=folder / "ssd",
        settings={
            "internal_api_server_enabled": True,
            "internal_api_server_host": "127.0.0.1",
            "internal_api_server_port_start": port,
        },
    )
    model = make_model(folder / "model")
    environment = ServerOptions(
        model, folder, lmcache, environment={"SEMKV_DIRECT": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ).variables()
    assert "SEMKV_NATS_URL" not in environment
    process = subprocess.Popen(
        [sys.executable, str(Path(one_process.__file__)), str(model), str(port)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in output.splitlines() if line.startswith("SEEN ")]
    assert lines, output[-6000:]
    seen = json.loads(lines[0][5:])
    (text, first), (again, second) = seen["answers"]
    chain = first["chunk_hashes"]
    assert len(chain) > 2 and first["num_lmcache_cached_tokens"] == 0
    assert (again, second["chunk_hashes"]) == (text, chain)
    assert second["num_lmcache_cached_tokens"] == len(chain) * 64
    (status, body), (status_again, body_again) = seen["evicted"]
    assert (status, body["status"], body["num_evicted"]) == (200, "success", len(chain))
    assert body["ranks"] == {"0": {"state": "succeeded", "reason": None, "counts": {"removed": len(chain)}}}
    assert (status_again, body_again["num_evicted"]) == (200, 0)
    assert seen["prefetched"] == [
        200,
        {
            "status": "prefetch_started",
            "lookup_id": "again",
            "num_chunks": len(chain),
            "ranks": {"0": {"started": True}},
        },
    ]
    assert seen["hot"] == [0, len(chain)]
    assert {name.rpartition("-")[0] for name in seen["threads"]} <= {"semkv-direct"}, "nothing here speaks NATS"
