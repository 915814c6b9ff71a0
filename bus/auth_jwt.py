# SPDX-License-Identifier: Apache-2.0
"""The same accounts as signed JWTs: an operator, an account for engines and each tenant, and a `.creds` file per user.

With these a tenant is added to a running cluster by handing it one more account JWT, without touching anybody's user.
The engines' exports are private: each import carries an activation signed by their account. Seeds stay in files with
mode 0600. Called by `semkv.bus.auth`; errors are its errors.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nkeys

from semkv.bus import subjects
from semkv.bus.errors import AuthError

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
_UNLIMITED = {
    "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1,
}  # fmt: skip
_STORAGE = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}

Permissions = tuple[Sequence[str], Sequence[str]]


class _Key:
    """A seed in a file; made where absent."""

    def __init__(self, file: Path, prefix: int) -> None:
        if not file.exists():
            seed = nkeys.encode_seed(os.urandom(32), prefix)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(seed + b"\n")
        try:
            self.seed: bytes = file.read_bytes().strip()
            self._pair = nkeys.from_seed(self.seed)
            self.public: str = self._pair.public_key.decode()
        except Exception:
            raise AuthError(f"{file} holds no nkey seed; move it away to have a new one made") from None

    def __repr__(self) -> str:
        return f"_Key({self.public})"

    def jwt(self, subject: str, name: str, claims: dict[str, Any]) -> str:
        """A JWT about `subject`, signed with this key."""
        body: dict[str, Any] = {
            "iat": int(time.time()),
            "iss": self.public,
            "name": name,
            "sub": subject,
            "nats": claims,
        }
        digest = hashlib.new("sha512_256", _json(body)).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        head = f"{_url(_json(_HEADER))}.{_url(_json(body))}"
        return f"{head}.{_url(self._pair.sign(head.encode()))}"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def generate(
    directory: Path,
    tokens: Sequence[str],
    engine: Permissions,
    tenant: Callable[[str, str], Permissions],
    roles: Sequence[str],
    engine_account: str,
) -> str:
    """Writes `<user>.creds` files; returns the server's part of the configuration."""
    keys = directory / "keys"
    keys.mkdir(exist_ok=True)
    keys.chmod(0o700)

    def key(name: str, prefix: int) -> _Key:
        return _Key(keys / f"{name}.seed", prefix)

    operator, system = key("operator", nkeys.PREFIX_BYTE_OPERATOR), key("account-system", nkeys.PREFIX_BYTE_ACCOUNT)
    engines = key(f"account-{engine_account}", nkeys.PREFIX_BYTE_ACCOUNT)
    registry = f"{subjects.REGISTRY_PREFIX}.>"
    exports: list[dict[str, Any]] = [{"name": "registry", "subject": registry, "type": "stream"}]
    accounts = {system.public: operator.jwt(system.public, "SYS", _account([], [], jetstream=False))}
    for token in tokens:
        account = key(f"account-{token}", nkeys.PREFIX_BYTE_ACCOUNT)
        mine = f"{subjects.PREFIX}.{token}.*"
        imports: list[dict[str, Any]] = [
            {"name": "registry", "subject": registry, "account": engines.public, "type": "stream"}
        ]
        for name, kind in (("cmd", "service"), ("evt", "stream"), ("res", "stream")):
            subject = f"{mine}.{name}.>"
            exports.append({"name": f"{token}-{name}", "subject": subject, "type": kind, "token_req": True})
            claims = {"subject": subject, "kind": kind, "type": "activation", "version": 2}
            activation = engines.jwt(account.public, f"{token}-{name}", claims)
            imports.append(
                {"name": name, "subject": subject, "account": engines.public, "type": kind, "token": activation}
            )
        accounts[account.public] = operator.jwt(account.public, f"TENANT-{token}", _account(imports, []))
        for role in roles:
            _creds(
                directory / f"{token}-{role}.creds",
                key(f"{token}-{role}", nkeys.PREFIX_BYTE_USER),
                account,
                tenant(token, role),
            )
    accounts[engines.public] = operator.jwt(engines.public, engine_account, _account([], exports))
    _creds(directory / "engine.creds", key("engine", nkeys.PREFIX_BYTE_USER), engines, engine)
    said = _kept(
        keys / "operator.jwt",
        lambda: operator.jwt(
            operator.public, "semkv", {"type": "operator", "version": 2, "system_account": system.public}
        ),
    )
    preload = "\n".join(f"  {public}: {jwt}" for public, jwt in accounts.items())
    return f"""# Generated by `semkv auth`. Public statements only; the seeds are in files of their own.
operator: {said}
system_account: {system.public}
resolver: MEMORY
resolver_preload: {{
{preload}
}}
"""


def _kept(file: Path, make: Callable[[], str]) -> str:
    """What the file says; made where absent. A server that runs does not take another statement of its operator."""
    if not file.exists():
        file.write_text(make())
    return file.read_text()


def _account(imports: list[dict[str, Any]], exports: list[dict[str, Any]], *, jetstream: bool = True) -> dict[str, Any]:
    limits = {**_UNLIMITED, **(_STORAGE if jetstream else {})}
    claims: dict[str, Any] = {"limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    return {**claims, "imports": imports, "exports": exports, "type": "account", "version": 2}


def _creds(file: Path, user: _Key, account: _Key, permissions: Permissions) -> None:
    publish, subscribe = permissions
    claims = {
        "pub": {"allow": list(publish)}, "sub": {"allow": list(subscribe)}, "subs": -1, "data": -1, "payload": -1,
        "type": "user", "version": 2,
    }  # fmt: skip
    jwt = account.jwt(user.public, file.stem, claims)
    text = (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(text)
    file.chmod(0o600)
