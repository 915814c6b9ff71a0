# SPDX-License-Identifier: Apache-2.0
"""cancel.v1: stop a command of the same tenant, queued or running. It bypasses the queue."""

from __future__ import annotations

from typing import ClassVar

from semkv.bus.fields import Token
from semkv.bus.messages.base import Command


class Cancel(Command):
    """Stop `target_command_id` between chunks."""

    type: ClassVar[str] = "cancel"
    version: ClassVar[int] = 1

    target_command_id: Token
