# SPDX-License-Identifier: Apache-2.0
"""Writes `golden.json`: for each message type its subject, headers, msgpack bytes (hex) and JSON text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from semkv.bus import codec
from semkv.bus.messages import Message
from tests.contracts.samples import SAMPLES

FILE = Path(__file__).with_name("golden.json")


def entry(message: Message) -> dict[str, Any]:
    """One message as it is pinned."""
    payload, headers = codec.encode(message)
    return {
        "type": message.type_name(),
        "subject": codec.subject_of(message),
        "headers": headers,
        "msgpack": payload.hex(),
        "json": codec.encode(message, json=True)[0].decode(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps([entry(m) for m in SAMPLES], indent=1, ensure_ascii=False) + "\n")
