"""The figures of an evaluation as plain text."""

from collections.abc import Sequence
from typing import Any

from headwater.evaluation.results import OVERALL, Table


def report(found: dict[str, Any]) -> str:
    """What a person reads at the end: one table, a second one against the baseline, and what went wrong."""
    settings, results = found["settings"], found["results"]
    lines = [
        f"{settings['prompts']}: {settings['prompt_count']} prompts, {settings['samples_per_prompt']} sample(s) each, "
        f"seed {settings['seed']}, {versions(found['weight_versions'])}"
    ]
    shown = _shown(settings, results)
    lines += table(results, shown)
    if comparison := found.get("comparison"):
        difference = comparison["difference"]
        lines.append(
            f"difference to {comparison['baseline']} ({versions(comparison['weight_versions'])}), paired by prompt and "
            f"seed; without a partner: {comparison['unpaired']} here, {comparison['unpaired_of_baseline']} there"
        )
        lines += [f"note: {note}" for note in comparison["notes"]]
        lines += table(difference, [one for one in shown if one[0] in difference[OVERALL]], sign="+")
    if found["weights_changed"]:
        lines.append("note: the weights changed during the evaluation; see the versions above")
    for failure in found["failures"]:
        lines.append(
            f"failed, not counted: {failure['measure']} of {failure['samples']} sample(s), e.g. {failure['example']}"
        )
    return "\n".join(lines)


def versions(found: Sequence[dict[str, Any]]) -> str:
    """The weights that served."""
    names = [f"run {one['run_id']} step {one['step']}" if one["run_id"] else "as loaded" for one in found]
    return "weights " + (", ".join(names) or "unknown")


def table(results: Table, shown: Sequence[tuple[str, str]], sign: str = "") -> list[str]:
    """A row per tag; a column with mean and 95 % interval for each of `shown`, (measure, title)."""
    rows = [["", "samples", "prompts", *(title for _, title in shown)]]
    tags = results if len(results) > 2 else [OVERALL]  # one tag is the same as all
    for tag in tags:
        entries = [results[tag][measure] for measure, _ in shown]
        rows.append(
            [tag, str(entries[0]["samples"]), str(entries[0]["prompts"]), *(_cell(one, sign) for one in entries)]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shown(settings: dict[str, Any], results: Table) -> list[tuple[str, str]]:
    """The measures worth a column: the score, its parts, how many are right, and the monitors. Each only once."""
    overall = results[OVERALL]
    scored = [one["name"] for one in settings["rewards"] if one["role"] == "score"]
    monitors = [one["name"] for one in settings["rewards"] if one["role"] == "monitor"]
    columns = [("score", f"score ({', '.join(scored)})")]
    if len(scored) > 1:
        columns += [(name, name) for name in scored]
    columns += [(f"{name}.correct", f"{name} right") for name in scored]
    columns += [(name, f"monitor {name}") for name in monitors]
    seen: list[Any] = []
    kept = []
    for measure, title in columns:
        values = (
            [(row[measure]["mean"], row[measure]["ci95"]) for row in results.values()] if measure in overall else None
        )
        if values is not None and values not in seen:
            seen.append(values)
            kept.append((measure, title))
    return kept


def _cell(entry: dict[str, Any], sign: str) -> str:
    if entry["mean"] is None:
        return "no score"
    failed = f" ({entry['failed']} failed)" if entry.get("failed") else ""
    if entry["ci95"] is None:
        return f"{entry['mean']:{sign}.4f} [one prompt]{failed}"
    low, high = entry["ci95"]
    return f"{entry['mean']:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]{failed}"
