# SPDX-License-Identifier: Apache-2.0
"""Whole-file reads by the core and in Python: what they fill, what they refuse, what they ask of the kernel."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from semkv.consumers.storage import files
from semkv.native import extension
from tests.support.page_cache import ENDS_EARLY, Requests, forget, pages_cached

CONTENT = bytes(range(256)) * 32


@pytest.fixture(params=["core", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test once with the core, once as where there is none."""
    reads = extension.core().read_file if request.param == "core" else files.read_in_python
    monkeypatch.setattr(files, "_read_file", reads)
    return str(request.param)


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = tmp_path / "chunk"
    made.write_bytes(CONTENT)
    return str(made)


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_the_core_is_what_reads_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    core = extension.core().read_file
    assert extension.function("read_file", files.read_in_python) is core
    assert extension.function("none_of_the_cores", files.read_in_python) is files.read_in_python
    monkeypatch.setitem(sys.modules, "semkv.native._core", None)
    assert extension.function("read_file", files.read_in_python) is files.read_in_python


def test_a_file_is_read_in_one_request(path: str) -> None:
    buffer = bytearray(len(CONTENT))
    with Requests() as asked:
        assert files.read_full(path, memoryview(buffer)) == len(CONTENT)
    assert bytes(buffer) == CONTENT
    assert (asked.calls, asked.bytes) == (1, len(CONTENT))


def test_what_is_behind_a_header_is_read(path: str) -> None:
    buffer = bytearray(len(CONTENT) - 100)
    files.read_full(path, memoryview(buffer), skip=100)
    assert bytes(buffer) == CONTENT[100:]


def test_a_read_that_comes_in_pieces_goes_on(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "REQUEST_BYTES", 1000)
    buffer = bytearray(len(CONTENT) - 100)
    with Requests() as asked:
        files.read_full(path, memoryview(buffer), skip=100)
    assert bytes(buffer) == CONTENT[100:]
    assert asked.calls == 9


@pytest.mark.parametrize("wanted", [0, 100, len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_file_of_another_size_is_refused_before_a_byte_is_read(path: str, wanted: int) -> None:
    buffer = bytearray(wanted)
    with pytest.raises(files.ShortFileError, match=f"has {len(CONTENT)} bytes, its chunk has {wanted}"):
        files.read_full(path, memoryview(buffer))
    assert not any(buffer)
    with pytest.raises(files.ShortFileError, match=f"has -{len(CONTENT)} bytes"):
        files.read_full(path, memoryview(buffer), skip=2 * len(CONTENT))


@pytest.mark.skipif(not Path(ENDS_EARLY).exists(), reason="needs sysfs")
def test_a_file_that_ends_early_is_refused() -> None:
    with pytest.raises(files.ShortFileError, match=f"ended after 2 of {mmap.PAGESIZE} bytes"):
        files.read_full(ENDS_EARLY, memoryview(bytearray(mmap.PAGESIZE)))


def test_what_the_kernel_refuses_is_told_as_it_says(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    before = descriptors()
    with pytest.raises(FileNotFoundError) as told:
        files.read_full(missing, memoryview(bytearray(1)))
    assert told.value.filename == missing
    with pytest.raises(IsADirectoryError):
        files.read_full(str(tmp_path), memoryview(bytearray(tmp_path.stat().st_size)))
    with pytest.raises(ValueError, match="null"):
        files.read_full("a\0b", memoryview(bytearray(1)))
    assert descriptors() == before


def test_names_that_are_no_text_are_found(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff"
    with open(name, "wb") as file:  # noqa: PTH123 -- a path of bytes
        file.write(b"abc")
    buffer = bytearray(3)
    files.read_full(os.fsdecode(name), memoryview(buffer))
    assert bytes(buffer) == b"abc"


def test_memory_that_cannot_be_filled_is_refused(path: str) -> None:
    with pytest.raises((BufferError, TypeError)):
        files.read_full(path, memoryview(bytes(len(CONTENT))))
    with pytest.raises((BufferError, TypeError, ValueError)):
        files.read_full(path, memoryview(bytearray(2 * len(CONTENT)))[::2])


def test_words_are_filled_as_bytes_are(path: str) -> None:
    buffer = memoryview(bytearray(len(CONTENT))).cast("Q")
    assert files.read_full(path, buffer) == len(CONTENT)
    assert buffer.tobytes() == CONTENT


@pytest.mark.parametrize("offset", [0, 8], ids=["aligned", "not aligned"])
def test_direct_io_goes_past_the_page_cache_where_memory_allows_it(path: str, offset: int) -> None:
    forget(path)
    if pages_cached(path):
        pytest.skip("this file system keeps what it is told to forget")
    memory = mmap.mmap(-1, 2 * len(CONTENT))
    files.read_full(path, memoryview(memory)[offset : offset + len(CONTENT)], direct=True)
    assert memory[offset : offset + len(CONTENT)] == CONTENT
    assert bool(pages_cached(path)) is bool(offset)


def test_other_threads_go_on_while_a_file_is_opened(tmp_path: Path, way: str) -> None:
    """Opening a pipe waits for who writes into it: here another thread, which needs Python's lock."""
    program = (
        "import os, sys, threading\n"
        "from semkv.consumers.storage import files\n"
        "from semkv.native import extension\n"
        f"read = {'extension.core().read_file' if way == 'core' else 'files.read_in_python'}\n"
        "threading.Thread(target=lambda: os.close(os.open(sys.argv[1], os.O_WRONLY))).start()\n"
        "print(read(sys.argv[1], memoryview(bytearray(3)), 0, False, 9))\n"
    )
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = subprocess.run([sys.executable, "-c", program, str(pipe)], capture_output=True, timeout=60, check=True)
    assert done.stdout == b"(0, 0)\n"
