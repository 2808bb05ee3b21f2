"""The processes that a process has started, so that none outlives it. Linux; elsewhere nothing is found."""

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Proc:
    """A process; the start time tells it from a later one with the same id."""

    pid: int
    parent: int
    start_ticks: int


def descendants(pid: int) -> list[Proc]:
    """Children of `pid` and their children, whatever their process group."""
    by_parent: dict[int, list[Proc]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if (proc := _read(int(folder.name))) is not None:
            by_parent.setdefault(proc.parent, []).append(proc)
    found, front = [], [pid]
    while front:
        children = [child for parent in front for child in by_parent.get(parent, ())]
        found.extend(children)
        front = [child.pid for child in children]
    return found


def kill(procs: Iterable[Proc]) -> None:
    """SIGKILL those that still run."""
    for proc in procs:
        now = _read(proc.pid)
        if now is not None and now.start_ticks == proc.start_ticks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(proc.pid, signal.SIGKILL)


def _read(pid: int) -> Proc | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the command before it may hold spaces; state is fields[0]
    return None if fields[0] == "Z" else Proc(pid, int(fields[1]), int(fields[19]))
