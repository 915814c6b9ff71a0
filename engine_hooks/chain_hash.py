# SPDX-License-Identifier: Apache-2.0
"""blake3 chain hashes of token chunks: the same in every process, on every machine, in every Python.

    state[-1] = blake3(msgpack([model, revision, chunk_size]))
    state[i]  = blake3(state[i-1] || tokens of chunk i as u32 little-endian)
    hash[i]   = the first 8 bytes of state[i] as a signed big-endian integer

States are 32 bytes; the chain carries whole states, so that the 64-bit names do not weaken it. A conversation that grew
is hashed from where it grew: the newest chains are remembered with their tokens, within `memory` bytes.

What 64 bits protect against: two honest chunks get the same name with probability about n^2 / 2^65 among n chunks (one
in 37 million for a million chunks). What they do not: someone who can choose prompts and spends about 2^32 hashes finds
two chunks of his own with one name, and about 2^64 one that has a given other's. Names are identifiers, not proofs:
tenants that must not share caches need engines, or cache keys, of their own.

Threads: any; the memory is behind a lock. Errors: TypeError for tokens that are no integers.
"""

from __future__ import annotations

import array
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
from blake3 import blake3

from semkv.native import extension


def _not_read(tokens: object) -> bytes | None:
    """Built without its core: the same bytes, read five times slower."""
    return None


_read_plain = extension.function("token_bytes", _not_read)
TOKEN_BYTES = 4
CANDIDATES = 8
DEFAULT_MEMORY = 64 << 20
_KEY = struct.Struct(">q")


def root_state(model: str, revision: str, chunk_size: int) -> bytes:
    """The state before the first chunk."""
    packed: bytes = msgpack.packb([model, revision, chunk_size], use_bin_type=True)
    return bytes(blake3(packed).digest())


def token_bytes(tokens: Any) -> bytes:
    """Tokens as u32 little-endian: from a list, anything iterable, or a tensor."""
    if hasattr(tokens, "numpy"):
        return bytes(tokens.detach().cpu().numpy().astype("<u4").tobytes())
    if isinstance(tokens, Sequence) and not isinstance(tokens, (list, tuple)):
        # vLLM's read-only list has a plain one inside, read where it lies: item by item takes ten times as long.
        inner = getattr(tokens, "_x", None)
        tokens = inner if type(inner) is list and len(inner) == len(tokens) else tokens[:]
    plain = _read_plain(tokens)
    if plain is not None:
        return plain
    try:
        packed = array.array("I", tokens)
    except OverflowError:  # a placeholder outside 32 bits: its low 32 bits
        packed = array.array("I", [token & 0xFFFFFFFF for token in tokens])
    if packed.itemsize != TOKEN_BYTES:  # no platform vLLM runs on
        return struct.pack(f"<{len(packed)}I", *packed)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


class _Chain:
    __slots__ = ("data", "states")

    def __init__(self, data: bytes, states: list[bytes]) -> None:
        self.data = data
        self.states = states

    @property
    def size(self) -> int:
        return len(self.data) + 80 * len(self.states)


