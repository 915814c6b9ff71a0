# SPDX-License-Identifier: Apache-2.0
"""The bytes on the wire are pinned: one golden message of each type, in both forms, with its subject and headers.

After a wanted change of the contract: `python -m tests.contracts.golden`, and say in the change why the bytes moved.
"""

from __future__ import annotations

import json

import pytest

from semkv.bus import codec
from semkv.bus.messages import Message
from tests.contracts.golden import FILE, entry
from tests.contracts.samples import SAMPLES

GOLDEN = {item["type"]: item for item in json.loads(FILE.read_text())}


def test_every_type_has_golden_bytes() -> None:
    assert set(GOLDEN) == {m.type_name() for m in SAMPLES}


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: m.type)
def test_bytes_have_not_moved(message: Message) -> None:
    assert entry(message) == GOLDEN[message.type_name()]


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: m.type)
def test_golden_bytes_read_as_the_sample(message: Message) -> None:
    golden = GOLDEN[message.type_name()]
    assert codec.decode(golden["subject"], golden["headers"], bytes.fromhex(golden["msgpack"])) == message
    as_json = {**golden["headers"], "Content-Type": "application/json"}
    assert codec.decode(golden["subject"], as_json, golden["json"].encode()) == message
