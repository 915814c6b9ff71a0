# SPDX-License-Identifier: Apache-2.0
"""The concurrency drill: live requests, prefetches, evicts, pressure on DDR and disk, all at once on a real LMCache.

Seeded and bounded. At every quiet point the invariants are checked: every hot chunk valid, one reference, no pin,
and the bytes its prompt must have, no lock held, quota, usage and files equal, every file with its prompt's bytes. With
faults, file reads and writes fail, come in pieces, find a cut file or none, and allocations fail, at random.

Run `python -m bench.drill --seconds 300 --faults`; `run` is what the tests call for a second or two.
Threads: one live thread (as vLLM has), two of prefetches, two of evicts.
Errors: an invariant that does not hold raises.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from semkv.bus.status import Order, Tier
from semkv.consumers.storage import Control, LMCacheStorage, PrefixForest, files
from semkv.engine_hooks.patches import apply_all
from tests.support.lmcache_engine import PagedStandIn, Rig, checksum, lmcache_engine

FAULT_RATE = 0.05


class Faults:
    """Makes file operations and allocations of this process fail now and then."""

    def __init__(self, seed: int, rig: Rig) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._rig = rig
        self._read, self._write, self._allocate = files.read_full, files.write_full, rig.cpu.allocate
        self._read_file, self._pwritev = files._read_file, os.pwritev
        self.counts: Counter[str] = Counter()

    def _strikes(self, name: str) -> bool:
        with self._lock:
            struck = self._random.random() < FAULT_RATE
            self.counts[name] += struck
            return struck

    def read_full(self, path: str, buffer: memoryview, **kwargs: Any) -> int:
        if self._strikes("read error"):
            raise OSError(errno.EIO, "injected read error")
        if self._strikes("file gone"):
            Path(path).unlink(missing_ok=True)
        if self._strikes("file short") and Path(path).exists():
            with Path(path).open("r+b") as file:
                file.truncate(buffer.nbytes // 2)
        return self._read(path, buffer, **kwargs)

    def write_full(self, path: str, buffer: memoryview, **kwargs: Any) -> int:
        if self._strikes("disk full"):
            raise OSError(errno.ENOSPC, "injected full disk")
        return self._write(path, buffer, **kwargs)

    def read_file(self, path: str, buffer: memoryview, skip: int, direct: bool, at_once: int) -> tuple[int, int]:
        piece = max(1, buffer.nbytes // 3) if self._strikes("read in pieces") else at_once
        return self._read_file(path, buffer, skip, direct, piece)

    def pwritev(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        piece = (buffers[0][: max(1, len(buffers[0]) // 3)],) if self._strikes("write in pieces") else buffers
        return self._pwritev(descriptor, piece, offset)

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._strikes("no memory") else self._allocate(*args, **kwargs)

    def __enter__(self) -> Faults:
        files.read_full, files.write_full = self.read_full, self.write_full
        files._read_file, os.pwritev = self.read_file, self.pwritev
        self._rig.cpu.allocate = self.allocate
        return self

    def __exit__(self, *_: object) -> None:
        files.read_full, files.write_full = self._read, self._write
        files._read_file, os.pwritev = self._read_file, self._pwritev
        del self._rig.cpu.allocate


class Drill:
    """One run."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.seed = seed
        self.forest = PrefixForest("default")
        self.storage = LMCacheStorage(rig.engine, self.forest)
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []
        trunk = rig.tokens(3, seed=1000)
        self.prompts = [
            (trunk if number % 2 else []) + rig.tokens(2 + number % 5, seed=number + 1) for number in range(16)
        ]
        self.chains = [rig.hashes(tokens) for tokens in self.prompts]
        self.expected: dict[int, str] = {}
        for tokens, chain in zip(self.prompts, self.chains, strict=True):
            for index, chunk_hash in enumerate(chain):
                self.expected[chunk_hash] = self._bytes_of(tokens[: (index + 1) * rig.chunk_size])

    def _bytes_of(self, tokens: list[int]) -> str:
        obj = self.rig.cpu.memory_allocator.allocate(
            self.rig.device.get_shape(self.rig.chunk_size), self.rig.engine.metadata.kv_dtype
        )
        PagedStandIn.fill(obj, 0, tokens)
        digest = checksum(obj)
        obj.ref_count_down()
        return digest

    def live(self, rng: random.Random, number: int) -> None:
        index = rng.randrange(len(self.prompts))
        tokens, chain = self.prompts[index], self.chains[index]
        request = f"live-{number}"
        session = rng.choice([None, f"s{index % 4}"])
        self.forest.record_lookup("default", session, chain, request)
        self.rig.device.received.clear()
        self.rig.lookup(tokens, request=request)
        skip = rng.randrange(len(chain))
        got = self.rig.retrieve(
            request, tokens, skip_chunks=min(skip, self.rig.hit_tokens(request) // self.rig.chunk_size)
        )
        for start, _, _, digest in self.rig.device.received:
            assert digest == self.expected[chain[start // self.rig.chunk_size]], "a request got another chunk's bytes"
        self.rig.store(tokens, settle=False)
        self.forest.finished([request])
        self.counts["requests"] += 1
        self.counts["tokens retrieved"] += got

    def prefetch(self, rng: random.Random, number: int) -> None:
        chain = rng.choice(self.chains)
        order = rng.choice(list(Order))
        deadline = time.monotonic_ns() + rng.choice([100_000, 10**9])
        result = self.storage.prefetch(chain, order=order, control=Control(deadline))
        self.counts["prefetches"] += 1
        self.counts.update({f"prefetch {status}": count for status, count in result.counts.items()})
        assert result.chunk_status, result.reason

    def evict(self, rng: random.Random, number: int) -> None:
        chain = rng.choice(self.chains)
        tiers = rng.choice([(Tier.CPU,), None, None])
        session = rng.choice([None, "s1", "s2"])
        result = self.storage.evict(chain, tiers=tiers, force=rng.random() < 0.3, session=session)
        self.counts["evicts"] += 1
        self.counts.update({f"evict {status}": count for status, count in result.counts.items()})
        assert result.chunk_status, result.reason

    def burst(self, seconds: float, round_number: int) -> None:
        """Everybody works for a while; then all stop."""
        until = time.monotonic() + seconds

        def work(action: Callable[[random.Random, int], None], name: str) -> None:
            rng = random.Random(f"{self.seed}-{round_number}-{name}")
            number = 0
            try:
                while time.monotonic() < until and not self.errors:
                    number += 1
                    action(rng, round_number * 1_000_000 + number)
            except BaseException as error:  # told by the main thread
                self.errors.append(error)

        jobs = [
            (self.live, "live"),
            (self.prefetch, "p1"),
            (self.prefetch, "p2"),
            (self.evict, "e1"),
            (self.evict, "e2"),
        ]
        threads = [threading.Thread(target=work, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "an operation does not end"
        if self.errors:
            raise self.errors[0]

    def quiet(self) -> None:
        """A quiet point: the invariants, and the bytes of every hot chunk and every file."""
        self.rig.check()
        for key, obj in self.rig.cpu.hot_cache.items():
            assert checksum(obj) == self.expected[key.chunk_hash], f"chunk {key.chunk_hash:x} has other bytes"
        for key, meta in self.rig.disk.dict.items():
            digest = hashlib.blake2b(Path(meta.path).read_bytes(), digest_size=8).hexdigest()
            assert digest == self.expected[key.chunk_hash], f"the file of chunk {key.chunk_hash:x} has other bytes"
            self.counts["files compared"] += 1
        self.counts["quiet points"] += 1


def run(seconds: float = 5.0, *, seed: int = 1, faults: bool = False, rounds: int | None = None) -> dict[str, int]:
    """Drill for about that long; returns what happened. Raises where an invariant does not hold."""
    apply_all()
    rounds = rounds or max(2, int(seconds))
    with (
        tempfile.TemporaryDirectory(prefix="semkv-drill-") as folder,
        lmcache_engine(Path(folder), pool_chunks=24, disk_chunks=40) as rig,
    ):
        drill = Drill(rig, seed)
        for round_number in range(rounds):
            if faults:
                with Faults(seed + round_number, rig) as struck:
                    drill.burst(seconds / rounds, round_number)
                    rig.settle()
                drill.counts.update({f"fault: {name}": count for name, count in struck.counts.items()})
                # Faults truncate files behind LMCache's back: what is left of them is not LMCache's doing.
                drop_damaged(rig)
            else:
                drill.burst(seconds / rounds, round_number)
            drill.quiet()
        return dict(sorted(drill.counts.items()))


def drop_damaged(rig: Rig) -> None:
    """Remove entries whose file the faults took or cut and that nobody has read since."""
    for key, meta in list(rig.disk.dict.items()):
        path = Path(meta.path)
        if not path.exists() or path.stat().st_size != rig.chunk_bytes:
            rig.disk.remove(key)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true", help="inject failing reads, writes and allocations")
    chosen = parser.parse_args()
    print(json.dumps(run(chosen.seconds, seed=chosen.seed, faults=chosen.faults), indent=2))


if __name__ == "__main__":
    main()
