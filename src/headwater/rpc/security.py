"""Who this process is and whom it trusts: five files, given by flags or by the environment. Imports no gRPC."""

import argparse
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

_HELP = {
    "tls_ca": "certificate of the CA that signs the peers; on a server, clients then need a certificate too",
    "tls_cert": "this process's certificate",
    "tls_key": "private key of --tls-cert",
    "token_file": "file with the bearer token that this process presents",
    "tokens": "TOML file with the tokens that this server accepts",
}


@dataclass(frozen=True)
class Security:
    """Paths of the files; "" where there is none. All empty: plain text, and everybody may call everything."""

    tls_ca: str = ""
    """Certificate (PEM) of the CA that signs the peers of this process."""
    tls_cert: str = ""
    """Certificate (PEM) of this process, followed by those between it and the CA."""
    tls_key: str = ""
    """Private key (PEM) of `tls_cert`."""
    token_file: str = ""
    """The token that this process presents to the servers it calls."""
    tokens: str = ""
    """The tokens that this process accepts as a server (`headwater.rpc.tokens`)."""

    @classmethod
    def from_environment(cls) -> "Security":
        """What the variables HEADWATER_TLS_CA, …_TLS_CERT, …_TLS_KEY, …_TOKEN_FILE and …_TOKENS name."""
        return cls(**{name: os.environ.get(variable(name), "") for name in _HELP})

    @classmethod
    def take(cls, values: dict[str, Any]) -> "Security":
        """Remove the security options from parsed arguments (`vars(namespace)`) and return them."""
        return cls(**{name: values.pop(name, "") for name in _HELP})

    def flags(self) -> tuple[str, ...]:
        """The command line that gives another service the same settings."""
        return tuple(word for f in fields(self) if (path := getattr(self, f.name)) for word in (flag(f.name), path))

    @property
    def is_plain(self) -> bool:
        """Whether calls of this process go out in plain text."""
        return not (self.tls_ca or self.tls_cert)


PLAIN = Security()
"""No TLS, no tokens."""


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"HEADWATER_{name.upper()}"


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser, *, server: bool) -> None:
    """Add the flags; `server` with --tokens. What is not given is taken from the environment."""
    group = parser.add_argument_group("security", "docs/security.md; `headwater certs DIR` makes these files")
    names: Iterable[str] = _HELP if server else [name for name in _HELP if name != "tokens"]
    for name in names:
        default = os.environ.get(variable(name), "")
        group.add_argument(flag(name), metavar="FILE", default=default, help=f"{_HELP[name]} (${variable(name)})")


def add_insecure(parser: argparse.ArgumentParser) -> None:
    """--insecure."""
    text = "allow a --bind that other machines can reach without TLS and tokens"
    parser.add_argument("--insecure", action="store_true", help=text)
