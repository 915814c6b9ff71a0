# SPDX-License-Identifier: Apache-2.0
"""The few things a transfer asks of a device: streams, events, pinned memory. Through torch alone, for any accelerator.

On a CPU everything is done when it returns, so that the same transfer runs there, in tests. torch_npu is imported when
an NPU is asked for; `AcceleratorMissingError` says what is not there.
"""

from __future__ import annotations

import contextlib
import importlib
from contextlib import AbstractContextManager
from typing import Any

import torch


class AcceleratorMissingError(RuntimeError):
    """The device's package or its runtime is not installed, or does not load."""


def load_npu() -> Any:
    """torch_npu, or one line on why it does not load."""
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise AcceleratorMissingError(
            f"torch_npu does not load ({error}): install torch-npu for torch {torch.__version__} and CANN, and source "
            "its set_env.sh"
        ) from error


class DeviceStreams:
    """One stream that only loads and one that only stores, so that the two directions overlap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "npu":
            load_npu()
        self.real = device.type != "cpu"
        self.loads = torch.Stream(device=device) if self.real else None
        self.stores = torch.Stream(device=device) if self.real else None

    def current(self) -> Any:
        """The stream that the engine computes on, in this thread."""
        return torch.accelerator.current_stream(self.device) if self.real else None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return stream if self.real else contextlib.nullcontext()

    def after(self, stream: Any, earlier: Any) -> None:
        """What is queued on `stream` from now on waits for all that is queued on `earlier` by now."""
        if self.real:
            stream.wait_stream(earlier)

    def mark(self, stream: Any) -> Mark:
        """A point in `stream` to wait for."""
        return Mark(stream.record_event() if self.real else None)

    def await_mark(self, stream: Any, mark: Mark) -> None:
        """What is queued on `stream` from now on waits for the mark; this thread does not."""
        if self.real and mark.event is not None:
            stream.wait_event(mark.event)

    def pinned(self, size: int) -> torch.Tensor:
        """Bytes that the device can read and write while the host goes on."""
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.pin_memory() if self.real else buffer

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return not self.real or bool(tensor.is_pinned())


class Mark:
    """A point in a stream; `wait` blocks this thread until the device is past it."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    @property
    def passed(self) -> bool:
        return self.event is None or bool(self.event.query())
