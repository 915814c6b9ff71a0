# SPDX-License-Identifier: Apache-2.0
"""Whether the scheduler's chunk hashes are the ones that its storage ranks know.

Every rank announces its full hash domain in the registry. The scheduler compares: it publishes hashes only while all
ranks are there and the storage ranks among them have its own domain. Otherwise an agent would steer by names that no
rank can resolve.

Threads: `update` is called on the publisher's loop, `state` is read by the scheduler's thread (one attribute, no lock).
Errors: none. What differs is said once per change, in one line of the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from semkv.bus.domain import HashDomain
from semkv.bus.status import Role

_log = logging.getLogger("semkv.engine_hooks")


class AgreementState(Enum):
    """`WAITING`: not all ranks have announced themselves yet. `DIFFERS`: one has another domain."""

    WAITING = "waiting"
    AGREED = "agreed"
    DIFFERS = "differs"


@dataclass(frozen=True)
class RankAnnouncement:
    """The part of a rank's announcement that matters here."""

    rank: int
    role: str
    domain: HashDomain


class Agreement:
    """Compares announced domains with `own`. `world_size` ranks are expected."""

    def __init__(self, own: HashDomain, world_size: int) -> None:
        self.own = own
        self.world_size = world_size
        self.state = AgreementState.WAITING
        self.reason = "no storage rank has announced itself yet"

    def update(self, announcements: Iterable[RankAnnouncement]) -> AgreementState:
        """Judge by the announcements of this instance that are live now."""
        ranks = {announcement.rank: announcement for announcement in announcements}
        state, reason = self._judge(ranks)
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            if state is AgreementState.DIFFERS:
                _log.error("semkv: chunk hashes are not published: %s", reason)
            elif state is AgreementState.AGREED:
                _log.info("semkv: all %d ranks share hash domain %s", len(ranks), self.own.fingerprint)
        return state

    def _judge(self, ranks: Mapping[int, RankAnnouncement]) -> tuple[AgreementState, str]:
        for rank, announcement in sorted(ranks.items()):
            differences = self.own.differences(announcement.domain) if announcement.role == Role.STORAGE else {}
            if differences:
                told = ", ".join(
                    f"{name}: {mine!r} here, {theirs!r} there" for name, (mine, theirs) in differences.items()
                )
                hint = ""
                if "probe" in differences:
                    hint = " (usual cause: PYTHONHASHSEED unset or not a decimal integer; export PYTHONHASHSEED=0)"
                return AgreementState.DIFFERS, f"rank {rank} has another hash domain: {told}{hint}"
        missing = [rank for rank in range(self.world_size) if rank not in ranks]
        if missing:
            named = ", ".join(str(rank) for rank in missing[:8])
            return AgreementState.WAITING, f"rank {named} has not announced itself yet"
        if not any(announcement.role == Role.STORAGE for announcement in ranks.values()):
            return AgreementState.WAITING, "no rank with a storage manager has announced itself yet"
        return AgreementState.AGREED, ""
