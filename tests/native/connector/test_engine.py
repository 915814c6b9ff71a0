# SPDX-License-Identifier: Apache-2.0
"""LMCache through the device connector on a real vLLM: the outputs of an engine without LMCache, and able to differ."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from semkv.cli.devengine.model import ModelShape, make_model
from semkv.cli.devengine.requirements import preload_libraries
from tests.support.mla_model import make_mla_model

pytestmark = [pytest.mark.engine, pytest.mark.lmcache, pytest.mark.timeout(900)]

PROBE = Path(__file__).with_name("engine_probe.py")
MODELS: dict[str, Callable[[Path], Path]] = {
    "gqa": make_model,  # four heads share two of keys and values
    "mha": lambda folder: make_model(folder, ModelShape(kv_heads=4)),
    "mla": make_mla_model,  # one latent row a token
}
BLOCKS = {"gqa": 32, "mha": 32, "mla": 16}  # vLLM's CPU kernel for latent rows has blocks of 16 alone
# Bytes of a block over both layers, for each byte of an element.
BLOCK_WIDTH = {"gqa": 2 * 2 * 2 * 32 * 32, "mha": 2 * 2 * 4 * 32 * 32, "mla": 2 * 16 * 576}
DTYPES = {"float32": 4, "bfloat16": 2}
HAS_MLA = version("vllm") >= "0.32"
NO_MLA = "MLA is not supported on CPU."
_random = random.Random(7)
PROMPTS = [[_random.randrange(3, 500) for _ in range(n)] for n in (77, 128, 130, 200, 256, 333, 600)]
# Of these, vLLM's prefix cache with blocks of 16 holds just the whole chunks of 64.
LATENT_PROMPTS = [prompt for prompt in PROMPTS if 0 < len(prompt) % 64 <= 16]


def start(folder: Path, model: Path, *engines: dict[str, Any], prompts: list[list[int]] = PROMPTS) -> tuple[Any, str]:
    """What each of the engines did, by name, and all that they printed; None if one did not start."""
    task = {"model": str(model), "folder": str(folder), "prompts": prompts, "warm": 100, "engines": engines}
    variables = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if libraries := preload_libraries(Path(sys.prefix)):
        variables["LD_PRELOAD"] = ":".join(libraries)
    # LMCache leaves its sockets and counters lying; a short path, since a socket's may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="semkv-") as left:
        done = subprocess.run(
            [sys.executable, str(PROBE), json.dumps(task)],
            env=variables | {"TMPDIR": left, "PROMETHEUS_MULTIPROC_DIR": left},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    output = done.stdout + done.stderr
    found = [line.removeprefix("PROBE ") for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    return (json.loads(found[0]) if found else None), output


def engine(name: str, lmcache: dict[str, Any] | None, *, script: str = "all", **llm: Any) -> dict[str, Any]:
    options = {key: llm.pop(key) for key in ("untagged", "prefix_cache") if key in llm}
    return {"name": name, "llm": llm, "lmcache": lmcache, "script": script} | options


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
        "extra_config": {"save_only_first_rank": False},
    } | changes


@pytest.fixture(scope="module", params=[f"{model}-{dtype}" for model in MODELS for dtype in sorted(DTYPES)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process: an engine without LMCache, one that stores whole chunks, one that stores tails too and prefills in
    pieces of 96 tokens (which vLLM does not do on a CPU for latent attention).

    With latent attention vLLM's CPU kernels answer otherwise for each way in which they come to a token: with other
    requests beside it, from the whole prompt, from a context that is there, alone. The engine to compare with is then
    vLLM with its own prefix cache, one request at a time: it comes to each token the same way.
    """
    kind, dtype = request.param.split("-")
    folder = tmp_path_factory.mktemp(request.param)
    model, llm = MODELS[kind](folder / "model"), {"dtype": dtype, "block_size": BLOCKS[kind]}
    latent = {"max_num_seqs": 1} if kind == "mla" else {}
    prompts = LATENT_PROMPTS if kind == "mla" else PROMPTS
    found, output = start(
        folder,
        model,
        engine("plain", None, prefix_cache=kind == "mla", **llm, **latent),
        engine("whole", settings(folder / "whole"), **llm, **latent),
        engine("tails", settings(folder / "tails", save_unfull_chunk=True), max_num_batched_tokens=96, **llm, **latent),
        prompts=prompts,
    )
    if kind == "mla" and not HAS_MLA:
        assert found is None
        assert NO_MLA in output
        pytest.skip(f"this vLLM says: {NO_MLA}")
    assert found, output
    return kind, DTYPES[dtype], prompts, found


