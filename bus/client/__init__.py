# SPDX-License-Identifier: Apache-2.0
"""The agent's client: commands with handles, finished events, the live engines. Async here, blocking in `blocking`."""

from semkv.bus.client.connecting import connect
from semkv.bus.client.finished import FinishedStream
from semkv.bus.client.gaps import Gap
from semkv.bus.client.handle import UNANSWERED, CommandHandle, CommandResult, RankName
from semkv.bus.client.kv import KV

__all__ = ["KV", "UNANSWERED", "CommandHandle", "CommandResult", "FinishedStream", "Gap", "RankName", "connect"]
