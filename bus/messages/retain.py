# SPDX-License-Identifier: Apache-2.0
"""retain.v1: keep these chunks from being evicted until the session releases them or the time is over.

A retain replaces what the same client kept for the same session. One over the limit of a command comes in parts, in
order, each a command of its own; the parts after the first add to it.
"""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import CommandHashes, Name, Positive
from semkv.bus.messages.base import Command


class Retain(Command):
    """Retain chunks for (client, session) during `ttl_s` seconds."""

    type: ClassVar[str] = "retain"
    version: ClassVar[int] = 1

    session: Name
    chunk_hashes: CommandHashes
    ttl_s: Positive
    part: Positive = 1
    parts: Positive = 1
