# SPDX-License-Identifier: Apache-2.0
"""Messages survive the wire in both forms, and nothing that contradicts its subject or its schema is accepted."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semkv.bus import codec, hashes, subjects
from semkv.bus.codec import DecodeError, decode, encode, subject_of
from semkv.bus.messages import Command, Message, Prefetch, Result, base, registered
from semkv.bus.status import ChunkStatus, State
from tests.contracts.samples import DOMAIN, SAMPLES

SUBJECT = f"semkv.v1.t.{DOMAIN.fingerprint}.cmd.all.prefetch"
GOOD: dict[str, Any] = {"command_id": "c1", "client": "me", "chunk_hashes": ["ff"]}


@pytest.mark.parametrize("as_json", [False, True], ids=["msgpack", "json"])
@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: m.type)
def test_every_type_survives_both_forms(message: Message, as_json: bool) -> None:
    payload, headers = encode(message, json=as_json)
    assert decode(subject_of(message), headers, payload) == message


def test_every_registered_type_has_a_sample() -> None:
    assert {type(m) for m in SAMPLES} == set(registered())


def test_hashes_are_one_packed_value_on_msgpack_and_hex_in_json() -> None:
    message = Prefetch(tenant="t", domain="d", instance="all", command_id="c", client="x", chunk_hashes=(-1, 255))
    assert msgpack.unpackb(encode(message)[0])["chunk_hashes"] == b"\xff" * 8 + b"\x00" * 7 + b"\xff"
    assert json.loads(encode(message, json=True)[0])["chunk_hashes"] == ["f" * 16, "00000000000000ff"]


def test_what_a_shell_sends_is_understood() -> None:
    message = decode(SUBJECT, None, json.dumps(GOOD).encode())
    assert isinstance(message, Prefetch)
    assert message.chunk_hashes == (255,)
    assert (message.tenant, message.domain, message.instance) == ("t", DOMAIN.fingerprint, "all")


def test_an_old_reader_ignores_new_fields_and_keeps_new_words() -> None:
    fields = {**GOOD, "order": "diagonal", "tier": "tape", "shiny": {"new": [1, 2]}}
    message = decode(SUBJECT, {}, json.dumps(fields).encode())
    assert isinstance(message, Prefetch)
    assert (message.order, message.tier) == ("diagonal", "tape")
    rewritten = decode(SUBJECT, *reversed(encode(message)))
    assert rewritten == message


WORDS = [
    ("result", "state"), ("result", "op"), ("result", "chunk_status"), ("result", "chunk_tiers"), ("accepted", "op"),
    ("finished", "hashes_status"), ("finished", "finish_reason"), ("engine", "role"), ("engine", "capabilities"),
    ("prefetch", "order"), ("prefetch", "tier"), ("evict", "tiers"),
]  # fmt: skip


@pytest.mark.parametrize("as_json", [False, True], ids=["msgpack", "json"])
@pytest.mark.parametrize(("type_", "field"), WORDS)
def test_every_word_of_the_future_is_kept_as_text(type_: str, field: str, as_json: bool) -> None:
    sample = next(m for m in SAMPLES if m.type == type_)
    payload, headers = encode(sample, json=as_json)
    fields = json.loads(payload) if as_json else msgpack.unpackb(payload)
    new: Any = "yet-unknown"
    if isinstance(fields[field], list):
        new = [[new]] if isinstance(fields[field][0], list) else [new]
    fields |= {field: new, "field_of_the_future": {"a": [1, None, b"x" if not as_json else "x"]}}
    message = decode(subject_of(sample), headers, json.dumps(fields).encode() if as_json else msgpack.packb(fields))
    kept: Any = getattr(message, field)
    while isinstance(kept, tuple):
        kept = kept[0]
    assert kept == "yet-unknown"
    assert decode(subject_of(message), *reversed(encode(message, json=as_json))) == message


def test_versions_live_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new required field is a new version: a reader that knows both takes each as what its header says."""
    for table in ("_registry", "_newest"):
        monkeypatch.setattr(base, table, dict(getattr(base, table)))

    class Prefetch2(Command):
        type: ClassVar[str] = "prefetch"
        version: ClassVar[int] = 2
        why: str

    subject = SUBJECT
    old = json.dumps(GOOD).encode()
    new = json.dumps({**GOOD, "why": "because"}).encode()
    assert type(decode(subject, {"Semkv-Type": "prefetch.v1"}, old)) is Prefetch
    assert type(decode(subject, {"Semkv-Type": "prefetch.v1"}, new)) is Prefetch
    assert type(decode(subject, {"Semkv-Type": "prefetch.v2"}, new)) is Prefetch2
    assert type(decode(subject, None, new)) is Prefetch2  # without a header: the newest
    with pytest.raises(DecodeError, match="why"):
        decode(subject, None, old)


