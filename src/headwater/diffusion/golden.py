"""Check the mathematics against golden vectors: `python -m headwater.diffusion.golden DIR [--json]`.

DIR holds pairs <name>.json + <name>.safetensors (tensors named case<k>.<field>) or a lone <name>.json. Every file with
a checker here is checked; others are listed as skipped. Exit status: 0 all pass, 1 a failure, 2 nothing to check.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from headwater.diffusion.golden_checks import CHECKERS, Row, Tensors


def check_directory(directory: Path) -> list[Row]:
    """One row per file, case and field of every vector file in `directory`, in the order of file names."""
    rows: list[Row] = []
    for path in sorted(directory.glob("*.json")):
        if path.stem in CHECKERS:
            rows.extend(_check_file(path))
        else:
            rows.append(Row(path.stem, "*", "*", None, None, "skipped: no checker for this file"))
    return rows


def _check_file(path: Path) -> Iterator[Row]:
    cases = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(cases, dict):  # several lists by name
        cases = [{"schedule": name, **case} for name, listed in cases.items() for case in listed]
    bundle = path.with_suffix(".safetensors")
    stored: dict[str, Tensor] = {}
    if bundle.exists():
        with safe_open(bundle, framework="pt") as opened:
            stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for position, raw in enumerate(cases):
        case = {"case": position, **raw}
        try:
            yield from CHECKERS[path.stem](path.stem, case, Tensors(stored, f"case{case['case']}."))
        except (KeyError, ValueError, RuntimeError) as error:  # a malformed case is a failure, not the end of the table
            yield Row(path.stem, str(case["case"]), "*", None, 0.0, f"FAIL: {type(error).__name__}: {error}")


def _print_table(rows: list[Row]) -> None:
    print(f"{'file':<16} {'case':>4}  {'field':<36} {'worst error':>12} {'tolerance':>10}  status")
    for row in rows:
        error = "" if row.worst_error is None else f"{row.worst_error:.2e}"
        tolerance = "" if row.tolerance is None else f"{row.tolerance:.0e}"
        print(f"{row.file:<16} {row.case:>4}  {row.field:<36} {error:>12} {tolerance:>10}  {row.status}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="headwater.diffusion.golden", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="folder with the vector files")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    rows = check_directory(options.directory)
    checked = [row for row in rows if row.tolerance is not None]
    failed = [row for row in checked if row.status.startswith("FAIL")]
    if not options.json:
        _print_table(rows)
    skipped = len(rows) - len(checked)
    summary = {"checked": len(checked), "failed": len(failed), "skipped": skipped, "known_files": sorted(CHECKERS)}
    if options.json:
        print(json.dumps({**summary, "rows": [asdict(row) for row in rows]}))
    else:
        print(f"{len(checked)} checked, {len(failed)} failed, {skipped} skipped")
    if not checked:
        print(f"{options.directory}: no vector file to check; known are {', '.join(sorted(CHECKERS))}", file=sys.stderr)
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
