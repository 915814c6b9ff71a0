# SPDX-License-Identifier: Apache-2.0
"""Isolation by NATS accounts: generates the server's configuration, keys and certificates.

Engines live in account `SEMKV`, each tenant in its own, which imports only that tenant's commands (as a service), its
events and results (as streams) and the registry (read-only). Users, by nkey: `engine`; and per tenant `manager` (may
make the tenant's two streams), `agent` (commands, events, results) and `observer` (events and results only).

Written into one directory, seeds with mode 0600; what is there is kept, so running it again adds tenants and changes
nobody's keys. Nothing secret is returned, logged or put on a command line. Errors: `AuthError`, OSError.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import nkeys

from semkv.bus import auth_jwt, subjects
from semkv.bus.errors import AuthError
from semkv.bus.streams import EVENTS, RESULTS

ENGINE_ACCOUNT = "SEMKV"
NKEYS = "nkeys"
CREDS = "creds"
ROLES = ("manager", "agent", "observer")
_PUBLIC = re.compile(r"U[A-Z2-7]{55}\Z")


@dataclass(frozen=True)
class Generated:
    """What was written, by name. `env[name]` is a file of `SEMKV_*` variables for that user."""

    directory: Path
    server_config: Path
    accounts_config: Path
    env: dict[str, Path]
    ca: Path | None


def generate(
    directory: Path,
    tenants: Sequence[str],
    *,
    url: str = "tls://127.0.0.1:4222",
    hosts: Sequence[str] | None = None,
    keys: str = NKEYS,
) -> Generated:
    """Writes everything for these tenants. A `tls://` URL also gets certificates, for `hosts` or 127.0.0.1.

    `keys`: `nkeys` (users in the server's configuration) or `creds` (an operator's signed accounts, `.creds` files).
    """
    if keys not in (NKEYS, CREDS):
        raise AuthError(f"keys {keys!r} is neither {NKEYS} nor {CREDS}")
    if not tenants:
        raise AuthError("no tenant was named; name at least one")
    tokens = {tenant: subjects.token(tenant) for tenant in tenants}
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)
    tls = url.startswith("tls://")
    ca = None
    if tls:
        from semkv.bus import certificates

        ca = certificates.generate(directory / "tls", hosts or ("127.0.0.1", "localhost"))
    if keys == CREDS:
        listed = auth_jwt.generate(
            directory, list(tokens.values()), engine_permissions(), tenant_permissions, ROLES, ENGINE_ACCOUNT
        )
    else:
        users = {"engine": _user(directory, "engine")}
        for token in tokens.values():
            users |= {f"{token}-{role}": _user(directory, f"{token}-{role}") for role in ROLES}
        listed = _accounts(users, list(tokens.values()))
    accounts = directory / "accounts.conf"
    accounts.write_text(listed + (_tls(directory / "tls") if tls else ""))
    server = directory / "nats-server.conf"
    server.write_text(_server(url, directory))
    env = {"engine": _env(directory, "engine", url, ca, None, keys)}
    for tenant, token in tokens.items():
        for role in ROLES:
            env[f"{token}-{role}"] = _env(directory, f"{token}-{role}", url, ca, tenant, keys)
    return Generated(directory, server, accounts, env, ca)


def _user(directory: Path, name: str) -> str:
    """The user's public key; makes the seed file if it is absent."""
    file = _seed_file(directory, name)
    if not file.exists():
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(seed + b"\n")
    try:
        public: bytes = nkeys.from_seed(file.read_bytes().strip()).public_key
    except Exception:
        raise AuthError(f"{file} holds no nkey seed; move it away to have a new one made") from None
    text = public.decode()
    if not _PUBLIC.match(text):
        raise AuthError(f"{file} holds the seed of something else than a user; move it away")
    return text


def _seed_file(directory: Path, name: str) -> Path:
    return directory / f"{name}.seed"


def _list(items: Sequence[str]) -> str:
    return "[" + ", ".join(json.dumps(item) for item in items) + "]"


def _permissions(publish: Sequence[str], subscribe: Sequence[str]) -> str:
    return f"{{ publish: {{ allow: {_list(publish)} }}, subscribe: {{ allow: {_list(subscribe)} }} }}"


def engine_permissions() -> tuple[list[str], list[str]]:
    """What engines may publish and subscribe to: they command nobody."""
    own = [f"{subjects.PREFIX}.*.*.evt.>", f"{subjects.PREFIX}.*.*.res.>", f"{subjects.REGISTRY_PREFIX}.>"]
    return [*own, "$JS.API.>", "$JS.FC.>"], ["_INBOX.>", f"{subjects.REGISTRY_PREFIX}.>"]


