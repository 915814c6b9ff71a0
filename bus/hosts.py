# SPDX-License-Identifier: Apache-2.0
"""What an address to listen on is reachable from. Pure; any thread."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost could be anything, so it is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