def test_outputs_are_those_of_an_engine_without_lmcache(served: Any) -> None:
    kind, _, prompts, engines = served
    plain, found = engines["plain"], engines["whole"]
    expected = plain["second"]
    if kind != "mla":
        assert plain["first"] == expected
    assert found["first"] == plain["first"]
    assert found["second"] == expected
    # Every whole chunk of every prompt came from LMCache, none of it from vLLM's own cache.
    assert len(found["second_loads"]) == sum(len(prompt) // 64 for prompt in prompts)
    assert {cached for _, _, cached in found["second_loads"]} == {0}
    assert found["partial"] == [expected[-1]]
    # 100 tokens held by vLLM are 3 blocks: chunk 0 is left alone, half of chunk 1 is skipped, the rest loaded.
    # With latent attention vLLM on a CPU keeps no prefix cache: all of it is loaded.
    assert found["partial_loads"][0] == ([0, 64, 0] if kind == "mla" else [64, 128, 96])
    assert found["intact"]
    # The negative control: with V (or the latent) zeroed on the way in, the comparison fails.
    assert found["spoiled"] != expected
    assert found["layout"] in found["key"].split("@")[0]


def test_chunked_prefill_and_unfull_chunks(served: Any) -> None:
    kind, itemsize, prompts, engines = served
    plain, found = engines["plain"], engines["tails"]
    assert found["first"] == plain["first"]
    if kind != "mla":  # the last token of a latent prompt that is all loaded comes from yet another kernel
        assert found["second"] == plain["second"]
        assert found["partial"] == [plain["second"][-1]]
    assert found["intact"]
    assert found["spoiled"] != found["second"]
    expected = [len(prompt) % 64 for prompt in prompts if len(prompt) % 64]
    assert [end - start for start, end, _ in found["second_loads"] if end % 64] == expected
    per_block = BLOCK_WIDTH[kind] * itemsize
    blocks = {-(-tail // BLOCKS[kind]) for tail in [*expected, 64]}
    assert found["lengths"] == [count * per_block for count in sorted(blocks)]  # a tail is filled up to whole blocks


def test_engines_with_different_block_sizes_never_exchange_objects(tmp_path: Path) -> None:
    """On one store. A chunk is as many bytes in either layout, so that only its name keeps the wrong one out."""
    model = make_model(tmp_path / "model")
    store = {"remote_url": f"fs://store:0{tmp_path}/store", "remote_serde": "naive", "local_disk": None}
    shared = settings(tmp_path, **store)
    small, large = {"dtype": "float32", "block_size": 32}, {"dtype": "float32", "block_size": 64}
    found, output = start(
        tmp_path,
        model,
        engine("plain", None, **small),
        engine("small", shared, script="once", **small),
        engine("large", shared, script="once", **large),
        engine("small again", shared, script="once", **small),
        engine("small untagged", shared, script="once", untagged=True, **small),
        engine("large untagged", shared, script="once", untagged=True, **large),
    )
    assert found, output
    expected, chunks = found["plain"]["first"], sum(len(prompt) // 64 for prompt in PROMPTS)
    assert found["small"]["first_loads"] == []
    assert found["large"]["first_loads"] == []
    assert found["small"]["lengths"] == found["large"]["lengths"]
    assert found["small"]["first"] == found["large"]["first"] == expected
    # The store does share: with the same layout all that the first engine stored is loaded.
    assert len(found["small again"]["first_loads"]) == chunks
    assert found["small again"]["first"] == expected
    # Without the layout's name in the keys the engines meet, and the answers are wrong.
    assert len(found["large untagged"]["first_loads"]) == chunks
    assert found["large untagged"]["first"] != expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 48}, "chunk_size 48 (LMCache) is not a multiple of block_size 32"),
    ({"use_layerwise": True}, "use_layerwise true"),
    ({"enable_blending": True, "use_layerwise": True, "save_unfull_chunk": True}, "enable_blending true"),
    ({"remote_serde": "cachegen"}, "remote_serde 'cachegen'"),
]


def test_start_up_is_refused(tmp_path: Path) -> None:
    """What whole blocks cannot do, each named at start-up: an engine is not served without a cache in silence."""
    models = {kind: MODELS[kind](tmp_path / kind) for kind in ("gqa", "mla")}
    cases = [("gqa", changes, message) for changes, message in REFUSED]
    if HAS_MLA:
        cases.append(("mla", {"extra_config": {}}, "save_only_first_rank true with an MLA model"))
    engines = [
        engine(str(number), settings(tmp_path, **changes), script="refused", dtype="float32", block_size=BLOCKS[kind])
        | {"model": str(models[kind])}
        for number, (kind, changes, _) in enumerate(cases)
    ]
    found, output = start(tmp_path, models["gqa"], *engines)
    assert found, output
    for number, (_, _, message) in enumerate(cases):
        assert f"StartUpError: {message}" in found[str(number)]["refused"]
