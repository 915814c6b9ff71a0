# SPDX-License-Identifier: Apache-2.0
"""Today's two calls: same bodies, same answers, and what is wrong is said by field and position."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from semkv.consumers.gateway.answers import Report, num_evicted
from semkv.consumers.gateway.settings import GatewaySettings, GatewaySettingsError, Token
from semkv.consumers.rank import RankWorker
from tests.consumers.gateway.conftest import Gateway, running
from tests.consumers.rank.stand_in import StandInStorage

Ranks = Callable[..., RankWorker]


async def test_prefetch_answers_as_today_and_more(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1, 2, -3})
    rank_of(storage)
    answer = await gateway.post("prefetch", {"chunk_hashes": ["2", "-3", "1"], "lookup_id": "turn_prefetch"})
    body = answer.json()
    assert answer.status_code == 200
    assert (body["status"], body["lookup_id"], body["num_chunks"]) == ("prefetch_started", "turn_prefetch", 3)
    assert [part["instance"] for part in body["ranks"]] == ["e0"] and body["ranks"][0]["accepted"]
    done = (await gateway.client.get(f"/memory/commands/{body['command_id']}?wait=20")).json()
    assert done["ranks"][0]["state"] == "succeeded" and done["ranks"][0]["counts"] == {"loaded": 3}
    assert storage.cpu == {1, 2, -3}


async def test_a_constant_lookup_id_shared_by_all_sessions_is_only_a_label(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1, 2})
    rank_of(storage)
    answers = [
        (await gateway.post("prefetch?wait=20", {"chunk_hashes": [text], "lookup_id": "turn_prefetch"})).json()
        for text in ("1", "2", "1")
    ]
    assert len({a["command_id"] for a in answers}) == 3
    assert [a["ranks"][0]["counts"] for a in answers] == [{"loaded": 1}, {"loaded": 1}, {"already_there": 1}]


async def test_unordered_and_doubled_hashes_load_all_the_same(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk=set(range(1, 10)))
    rank_of(storage)
    texts = ["9", "1", "5", "1", "f", "9"]
    body = (await gateway.post("prefetch?wait=20", {"chunk_hashes": texts, "lookup_id": "x"})).json()
    assert body["num_chunks"] == 6 and body["ranks"][0]["counts"] == {"loaded": 3, "missing": 1}
    assert storage.calls[-1][1] == (9, 1, 5, 15)


async def test_evict_counts_a_chunk_once_over_tiers_and_ranks(gateway: Gateway, rank_of: Ranks) -> None:
    first, second = StandInStorage(disk={1, 2, 3}, cpu={1, 2}), StandInStorage(disk={1, 2}, cpu={1})
    rank_of(first, rank=0, world_size=2)
    rank_of(second, rank=1, world_size=2)
    answer = await gateway.post("evict", {"chunk_hashes": ["1", "2", "77"]})
    body = answer.json()
    assert answer.status_code == 200 and body["status"] == "success"
    assert body["num_evicted"] == 2, "77 was never there"
    assert len(body["ranks"]) == 2 and first.disk == {3} and second.disk == set()


async def test_locations_are_lmcaches_names_of_tiers(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1}, cpu={1})
    rank_of(storage)
    for locations, left in (["LocalCPUBackend"], ({1}, set())), (None, (set(), set())):
        body = (await gateway.post("evict", {"chunk_hashes": ["1"], "locations": locations})).json()
        assert body["num_evicted"] == 1
        assert (storage.disk, storage.cpu) == left


@pytest.mark.parametrize(
    ("path", "body", "field", "position", "text"),
    [
        ("prefetch", {"lookup_id": "x"}, "chunk_hashes", None, "required"),
        ("prefetch", {"chunk_hashes": [], "lookup_id": "x"}, "chunk_hashes", None, "at least 1"),
        ("prefetch", {"chunk_hashes": ["1"]}, "lookup_id", None, "required"),
        ("prefetch", {"chunk_hashes": ["1"], "lookup_id": 5}, "lookup_id", None, "string"),
        ("prefetch", {"chunk_hashes": "abc", "lookup_id": "x"}, "chunk_hashes", None, "list"),
        ("prefetch", {"chunk_hashes": ["1", "zz"], "lookup_id": "x"}, "chunk_hashes", 1, "zz"),
        ("prefetch", {"chunk_hashes": ["1", 5], "lookup_id": "x"}, "chunk_hashes", 1, "string"),
        ("prefetch", {"chunk_hashes": ["1", "2", ""], "lookup_id": "x"}, "chunk_hashes", 2, ""),
        ("prefetch", {"chunk_hashes": ["0x1"], "lookup_id": "x"}, "chunk_hashes", 0, "0x1"),
        ("prefetch", {"chunk_hashes": [" 1"], "lookup_id": "x"}, "chunk_hashes", 0, ""),
        ("prefetch", {"chunk_hashes": ["1\n"], "lookup_id": "x"}, "chunk_hashes", 0, ""),
        ("prefetch", {"chunk_hashes": ["1_0"], "lookup_id": "x"}, "chunk_hashes", 0, ""),
        ("prefetch", {"chunk_hashes": ["-8000000000000001"], "lookup_id": "x"}, "chunk_hashes", 0, ""),
        ("prefetch", {"chunk_hashes": ["1"], "lookup_id": "x", "expires_in_ms": -1}, "expires_in_ms", None, ""),
        ("prefetch", {"chunk_hashes": ["1"], "lookup_id": "x", "dry_run": "yes"}, "dry_run", None, ""),
        ("evict", {"chunk_hashes": ["1"], "locations": []}, "locations", None, "at least 1"),
        ("evict", {"chunk_hashes": ["1"], "locations": ["LocalCPU"]}, "locations", 0, "LocalCPUBackend"),
        ("evict", {"chunk_hashes": ["1"], "locations": "LocalCPUBackend"}, "locations", None, "list"),
        ("retain", {"chunk_hashes": ["1"], "session": "", "ttl_s": 1}, "session", None, ""),
        ("retain", {"chunk_hashes": ["1"], "session": "s", "ttl_s": 0}, "ttl_s", None, ""),
        ("release", {}, "session", None, "required"),
        ("locate", {"chunk_hashes": [None]}, "chunk_hashes", 0, ""),
    ],
)  # fmt: skip
async def test_bad_input_is_400_by_field_and_position_and_nothing_runs(
    gateway: Gateway, rank_of: Ranks, path: str, body: Any, field: str, position: int | None, text: str
) -> None:
    storage = StandInStorage(disk={1}, cpu={1})
    rank_of(storage)
    answer = await gateway.post(path, body)
    problem = answer.json()
    assert answer.status_code == 400, problem
    assert problem["field"] == field and problem.get("position") == position and text in problem["error"], problem
    assert storage.calls == []


@pytest.mark.parametrize("raw", [b"", b"nope", b"[]", b'"x"', b"null", b"{", b"\xff\xfe"])
async def test_a_body_that_is_no_object_is_400(gateway: Gateway, raw: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("prefetch", "evict"):
        answer = await gateway.client.post(f"/memory/{path}", content=raw, headers=headers)
        assert answer.status_code == 400 and "error" in answer.json(), answer.text


async def test_no_engine_is_503_and_names_what_is_live(gateway: Gateway, rank_of: Ranks) -> None:
    body = {"chunk_hashes": ["1"], "lookup_id": "x"}
    answer = await gateway.post("prefetch", body)
    assert answer.status_code == 503 and "none, is one running?" in answer.json()["error"]
    rank_of(StandInStorage())
    answer = await gateway.post("prefetch", {**body, "model": "other"})
    assert (
        answer.status_code == 503 and "model 'other'" in answer.json()["error"] and "e0 (tiny" in answer.json()["error"]
    )


async def test_without_a_name_every_domain_is_asked_with_one_only_that(gateway: Gateway, rank_of: Ranks) -> None:
    one, other = StandInStorage(disk={1}), StandInStorage(disk={1})
    rank_of(one)
    rank_of(other, instance="e1", model="big")
    body = (await gateway.post("prefetch?wait=20", {"chunk_hashes": ["1"], "lookup_id": "x"})).json()
    assert len(body["command_ids"]) == 2 and one.cpu == other.cpu == {1}
    assert len({part["domain"] for part in body["ranks"]}) == 2
    body = (await gateway.post("evict", {"chunk_hashes": ["1"], "model": "big"})).json()
    assert [part["instance"] for part in body["ranks"]] == ["e1"] and one.cpu == {1} and other.cpu == set()
    body = (await gateway.post("evict", {"chunk_hashes": ["1"], "instance": "e0"})).json()
    assert [part["instance"] for part in body["ranks"]] == ["e0"] and one.cpu == set()


async def test_a_silent_rank_is_named_and_the_rest_is_told(rank_of: Ranks, settings: GatewaySettings) -> None:
    quick, stuck = StandInStorage(cpu={1}), StandInStorage(cpu={1})
    rank_of(quick, rank=0, world_size=2)
    rank_of(stuck, rank=1, world_size=2)
    stuck.gate.clear()
    async with running(settings) as gateway:
        try:
            answer = await gateway.post("evict?wait=1", {"chunk_hashes": ["1"]})
            body = answer.json()
            assert answer.status_code == 207 and body["status"] == "partial" and body["unanswered"] == ["e0.1"]
            assert [part["answered"] for part in body["ranks"]] == [True, False]
            quick.gate.clear()
            answer = await gateway.post("evict?wait=0.5", {"chunk_hashes": ["1"]})
            assert answer.status_code == 504 and len(answer.json()["unanswered"]) == 2
            running_now = await gateway.client.get(f"/memory/commands/{answer.json()['command_id']}")
            assert running_now.status_code == 200 and running_now.json()["status"] == "running"
        finally:
            stuck.gate.set()
            quick.gate.set()
        done = await gateway.client.get(f"/memory/commands/{answer.json()['command_id']}?wait=20")
        assert done.status_code == 200 and done.json()["unanswered"] == []


async def test_a_rank_that_fails_is_not_called_a_success(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(cpu={1})
    storage.fail_with = RuntimeError("the disk is on fire")
    rank_of(storage)
    answer = await gateway.post("evict", {"chunk_hashes": ["1"]})
    assert answer.status_code == 502 and "the disk is on fire" in answer.json()["error"]


async def test_a_prefetch_can_be_cancelled_and_expires(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1, 2, 3})
    storage.gate.clear()
    rank_of(storage)
    try:
        body = (await gateway.post("prefetch", {"chunk_hashes": ["1", "2"], "lookup_id": "x"})).json()
        assert body["status"] == "prefetch_started"
        cancelled = await gateway.client.delete(f"/memory/commands/{body['command_id']}")
        assert cancelled.status_code == 202
        done = (await gateway.client.get(f"/memory/commands/{body['command_id']}?wait=20")).json()
        assert done["ranks"][0]["state"] == "cancelled"
        late = {"chunk_hashes": ["3"], "lookup_id": "x", "expires_in_ms": 1}
        expired = (await gateway.post("prefetch?wait=20", late)).json()
        assert expired["ranks"][0]["state"] == "expired"
    finally:
        storage.gate.set()
    assert (await gateway.client.delete("/memory/commands/unknown")).status_code == 404
    assert (await gateway.client.get("/memory/commands/unknown")).status_code == 404


async def test_a_command_can_be_asked_for_over_a_restart_of_the_gateway(
    rank_of: Ranks, settings: GatewaySettings
) -> None:
    rank_of(StandInStorage(disk={1}))
    async with running(settings) as gateway:
        body = (await gateway.post("prefetch?wait=20", {"chunk_hashes": ["1"], "lookup_id": "x"})).json()
    async with running(settings) as gateway:
        again = await gateway.client.get(f"/memory/commands/{body['command_id']}")
        assert again.status_code == 200 and again.json()["ranks"][0]["counts"] == {"loaded": 1}


async def test_retain_release_and_locate(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk={1, 2}, cpu={1})
    rank_of(storage)
    located = (await gateway.post("locate", {"chunk_hashes": ["1", "2", "3", "1"]})).json()
    assert located["chunk_tiers"] == [["cpu", "disk"], ["disk"], [], ["cpu", "disk"]]
    assert (await gateway.post("retain", {"session": "s", "chunk_hashes": ["1"], "ttl_s": 60})).status_code == 200
    kept = (await gateway.post("evict", {"chunk_hashes": ["1", "2"]})).json()
    assert kept["num_evicted"] == 1 and kept["ranks"][0]["counts"] == {"shared": 1, "removed": 1}
    assert (await gateway.post("release", {"session": "s"})).status_code == 200
    assert (await gateway.post("evict", {"chunk_hashes": ["1"]})).json()["num_evicted"] == 1


def test_num_evicted_needs_every_answering_rank_to_have_none_left() -> None:
    class Result:
        def __init__(self, *statuses: str) -> None:
            self.chunk_status = statuses

    def evicted(*ranks: Result) -> int:
        return num_evicted(Report("evict", ("c",), (), set(), dict(enumerate(ranks))))  # type: ignore[arg-type]

    assert evicted(Result("removed", "absent", "shared"), Result("absent", "absent", "removed")) == 1
    assert evicted(Result("removed"), Result()) == 1, "a rank that tried nothing says nothing"
    assert evicted() == 0


async def test_what_a_person_gets_wrong_at_first_is_told_in_words(gateway: Gateway) -> None:
    for path, body in (
        ("prefetch", {"lookup_id": "a", "chunk_hashes": ["1", "xx"]}),
        ("evict", {"chunk_hashes": ["xx"]}),
    ):
        told = (await gateway.post(path, body)).json()["error"]
        assert told.endswith("expected 16 lower-case hex digits, or LMCache's form: a sign and no padding, got 'xx'")
    untyped = await gateway.client.post("/memory/evict", content=b'{"chunk_hashes": ["1"]}')
    assert untyped.status_code == 400 and "Content-Type: application/json" in untyped.json()["error"]
    page = await gateway.client.get("/", follow_redirects=True)
    assert page.url.path == "/ui/" and "<title>semkv</title>" in page.text


async def test_tokens(rank_of: Ranks, settings: GatewaySettings) -> None:
    storage = StandInStorage(cpu={1})
    rank_of(storage)
    tokens = (Token("reader", "r" * 20), Token("boss", "b" * 20, force=True))
    body = {"chunk_hashes": ["1"], "force": True}
    async with running(replace(settings, tokens=tokens)) as gateway:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "r" * 20}):
            answer = await gateway.post("evict", body, headers=headers)
            assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
            why = "this token is not known" if headers else "a bearer token is needed"
            assert answer.json()["error"].startswith(why) and "SEMKV_GATEWAY_TOKENS_FILE" in answer.json()["error"]
        for path in ("/metrics", "/memory/engines", "/memory/events", "/openapi.json", "/docs"):
            assert (await gateway.client.get(path)).status_code == 401
        for path in ("/healthz", "/", "/ui/"):
            assert (await gateway.client.get(path)).status_code != 401
        refused = await gateway.post("evict", body, headers={"Authorization": "Bearer " + "r" * 20})
        assert refused.status_code == 403 and refused.json()["field"] == "force" and storage.calls == []
        assert (await gateway.post("evict", body, headers={"Authorization": "bearer " + "b" * 20})).status_code == 200
        schema = (await gateway.client.get("/openapi.json", headers={"Authorization": "Bearer " + "r" * 20})).json()
        assert schema["security"] == [{"bearer": []}]


def test_settings_off_loopback_need_tokens_and_secrets_are_not_shown(tmp_path: Any) -> None:
    with pytest.raises(GatewaySettingsError, match=r"SEMKV_GATEWAY_HOST: '0\.0\.0\.0' is not loopback"):
        GatewaySettings(host="0.0.0.0")
    file = tmp_path / "tokens"
    file.write_text("# comment\nagent abcdefghij0123456789\nops zyxwvutsrq9876543210 force\n")
    found = GatewaySettings.from_env({"SEMKV_GATEWAY_HOST": "0.0.0.0", "SEMKV_GATEWAY_TOKENS_FILE": str(file)})
    assert [token.force for token in found.tokens] == [False, True] and "abcdefghij" not in repr(found)
    file.write_text("agent short\n")
    with pytest.raises(GatewaySettingsError, match="line 1") as error:
        GatewaySettings.from_env({"SEMKV_GATEWAY_TOKENS_FILE": str(file)})
    assert "short" not in str(error.value)
    with pytest.raises(GatewaySettingsError, match="SEMKV_GATEWAY_PORT: 'x'"):
        GatewaySettings.from_env({"SEMKV_GATEWAY_PORT": "x"})


async def test_a_body_over_the_limit_is_413_declared_or_not(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage()
    rank_of(storage)
    million = json.dumps({"chunk_hashes": ["1"] * 1_000_000, "lookup_id": "x"}).encode()
    headers = {"Content-Type": "application/json"}
    assert (await gateway.client.post("/memory/prefetch", content=million, headers=headers)).status_code == 413

    async def pieces() -> Any:
        for start in range(0, len(million), 65536):
            yield million[start : start + 65536]

    answer = await gateway.client.post("/memory/prefetch", content=pieces(), headers=headers)
    assert answer.status_code == 413 and storage.calls == []


async def test_many_hashes_are_split_for_the_bus_and_answered_as_one(gateway: Gateway, rank_of: Ranks) -> None:
    storage = StandInStorage(disk=set(range(1, 9001)))
    rank_of(storage)
    texts = [f"{n:x}" for n in range(1, 9001)]
    body = (await gateway.post("prefetch?wait=60", {"chunk_hashes": texts, "lookup_id": "x"})).json()
    assert body["ranks"][0]["counts"] == {"loaded": 9000} and len(storage.calls) == 3
    assert (await gateway.post("evict", {"chunk_hashes": texts})).json()["num_evicted"] == 9000
