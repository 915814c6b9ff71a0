# SPDX-License-Identifier: Apache-2.0
"""Identifiers: UUIDv7 command ids, which sort by time and cannot be guessed, and the names of clients."""

from __future__ import annotations

import os
import secrets
import socket
import time
import uuid


def uuid7() -> str:
    """A UUIDv7 (RFC 9562) as text: 48 bits of unix milliseconds, then 74 random bits."""
    value = (time.time_ns() // 1_000_000 & (1 << 48) - 1) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return str(uuid.UUID(int=value))


def client_name(prefix: str = "") -> str:
    """A name no other client has: `<prefix or host-pid>-<8 random hex digits>`."""
    return f"{prefix or f'{socket.gethostname()}-{os.getpid()}'}-{secrets.token_hex(4)}"
