"""Bearer tokens: the file with the one that a process presents, and the file with those that a server accepts.

The server's file holds no token, only SHA-256 hashes (a token has 256 random bits, so that no salt is needed):

    [[token]]
    name = "alice"
    role = "client"                    # client, worker or admin
    sha256 = "9f86d081884c7d65…"       # printf %s "$TOKEN" | sha256sum

Both files are read again when they change. A new version that is broken is reported, and the last good one stays valid.
"""

import hashlib
import hmac
import logging
import os
import re
import threading
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from headwater.common.v1.authorization_pb2 import Role
from headwater.errors import InvalidArgument

log = logging.getLogger(__name__)

ROLES = {"client": Role.ROLE_CLIENT, "worker": Role.ROLE_WORKER, "admin": Role.ROLE_ADMIN}
"""Roles by the name that they have in the file, smallest first."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # what RFC 6750 allows in a header, of a length worth guessing
_T = TypeVar("_T")


@dataclass(frozen=True)
class Caller:
    """Whoever a token belongs to."""

    name: str
    role: "Role.ValueType"


@dataclass(frozen=True)
class _Entry:
    digest: bytes
    caller: Caller


class WatchedFile(Generic[_T]):
    """The parsed content of a small file, parsed again when the file changes. Safe to share by threads."""

    def __init__(self, path: str, parse: Callable[[str, str], _T]) -> None:
        """`parse(text, path)`. Raises `InvalidArgument` when the file cannot be read or parsed now."""
        self._path, self._parse, self._lock = path, parse, threading.Lock()
        self._stamp = self._look()
        self._value = parse(_read(path), path)

    def value(self) -> _T:
        """The content as of now."""
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._value = self._parse(_read(self._path), self._path)
                    log.info("%s has changed and was read again", self._path)
                except InvalidArgument as error:
                    log.error("%s; what was read before stays valid", error.message)
            return self._value

    def _look(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class TokenList:
    """The tokens that a server accepts."""

    def __init__(self, path: str) -> None:
        """Raises `InvalidArgument` when the file cannot be used."""
        self._file = WatchedFile(path, _parse_list)

    def find(self, token: str) -> Caller | None:
        """Whose token this is, in a time that does not depend on which entry it is or how much of one it matches."""
        digest, found = hashlib.sha256(token.encode()).digest(), None
        for entry in self._file.value():
            if hmac.compare_digest(entry.digest, digest):
                found = entry.caller
        return found


def own_token(path: str) -> WatchedFile[str]:
    """The file with the token that a process presents."""
    return WatchedFile(path, _parse_token)


def _parse_token(text: str, path: str) -> str:
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise InvalidArgument(
            f"{path} holds no token: it must be one line of 16 to 512 letters, digits and ._~+/=- "
            "(`headwater certs DIR` makes one)",
            field="token_file",
        )
    return token


def _parse_list(text: str, path: str) -> list[_Entry]:
    try:
        rows = tomllib.loads(text)["token"]
        entries = [_Entry(bytes.fromhex(r["sha256"]), Caller(str(r["name"]), ROLES[r["role"]])) for r in rows]
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} is no list of tokens ({type(error).__name__}: {error}); {_FORM}") from error
    if not entries or any(len(entry.digest) != hashlib.sha256().digest_size for entry in entries):
        raise InvalidArgument(f"{path} has no [[token]], or one whose sha256 is not 64 hex digits; {_FORM}")
    return entries


_FORM = "each [[token]] needs name, role (client, worker or admin) and sha256 (docs/security.md)"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}; correct the path or its permissions") from error
