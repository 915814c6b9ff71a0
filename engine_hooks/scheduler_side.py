# SPDX-License-Identifier: Apache-2.0
"""What the hooks do in the scheduler's process: note each request's lookup, say its hashes when it finishes.

`SchedulerSide` belongs to one connector. Everything on it is called on the scheduler's thread, inside LMCache's own
calls; it allocates little, never waits and never raises: a bug is logged once and the base result stands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from semkv.bus.status import HashesStatus
from semkv.bus.tracing import wanted
from semkv.engine_hooks.agreement import Agreement, AgreementState
from semkv.engine_hooks.finished import FinishedNote
from semkv.engine_hooks.lookup_client import (
    CHUNKS_LABEL,
    SESSION_LABEL,
    TENANT_LABEL,
    TRACE_LABEL,
    HashRecords,
    records_of,
)
from semkv.engine_hooks.no_events import NoEvents
from semkv.engine_hooks.publisher import EventPublisher
from semkv.engine_hooks.refusals import request_reason
from semkv.engine_hooks.request_labels import NONE, read_labels
from semkv.engine_hooks.settings import HookSettings

_log = logging.getLogger("semkv.engine_hooks")

CHUNK_HASHES = "chunk_hashes"
Result = tuple[bool, dict[str, Any] | None]


class SchedulerSide:
    """The hooks of one scheduler-role connector.

    engine_status: what is true of every request of this engine, if its hashes cannot be used at all.
    adopt: upgrades a lookup client and gives its record.
    recompute: gives a request's hashes as texts where its lookup could not be listened to; None where it cannot.
    """

    def __init__(
        self,
        settings: HookSettings,
        impl: Any,
        publisher: EventPublisher | NoEvents,
        *,
        agreement: Agreement | None,
        engine_status: tuple[HashesStatus, str] | None = None,
        recompute: Any = None,
        adopt: Callable[[Any], HashRecords | None] | None = None,
    ) -> None:
        self.settings = settings
        self.impl = impl
        self.publisher = publisher
        self.agreement = agreement
        self.engine_status = engine_status
        self.recompute = recompute
        self.adopt = adopt
        self.tracing = wanted()
        self.failures = 0
        self._client: Any = None
        self._records: HashRecords | None = None

    @property
    def records(self) -> HashRecords | None:
        client = self.impl.lookup_client
        if client is not self._client:
            # The first time, and when LMCache was told to build its lookup client anew.
            self._client = client
            self._records = self.adopt(client) if self.adopt is not None else records_of(client)
        return self._records

    # ---- get_num_new_matched_tokens

    def before_lookup(self, request: Any) -> None:
        """Leave the request's labels where its first lookup will find them."""
        try:
            records = self.records
            if records is None or (request.request_id in records and not request.num_output_tokens):
                return
            labels = read_labels(request, trust_tenant=self.settings.trust_tenant)
            again = request.num_tokens > request.num_prompt_tokens
            trace = labels.traceparent if self.tracing else None
            if labels.session is None and labels.tenant is None and trace is None and not again:
                return
            named = dict(records.default_labels)
            if labels.session is not None:
                named[SESSION_LABEL] = labels.session
            if labels.tenant is not None:
                named[TENANT_LABEL] = labels.tenant
            if trace is not None:
                named[TRACE_LABEL] = trace
            if again:
                # Looked up again after a preemption, with generated tokens in it: no list of the prompt's chunks.
                records.skip(request.request_id)
                named[CHUNKS_LABEL] = str(request.num_prompt_tokens // self.impl.config.chunk_size)
            records.labels[request.request_id] = named
        except Exception:
            self._failed("before_lookup")

    def after_lookup(self, request: Any, num_computed_tokens: int, matched: Any) -> None:
        """Remember when the answer came and how much the engine had itself."""
        try:
            if matched[0] is None:
                return
            records = self.records
            record = None if records is None else records.get(request.request_id)
            if record is not None and not record.answered_ns:
                record.answered_ns = time.time_ns()
                record.engine_cached_tokens = num_computed_tokens
        except Exception:
            self._failed("after_lookup")

    # ---- request_finished

    def before_finished(self, request: Any) -> Any:
        """The request's record, taken before the base is called (LMCache-Ascend's asks the client for it too)."""
        try:
            records = self.records
            return None if records is None else records.get(request.request_id)
        except Exception:
            self._failed("before_finished")
            return None

    def finished(self, request: Any, record: Any, result: Result) -> Result:
        """Publish the end of the request and add its hashes to the answer."""
        try:
            request_id = request.request_id
            records = self.records
            if records is not None:
                records.pop(request_id)
            if request_id.startswith("mock_req"):  # vLLM's data-parallel dummies
                return result
            note = FinishedNote()
            status, reason, texts = self._hashes(request, record)
            note.status, note.reason, note.texts = status, reason, texts
            self._describe(note, request, record)
            self.publisher.offer(note)
            return self._answer(result, texts if status is HashesStatus.KNOWN else ())
        except Exception:
            self._failed("request_finished")
            return _without_null(result)

    def _hashes(self, request: Any, record: Any) -> tuple[HashesStatus, str | None, Any]:
        if self.engine_status is not None:
            return (*self.engine_status, ())
        reason = request_reason(request)
        if reason is not None:
            return HashesStatus.UNSUPPORTED, reason, ()
        agreement = self.agreement
        if agreement is not None and agreement.state is AgreementState.DIFFERS:
            return HashesStatus.UNSTABLE, agreement.reason, ()
        if record is not None:
            return HashesStatus.KNOWN, None, record.texts
        if self.recompute is not None:
            texts = self.recompute(request)
            if texts is not None:
                return HashesStatus.KNOWN, None, texts
        return HashesStatus.UNKNOWN, self._why_unknown(request), ()

    def _why_unknown(self, request: Any) -> str:
        records = self.records
        if records is not None and records.overflowed:
            return f"no record of its lookup: it ended before one, or more than {records.capacity} requests were live"
        return "it ended before LMCache was asked about it"

    def _describe(self, note: FinishedNote, request: Any, record: Any) -> None:
        now = time.time_ns()
        note.finished_at = now
        note.engine_request_id = request.request_id
        note.arrived_at = int(request.arrival_time * 1e9)
        why = request.get_finished_reason()
        note.finish_reason = "" if why is None else str(why)  # an IntEnum whose first member, STOP, is 0
        note.prompt_tokens = request.num_prompt_tokens
        note.generated_tokens = request.num_output_tokens
        note.tenant = self.settings.tenant
        tracker = self.impl._request_trackers.get(request.request_id)
        if tracker is not None:
            note.hit_tokens = tracker.num_lmcache_cached_tokens
        if record is not None:
            note.lookup_ns = record.started_ns
            note.answered_ns = record.answered_ns
            note.engine_cached_tokens = record.engine_cached_tokens
        labels = read_labels(request, trust_tenant=self.settings.trust_tenant)
        if labels is not NONE:
            note.session = labels.session
            note.traceparent = labels.traceparent
            note.tracestate = labels.tracestate
            note.tenant = labels.tenant or note.tenant

    def _answer(self, result: Result, texts: Any) -> Result:
        delay, params = result
        if texts and self.settings.return_hashes:
            if params is None:
                return delay, {CHUNK_HASHES: texts}
            if not params.get(CHUNK_HASHES):
                params[CHUNK_HASHES] = texts
            return result
        return _without_null(result)

    def _failed(self, where: str) -> None:
        self.failures += 1
        if self.failures == 1:
            _log.exception("semkv: hook failed in %s; the engine goes on as without it", where)

    def close(self) -> None:
        """Publish what is left, for at most a second."""
        self.publisher.close(1.0)


def _without_null(result: Result) -> Result:
    """LMCache-Ascend answers `chunk_hashes: null` for what it does not know; agents fail on that."""
    delay, params = result
    if params is not None and CHUNK_HASHES in params and params[CHUNK_HASHES] is None:
        params = {name: value for name, value in params.items() if name != CHUNK_HASHES}
        return delay, params or None
    return result
