"""Shows a run to a person: a progress bar on a terminal, plain lines elsewhere. All of it on standard error."""

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text


class Display(Protocol):
    """Where the events of a run go."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """The figures of a step."""
        ...


def make_display() -> Display:
    """A bar when standard error is a terminal, lines otherwise."""
    return BarDisplay() if sys.stderr.isatty() else LineDisplay()


def figures_line(values: Mapping[str, float]) -> str:
    """The figures a person watches, on one line; what the trainer did not report is left out."""
    parts = [
        ("reward {}", values.get("reward/mean"), ".4f"),
        ("± {}", _standard_error(values), ".4f"),
        (" drift {}", values.get("log_prob_drift/max"), ".1e"),
        (" staleness {}", values.get("staleness/mean"), ".1f"),
        (" {} img/s", values.get("rate/images_per_s"), ".1f"),
        (" {} pairs/s", values.get("rate/pairs_per_s"), ".1f"),
    ]
    return " ".join(form.format(format(value, spec)) for form, value, spec in parts if value is not None)


def _standard_error(values: Mapping[str, float]) -> float | None:
    """Of the mean reward over the images of a step."""
    std, images = values.get("reward/std"), values.get("images")
    return std / math.sqrt(images) if std is not None and images else None


class LineDisplay:
    """One plain line per event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=sys.stderr, flush=True)

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Print the figures of a step."""
        self.say(f"step {step}/{total}  {figures_line(values)}")


class BarDisplay:
    """A bar, and the figures of the last step below it; lines scroll above both."""

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
        )
        self._figures = Text(no_wrap=True, overflow="ellipsis")
        self._live = Live(Group(self._progress, self._figures), console=Console(stderr=True), refresh_per_second=5)
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._live.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, total: int, values: Mapping[str, float]) -> None:
        """Move the bar."""
        if self._task is None:
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=step, total=total)
        self._figures.plain = figures_line(values)
