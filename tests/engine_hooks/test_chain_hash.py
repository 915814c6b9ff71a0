# SPDX-License-Identifier: Apache-2.0
"""The blake3 chain: golden values, a second implementation from its definition, growth, LMCache's token database."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from semkv.engine_hooks import chain_hash
from semkv.engine_hooks.chain_hash import ChainHasher, install, token_bytes
from semkv.native import _core

GOLDEN = [
    # model, revision, chunk size, tokens, hashes
    ("m", "", 16, list(range(40)), ["-7ff512bd94d3a6fb", "-70c056058045fe75"]),
    ("Qwen/Qwen2.5-7B-Instruct", "a09a354", 256, list(range(600)), ["5e6baf4ced3e5fee", "-51b40dddf4f0197d"]),
    ("模型", "", 4, [0, 1, 2**31, 2**32 - 1, 5, 6, 7, 8], ["491234919a68799e", "-786f3a940d4d8daf"]),
]


def by_definition(model: str, revision: str, size: int, tokens: list[int], *, unfull: bool = False) -> list[int]:
    state, found = blake3(msgpack.packb([model, revision, size])).digest(), []
    for start in range(0, len(tokens), size):
        chunk = tokens[start : start + size]
        if len(chunk) < size and not unfull:
            break
        state = blake3(state + struct.pack(f"<{len(chunk)}I", *chunk)).digest()
        found.append(struct.unpack(">q", state[:8])[0])
    return found


@pytest.mark.parametrize(("model", "revision", "size", "tokens", "golden"), GOLDEN)
def test_golden(model: str, revision: str, size: int, tokens: list[int], golden: list[str]) -> None:
    found = ChainHasher(model, revision, size).hashes(tokens)
    assert [f"{value:x}" for value in found] == golden
    assert found == by_definition(model, revision, size, tokens)


@settings(max_examples=200, deadline=None)
@given(
    size=st.sampled_from([1, 4, 16, 256]),
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=600),
    unfull=st.booleans(),
)
def test_any_tokens(size: int, tokens: list[int], unfull: bool) -> None:
    hasher = ChainHasher("m", "r", size)
    wanted = by_definition("m", "r", size, tokens, unfull=unfull)
    assert hasher.hashes(tokens, unfull=unfull) == wanted
    assert hasher.hashes(tokens, unfull=unfull) == wanted  # remembered


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 80), st.integers(0, 3)), max_size=12))
def test_branching_conversations(turns: list[tuple[int, int, int]]) -> None:
    """Conversations that grow, shrink and branch, with a memory that holds some of them."""
    hasher = ChainHasher("m", "", 4, memory=3000)
    known: list[list[int]] = [[], [], [], []]
    for which, cut, salt in turns:
        known[which] = known[which][:cut] + [salt] * 30
        assert hasher.hashes(known[which]) == by_definition("m", "", 4, known[which])
        assert hasher._used <= 3000 or len(hasher._chains) == 0


def test_a_grown_conversation_is_hashed_from_where_it_grew() -> None:
    hasher = ChainHasher("m", "", 16)
    tokens = list(range(1600))
    hasher.hashes(tokens)
    assert hasher.hashed_chunks == 100
    tokens += list(range(160))
    assert hasher.hashes(tokens) == by_definition("m", "", 16, tokens)
    assert hasher.hashed_chunks == 110 and hasher.reused_chunks == 100
    branch = tokens[:800] + [9] * 800
    assert hasher.hashes(branch) == by_definition("m", "", 16, branch)
    assert hasher.hashed_chunks == 160
    assert len(hasher._chains) == 2, "what a chain extends is forgotten"


def test_lists_tensors_and_vllms_lists_give_the_same() -> None:
    torch = pytest.importorskip("torch")
    tokens = list(range(100))
    wanted = ChainHasher("m", "", 16).hashes(tokens)
    assert ChainHasher("m", "", 16).hashes(torch.tensor(tokens)) == wanted
    assert ChainHasher("m", "", 16).hashes(torch.tensor(tokens, dtype=torch.int32)) == wanted
    assert ChainHasher("m", "", 16).hashes(tuple(tokens)) == wanted


@pytest.fixture(params=["core", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to read tokens: with the C++ core, and where semkv was built without it."""
    if request.param == "python":
        monkeypatch.setattr(chain_hash, "_read_plain", lambda tokens: None)
    else:
        assert chain_hash._read_plain is _core.token_bytes
    return str(request.param)


ODD = [0, 1, -1, 2**30 - 1, 2**30, -(2**30), 2**31, 2**32 - 1, 2**32, 2**64 + 5, -(2**64) - 5, 10**30, -(10**30)]


