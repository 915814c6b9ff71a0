# SPDX-License-Identifier: Apache-2.0
"""`semkv record` and `semkv replay`: what passed on a real server is kept, and played against modelled ranks."""

import asyncio
import json
import signal
import subprocess
import time

import pytest

from semkv.bus import codec, connect
from semkv.bus.messages import Cancel, EngineInfo, Finished, Prefetch, Result
from semkv.bus.status import ChunkStatus, HashesStatus, Order, State, Tier
from semkv.cli.replay.latency import LatencyModel
from semkv.cli.replay.model_rank import ModelStorage
from semkv.cli.replay.player import ReplayError, against_model
from semkv.cli.replay.recording import Recorded, RecordingError, announced, read
from semkv.consumers.storage.ops import Control
from tests.cli.conftest import MAIN, environment
from tests.contracts.samples import DOMAIN, SAMPLES

INFO = next(sample for sample in SAMPLES if isinstance(sample, EngineInfo))
FAST = LatencyModel(fixed_ms=0, chunk_ms=0, chunk_bytes=1000, ddr_chunks=4)
S = 1_000_000_000
ASK = {"order": Order.PREFIX, "tier": Tier.CPU, "budget_bytes": None, "dry_run": False, "tenant": "t", "session": None}


def where(instance="engine-0"):
    return {"tenant": "acme", "domain": DOMAIN.fingerprint, "instance": instance}


def prefetch(command_id, hashes, **fields):
    return Prefetch(**where(), command_id=command_id, client="a", chunk_hashes=hashes, **fields)


def finished(hashes):
    return Finished(
        **where(), epoch=1, seq=1, request_id="r", engine_request_id="r", finish_reason="stop", chunk_size=256,
        hashes_status=HashesStatus.KNOWN, chunk_hashes=hashes, prompt_tokens=1, generated_tokens=1, arrived_at=1,
        finished_at=2,
    )  # fmt: skip


