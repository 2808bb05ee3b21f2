"""Who may call what. Each method names its role in the protocol (`headwater.common.v1.required_role`)."""

import logging
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool

from headwater.common.v1.authorization_pb2 import Role, required_role
from headwater.errors import HeadwaterError, PermissionDenied, Unauthenticated
from headwater.rpc.errors import to_status
from headwater.rpc.tokens import ROLES, Caller, TokenList

log = logging.getLogger(__name__)

_ANYBODY = Caller("anybody", Role.ROLE_ADMIN)
caller: ContextVar[Caller] = ContextVar("caller", default=_ANYBODY)
"""Who makes the call that is being handled; a server without a list of tokens takes everybody for an admin."""

_OPEN = "/grpc.health.v1.Health/"
_OURS = "/headwater."
_NAMES = {role: name for name, role in ROLES.items()}
_REMEDY = "give a token with --token-file or HEADWATER_TOKEN_FILE"


def role_of(method: str) -> "Role.ValueType":
    """The smallest role that may call `/package.Service/Method`; ROLE_UNSPECIFIED for a method of ours without one.

    Methods of others (reflection) need ROLE_CLIENT.
    """
    if not method.startswith(_OURS):
        return Role.ROLE_CLIENT
    try:
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return Role.ROLE_CLIENT  # there is no such method: whoever may come in may hear that
    return found.GetOptions().Extensions[required_role]


class Authorization(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid token of the method's role, before their first message is read."""

    def __init__(self, tokens: TokenList) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, or one that refuses."""
        method = handler_call_details.method
        if not method.startswith(_OPEN):
            try:
                caller.set(self._authenticate(handler_call_details.invocation_metadata))
                require(role_of(method), method)
            except HeadwaterError as error:
                return _refusal(error, method)
        return await continuation(handler_call_details)

    def _authenticate(self, metadata: Any) -> Caller:
        headers = [value for key, value in metadata or () if key == "authorization"]
        if not headers:
            raise Unauthenticated(f"the call has no token; {_REMEDY}", reason="TOKEN_MISSING")
        scheme, _, token = str(headers[0]).partition(" ")
        caller = self._tokens.find(token.strip()) if scheme.lower() == "bearer" and len(headers) == 1 else None
        if caller is None:
            raise Unauthenticated(
                f"the token is not one that this server accepts; {_REMEDY} whose hash is in the server's --tokens file",
                reason="TOKEN_UNKNOWN",
            )
        return caller


def require(needed: "Role.ValueType", what: str, *, field: str = "") -> None:
    """Raise `PermissionDenied` unless the caller has this role; `what` needs it."""
    who = caller.get()
    if needed == Role.ROLE_UNSPECIFIED:
        raise PermissionDenied(f"{what} declares no role and is refused to everybody", reason="ROLE_UNDECLARED")
    if who.role < needed:
        raise PermissionDenied(
            f"{what} needs the role {_NAMES[needed]}, and {who.name!r} is {_NAMES[who.role]}; use a token of the role "
            f"{_NAMES[needed]} (--token-file or HEADWATER_TOKEN_FILE)",
            reason="ROLE_TOO_SMALL",
            field=field,
        )


def _refusal(error: HeadwaterError, method: str) -> grpc.RpcMethodHandler:
    """A handler that only aborts. Of the form stream-stream whatever the method, as that one reads no message first."""
    status = to_status(error)

    async def refuse(requests: Any, context: grpc.aio.ServicerContext) -> None:
        log.warning("refused %s from %s: %s", method, context.peer(), error.reason)
        await context.abort(status.code, status.details, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(refuse)
