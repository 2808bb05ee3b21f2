"""Errors of Headwater, as a tree. Handlers raise them; `headwater.rpc` turns them into gRPC status and back.

HeadwaterError
├── InvalidArgument      the request is wrong, and would be wrong again
├── NotFound             no such run, worker, reward or request
├── AlreadyExists        an id is in use
├── FailedPrecondition   right request, wrong moment or state
├── OutOfBudget          a queue or budget is full (RESOURCE_EXHAUSTED); carries when to try again
├── Unavailable          a service cannot be reached or does not serve now
├── DeadlineExceeded     a wait has reached its end
├── Aborted              fenced off: an older epoch, or a lost race
├── Cancelled            somebody asked for it
├── Unauthenticated      the caller has no token, or not one that the server knows
├── PermissionDenied     the caller's role does not allow it
├── DataLoss             bytes are not what they should be
└── Internal             a bug here
"""

from collections.abc import Mapping

import grpc
from google.protobuf.duration_pb2 import Duration

from headwater.common.v1.reward_pb2 import ItemError


class HeadwaterError(Exception):
    """Base: what was wrong (`message`), a stable `reason`, the `field` at fault and when a retry makes sense."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN
    default_reason = "UNKNOWN"

    def __init__(
        self, message: str, *, reason: str = "", field: str = "", retry_after_s: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(HeadwaterError):
    """The request is wrong; `field` names the part, the message names the remedy."""

    code, default_reason = grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT"


class NotFound(HeadwaterError):
    """No such thing."""

    code, default_reason = grpc.StatusCode.NOT_FOUND, "NOT_FOUND"


class AlreadyExists(HeadwaterError):
    """The id is in use."""

    code, default_reason = grpc.StatusCode.ALREADY_EXISTS, "ALREADY_EXISTS"


class FailedPrecondition(HeadwaterError):
    """The request cannot be served in the present state."""

    code, default_reason = grpc.StatusCode.FAILED_PRECONDITION, "FAILED_PRECONDITION"


class OutOfBudget(HeadwaterError):
    """A queue or budget is full; try again after `retry_after_s`."""

    code, default_reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "OUT_OF_BUDGET"


class Unavailable(HeadwaterError):
    """A service cannot be reached or does not serve now."""

    code, default_reason = grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE"


class DeadlineExceeded(HeadwaterError):
    """A wait has reached its end."""

    code, default_reason = grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"


class Aborted(HeadwaterError):
    """Fenced off by a newer epoch, or a race was lost."""

    code, default_reason = grpc.StatusCode.ABORTED, "ABORTED"


class Cancelled(HeadwaterError):
    """Cancelled on request."""

    code, default_reason = grpc.StatusCode.CANCELLED, "CANCELLED"


class Unauthenticated(HeadwaterError):
    """The call has no token, or one that the server does not know."""

    code, default_reason = grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"


class PermissionDenied(HeadwaterError):
    """The caller's role does not allow it."""

    code, default_reason = grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED"


class DataLoss(HeadwaterError):
    """Bytes are not what they should be."""

    code, default_reason = grpc.StatusCode.DATA_LOSS, "DATA_LOSS"


class Internal(HeadwaterError):
    """A bug in Headwater."""

    code, default_reason = grpc.StatusCode.INTERNAL, "INTERNAL"


BY_CODE: Mapping[grpc.StatusCode, type[HeadwaterError]] = {cls.code: cls for cls in HeadwaterError.__subclasses__()}
_CODE_BY_NUMBER: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def to_item_error(error: HeadwaterError) -> ItemError:
    """The message form of an error that concerns one item of a batch or stream."""
    item = ItemError(code=error.code.value[0], message=error.message, reason=error.reason, field=error.field)
    if error.retry_after_s is not None:
        item.retry_after.CopyFrom(duration(error.retry_after_s))
    return item


def from_item_error(item: ItemError) -> HeadwaterError:
    """The inverse of `to_item_error`; an unknown code gives a plain `HeadwaterError`."""
    cls = BY_CODE.get(_CODE_BY_NUMBER.get(item.code, grpc.StatusCode.UNKNOWN), HeadwaterError)
    retry = item.retry_after.ToTimedelta().total_seconds() if item.HasField("retry_after") else None
    return cls(item.message, reason=item.reason, field=item.field, retry_after_s=retry)


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    whole, rest = divmod(round(seconds * 1e9), 10**9)
    return Duration(seconds=whole, nanos=rest)
