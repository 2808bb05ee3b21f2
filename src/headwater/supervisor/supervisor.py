"""Starts services, waits until they serve, reports the ones that die, and stops them all in reverse order."""

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from headwater.errors import FailedPrecondition, Unavailable
from headwater.supervisor.logs import LogFollower
from headwater.supervisor.process import Child, ServiceSpec

_POLL_S = 0.1


class Supervisor:
    """A context manager that owns a run folder and the processes started in it. Use it from one thread."""

    def __init__(self, run_dir: Path, echo: Callable[[str], None] = print) -> None:
        """`echo` prints one line for a person. Raises `FailedPrecondition` when the folder is in use."""
        self.run_dir = run_dir
        self.logs_dir = run_dir / "logs"
        self.logs_dir.mkdir(parents=True, exist_ok=True)
        self._echo = echo
        self._lock = _lock(run_dir)
        self._follower = LogFollower(echo)
        self._children: list[Child] = []
        self._down: set[str] = set()
        self._seen_dead: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def children(self) -> Sequence[Child]:
        """Started services, in order of start."""
        return tuple(self._children)

    def start(self, spec: ServiceSpec) -> Child:
        """Start a service without waiting for it."""
        child = Child(spec, self.logs_dir / f"{spec.name}.log")
        self._children.append(child)
        self._follower.follow(spec.name, child.log_path, child.log_start)
        return child

    def wait_ready(self, children: Sequence[Child]) -> None:
        """Wait until each serves. Raises `Unavailable` with the log's tail when one ends or takes too long."""
        waiting = list(children)
        while waiting:
            child = waiting[0]
            for each in waiting:
                if (code := each.exit_code()) is not None:
                    raise _failed(each, f"ended with {_exit(code)} while it started")
            if child.spec.ready():
                waiting.pop(0)
            elif time.monotonic() - child.started_at > child.spec.ready_timeout_s:
                raise _failed(child, f"does not serve after {child.spec.ready_timeout_s:.0f} s")
            else:
                time.sleep(_POLL_S)

    def check(self) -> None:
        """Report services that have died since the last call, and those that somebody has started again."""
        for child in self._children:
            spec, code = child.spec, child.exit_code()
            if code is None:
                continue
            up = spec.name in self._seen_dead and spec.ready()
            if up and spec.name in self._down:
                self._down.discard(spec.name)
                self._echo(f"{spec.name} ({spec.address}) is back")
            elif not up and spec.name not in self._down:
                self._down.add(spec.name)
                self._seen_dead.add(spec.name)
                self._echo(
                    f"{spec.name} ({spec.address}) has ended with {_exit(code)}; progress stops until it is back. "
                    f"Start it again with:\n  {spec.restart_command()}\nIts log: {child.log_path}"
                )

    def stop(self) -> None:
        """Stop every service, last started first. Idempotent."""
        while self._children:
            child = self._children.pop()
            if not child.stop(child.spec.stop_grace_s):
                self._echo(f"{child.spec.name} did not stop within {child.spec.stop_grace_s:.0f} s and was killed")
        self._follower.close()
        self._lock.close()


def _failed(child: Child, what: str) -> Unavailable:
    tail = child.log_tail() or "(it wrote nothing)"
    return Unavailable(
        f"{child.spec.name} {what}. Its last words, from {child.log_path}:\n{tail}",
        reason="SERVICE_NOT_STARTED",
        field=child.spec.name,
    )


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _lock(run_dir: Path) -> IO[str]:
    handle = (run_dir / "supervisor.lock").open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read().strip()
        handle.close()
        raise FailedPrecondition(
            f"the run folder {run_dir} is in use by process {owner}; choose another --run-dir", field="run_dir"
        ) from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
