#!/usr/bin/env bash
# Train the tiny model (or go on with it) and bring it home in pieces: train_tiny.sh [train arguments]
# Needs data/tiny.carry; wheels in .whl are installed first.
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \
  .whl/fla_core*.whl .whl/flash*.whl .whl/msgspec*.whl
export PYTHONPATH=/tmp/site:. PYTHONUNBUFFERED=1
[ -f data/tiny/manifest.json ] || time python3 -m scripts.data.tiny.carry unpack data/tiny.carry data/tiny
resume=""
[ -d runs/tiny/checkpoints ] && resume="--resume"
python3 -m baltoro train recipes/tiny.toml --export runs/tiny-model $resume "$@" 2>&1 | tr '\r' '\n' | grep -v '━' | tail -40
gzip -c runs/tiny/metrics.jsonl > "$out/metrics.jsonl.gz"
if [ -f runs/tiny-model/model.safetensors ]; then
  split -b 12M runs/tiny-model/model.safetensors "$out/model.part-"
  cp runs/tiny-model/config.json "$out/"
fi
