# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side adds to an answer and to the bus: vLLM's own request class, LMCache's own client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from semkv.bus.status import HashesStatus
from semkv.engine_hooks.agreement import Agreement, AgreementState, RankAnnouncement
from semkv.engine_hooks.finished import FinishedNote
from semkv.engine_hooks.hooked import hooked_class
from semkv.engine_hooks.lookup_client import SESSION_LABEL, TENANT_LABEL, HashRecords, innermost, records_of, upgrade
from semkv.engine_hooks.recompute import Recompute
from semkv.engine_hooks.scheduler_side import SchedulerSide
from semkv.engine_hooks.settings import HookSettings
from semkv.engine_hooks.sides import engine_status
from tests.engine_hooks.clients import end, lmcache_config, lookup_client
from tests.engine_hooks.test_publisher import domain


class Kept:
    """Takes the publisher's place: keeps what is offered."""

    def __init__(self) -> None:
        self.notes: list[FinishedNote] = []
        self.fail = False
        self.closed = False

    def offer(self, note: FinishedNote) -> None:
        if self.fail:
            raise RuntimeError("on purpose")
        self.notes.append(note)

    def close(self, timeout: float) -> None:
        self.closed = True


def request(name: str = "chatcmpl-1-0123abcd", tokens: int = 40, **fields: Any) -> Any:
    params = SamplingParams(max_tokens=8, extra_args={"kv_transfer_params": fields.pop("params", None)})
    return Request(name, list(range(tokens)), params, None, **fields)


def ended(one: Any) -> Any:
    """The request as the engine has it when it ends."""
    one.append_output_token_ids([7, 8])
    one.status = RequestStatus.FINISHED_STOPPED
    return one


class Rig:
    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        self.publisher = Kept()
        self.impl = SimpleNamespace(
            lookup_client=client, _request_trackers={}, config=SimpleNamespace(chunk_size=16), skip_last_n_tokens=0
        )
        settings = options.pop("settings", HookSettings())
        self.side = SchedulerSide(
            settings, self.impl, self.publisher, agreement=options.pop("agreement", None), **options
        )

    def look_up(self, one: Any, cached: int = 0) -> None:
        self.side.before_lookup(one)
        self.client.lookup(list(one.prompt_token_ids), one.request_id)
        self.side.after_lookup(one, cached, (0, False))

    def finish(self, one: Any, result: Any = (False, None)) -> Any:
        return self.side.finished(ended(one), self.side.before_finished(one), result)

    @property
    def note(self) -> FinishedNote:
        return self.publisher.notes[-1]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with lookup_client() as client:
        upgrade(innermost(client), HashRecords())
        yield Rig(client)


def texts(rig: Rig, one: Any) -> list[str]:
    return [
        f"{v:x}" for _, _, v in rig.client.token_database.process_tokens.inner(one.prompt_token_ids, make_key=False)
    ]


def test_the_base_result_is_kept(rig: Rig) -> None:
    one = request()
    rig.look_up(one, cached=16)
    rig.impl._request_trackers[one.request_id] = SimpleNamespace(num_lmcache_cached_tokens=32)
    base = {"first_tok": 7, "num_lmcache_cached_tokens": 32}
    delay, params = rig.finish(one, (True, base))
    assert delay is True
    assert params == {"first_tok": 7, "num_lmcache_cached_tokens": 32, "chunk_hashes": texts(rig, one)}
    note = rig.note
    assert (note.status, note.hit_tokens, note.engine_cached_tokens) == (HashesStatus.KNOWN, 32, 16)
    assert (note.prompt_tokens, note.generated_tokens, note.finish_reason) == (40, 2, "stop")
    assert len(rig.side.records) == 0


def test_no_field_without_hashes(rig: Rig) -> None:
    short = request(tokens=15)
    rig.look_up(short)
    assert rig.finish(short) == (False, None)
    assert rig.note.status is HashesStatus.KNOWN and not rig.note.texts
    never = request("chatcmpl-2-0123abcd")
    assert rig.finish(never) == (False, None)
    assert rig.note.status is HashesStatus.UNKNOWN and rig.note.reason


def test_an_evicted_record_is_unknown_never_null(rig: Rig) -> None:
    rig.side.records.capacity = 2
    ones = [request(f"chatcmpl-{number}-0123abcd") for number in range(3)]
    for one in ones:
        rig.look_up(one)
    assert rig.finish(ones[0]) == (False, None)
    assert rig.note.status is HashesStatus.UNKNOWN and "more than 2 requests" in (rig.note.reason or "")
    assert rig.finish(ones[2])[1]["chunk_hashes"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cache_salt": "s"}, "cache_salt"),
        ({"params": {"lmcache.tag.a": "b"}}, "tags"),
        ({"lora_request": SimpleNamespace(lora_name="l")}, "lora"),
    ],
)
def test_unsupported_by_name(rig: Rig, fields: dict[str, Any], reason: str) -> None:
    one = request(**fields)
    rig.look_up(one)
    assert rig.finish(one) == (False, None)
    assert (rig.note.status, rig.note.reason, list(rig.note.texts)) == (HashesStatus.UNSUPPORTED, reason, [])