@pytest.mark.usefixtures("reader")
def test_any_int_is_its_low_32_bits() -> None:
    wanted = struct.pack(f"<{len(ODD)}I", *[value & 0xFFFFFFFF for value in ODD])
    assert token_bytes(ODD) == wanted and token_bytes(tuple(ODD)) == wanted
    assert token_bytes([]) == b"" == token_bytes(())


class _Number(int):
    pass


@pytest.mark.usefixtures("reader")
def test_what_only_looks_like_ints_in_a_list() -> None:
    numpy = pytest.importorskip("numpy")
    assert token_bytes([True, _Number(7), numpy.int64(9)]) == struct.pack("<3I", 1, 7, 9)
    assert token_bytes(range(3)) == token_bytes(iter([0, 1, 2])) == struct.pack("<3I", 0, 1, 2)
    for bad in ([1, 1.5], [1, "2"], [1, None], None, 7):
        with pytest.raises(TypeError):
            token_bytes(bad)


@pytest.mark.usefixtures("reader")
def test_vllms_read_only_list() -> None:
    utils = pytest.importorskip("vllm.v1.utils")
    tokens = [5, 2**31, -1, 7]
    assert token_bytes(utils.ConstantList(tokens)) == token_bytes(tokens)
    assert token_bytes(utils.ConstantList([5, True])) == token_bytes([5, 1])


class _Window(Sequence[int]):
    """A sequence of its own kind: not all of what it keeps under vLLM's name is in it."""

    def __init__(self, kept: Any, start: int) -> None:
        self._x = kept
        self._start = start

    def __len__(self) -> int:
        return len(self._x) - self._start

    def __getitem__(self, where: Any) -> Any:
        return list(self._x)[self._start :][where]


@pytest.mark.usefixtures("reader")
def test_another_sequence_is_read_by_what_it_says() -> None:
    assert token_bytes(_Window([1, 2, 3], 1)) == token_bytes([2, 3])
    assert token_bytes(_Window((1, 2, 3), 0)) == token_bytes([1, 2, 3])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-(2**70), 2**70), max_size=300))
def test_the_core_reads_plain_ints_and_nothing_else(tokens: list[int]) -> None:
    wanted = struct.pack(f"<{len(tokens)}I", *[value & 0xFFFFFFFF for value in tokens])
    assert _core.token_bytes(tokens) == wanted == _core.token_bytes(tuple(tokens))
    assert _core.token_bytes([*tokens, 1.0]) is None and _core.token_bytes([*tokens, True]) is None


def test_model_revision_and_chunk_size_are_part_of_it() -> None:
    tokens = list(range(64))
    found = {
        tuple(ChainHasher(*who).hashes(tokens)[-1:])
        for who in (("a", "", 16), ("b", "", 16), ("a", "r", 16), ("a", "", 32))
    }
    assert len(found) == 4


def test_another_process_with_another_hash_seed_gives_the_same() -> None:
    code = "from semkv.engine_hooks.chain_hash import ChainHasher as C; print(C('m','',16).hashes(list(range(64))))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "random")
    }
    assert outputs == {str(ChainHasher("m", "", 16).hashes(list(range(64)))) + "\n"}


@pytest.mark.parametrize("unfull", [False, True])
def test_in_lmcaches_token_database(unfull: bool) -> None:
    pytest.importorskip("lmcache")
    import torch
    from lmcache.v1.token_database import ChunkedTokenDatabase

    from tests.engine_hooks.clients import lmcache_config, metadata

    config = lmcache_config(save_unfull_chunk=unfull)
    database: Any = ChunkedTokenDatabase(config, metadata(config))
    plain = list(database.process_tokens(list(range(40)), make_key=False))
    assert install(database, config, model="m", revision="") and not install(database, config, model="m", revision="")
    tokens = list(range(40))
    wanted = by_definition("m", "", 16, tokens, unfull=unfull)
    found = list(database.process_tokens(tokens, make_key=False))
    assert [value for _, _, value in found] == wanted
    assert [item[:2] for item in found] == [item[:2] for item in plain]
    # the engine's ways to call it
    mask = torch.ones(40, dtype=torch.bool)
    mask[:16] = False
    keys = list(database.process_tokens(tokens=torch.tensor(tokens), mask=mask, request_configs={"lmcache.tag.a": "b"}))
    assert [key.chunk_hash for _, _, key in keys] == wanted[1:] and keys[0][0] == 16
    assert keys[0][2].tags == (("a", "b"),) or keys[0][2].tags
    by_hash = list(database.process_tokens(hashes=wanted, offsets=[16] * len(wanted)))
    assert [key.chunk_hash for _, _, key in by_hash] == wanted
    with pytest.raises(ValueError, match="multiple of chunk_size"):
        mask[16] = False
        list(database.process_tokens(tokens=tokens, mask=mask))
