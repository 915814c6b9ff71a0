# SPDX-License-Identifier: Apache-2.0
"""What the hooks cost the engine: added to a lookup and to `request_finished`, per request of 512 chunk hashes.

A real LMCache async lookup client with real sockets, upgraded in place, and a real publisher thread with a real
nats-server, up and stopped. Each round runs the same lookup on a plain and on an upgraded client; hashing itself (the
same in both) is replaced by its result, so that microseconds are not lost in milliseconds. Beside it, from the same
run: the same with tracing on (in the same rounds), with the publisher asleep, LMCache's own lookup with its hashing,
vLLM's ZMQ publisher for KV events, the chain hashes, and events per second.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HASHES = 512
CHUNK = 256
TOKENS = HASHES * CHUNK
NEW_PER_TURN = 16
ROUNDS = 1500
PACE_S = 0.002
ASLEEP_S = 0.15
WARM = 50


def _percentiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)]


def _request(number: int, tokens: list[int], traceparent: str | None = None) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    said = None if traceparent is None else {"kv_transfer_params": {"semkv": {"traceparent": traceparent}}}
    params = SamplingParams(max_tokens=8, extra_args=said)
    request = Request(f"cmpl-{number}-0-0123abcd", tokens, params, None)
    request.append_output_token_ids([1, 2, 3])
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    return request


def _turns(seed: int) -> Iterator[list[tuple[int, int, int]]]:
    """Results of a token database: a conversation whose last chunks change with every turn."""
    source = random.Random(seed)
    chain = [source.getrandbits(64) - (1 << 63) for _ in range(HASHES)]
    while True:
        chain[-NEW_PER_TURN:] = [source.getrandbits(64) - (1 << 63) for _ in range(NEW_PER_TURN)]
        yield [(i * CHUNK, i * CHUNK + CHUNK, value) for i, value in enumerate(chain)]


class _Prepared:
    """Stands in for hashing: gives prepared results as LMCache's generator would."""

    def __init__(self) -> None:
        self.results: list[tuple[int, int, int]] = []

    def __call__(self, tokens: Any, make_key: bool = True) -> Iterator[tuple[int, int, int]]:
        yield from self.results


@contextlib.contextmanager
def _rig(url: str) -> Iterator[Callable[..., float]]:
    """Gives a function (chunks, request, cold=False): microseconds that the hooks add to that request."""
    from semkv.bus.settings import BusSettings
    from semkv.engine_hooks.event_loop import EventLoop
    from semkv.engine_hooks.lookup_client import TENANT_LABEL, HashRecords, upgrade
    from semkv.engine_hooks.publisher import EventPublisher
    from semkv.engine_hooks.scheduler_side import SchedulerSide
    from semkv.engine_hooks.settings import HookSettings
    from tests.engine_hooks.clients import lookup_client

    with lookup_client(chunk_size=CHUNK) as plain, lookup_client(chunk_size=CHUNK) as hooked:
        prepared = _Prepared()
        for client in (plain, hooked):
            # No rank listens, and a ZMQ socket without a peer blocks when its queue is full.
            for place in client.push_sockets:
                place.close(linger=0)
            client.push_sockets = [SimpleNamespace(send=lambda data, copy: None, close=lambda linger: None)]
        plain.token_database.process_tokens = prepared
        hooked.token_database.process_tokens = prepared
        records = HashRecords()
        records.default_labels = {TENANT_LABEL: "default"}
        upgrade(hooked, records)
        loop = EventLoop(BusSettings(url=url), instance="bench", domain="b" * 12, chunk_size=CHUNK, agreement=None)
        publisher = EventPublisher(loop.run)
        impl = SimpleNamespace(lookup_client=hooked, _request_trackers={}, config=SimpleNamespace(chunk_size=CHUNK))
        side = SchedulerSide(HookSettings(), impl, publisher, agreement=None)
        clock, tokens = time.perf_counter_ns, [1] * 8

        def added(chunks: list[tuple[int, int, int]], request: Any, *, cold: bool = False) -> float:
            prepared.results = chunks
            if cold:
                records.texts.clear()
            plain.lookup(tokens, request.request_id, None)  # the first after a pause is slower, whoever it is
            begin = clock()
            plain.lookup(tokens, request.request_id, None)
            middle = clock()
            side.before_lookup(request)
            hooked.lookup(tokens, request.request_id, None)
            side.after_lookup(request, 0, (0, False))
            end = clock()
            record = side.before_finished(request)
            side.finished(request, record, (False, {"num_lmcache_cached_tokens": 0}))
            done = clock()
            plain.clear_lookup_status(request.request_id)
            return ((end - middle) - (middle - begin) + (done - end)) / 1000

        publisher.start()
        time.sleep(0.3)
        try:
            yield added
        finally:
            publisher.close(1.0)


