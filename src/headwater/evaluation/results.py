"""Figures of an evaluation, their comparison with an earlier one, and the results.json that both are kept in."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from headwater.errors import InvalidArgument, NotFound
from headwater.evaluation.collect import Collected, Record, weight_versions
from headwater.evaluation.intervals import Interval, mean_interval, paired_interval
from headwater.evaluation.plan import Plan

FORMAT = "headwater-eval-1"

Table = dict[str, dict[str, Any]]  # by tag ("overall" first), then by measure
OVERALL = "overall"
_T = TypeVar("_T")


def summarize(records: Sequence[Record]) -> Table:
    """Mean, 95 % interval and counts of every measure, overall and per tag. Failures are counted, never scored."""

    def entry(measure: str, chosen: Sequence[Record]) -> dict[str, Any]:
        scores = _by_prompt(chosen, lambda record: record.values.get(measure))
        failed = sum(measure not in record.values for record in chosen)
        return {**(_plain(mean_interval(scores)) if scores else _NOTHING), "failed": failed}

    return _table(records, entry)


def compare(records: Sequence[Record], baseline: dict[str, Any]) -> dict[str, Any]:
    """This evaluation minus `baseline`, paired by prompt and seed, overall and per tag.

    Raises `InvalidArgument` when they have no sample in common.
    """
    earlier = {(one["prompt"], one["seed"]): one["values"] for one in baseline["samples"]}
    common = [record for record in records if (record.prompt, record.seed) in earlier]
    if not common:
        raise InvalidArgument(
            "no sample of the baseline has the prompt and the seed of one here; use the same --prompts and --seed",
            field="baseline",
            reason="NOT_PAIRED",
        )

    def pair(record: Record, measure: str) -> tuple[float, float] | None:
        first, second = earlier[record.prompt, record.seed].get(measure), record.values.get(measure)
        return None if first is None or second is None else (first, second)

    def entry(measure: str, chosen: Sequence[Record]) -> dict[str, Any]:
        pairs = _by_prompt(chosen, lambda record: pair(record, measure))
        return _plain(paired_interval(pairs)) if pairs else dict(_NOTHING)

    return {
        "weight_versions": baseline["weight_versions"],
        "unpaired": len(records) - len(common),
        "unpaired_of_baseline": len(earlier) - len(common),
        "difference": _table(common, entry),
    }


def load_baseline(path: Path, plan: Plan) -> dict[str, Any]:
    """The results.json of an earlier evaluation, or of its folder. Raises `NotFound` and `InvalidArgument`."""
    path = path / "results.json" if path.is_dir() else path
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"--baseline: there is no file {path}", field="baseline") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArgument(f"--baseline {path} cannot be read: {error}", field="baseline") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InvalidArgument(
            f"--baseline {path} is not the results.json of `headwater eval` ({FORMAT})", field="baseline"
        )
    theirs, ours = _score_of(found["settings"]), _score_of(plan.settings())
    if theirs != ours:
        raise InvalidArgument(
            f"--baseline {path} was scored by {theirs}, this evaluation by {ours}; use the same rewards",
            field="baseline",
            reason="OTHER_REWARDS",
        )
    return found


def other_settings(baseline: dict[str, Any], plan: Plan) -> list[str]:
    """How the sampling of the baseline differs: the comparison is of both, model and sampling."""
    theirs, ours = baseline["settings"]["sampling"], plan.settings()["sampling"]
    return [
        f"{key} is {ours.get(key)}, in the baseline {theirs.get(key)}"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    ]


def figures(plan: Plan, collected: Collected) -> dict[str, Any]:
    """What `--json` prints: everything but the single samples."""
    records = collected.records
    versions = weight_versions(records)
    return {
        "format": FORMAT,
        "settings": plan.settings(),
        "weight_versions": versions,
        "weights_changed": len(versions) > 1,
        "samples_total": len(records),
        "failed": sum("score" not in record.values for record in records),
        "failures": _failures(records),
        "results": summarize(records),
    }


def save(path: Path, found: dict[str, Any], records: Sequence[Record]) -> None:
    """Write results.json: the figures and every sample."""
    path.write_text(json.dumps({**found, "samples": [asdict(record) for record in records]}, indent=1) + "\n")


def _failures(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Failed samples by measure and reason, most frequent first, with the first message as an example."""
    found = [(name, why.partition(": ")[0], why) for record in records for name, why in record.errors.items()]
    examples = {(name, reason): why for name, reason, why in reversed(found)}
    counts = Counter((name, reason) for name, reason, _ in found)
    return [
        {"measure": name, "reason": reason, "samples": count, "example": examples[name, reason]}
        for (name, reason), count in counts.most_common()
    ]


_NOTHING = {"mean": None, "ci95": None, "prompts": 0, "samples": 0, "method": None}


def _plain(interval: Interval) -> dict[str, Any]:
    bounds = None if interval.low is None else [interval.low, interval.high]
    return {
        "mean": interval.mean,
        "ci95": bounds,
        "prompts": interval.prompts,
        "samples": interval.samples,
        "method": interval.method,
    }


def _table(records: Sequence[Record], entry: Callable[[str, Sequence[Record]], dict[str, Any]]) -> Table:
    names = dict.fromkeys(name for record in records for name in ("score", *record.values))
    tags = dict.fromkeys(record.tag for record in records)
    rows = {OVERALL: list(records), **{tag: [one for one in records if one.tag == tag] for tag in tags}}
    return {tag: {name: entry(name, chosen) for name in names} for tag, chosen in rows.items()}


def _by_prompt(records: Sequence[Record], value: Callable[[Record], _T | None]) -> list[list[_T]]:
    groups: dict[int, list[_T]] = {}
    for record in records:
        if (one := value(record)) is not None:
            groups.setdefault(record.prompt_index, []).append(one)
    return list(groups.values())


def _score_of(settings: dict[str, Any]) -> list[dict[str, Any]]:
    scored = [{key: one[key] for key in ("name", "weight", "params")} for one in settings["rewards"]
              if one["role"] == "score"]  # fmt: skip
    return sorted(scored, key=lambda one: str(one["name"]))
