# SPDX-License-Identifier: Apache-2.0
"""Field types of messages: strict, bounded, and cheap for long lists.

A number is never made from text, a list never from a scalar. Hash lists are one value to pydantic: packed bytes on
msgpack, hex texts in JSON, signed ints in Python. What crossed a wire is validated with the context
`{"wire": "msgpack" | "json"}`; ints as hashes are refused there, since JSON readers round them to 53 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, GetJsonSchemaHandler, PlainSerializer, PlainValidator, SerializationInfo, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from semkv.bus import hashes
from semkv.bus.status import ChunkStatus, HashesStatus, Op, Order, Role, State, Tier, Word, open_word

WIRE = "wire"
MSGPACK = "msgpack"
JSON = "json"

_I64 = (1 << 63) - 1

Count = Annotated[int, Field(strict=True, ge=0, le=_I64)]
Positive = Annotated[int, Field(strict=True, ge=1, le=_I64)]
Flag = Annotated[bool, Field(strict=True)]
Millis = Annotated[float, Field(strict=True, ge=0, le=1e15, allow_inf_nan=False)]
Signed = Annotated[float, Field(strict=True, ge=-1e15, le=1e15, allow_inf_nan=False)]
# Names end up in logs and subjects: no control characters, bounded.
Text = Annotated[str, Field(strict=True, max_length=512, pattern=r"^[^\x00-\x1f\x7f]*$")]
Name = Annotated[str, Field(strict=True, min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
Token = Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Reason = Annotated[str, Field(strict=True, max_length=4096)]


class Packing:
    """Marks a field whose form on the wire is not Python's: how msgpack and JSON have it."""

    def __init__(self, pack: Callable[[Any], bytes], show: Callable[[Any], Any]) -> None:
        self.pack = pack
        self.show = show


class Schema:
    """Pins the JSON Schema of a field whose validator pydantic cannot read."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return dict(self._schema)


def _wire(info: ValidationInfo | SerializationInfo) -> str | None:
    context = info.context
    return context.get(WIRE) if isinstance(context, dict) else None


def _read_hashes(limit: int) -> Callable[[Any, ValidationInfo], tuple[int, ...]]:
    def read(value: Any, info: ValidationInfo) -> tuple[int, ...]:
        if isinstance(value, bytes):
            if len(value) > limit * 8:
                raise ValueError(f"{len(value) // 8} hashes, at most {limit} are allowed in one message")
            return hashes.unpack(value)
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected packed bytes or a list of hex texts, got {type(value).__name__}")
        if len(value) > limit:
            raise ValueError(f"{len(value)} hashes, at most {limit} are allowed in one message")
        if value and isinstance(value[0], int) and _wire(info) is None:
            return hashes.check(value)
        return hashes.parse_all(value, limit)

    return read


def _write_hashes(value: tuple[int, ...], info: SerializationInfo) -> Any:
    wire = _wire(info)
    if wire == MSGPACK:
        return hashes.pack(value)
    if wire == JSON or info.mode == "json":
        return [hashes.to_hex(h) for h in value]
    return value


def _read_hash(value: Any, info: ValidationInfo) -> int:
    if isinstance(value, bytes):
        if len(value) != 8:
            raise ValueError(f"a packed hash is 8 bytes, got {len(value)}")
        return hashes.unpack(value)[0]
    if _wire(info) is None and isinstance(value, int):
        return hashes.check((value,))[0]
    return hashes.parse(value)


def _write_hash(value: int, info: SerializationInfo) -> Any:
    written = _write_hashes((value,), info)
    return written if isinstance(written, bytes) else written[0]


_HEX = {"type": "string", "pattern": "^([0-9a-f]{16}|0|-?[1-9a-f][0-9a-f]{0,15})$", "examples": ["00000000000000ff"]}


def _hash_list(limit: int) -> Any:
    return Annotated[
        tuple[int, ...],
        PlainValidator(_read_hashes(limit)),
        PlainSerializer(_write_hashes),
        Packing(hashes.pack, lambda values: [hashes.to_hex(value) for value in values]),
        Schema({"type": "array", "items": _HEX, "maxItems": limit, "description": "msgpack: one bin, 8 bytes each"}),
    ]


def _as_is(value: Any) -> Any:
    return value


def _word_field(kind: type[Word]) -> Any:
    schema = {"type": "string", "maxLength": 64, "examples": [str(w) for w in kind]}
    return Annotated[kind | str, PlainValidator(lambda value: open_word(kind, value)), Schema(schema)]


def _word_list(kind: type[Word], limit: int) -> Any:
    known = {str(w): w for w in kind}

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"expected a list of words, got {type(value).__name__}")
        if len(value) > limit:
            raise ValueError(f"{len(value)} entries, at most {limit} are allowed")
        try:
            return tuple([known[word] for word in value])
        except (KeyError, TypeError):
            return tuple([open_word(kind, word) for word in value])

    items = {"type": "string", "maxLength": 64, "examples": [str(w) for w in kind]}
    schema = Schema({"type": "array", "items": items, "maxItems": limit})
    return Annotated[tuple[Any, ...], PlainValidator(read), PlainSerializer(_as_is), schema]


def _read_chunk_tiers(value: Any) -> tuple[tuple[Any, ...], ...]:
    if not isinstance(value, (list, tuple)) or len(value) > hashes.MAX_PER_MESSAGE:
        raise ValueError("expected a list with one list of tiers per requested chunk")
    rows = []
    for row in value:
        if not isinstance(row, (list, tuple)) or len(row) > 16:
            raise ValueError(f"expected a list of at most 16 tiers, got {row!r:.60}")
        rows.append(tuple(open_word(Tier, word) for word in row))
    return tuple(rows)


if TYPE_CHECKING:
    OneHash = int
    CommandHashes = tuple[int, ...]
    EventHashes = tuple[int, ...]
    StateField = State | str
    HashesStatusField = HashesStatus | str
    OrderField = Order | str
    TierField = Tier | str
    RoleField = Role | str
    OpField = Op | str
    ChunkStatuses = tuple[ChunkStatus | str, ...]
    Tiers = tuple[Tier | str, ...]
    ChunkTiers = tuple[tuple[Tier | str, ...], ...]
else:
    OneHash = Annotated[
        int,
        PlainValidator(_read_hash),
        PlainSerializer(_write_hash),
        Packing(lambda value: hashes.pack((value,)), hashes.to_hex),
        Schema(_HEX),
    ]
    CommandHashes = _hash_list(hashes.MAX_PER_COMMAND)
    EventHashes = _hash_list(hashes.MAX_PER_MESSAGE)
    StateField = _word_field(State)
    HashesStatusField = _word_field(HashesStatus)
    OrderField = _word_field(Order)
    TierField = _word_field(Tier)
    RoleField = _word_field(Role)
    OpField = _word_field(Op)
    ChunkStatuses = _word_list(ChunkStatus, hashes.MAX_PER_MESSAGE)
    Tiers = _word_list(Tier, 16)
    ChunkTiers = Annotated[
        tuple[tuple[Any, ...], ...],
        PlainValidator(_read_chunk_tiers),
        PlainSerializer(_as_is),
        Schema({"type": "array", "items": {"type": "array", "items": {"type": "string"}}}),
    ]
