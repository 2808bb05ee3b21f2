"""Figures of a run, from the metrics of its steps. Standard library only."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Z_REQUIRED = 3.0
MEANS = ("staleness/mean", "rate/images_per_s", "rate/pairs_per_s", "ratio/abs_deviation")
MAXIMA = ("log_prob_drift/max", "staleness/max", "steps/skipped")
SUMS = ("groups", "images", "pairs", "groups/dropped", "groups/unusable")


@dataclass(frozen=True)
class Trend:
    """First against last quarter of a series. Standard errors are those of the mean over the quarter's steps."""

    first_mean: float
    first_standard_error: float
    last_mean: float
    last_standard_error: float
    difference: float
    z: float  # difference over its standard error

    @property
    def rises(self) -> bool:
        """Whether the last quarter lies above the first by more than three standard errors."""
        return self.z > Z_REQUIRED


def trend(series: Sequence[float]) -> Trend | None:
    """The trend of a series of independent step means, or None for fewer than eight of them.

    The steps of a quarter scatter around a slope as well, so the standard error is overstated rather than understated.
    """
    quarter = len(series) // 4
    if quarter < 2:
        return None
    first, first_se = _mean(series[:quarter])
    last, last_se = _mean(series[-quarter:])
    error = math.hypot(first_se, last_se)
    difference = last - first
    z = difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0
    return Trend(first, first_se, last, last_se, difference, z)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def summarize(steps: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Trend of the reward and the mean, maximum or sum of the other figures, over all steps."""
    ordered = [steps[step] for step in sorted(steps)]
    rewards = [values["reward/mean"] for values in ordered if "reward/mean" in values]
    found = trend(rewards)
    figures: dict[str, Any] = {
        "steps": len(ordered),
        "reward": None if found is None else {key: round(value, 6) for key, value in asdict(found).items()},
    }
    for names, reduce in ((SUMS, sum), (MEANS, statistics.fmean), (MAXIMA, max)):
        for name in names:
            if values := [step[name] for step in ordered if name in step]:
                figures[name.replace("/", "_")] = reduce(values)
    return figures
