"""Server interceptor: handlers raise `HeadwaterError`, callers get a gRPC status with details."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio

from headwater.errors import HeadwaterError
from headwater.rpc.errors import internal, to_status

log = logging.getLogger(__name__)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler so that exceptions become status codes with google.rpc details."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of one method."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith("/grpc."):
            return handler
        make, behavior = _FORMS[(handler.request_streaming, handler.response_streaming)], _behavior(handler)
        wrap = _wrap_stream if handler.response_streaming else _wrap_unary
        return make(
            wrap(behavior, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )


_FORMS: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def _behavior(handler: Any) -> Callable[..., Any]:
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def _wrap_unary(behavior: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await behavior(request, context)
        except Exception as error:
            await _abort(context, error, method)

    return call


def _wrap_stream(behavior: Callable[..., AsyncGenerator[Any, None]], method: str) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            # Closed here and now when the call is cancelled at a yield, so that a handler's `finally` runs at once.
            async with contextlib.aclosing(behavior(request, context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error, method)

    return call


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    if not isinstance(error, HeadwaterError):
        log.exception("unexpected error in %s", method)
        error = internal(error)
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("abort raises")
