# SPDX-License-Identifier: Apache-2.0
"""A small certificate authority and a server certificate, for TLS between engines, agents and the server.

Needs the package `cryptography`, and says so. Keys have mode 0600; what is there is kept.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from semkv.bus.errors import AuthError

_DAYS = 825


def generate(directory: Path, hosts: Sequence[str]) -> Path:
    """Writes `ca.pem`, `server.pem` and `server-key.pem` where absent; returns the authority's certificate."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise AuthError("TLS certificates need the package 'cryptography': pip install cryptography") from None
    authority, server, server_key = (directory / name for name in ("ca.pem", "server.pem", "server-key.pem"))
    if authority.exists() and server.exists() and server_key.exists():
        return authority
    directory.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, issuer: str, public_key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=_DAYS))
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    ca = (
        certificate("semkv authority", "semkv authority", ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    leaf = (
        certificate(hosts[0], "semkv authority", key.public_key())
        .add_extension(x509.SubjectAlternativeName([_host(x509, host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # The authority's own key is not kept: new hosts get a new authority.
    authority.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    server.write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    with os.fdopen(os.open(server_key, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(private)
    return authority


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
