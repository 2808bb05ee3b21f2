"""Where Redis is, from flags or the environment, and how to say it without its password. Imports no Redis client."""

import argparse
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

PASSWORD_FILE = "REDIS_PASSWORD_FILE"


def add_arguments(parser: "argparse._ActionsContainer", *, default: str, text: str) -> None:
    """--redis and --redis-password-file."""
    parser.add_argument("--redis", metavar="URL", default=os.environ.get("REDIS_URL", default), help=text)
    parser.add_argument(
        "--redis-password-file",
        metavar="FILE",
        default=os.environ.get(PASSWORD_FILE, ""),
        help=f"file with the password, which then stands in no URL and no process list (default ${PASSWORD_FILE})",
    )


def take(values: dict[str, Any]) -> str:
    """Remove --redis-password-file from parsed arguments and return the URL with its password in it.

    Raises `ValueError` naming the flag when the file cannot be read.
    """
    url, path = str(values.pop("redis") or ""), values.pop("redis_password_file", "")
    return with_password(url, read_password(path)) if url and path else url


def read_password(path: str) -> str:
    """The password in a file, without the newline at its end. Raises `ValueError` naming the flag."""
    try:
        password = Path(path).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--redis-password-file {path} cannot be read: {error}") from error
    if not password:
        raise ValueError(f"--redis-password-file {path} is empty; put the password of Redis into it")
    return password


def with_password(url: str, password: str) -> str:
    """The URL with this password; its user stays."""
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")[0].partition(":")
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(password, safe='')}@{host}"))


def split_password(url: str) -> tuple[str, str]:
    """The URL without its password, and the password ("" when there is none)."""
    scheme, separator, rest = url.partition("://")
    credentials, at, location = rest.rpartition("@")
    user, _, password = credentials.partition(":")
    if not (separator and at and password):
        return url, ""
    return f"{scheme}://{user + '@' if user else ''}{location}", unquote(password)
