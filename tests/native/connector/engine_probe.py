# SPDX-License-Identifier: Apache-2.0
"""Runs in-process vLLM engines on the CPU, one after the other, and prints what they generated, as JSON after PROBE.

A program of its own: an engine cannot be ended inside a test process. `sys.argv[1]` is a JSON object: `model`,
`folder`, `prompts` (lists of token ids), `warm` (how many tokens of the longest prompt vLLM's own prefix cache holds
when it is asked for again), and `engines`, each with `name`, `llm` (arguments of LLM()), `lmcache` (settings, or null
for none), `script` ("once"; "all": load, load in part, load spoiled; "refused": what it says instead of starting),
`untagged` (keys without the layout's name), `prefix_cache` (vLLM's own, where vLLM switches it off), and maybe a
`model` of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ITEMSIZE = {"float32": 4, "bfloat16": 2}


def environment(folder: Path) -> None:
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
        LMCACHE_CONFIG_FILE=str(folder / "lmcache.yaml"),
    )
    sys.path.insert(0, str(Path(__file__).parent))


class Engine:
    """One vLLM, with LMCache if it has settings for it."""

    def __init__(self, task: dict[str, Any], engine: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        from semkv.native.connector.vllm_cpu import CpuLayout

        self.task, self.engine = task, engine
        options = {
            "model": engine.get("model", task["model"]),
            "max_model_len": 2048,
            "max_num_seqs": 4,
            "block_size": 32,
            "enforce_eager": True,
            "seed": 0,
            **engine["llm"],
        }
        if engine["lmcache"] is not None:
            path = Path(os.environ["LMCACHE_CONFIG_FILE"])
            path.write_text(json.dumps(engine["lmcache"]), encoding="utf-8")
            options["kv_transfer_config"] = {
                "kv_connector": "NativeOnlyConnector",
                "kv_connector_module_path": "native_only_connector",
                "kv_role": "kv_both",
            }
        CpuLayout.opaque = not engine.get("untagged")
        keep_prefix_cache(bool(engine.get("prefix_cache")))
        self.llm = LLM(**options)
        self.greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        self.loads: list[list[int]] = []
        self.spoil = False
        self.intact = True

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        answers = self.llm.generate([{"prompt_token_ids": p} for p in prompts], self.greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def run(self) -> dict[str, Any]:
        prompts = self.task["prompts"]
        if self.engine["lmcache"] is None:
            return {"first": self.generate(prompts), "second": self.generate(prompts)}
        connector = self.watch()
        result: dict[str, Any] = {"layout": connector.layout.tag, "format": connector.layout.format}
        result["first"], result["first_loads"] = self.generate(prompts), list(self.loads)
        self.describe(result)
        time.sleep(1)  # LMCache's writes to disk end
        if self.engine["script"] == "all":
            self.load_again(result, prompts)
        return result | {"intact": self.intact}

    def load_again(self, result: dict[str, Any], prompts: list[list[int]]) -> None:
        self.llm.reset_prefix_cache()
        self.loads.clear()
        result["second"], result["second_loads"] = self.generate(prompts), list(self.loads)
        longest = max(prompts, key=len)
        self.llm.reset_prefix_cache()
        self.generate([longest[: self.task["warm"]]])
        self.loads.clear()
        result["partial"], result["partial_loads"] = self.generate([longest]), list(self.loads)
        self.llm.reset_prefix_cache()
        self.spoil = True
        result["spoiled"] = self.generate(prompts)

    def describe(self, result: dict[str, Any]) -> None:
        hot = self.storage().storage_backends["LocalCPUBackend"].hot_cache
        result["key"] = next(iter(hot)).to_string()
        result["lengths"] = sorted({obj.get_size() for obj in hot.values()})

    def storage(self) -> Any:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        return LMCacheEngineBuilder.get("vllm-instance").storage_manager

    def watch(self) -> Any:
        """Notes what is loaded, and whether the pages then hold it; with `spoil`, the loaded values are zeros."""
        import torch
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        connector = LMCacheEngineBuilder.get("vllm-instance").gpu_connector
        to_gpu = connector.to_gpu

        def watched(memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
            self.loads.append([start, end, kwargs["vllm_cached_tokens"]])
            raw = memory_obj.raw_data[: memory_obj.get_size()]
            whole = raw.clone()
            if self.spoil:
                values_of(raw, connector.layout.format, ITEMSIZE[self.engine["llm"]["dtype"]]).zero_()
            to_gpu(memory_obj, start, end, **kwargs)
            if not kwargs["vllm_cached_tokens"]:
                again = torch.zeros_like(raw)
                transfer = connector._transfer
                transfer.gather_range(kwargs["slot_mapping"], start, end, again.data_ptr(), again.numel())
                self.intact = self.intact and torch.equal(again, raw)
            raw.copy_(whole)

        connector.to_gpu = watched
        return connector

    def close(self) -> None:
        """Ends the engine and LMCache, so that the next one in this process starts anew."""
        from lmcache.integration.vllm import utils
        from lmcache.v1.cache_engine import LMCacheEngineBuilder
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        if LMCacheEngineBuilder.get("vllm-instance") is not None:
            LMCacheEngineBuilder.destroy("vllm-instance")
        del self.llm
        gc.collect()
        utils._config_instance = None


def keep_prefix_cache(wanted: bool) -> None:
    """vLLM switches its prefix cache off for latent attention on a CPU; with `wanted` it is on all the same."""
    from vllm.platforms.cpu import CpuPlatform

    check = getattr(CpuPlatform, "_unchanged_check", None) or CpuPlatform.check_and_update_config.__func__
    CpuPlatform._unchanged_check = check

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        if wanted:
            config.cache_config.enable_prefix_caching = True

    CpuPlatform.check_and_update_config = classmethod(checked)


def values_of(raw: Any, form: str, itemsize: int) -> Any:
    """What of the object holds V: the last segment, the last half of every head of every page, or all of a latent."""
    if form == "NL_X_TWO_NB_PAGE":
        return raw[raw.numel() // 2 :]
    if form == "NL_X_NB_PAGE":
        head = 2 * 32 * 32 * itemsize
        return raw.view(-1, head)[:, head // 2 :]
    return raw


def refusal(task: dict[str, Any], described: dict[str, Any]) -> str:
    from lmcache.integration.vllm import utils

    utils._config_instance = None
    try:
        Engine(task, described)
    except Exception:
        return traceback.format_exc()
    return ""


def main(task: dict[str, Any]) -> int:
    try:
        environment(Path(task["folder"]))
        results = {}
        for number, described in enumerate(task["engines"]):
            if described["script"] == "refused":
                results[described["name"]] = {"refused": refusal(task, described)}
                continue
            engine = Engine(task, described)
            results[described["name"]] = engine.run()
            if number + 1 < len(task["engines"]):
                engine.close()
        print("PROBE " + json.dumps(results), flush=True)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


code = main(json.loads(sys.argv[1]))
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # LMCache's threads would keep the process alive
