# SPDX-License-Identifier: Apache-2.0
"""When the API server's own hashes are trusted, and what they are added to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

from lmcache.v1.token_database import ChunkedTokenDatabase

from semkv.engine_hooks.front_end_hashes import FrontEndHashes
from semkv.engine_hooks.lookup_client import HashTexts
from semkv.engine_hooks.settings import HookSettings
from tests.engine_hooks.clients import lmcache_config


def made(*, trusted: bool = True, skip: int = 0) -> Any:
    transfer = SimpleNamespace(get_from_extra_config=lambda name, default: skip or default)
    hashes = FrontEndHashes(SimpleNamespace(kv_transfer_config=transfer), HookSettings())
    hashes._database = ChunkedTokenDatabase(lmcache_config(), None)
    hashes._texts = HashTexts()
    hashes.trusted = trusted
    return hashes


def state(tokens: int = 40) -> Any:
    return SimpleNamespace(prompt_token_ids=list(range(tokens)))


def own(hashes: Any, tokens: int = 40) -> list[str]:
    return [f"{value:x}" for _, _, value in hashes._database.process_tokens(list(range(tokens)), make_key=False)]


def request(**fields: Any) -> Any:
    usual = {
        "sampling_params": SimpleNamespace(stop=["x"], extra_args=None),
        "mm_features": None,
        "prompt_token_ids": [1],
        "prompt_is_token_ids": None,
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**usual, **fields})


def test_a_stop_string_gets_the_hashes_and_keeps_what_is_there() -> None:
    hashes = made()
    assert hashes.answer(state(), None, "x") == {"chunk_hashes": own(hashes)}
    assert hashes.answer(state(), {"first_tok": 1}, "x") == {"first_tok": 1, "chunk_hashes": own(hashes)}
    assert hashes.answer(state(10), None, "x") is None, "a prompt shorter than a chunk"


@pytest.mark.parametrize("stop_reason", [None, 7])
def test_other_endings_are_the_engines(stop_reason: Any) -> None:
    assert made().answer(state(), None, stop_reason) is None


def test_the_engines_first_answer_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    hashes = made()
    given = {"chunk_hashes": own(hashes)}
    assert hashes.answer(state(), given, None) is given and hashes.trusted and hashes.checked
    other = made()
    wrong = {"chunk_hashes": ["1", "2"]}
    assert other.answer(state(), wrong, None) is wrong
    assert not other.trusted and other.answer(state(), None, "x") is None
    assert len([r for r in caplog.records if "carry no chunk hashes" in r.getMessage()]) == 1


def test_until_it_is_built_nothing_is_added() -> None:
    hashes = made(trusted=False)
    assert hashes.answer(state(), None, "x") is None and not hashes.wanted(request())


def test_skipped_tokens_are_left_out() -> None:
    hashes = made(skip=10)
    assert hashes.answer(state(), None, "x") == {"chunk_hashes": own(hashes, 30)}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, True),
        ({"cache_salt": "s"}, False),
        ({"lora_request": object()}, False),
        ({"mm_features": [object()]}, False),
        ({"prompt_token_ids": None}, False),
        ({"sampling_params": None}, False),
        (
            {"sampling_params": SimpleNamespace(stop=["x"], extra_args={"kv_transfer_params": {"lmcache.tag.a": "b"}})},
            False,
        ),
    ],
)
def test_which_requests_are_followed(fields: dict[str, Any], wanted: bool) -> None:
    assert made().wanted(request(**fields)) is wanted


def test_requests_without_stop_strings_are_followed_only_until_checked() -> None:
    hashes = made()
    plain = request(sampling_params=SimpleNamespace(stop=[], extra_args=None))
    assert hashes.wanted(plain)
    hashes.checked = True
    assert not hashes.wanted(plain)