def _added(url: str, *, cold: bool = False, rounds: int = ROUNDS, pace_s: float = PACE_S) -> tuple[float, float]:
    """Microseconds added per request: p50 and p99 over rounds."""
    turns = _turns(7)
    values: list[float] = []
    with _rig(url) as added:
        for number in range(rounds + WARM):
            values.append(added(next(turns), _request(number, [1] * 8), cold=cold))
            time.sleep(pace_s)
    return _percentiles(values[WARM:])


def _tracing(url: str, file: Path, rounds: int = ROUNDS) -> dict[str, float]:
    """The same requests, each with a trace of its own, with tracing off and on, in the same rounds."""
    turns = _turns(9)
    values: dict[str, list[float]] = {"off": [], "on": []}
    with contextlib.ExitStack() as stack:
        rigs = {"off": stack.enter_context(_rig(url))}
        with _environment(SEMKV_TRACE_FILE=str(file)):
            rigs["on"] = stack.enter_context(_rig(url))
        for number in range(rounds + WARM):
            chunks = next(turns)
            flags = "01" if number % 10 == 0 else "00"
            request = _request(number, [1] * 8, f"00-{number + 1:032x}-{number + 1:016x}-{flags}")
            for name in sorted(rigs, reverse=number % 2 == 0):
                values[name].append(rigs[name](chunks, request))
            time.sleep(PACE_S)
    figures = {}
    for name, taken in values.items():
        figures[f"tracing_{name}_p50_us"], figures[f"tracing_{name}_p99_us"] = _percentiles(taken[WARM:])
    return figures


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _best(call: Callable[[], Any], times: int = 15) -> float:
    """The median of `times` calls, in microseconds."""
    taken = []
    for _ in range(times):
        begin = time.perf_counter_ns()
        call()
        taken.append((time.perf_counter_ns() - begin) / 1000)
    return statistics.median(taken)