def test_a_new_reader_takes_an_old_writer_without_the_optional_fields() -> None:
    for message in SAMPLES:
        fields = json.loads(encode(message, json=True)[0])
        for name, field in type(message).model_fields.items():
            if not field.is_required():
                fields.pop(name, None)
        _, headers = encode(message, json=True)
        assert type(decode(subject_of(message), headers, json.dumps(fields).encode())) is type(message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tenant", "other"), ("domain", "other"), ("instance", "x"), ("op", "evict"), ("type", "evict"),
        ("tenant", 5), ("instance", None), ("domain", ["d"]),
    ],
)  # fmt: skip
def test_a_payload_that_contradicts_its_subject_is_refused(field: str, value: object) -> None:
    with pytest.raises(DecodeError) as error:
        decode(SUBJECT, None, json.dumps({**GOOD, field: value}).encode())
    assert error.value.kind == "mismatch"


@pytest.mark.parametrize("field", ["client", "command_id", "rank", "tenant", "domain", "instance"])
def test_an_answer_that_contradicts_its_subject_is_refused(field: str) -> None:
    sample = next(m for m in SAMPLES if isinstance(m, Result))
    fields = json.loads(encode(sample, json=True)[0])
    fields[field] = 77 if field == "rank" else "forged"
    with pytest.raises(DecodeError) as error:
        decode(subject_of(sample), {"Semkv-Type": "result.v1"}, json.dumps(fields).encode())
    assert error.value.kind == "mismatch"


def test_full_names_travel_in_the_message_and_agree_with_their_token() -> None:
    name = "Acme Corp / 東京.*>"
    message = Prefetch(tenant=name, domain="d", instance=name, command_id="c", client=name, chunk_hashes=())
    subject = subject_of(message)
    assert all(subjects.is_token(part) for part in subject.split("."))
    assert decode(subject, *reversed(encode(message))) == message


