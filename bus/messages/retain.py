# SPDX-License-Identifier: Apache-2.0
"""retain.v1: keep these chunks from being evicted until the session releases them or the time is over."""

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
