# SPDX-License-Identifier: Apache-2.0
"""A rank's commands, from the message to the result: checks, queue, run, answer.

Every command that reaches `handle` gets `accepted` and exactly one `result`; what cannot be read is counted, logged
once per kind and dropped, or rejected where it says whom to tell. Nothing stands between a command and its operation
that could wait: `accepted` is written once the operation has begun, or at once where it has to wait for its turn.
Belongs to the worker's loop; storage calls run on the pool's threads and come back by `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from semkv.bus import codec, subjects
from semkv.bus.clock import BrokerClock
from semkv.bus.messages import Accepted, Cancel, Command, Prefetch, Release, Result, Retain
from semkv.bus.metrics import NullMetrics
from semkv.bus.reader import StreamMessage
from semkv.bus.status import Op, State
from semkv.bus.tracing import NullTracer, TraceContext, extract, inject
from semkv.consumers.rank import execute
from semkv.consumers.rank.answers import Answers
from semkv.consumers.rank.counted import Counted
from semkv.consumers.rank.identity import RankIdentity
from semkv.consumers.rank.outbox import CommandTraces
from semkv.consumers.rank.pool import DaemonPool
from semkv.consumers.rank.schedule import ConflictSchedule, Job
from semkv.consumers.rank.spans import publish_traced
from semkv.consumers.storage.ops import Control, OpResult, StorageOps

log = logging.getLogger(__name__)

QUEUE_LIMIT = 1024
RETAINED_KEPT = 262_144
"""So many chunks are remembered to put a release behind what it conflicts with; its holder's own order always holds."""
_LAST_WORDS_S = 0.5
_UNANSWERABLE = {"subject", "mismatch", "too_large"}
_OPS = {str(op) for op in Op}


@dataclass(eq=False)
class Work:
    """One command on its way."""

    command: Command
    control: Control
    json: bool
    context: TraceContext | None
    sent_ns: int
    """Stream timestamp on our clock."""
    queued_ms: float
    subject: str
    size: int
    answers_at: str
    """Subject of its answers."""
    retains: tuple[int, ...] = ()
    """Of a retain: what it keeps, earlier parts included."""
    started_ns: int = 0
    accepted: bool = False
    answered: bool = False
    timer: asyncio.TimerHandle | None = None


