#!/bin/sh
# install.sh EXTRA: make the virtual environment /opt/headwater with what EXTRA of pyproject.toml needs, at the versions
# of requirements/cpu.txt. Run in a build stage, in a folder with pyproject.toml, requirements/ and wheels/.
# PIP_ARGS are options for pip, e.g. other indexes; files in wheels/ are taken before any index.
set -eu
python=/opt/headwater/bin/python
python3 -m venv --without-pip /opt/headwater

pip_install() {
  # shellcheck disable=SC2086  # PIP_ARGS are words
  python3 -m pip --python "$python" install --no-cache-dir --root-user-action=ignore --find-links wheels ${PIP_ARGS:-} "$@"
}

"$python" - "$1" >extra.txt <<'PYTHON'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"][sys.argv[1]], sep="\n")
PYTHON

if grep -q '^torch\b' extra.txt; then
  pip_install --no-deps "$(grep '^torch==' requirements/cpu.txt)"
  if ! grep -q '^cuda.*None' /opt/headwater/lib/python3*/site-packages/torch/version.py; then
    echo "This torch is built for CUDA: the image would be several GB larger than it need be. Put a CPU build into" >&2
    echo "deploy/wheels/, or name an index of CPU builds in PIP_ARGS (deploy/.env); docs/deploy.md says how." >&2
    exit 1
  fi
fi
if [ "$1" = rollout ]; then
  pip_install --constraint requirements/cpu.txt -r extra.txt -r requirements/cpu-sglang.txt
  pip_install --no-deps -r requirements/cpu-nodeps.txt
else
  pip_install --constraint requirements/cpu.txt -r extra.txt
fi

# Not needed to run: tests, headers and build tools of torch; compilers and debug symbols of triton, which SGLang imports
# even where no GPU is.
cd /opt/headwater/lib/python3*/site-packages
rm -rf torch/test torch/include torch/share
[ ! -d torch ] || find torch/bin -type f ! -name torch_shm_manager -delete
if [ -d triton ]; then
  rm -rf triton/backends/*/bin triton/backends/*/lib triton/backends/*/include
  strip --strip-unneeded triton/_C/*.so
fi
