"""Repeats the warnings and errors that services write to their log files."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

# What headwater.telemetry writes: time, level, service, message.
_LINE = re.compile(rb"^\d{4}-\d\d-\d\dT\S+ (WARNING|ERROR|CRITICAL) ")
_POLL_S = 0.3


class LogFollower:
    """A thread that reads what is appended to log files and hands warnings to `echo` as "[name] line"."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._files: dict[str, tuple[Path, int]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-follower", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: Path, offset: int) -> None:
        """Follow a file from `offset` bytes on."""
        with self._lock:
            self._files[name] = (path, offset)

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            with self._lock:
                files = dict(self._files)
            for name, (path, offset) in files.items():
                new_offset = self._read(name, path, offset)
                with self._lock:
                    self._files[name] = (path, new_offset)

    def _read(self, name: str, path: Path, offset: int) -> int:
        try:
            with path.open("rb") as log:
                log.seek(offset)
                data = log.read()
        except OSError:  # somebody has removed the file
            return offset
        complete = data[: data.rfind(b"\n") + 1]
        for line in complete.splitlines():
            if _LINE.match(line):
                self._echo(f"[{name}] {line.decode('utf-8', 'replace')}")
        return offset + len(complete)
