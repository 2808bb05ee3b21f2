"""From a process's `Security` to what gRPC needs. A process has one identity: `use` sets it, `current` tells it."""

from collections.abc import Callable
from pathlib import Path

import grpc

from headwater.errors import InvalidArgument
from headwater.rpc.security import Security, flag, variable
from headwater.rpc.tokens import WatchedFile, own_token

_current: Security | None = None


def use(security: Security) -> None:
    """Make it the identity of this process: channels and servers that are given no other have this one.

    Raises `InvalidArgument` for settings that contradict each other or name files that cannot be read.
    """
    global _current
    channel_credentials(security)
    _current = security


def current() -> Security:
    """The identity of this process: what `use` was given, else what the environment names."""
    return _current if _current is not None else Security.from_environment()


def channel_credentials(security: Security) -> grpc.ChannelCredentials | None:
    """What a client presents and whom it trusts; None for plain text. Raises `InvalidArgument`."""
    if bool(security.tls_cert) != bool(security.tls_key):
        raise InvalidArgument("--tls-cert and --tls-key belong together; give both or neither", field="tls_cert")
    if security.is_plain:
        if security.token_file:
            raise InvalidArgument(
                f"--token-file needs TLS, as a token in plain text is anybody's; give {_source('tls_ca')}",
                field="token_file",
            )
        return None
    tls = grpc.ssl_channel_credentials(
        root_certificates=_read(security, "tls_ca"),
        private_key=_read(security, "tls_key"),
        certificate_chain=_read(security, "tls_cert"),
    )
    if not security.token_file:
        return tls
    token = grpc.metadata_call_credentials(_Bearer(own_token(security.token_file)), name="headwater")
    return grpc.composite_channel_credentials(tls, token)


def server_credentials(security: Security) -> grpc.ServerCredentials | None:
    """What a server presents; with a CA, clients must have a certificate of it. None for plain text.

    Raises `InvalidArgument`.
    """
    if not security.tls_cert or not security.tls_key:
        if security.tls_ca or security.tokens or security.tls_cert or security.tls_key:
            raise InvalidArgument(
                "a server with --tls-ca or --tokens needs a certificate as well: give "
                f"{_source('tls_cert')} and {_source('tls_key')}",
                field="tls_cert",
            )
        return None
    key, certificate = _read(security, "tls_key"), _read(security, "tls_cert")
    assert key is not None
    assert certificate is not None
    authority = _read(security, "tls_ca")
    return grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=authority is not None)


class _Bearer(grpc.AuthMetadataPlugin):
    """Adds the token to each call, over TLS only: gRPC refuses call credentials on a plain channel."""

    def __init__(self, token: WatchedFile[str]) -> None:
        self._token = token

    def __call__(self, context: grpc.AuthMetadataContext, callback: Callable[..., None]) -> None:
        callback((("authorization", f"Bearer {self._token.value()}"),), None)


def _read(security: Security, name: str) -> bytes | None:
    path = getattr(security, name)
    if not path:
        return None
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(
            f"{flag(name)} {path} cannot be read: {error.strerror}; correct the path or its permissions", field=name
        ) from error
    wanted = b"PRIVATE KEY-----" if name == "tls_key" else b"-----BEGIN CERTIFICATE-----"
    if wanted not in data:
        kind = "private key" if name == "tls_key" else "certificate"
        raise InvalidArgument(f"{flag(name)} {path} holds no {kind} in PEM form", field=name)
    return data


def _source(name: str) -> str:
    return f"{flag(name)} FILE or {variable(name)}"
