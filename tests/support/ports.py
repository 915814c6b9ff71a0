# SPDX-License-Identifier: Apache-2.0
"""Free loopback ports in a row, for servers that number theirs from a first one on."""

from __future__ import annotations

import contextlib
import random
import socket


def free_run(count: int) -> int:
    """The first of `count` neighbouring ports that are all free now; OSError if there are none to be found."""
    for _ in range(200):
        first = random.randrange(20000, 60000 - count)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise OSError(f"no {count} free ports in a row")
