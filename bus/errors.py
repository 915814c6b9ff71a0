# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on the bus, as exceptions a caller can tell apart. Each message names the way out."""

from __future__ import annotations


class BusError(Exception):
    """Base of all errors of the bus."""


class BusUnavailableError(BusError):
    """NATS cannot be reached in time."""


class ServerTooOldError(BusError):
    """The server lacks what semkv needs (2.11 or newer)."""


class NoJetStreamError(BusError):
    """The server runs without JetStream."""


class AuthError(BusError):
    """The server refused our credentials, or TLS failed."""


class PermissionDeniedError(BusError):
    """Our credentials do not allow this subject."""


class NoEngineError(BusError):
    """No live engine serves what a command addresses."""


class DomainMismatchError(BusError):
    """The engine's hashes mean other bytes than the client's; the differing fields are named."""


class AmbiguousDomainError(BusError):
    """Several hash domains are live and the command names none."""


class MessageTooLargeError(BusError):
    """A message over the server's limit that cannot be split."""
