# SPDX-License-Identifier: Apache-2.0
"""Plays a recording's commands again, at the times they came, and sets each rank's answer beside the recorded one.

`against_model` brings its own nats-server and, for each recorded storage rank, a real rank worker on a modelled storage
that learns from the recorded `finished` events what is stored. `against` publishes on a connection to whoever listens
there. Commands get new ids, cancels follow theirs. One event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg

from semkv.bus import codec, subjects
from semkv.bus.connection import connect_nats
from semkv.bus.embedded import EmbeddedServer
from semkv.bus.ids import uuid7
from semkv.bus.messages import Cancel, Command, EngineInfo, Finished, Message, Result
from semkv.bus.settings import BusSettings
from semkv.bus.status import Role
from semkv.bus.streams import ensure_streams
from semkv.cli.replay.latency import LatencyModel
from semkv.cli.replay.model_rank import ModelStorage
from semkv.cli.replay.recording import Recorded
from semkv.consumers.rank import RankIdentity, RankWorker

_READY_S = 30.0

Rank = tuple[str, int]


class ReplayError(RuntimeError):
    """The recording cannot be played; the message says why."""


@dataclass
class Answered:
    """One command on one rank: how it ended when it was recorded, and now. None: no answer (in the recording)."""

    command_id: str
    op: str
    chunks: int
    rank: Rank
    recorded: Result | None = None
    replayed: Result | None = None


@dataclass
class Report:
    """What a replay came to, in the order of the commands."""

    commands: int = 0
    unreadable: int = 0
    answers: list[Answered] = field(default_factory=list)

    @property
    def unanswered(self) -> int:
        """Answers that the recording has, or that a modelled rank owed, and that did not come."""
        return sum(answer.replayed is None for answer in self.answers)


async def against_model(
    recording: Sequence[Recorded], model: LatencyModel, *, speed: float = 1.0, patience_s: float = 30.0
) -> Report:
    """Plays against modelled ranks on a nats-server of our own. Raises ReplayError, EmbeddedServerError, BusError."""
    ranks = {
        (info.instance, info.rank): info
        for info in _readable(recording)
        if isinstance(info, EngineInfo) and info.role == Role.STORAGE
    }
    if not ranks:
        raise ReplayError("no engine was live when this was recorded, so there is no rank to model: record again")
    storages: dict[Rank, ModelStorage] = {rank: ModelStorage(model) for rank in ranks}
    workers: list[RankWorker] = []
    async with EmbeddedServer() as server:
        settings = BusSettings(url=server.url)
        nc = await connect_nats(settings, name="semkv replay", timeout=_READY_S)
        try:
            for side in ("engine", "agent"):
                await ensure_streams(nc, settings, side)
            for rank, info in ranks.items():
                who = RankIdentity(info.instance, info.rank, info.world_size, Role.STORAGE, info.hash_domain)
                workers.append(RankWorker(settings, who, storages[rank]).start())
            for worker in workers:
                if not await asyncio.to_thread(worker.wait_ready, _READY_S):
                    raise ReplayError("a modelled rank did not get ready")

            def stored(event: Finished) -> None:
                for (instance, _), storage in storages.items():
                    if instance == event.instance:
                        storage.stored(event.chunk_hashes)

            def owed(command: Command) -> list[Rank]:
                everyone = command.instance == subjects.ALL
                return [
                    rank
                    for rank, info in ranks.items()
                    if (info.domain == command.domain if everyone else rank[0] == command.instance)
                ]

            return await against(nc, recording, speed=speed, patience_s=patience_s, stored=stored, owed=owed)
        finally:
            await nc.close()
            for worker in workers:
                await asyncio.to_thread(worker.stop, 5.0)


async def against(
    nc: Client,
    recording: Sequence[Recorded],
    *,
    speed: float = 1.0,
    patience_s: float = 30.0,
    stored: Callable[[Finished], None] | None = None,
    owed: Callable[[Command], list[Rank]] | None = None,
) -> Report:
    """Publishes the recording's commands on `nc`. `speed` 2 halves the pauses, 0 leaves them out.

    Returns once every rank that answered in the recording, or that `owed` names, has answered, or `patience_s` after
    the last command.
    """
    report = Report()
    rows: dict[tuple[str, Rank], Answered] = {}
    new_ids: dict[str, str] = {}
    complete = asyncio.Event()

    async def hear(message: Msg) -> None:
        try:
            result = codec.decode(message.subject, message.headers, message.data)
        except codec.DecodeError:
            report.unreadable += 1
            return
        row = rows.get((result.command_id, (result.instance, result.rank))) if isinstance(result, Result) else None
        if row is not None:
            row.replayed = result  # type: ignore[assignment]  # a row was found, so it is a Result
            complete.set()

    messages = list(_readable(recording, report))
    recorded = {(m.command_id, (m.instance, m.rank)): m for m in messages if isinstance(m, Result)}
    for tenant in sorted({m.tenant for m in messages if isinstance(m, Command)}):
        await nc.subscribe(f"{subjects.PREFIX}.{subjects.token(tenant)}.*.res.>", cb=hear)
    await nc.flush()
    begin = asyncio.get_running_loop().time()
    for item in recording:
        message = _decoded(item)
        if not isinstance(message, (Command, Finished)):
            continue
        if speed:
            due = begin + (item.at_ns - recording[0].at_ns) / 1e9 / speed
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        if isinstance(message, Finished):
            if stored is not None:
                stored(message)
            continue
        command = _renamed(message, new_ids)
        ranks = {rank for old, rank in recorded if old == message.command_id} | set(owed(message) if owed else ())
        for rank in sorted(ranks):
            row = Answered(
                message.command_id,
                message.type,
                len(getattr(message, "chunk_hashes", ())),
                rank,
                recorded.get((message.command_id, rank)),
            )
            rows[command.command_id, rank] = row
            report.answers.append(row)
        payload, headers = codec.encode(command)
        await nc.publish(codec.subject_of(command), payload, headers=headers)
        report.commands += 1
    deadline = asyncio.get_running_loop().time() + patience_s
    while report.unanswered and (left := deadline - asyncio.get_running_loop().time()) > 0:
        complete.clear()
        try:
            await asyncio.wait_for(complete.wait(), left)
        except asyncio.TimeoutError:
            break
    return report


def _renamed(command: Command, new_ids: dict[str, str]) -> Command:
    new_ids[command.command_id] = uuid7()
    changes = {"command_id": new_ids[command.command_id]}
    if isinstance(command, Cancel):
        changes["target_command_id"] = new_ids.get(command.target_command_id, command.target_command_id)
    return command.model_copy(update=changes)


def _decoded(item: Recorded) -> Message | None:
    try:
        return item.message()
    except codec.DecodeError:
        return None


def _readable(recording: Sequence[Recorded], report: Report | None = None) -> list[Message]:
    messages = [_decoded(item) for item in recording]
    if report is not None:
        report.unreadable += sum(message is None for message in messages)
    return [message for message in messages if message is not None]
