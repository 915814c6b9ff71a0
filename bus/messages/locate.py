# SPDX-License-Identifier: Apache-2.0
"""locate.v1: which tiers hold each of these chunks?"""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import CommandHashes
from semkv.bus.messages.base import Command


class Locate(Command):
    """Ask where chunks are; nothing is moved."""

    type: ClassVar[str] = "locate"
    version: ClassVar[int] = 1

    chunk_hashes: CommandHashes