@pytest.mark.parametrize(
    ("settings", "status", "word"),
    [
        ({"use_layerwise": True}, "unsupported", "layerwise"),
        ({"enable_blending": True}, "unsupported", "blending"),
        ({"pre_caching_hash_algorithm": "sha256_cbor"}, "unsupported", "sha256_cbor with async loading"),
        ({"pre_caching_hash_algorithm": "sha256_cbor", "enable_async_loading": False}, "unsupported", "64-bit"),
    ],
)
def test_engines_whose_hashes_cannot_be_used(settings: dict[str, Any], status: str, word: str) -> None:
    config = SimpleNamespace(
        **{
            "use_layerwise": False,
            "enable_blending": False,
            "enable_async_loading": True,
            "extra_config": None,
            **settings,
        }
    )
    found = engine_status(config)
    assert found is not None and found[0] == status and word in found[1]


def test_blake3_is_chosen_over_what_lmcache_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    config = lmcache_config(pre_caching_hash_algorithm="sha256_cbor", extra_config={"semkv_hash_algorithm": "blake3"})
    assert engine_status(config) is None
    assert engine_status(lmcache_config(pre_caching_hash_algorithm="blake3")) is None
    with pytest.raises(ValueError, match="semkv_hash_algorithm='md5'"):
        engine_status(lmcache_config(extra_config={"semkv_hash_algorithm": "md5"}))


@pytest.mark.parametrize(
    ("seed", "stable"), [("0", True), ("123", True), ("random", False), (None, False), ("0x1", False)]
)
def test_stable_roots(monkeypatch: pytest.MonkeyPatch, seed: str | None, stable: bool) -> None:
    if seed is None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    else:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    found = engine_status(lmcache_config())
    assert (found is None) is stable
    if found is not None:
        assert found[0] is HashesStatus.UNSTABLE and "PYTHONHASHSEED" in found[1]


