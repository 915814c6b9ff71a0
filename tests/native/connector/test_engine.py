# SPDX-License-Identifier: Apache-2.0
"""LMCache through the device connector on a real vLLM: the outputs of an engine without LMCache, and able to differ."""

from __future__ import annotations

import fcntl
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from semkv.cli.devengine.model import make_model
from semkv.cli.devengine.requirements import preload_libraries

pytestmark = [pytest.mark.engine, pytest.mark.lmcache, pytest.mark.timeout(900)]

PROBE = Path(__file__).with_name("engine_probe.py")
DTYPES = {"float32": 4, "bfloat16": 2}
_random = random.Random(7)
PROMPTS = [[_random.randrange(3, 500) for _ in range(n)] for n in (77, 128, 130, 200, 256, 333, 600)]


@contextmanager
def one_engine_at_a_time() -> Iterator[None]:
    with Path(tempfile.gettempdir(), "semkv.engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def start(folder: Path, model: Path, *, llm: dict[str, Any], lmcache: dict[str, Any] | None) -> tuple[Any, str]:
    folder.mkdir(parents=True, exist_ok=True)
    task = {
        "model": str(model),
        "folder": str(folder),
        "llm": llm,
        "lmcache": lmcache,
        "prompts": PROMPTS,
        "warm": 100,
        "itemsize": DTYPES[llm["dtype"]],
    }
    variables = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if libraries := preload_libraries(Path(sys.prefix)):
        variables["LD_PRELOAD"] = ":".join(libraries)
    with one_engine_at_a_time():
        done = subprocess.run(
            [sys.executable, str(PROBE), json.dumps(task)],
            env=variables,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    output = done.stdout + done.stderr
    found = [line.removeprefix("PROBE ") for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    return (json.loads(found[0]) if found else None), output


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "chunk_size": 64,
        "local_cpu": True,
        "max_local_cpu_size": 0.1,
        "local_disk": f"file://{folder}/disk/",
        "max_local_disk_size": 0.5,
        "enable_async_loading": False,
        "save_unfull_chunk": False,
        "pre_caching_hash_algorithm": "builtin",
    } | changes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=sorted(DTYPES))
def baseline(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found, output = start(tmp_path_factory.mktemp("plain"), model, llm={"dtype": request.param}, lmcache=None)
    assert found, output
    return request.param, found["first"]


def test_outputs_are_those_of_an_engine_without_lmcache(baseline: Any, model: Path, tmp_path: Path) -> None:
    dtype, expected = baseline
    found, output = start(tmp_path, model, llm={"dtype": dtype}, lmcache=settings(tmp_path))
    assert found, output
    assert found["first"] == expected
    assert found["second"] == expected
    # Every whole chunk of every prompt came from LMCache, none of it from vLLM's own cache.
    assert len(found["second_loads"]) == sum(len(prompt) // 64 for prompt in PROMPTS)
    assert {cached for _, _, cached in found["second_loads"]} == {0}
    # 100 tokens held by vLLM are 3 blocks: chunk 0 is left alone, half of chunk 1 is skipped, the rest loaded.
    assert found["partial"] == [expected[-1]]
    assert found["partial_loads"][0] == [64, 128, 96]
    # The negative control: with V zeroed on the way in, the comparison fails.
    assert found["spoiled"] != expected
    assert found["layout"] in found["key"].split("@")[0]


def test_chunked_prefill_and_unfull_chunks(baseline: Any, model: Path, tmp_path: Path) -> None:
    dtype, expected = baseline
    llm = {"dtype": dtype, "max_num_batched_tokens": 96}
    found, output = start(tmp_path, model, llm=llm, lmcache=settings(tmp_path, save_unfull_chunk=True))
    assert found, output
    assert found["first"] == expected
    assert found["second"] == expected
    assert found["partial"] == [expected[-1]]
    assert found["spoiled"] != expected
    tails = [load for load in found["second_loads"] if load[1] % 64]
    assert [end - start for start, end, _ in tails] == [len(p) % 64 for p in PROMPTS if len(p) % 64]
    per_block = 2 * 2 * 2 * 32 * 32 * DTYPES[dtype]  # K and V, layers, heads, tokens, head size
    assert found["lengths"] == [per_block, 2 * per_block]  # a tail is filled up to whole blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunk_size": 48}, "chunk_size 48 (LMCache) is not a multiple of block_size 32"),
        ({"use_layerwise": True}, "use_layerwise true"),
        ({"enable_blending": True, "use_layerwise": True, "save_unfull_chunk": True}, "enable_blending true"),
        ({"remote_serde": "cachegen"}, "remote_serde 'cachegen'"),
    ],
    ids=["chunk_size", "layerwise", "blending", "serde"],
)
def test_start_up_is_refused(changes: dict[str, Any], message: str, model: Path, tmp_path: Path) -> None:
    found, output = start(tmp_path, model, llm={"dtype": "float32"}, lmcache=settings(tmp_path, **changes))
    assert found is None
    assert f"StartUpError: {message}" in output
