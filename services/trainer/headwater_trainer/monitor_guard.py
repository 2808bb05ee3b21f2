"""Watch for reward hacking: a monitor reward that falls while the train reward rises."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, variance

Figures = tuple[float, float]  # train reward and monitor reward of a step


@dataclass(frozen=True)
class Fall:
    """What has happened, for a person, and the last step at which the monitor was at its best."""

    message: str
    good_step: int


class MonitorGuard:
    """Compares the last `window` steps with those at which a monitor was highest. It begins anew with a process."""

    def __init__(self, monitors: Sequence[str], *, window: int, deviations: float) -> None:
        """A fall counts from `deviations` standard errors of the difference of both windows' means."""
        self._window = window
        self._deviations = deviations
        self._last: dict[str, deque[Figures]] = {name: deque(maxlen=window) for name in monitors}
        self._best: dict[str, tuple[int, list[Figures]]] = {}
        self._told: set[str] = set()

    def observe(self, step: int, values: Mapping[str, float]) -> Fall | None:
        """Take in the figures of `step`; a fall is told once, until the monitor is at a new best."""
        found = None
        for name, last in self._last.items():
            if (key := f"reward/{name}/mean") not in values or "reward/mean" not in values:
                continue
            last.append((values["reward/mean"], values[key]))
            if len(last) == self._window:
                found = self._compare(step, name, list(last)) or found
        return found

    def _compare(self, step: int, name: str, now: list[Figures]) -> Fall | None:
        best_step, best = self._best.get(name, (step, now))
        train, monitor = (fmean(column) for column in zip(*now, strict=True))
        best_train, best_monitor = (fmean(column) for column in zip(*best, strict=True))
        if name not in self._best or monitor > best_monitor:
            self._best[name] = (step, now)
            self._told.discard(name)
            return None
        spread = sum(variance([figures[1] for figures in each]) for each in (now, best)) / self._window
        fell = best_monitor - monitor > self._deviations * spread**0.5 and best_monitor > monitor
        if step - best_step < self._window or not fell or train <= best_train or name in self._told:
            return None
        self._told.add(name)
        return Fall(
            f"monitor reward {name!r} fell from {best_monitor:.4g} (steps to {best_step}) to {monitor:.4g} (steps to "
            f"{step}), while the train reward rose from {best_train:.4g} to {train:.4g}",
            best_step,
        )
