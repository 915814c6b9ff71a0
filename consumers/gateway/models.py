# SPDX-License-Identifier: Apache-2.0
"""Bodies and answers of the REST routes, as pydantic models: checked strictly, shown in the OpenAPI page.

Unknown fields are ignored, as today's server does. A hash is text in one of the two forms the bus reads. Answers carry
what today's agents read, plus ``command_id`` and each rank's part.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

__all__ = [
    "Answer",
    "Engine",
    "Engines",
    "EvictBody",
    "Health",
    "LocateBody",
    "Name",
    "PrefetchBody",
    "ProblemBody",
    "RankPart",
    "ReleaseBody",
    "RetainBody",
    "Target",
]

MAX_HASHES = 65_536

HASH_FORMS = "16 lower-case hex digits, or LMCache's form: a sign and no padding"
HASH_PATTERN = r"^(?:[0-9a-f]{16}|0|-?[1-9a-f][0-9a-f]{0,14}|-[1-7][0-9a-f]{15}|-8000000000000000)$"
HashText = Annotated[
    str,
    StringConstraints(strict=True, pattern=HASH_PATTERN, max_length=17),
    Field(description=HASH_FORMS, examples=["-6ed9a448787a198f"]),
]
Hashes = Annotated[
    list[HashText], Field(min_length=1, max_length=MAX_HASHES, description="Chunk hashes, in any order.")
]
Name = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
Word = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 2.0 is as whole as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, Field(strict=True, ge=0, le=2**53), BeforeValidator(_whole)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=7 * 86_400), BeforeValidator(_whole)]
Flag = Annotated[bool, Field(strict=True)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Target(_Body):
    """Which engines, where there is more than one kind; without any, every live engine."""

    instance: Name | None = Field(None, description="One engine by name.")
    domain: Word | None = Field(None, description="One hash domain, by its fingerprint.")
    model: Name | None = Field(None, description="The engines of one model.")


class PrefetchBody(Target):
    chunk_hashes: Hashes
    lookup_id: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=1024)] = Field(
        description="A label that comes back as it is; commands are told apart by command_id."
    )
    session: Name | None = None
    tier: Literal["cpu", "device"] = "cpu"
    expires_in_ms: Whole | None = None
    budget_bytes: Whole | None = None
    dry_run: Flag = False


class EvictBody(Target):
    chunk_hashes: Hashes
    locations: (
        Annotated[
            list[Literal["LocalCPUBackend", "LocalDiskBackend", "RemoteBackend"]], Field(min_length=1, max_length=8)
        ]
        | None
    ) = Field(None, description="LMCache's names of tiers; absent or null: the local ones.")
    session: Name | None = None
    force: Flag = Field(False, description="Evict what others still use; needs the right to it.")
    dry_run: Flag = False


class RetainBody(Target):
    session: Name
    chunk_hashes: Hashes
    ttl_s: Seconds = 300


class ReleaseBody(Target):
    session: Name


class LocateBody(Target):
    chunk_hashes: Hashes


class RankPart(BaseModel):
    """What one rank said."""

    instance: str
    rank: int
    domain: str
    accepted: bool
    answered: bool
    state: str | None = None
    reason: str | None = None
    counts: dict[str, int] = {}
    bytes_by_tier: dict[str, int] = {}
    usable_prefix: int | None = None
    queued_ms: float | None = None
    ran_ms: float | None = None
    trace_id: str | None = None


class Answer(BaseModel):
    """A command's answer. Fields that an operation does not have are left out."""

    model_config = ConfigDict(extra="allow")

    status: str
    op: str
    command_id: str
    command_ids: list[str] | None = Field(None, description="All of them, where engines of several domains were asked.")
    lookup_id: str | None = None
    num_chunks: int | None = None
    num_evicted: int | None = None
    chunk_tiers: list[list[str]] | None = Field(
        None, description="For locate: the tiers that hold each chunk anywhere."
    )
    ranks: list[RankPart]
    unanswered: list[str] = Field(default=[], description="Ranks, as instance.rank, that did not answer in time.")


class Engine(BaseModel):
    """One live rank."""

    model_config = ConfigDict(extra="allow")

    instance: str
    rank: int
    world_size: int
    role: str
    domain: str
    epoch: int
    hash_domain: dict[str, Any]
    tiers: list[dict[str, Any]]


class Engines(BaseModel):
    engines: list[Engine]


class Health(BaseModel):
    status: Literal["ok", "no engine", "no bus"]
    connected: bool
    engines: int


class ProblemBody(BaseModel):
    """Why the wanted answer was not given."""

    error: str
    field: str | None = None
    position: int | None = None
