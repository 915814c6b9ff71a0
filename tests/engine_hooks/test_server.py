# SPDX-License-Identifier: Apache-2.0
"""One real `vllm serve` with LMCache (DDR and SSD, async loading): what its answers and its events say.

Every ending of a request, streamed and not, seen by the official `openai` client and by a subscriber on NATS.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from semkv.bus import hashes
from semkv.bus.embedded import EmbeddedServer
from semkv.cli.devengine.server import VLLMServer
from tests.engine_hooks.capture import Capture, stored_events
from tests.support.vllm_server import tiny_server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
CHUNK = 64


@dataclass
class Rig:
    nats: EmbeddedServer
    server: VLLMServer
    seen: Capture
    client: openai.OpenAI


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("server")
    with EmbeddedServer(folder / "nats") as nats, Capture(nats.url) as seen:
        server = tiny_server(folder / "engine", nats.url)
        try:
            server.start()
            yield Rig(nats, server, seen, openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0))
        finally:
            server.stop()


def prompt(text: str, words: int = 120) -> str:
    return f"{text} " + "the memory of an agent remembers what was said " * (words // 9)


def expected_hashes(rig: Rig, tokens: list[int], chunk: int = CHUNK) -> list[int]:
    """LMCache's builtin chain, computed here from its definition. The engine runs with PYTHONHASHSEED=0, as we do."""
    import os

    assert os.environ.get("PYTHONHASHSEED") == "0", "run with PYTHONHASHSEED=0, as the engine does"
    state, found = hash("0"), []
    for start in range(0, len(tokens) - len(tokens) % chunk, chunk):
        state = hash((state, tuple(tokens[start : start + chunk]), ()))
        found.append(state)
    return found


def tokens_of(rig: Rig, body: dict[str, Any]) -> list[int]:
    found: list[int] = rig.server.post("/tokenize", {"model": "tiny", **body})["tokens"]
    return found


def check(rig: Rig, request_id: str, tokens: list[int], params: dict[str, Any] | None, reason: str) -> Any:
    """The event of the request is there and says what the answer says and LMCache would."""
    (event,) = rig.seen.finished(request_id)
    assert event.hashes_status == "known", event
    assert list(event.chunk_hashes) == expected_hashes(rig, tokens)
    assert event.prompt_tokens == len(tokens)
    assert event.finish_reason == reason
    assert event.instance == "engine" and event.tenant == "default" and event.chunk_size == CHUNK
    assert event.engine_request_id != event.request_id
    assert event.arrived_at < event.finished_at
    if params is not None:
        assert params["chunk_hashes"] == [hashes.to_legacy(value) for value in event.chunk_hashes]
    return event


def test_length_chat(rig: Rig) -> None:
    messages = [{"role": "user", "content": prompt("chat that ends by length")}]
    answer = rig.client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
    tokens = tokens_of(rig, {"messages": messages})
    event = check(rig, answer.id, tokens, answer.kv_transfer_params, "length")
    assert event.generated_tokens == 4
    assert event.lmcache_hit_tokens == 0
    assert answer.kv_transfer_params["num_lmcache_cached_tokens"] == 0
    again = rig.client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
    assert again.choices[0].message.content == answer.choices[0].message.content
    (second,) = rig.seen.finished(again.id)
    assert second.chunk_hashes == event.chunk_hashes
    assert second.lmcache_hit_tokens == len(event.chunk_hashes) * CHUNK
    assert second.seq > event.seq and second.epoch == event.epoch


def test_length_text(rig: Rig) -> None:
    text = prompt("text that ends by length")
    answer = rig.client.completions.create(model="tiny", prompt=text, max_tokens=4, temperature=0)
    check(rig, answer.id, tokens_of(rig, {"prompt": text}), answer.kv_transfer_params, "length")


@pytest.mark.parametrize("api", ["chat", "text"])
@pytest.mark.parametrize("usage", [False, True])
def test_streaming_carries_the_field_once(rig: Rig, api: str, usage: bool) -> None:
    text = prompt(f"streamed {api} {usage}")
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if usage else {}
    common: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": True, **options}
    if api == "chat":
        messages = [{"role": "user", "content": text}]
        chunks = list(rig.client.chat.completions.create(messages=messages, **common))
        tokens = tokens_of(rig, {"messages": messages})
    else:
        chunks = list(rig.client.completions.create(prompt=text, **common))
        tokens = tokens_of(rig, {"prompt": text})
    carrying = [chunk for chunk in chunks if getattr(chunk, "kv_transfer_params", None) is not None]
    assert len(carrying) == 1
    assert carrying[0].choices[0].finish_reason == "length"
    assert carrying[0] is (chunks[-2] if usage else chunks[-1])
    check(rig, chunks[0].id, tokens, carrying[0].kv_transfer_params, "length")


