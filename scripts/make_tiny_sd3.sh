#!/usr/bin/env bash
# Makes the model in the box from nothing: VAE, skeleton, supervised training by the trainer service, scores.
# usage: scripts/make_tiny_sd3.sh WORK [key=value …]     (overrides of recipes/tiny-sd3-sft.toml)
# Environment: VAE_COUNT, VAE_STEPS, VAE_BATCH, PROCESSES, PER_PROMPT, TRAIN_LIMIT_S (training is stopped after it)
set -euo pipefail
work=$1; shift
mkdir -p "$work"
began=$SECONDS
note() { echo "== $1 ($((SECONDS - began)) s)"; }

note "vae"
python3 scripts/train_tiny_vae.py "$work/vae" --count "${VAE_COUNT:-100000}" --steps "${VAE_STEPS:-5000}" \
    --batch-size "${VAE_BATCH:-256}" --processes "${PROCESSES:-16}"
note "skeleton"
python3 -m headwater.diffusion.tiny_skeleton "$work/skeleton" --vae "$work/vae"

note "supervised training"
python3 -m headwater_trainer --bind 127.0.0.1:7452 --blob-root "$work/blobs" --output-dir "$work/runs" &
trainer=$!
trap 'kill $trainer 2>/dev/null || true' EXIT
for _ in $(seq 120); do (: </dev/tcp/127.0.0.1/7452) 2>/dev/null && break; sleep 0.5; done
timeout -s INT "${TRAIN_LIMIT_S:-86400}" python3 -c 'import sys; from headwater.cli.main import main; sys.exit(main())' \
    train recipes/tiny-sd3-sft.toml "model.path=$work/skeleton" "data.processes=${PROCESSES:-16}" "$@" \
    --trainer 127.0.0.1:7452 --run-id tiny-sd3 || echo "training ended with status $?"
kill $trainer; wait $trainer || true

note "scores"
python3 scripts/score_tiny_geneval.py "$work"/runs/tiny-sd3/export/step_* --processes "${PROCESSES:-16}" \
    --prompts recipes/prompts/tiny_geneval_eval.jsonl --per-prompt "${PER_PROMPT:-2}" --grid "$work/grids" \
    | tee "$work/scores.jsonl"
note "done"
