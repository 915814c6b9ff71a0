# SPDX-License-Identifier: Apache-2.0
"""Whole-chunk file reads and writes, and removal in two steps.

Reads go straight into the caller's buffer, in as large requests as the kernel takes, until the buffer is full; a file
of another size, or one that ends early, is an error, never a half-filled success. O_DIRECT is used where it is asked
for and address and length allow it. The C++ core opens, reads and closes without Python's lock in between; without the
core the same is done with `preadv`. Removal is a rename (cheap, fit for a lock) and a later unlink, so
that a new file under the same name is never the one that is unlinked.

Threads: every function may be called from any thread; none holds a lock.
Errors: OSError as the kernel gives it; `ShortFileError` for a wrong length.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from semkv.native import extension

REQUEST_BYTES = 1 << 30  # asked of the kernel at once, which gives at most 2 GiB
_ALIGNMENT = mmap.PAGESIZE
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_retired_numbers = itertools.count(1)
RETIRED_SUFFIX = ".semkv-retired"


class ShortFileError(OSError):
    """A file does not hold as many bytes as its chunk has."""


def address_of(buffer: memoryview) -> int:
    """Where a writable buffer begins in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def direct_possible(buffer: memoryview) -> bool:
    """True if address and length of `buffer` suit O_DIRECT."""
    return bool(_O_DIRECT) and buffer.nbytes % _ALIGNMENT == 0 and address_of(buffer) % _ALIGNMENT == 0


def read_at(path: str, buffer: memoryview) -> None:
    """Fill `buffer` from the beginning of a file that may be longer."""
    with Path(path).open("rb", buffering=0) as file:
        if file.readinto(buffer) != buffer.nbytes:
            raise ShortFileError(f"{path} is shorter than {buffer.nbytes} bytes")


def read_full(path: str, buffer: memoryview, *, direct: bool = False, skip: int = 0) -> int:
    """Fill `buffer` from the file at `path` behind `skip` bytes; what follows them must be exactly as long."""
    size, done = _read_file(path, buffer, skip, direct, REQUEST_BYTES)
    wanted = buffer.nbytes
    if size != wanted:
        raise ShortFileError(f"{path} has {size} bytes, its chunk has {wanted}")
    if done != wanted:
        raise ShortFileError(f"{path} ended after {done} of {wanted} bytes")
    return done


def read_in_python(path: str, buffer: memoryview, skip: int, direct: bool, at_once: int) -> tuple[int, int]:
    """The core's `read_file`: the file's bytes behind `skip`, and those read, none if not as many as wanted."""
    view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    wanted = view.nbytes
    flags = os.O_RDONLY | os.O_CLOEXEC
    descriptor = os.open(path, flags | _O_DIRECT if direct and skip == 0 and direct_possible(view) else flags)
    try:
        size = os.fstat(descriptor).st_size - skip
        done = 0
        while size == wanted and done < wanted:
            got = os.preadv(descriptor, (view[done : done + at_once],), done + skip)
            if got == 0:
                break
            done += got
        return size, done
    finally:
        os.close(descriptor)


_read_file = extension.function("read_file", read_in_python)


def write_full(path: str, buffer: memoryview, *, direct: bool = False) -> int:
    """Write all of `buffer` into a new file at `path`; on any error the file is gone again."""
    view = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(path, flags | _O_DIRECT if direct and direct_possible(view) else flags, 0o644)
    done = 0
    try:
        while done < view.nbytes:
            done += os.pwritev(descriptor, (view[done:],), done)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(path).unlink()
        raise
    finally:
        os.close(descriptor)
    return done


def temporary_name(path: str) -> str:
    """A name beside `path` that nobody else uses."""
    return f"{path}.{os.getpid()}-{next(_retired_numbers)}.semkv-tmp"


def retire(path: str) -> str | None:
    """Rename the file out of the way; None if there is none. The only file operation that is fit for a lock."""
    retired = f"{path}.{os.getpid()}-{next(_retired_numbers)}{RETIRED_SUFFIX}"
    try:
        Path(path).rename(retired)
    except FileNotFoundError:
        return None
    return retired


def unlink_all(paths: Iterable[str]) -> None:
    """Remove retired files; one that is gone already is no error."""
    for path in paths:
        Path(path).unlink(missing_ok=True)