def test_streaming_with_choices(rig: Rig) -> None:
    """n > 1: one field for the request, one event for each choice, the same hashes in all."""
    text = prompt("streamed choices")
    chunks = list(
        rig.client.completions.create(model="tiny", prompt=text, max_tokens=4, n=3, temperature=1.0, stream=True)
    )
    carrying = [chunk for chunk in chunks if getattr(chunk, "kv_transfer_params", None) is not None]
    assert len(carrying) == 1
    assert carrying[0] is [chunk for chunk in chunks if chunk.choices[0].finish_reason][-1]
    events = rig.seen.finished(chunks[0].id, count=3)
    assert {event.index for event in events} == {0, 1, 2}
    assert len({event.chunk_hashes for event in events}) == 1
    assert list(events[0].chunk_hashes) == expected_hashes(rig, tokens_of(rig, {"prompt": text}))


def test_choices_of_one_answer(rig: Rig) -> None:
    messages = [{"role": "user", "content": prompt("several choices")}]
    answer = rig.client.chat.completions.create(model="tiny", messages=messages, max_tokens=3, n=2, temperature=1.0)
    events = rig.seen.finished(answer.id, count=2)
    assert {event.index for event in events} == {0, 1}
    wanted = expected_hashes(rig, tokens_of(rig, {"messages": messages}))
    assert [list(event.chunk_hashes) for event in events] == [wanted, wanted]
    assert answer.kv_transfer_params["chunk_hashes"] == [hashes.to_legacy(value) for value in wanted]


def test_the_id_that_a_caller_chose(rig: Rig) -> None:
    own = "my-own_1-0"
    answer = rig.client.completions.create(
        model="tiny", prompt=prompt("an id of its own"), max_tokens=2, extra_headers={"X-Request-Id": own}
    )
    assert answer.id == f"cmpl-{own}"
    (event,) = rig.seen.finished(answer.id)
    assert event.index == 0 and event.hashes_status == "known"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_knows_nothing_of_it_reads_the_answer(rig: Rig, stream: bool) -> None:
    """Every part of the answer is what the official client's own types say, checked by them."""
    strict = openai.OpenAI(
        base_url=rig.server.url + "/v1", api_key="-", max_retries=0, _strict_response_validation=True
    )
    answer: Any = strict.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt("strict")}], max_tokens=3, stream=stream
    )
    reasons = [part.choices[0].finish_reason for part in (list(answer) if stream else [answer]) if part.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}


def first_text(rig: Rig, text: str) -> str:
    answer = rig.client.completions.create(model="tiny", prompt=text, max_tokens=24, temperature=0)
    return answer.choices[0].text


def ascii_piece(text: str) -> str:
    """A character of the answer that can serve as a stop string."""
    for position, character in enumerate(text):
        if position >= 2 and character.isascii() and character.isprintable() and not character.isspace():
            return character
    pytest.skip(f"no usable character in {text!r}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "text"])
def test_stop_string(rig: Rig, api: str, stream: bool) -> None:
    text = prompt(f"ends on a stop string {api} {stream}")
    common: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}
    if api == "chat":
        messages = [{"role": "user", "content": text}]
        whole = rig.client.chat.completions.create(messages=messages, **common).choices[0].message.content
        stop = ascii_piece(whole)
        call = rig.client.chat.completions.create
        arguments: dict[str, Any] = {"messages": messages}
        tokens = tokens_of(rig, {"messages": messages})
    else:
        stop = ascii_piece(first_text(rig, text))
        call = rig.client.completions.create
        arguments = {"prompt": text}
        tokens = tokens_of(rig, {"prompt": text})
    answer = call(**arguments, **common, stop=[stop], stream=stream)
    if stream:
        chunks = list(answer)
        last = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
        assert [chunk.choices[0].finish_reason for chunk in last] == ["stop"]
        request_id, params = chunks[0].id, last[0].kv_transfer_params
    else:
        assert answer.choices[0].finish_reason == "stop"
        request_id, params = answer.id, answer.kv_transfer_params
    # The engine sees an abort: the API server ended the request.
    check(rig, request_id, tokens, params, "abort")


def test_stop_token(rig: Rig) -> None:
    text = prompt("ends on a stop token")
    answer = rig.server.post(
        "/v1/completions",
        {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "return_token_ids": True},
    )
    token = answer["choices"][0]["token_ids"][2]
    answer = rig.server.post(
        "/v1/completions",
        {"model": "tiny", "prompt": text, "max_tokens": 8, "temperature": 0, "stop_token_ids": [token]},
    )
    assert answer["choices"][0]["finish_reason"] == "stop"
    check(rig, answer["id"], tokens_of(rig, {"prompt": text}), answer["kv_transfer_params"], "stop")


def test_prompt_shorter_than_a_chunk(rig: Rig) -> None:
    answer = rig.client.completions.create(model="tiny", prompt="hello", max_tokens=2)
    assert "chunk_hashes" not in (answer.kv_transfer_params or {})
    (event,) = rig.seen.finished(answer.id)
    assert event.hashes_status == "known" and event.chunk_hashes == ()


def test_same_prompt_at_once(rig: Rig) -> None:
    text = prompt("two at once")
    with ThreadPoolExecutor(4) as pool:
        answers = list(
            pool.map(lambda _: rig.client.completions.create(model="tiny", prompt=text, max_tokens=3), range(4))
        )
    wanted = expected_hashes(rig, tokens_of(rig, {"prompt": text}))
    for answer in answers:
        (event,) = rig.seen.finished(answer.id)
        assert list(event.chunk_hashes) == wanted


