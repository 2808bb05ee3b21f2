"""What commands print: lines for a person, and one JSON object as the last line for a program."""

import json
import sys
from collections.abc import Mapping
from typing import Any


def print_json(figures: Mapping[str, Any]) -> None:
    """One JSON object on one line of standard output, the last that a command prints. NaN and infinity become null."""
    sys.stderr.flush()
    print(json.dumps(_finite(figures)), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return None
    return value


def report_error(error: Exception, *, as_json: bool) -> int:
    """Print an error and return the exit code. What is not a `HeadwaterError` or a failed call is a bug: re-raised."""
    import grpc

    from headwater import errors
    from headwater.rpc.errors import from_rpc_error

    if isinstance(error, grpc.RpcError):
        error = from_rpc_error(error)
    if not isinstance(error, errors.HeadwaterError):
        raise error
    where = f" [{error.field}]" if error.field and error.field not in error.message else ""
    print(f"headwater: {error.code.name}: {error.message}{where}", file=sys.stderr)
    if as_json:
        figures = {"code": error.code.name, "reason": error.reason, "field": error.field, "message": error.message}
        print_json({"error": figures})
    callers = (
        errors.InvalidArgument, errors.NotFound, errors.AlreadyExists, errors.Unauthenticated, errors.PermissionDenied,
    )  # fmt: skip
    return 2 if isinstance(error, callers) else 1
