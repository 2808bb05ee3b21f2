"""The folder that `headwater certs` fills: what each file is called and who may read it."""

import datetime
import hashlib
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

import tomli_w

from headwater.errors import AlreadyExists, InvalidArgument, Unavailable
from headwater.pki.certificates import make_authority, make_certificate

SERVICES = ("router", "rollout", "reward", "trainer", "dashboard")
ROLES = ("client", "worker", "admin")
LOCAL = "local"
"""All services of one machine under one certificate, for `headwater up`."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_DAYS = 3650
_HOST = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:]{2,45}")
_TOKEN_BYTES = 32


def fill(folder: Path, *, hosts: Sequence[str], days: int, mode: int, force: bool) -> datetime.datetime:
    """Write the CA, certificates, keys, tokens and the list of tokens into `folder`; returns when they expire (UTC).

    Every certificate is for its service's name, the loopback addresses and `hosts`. Private files get `mode`, which
    lets others read only where they cannot enter the folder; a new one is for its owner alone. Raises
    `InvalidArgument`, `AlreadyExists` without `force`, `Unavailable`.
    """
    if not 1 <= days <= MAX_DAYS:
        raise InvalidArgument(f"--days is {days}; it must be between 1 and {MAX_DAYS}", field="days")
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise InvalidArgument(f"--host {host!r} is no host name or address, e.g. gpu7.example.org", field="host")
    expires = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=days)
    public, private = _contents(hosts, expires)
    present = [name for name in sorted({*public, *private}) if (folder / name).exists()]
    if present and not force:
        raise AlreadyExists(
            f"{folder} holds {present[0]} already; choose another folder, or --force to replace everything in it "
            "(all services and clients then need the new files)",
            field="dir",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if mode & 0o077 and folder.stat().st_mode & 0o077:
            raise InvalidArgument(
                f"others may enter {folder}, and with --mode {mode:04o} read the keys in it: chmod 700 {folder}, or "
                "name a new folder",
                field="mode",
            )
        for name, data in private.items():
            _write(folder / name, data, 0o600 if name == "ca.key" else mode)
        for name, data in public.items():
            _write(folder / name, data, 0o644)
    except OSError as error:
        raise Unavailable(f"cannot write to {folder}: {error}; choose another folder", field="dir") from error
    return expires


def _contents(hosts: Sequence[str], expires: datetime.datetime) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Public and private files by name."""
    authority = make_authority(expires)
    public, private = {"ca.crt": authority.certificate_pem()}, {"ca.key": authority.key_pem()}
    names = {service: [service] for service in SERVICES} | {LOCAL: list(SERVICES), "client": ["client"]}
    for name, own in names.items():
        every = dict.fromkeys([*own, *LOOPBACK, *hosts])
        pair = make_certificate(authority, name, list(every), server=name != "client")
        public[f"{name}.crt"], private[f"{name}.key"] = pair.certificate_pem(), pair.key_pem()
    tokens = {role: secrets.token_urlsafe(_TOKEN_BYTES) for role in ROLES}
    private |= {f"{role}.token": f"{token}\n".encode() for role, token in tokens.items()}
    private["tokens.toml"] = _token_list(tokens)
    return public, private


def _token_list(tokens: Mapping[str, str]) -> bytes:
    rows = [
        {"name": role, "role": role, "sha256": hashlib.sha256(token.encode()).hexdigest()}
        for role, token in tokens.items()
    ]
    comment = "# Accepted tokens (docs/security.md); services read this again when it changes.\n"
    return (comment + tomli_w.dumps({"token": rows})).encode()


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file at once; at no moment can it be read with wider permissions than `mode`."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    temporary.chmod(mode)
    temporary.replace(path)
