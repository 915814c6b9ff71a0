# SPDX-License-Identifier: Apache-2.0
"""HashDomain: what must be equal for two chunk hashes to mean the same bytes.

`fingerprint` is the domain's subject token: the first 12 hex digits of BLAKE3 over the canonical msgpack of the eight
fields: a map of eight entries, keys in alphabetical order, texts as str, numbers in the shortest int form, `probe` as
bin of 8 bytes (big-endian two's complement). Immutable; any thread.
"""

from __future__ import annotations

from functools import lru_cache

import msgpack
from blake3 import blake3
from pydantic import BaseModel, ConfigDict

from semkv.bus import hashes
from semkv.bus.fields import Count, Flag, OneHash, Text


class HashDomain(BaseModel):
    """The full description of a hash domain. Ranks announce it; commands name it by `fingerprint`."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model: Text
    revision: Text
    chunk_size: Count
    save_unfull_chunk: Flag
    kv_dtype: Text
    world_size: Count
    layout: Text
    probe: OneHash

    @property
    def fingerprint(self) -> str:
        """12 lower-case hex digits that stand for the domain in subjects."""
        return _fingerprint(self)

    def canonical(self) -> bytes:
        """The bytes that are fingerprinted."""
        values = {name: getattr(self, name) for name in sorted(type(self).model_fields)}
        values["probe"] = hashes.pack((self.probe,))
        packed: bytes = msgpack.packb(values, use_bin_type=True)
        return packed

    def differences(self, other: HashDomain) -> dict[str, tuple[object, object]]:
        """The fields that differ: name to (mine, the other's)."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in type(self).model_fields}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


# Kept beside the models, by their value: what a model keeps in itself is carried along by `model_copy(update=...)`.
@lru_cache(maxsize=256)
def _fingerprint(domain: HashDomain) -> str:
    return str(blake3(domain.canonical()).hexdigest()[:12])
