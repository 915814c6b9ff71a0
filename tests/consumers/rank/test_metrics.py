# SPDX-License-Identifier: Apache-2.0
"""What a rank counts arrives at a metrics backend: commands, chunks, bytes, times, tiers, forest, outcomes."""

from __future__ import annotations

from collections.abc import Iterator

import nats
import pytest

from semkv.bus import KV, subjects
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Outcome
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role, Tier
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.rank.conftest import until_live
from tests.consumers.rank.stand_in import CHUNK_BYTES, StandInStorage
from tests.contracts.samples import DOMAIN
from tests.support.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", found.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        yield found


@pytest.fixture
def worker(receiver: OtlpReceiver, nats_server: EmbeddedServer) -> Iterator[RankWorker]:
    """Rank 1 of `e`, with chunks 1, 2 and 3 on disk, and a forest of a stated size."""
    who = RankIdentity("e", 1, 2, Role.STORAGE, DOMAIN)
    ops = StandInStorage(disk=[1, 2, 3])
    found = RankWorker(BusSettings(url=nats_server.url), who, ops, forest=lambda: {"chunks": 7, "conversations": 2})
    found.start()
    assert found.wait_ready(30)
    yield found
    found.stop()


async def test_a_rank_counts_what_it_does(
    receiver: OtlpReceiver, worker: RankWorker, kv: KV, nats_server: EmbeddedServer
) -> None:
    await until_live(kv, 1)
    (loaded,) = (await (await kv.prefetch([1, 2, 99])).result(30)).results
    assert (await (await kv.prefetch([3], dry_run=True)).result(30)).ok
    assert (await (await kv.evict([1], tiers=[Tier.CPU])).result(30)).ok
    worker.outbox.offer(
        Outcome(tenant="default", domain=DOMAIN.fingerprint, instance="e", command_id="c", rank=1, useful=5, late=1)
    )
    nc = await nats.connect(nats_server.url)
    await nc.jetstream().publish(subjects.command("default", DOMAIN.fingerprint, "e", "prefetch"), b"\xc1")
    await nc.close()
    receiver.wait(lambda r: r.total("semkv.rank.unreadable") == 1)
    receiver.wait(lambda r: r.total("semkv.rank.commands") == 3)
    here = {"kv.instance": "e", "kv.rank": "1"}

    def total(name: str, **labels: str) -> float:
        return receiver.total(f"semkv.rank.{name}", **here, **labels)

    assert total("commands", op="prefetch", state="partial") == 1
    assert total("commands", op="dry_run", state="succeeded") == 1
    assert total("commands", op="evict", state="succeeded") == 1
    assert total("chunks", op="prefetch", status="loaded") == 2
    assert total("chunks", op="prefetch", status="missing") == 1
    assert total("chunks", op="evict", status="removed") == 1
    assert total("moved", op="prefetch", tier="cpu") == 2 * CHUNK_BYTES
    assert total("moved", op="dry_run") == 0
    assert total("queue.duration", op="prefetch") == total("run.duration", op="prefetch") == 1
    for name, took_ms in (("queue", loaded.queued_ms), ("run", loaded.ran_ms)):
        told_s = receiver.summed(f"semkv.rank.{name}.duration", op="prefetch", **here)
        assert took_ms > 0 and told_s == pytest.approx(took_ms / 1e3), "in seconds, as the unit says"
    receiver.wait(lambda r: r.total("semkv.rank.tier.chunks", tier="cpu", **here) == 1)  # asked every 2 s
    receiver.wait(lambda r: r.total("semkv.rank.tier.used", tier="cpu", **here) == CHUNK_BYTES)
    assert total("prefetched", fate="useful") == 5 and total("prefetched", fate="late") == 1
    assert total("forest.size", kind="chunks") == 7 and total("forest.size", kind="conversations") == 2
    assert total("tier.capacity", tier="cpu") == 1 << 20
    assert total("waiting") == 0 and "semkv.rank.waiting" in receiver.metrics
    assert receiver.services == {"semkv-rank-1"}


async def test_what_waits_is_seen_while_it_waits(receiver: OtlpReceiver, worker: RankWorker, kv: KV) -> None:
    ops = worker._ops
    assert isinstance(ops, StandInStorage)
    await until_live(kv, 1)
    ops.gate.clear()
    try:
        handle = await kv.prefetch([1])
        receiver.wait(lambda r: r.total("semkv.rank.waiting") == 1)
    finally:
        ops.gate.set()
    assert (await handle.result(30)).ok
    receiver.wait(lambda r: r.total("semkv.rank.waiting") == 0)
