#!/usr/bin/env bash
# GPU tests on a machine that has torch and no registry: installs wheels from a folder, then runs pytest.
# usage: tests/gpu/run.sh WHEELS [pytest arguments]
set -euo pipefail
wheels=$1; shift
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl
for archive in "$wheels"/*.zip; do [ -e "$archive" ] && python3 -m zipfile -e "$archive" "$site"; done
export PYTHONPATH=$site
python3 -m pip install -q --no-index --no-deps --no-build-isolation --no-compile --target "$site" .
python3 -m pytest -q -s -p no:cacheprovider tests/gpu "$@"
