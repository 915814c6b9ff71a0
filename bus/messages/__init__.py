# SPDX-License-Identifier: Apache-2.0
"""The messages of the contract, one module each, registered by (type, version).

A message is immutable. Unknown fields are ignored by readers and unknown words kept as text; a new required field is a
new version, so a reader always understands every message of the versions registered here.
"""

from semkv.bus.messages.accepted import Accepted
from semkv.bus.messages.base import Command, Message, TenantMessage, lookup, newest, registered
from semkv.bus.messages.cancel import Cancel
from semkv.bus.messages.engine import EngineInfo, TierUsage
from semkv.bus.messages.evict import Evict
from semkv.bus.messages.finished import Finished
from semkv.bus.messages.heartbeat import Heartbeat
from semkv.bus.messages.locate import Locate
from semkv.bus.messages.outcome import Outcome
from semkv.bus.messages.prefetch import Prefetch
from semkv.bus.messages.release import Release
from semkv.bus.messages.result import Result
from semkv.bus.messages.retain import Retain

__all__ = [
    "Accepted",
    "Cancel",
    "Command",
    "EngineInfo",
    "Evict",
    "Finished",
    "Heartbeat",
    "Locate",
    "Message",
    "Outcome",
    "Prefetch",
    "Release",
    "Result",
    "Retain",
    "TenantMessage",
    "TierUsage",
    "lookup",
    "newest",
    "registered",
]
