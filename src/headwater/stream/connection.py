"""Redis clients with a timeout on everything, and errors that say what to do."""

from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headwater.errors import FailedPrecondition, HeadwaterError, InvalidArgument, Unavailable

_URL_REMEDY = (
    "use redis://host:port/0 or rediss://… for TLS, and give a password with "
    "--redis-password-file, or in the URL with its special characters escaped"
)

# Errors after which the same command may be sent again (all commands used here are idempotent).
RETRYABLE = (RedisConnectionError, RedisTimeoutError)


@dataclass(frozen=True)
class Timeouts:
    """Longest waits, in seconds: to connect, for one command, and for retries of a lost connection."""

    connect_s: float = 5.0
    command_s: float = 10.0
    retry_s: float = 30.0


def sync_client(url: str, timeouts: Timeouts) -> "redis.Redis":
    """A blocking client. It connects at the first command."""
    return redis.Redis.from_url(_checked(url), retry=redis.retry.Retry(NoBackoff(), 0), **_options(timeouts))


def async_client(url: str, timeouts: Timeouts) -> "redis.asyncio.Redis":
    """An asyncio client. It connects at the first command."""
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    return redis.asyncio.Redis.from_url(_checked(url), retry=retry, **_options(timeouts))


def address_of(url: str) -> str:
    """host:port of a Redis URL, without credentials."""
    try:
        options = redis.connection.parse_url(url)
    except ValueError:  # whose text may hold a part of the password
        shown = repr(url) if "@" not in url else "(not shown, as it may hold a password)"
        raise InvalidArgument(f"the Redis URL {shown} is wrong; {_URL_REMEDY}", field="redis_url") from None
    return options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"


def explain(error: RedisError, url: str) -> HeadwaterError:
    """The Headwater error for a Redis error."""
    if isinstance(error, AuthenticationError):  # to redis-py a kind of ConnectionError
        return FailedPrecondition(
            f"Redis at {address_of(url)} does not accept the password ({error}); give the right one with "
            "--redis-password-file or REDIS_PASSWORD_FILE",
            reason="REDIS_PASSWORD",
        )
    if isinstance(error, RETRYABLE):
        return Unavailable(
            f"Redis at {address_of(url)} does not answer ({error}); start it (`headwater up` starts one) "
            "or give the right address with --redis or REDIS_URL",
            reason="REDIS_UNAVAILABLE",
            retry_after_s=1.0,
        )
    return FailedPrecondition(f"Redis at {address_of(url)} refused a command: {error}", reason="REDIS_REFUSED")


def _checked(url: str) -> str:
    address_of(url)
    return url


def _options(timeouts: Timeouts) -> dict[str, Any]:
    return {
        "protocol": 2,  # the same reply format on every server since 6.2
        "socket_connect_timeout": timeouts.connect_s,
        "socket_timeout": timeouts.command_s,
        "socket_keepalive": True,
        "decode_responses": False,
    }