def test_a_bug_never_reaches_the_engine(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.publisher.fail = True
    for number in range(3):
        one = request(f"chatcmpl-{number}-0123abcd")
        rig.look_up(one)
        assert rig.finish(one, (False, {"first_tok": 1})) == (False, {"first_tok": 1})
    rig.side.before_lookup(None)
    rig.side.after_lookup(None, 0, None)
    assert rig.side.before_finished(None) is None
    assert rig.side.failures == 6
    assert len([record for record in caplog.records if "hook failed" in record.getMessage()]) == 1


def test_data_parallel_dummies_are_not_published(rig: Rig) -> None:
    rig.finish(request("mock_req_1"))
    assert not rig.publisher.notes


def test_a_disagreement_stops_the_field() -> None:
    agreement = Agreement(domain(), 1)
    with lookup_client() as client:
        upgrade(client, HashRecords())
        rig = Rig(client, agreement=agreement)
        one = request()
        rig.look_up(one)
        assert rig.finish(one)[1]["chunk_hashes"], "roots are stable and nobody has spoken yet"
        assert agreement.update([RankAnnouncement(0, "storage", domain(probe=1))]) is AgreementState.DIFFERS
        two = request("chatcmpl-2-0123abcd")
        rig.look_up(two)
        assert rig.finish(two) == (False, None)
        assert rig.note.status is HashesStatus.UNSTABLE


def test_agreement_waits_for_every_rank() -> None:
    agreement = Agreement(domain(), 2)
    assert agreement.update([RankAnnouncement(0, "storage", domain())]) is AgreementState.WAITING
    assert "rank 1" in agreement.reason
    passive = RankAnnouncement(1, "passive", domain(probe=9))
    assert agreement.update([RankAnnouncement(0, "storage", domain()), passive]) is AgreementState.AGREED
    assert agreement.update([]) is AgreementState.WAITING


def test_session_and_tenant_labels(rig: Rig) -> None:
    rig.side.records.default_labels = {TENANT_LABEL: "default"}
    one = request(params={"semkv": {"session": "s", "tenant": "other"}})
    rig.side.before_lookup(one)
    assert rig.side.records.labels[one.request_id] == {TENANT_LABEL: "default", SESSION_LABEL: "s"}
    rig.finish(one)
    assert rig.note.session == "s" and rig.note.tenant == "default"
    assert not rig.side.records.labels


def test_a_trusted_request_names_its_tenant() -> None:
    with lookup_client() as client:
        upgrade(client, HashRecords())
        rig = Rig(client, settings=HookSettings(trust_tenant=True))
        one = request(params={"semkv": {"tenant": "other"}})
        rig.look_up(one)
        rig.finish(one)
        assert rig.note.tenant == "other"
        bad = request("chatcmpl-2-0123abcd", params={"semkv": {"tenant": "a.b*"}})
        rig.finish(bad)
        assert rig.note.tenant == "default"


def test_a_client_that_lmcache_builds_anew_is_upgraded(rig: Rig) -> None:
    rig.side.adopt = lambda client: (upgrade(innermost(client), HashRecords()), records_of(client))[1]
    with lookup_client() as other:
        rig.impl.lookup_client = rig.client = other
        one = request()
        rig.look_up(one)
        assert rig.finish(one)[1]["chunk_hashes"]


def test_recompute_for_clients_that_cannot_be_listened_to() -> None:
    with lookup_client() as client:
        rig = Rig(client)
        rig.side.adopt = lambda _client: None
        one = request()
        from semkv.engine_hooks.lookup_client import HashTexts

        rig.side.recompute = Recompute(client.token_database, HashTexts(), rig.impl)
        wanted = [f"{v:x}" for _, _, v in client.token_database.process_tokens(one.prompt_token_ids, make_key=False)]
        assert rig.finish(one)[1]["chunk_hashes"] == wanted
        rig.impl.skip_last_n_tokens = 10
        assert len(rig.finish(request("chatcmpl-2-0123abcd"))[1]["chunk_hashes"]) == 1


# ---- LMCache-Ascend, by a stand-in of its public surface


class AscendStandInConnector:
    """Stand-in for LMCache-Ascend's connector: `chunk_hashes` is set whatever the client knows, null included."""

    def __init__(self, impl: Any) -> None:
        self._lmcache_engine = impl

    def get_num_new_matched_tokens(self, one: Any, num_computed_tokens: int) -> Any:
        client = self._lmcache_engine.lookup_client
        client.lookup(list(one.prompt_token_ids), one.request_id)
        return 0, False

    def request_finished(self, one: Any, block_ids: Any) -> Any:
        found = innermost(self._lmcache_engine.lookup_client).get_cached_hashes(one.request_id)
        return False, {"chunk_hashes": found}

    def shutdown(self) -> None:
        return


@pytest.fixture
def ascend(rig: Rig) -> Any:
    connector = AscendStandInConnector(rig.impl)
    connector.__class__ = hooked_class(AscendStandInConnector)
    connector._semkv_side = rig.side  # type: ignore[attr-defined]
    return connector


def test_ascends_own_answer_is_respected(rig: Rig, ascend: Any) -> None:
    one = request()
    assert isinstance(ascend, AscendStandInConnector)
    assert ascend.get_num_new_matched_tokens(one, 0) == (0, False)
    assert ascend.request_finished(ended(one), []) == (False, {"chunk_hashes": texts(rig, one)})
    assert list(rig.note.texts) == texts(rig, one) and rig.note.status is HashesStatus.KNOWN


def test_ascends_null_is_taken_out(rig: Rig, ascend: Any) -> None:
    assert ascend.request_finished(ended(request()), []) == (False, None)
    assert rig.note.status is HashesStatus.UNKNOWN


def test_the_hooked_class_keeps_the_object_and_closes_the_publisher(rig: Rig, ascend: Any) -> None:
    assert type(ascend).__name__ == "HookedAscendStandInConnector"
    assert hooked_class(type(ascend)) is type(ascend)
    ascend.shutdown()
    assert rig.publisher.closed


def test_a_connector_with_several_kv_groups(rig: Rig) -> None:
    class Grouped(AscendStandInConnector):
        def request_finished_all_groups(self, one: Any, block_ids: Any) -> Any:
            return True, {"first_tok": 1}

    connector = Grouped(rig.impl)
    connector.__class__ = hooked_class(Grouped)
    connector._semkv_side = rig.side  # type: ignore[attr-defined]
    one = request()
    rig.look_up(one)
    wanted = {"first_tok": 1, "chunk_hashes": texts(rig, one)}
    assert connector.request_finished_all_groups(ended(one), ([],)) == (True, wanted)
    assert not hasattr(hooked_class(AscendStandInConnector), "request_finished_all_groups")


def test_a_two_tuple_hash_shows_in_the_probe() -> None:
    """LMCache-Ascend hashes (prefix, tokens) where LMCache hashes (prefix, tokens, ()): another domain."""
    from semkv.engine_hooks.identity import probe

    with lookup_client(chunk_size=256) as client:
        database = client.token_database
        three = probe(database, 256)
        database._hash_tokens = lambda tokens, prefix, extra=None: hash((prefix, tuple(tokens)))
        two = probe(database, 256)
    assert three != two
    if not sys.flags.hash_randomization:
        assert (f"{three:x}", f"{two:x}") == ("-adc333b9eaa0e45", "68420ac111243717")


def test_ended_clients_leave_no_thread() -> None:
    with lookup_client() as client:
        thread = client.thread
    assert not thread.is_alive()
    assert callable(end)