def _pair(one: Callable[[], Any], other: Callable[[], Any], times: int = 40) -> tuple[float, float]:
    """The medians of both in microseconds, by turns."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for call, into in zip((one, other), taken, strict=True):
            begin = time.perf_counter_ns()
            call()
            into.append((time.perf_counter_ns() - begin) / 1000)
    return statistics.median(taken[0]), statistics.median(taken[1])


def _chains(figures: dict[str, float]) -> None:
    import torch
    from vllm.v1.utils import ConstantList

    from semkv.engine_hooks.chain_hash import ChainHasher
    from tests.engine_hooks.clients import lookup_client

    source = random.Random(1)
    tokens = [source.randrange(150_000) for _ in range(TOKENS)]
    tensor = torch.tensor(tokens)
    scheduled = ConstantList(tokens)
    with lookup_client(chunk_size=CHUNK) as client:
        process = client.token_database.process_tokens

        def builtin(given: Any) -> list[int]:
            return [value for _, _, value in process(given, make_key=False)]

        def ours(given: Any) -> list[int]:
            return ChainHasher("m", "", CHUNK, memory=0).hashes(given)

        # vLLM's read-only list is what a lookup in the scheduler gets.
        for name, given in (("list", tokens), ("vllm_list", scheduled), ("tensor", tensor)):
            figures[f"lmcache_builtin_{name}_us"], figures[f"blake3_{name}_us"] = _pair(
                functools.partial(builtin, given), functools.partial(ours, given)
            )
            figures[f"blake3_{name}_of_builtin"] = figures[f"blake3_{name}_us"] / figures[f"lmcache_builtin_{name}_us"]
        figures["lmcache_lookup_us"] = _best(lambda: client.lookup(tokens, "r", None))
    hasher = ChainHasher("m", "", CHUNK)
    hasher.hashes(tokens)

    new = list(range(CHUNK))

    def grow() -> None:
        tokens.extend(new)
        hasher.hashes(tokens)

    figures["blake3_grown_by_one_chunk_us"] = _best(grow)


def _kv_events(figures: dict[str, float]) -> None:
    from vllm.distributed.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

    source = random.Random(2)
    hashes = [source.getrandbits(63) for _ in range(HASHES)]
    publisher = ZmqEventPublisher(data_parallel_rank=0, endpoint="inproc://semkv-bench")
    try:
        fields = {
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": CHUNK,
            "lora_id": None,
            "medium": None,
            "lora_name": None,
        }
        known = BlockStored.__struct_fields__

        def publish() -> None:
            event = BlockStored(**{name: value for name, value in fields.items() if name in known})
            publisher.publish(KVEventBatch(ts=time.time(), events=[event]))
            time.sleep(0)

        figures["vllm_zmq_kv_event_us"] = _best(publish, 300)
    finally:
        publisher.shutdown()


def _events_per_second(url: str, count: int = 20_000, size: int = 8) -> float:
    from tests.engine_hooks.test_publisher import note, publisher

    texts = tuple(f"{value:x}" for value in range(1, size + 1))
    made = publisher(url, ring=count + 1)
    made.start()
    try:
        made.offer(note(0, texts=texts))
        while made.published < 1:
            time.sleep(0.01)
        notes = [note(number, texts=texts) for number in range(count)]
        begin = time.perf_counter()
        for one in notes:
            made.offer(one)
        while made.published <= count:
            time.sleep(0.005)
        return count / (time.perf_counter() - begin)
    finally:
        made.close(1.0)


def _tracing_processor_time(url: str, file: Path, count: int = 2000) -> dict[str, float]:
    """Microseconds of this process's processor time for an event of 4 hashes and its two spans, exporting included."""
    from tests.engine_hooks.test_publisher import note, publisher

    sampled = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
    taken: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(5):
        for name, values in taken.items():
            with _environment(**(sampled | {"SEMKV_TRACE_FILE": str(file)} if name == "on" else {})):
                made = publisher(url, ring=count + 1)
                made.start()
                made.offer(note(0))
                while made.published < 1:
                    time.sleep(0.01)
                notes = [note(number, texts=("1", "2", "3", "4")) for number in range(count)]
                for one in notes:
                    one.lookup_ns, one.answered_ns = one.finished_at - 2_000_000, one.finished_at - 1_000_000
                begin = time.process_time()
                for one in notes:
                    made.offer(one)
                while made.published <= count:
                    time.sleep(0.02)
                made.close(5.0)
                values.append((time.process_time() - begin) / count * 1e6)
    return {f"tracing_{name}_processor_us": statistics.median(values) for name, values in taken.items()}


def run() -> dict[str, float]:
    """Measure, print, and return the figures (microseconds, or events per second)."""
    from semkv.bus.embedded import EmbeddedServer

    figures: dict[str, float] = {}
    gc.collect()
    gc.freeze()  # as vLLM does before it serves
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder) / "nats")
        server.start()
        try:
            for name, cold in (("nats_up", False), ("nats_up_all_new", True)):
                figures[f"added_{name}_p50_us"], figures[f"added_{name}_p99_us"] = _added(server.url, cold=cold)
            asleep = _added(server.url, rounds=200, pace_s=ASLEEP_S)
            figures["added_publisher_asleep_p50_us"], figures["added_publisher_asleep_p99_us"] = asleep
            figures.update(_tracing(server.url, Path(folder) / "trace.json"))
            figures.update(_tracing_processor_time(server.url, Path(folder) / "spans.json"))
            figures["events_per_s_8_hashes"] = _events_per_second(server.url)
            figures["events_per_s_512_hashes"] = _events_per_second(server.url, 4000, HASHES)
        finally:
            server.stop()
        figures["added_nats_down_p50_us"], figures["added_nats_down_p99_us"] = _added(server.url)
    _chains(figures)
    _kv_events(figures)
    for name, value in figures.items():
        print(f"  {name:32} {value:10.2f}")
    return figures
