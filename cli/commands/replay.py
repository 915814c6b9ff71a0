# SPDX-License-Identifier: Apache-2.0
"""`semkv replay`: play a recording's commands again."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from semkv.bus.errors import BusError
from semkv.cli import bus_call
from semkv.cli.output import BAD_INPUT, PARTIAL, UNREACHABLE, console, errors, fail, print_json
from semkv.cli.replay.latency import LatencyModel

if TYPE_CHECKING:
    from semkv.bus import KV
    from semkv.bus.messages import Result
    from semkv.cli.replay.player import Answered, Report
    from semkv.cli.replay.recording import Recorded


def replay(
    file: Annotated[Path, typer.Argument(help="A recording of `semkv record`.")],
    speed: Annotated[float, typer.Option(help="2 halves the pauses between commands, 0 leaves them out.", min=0)] = 1.0,
    ddr_chunks: Annotated[int, typer.Option(help="The model's DDR, in chunks.", min=1)] = LatencyModel.ddr_chunks,
    chunk_ms: Annotated[float, typer.Option(help="Reading one chunk.", min=0)] = LatencyModel.chunk_ms,
    fixed_ms: Annotated[float, typer.Option(help="What a command costs besides.", min=0)] = LatencyModel.fixed_ms,
    chunk_mib: Annotated[float, typer.Option(help="A chunk's size.", min=0.001)] = LatencyModel.chunk_bytes / 2**20,
    live: Annotated[
        str | None, typer.Option(help="Play on this NATS server, at its real engines, evicts and all.")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for answers after the last command.", min=0.1)] = 30,
    as_json: bus_call.AsJson = False,
) -> None:
    """Play the commands again, at their times, and set each answer beside the recorded one.

    Unless --live names a server, they go to a rank of the same name whose storage is a model: chunks are stored as the
    recorded requests stored them, and moving them takes the time given. Ends with 1 if an answer did not come.

    Example: semkv replay monday.jsonl --chunk-ms 12 --ddr-chunks 512
    """
    from semkv.cli.replay.recording import RecordingError, read

    try:
        recording = list(read(file))
    except OSError as error:
        fail(f"{file}: {error.strerror or error}", BAD_INPUT)
    except (RecordingError, UnicodeDecodeError) as error:
        fail(str(error), BAD_INPUT)
    if not recording:
        fail(f"{file} has no message in it", BAD_INPUT)
    if not live and (unknown := _never_stored(recording)):
        text = f"{unknown} of the chunks asked for were stored before the recording began: the model has them nowhere"
        errors.print(text, markup=False, highlight=False, soft_wrap=True)
    model = LatencyModel(fixed_ms, chunk_ms, int(chunk_mib * 2**20), ddr_chunks)
    report = _live(live, recording, speed, patience) if live else _modelled(recording, model, speed, patience)
    _print(report, as_json)
    if report.unanswered:
        raise typer.Exit(PARTIAL)


def _never_stored(recording: list[Recorded]) -> int:
    """Chunks of prefetches that no recorded request stored: they will be missing, and that says nothing."""
    from semkv.bus import codec
    from semkv.bus.messages import Finished, Prefetch

    stored: set[int] = set()
    asked: set[int] = set()
    for item in recording:
        try:
            message = item.message()
        except codec.DecodeError:
            continue
        if isinstance(message, Finished):
            stored.update(message.chunk_hashes)
        elif isinstance(message, Prefetch):
            asked.update(message.chunk_hashes)
    return len(asked - stored)


def _live(url: str, recording: list[Recorded], speed: float, patience: float) -> Report:
    from semkv.cli.replay.player import against

    async def work(kv: KV) -> Report:
        return await against((await kv.session()).nc, recording, speed=speed, patience_s=patience)

    return bus_call.on_bus(url, None, work)


def _modelled(recording: list[Recorded], model: LatencyModel, speed: float, patience: float) -> Report:
    from semkv.bus.embedded import EmbeddedServerError
    from semkv.cli.replay.player import ReplayError, against_model

    try:
        return asyncio.run(against_model(recording, model, speed=speed, patience_s=patience))
    except ReplayError as error:
        fail(str(error), BAD_INPUT)
    except (BusError, EmbeddedServerError) as error:
        fail(str(error), UNREACHABLE)


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        for answer in report.answers:
            print_json(_as_dict(answer))
        print_json({"commands": report.commands, "unanswered": report.unanswered, "unreadable": report.unreadable})
        return
    table = Table("command", "rank", "chunks", "recorded", "ms", "replayed", "ms", box=None, pad_edge=False)
    for answer in report.answers:
        rank = f"{answer.rank[0]}.{answer.rank[1]}"
        name = f"{answer.op} {answer.command_id[-8:]}"
        table.add_row(name, rank, str(answer.chunks), *_told(answer.recorded), *_told(answer.replayed))
    console.print(table)
    took = [answer.replayed.ran_ms for answer in report.answers if answer.replayed is not None]
    median = f", half of them within {statistics.median(took):.1f} ms" if took else ""
    console.print(
        f"{report.commands} commands, {len(took)} answers{median}; {report.unanswered} answers did not come, "
        f"{report.unreadable} messages could not be read",
        highlight=False,
    )


def _told(result: Result | None) -> tuple[str, str]:
    if result is None:
        return "-", ""
    counts = ", ".join(f"{count} {status}" for status, count in result.counts.items() if count)
    return f"{result.state}: {counts}" if counts else str(result.state), f"{result.ran_ms:.1f}"


def _as_dict(answer: Answered) -> dict[str, object]:
    def part(result: Result | None) -> dict[str, object] | None:
        keys = {"state", "reason", "counts", "queued_ms", "ran_ms", "usable_prefix"}
        return None if result is None else result.model_dump(mode="json", include=keys)

    return {
        "command_id": answer.command_id,
        "op": answer.op,
        "chunks": answer.chunks,
        "instance": answer.rank[0],
        "rank": answer.rank[1],
        "recorded": part(answer.recorded),
        "replayed": part(answer.replayed),
    }
