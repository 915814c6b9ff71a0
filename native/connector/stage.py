# SPDX-License-Identifier: Apache-2.0
"""The device stage: copies of LMCache's memory objects on the accelerator, made before the request that needs them.

A copy belongs to one memory object, not to a key: it is found by the object's identity and handed out only while the
weak reference still is that very object and LMCache has not freed it. When LMCache lets the object go, the copy goes
too. All copies together stay inside a budget; the longest unused goes first, but none that somebody uses. Off unless
SEMKV_DEVICE_STAGE_MIB says how many MiB of device memory there are for it.

LMCache's paged allocator, which its peer-to-peer mode alone uses, gives freed objects out again without telling;
objects of it are refused. Threads: any; one lock, under which nothing is copied or waited for. Errors: StageFullError.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from semkv.native.transfer.streams import DeviceStreams, Mark

VARIABLE = "SEMKV_DEVICE_STAGE_MIB"
logger = logging.getLogger("semkv.native")


class StageFullError(MemoryError):
    """There is no room for a copy: the budget is full of copies in use, or the device has no memory."""


class DeviceCopy:
    """One object's bytes on the device. Has of a memory object's face what device connectors ask for."""

    def __init__(self, source: weakref.ref[Any], data: torch.Tensor, ready: Mark) -> None:
        self.source = source
        self.raw_data = data
        self.ready = ready  # passed before the copy is handed out; a stream that reads it waits for it all the same
        self.users = 0
        self.retired = False

    def is_valid(self) -> bool:
        """Whether it still is a copy of the object that it was made of."""
        memory_obj = self.source()
        return memory_obj is not None and bool(memory_obj.is_valid())

    def get_size(self) -> int:
        return int(self.raw_data.numel())

    @property
    def data_ptr(self) -> int:
        return int(self.raw_data.data_ptr())


class DeviceStage:
    """The copies of one rank. `bind` names the device once the engine has registered its pages."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.handed_over = 0
        self._streams: DeviceStreams | None = None
        self._lock = threading.Lock()
        self._copies: OrderedDict[int, DeviceCopy] = OrderedDict()
        self._used = 0
        self._dead: deque[int] = deque()

    def bind(self, device: torch.device) -> None:
        """The device of the engine's pages."""
        if self._streams is None or self._streams.device != device:
            self._streams = DeviceStreams(device)

    @property
    def bound(self) -> bool:
        return self._streams is not None

    def place(self, memory_obj: Any) -> tuple[DeviceCopy, bool]:
        """The object's copy, made if there is none, and whether it was made; in use until `release`.

        The caller holds a reference to the object meanwhile. Blocks until the bytes are there.
        """
        size = int(memory_obj.get_size())
        with self._locked():
            copy = self._find(memory_obj)
            if copy is not None:
                self._copies.move_to_end(id(memory_obj))
                copy.users += 1
                return copy, False
            self._make_room(size)
            self._used += size
        try:
            made = self._copy(memory_obj, size)
        except BaseException as error:
            with self._locked():
                self._used -= size
            if isinstance(error, torch.OutOfMemoryError):
                raise StageFullError(f"the device has no memory for a copy of {size} bytes") from error
            raise
        with self._locked():
            present = self._find(memory_obj)
            if present is not None:  # another thread was faster
                self._used -= size
                present.users += 1
                return present, False
            made.users = 1
            self._copies[id(memory_obj)] = made
        return made, True

    def release(self, copies: Iterable[DeviceCopy]) -> None:
        """Give back what `place` or `lend` gave."""
        with self._locked():
            for copy in copies:
                copy.users -= 1
                if copy.retired and copy.users == 0:
                    self._used -= copy.get_size()

    def lend(self, memory_objs: Sequence[Any]) -> list[DeviceCopy | None]:
        """The copies there are of these objects, in use until `release`. Makes none and waits for none."""
        with self._locked():
            lent = [self._find(memory_obj) for memory_obj in memory_objs]
            for memory_obj, copy in zip(memory_objs, lent, strict=True):
                if copy is not None:
                    copy.users += 1
                    self._copies.move_to_end(id(memory_obj))
                    self.handed_over += 1
        return lent

    def size_of(self, memory_obj: Any) -> int | None:
        """Bytes of the object's copy, None if there is none."""
        with self._locked():
            copy = self._find(memory_obj)
            return None if copy is None else copy.get_size()

    def drop(self, memory_obj: Any, *, even_in_use: bool = False) -> bool:
        """Forget the object's copy. False if somebody uses it; then it stays, unless `even_in_use`."""
        with self._locked():
            copy = self._find(memory_obj)
            if copy is not None:
                if copy.users and not even_in_use:
                    return False
                self._retire(id(memory_obj))
        return True

    def usage(self) -> tuple[int, int]:
        """Bytes used and copies there, after letting go of the copies of objects that LMCache has freed."""
        with self._locked():
            for identity, copy in list(self._copies.items()):
                if not copy.is_valid():
                    self._retire(identity)
            return self._used, len(self._copies)

    def _copy(self, memory_obj: Any, size: int) -> DeviceCopy:
        if self._streams is None:
            raise RuntimeError("the engine has not registered its KV tensors: the stage has no device yet")
        if type(memory_obj.parent()).__name__.startswith("Paged"):
            raise ValueError("objects of LMCache's paged allocator cannot be followed; the device stage refuses them")
        source = memory_obj.raw_data.view(torch.uint8).reshape(-1)[:size]
        stream = self._streams.loads
        with self._streams.on(stream):
            data = torch.empty(size, dtype=torch.uint8, device=self._streams.device)
            data.copy_(source, non_blocking=True)
            ready = self._streams.mark(stream)
        ready.wait()
        identity = id(memory_obj)
        return DeviceCopy(weakref.ref(memory_obj, lambda _: self._gone(identity)), data, ready)

    def _gone(self, identity: int) -> None:
        """LMCache's object is no more. Called at any moment, also in a thread that holds the lock."""
        self._dead.append(identity)
        if self._lock.acquire(blocking=False):
            try:
                self._bury()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            finally:
                self._bury()

    def _bury(self) -> None:
        while self._dead:
            identity = self._dead.popleft()
            copy = self._copies.get(identity)
            if copy is not None and copy.source() is None:  # not a later object's at the same place
                self._retire(identity)

    def _find(self, memory_obj: Any) -> DeviceCopy | None:
        """The copy of this very object, as long as the object is valid."""
        copy = self._copies.get(id(memory_obj))
        if copy is None:
            return None
        source = copy.source()
        if source is not None and source is memory_obj and source.is_valid():
            return copy
        self._retire(id(memory_obj))
        return None

    def _retire(self, identity: int) -> None:
        copy = self._copies.pop(identity)
        copy.retired = True
        if copy.users == 0:
            self._used -= copy.get_size()

    def _make_room(self, size: int) -> None:
        if size <= self.capacity:
            for identity, copy in list(self._copies.items()):
                if self._used + size <= self.capacity:
                    return
                if copy.users == 0:
                    self._retire(identity)
        if self._used + size > self.capacity:
            raise StageFullError(
                f"a copy of {size} bytes does not fit the device stage: of its {self.capacity} bytes ({VARIABLE}) "
                f"{self._used} are in use"
            )


