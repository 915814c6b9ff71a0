# SPDX-License-Identifier: Apache-2.0
"""Which of a file's pages the kernel has in its page cache, and what a thread reads: the kernel's own count."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

ENDS_EARLY = "/sys/kernel/profiling"  # says that it has a page of bytes and gives two

_libc = ctypes.CDLL(None, use_errno=True)


def forget(path: str) -> None:
    """Have the kernel drop a file's pages, written out first."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def pages_cached(path: str) -> int:
    """How many of a file's pages are in the page cache."""
    size = Path(path).stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        begin = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), found) != 0:
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            del begin
    return sum(entry & 1 for entry in found)


class Requests:
    """`with Requests() as asked: ...`: the read calls of this thread meanwhile, and the bytes they brought."""

    def __enter__(self) -> Requests:
        self._descriptor = os.open("/proc/thread-self/io", os.O_RDONLY)
        self._own = self._counts()
        self._before = self._counts()
        return self

    def __exit__(self, *_: object) -> None:
        after = self._counts()
        os.close(self._descriptor)
        # Each look is a read as well; how much that is, the first two looks say.
        own = tuple(b - a for a, b in zip(self._own, self._before, strict=True))
        self.bytes, self.calls = (b - a - o for a, b, o in zip(self._before, after, own, strict=True))

    def _counts(self) -> tuple[int, int]:
        text = os.pread(self._descriptor, 4096, 0).decode()
        values = dict(line.split(": ") for line in text.splitlines())
        return int(values["rchar"]), int(values["syscr"])
