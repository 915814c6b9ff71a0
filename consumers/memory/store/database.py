# SPDX-License-Identifier: Apache-2.0
"""The SQLite file of the memory map: connection, schema, transactions.

One connection, guarded by one re-entrant lock, so that the map's loop and a search thread may share it. WAL with
``synchronous=NORMAL``: a crash of the process loses nothing, a crash of the machine at most the last moments. A file
written by a newer schema is refused with both numbers. ``sqlite3.Error`` passes through.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA_VERSION", "Database", "StoreError"]

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
    session TEXT PRIMARY KEY, agent TEXT NOT NULL, topic TEXT NOT NULL DEFAULT '',
    pending TEXT NOT NULL DEFAULT '', ended INTEGER NOT NULL DEFAULT 0, updated_at INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_agent ON sessions (agent, updated_at);
CREATE TABLE IF NOT EXISTS topics (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, topic TEXT NOT NULL, intent TEXT NOT NULL DEFAULT '',
    closed INTEGER NOT NULL DEFAULT 0, updated_at INTEGER NOT NULL, UNIQUE (session, topic));
CREATE TABLE IF NOT EXISTS notes (
    id INTEGER PRIMARY KEY, topic_id INTEGER NOT NULL REFERENCES topics (id) ON DELETE CASCADE,
    role TEXT NOT NULL, text TEXT NOT NULL, embedding TEXT NOT NULL, vector BLOB NOT NULL, at INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS notes_topic ON notes (topic_id, id);
CREATE TABLE IF NOT EXISTS requests (
    request_id TEXT PRIMARY KEY, session TEXT NOT NULL, topic TEXT NOT NULL, at INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS chains (
    id INTEGER PRIMARY KEY, session TEXT NOT NULL, topic TEXT NOT NULL, tenant TEXT NOT NULL, domain TEXT NOT NULL,
    instance TEXT NOT NULL, epoch INTEGER NOT NULL, seq INTEGER NOT NULL, request_id TEXT NOT NULL,
    root INTEGER NOT NULL, hashes BLOB NOT NULL, chunk_size INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    finished_at INTEGER NOT NULL, leaf INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS chains_session ON chains (session, leaf, id);
CREATE INDEX IF NOT EXISTS chains_root ON chains (root, leaf);
CREATE INDEX IF NOT EXISTS chains_request ON chains (request_id);
CREATE TABLE IF NOT EXISTS publishers (
    instance TEXT NOT NULL, epoch INTEGER NOT NULL, tenant TEXT NOT NULL, last_seq INTEGER NOT NULL,
    lost INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (instance, epoch, tenant));
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, command_id TEXT UNIQUE, at INTEGER NOT NULL, agent TEXT NOT NULL, session TEXT NOT NULL,
    moment TEXT NOT NULL, moment_id TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL, chunks INTEGER NOT NULL,
    chain_digest TEXT NOT NULL, details TEXT NOT NULL,
    outcome TEXT NOT NULL DEFAULT '', result TEXT NOT NULL DEFAULT '');
CREATE INDEX IF NOT EXISTS decisions_agent ON decisions (agent, at);
CREATE INDEX IF NOT EXISTS decisions_moment ON decisions (session, moment, moment_id);
CREATE TABLE IF NOT EXISTS tools (
    agent TEXT NOT NULL, tool TEXT NOT NULL, calls INTEGER NOT NULL, mean_ms REAL NOT NULL,
    PRIMARY KEY (agent, tool));
"""


class StoreError(RuntimeError):
    """The file is not one that this version can keep."""


class Database:
    """The connection and its lock."""

    def __init__(self, path: Path | str = ":memory:") -> None:
        self.path = str(path)
        if self.path != ":memory:":
            Path(self.path).expanduser().resolve().parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._depth = 0
        self._connection = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        try:
            self._prepare()
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", "busy_timeout=5000"):
            self._connection.execute(f"PRAGMA {pragma}")
        version = int(self._connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA_VERSION:
            raise StoreError(
                f"store {self.path}: schema {version} is newer than {SCHEMA_VERSION}, the one this version of semkv "
                "knows: upgrade semkv, or give the map another file"
            )
        self._connection.executescript(_SCHEMA)
        self._connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; may be nested (the outermost one commits)."""
        with self._lock:
            if self._depth == 0:
                self._connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                if self._depth == 0:
                    self._connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self._connection.execute("COMMIT")

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        with self._lock:
            return self._connection.execute(sql, values)

    def all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(sql, values).fetchall()

    def one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        with self._lock:
            row: sqlite3.Row | None = self._connection.execute(sql, values).fetchone()
            return row

    def meta(self, key: str) -> str | None:
        row = self.one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        self.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
        )

    def close(self) -> None:
        with self._lock:
            self._connection.close()