class StagedConnector:
    """A device connector that is handed device copies where there are any. Everything else is the connector's."""

    def __init__(self, connector: Any, stage: DeviceStage) -> None:
        self.connector = connector
        self.device_stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connector, name)

    def register(self, kv_caches: Sequence[Any]) -> int:
        """As the connector; the stage's device is that of the pages."""
        per_block = int(self.connector.register(kv_caches))
        self.device_stage.bind(self.connector.device)
        return per_block

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def batched_to_gpu(
        self, memory_objs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], **kwargs: Any
    ) -> None:
        """As the connector, from device copies as far as there are any.

        If that fails, once more from the objects themselves: the same bytes for the same pages.
        """
        lent = self.device_stage.lend(memory_objs)
        used = [copy for copy in lent if copy is not None]
        if used:
            try:
                mixed = [
                    memory_obj if copy is None else copy for memory_obj, copy in zip(memory_objs, lent, strict=True)
                ]
                self.connector.batched_to_gpu(mixed, starts, ends, **kwargs)
                return
            except Exception:
                logger.exception("a load from %d device copies failed; loading from host memory", len(used))
                for memory_obj in memory_objs:
                    self.device_stage.drop(memory_obj, even_in_use=True)
            finally:
                self.device_stage.release(used)
        self.connector.batched_to_gpu(memory_objs, starts, ends, **kwargs)


def staged(connector: Any) -> Any:
    """The connector with a device stage in front of it if SEMKV_DEVICE_STAGE_MIB asks for one."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return connector
    if not (text.isascii() and text.isdigit()):
        logger.error("%s %r is not a whole number of MiB; the device stage stays off", VARIABLE, text)
        return connector
    return StagedConnector(connector, DeviceStage(int(text) << 20)) if int(text) else connector
