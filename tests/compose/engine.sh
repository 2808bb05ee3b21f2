#!/usr/bin/env bash
# engine.sh COMMAND…: run COMMAND where a Docker engine answers. Without one, and as root on Debian, install and start
# Debian's, and stop it at the end. Where no registry gives the base images, COMMAND builds on one of Debian's packages.
# Ends with COMMAND's status, or with 77 and the reason where no containers can be run.
# shellcheck disable=SC2015  # A && B || C is meant
set -euo pipefail
cd "$(dirname "$0")/../.."
state=${ENGINE_DIR:-~/.cache/headwater-engine} # keeps the images for the next time
mkdir -p "$state"

none() {
  echo "No containers can be run here: $1." >&2
  exit 77
}
answers() { timeout 20 docker ps -q >/dev/null 2>&1; }
compose() { docker compose version >/dev/null 2>&1 || docker-compose version >/dev/null 2>&1; }
have() { docker image inspect "$1" >/dev/null 2>&1; }
have_or_pull() { have "$1" || timeout 120 docker pull -q "$1" >/dev/null 2>&1; }
value() { sed -n "s/^$1=//p" deploy/.env; }
stop() { # the engine that this script started, and what a COMMAND that was cut short left on it
  docker ps -aq | xargs -r docker rm -fv >/dev/null 2>&1 || true
  kill "$engine" 2>/dev/null && wait "$engine" || true
}
install_packages() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || none "$* must be installed, by root"
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"; } \
    >"$state/apt.log" 2>&1 </dev/null || none "$* cannot be installed: $(tail -n 1 "$state/apt.log")"
}

compose && { answers || command -v dockerd >/dev/null; } || install_packages docker.io docker-compose iptables
if ! answers; then
  [ "$(id -u)" = 0 ] || none "no Docker engine answers, and only root can start one"
  dockerd --data-root "$state/data" --pidfile "$state/dockerd.pid" >"$state/dockerd.log" 2>&1 </dev/null &
  engine=$!
  trap stop EXIT
  for _ in $(seq 60); do
    answers || ! kill -0 "$engine" 2>/dev/null && break
    sleep 1
  done
  answers || none "dockerd does not start: $(tail -n 1 "$state/dockerd.log")"
fi

if ! have_or_pull "$(value PYTHON_IMAGE)" || ! have_or_pull "$(value REDIS_IMAGE)"; then
  # Python and Redis in one image, with the certificates, the network and the package index of this machine.
  base=headwater-test-base:bookworm
  if ! have "$base"; then
    command -v mmdebstrap >/dev/null || install_packages mmdebstrap
    # shellcheck disable=SC2016  # mmdebstrap sets $1
    mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3-pip,python3-venv,redis-server \
      --customize-hook='copy-in /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs' \
      --customize-hook='chroot "$1" install -d -o redis -g redis /data' \
      bookworm "$state/base.tar" >"$state/base.log" 2>&1 </dev/null &&
      docker import "$state/base.tar" "$base" >>"$state/base.log" 2>&1 ||
      none "the base image cannot be built: $(tail -n 1 "$state/base.log")"
    rm "$state/base.tar"
  fi
  index=$({ python3 -m pip config list || true; } | sed -n "s/^[^=]*\.index-url='\(.*\)'$/--index-url \1/p" | tail -n 1)
  export PYTHON_IMAGE=$base REDIS_IMAGE=$base BUILD_NETWORK=host PIP_ARGS="${PIP_ARGS-$index}"
fi

"$@"
