"""Figures of a step: collected over micro-batches, reduced over ranks, written to metrics.jsonl."""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch

from headwater_trainer.objectives.terms import Terms
from headwater_trainer.ranks import Ranks


class Accumulator:
    """Sums and maxima over the pairs of all micro-batches of this rank."""

    def __init__(self) -> None:
        self.count = 0.0
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = {}

    def add(self, terms: Terms, weight: torch.Tensor) -> None:
        """Add the figures of one micro-batch; pairs of weight 0 do not count."""
        count = float(weight.sum())
        self.count += count
        for name, value in {"loss": terms.loss.detach(), **terms.means}.items():
            self._sums[name] += float((value.double() * weight).sum())
        for name, value in terms.maxima.items():
            worst = float(value.max()) if count else 0.0
            self._maxima[name] = max(self._maxima.get(name, 0.0), worst)

    def reduced(self, ranks: Ranks) -> dict[str, float]:
        """Means and maxima over all ranks; the same on each. Every rank has added at least one micro-batch."""
        names = sorted(self._sums)
        count, *sums = ranks.total([self.count, *(self._sums[name] for name in names)])
        means = {name: value / max(count, 1.0) for name, value in zip(names, sums, strict=True)}
        top = sorted(self._maxima)
        return {**means, **dict(zip(top, ranks.largest([self._maxima[name] for name in top]), strict=True))}


class MetricsFile:
    """metrics.jsonl of a run: one object per step, {"step": …, name: value}."""

    def __init__(self, path: Path, *, resumed_step: int) -> None:
        """Lines of steps after `resumed_step` are dropped: a resumed run writes them again."""
        self._path = path
        kept = []
        if path.exists():
            lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
            kept = [entry for entry in lines if entry["step"] <= resumed_step]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Write the figures of a step; they are on disk when this returns."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
