"""Regenerate the protobuf code under src/headwater from protos/. `--check` fails when the committed code is stale."""

import argparse
import filecmp
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
AREAS = ("common", "reward", "rollout", "router", "trainer")


def generate(out: Path) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their stubs for every proto below `out`/headwater."""
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    programs = Path(sys.executable).parent  # the plugins of this very environment, activated or not
    plugins = [f"--plugin={name}={programs / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    status = protoc.main(
        ["protoc", *plugins, f"-I{PROTOS}", f"-I{well_known}", f"--python_out={out}", f"--mypy_out={out}",
         f"--grpc_python_out={out}", f"--mypy_grpc_out={out}", *sources]
    )  # fmt: skip
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    for area in AREAS:
        for package in (out / "headwater" / area, out / "headwater" / area / "v1"):
            (package / "__init__.py").write_text(f'"""Protocol of the {area} area, generated from protos/."""\n')


def stale_files(fresh: Path) -> list[str]:
    """Names of generated files that differ from, or are missing in, the source tree."""
    committed = ROOT / "src"
    names = [p.relative_to(fresh) for p in fresh.rglob("*") if p.is_file()]
    known = [p.relative_to(committed) for a in AREAS for p in (committed / "headwater" / a).rglob("*_pb2*.py*")]
    known = [p for p in known if "__pycache__" not in p.parts]
    differing = [
        n for n in names if not (committed / n).exists() or not filecmp.cmp(fresh / n, committed / n, shallow=False)
    ]
    return sorted(str(n) for n in {*differing, *(k for k in known if not (fresh / k).exists())})


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(ROOT / "src")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = stale_files(Path(folder))
    if stale:
        print("stale generated code, run `make protos`:", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
