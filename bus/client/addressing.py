# SPDX-License-Identifier: Apache-2.0
"""Whom a command is for: the hash domain it belongs to and the ranks that have to answer.

Everything that can be known to be wrong before publishing is an error here, with the live alternatives named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nats.aio.client import Client

from semkv.bus import codec, hashes
from semkv.bus.client.handle import RankName
from semkv.bus.domain import HashDomain
from semkv.bus.errors import AmbiguousDomainError, DomainMismatchError, MessageTooLargeError, NoEngineError
from semkv.bus.messages import Command, EngineInfo
from semkv.bus.registry import EngineRegistry

_NAMES_BYTES = 16_384
"""More than all names and headers of a command together can have."""
_TRACE_BYTES = 700
"""Room for the trace context and the suffix of a part's id."""


@dataclass(frozen=True)
class Target:
    """The domain's fingerprint, its full description where known, and the expected ranks."""

    domain: str
    full: HashDomain | None
    expected: tuple[RankName, ...]


def read_hashes(values: Sequence[int | str]) -> tuple[int, ...]:
    """Signed ints, or either text form; a mixture is refused like any other bad value."""
    if isinstance(values, (str, bytes)):
        raise hashes.HashError("expected a list of hashes", 0, values)
    values = tuple(values)
    if values and isinstance(values[0], str):
        return hashes.parse_all(values, limit=len(values))
    return hashes.check(values)


def surely_fits(nc: Client, count: int) -> bool:
    """Whether a command with this many hashes is under the server's limit whatever its names are."""
    return count * 8 + _NAMES_BYTES < int(nc.max_payload)


def room_for_hashes(nc: Client, empty: Command) -> int:
    """How many hashes fit beside the rest of a command under the server's limit. Raises MessageTooLargeError."""
    payload, headers = codec.encode(empty)
    room = (int(nc.max_payload) - codec.wire_size(payload, headers) - _TRACE_BYTES) // 8
    if room < 1:
        raise MessageTooLargeError(f"a {empty.type} does not fit the server's limit of {nc.max_payload} bytes at all")
    return room


async def find(registry: EngineRegistry, instance: str | None, domain: str | HashDomain | None) -> Target:
    """Raises NoEngineError, DomainMismatchError or AmbiguousDomainError."""
    full = domain if isinstance(domain, HashDomain) else None
    wanted = full.fingerprint if full is not None else domain
    assert wanted is None or isinstance(wanted, str)
    ranks = await registry.settled(instance, None if instance is not None else wanted)
    if not ranks:
        everyone = await registry.settled()
        raise NoEngineError(_nobody(instance, wanted, everyone))
    domains = {info.domain: info.hash_domain for info in ranks}
    if wanted is None and len(domains) > 1:
        raise AmbiguousDomainError(
            f"several hash domains are live ({_shown(domains)}): say which with domain=... or instance=..."
        )
    if wanted is not None and wanted not in domains:  # only possible where an instance was named
        raise DomainMismatchError(_mismatch(str(instance), wanted, full, ranks))
    chosen = wanted if wanted is not None else next(iter(domains))
    mine = [info for info in ranks if info.domain == chosen]
    expected = tuple(RankName(info.instance, info.rank, info.epoch) for info in mine)
    return Target(chosen, full or domains[chosen], expected)


def _nobody(instance: str | None, domain: str | None, live: list[EngineInfo]) -> str:
    what = " and ".join(
        part for part in (f"instance {instance!r}" if instance else "", f"domain {domain!r}" if domain else "") if part
    )
    found = _shown({info.domain: info.hash_domain for info in live})
    names = sorted({info.instance for info in live})
    if not live:
        return "no engine is live: is one running with SEMKV_NATS_URL set to this server?"
    return f"no live engine{f' for {what}' if what else ''}; live are {', '.join(names)} ({found})"


def _shown(domains: dict[str, HashDomain]) -> str:
    return ", ".join(f"{fingerprint}: {full.model}" for fingerprint, full in sorted(domains.items()))


def _mismatch(instance: str, wanted: str, full: HashDomain | None, ranks: list[EngineInfo]) -> str:
    theirs = ranks[0].hash_domain
    if full is None:
        return f"instance {instance!r} has domain {theirs.fingerprint} ({theirs!r}), the hashes are of domain {wanted}"
    fields = ", ".join(f"{f}: ours {mine!r}, its {its!r}" for f, (mine, its) in full.differences(theirs).items())
    return f"instance {instance!r} has another hash domain than these hashes; it differs in {fields}"