@pytest.mark.parametrize(
    ("headers", "payload", "kind"),
    [
        ({}, b"", "malformed"),
        ({}, b"\xc1", "malformed"),
        ({}, b"{", "malformed"),
        ({}, b"\x93\x01\x02\x03", "malformed"),
        ({"Content-Type": "application/json"}, b"[]", "malformed"),
        ({"Content-Type": "application/json"}, b'{"a":NaN}', "malformed"),
        ({"Content-Type": "application/json"}, b"[" * 100_000, "malformed"),
        ({"Content-Type": "application/json"}, b'{"a":' * 50_000, "malformed"),
        ({}, b"\x91" * 100_000, "malformed"),
        ({}, b"\xdf\xff\xff\xff\xff", "malformed"),
        ({}, b"\x81\x01\x02", "malformed"),
        ({"Content-Type": "text/html"}, b"{}", "content_type"),
        ({"Semkv-Type": "prefetch"}, b"{}", "unknown_type"),
        ({"Semkv-Type": "wish.v1"}, b"{}", "unknown_type"),
        ({"Semkv-Type": "prefetch.v2"}, b"{}", "unknown_version"),
        ({"Semkv-Type": "evict.v1"}, b"{}", "mismatch"),
        ({"Semkv-Type": "result.v1"}, b"{}", "mismatch"),
        ({}, b"{}", "invalid"),
    ],
)  # fmt: skip
def test_hostile_input_is_refused_by_kind(headers: dict[str, str], payload: bytes, kind: str) -> None:
    with pytest.raises(DecodeError) as error:
        decode(SUBJECT, headers, payload)
    assert error.value.kind == kind


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chunk_hashes", [255]), ("chunk_hashes", "ff"), ("chunk_hashes", ["0xff"]), ("chunk_hashes", None),
        ("chunk_hashes", ["1"] * 4097), ("command_id", "a.b"), ("command_id", ""), ("command_id", "x" * 65),
        ("client", ""), ("client", "a\nb"), ("expires_in_ms", -1), ("expires_in_ms", "5"), ("expires_in_ms", 1.5),
        ("dry_run", 1), ("dry_run", "true"), ("budget_bytes", 2**63), ("order", 5), ("order", "x" * 65), ("tier", ""),
        ("session", 5),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_and_named(field: str, value: object) -> None:
    with pytest.raises(DecodeError, match=field) as error:
        decode(SUBJECT, None, json.dumps({**GOOD, field: value}).encode())
    assert error.value.kind == "invalid"
    assert error.value.fields["client"] == value if field == "client" else True


def test_hash_ints_are_refused_on_msgpack_too() -> None:
    payload = msgpack.packb({**GOOD, "chunk_hashes": [255]})
    with pytest.raises(DecodeError, match="position 0"):
        decode(SUBJECT, {}, payload)


@given(st.lists(st.integers(hashes.MIN, hashes.MAX), max_size=64), st.sampled_from(list(ChunkStatus)), st.booleans())
def test_any_result_survives(values: list[int], status: ChunkStatus, as_json: bool) -> None:
    message = Result(
        tenant="t", domain="d", instance="i", command_id="c", client="x", op="prefetch", rank=0, world_size=1, epoch=1,
        state=State.PARTIAL, chunk_status=(status,) * len(values), counts={str(status): len(values)},
    )  # fmt: skip
    assert decode(subject_of(message), *reversed(encode(message, json=as_json))) == message


def test_fuzzed_payloads_never_crash_and_are_never_nonsense() -> None:
    """20,000 mutations of real messages, from a fixed seed. What is accepted must be stable when written again."""
    rng = random.Random(20_250_101)
    seeds = [(subject_of(m), *encode(m, json=j)) for m in SAMPLES for j in (False, True)]
    accepted = 0
    for _ in range(20_000):
        subject, payload, headers = rng.choice(seeds)
        data = bytearray(payload)
        for _ in range(rng.randint(1, 4)):
            where = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[where] = rng.randrange(256)
                case 1:
                    del data[where : where + rng.randint(1, 8)]
                case 2:
                    data[where:where] = rng.randbytes(rng.randint(1, 4))
                case _:
                    data[where:where] = data[:where][-16:]
            if not data:
                data = bytearray(b"\x00")
        try:
            message = decode(subject, headers if rng.random() < 0.7 else None, bytes(data))
        except DecodeError:
            continue
        accepted += 1
        assert decode(subject_of(message), *reversed(encode(message))) == message
        assert subject_of(message) == subject
    assert 0 < accepted < 20_000


def test_random_subjects_never_crash() -> None:
    rng = random.Random(7)
    alphabet = "semkv.v1.evt.cmd.res.all.*>$ \r\n\x00é"
    for _ in range(5_000):
        subject = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 60)))
        with pytest.raises((DecodeError, subjects.SubjectError)):
            codec.decode(subject, None, b"{}")


def test_importing_messages_brings_neither_nats_nor_opentelemetry() -> None:
    code = (
        "import sys, semkv.bus.messages, semkv.bus.codec\n"
        "heavy = ('nats', 'opentelemetry', 'asyncio', 'torch', 'lmcache')\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in heavy]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