def test_session_and_trace(rig: Rig) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    text = prompt("a request with a session")
    answer = rig.client.completions.create(
        model="tiny",
        prompt=text,
        max_tokens=2,
        extra_body={"kv_transfer_params": {"semkv": {"session": "会话 1", "traceparent": traceparent, "tenant": "b"}}},
    )
    (event,) = rig.seen.finished(answer.id)
    assert event.session == "会话 1"
    assert event.tenant == "default", "a request may not choose its tenant unless the operator says so"
    assert list(event.chunk_hashes) == expected_hashes(rig, tokens_of(rig, {"prompt": text}))
    headers = [h for s, h, _ in rig.seen.raw if s.endswith(".finished") and "traceparent" in h]
    assert any(h["traceparent"][3:35] == traceparent[3:35] for h in headers)


@pytest.mark.parametrize("bad", [{"session": 5}, {"session": "x" * 5000}, {"traceparent": "zz"}, [1], "text", None])
def test_bad_labels_do_no_harm(rig: Rig, bad: Any) -> None:
    answer = rig.client.completions.create(
        model="tiny", prompt=prompt("bad labels"), max_tokens=2, extra_body={"kv_transfer_params": {"semkv": bad}}
    )
    (event,) = rig.seen.finished(answer.id)
    assert event.session is None and event.hashes_status == "known"


@pytest.mark.parametrize(
    ("body", "reason"),
    [({"cache_salt": "pepper"}, "cache_salt"), ({"kv_transfer_params": {"lmcache.tag.user": "u"}}, "tags")],
)
def test_unsupported_requests_say_so(rig: Rig, body: dict[str, Any], reason: str) -> None:
    answer = rig.client.completions.create(
        model="tiny", prompt=prompt(f"unsupported {reason}"), max_tokens=2, extra_body=body
    )
    assert "chunk_hashes" not in (answer.kv_transfer_params or {})
    (event,) = rig.seen.finished(answer.id)
    assert (event.hashes_status, event.reason, event.chunk_hashes) == ("unsupported", reason, ())


def test_client_disconnects(rig: Rig) -> None:
    text = prompt("the client leaves")
    body = json.dumps({"model": "tiny", "prompt": text, "max_tokens": 2000, "stream": True, "ignore_eos": True})
    connection = http.client.HTTPConnection("127.0.0.1", rig.server.port)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    request_id = json.loads(response.readline().removeprefix(b"data: "))["id"]
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    check(rig, request_id, tokens_of(rig, {"prompt": text}), None, "abort")


def test_aborted_in_the_queue(rig: Rig) -> None:
    """More requests than can run: those that wait are ended by their clients and are published too."""
    before = len(rig.seen.events())
    connections = []
    for number in range(8):
        body = json.dumps(
            {
                "model": "tiny",
                "prompt": prompt(f"queued {number}"),
                "max_tokens": 3000,
                "stream": True,
                "ignore_eos": True,
            }
        )
        connection = http.client.HTTPConnection("127.0.0.1", rig.server.port)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connections.append(connection)
    time.sleep(1.0)
    for connection in connections:
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
    events = rig.seen.wait_for(lambda: rig.seen.events()[before:], 8, 30)
    assert {event.finish_reason for event in events} == {"abort"}
    assert {str(event.hashes_status) for event in events} <= {"known", "unknown"}
    assert rig.client.completions.create(model="tiny", prompt="still there", max_tokens=1).choices


def test_sequence_has_no_gaps(rig: Rig) -> None:
    numbers = [event.seq for event in rig.seen.events()]
    assert sorted(set(numbers)) == list(range(1, max(numbers) + 1))
    beats = rig.seen.wait_for(rig.seen.heartbeats, 1, 10)
    assert beats[-1].last_seq <= max(numbers)


@pytest.mark.parametrize("seconds", [5, 60])
def test_nats_away(rig: Rig, seconds: int) -> None:
    """Requests go on while NATS is stopped, and every event comes afterwards."""
    rig.nats.stop()
    answers = []
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        number += 1
        answers.append(
            rig.client.completions.create(model="tiny", prompt=prompt(f"away {seconds} {number}"), max_tokens=2)
        )
    rig.nats.start()
    # From the stream: a plain subscriber may be back later than the engine.
    wanted = {answer.id for answer in answers}
    deadline = time.monotonic() + 40
    found: dict[str, Any] = {}
    while not wanted <= set(found) and time.monotonic() < deadline:
        found = {event.request_id: event for event in stored_events(rig.nats.url)}
    for answer in answers:
        event = found[answer.id]
        assert event.hashes_status == "known"
        assert answer.kv_transfer_params["chunk_hashes"] == [hashes.to_legacy(v) for v in event.chunk_hashes]


def test_log_says_what_is_hooked(rig: Rig) -> None:
    lines = [line for line in rig.server.log().splitlines() if "semkv:" in line]
    assert any("hooked the scheduler of instance engine" in line for line in lines)
    assert not [line for line in lines if "ERROR" in line], lines
