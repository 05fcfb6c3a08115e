#!/usr/bin/env bash
# Train the tiny model, or go on with it, for at most so many seconds, and leave in $OUT what the next call needs.
#
#     train_tiny.sh SECONDS [train arguments]          e.g. train_tiny.sh 560
#
# A call begins where the last one stopped:
#   1. runs/tiny/checkpoints, if the machine is still the same one (nothing is lost), else
#   2. .carry/resume.part-*, the compact form (weights in bf16; the optimizers begin anew, the rate rises for 20 steps).
# Left in $OUT, seven files at most: resume.part-0..2 (anew every minute, so a killed call loses a minute), model.tar-aa
# and -ab (the exported model, at the end), metrics.jsonl.gz, triton.tar.xz.
# Between two calls: copy these files to .carry/ and name it in what travels. Triton's cache (/tmp/triton) comes along as
# triton.tar.xz: the 118 s of tuning in the first step are paid once. All is kept every minute.
# At home: cat .carry/model.tar-* | tar x -C models/tiny
# or, without a model file, from the compact form: baltoro train recipes/tiny.toml --set device=cpu --out runs/home
#   --compact .carry --stop-after 0 --export models/tiny
set -uo pipefail
cd "$(dirname "$0")/../.."
limit="${1:-560}"
shift || true
. scripts/gpu/common.sh
recipe="${RECIPE:-recipes/tiny.toml}"
run="${RUN:-runs/tiny}"
unpack_data || exit 1

resume=""
if [ -d "$run/checkpoints" ]; then
  resume="--resume"
else
  cp "$carry"/resume.part-* "$carry"/metrics.jsonl.gz "$out/" 2> /dev/null
fi

(while sleep "${KEEP_EVERY:-60}"; do pack_tuning; done) > /dev/null 2>&1 &
keeper=$!
left=$((limit - SECONDS - ${MARGIN:-40})) # the margin: imports before, export and packing after the steps
echo "starting after $SECONDS s, $left s for steps"
"$python" -m baltoro train "$recipe" --out "$run" --export "$run/model" --compact "$out" --stop-after "$left" \
  $resume "$@" 2>&1 | tr '\r' '\n' | grep -v '━'
status=${PIPESTATUS[0]}
kill "$keeper" 2> /dev/null
if [ -f "$run/model/model.safetensors" ]; then
  tar c -C "$run/model" . | split -b 12000000 - "$out/model.tar-"
fi
pack_tuning
ls -l "$out"
exit "$status"
