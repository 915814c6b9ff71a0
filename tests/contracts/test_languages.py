# SPDX-License-Identifier: Apache-2.0
"""Other languages talk to a real rank through a real server, with the very code that docs/contracts.md shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from semkv.bus import codec, hashes
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Finished
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.stand_in import StandInStorage
from tests.contracts import node as second_language
from tests.contracts.golden import FILE
from tests.contracts.samples import DOMAIN, SAMPLES

EVENT = next(message for message in SAMPLES if isinstance(message, Finished))
DOCUMENT = Path(__file__).parents[2] / "docs" / "contracts.md"


def shown(language: str) -> str:
    """The document's one code block in this language."""
    (code,) = re.findall(rf"```{language}\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return str(code)


@pytest.fixture
def ops(nats_server: EmbeddedServer) -> Iterator[StandInStorage]:
    storage = StandInStorage(disk=[255, -1])
    who = RankIdentity("engine-0", 0, 1, Role.STORAGE, DOMAIN)
    worker = RankWorker(BusSettings(url=nats_server.url), who, storage)
    worker.start()
    assert worker.wait_ready(30)
    yield storage
    worker.stop(5)


def publish_events(url: str, *, as_json: bool) -> None:
    """Three whole events; the third of four numbers is missing."""

    async def publish() -> None:
        nc = await nats.connect(url)
        for seq in (1, 2, 4):
            event = EVENT.model_copy(update={"tenant": "default", "seq": seq, "request_id": f"r{seq}"})
            payload, headers = codec.encode(event, json=as_json)
            await nc.jetstream().publish(codec.subject_of(event), payload, headers=headers)
        await nc.close()

    asyncio.run(publish())


def check(output: str, ops: StandInStorage) -> None:
    lines = [json.loads(line) for line in output.splitlines()]
    assert lines[0] == {"instance": "engine-0", "rank": 0, "domain": DOMAIN.fingerprint}
    answers, rest = lines[1:7], lines[7:]
    assert [(line["op"], line["state"], line["accepted"]) for line in answers] == [
        ("retain", "succeeded", True),
        ("prefetch", "succeeded", True),
        ("locate", "succeeded", True),
        ("release", "succeeded", True),
        ("evict", "succeeded", True),
        ("cancel", "rejected", True),
    ]
    assert answers[1]["chunk_status"] == ["loaded", "loaded"]
    assert answers[2]["chunk_tiers"] == [["cpu", "disk"], ["cpu", "disk"]]
    assert answers[4]["chunk_status"] == ["removed", "removed"]
    assert [c for c in ops.calls if c[0] != "locate"] == [
        ("retain", (255, -1)),
        ("prefetch", (255, -1)),
        ("release", ()),
        ("evict", (255, -1)),
    ]
    assert rest[0] == {"missed": ["removed", "removed"]}
    assert rest[3] == {"lost": [3, 3]}
    events = [line for line in rest[1:] if "seq" in line]
    assert [(event["seq"], event["request_id"]) for event in events] == [(1, "r1"), (2, "r2"), (4, "r4")]
    assert [event["resume_at"] for event in events] == [2, 3, 4]
    assert all(event["chunk_hashes"] == [hashes.to_hex(h) for h in EVENT.chunk_hashes] for event in events)


def test_plain_python_with_json(nats_server: EmbeddedServer, ops: StandInStorage) -> None:
    code = shown("python")
    assert "semkv.bus" not in code
    publish_events(nats_server.url, as_json=True)
    environment = {**os.environ, "NATS_URL": nats_server.url}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    check(done.stdout, ops)


def test_node_with_msgpack(node: None, nats_server: EmbeddedServer, ops: StandInStorage) -> None:
    publish_events(nats_server.url, as_json=False)
    done = second_language.run(shown("javascript"), nats_server.url)
    assert done.returncode == 0, done.stderr
    check(done.stdout, ops)


GOLDEN = """
const {decode} = require('@msgpack/msgpack');
const golden = JSON.parse(require('fs').readFileSync(process.argv[1], 'utf8'));
const hex = b => Buffer.from(b).toString('hex');
const plain = (value, key) => {
  if (value instanceof Uint8Array) {
    const list = (hex(value).match(/.{16}/g) || []);
    return key === 'probe' ? list[0] : list;
  }
  if (typeof value === 'bigint') return Number(value);
  if (Array.isArray(value)) return value.map(v => plain(v));
  if (value && typeof value === 'object')
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, plain(v, k)]));
  return value;
};
const sorted = value => JSON.stringify(value, (_, v) =>
  v && typeof v === 'object' && !Array.isArray(v) ? Object.fromEntries(Object.entries(v).sort()) : v);
let checked = 0;
for (const item of golden) {
  const read = plain(decode(Buffer.from(item.msgpack, 'hex'), {useBigInt64: true}));
  if (sorted(read) !== sorted(JSON.parse(item.json))) {
    console.error(item.type, sorted(read), sorted(JSON.parse(item.json)));
    process.exit(1);
  }
  checked += 1;
}
console.log(checked);
"""


def test_node_reads_the_golden_bytes_as_the_golden_json(node: None) -> None:
    done = second_language.run(GOLDEN, str(FILE))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(json.loads(FILE.read_text()))
