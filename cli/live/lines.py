# SPDX-License-Identifier: Apache-2.0
"""`semkv watch`'s lines: a message as a person reads it, and whose session it is about."""

from __future__ import annotations

from semkv.bus.messages import Accepted, Command, Finished, Heartbeat, Message, Outcome, Result


def session_of(message: Message, commands: dict[str, str | None]) -> str | None:
    """The session a message is about; a result's is its command's, kept from when that passed."""
    if isinstance(message, (Accepted, Result, Outcome)):
        return commands.get(message.command_id)
    session = getattr(message, "session", None)
    if isinstance(message, Command):
        commands[message.command_id] = session
        while len(commands) > 10_000:
            del commands[next(iter(commands))]
    return session


def line(message: Message) -> str | None:
    """One line for a person; None for what only machines care about."""
    match message:
        case Finished():
            known = len(message.chunk_hashes) if message.chunk_hashes else message.hashes_status
            return (
                f"finished  {message.instance}  {message.request_id}  {message.session or '-'}: {known} chunks, "
                f"{message.prompt_tokens} tokens ({message.lmcache_hit_tokens or 0} hit), {message.finish_reason}"
            )
        case Result():
            counts = ", ".join(f"{count} {status}" for status, count in message.counts.items() if count)
            size = sum(message.bytes_by_tier.values()) / 1e6
            return (
                f"result    {message.instance}.{message.rank}  {message.command_id[:13]}  "
                f"{message.op} {message.state}: {counts or message.reason or 'nothing'}, "
                f"{size:.1f} MB, {message.ran_ms:.1f} ms"
            )
        case Heartbeat() | Accepted() | Outcome(useful=0, redundant=0, late=0, wasted=0):  # of what had loaded nothing
            return None
        case Outcome():
            return (
                f"outcome   {message.instance}.{message.rank}  {message.command_id[:13]}  {message.useful} useful, "
                f"{message.redundant} redundant, {message.late} late, {message.wasted} wasted"
            )
        case Command():
            hashes = len(getattr(message, "chunk_hashes", ()))
            asked = f"{hashes} chunks" if hashes else ""
            return f"{message.type:<9} {message.instance}  {message.command_id[:13]}  by {message.client} {asked}"
        case _:
            return f"{message.type}  {message.instance}"
