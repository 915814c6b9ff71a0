# SPDX-License-Identifier: Apache-2.0
"""Runs one in-process vLLM on the CPU and prints what it generated, as JSON after the word PROBE.

A program of its own: an engine cannot be ended inside a test process. `sys.argv[1]` is a JSON object: `model`,
`folder`, `llm` (arguments of LLM()), `lmcache` (settings, or null for none), `prompts` (lists of token ids),
`warm` (how many tokens of the longest prompt vLLM's own prefix cache holds when it is asked for again).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def environment(folder: Path, lmcache: dict[str, Any] | None) -> None:
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        LMCACHE_TRACK_USAGE="false",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        TORCHDYNAMO_DISABLE="1",
        VLLM_PLUGINS="",
    )
    sys.path.insert(0, str(Path(__file__).parent))
    if lmcache is not None:
        path = folder / "lmcache.yaml"
        path.write_text(json.dumps(lmcache), encoding="utf-8")
        os.environ["LMCACHE_CONFIG_FILE"] = str(path)


def run(task: dict[str, Any]) -> dict[str, Any]:
    environment(Path(task["folder"]), task["lmcache"])
    from vllm import LLM, SamplingParams

    options = {
        "model": task["model"],
        "max_model_len": 2048,
        "max_num_seqs": 4,
        "block_size": 32,
        "enforce_eager": True,
        "seed": 0,
        **task["llm"],
    }
    if task["lmcache"] is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "NativeOnlyConnector",
            "kv_connector_module_path": "native_only_connector",
            "kv_role": "kv_both",
        }
    llm = LLM(**options)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        answers = llm.generate([{"prompt_token_ids": p} for p in prompts], greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    prompts = task["prompts"]
    result: dict[str, Any] = {"first": generate(prompts)}
    if task["lmcache"] is None:
        return result

    from lmcache.v1.cache_engine import LMCacheEngineBuilder

    engine = LMCacheEngineBuilder.get("vllm-instance")
    hot = engine.storage_manager.storage_backends["LocalCPUBackend"].hot_cache
    time.sleep(1)  # LMCache's writes to disk end
    connector, loads, spoil = engine.gpu_connector, [], False
    to_gpu = connector.to_gpu

    def watched(memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        loads.append([start, end, kwargs["vllm_cached_tokens"]])
        raw = memory_obj.raw_data[: memory_obj.get_size()]
        whole = raw.clone()
        if spoil:
            values_of(raw, connector.layout.format).zero_()
        to_gpu(memory_obj, start, end, **kwargs)
        raw.copy_(whole)

    connector.to_gpu = watched
    result["key"] = next(iter(hot)).to_string()
    result["lengths"] = sorted({obj.get_size() for obj in hot.values()})
    result["layout"] = connector.layout.tag

    llm.reset_prefix_cache()
    result["second"], result["second_loads"] = generate(prompts), list(loads)
    longest = max(prompts, key=len)
    llm.reset_prefix_cache()
    generate([longest[: task["warm"]]])
    loads.clear()
    result["partial"], result["partial_loads"] = generate([longest]), list(loads)
    llm.reset_prefix_cache()
    spoil = True
    result["spoiled"] = generate(prompts)
    return result


def values_of(raw: Any, form: str) -> Any:
    """The half of the object that holds V: the last segment, or the last half of every head of every page."""
    if form == "NL_X_TWO_NB_PAGE":
        return raw[raw.numel() // 2 :]
    if form == "NL_X_NB_PAGE":
        head = 2 * 32 * 32 * TASK["itemsize"]
        return raw.view(-1, head)[:, head // 2 :]
    return raw


TASK: dict[str, Any] = json.loads(sys.argv[1])
try:
    print("PROBE " + json.dumps(run(TASK)), flush=True)
    code = 0
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # LMCache's threads would keep the process alive
