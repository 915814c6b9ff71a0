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

pytestmark = [pytest.mark.engine, pytest.mark.lmcache, pytest.mark.timeout(1800)]

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
            timeout=1700,
            check=False,
        )
    output = done.stdout + done.stderr
    found = [line.removeprefix("PROBE ") for line in done.stdout.splitlines() if line.startswith("PROBE ")]
    return (json.loads(found[0]) if found else None), output


def engine(name: str, lmcache: dict[str, Any] | None, *, script: str = "all", **llm: Any) -> dict[str, Any]:
    options = {key: llm.pop(key) for key in ("model", "untagged", "prefix_cache") if key in llm}
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


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"chunk_size": 48}, "chunk_size 48 (LMCache) is not a multiple of block_size 32"),
    ({"use_layerwise": True}, "use_layerwise true"),
    ({"enable_blending": True, "use_layerwise": True, "save_unfull_chunk": True}, "enable_blending true"),
    ({"remote_serde": "cachegen"}, "remote_serde 'cachegen'"),
]
REFUSED_LATENT: list[tuple[dict[str, Any], str]] = [
    ({"extra_config": {}}, "save_only_first_rank true with an MLA model"),
]


def served_by(folder: Path, model: Path, kind: str, dtype: str) -> list[dict[str, Any]]:
    """An engine without LMCache, one that stores whole chunks, one that stores tails too and prefills in pieces of 96
    tokens (which vLLM does not do on a CPU for latent attention).

    With latent attention vLLM's CPU kernels answer otherwise for each way in which they come to a token: with other
    requests beside it, from the whole prompt, from a context that is there, alone. The engine to compare with is then
    vLLM with its own prefix cache, one request at a time: it comes to each token the same way.
    """
    llm: dict[str, Any] = {"model": str(model), "dtype": dtype, "block_size": BLOCKS[kind]}
    latent = {"max_num_seqs": 1} if kind == "mla" else {}
    name, own = f"{kind}-{dtype}", folder / f"{kind}-{dtype}"
    own.mkdir()
    tails = settings(own / "tails", save_unfull_chunk=True)
    return [
        engine(f"{name} plain", None, prefix_cache=kind == "mla", **llm, **latent),
        engine(f"{name} whole", settings(own / "whole"), **llm, **latent),
        engine(f"{name} tails", tails, max_num_batched_tokens=96, **llm, **latent),
    ]


def refused_by(folder: Path, model: Path, kind: str, cases: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    llm: dict[str, Any] = {"model": str(model), "dtype": "float32", "block_size": BLOCKS[kind]}
    return [
        engine(f"refused {message}", settings(folder, **changes), script="refused", **llm) for changes, message in cases
    ]


def on_one_store(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Engines with blocks of 32 and 64 tokens on one store. A chunk is as many bytes in either layout."""
    store = {"remote_url": f"fs://store:0{folder}/store", "remote_serde": "naive", "local_disk": None}
    shared, common = settings(folder, **store), {"script": "once", "model": str(model), "dtype": "float32"}
    return [
        engine("small", shared, block_size=32, **common),
        engine("large", shared, block_size=64, **common),
        engine("small again", shared, block_size=32, **common),
        engine("small untagged", shared, block_size=32, untagged=True, **common),
        engine("large untagged", shared, block_size=64, untagged=True, **common),
    ]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all engines with keys and values did, one after the other in one process: to import vLLM takes longer than
    to start most of them."""
    folder = tmp_path_factory.mktemp("dense")
    models = {kind: MODELS[kind](folder / kind) for kind in ("gqa", "mha")}
    engines = [e for kind, model in models.items() for dtype in DTYPES for e in served_by(folder, model, kind, dtype)]
    engines += on_one_store(folder, models["gqa"])
    engines += refused_by(folder, models["gqa"], "gqa", REFUSED)
    found, output = start(folder, models["gqa"], *engines)
    assert found, output
    return dict(found)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same of engines with latent attention, where this vLLM has it."""
    folder = tmp_path_factory.mktemp("latent")
    model = MODELS["mla"](folder / "model")
    engines = [e for dtype in DTYPES for e in served_by(folder, model, "mla", dtype)] if HAS_MLA else []
    engines = engines or served_by(folder, model, "mla", "float32")[:1]
    if HAS_MLA:
        engines += refused_by(folder, model, "mla", REFUSED_LATENT)
    found, output = start(folder, model, *engines, prompts=LATENT_PROMPTS)
    if not HAS_MLA:
        assert found is None
        assert NO_MLA in output
        pytest.skip(f"this vLLM says: {NO_MLA}")
    assert found, output
    return dict(found)


@pytest.fixture(params=[f"{model}-{dtype}" for model in MODELS for dtype in sorted(DTYPES)])
def served(request: pytest.FixtureRequest) -> Any:
    """(kind, bytes of an element, prompts, what each engine did) of one model."""
    kind, dtype = request.param.split("-")
    found = request.getfixturevalue("latent" if kind == "mla" else "dense")
    engines = {name: found[f"{request.param} {name}"] for name in ("plain", "whole", "tails")}
    return kind, DTYPES[dtype], LATENT_PROMPTS if kind == "mla" else PROMPTS, engines


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


def test_engines_with_different_block_sizes_never_exchange_objects(dense: dict[str, Any]) -> None:
    """On one store, where only an object's name keeps the wrong one out."""
    expected, chunks = dense["gqa-float32 plain"]["first"], sum(len(prompt) // 64 for prompt in PROMPTS)
    small, large = dense["small"], dense["large"]
    assert small["first_loads"] == []
    assert large["first_loads"] == []
    assert small["lengths"] == large["lengths"]
    assert small["first"] == large["first"] == expected
    # The store does share: with the same layout all that the first engine stored is loaded.
    assert len(dense["small again"]["first_loads"]) == chunks
    assert dense["small again"]["first"] == expected
    # Without the layout's name in the keys the engines meet, and the answers are wrong.
    assert len(dense["large untagged"]["first_loads"]) == chunks
    assert dense["large untagged"]["first"] != expected


@pytest.mark.parametrize("message", [message for _, message in REFUSED])
def test_start_up_is_refused(dense: dict[str, Any], message: str) -> None:
    """What whole blocks cannot do, each named at start-up: an engine is not served without a cache in silence."""
    assert f"StartUpError: {message}" in dense[f"refused {message}"]["refused"]


@pytest.mark.parametrize("message", [message for _, message in REFUSED_LATENT])
def test_start_up_with_latent_attention_is_refused(latent: dict[str, Any], message: str) -> None:
    assert f"StartUpError: {message}" in latent[f"refused {message}"]["refused"]
