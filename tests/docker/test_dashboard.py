# SPDX-License-Identifier: Apache-2.0
"""The dashboard asks for nothing that is not emitted: by a real gateway's page, or by a rank and a publisher over OTLP.

Names and labels are those that Prometheus gives what it scrapes and what it takes by OTLP.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path

import nats
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from semkv.bus import metrics, subjects
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.messages import Heartbeat, Outcome
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.consumers.gateway.settings import GatewaySettings
from semkv.consumers.rank import RankIdentity, RankWorker
from tests.consumers.gateway.conftest import DOMAIN, running
from tests.consumers.gateway.test_events import publish
from tests.consumers.rank.stand_in import StandInStorage
from tests.engine_hooks.test_publisher import note, publisher
from tests.support.otlp_receiver import OtlpReceiver

GRAFANA = Path(__file__).resolve().parents[2] / "docker" / "grafana"


def asked() -> list[tuple[str, str, set[str]]]:
    """(panel, metric, labels) of each query."""
    found = []
    for panel in json.loads((GRAFANA / "semkv.json").read_text())["panels"]:
        for target in panel["targets"]:
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            labels = {name.strip() for names in grouped for name in names.split(",")}
            labels |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            found += [(panel["title"], name, labels) for name in re.findall(r"semkv_\w+", target["expr"])]
    return found


async def test_every_metric_and_label_that_is_asked_for_is_emitted(
    nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitted: dict[str, set[str]] = defaultdict(set)
    about = {"tenant": "default", "domain": DOMAIN.fingerprint, "instance": "e0"}
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        settings = BusSettings(url=nats_server.url)
        who = RankIdentity("e0", 0, 1, Role.STORAGE, DOMAIN)
        worker = RankWorker(settings, who, StandInStorage(disk={1}), forest=lambda: {"chunks": 1}).start()
        events = publisher(nats_server.url)
        try:
            assert await asyncio.to_thread(worker.wait_ready, 30)
            async with running(GatewaySettings(bus=settings)) as gateway:
                answer = await gateway.post("prefetch?wait=20", {"chunk_hashes": ["1", "2"], "lookup_id": "x"})
                assert answer.status_code == 200
                outcome = Outcome(**about, command_id="c", rank=0, useful=1)
                worker.outbox.offer(outcome)
                events.offer(note(1))
                nc = await nats.connect(nats_server.url)
                await nc.jetstream().publish(subjects.command("default", DOMAIN.fingerprint, "e0", "evict"), b"\xc1")
                await nc.close()
                # The first tells the gateway how many events there are; that the second finds them missing is a loss.
                for last_seq in (1, 3, 3):
                    await publish(nats_server.url, Heartbeat(**about, epoch=5, last_seq=last_seq))
                names = {metric.name for metric in metrics.ALL}
                await asyncio.to_thread(receiver.wait, lambda r: names <= r.metrics.keys())
                await asyncio.to_thread(receiver.wait, lambda r: r.total("semkv.rank.unreadable") > 0)
                await asyncio.to_thread(receiver.wait, lambda r: r.total("semkv.rank.tier.capacity") > 0)
                for _ in range(400):
                    page = (await gateway.client.get("/metrics")).text
                    if "semkv_events_lost_total{" in page and "semkv_prefetched_chunks_total{" in page:
                        break
                    await asyncio.sleep(0.05)
        finally:
            await asyncio.to_thread(worker.stop)
            await asyncio.to_thread(events.close)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            emitted[sample.name] |= sample.labels.keys()
    for name, labels in receiver.prometheus_series().items():
        emitted[name] |= labels
    for panel, name, labels in asked():
        assert name in emitted, f"{panel}: nobody emits {name}"
        assert labels <= emitted[name], f"{panel}: {name} has no {labels - emitted[name]}"
    # And the other way: a metric of the engines that no panel shows is easily forgotten.
    shown = {name for _, name, _ in asked()}
    assert not [
        name for name in receiver.prometheus_names() if name not in shown and not name.endswith(("_count", "_sum"))
    ]


def test_every_metric_of_an_engine_is_on_the_operations_page() -> None:
    page = (GRAFANA.parents[1] / "docs" / "operations.md").read_text()
    page = page.replace("`semkv.rank.tier.used`, `.capacity`", "`semkv.rank.tier.used`, `semkv.rank.tier.capacity`")
    assert not [metric.name for metric in metrics.ALL if f"`{metric.name}`" not in page]


def test_the_scrape_keeps_the_names_that_the_gateway_gives() -> None:
    (job,) = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())["scrape_configs"]
    assert job["honor_labels"] is True  # else `instance` would be the gateway's address
