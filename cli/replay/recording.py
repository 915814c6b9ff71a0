# SPDX-License-Identifier: Apache-2.0
"""A recording: JSON lines, one message each, as it stood on the wire, with the time it passed.

`{"at_ns": …, "subject": …, "headers": {…}, "payload": base64}`. The engines' announcements of the moment the recording
began come first. Hashes, sessions and names are in it, prompts and tokens never were. Errors: `RecordingError`, which
names the file and the line; OSError.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from semkv.bus import codec
from semkv.bus.messages import Message

_LINE_LIMIT = 16 << 20
_DROPPED_HEADERS = {"traceparent", "tracestate"}
"""A replayed command belongs to a trace of its own."""


class RecordingError(ValueError):
    """The file is no recording."""


@dataclass(frozen=True)
class Recorded:
    """One message that passed at `at_ns` (unix nanoseconds)."""

    at_ns: int
    subject: str
    headers: Mapping[str, str]
    payload: bytes

    def message(self) -> Message:
        """What it says. Raises DecodeError."""
        return codec.decode(self.subject, self.headers, self.payload)

    def line(self) -> str:
        """The line of the file."""
        fields = {
            "at_ns": self.at_ns,
            "subject": self.subject,
            "headers": {k: v for k, v in self.headers.items() if k.lower() not in _DROPPED_HEADERS},
            "payload": base64.b64encode(self.payload).decode(),
        }
        return json.dumps(fields, separators=(",", ":"))


def announced(message: Message, at_ns: int) -> Recorded:
    """A message of ours as a recorded one."""
    payload, headers = codec.encode(message)
    return Recorded(at_ns, codec.subject_of(message), headers, payload)


def read(path: Path) -> Iterator[Recorded]:
    """The messages of a file, in the order in which they passed."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                if len(line) > _LINE_LIMIT:
                    raise ValueError(f"longer than {_LINE_LIMIT} bytes")
                fields = json.loads(line)
                headers = {str(key): str(value) for key, value in dict(fields["headers"]).items()}
                payload = base64.b64decode(fields["payload"], validate=True)
                yield Recorded(int(fields["at_ns"]), str(fields["subject"]), headers, payload)
            except (ValueError, KeyError, TypeError, binascii.Error) as error:
                raise RecordingError(f"{path} line {number} is no recorded message: {error}") from None
