"""Progress of an evaluation: a bar when standard error is a terminal, a line for each tenth elsewhere."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from headwater.evaluation.collect import Record


class Progress:
    """Counts prompts, samples and failures, and shows the mean score so far."""

    def __init__(self, prompts: int) -> None:
        self._prompts, self._done, self._samples, self._failed = prompts, 0, 0, 0
        self._sum = 0.0
        self._started = time.monotonic()
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("prompt {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=24),
                       TextColumn("{task.description}", markup=False), TimeElapsedColumn())  # fmt: skip
            self._bar = Bar(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=prompts)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, records: "list[Record]") -> None:
        """A prompt has finished."""
        before, self._done = self._done, self._done + 1
        self._samples += len(records)
        scores = [record.values["score"] for record in records if "score" in record.values]
        self._failed += len(records) - len(scores)
        self._sum += sum(scores)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif before * 10 // self._prompts < self._done * 10 // self._prompts:
            print(f"prompt {self._done}/{self._prompts}  {self._text()}", file=sys.stderr, flush=True)

    def _text(self) -> str:
        scored = self._samples - self._failed
        mean = f"score {self._sum / scored:.4f}" if scored else "no score yet"
        failed = f"  {self._failed} failed" if self._failed else ""
        return f"{mean}{failed}  {self._samples / max(1e-9, time.monotonic() - self._started):.1f} images/s"