class ChainHasher:
    """Chain hashes for one model, revision and chunk size."""

    def __init__(self, model: str, revision: str, chunk_size: int, *, memory: int = DEFAULT_MEMORY) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
        self.chunk_size = chunk_size
        self._root = root_state(model, revision, chunk_size)
        self._step = chunk_size * TOKEN_BYTES
        self._memory = memory
        self._used = 0
        self._chains: OrderedDict[int, _Chain] = OrderedDict()  # newest last; the key is only an identity
        self._by_start: dict[bytes, list[int]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self.hashed_chunks = 0
        self.reused_chunks = 0

    def hashes(self, tokens: Sequence[int] | Any, *, unfull: bool = False) -> list[int]:
        """The hash of each whole chunk, and with `unfull` of what is left behind the last."""
        data = token_bytes(tokens)
        step = self._step
        whole = len(data) // step
        states = self._states(data, whole)
        if unfull and len(data) > whole * step:
            states = [*states, self._next_state(states[-1] if states else self._root, data[whole * step :])]
        unpack = _KEY.unpack_from
        return [unpack(state)[0] for state in states]

    @staticmethod
    def _next_state(state: bytes, chunk: Any) -> bytes:
        hasher = blake3(state)
        hasher.update(chunk)
        return bytes(hasher.digest())

    def _states(self, data: bytes, whole: int) -> list[bytes]:
        if not whole:
            return []
        step = self._step
        start = data[:step]
        with self._lock:
            states = self._known(data, whole, start)
        known = len(states)
        self.reused_chunks += known
        self.hashed_chunks += whole - known
        if known == whole:
            return states
        state = states[-1] if states else self._root
        view = memoryview(data)
        for position in range(known * step, whole * step, step):
            hasher = blake3(state)
            hasher.update(view[position : position + step])
            state = hasher.digest()
            states.append(state)
        if self._memory:
            with self._lock:
                self._remember(_Chain(data[: whole * step], states), start)
        return list(states)

    def _known(self, data: bytes, whole: int, start: bytes) -> list[bytes]:
        """The states of the longest remembered prefix (a new list)."""
        best: list[bytes] = []
        best_count, best_key = 0, -1
        for key in self._by_start.get(start, ())[-CANDIDATES:]:
            chain = self._chains[key]
            count = self._common(chain.data, data, min(len(chain.states), whole))
            if count > best_count:
                best, best_count, best_key = chain.states, count, key
        if best_key >= 0:
            self._chains.move_to_end(best_key)
        return best[:best_count]

    def _common(self, mine: bytes, other: bytes, most: int) -> int:
        """How many whole chunks the two have in common, by comparing, at most `most`."""
        step = self._step
        low, high = 0, most
        # On bytes, not memoryviews: those compare element by element.
        if mine.startswith(other[: high * step]) if len(mine) >= len(other) else other.startswith(mine[: high * step]):
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if mine[low * step : middle * step] == other[low * step : middle * step]:
                low = middle
            else:
                high = middle
        return low

    def _remember(self, chain: _Chain, start: bytes) -> None:
        keys = self._by_start.setdefault(start, [])
        # What the new chain extends is of no more use.
        for key in [k for k in keys[-CANDIDATES:] if chain.data.startswith(self._chains[k].data)]:
            self._forget(key, start)
        keys = self._by_start.setdefault(start, [])
        self._next += 1
        self._chains[self._next] = chain
        keys.append(self._next)
        self._used += chain.size
        while self._used > self._memory and self._chains:
            oldest, old = next(iter(self._chains.items()))
            self._forget(oldest, old.data[: self._step])

    def _forget(self, key: int, start: bytes) -> None:
        chain = self._chains.pop(key)
        self._used -= chain.size
        keys = self._by_start[start]
        keys.remove(key)
        if not keys:
            del self._by_start[start]


class ChainProcessTokens:
    """Stands in for a ChunkedTokenDatabase's bound `process_tokens`, with this chain in place of LMCache's."""

    def __init__(self, database: Any, hasher: ChainHasher, *, unfull: bool) -> None:
        self.database = database
        self.hasher = hasher
        self.unfull = unfull
        self.inner = database.process_tokens

    def __call__(
        self,
        tokens: Any = None,
        hashes: list[int] | None = None,
        offsets: list[int] | None = None,
        mask: Any = None,
        make_key: bool = True,
        request_configs: dict[str, Any] | None = None,
    ) -> Any:
        if tokens is None:
            return self.inner(
                hashes=hashes, offsets=offsets, mask=mask, make_key=make_key, request_configs=request_configs
            )
        return self._from_tokens(tokens, mask, make_key, request_configs)

    def _from_tokens(
        self, tokens: Any, mask: Any, make_key: bool, request_configs: dict[str, Any] | None
    ) -> Iterator[tuple[int, int, Any]]:
        size = self.hasher.chunk_size
        skipped = 0 if mask is None else int(mask.numel() - mask.long().sum().item())
        if skipped % size:
            raise ValueError(f"the mask skips {skipped} tokens, which is not a multiple of chunk_size {size}")
        total = len(tokens)
        make = self.database._make_key_by_hash
        for index, value in enumerate(self.hasher.hashes(tokens, unfull=self.unfull)):
            start = index * size
            if start < skipped:
                continue
            end = min(start + size, total)
            yield start, end, make(value, request_configs) if make_key else value


def install(database: Any, config: Any, *, model: str, revision: str) -> bool:
    """Give one token database the blake3 chain, on the instance. False if it has it already."""
    if isinstance(database.process_tokens, ChainProcessTokens):
        return False
    hasher = ChainHasher(model, revision, int(config.chunk_size))
    database.process_tokens = ChainProcessTokens(database, hasher, unfull=bool(config.save_unfull_chunk))
    return True
