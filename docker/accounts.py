# SPDX-License-Identifier: Apache-2.0
"""Gives the development stack its NATS accounts, as `semkv auth` does, and hands each service only what is its own.

Runs once before the servers, in a container without network. Keys are made on the first run and kept in KEYS, which
nobody else mounts. HANDED has a folder for each reader: the servers get the accounts (public keys only), the engine,
the gateway (who makes the tenant's streams) and the agent a seed each. Reads SEMKV_TENANT. Ends with 1 and one line
where something cannot be written.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from semkv.bus import auth, subjects
from semkv.bus.errors import BusError
from semkv.bus.settings import DEFAULT_TENANT

KEYS = Path("/accounts/keys")
HANDED = Path("/accounts/handed")


def main() -> int:
    """Make the accounts and hand them over. Returns the exit code."""
    tenant = os.environ.get("SEMKV_TENANT") or DEFAULT_TENANT
    token = subjects.token(tenant)
    users = {"engine": "engine", "gateway": f"{token}-manager", "agent": f"{token}-agent"}
    try:
        # Inside the stack's own network; a key never travels, it signs what the server asks.
        made = auth.generate(KEYS, [tenant], url="nats://nats:4222")
        hand(made.accounts_config, HANDED / "nats" / "accounts.conf", 0o644)
        for service, user in users.items():
            hand(KEYS / f"{user}.seed", HANDED / service / "nats.seed", 0o600)
    except (BusError, ValueError, OSError) as error:
        print(f"the accounts cannot be made: {error}", file=sys.stderr)
        return 1
    print(f"accounts of engines and of tenant {tenant!r} are ready")
    return 0


def hand(source: Path, target: Path, mode: int) -> None:
    """Copy a file in one step, so that a reader has the old one or the new one."""
    part = target.with_suffix(".part")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out, source.open("rb") as given:
        shutil.copyfileobj(given, out)
    part.chmod(mode)
    part.replace(target)


if __name__ == "__main__":
    sys.exit(main())
