# SPDX-License-Identifier: Apache-2.0
"""release.v1: give back everything that (client, session) retains."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Name
from semkv.bus.messages.base import Command


class Release(Command):
    """Release what the client retained for the session."""

    type: ClassVar[str] = "release"
    version: ClassVar[int] = 1

    session: Name
