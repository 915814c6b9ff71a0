# SPDX-License-Identifier: Apache-2.0
"""One real vLLM in this process, with prefix caching, LMCache and too little memory; what `bench.drill_vllm` starts.

A program of its own: an engine cannot be ended inside another's process, and one without the patches takes its process
with it. `sys.argv[1]` is a JSON object: `model`, `folder`, `patched`, `seconds`, `without_s`, `seed`. It computes every
prompt's output on an engine without any cache first, then asks for the prompts again and again, in a random order,
while a second thread prefetches and evicts. With `without_s` the patches are then taken out and it goes on so long, to
show in one process what they are for. Prints one JSON object a line: progress, and at the end how it went.
Threads: vLLM's loop on the main one, commands on another. Errors: told in the last line, with exit code 1.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK, CHUNK = 32, 64
BLOCKS = 28  # vLLM's own cache: about two prompts
DDR_CHUNKS, DISK_CHUNKS = 24, 40
PROMPTS = 20
KV_BYTES = 1024  # per token of the tiny model
AT_ONCE = 2
ROUND = 12


def prompts(seed: int) -> list[list[int]]:
    """Conversations of 3 to 6 chunks; two of three begin alike, so that vLLM's cache often holds a part of them."""
    rng = random.Random(seed)

    def words(count: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(count)]

    trunk = words(2 * CHUNK)
    made = []
    for number in range(PROMPTS):
        own = words(CHUNK * rng.randrange(1, 4) + rng.randrange(1, BLOCK))
        made.append((trunk if number % 3 else words(2 * CHUNK)) + own)
    return made


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def lmcache_settings(folder: Path) -> dict[str, Any]:
    page = 4096
    chunk_bytes = -(-CHUNK * KV_BYTES // page) * page
    return {
        "chunk_size": CHUNK,
        "local_cpu": True,
        "max_local_cpu_size": DDR_CHUNKS * chunk_bytes / 2**30,
        "local_disk": f"file://{folder}/disk/",
        "max_local_disk_size": DISK_CHUNKS * chunk_bytes / 2**30,
        "enable_async_loading": True,
        "save_unfull_chunk": False,
        "pre_caching_hash_algorithm": "builtin",
        "lookup_timeout_ms": 5000,
        "extra_config": {"enable_cache_usage_details_in_response": True},
    }


class Engine:
    """An in-process vLLM; `caches` gives it prefix caching and LMCache."""

    def __init__(self, model: str, *, caches: bool) -> None:
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS} if caches else {}
        if caches:
            # A short name: LMCache puts it into the paths of its sockets, which may have 107 characters.
            transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "engine_id": "drill"}
            options["kv_transfer_config"] = transfer
        self.llm = LLM(
            model=model,
            dtype="float32",
            max_model_len=512,
            max_num_seqs=AT_ONCE,
            block_size=BLOCK,
            enforce_eager=True,
            enable_prefix_caching=caches,
            seed=0,
            **options,
        )
        self.greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def generate(self, asked: list[list[int]]) -> list[list[int]]:
        answers = self.llm.generate([{"prompt_token_ids": p} for p in asked], self.greedy, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


class Commands:
    """Prefetches and evicts beside the requests, in a thread that can be held still."""

    def __init__(self, engine: Any, seed: int, counts: Counter[str]) -> None:
        from semkv.consumers.storage import LMCacheStorage, PrefixForest
        from semkv.engine_hooks.forest_feed import ForestFeed

        self._forest = PrefixForest()
        self._feed = ForestFeed(engine, self._forest, CHUNK)
        self._storage = LMCacheStorage(engine, self._forest)
        self._rng = random.Random(seed)
        self._counts = counts
        self._still = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.chains: list[tuple[int, ...]] = []
        self.error: BaseException | None = None

    def start(self) -> None:
        self._over.clear()
        self._thread = threading.Thread(target=self._work, name="commands", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(60)

    def held_still(self) -> threading.Lock:
        """While this lock is held no command runs."""
        return self._still

    def _work(self) -> None:
        try:
            while not self._over.wait(0.02):
                with self._still:
                    self._one()
        except BaseException as error:  # told by the main thread
            self.error = error

    def _one(self) -> None:
        from semkv.bus.status import Order, Tier

        chain = self._rng.choice(self.chains)
        if self._rng.random() < 0.7:
            result = self._storage.prefetch(
                chain, order=self._rng.choice(list(Order)), budget_bytes=6 * CHUNK * KV_BYTES
            )
            name = "prefetches"
        else:
            result = self._storage.evict(
                chain[self._rng.randrange(len(chain)) :],
                tiers=self._rng.choice([(Tier.CPU,), (Tier.CPU,), None]),
                force=self._rng.random() < 0.5,
            )
            name = "evicts"
        self._counts[name] += 1
        self._counts.update({f"{name}: {status}": count for status, count in result.counts.items()})


class Drill:
    """The run on the engine with caches."""

    def __init__(self, engine: Engine, wanted: list[list[int]], asked: list[list[int]], seed: int) -> None:
        from lmcache.v1.cache_engine import LMCacheEngineBuilder

        self.engine, self.wanted, self.asked = engine, wanted, asked
        self.lmcache = LMCacheEngineBuilder.get("vllm-instance")
        self.rng = random.Random(seed + 1)
        self.disorder = ""
        self.counts: Counter[str] = Counter()
        self._count_loads()
        self.commands = Commands(self.lmcache, seed + 2, self.counts)
        self.commands.chains = [
            tuple(h for _, _, h in self.lmcache.token_database.process_tokens(tokens=p, make_key=False)) for p in asked
        ]

    def _count_loads(self) -> None:
        connector = self.lmcache.gpu_connector
        load = connector.batched_to_gpu

        def counted(memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> Any:
            self.counts["loads by LMCache"] += 1
            self.counts["chunks loaded"] += len(memory_objs)
            if kwargs.get("vllm_cached_tokens"):
                self.counts["loads behind a part that vLLM had"] += 1
            return load(memory_objs, starts, ends, **kwargs)

        connector.batched_to_gpu = counted

    def ask(self, numbers: list[int]) -> None:
        outputs = self.engine.generate([self.asked[n] for n in numbers])
        for number, output in zip(numbers, outputs, strict=True):
            self.counts["requests"] += 1
            if output != self.wanted[number]:
                raise AssertionError(f"prompt {number}: {output} instead of {self.wanted[number]}")

    def go(self, seconds: float, *, whatever: bool = False) -> None:
        """Run; `whatever` goes on after a quiet point that was not in order, to see how that ends."""
        until = time.monotonic() + seconds
        self.commands.start()
        try:
            while time.monotonic() < until:
                for _ in range(ROUND):
                    self.ask(self.rng.sample(range(PROMPTS), self.rng.randint(1, AT_ONCE)))
                if self.commands.error is not None:
                    raise self.commands.error
                with self.commands.held_still():
                    self._look(whatever)
                say(at=self.counts["requests"])
        finally:
            self.commands.stop()

    def _look(self, whatever: bool) -> None:
        try:
            self.quiet()
        except Exception as error:
            if not whatever:
                raise
            self.counts["quiet points not in order"] += 1
            self.disorder = self.disorder or f"{error}"

    def quiet(self) -> None:
        """No request and no command runs: every hot chunk valid and held once, no pin, quota and files agree."""
        manager = self.lmcache.storage_manager
        cpu, disk = manager.storage_backends["LocalCPUBackend"], manager.storage_backends["LocalDiskBackend"]
        wait_until(lambda: not disk.disk_worker.put_tasks, "the writes to disk")
        hot = dict(cpu.hot_cache)
        wrong = {
            f"{key.chunk_hash:x}": (obj.get_ref_count(), obj.metadata.pin_count, obj.is_valid())
            for key, obj in hot.items()
            if (obj.get_ref_count(), obj.metadata.pin_count, obj.is_valid()) != (1, 0, True)
        }
        if wrong:
            raise AssertionError(f"{len(wrong)} of {len(hot)} hot chunks are wrong (references, pins, valid): {wrong}")
        sizes = sum(meta.size for meta in disk.dict.values())
        pinned = sum(meta.is_pinned for meta in disk.dict.values())
        if (disk.usage, disk.current_cache_size, pinned) != (sizes, sizes, 0):
            raise AssertionError(
                f"disk: usage {disk.usage}, quota {disk.current_cache_size}, entries {sizes}, {pinned} of them pinned"
            )
        on_disk = sum(path.stat().st_size for path in Path(disk.path).iterdir())
        if on_disk != sizes:
            raise AssertionError(f"disk: files of {on_disk} bytes, entries of {sizes}")
        self.counts["quiet points"] += 1
        self.counts["most chunks on disk"] = max(self.counts["most chunks on disk"], len(disk.dict))


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.01)


def before_the_connector(work: Callable[[], None]) -> None:
    """Have it done where the plugin does: not earlier, since vLLM's kernels cannot be registered where numba has been
    imported, and LMCache 0.4.4 imports it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector

    def creating(*args: Any, **kwargs: Any) -> Any:
        work()
        return create(*args, **kwargs)

    KVConnectorFactory.create_connector = creating


def make_ready(*, patched: bool) -> None:
    """What the plugin does before LMCache's connector is built; unpatched, only what LMCache needs to run on a CPU."""
    from semkv.engine_hooks import attach
    from semkv.native import lmcache_connector

    if patched:
        attach.make_ready()
        return
    import lmcache.integration.vllm.vllm_v1_adapter  # noqa: F401  where the device connector looks for it

    lmcache_connector.install()


def without_patches(drill: Drill, seconds: float) -> str:
    """Take the patches out and go on; how that ends."""
    from semkv.engine_hooks.patches import restore_all

    restore_all()
    return how_it_goes(drill, seconds)


def how_it_goes(drill: Drill, seconds: float) -> str:
    """Without the patches: go on until it breaks or the time is over; "well", or what happened, first and last."""
    end = "it ran to its end"
    try:
        drill.go(seconds, whatever=True)
    except BaseException as error:
        traceback.print_exc()
        end = f"{type(error).__name__}: {error}"
    if drill.disorder:
        return f"{end}; before that {drill.disorder}"
    return "well" if end == "it ran to its end" else end


def main() -> None:
    task = json.loads(sys.argv[1])
    folder = Path(task["folder"])
    config = folder / "lmcache.yaml"
    config.write_text(json.dumps(lmcache_settings(folder)), encoding="utf-8")
    os.environ["LMCACHE_CONFIG_FILE"] = str(config)
    drill = None
    try:
        asked = prompts(task["seed"])
        plain = Engine(task["model"], caches=False)
        wanted = [plain.generate([prompt])[0] for prompt in asked]
        del plain
        gc.collect()
        before_the_connector(functools.partial(make_ready, patched=task["patched"]))
        drill = Drill(Engine(task["model"], caches=True), wanted, asked, task["seed"])
        say(ready=True)
        end: dict[str, Any] = {"ended": "well"}
        if task["patched"]:
            drill.go(task["seconds"])
        elif (how := how_it_goes(drill, task["seconds"])) != "well":
            end = {"ended": "badly", "error": how}
        if task["without_s"]:
            say(without=True, counts=dict(sorted(drill.counts.items())))
            end |= {"without": without_patches(drill, task["without_s"])}
    except BaseException as error:
        traceback.print_exc()
        end = {"ended": "badly", "error": f"{type(error).__name__}: {error}"}
    say(**end, counts={} if drill is None else dict(sorted(drill.counts.items())))
    os._exit(0 if end["ended"] == "well" else 1)  # an engine that broke may hang while it is taken down


if __name__ == "__main__":
    main()
