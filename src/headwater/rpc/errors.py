"""Errors on the wire: `HeadwaterError` to gRPC status with google.rpc details, and back."""

import contextlib

import grpc
from google.protobuf import any_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from headwater.errors import BY_CODE, HeadwaterError, Internal, duration

DOMAIN = "headwater"


def to_status(error: HeadwaterError) -> grpc.Status:
    """gRPC status with ErrorInfo and, where they apply, BadRequest and RetryInfo."""
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=error.message, reason=error.reason
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=duration(error.retry_after_s)))
    packed = []
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    number = code_pb2.Code.Value(error.code.name)
    return rpc_status.to_status(status_pb2.Status(code=number, message=error.message, details=packed))


def from_rpc_error(error: grpc.RpcError) -> HeadwaterError:
    """The `HeadwaterError` that a failed call stands for. Works for sync and aio calls, ours or foreign."""
    code, message = error.code(), error.details() or ""
    cls = BY_CODE.get(code, HeadwaterError)
    result = cls(message or f"the call failed with {code.name}", reason=code.name)
    if code == grpc.StatusCode.UNAVAILABLE:
        _explain_handshake(result)
    status = None
    with contextlib.suppress(ValueError):  # a foreign status whose details contradict its code: keep the plain fields
        status = rpc_status.from_call(error)  # type: ignore[arg-type]
    for detail in status.details if status is not None else ():
        _read_detail(detail, result)
    return result


def _explain_handshake(error: HeadwaterError) -> None:
    """Say what to do when no TLS connection came about; the words are gRPC's and BoringSSL's."""
    for words, reason, remedy in _HANDSHAKES:
        if all(word in error.message for word in words):
            error.message, error.reason = f"{remedy} ({error.message})", reason
            error.args = (error.message,)
            return


_HANDSHAKES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("CERTIFICATE_VERIFY_FAILED",),
        "TLS_UNTRUSTED",
        "the server's certificate is not signed by the CA in --tls-ca (HEADWATER_TLS_CA), or has expired; give the "
        "ca.crt that was made with the server's certificate, or make both anew with `headwater certs`",
    ),
    (
        ("Hostname Verification Check failed",),
        "TLS_WRONG_NAME",
        "the server's certificate is for another name than this address or service; use an address that it names, or "
        "make one for this name with `headwater certs --host NAME`",
    ),
    (
        ("WRONG_VERSION_NUMBER",),
        "TLS_NOT_SPOKEN",
        "the server speaks plain text; start it with --tls-cert and --tls-key, or leave --tls-ca and --tls-cert out",
    ),
    (
        ("connections to all backends failing", "Socket closed"),
        "TLS_REFUSED",
        "the server closed the connection at once: it wants TLS and a certificate of its CA; give --tls-ca, --tls-cert "
        "and --tls-key (HEADWATER_TLS_CA, …) with files that were made together with the server's",
    ),
)


def _read_detail(detail: any_pb2.Any, into: HeadwaterError) -> None:
    info, request, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    if detail.Unpack(info):
        into.reason = info.reason
    elif detail.Unpack(request) and request.field_violations:
        into.field = request.field_violations[0].field
    elif detail.Unpack(retry):
        into.retry_after_s = retry.retry_delay.ToTimedelta().total_seconds()


def internal(error: Exception) -> Internal:
    """What a caller is told of an unexpected exception: its type and text, not its stack (that goes to the log)."""
    return Internal(f"unexpected {type(error).__name__}: {error}; see the server's log")