def test_what_passed_is_recorded_and_read_back(bus, tmp_path):
    file = tmp_path / "all.jsonl"
    command = [*MAIN, "record", str(file), "--nats-url", bus.url, "--count", "6", "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "recording tenant default" in process.stderr.readline()

        async def commands():
            async with connect(bus.url) as kv:
                assert (await (await kv.prefetch([1, 2])).result(30)).ok
                await (await kv.evict([1])).result(30)

        asyncio.run(commands())
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert json.loads(out) == {"file": str(file), "messages": 6}
    messages = [item.message() for item in read(file)]
    assert [message.type for message in messages[:2]] == ["engine", "prefetch"]
    assert messages[0].instance == "engine-0"
    assert sorted(message.type for message in messages[1:]) == sorted(
        ["prefetch", "evict"] + ["accepted", "result"] * 2
    )


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_what_was_recorded_until_an_interrupt_is_told_and_kept(bus, tmp_path, end):
    file = tmp_path / "day.jsonl"
    # Tests that run in a script's background are given an interrupt that is ignored; a terminal's is not.
    heard = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {MAIN[2]}"
    command = [*MAIN[:2], heard, "record", str(file), "--nats-url", bus.url, "--json"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert "recording tenant default" in process.stderr.readline()
        process.send_signal(end)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert json.loads(out) == {"file": str(file), "messages": 0} and err == ""
    assert process.returncode == 130
    assert [item.message().type for item in read(file)] == ["engine"]


def test_a_recording_overwrites_nothing(semkv, tmp_path):
    (tmp_path / "old.jsonl").write_text("mine")
    assert "overwrites nothing" in semkv("record", "old.jsonl", "--nats-url", "nats://127.0.0.1:1", code=2).stderr
    assert (tmp_path / "old.jsonl").read_text() == "mine"


def test_without_a_server_no_file_is_left(semkv, tmp_path):
    semkv("record", "new.jsonl", "--nats-url", "nats://127.0.0.1:1", code=3)
    assert not (tmp_path / "new.jsonl").exists()


def test_no_trace_of_the_recorded_run_is_kept():
    line = Recorded(1, "s", {"traceparent": "00-1-2-01", "Content-Type": "x"}, b"").line()
    assert "traceparent" not in line and "Content-Type" in line


@pytest.fixture
def recording(tmp_path):
    """Chunks 1 to 3 are stored by a request; one prefetch of them is asked for before and one after."""
    began = time.time_ns()
    old = Result(
        **where(), command_id="after", client="a", op="prefetch", rank=1, world_size=2, epoch=1, state=State.SUCCEEDED,
        counts={"loaded": 3}, ran_ms=40.0,
    )  # fmt: skip
    messages = [(INFO, 0), (prefetch("before", (1, 2, 3)), 0.01), (finished((1, 2, 3)), 0.4)]
    messages += [(finished((11, 12, 13, 14)), 0.4), (prefetch("after", (1, 2, 3)), 0.8), (old, 0.9)]
    path = tmp_path / "day.jsonl"
    path.write_text("".join(announced(message, began + int(at * S)).line() + "\n" for message, at in messages))
    return path


def test_replayed_ranks_know_what_the_recorded_requests_stored(semkv, recording):
    told = semkv("replay", recording, "--chunk-ms", 1, "--ddr-chunks", 4, "--json").stdout
    before, after, total = (json.loads(line) for line in told.splitlines())
    assert before["replayed"]["state"] == "partial" and before["replayed"]["counts"].get("missing", 0) >= 1
    assert after["replayed"]["state"] == "succeeded" and after["replayed"]["counts"] == {"loaded": 3}
    assert after["recorded"]["ran_ms"] == 40.0 and before["recorded"] is None
    assert total == {"commands": 2, "unanswered": 0, "unreadable": 0}


def test_the_table_is_for_people(semkv, recording):
    done = semkv("replay", recording, "--speed", 0)
    assert "2 commands" in done.stdout and "engine-0.1" in done.stdout and done.stderr == ""


def test_what_was_stored_before_a_recording_began_is_named(semkv, recording):
    lines = recording.read_text().splitlines()
    late = recording.with_name("late.jsonl")
    late.write_text("\n".join([lines[0], lines[3], *lines[4:]]) + "\n")
    assert "3 of the chunks asked for were stored before" in semkv("replay", late, "--speed", 0).stderr


def test_commands_are_played_on_a_real_rank_when_asked(semkv, bus, tmp_path):
    message = prefetch("mine", (1, 2)).model_copy(update={"tenant": "default"})
    answer = Result(
        **{**where(), "tenant": "default"}, command_id="mine", client="a", op="prefetch", rank=0, world_size=1, epoch=1,
        state=State.SUCCEEDED,
    )  # fmt: skip
    file = tmp_path / "one.jsonl"
    file.write_text("".join(announced(item, time.time_ns()).line() + "\n" for item in (message, answer)))
    told = semkv("replay", file, "--live", bus.url, "--json").stdout
    assert json.loads(told.splitlines()[0])["replayed"]["counts"] == {"loaded": 2}
    assert ("prefetch", (1, 2)) in bus.storage.calls


def test_a_recording_without_an_engine_says_what_to_do(semkv, tmp_path):
    file = tmp_path / "none.jsonl"
    file.write_text(announced(prefetch("x", (1,)), 1).line() + "\n")
    assert "no engine was live" in semkv("replay", file, code=2).stderr


@pytest.mark.parametrize("text", ["", "\n", "{}", "[1]", '{"at_ns":1,"subject":"s","headers":{},"payload":"?"}', "x"])
def test_what_is_no_recording_is_refused(semkv, tmp_path, text):
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    assert "bad.jsonl" in semkv("replay", file, code=2).stderr


def test_a_bad_line_is_named(tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(announced(INFO, 1).line() + "\n{}\n")
    with pytest.raises(RecordingError, match="line 2"):
        list(read(file))


async def test_a_message_that_cannot_be_read_is_counted_and_skipped():
    broken = Recorded(2, "semkv.v1.acme.x.cmd.all.prefetch", {}, b"\xc1")
    report = await against_model([announced(INFO, 1), broken], FAST, speed=0, patience_s=1)
    assert (report.commands, report.unreadable) == (0, 1)


async def test_no_rank_to_model():
    with pytest.raises(ReplayError):
        await against_model([], FAST)


class TestModel:
    def test_ddr_forgets_the_least_recently_used(self):
        storage = ModelStorage(FAST)
        storage.stored((1, 2, 3, 4, 5))
        assert storage.locate((1, 5), tenant="t").chunk_tiers == ((Tier.DISK,), (Tier.CPU, Tier.DISK))
        done = storage.prefetch((1, 2), control=Control(), **ASK)
        assert done.state is State.SUCCEEDED and done.bytes_by_tier == {"cpu": 2000} and done.usable_prefix == 2
        assert storage.locate((3,), tenant="t").chunk_tiers == ((Tier.DISK,),)

    def test_what_comes_after_a_missing_chunk_is_unreachable_in_prefix_order_only(self):
        storage = ModelStorage(FAST)
        storage.stored((1, 3))
        ended = storage.prefetch((1, 2, 3), control=Control(), **ASK)
        assert ended.chunk_status == (ChunkStatus.ALREADY_THERE, ChunkStatus.MISSING, ChunkStatus.UNREACHABLE)
        ended = storage.prefetch((1, 2, 3), control=Control(), **{**ASK, "order": Order.SET})
        assert ended.chunk_status[2] is ChunkStatus.ALREADY_THERE

    def test_a_cancelled_prefetch_stops_between_chunks(self):
        storage = ModelStorage(LatencyModel(chunk_ms=60_000))
        storage.stored(range(300))
        control = Control()
        control.cancel()
        ended = storage.prefetch((1, 2), control=control, **ASK)
        assert ended.state is State.CANCELLED and set(ended.chunk_status) == {ChunkStatus.NOT_TRIED}

    def test_a_budget_and_a_dry_run_are_kept_to(self):
        storage = ModelStorage(FAST)
        storage.stored(range(1, 9))
        ended = storage.prefetch((1, 2, 3), control=Control(), **{**ASK, "budget_bytes": 1500})
        assert ended.chunk_status == (ChunkStatus.LOADED, ChunkStatus.NO_MEMORY, ChunkStatus.NOT_TRIED)
        before = storage.tiers()
        assert storage.prefetch((3,), control=Control(), **{**ASK, "dry_run": True}).bytes_by_tier == {"cpu": 0}
        assert storage.tiers() == before

    def test_retained_chunks_are_shared_until_released(self):
        storage = ModelStorage(FAST)
        storage.stored((1,))
        ask = {"tiers": None, "dry_run": False, "control": Control(), "tenant": "t", "session": None}
        storage.retain("c", "s", (1,), 60.0, "t")
        assert storage.evict((1,), force=False, **ask).chunk_status == (ChunkStatus.SHARED,)
        storage.release("c", "s", "t")
        assert storage.evict((1, 2), force=False, **ask).chunk_status == (ChunkStatus.REMOVED, ChunkStatus.ABSENT)


def test_a_device_prefetch_is_not_pretended():
    ended = ModelStorage(FAST).prefetch((1,), control=Control(), **{**ASK, "tier": Tier.DEVICE})
    assert ended.state is State.FAILED and "device" in ended.reason


def test_recorded_messages_decode_to_what_they_were():
    for sample in SAMPLES:
        assert announced(sample, 1).message() == codec.decode(codec.subject_of(sample), *reversed(codec.encode(sample)))


async def test_a_recorded_cancel_stops_its_command_which_has_another_name_now():
    began = time.time_ns()
    slow = LatencyModel(fixed_ms=0, chunk_ms=60_000, ddr_chunks=1)
    cancel = Cancel(**where(), command_id="stop", client="a", target_command_id="long")
    messages = [(INFO, 0), (finished((1, 2)), 0), (prefetch("long", (1,)), 0.1), (cancel, 0.4)]
    recording = [announced(message, began + int(at * S)) for message, at in messages]
    report = await against_model(recording, slow, patience_s=10)
    (long,) = (answer for answer in report.answers if answer.command_id == "long")
    assert long.replayed.state is State.CANCELLED


async def test_an_hour_can_be_played_in_a_moment():
    began = time.time_ns()
    messages = [(INFO, 0), (finished((1, 2)), 1), (prefetch("late", (1, 2)), 3600)]
    recording = [announced(message, began + at * S) for message, at in messages]
    report = await asyncio.wait_for(against_model(recording, FAST, speed=36_000), 60)
    assert report.commands == 1 and report.answers[0].replayed.state is State.SUCCEEDED
