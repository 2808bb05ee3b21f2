"""Certificates and tokens for tests, made by the same code as `headwater certs`."""

from pathlib import Path

from headwater.pki import folder
from headwater.rpc.security import Security

SERVICES = {"router": "worker", "rollout": "worker", "reward": "worker", "trainer": "admin"}
"""The token that each service presents."""


def make(path: Path, *, hosts: tuple[str, ...] = ()) -> Path:
    """A folder of certificates and tokens, valid for a day."""
    folder.fill(path, hosts=hosts, days=1, mode=0o600, force=False)
    return path


def identity(path: Path, name: str, role: str = "") -> Security:
    """Everything that the process `name` is given; the token of `role`, or none."""
    token = str(path / f"{role}.token") if role else ""
    return Security(
        tls_ca=str(path / "ca.crt"), tls_cert=str(path / f"{name}.crt"), tls_key=str(path / f"{name}.key"),
        token_file=token, tokens=str(path / "tokens.toml"),
    )  # fmt: skip
