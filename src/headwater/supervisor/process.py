"""One supervised service: how it is started, whether it answers, how it is stopped."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from headwater.supervisor import child_exec, proctree

KILL_WAIT_S = 5.0


@dataclass(frozen=True)
class ServiceSpec:
    """What the supervisor must know of a service."""

    name: str  # "router", "rollout-0", …; also the name of the log file
    command: tuple[str, ...]
    address: str  # host:port at which it answers
    ready: Callable[[], bool]  # asks once, within about a second, whether it does its work
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to the supervisor's own
    ready_timeout_s: float = 120.0
    stop_grace_s: float = 15.0

    def restart_command(self) -> str:
        """The line that starts this service again from a shell."""
        return " ".join([*(f"{key}={shlex.quote(value)}" for key, value in self.env.items()), shlex.join(self.command)])


class Process:
    """A command that leads its own process group and does not outlive this process."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[bytes] | None = None,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        """Start it; what it writes goes to `output`, or where this process writes. `env` is added to this one's own.

        `death_signal` is what it gets when this process dies. Call from a thread that outlives it: the kernel ties the
        child to that thread.
        """
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", child_exec.__file__, str(os.getpid()), str(int(death_signal)), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output and subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Process id, which is its process group too."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process.poll()

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, then after `grace_s` SIGKILL to it and everything it started. True when it left by itself."""
        family = proctree.descendants(self.pid)
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        clean = self._wait(grace_s)
        family.extend(proctree.descendants(self.pid))
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        proctree.kill(family)
        self._wait(KILL_WAIT_S)
        return clean

    def _wait(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


class Child(Process):
    """A started service. Its output goes to `log_path`."""

    def __init__(self, spec: ServiceSpec, log_path: Path) -> None:
        """Start the process. Call from a thread that outlives it."""
        self.spec = spec
        self.log_path = log_path
        self.log_start = log_path.stat().st_size if log_path.exists() else 0
        self.started_at = time.monotonic()
        with log_path.open("ab") as log:
            super().__init__(spec.command, env=spec.env, output=log)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines this start has written; empty when the file is gone."""
        try:
            with self.log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self.log_start, size - 64 * 1024))
                data = log.read()
        except OSError:
            return ""
        return "\n".join(data.decode("utf-8", "replace").splitlines()[-lines:])
