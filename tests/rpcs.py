"""Every method of the protocol, found in the descriptors, and calls of them with any token."""

import importlib
import pkgutil
import threading
from collections.abc import Iterator

import grpc
from google.protobuf.descriptor import MethodDescriptor

import headwater
from headwater.errors import HeadwaterError
from headwater.rpc.errors import from_rpc_error

TIMEOUT_S = 10.0


def methods() -> list[MethodDescriptor]:
    """Every method of every service below `headwater`."""
    found = []
    for module in pkgutil.walk_packages(headwater.__path__, "headwater."):
        if module.name.endswith("_pb2"):
            descriptor = importlib.import_module(module.name).DESCRIPTOR
            found += [m for service in descriptor.services_by_name.values() for m in service.methods]
    return found


def path_of(method: MethodDescriptor) -> str:
    """/package.Service/Method."""
    return f"/{method.containing_service.full_name}/{method.name}"


def call(channel: grpc.Channel, method: MethodDescriptor, token: str | None) -> HeadwaterError | None:
    """Call with an empty request; a request stream sends nothing at all. The error, or None when an answer came."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    form = {
        (False, False): channel.unary_unary, (False, True): channel.unary_stream,
        (True, False): channel.stream_unary, (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]  # fmt: skip
    over = threading.Event()

    def silence() -> Iterator[bytes]:
        over.wait(TIMEOUT_S)
        yield from ()

    request = silence() if method.client_streaming else b""
    try:
        answer = form(path_of(method))(request, timeout=TIMEOUT_S, metadata=metadata)
        if method.server_streaming:
            next(iter(answer), None)
            answer.cancel()
    except grpc.RpcError as error:
        return from_rpc_error(error)
    finally:
        over.set()
    return None