class CommandDesk:
    """Takes a rank's commands and sees each to its result."""

    def __init__(
        self,
        identity: RankIdentity,
        ops: StorageOps,
        answers: Answers,
        clock: BrokerClock,
        tracer: NullTracer,
        *,
        threads: int,
        traces: CommandTraces | None = None,
        counted: Counted | None = None,
    ) -> None:
        self._who = identity
        self._ops = ops
        self._answers = answers
        self._clock = clock
        self._tracer = tracer
        self._traces = traces or CommandTraces()
        self._counted = counted or Counted(NullMetrics())
        self._loop = asyncio.get_running_loop()
        self._pool = DaemonPool(threads, f"semkv-rank{identity.rank}")
        self._schedule: ConflictSchedule[Work] = ConflictSchedule(self._start, threads)
        self._jobs: dict[tuple[str, str], Job[Work]] = {}
        self._retained: OrderedDict[tuple[str, str, str], tuple[int, ...]] = OrderedDict()
        self._retained_count = 0
        self._stopping = False
        self.dropped: Counter[str] = Counter()

    @property
    def inflight(self) -> int:
        """Commands without a result so far."""
        return len(self._jobs)

    def handle(self, message: StreamMessage) -> None:
        """Takes one message of the commands stream."""
        headers, as_json = message.headers, codec.is_json(message.headers, message.data)
        sent_ns = self._clock.to_local_ns(message.time_ns)
        queued_ms = max(0.0, (time.time_ns() - sent_ns) / 1e6)
        try:
            command = codec.decode(message.subject, headers, message.data)
        except codec.DecodeError as error:
            self._drop(error)
            self._reject_unread(message, error, as_json, queued_ms)
            return
        assert isinstance(command, Command)
        where = self._answer_subject(command)
        if not self._answers.take(command.tenant, command.command_id, where):
            self._answers.repeat(command.tenant, command.command_id)
            return
        work = Work(
            command,
            Control(self._deadline(command, message.time_ns), codec.message_id(command) or ""),
            as_json,
            extract(headers),
            sent_ns,
            queued_ms,
            message.subject,
            len(message.data),
            where,
        )
        self._admit(work)

    def _admit(self, work: Work) -> None:
        command = work.command
        problem = execute.objection(command)
        if command.domain != self._who.domain.fingerprint:
            reason = f"this rank's hash domain is {self._who.domain.fingerprint}, the command is for {command.domain}"
            self._finish(work, OpResult(state=State.REJECTED, reason=reason), foreign=True)
        elif problem is not None:
            self._finish(work, OpResult(state=State.REJECTED, reason=problem))
        elif isinstance(command, Cancel):
            self._cancel(work, command)
        elif self._stopping:
            self._finish(work, execute.not_run(command, State.CANCELLED, "the rank is stopping"))
        elif len(self._jobs) >= QUEUE_LIMIT:
            reason = f"busy: {QUEUE_LIMIT} commands are waiting on this rank; try again later"
            self._finish(work, OpResult(state=State.REJECTED, reason=reason))
        elif work.control.expired():
            self._finish(work, execute.not_run(command, State.EXPIRED, "expired before it reached the rank"))
        else:
            self._enqueue(work)

    def _enqueue(self, work: Work) -> None:
        command = work.command
        job = Job(work, command.tenant, self._keys(work), execute.reads_only(command))
        self._jobs[(command.tenant, command.command_id)] = job
        deadline = work.control.deadline_ns
        if deadline is not None:
            delay = max(0.0, (deadline - time.monotonic_ns()) / 1e9)
            work.timer = self._loop.call_later(delay, self._stop_waiting, job, State.EXPIRED, "expired in the queue")
        self._schedule.add(job)
        if not job.running:
            self._accept(work)

    def _keys(self, work: Work) -> tuple[Any, ...]:
        command = work.command
        if not isinstance(command, (Retain, Release)):
            return execute.keys(command, ())
        holder = (command.tenant, command.client, command.session)
        known = self._retained.pop(holder, ())
        self._retained_count -= len(known)
        if isinstance(command, Retain):
            work.retains = (*known, *command.chunk_hashes) if command.part > 1 else command.chunk_hashes
            self._retained[holder] = work.retains
            self._retained_count += len(work.retains)
            while len(self._retained) > 1 and self._retained_count > RETAINED_KEPT:
                self._retained_count -= len(self._retained.popitem(last=False)[1])
        return execute.keys(command, known)

    def _start(self, job: Job[Work]) -> None:
        work = job.work
        work.started_ns = time.time_ns()
        if self._tracer.enabled:  # a chunk may be used before the command has ended and has a span of its own
            self._traces.keep(work.control.command_id, work.context)

        def call() -> None:
            self._tell(self._accept, work)
            self._tell(self._ended, job, execute.run(self._ops, work.command, work.control, work.retains))

        self._pool.submit(call)

    def _tell(self, callback: Callable[..., None], *arguments: Any) -> None:
        """From a thread of the pool to the loop."""
        with contextlib.suppress(RuntimeError):  # the worker stopped meanwhile, and answered in the operation's stead
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _accept(self, work: Work) -> None:
        if not work.accepted:
            work.accepted = True
            self._send(Accepted(**self._about(work), queued_ms=work.queued_ms), work)

    def _ended(self, job: Job[Work], result: OpResult) -> None:
        self._schedule.done(job)
        self._finish(job.work, result)

    def _stop_waiting(self, job: Job[Work], state: State, reason: str) -> None:
        """Ends a job that has not begun; one that runs sees its own deadline or cancellation."""
        if job.running or job.work.answered:
            return
        self._finish(job.work, execute.not_run(job.work.command, state, reason))
        self._schedule.settle(job)

    def _cancel(self, work: Work, command: Cancel) -> None:
        job = self._jobs.get((command.tenant, command.target_command_id))
        if job is None:
            reason = f"no command {command.target_command_id} waits or runs here"
            self._finish(work, OpResult(state=State.REJECTED, reason=reason))
            return
        job.work.control.cancel()
        self._stop_waiting(job, State.CANCELLED, "cancelled in the queue")
        self._finish(work, OpResult(state=State.SUCCEEDED))

    def _finish(self, work: Work, outcome: OpResult, *, foreign: bool = False) -> None:
        if work.answered:
            return
        work.answered = True
        if work.timer is not None:
            work.timer.cancel()
        command = work.command
        self._jobs.pop((command.tenant, command.command_id), None)
        self._accept(work)
        ended_ns = time.time_ns()
        started_ns = work.started_ns or ended_ns
        try:
            result = self._result(work, outcome, started_ns, ended_ns, foreign=foreign)
        except ValueError as error:  # a bug in the storage costs the details, never the answer
            log.exception("the storage's result of a %s cannot be written", command.type)
            outcome = OpResult(State.FAILED, f"the storage's result cannot be written: {error}"[:1000])
            result = self._result(work, outcome, started_ns, ended_ns)
        self._publish(result, work, outcome, started_ns)
        self._counted.result(command, result)

    def _result(
        self, work: Work, outcome: OpResult, started_ns: int, ended_ns: int, *, foreign: bool = False
    ) -> Result:
        command = work.command
        return Result(
            **self._about(work),
            world_size=self._who.world_size,
            state=outcome.state,
            reason=outcome.reason[:4096] if outcome.reason else None,
            chunk_status=outcome.chunk_status,
            counts=outcome.counts,
            bytes_by_tier=dict(outcome.bytes_by_tier),
            usable_prefix=outcome.usable_prefix,
            queued_ms=max(0.0, (started_ns - work.sent_ns) / 1e6),
            ran_ms=max(0.0, (ended_ns - started_ns) / 1e6),
            trace_id=work.context.trace_id if work.context else None,
            chunk_tiers=outcome.chunk_tiers if command.type == Op.LOCATE else None,
            hash_domain=self._who.domain if foreign else None,
        )

    def _publish(self, result: Result, work: Work, outcome: OpResult, started_ns: int) -> None:
        if not self._tracer.enabled:
            self._send(result, work)
            return
        context = publish_traced(
            self._tracer,
            lambda answer, headers: self._answers.publish(answer, work.answers_at, headers, json=work.json),
            result,
            work.command,
            context=work.context,
            subject=work.subject,
            size=work.size,
            steps=outcome.steps,
            sent_ns=work.sent_ns,
            started_ns=started_ns,
        )
        self._traces.keep(work.control.command_id, context)

    def _send(self, answer: Accepted | Result, work: Work) -> None:
        headers: dict[str, str] = {}
        inject(headers, work.context)
        self._answers.publish(answer, work.answers_at, headers, json=work.json)

    def _about(self, work: Work) -> dict[str, Any]:
        command = work.command
        return {
            "tenant": command.tenant,
            "domain": command.domain,
            "instance": self._who.instance,
            "command_id": command.command_id,
            "client": command.client,
            "op": command.type,
            "rank": self._who.rank,
            "epoch": self._who.epoch,
        }

    def _answer_subject(self, command: Command) -> str:
        return subjects.result(
            command.tenant, command.domain, command.client, command.command_id, self._who.instance, self._who.rank
        )

    def _deadline(self, command: Command, stream_ns: int) -> int | None:
        if not isinstance(command, Prefetch) or command.expires_in_ms is None:
            return None
        left_ns = stream_ns + command.expires_in_ms * 1_000_000 - self._clock.now_ns()
        return time.monotonic_ns() + left_ns

    def _drop(self, error: codec.DecodeError) -> None:
        self.dropped[error.kind] += 1
        if self.dropped[error.kind] == 1:
            log.warning("a command was dropped (more of this kind are only counted): %s", str(error)[:500])

    def _reject_unread(self, message: StreamMessage, error: codec.DecodeError, as_json: bool, queued: float) -> None:
        """Tells whoever sent something unreadable, where the payload says who that is."""
        client, command_id = error.fields.get("client"), error.fields.get("command_id")
        if error.kind in _UNANSWERABLE or not isinstance(client, str) or not isinstance(command_id, str):
            return
        try:
            where = subjects.parse(message.subject)
            common: dict[str, Any] = {
                "tenant": where.tenant,
                "domain": where.domain,
                "instance": self._who.instance,
                "command_id": command_id,
                "client": client,
                "op": where.name if where.name in _OPS else where.name[:64],
                "rank": self._who.rank,
                "epoch": self._who.epoch,
            }
            accepted = Accepted(**common, queued_ms=queued)
            result = Result(
                **common,
                world_size=self._who.world_size,
                state=State.REJECTED,
                reason=str(error)[:4096],
                queued_ms=queued,
            )
        except ValueError:
            return  # names no one can be told under
        subject = codec.subject_of(result)
        if not self._answers.take(where.tenant, command_id, subject):
            self._answers.repeat(where.tenant, command_id)
            return
        headers: dict[str, str] = {}
        inject(headers, extract(message.headers))
        self._answers.publish(accepted, subject, headers, json=as_json)
        self._answers.publish(result, subject, headers, json=as_json)

    async def stop(self, timeout: float) -> None:
        """Cancels what runs, answers what waits, and gives running operations `timeout` seconds to end."""
        self._stopping = True
        for job in list(self._jobs.values()):
            job.work.control.cancel()
            self._stop_waiting(job, State.CANCELLED, "the rank is stopping")
        deadline = self._loop.time() + timeout
        while self._jobs and self._loop.time() < deadline:  # noqa: ASYNC110 - a rank stops once
            await asyncio.sleep(0.01)
        for job in list(self._jobs.values()):
            reason = "the rank stopped before the operation ended"
            self._finish(job.work, execute.not_run(job.work.command, State.FAILED, reason))
        self._pool.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._answers.written(), max(_LAST_WORDS_S, deadline - self._loop.time()))