def tenant_permissions(token: str, role: str) -> tuple[list[str], list[str]]:
    """What a role may publish and subscribe to inside its tenant's account."""
    mine = f"{subjects.PREFIX}.{token}.*"
    publish = [
        f"$JS.API.STREAM.INFO.{EVENTS}",
        f"$JS.API.STREAM.INFO.{RESULTS}",
        f"$JS.API.CONSUMER.CREATE.{EVENTS}",
        f"$JS.API.CONSUMER.CREATE.{EVENTS}.>",
        f"$JS.API.CONSUMER.DELETE.{EVENTS}.*",
        f"$JS.API.DIRECT.GET.{RESULTS}",
        f"$JS.API.DIRECT.GET.{RESULTS}.>",
        f"$JS.FC.{EVENTS}.>",
    ]
    if role in ("agent", "manager"):
        publish.append(f"{mine}.cmd.>")
    if role == "manager":
        # Whoever makes a stream chooses what it captures and where it copies to, so agents do not.
        publish += [f"$JS.API.STREAM.CREATE.{name}" for name in (EVENTS, RESULTS)]
    return publish, ["_INBOX.>", f"{mine}.evt.>", f"{mine}.res.>", f"{subjects.REGISTRY_PREFIX}.>"]


def _member(public_key: str, permissions: tuple[list[str], list[str]]) -> str:
    return f"      {{ nkey: {public_key}, permissions: {_permissions(*permissions)} }}"


def _accounts(users: dict[str, str], tokens: Sequence[str]) -> str:
    exports, tenants = [], []
    for token in tokens:
        account, mine = f"TENANT-{token}", f"{subjects.PREFIX}.{token}.*"
        exports += [
            f'      {{ service: "{mine}.cmd.>", accounts: ["{account}"] }}',
            f'      {{ stream: "{mine}.evt.>", accounts: ["{account}"] }}',
            f'      {{ stream: "{mine}.res.>", accounts: ["{account}"] }}',
        ]
        members = "\n".join(_member(users[f"{token}-{role}"], tenant_permissions(token, role)) for role in ROLES)
        tenants.append(f"""  "{account}": {{
    jetstream: enabled
    users: [
{members}
    ]
    imports: [
      {{ service: {{ account: {ENGINE_ACCOUNT}, subject: "{mine}.cmd.>" }} }}
      {{ stream: {{ account: {ENGINE_ACCOUNT}, subject: "{mine}.evt.>" }} }}
      {{ stream: {{ account: {ENGINE_ACCOUNT}, subject: "{mine}.res.>" }} }}
      {{ stream: {{ account: {ENGINE_ACCOUNT}, subject: "{subjects.REGISTRY_PREFIX}.>" }} }}
    ]
  }}""")
    listed = "\n".join([*exports, f'      {{ stream: "{subjects.REGISTRY_PREFIX}.>" }}'])
    return f"""# Generated by `semkv auth`. Public keys only; the seeds are in files of their own.
accounts {{
  {ENGINE_ACCOUNT}: {{
    jetstream: enabled
    users: [
{_member(users["engine"], engine_permissions())}
    ]
    exports: [
{listed}
    ]
  }}
{chr(10).join(tenants)}
}}
"""


def _tls(directory: Path) -> str:
    cert, key = json.dumps(str(directory / "server.pem")), json.dumps(str(directory / "server-key.pem"))
    return f'tls {{\n  cert_file: {cert}\n  key_file: {key}\n  min_version: "1.2"\n}}\n'


def _server(url: str, directory: Path) -> str:
    where = url.partition("://")[2]
    data = json.dumps(str(directory / "data"))
    return f"""# Generated by `semkv auth`.
listen: "{where}"
jetstream {{ store_dir: {data} }}
include "accounts.conf"
"""


def _env(directory: Path, name: str, url: str, ca: Path | None, tenant: str | None, keys: str) -> Path:
    secret = (
        {"SEMKV_NATS_CREDS": str(directory / f"{name}.creds")}
        if keys == CREDS
        else {"SEMKV_NATS_NKEY_SEED_FILE": str(_seed_file(directory, name))}
    )
    variables = {"SEMKV_NATS_URL": url, **secret, "SEMKV_NATS_ACCOUNTS": "1"}
    if ca is not None:
        variables["SEMKV_NATS_CA"] = str(ca)
    if tenant is not None:
        variables["SEMKV_TENANT"] = tenant
    file = directory / f"{name}.env"
    # A shell reads it: whatever a name or a path holds is a value and never a command.
    file.write_text("".join(f"{variable}={shlex.quote(value)}\n" for variable, value in variables.items()))
    return file


def read_env(file: Path) -> dict[str, str]:
    """The variables of a generated file, as a shell reads them."""
    return dict(word.split("=", 1) for word in shlex.split(file.read_text()) if "=" in word)
