# SPDX-License-Identifier: Apache-2.0
"""The rank worker: reads a rank's commands, runs them on its storage, answers each truthfully and exactly once."""

from semkv.consumers.rank.identity import RankIdentity
from semkv.consumers.rank.worker import RankWorker

__all__ = ["RankIdentity", "RankWorker"]
