# SPDX-License-Identifier: Apache-2.0
"""Run by `test_one_process`: a real vLLM whose scheduler and worker live in this very process, asked over HTTP.

`python one_process.py MODEL FIRST_PORT` prints one line of JSON with what it saw.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any


def post(port: int, op: str, body: dict[str, Any]) -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/memory/{op}", data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, json.load(answer)


def main(model: str, port: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=2,
        block_size=32,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        kv_transfer_config=KVTransferConfig(kv_connector="LMCacheConnectorV1", kv_role="kv_both", engine_id="one"),
    )
    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    (engine,) = LMCacheEngineBuilder._instances.values()
    backends = engine.storage_manager.storage_backends
    cpu, disk = backends["LocalCPUBackend"], backends["LocalDiskBackend"]
    prompt = "one process " + "the memory of an agent remembers what was said " * 30

    def ask() -> tuple[str, dict[str, Any]]:
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        (answer,) = llm.generate([prompt], sampling, use_tqdm=False)
        return answer.outputs[0].text, answer.kv_transfer_params or {}

    def wait_for(condition: Any) -> None:
        until = time.monotonic() + 60
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(0.01)

    def step() -> None:
        """Another request: the worker learns of the last one's end with the next step; till then they are in use."""
        llm.generate(["hello"], SamplingParams(max_tokens=1), use_tqdm=False)

    seen: dict[str, Any] = {"answers": [ask()]}
    step()
    chain = seen["answers"][0][1]["chunk_hashes"]
    wait_for(lambda: len(disk.dict) == len(chain) and not disk.disk_worker.put_tasks)
    local = {"chunk_hashes": chain, "locations": ["LocalCPUBackend"]}
    seen["evicted"] = [post(port, "evict", local), post(port + 1, "evict", local)]
    seen["hot"] = [len(cpu.hot_cache)]
    seen["prefetched"] = post(port + 1, "prefetch", {"chunk_hashes": chain, "lookup_id": "again"})
    wait_for(lambda: len(cpu.hot_cache) == len(chain))
    seen["answers"].append(ask())
    seen["hot"].append(len(cpu.hot_cache))
    seen["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("semkv")]
    return seen


if __name__ == "__main__":
    faulthandler.dump_traceback_later(150, exit=True)  # where it hangs, if it does
    print("SEEN " + json.dumps(main(sys.argv[1], int(sys.argv[2]))), flush=True)
    os._exit(0)  # how the engine ends is not what is looked at here
