# SPDX-License-Identifier: Apache-2.0
"""Which chunks a command is about: hashes as arguments, in a file, or those of a session's newest finished request.

A bad hash ends the command with one line before anything is sent; so does a session of which no request is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semkv.bus import subjects
from semkv.bus.hashes import HashError, parse_all
from semkv.cli.output import BAD_INPUT, fail

if TYPE_CHECKING:
    from semkv.bus import KV

Hashes = Annotated[
    list[str] | None, typer.Argument(help="Chunk hashes in chain order, in hex as the engine's answer has them.")
]
HashFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="Read the hashes from a file, one a line; - is standard input.")
]
Of = Annotated[
    str | None, typer.Option(help="Instead of hashes: the chunks of this session's newest finished request.")
]

BACK = 20_000
"""How many of the newest events are looked through for a session."""


@dataclass(frozen=True)
class Chosen:
    """Hashes that are known, or the session to take them from."""

    hashes: tuple[int, ...]
    session: str | None

    @classmethod
    def of(cls, texts: Sequence[str] | None, file: Path | None, session: str | None) -> Chosen:
        """What the arguments name. Ends the command on none, on a bad one, and on both kinds at once."""
        if session is not None:
            if texts or file is not None:
                fail("--of takes the hashes of a session: leave out other hashes and --file", BAD_INPUT)
            return cls((), session)
        if file is not None:
            try:
                text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
            except (OSError, UnicodeDecodeError) as error:
                fail(f"--file: {error}", BAD_INPUT)
            texts = [*(texts or ()), *text.split()]
        if not texts:
            fail("no chunk hashes given: as arguments, in a file with --file, or a session with --of", BAD_INPUT)
        try:
            return cls(parse_all(list(texts), limit=len(texts)), None)
        except HashError as error:
            fail(str(error), BAD_INPUT)

    async def chain(self, kv: KV) -> tuple[int, ...]:
        """The hashes; those of a session are asked of the events stream. Ends the command where there are none."""
        if self.session is None:
            return self.hashes
        chain, others = await _newest(kv, self.session)
        if not chain:
            seen = f"; sessions with chunks there: {', '.join(others)}" if others else ""
            fail(f"--of: no finished request of {self.session!r:.80} with chunk hashes among the newest events{seen}",
                 BAD_INPUT)  # fmt: skip
        return chain


async def _newest(kv: KV, wanted: str) -> tuple[tuple[int, ...], list[str]]:
    """The chain of the session's newest request, and the names of some other sessions, the newest first."""
    from semkv.bus import codec
    from semkv.bus.messages import Finished
    from semkv.bus.reader import OrderedReader
    from semkv.bus.streams import EVENTS, stream_info

    session = await kv.session()
    state = (await stream_info(session.nc, EVENTS))["state"]
    first, last = int(state["first_seq"]), int(state["last_seq"])
    if not state["messages"]:
        return (), []
    where = [f"{subjects.PREFIX}.{subjects.token(kv.tenant)}.*.evt.*.*"]
    reader = OrderedReader(session.nc, session.link, EVENTS, where, start_seq=max(first, last - BACK + 1))
    chain: tuple[int, ...] = ()
    request, others = "", dict[str, None]()
    async with reader:
        async for message in reader:
            try:
                event = codec.decode(message.subject, message.headers, message.data)
            except codec.DecodeError:
                event = None
            if isinstance(event, Finished) and event.chunk_hashes:
                if event.session == wanted:
                    goes_on = event.part > 1 and event.engine_request_id == request
                    chain = (*chain, *event.chunk_hashes) if goes_on else event.chunk_hashes
                    request = event.engine_request_id
                elif event.session:
                    others.pop(event.session, None)
                    others[event.session] = None
            if message.seq >= last:
                break
    return chain, list(others)[:-9:-1]
