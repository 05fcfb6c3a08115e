#!/usr/bin/env bash
# On a machine of two GPUs: train the tiny model on the first, the kernels' lab on the second, its text in $OUT/lab.txt.
#
#     both.sh SECONDS [seconds of each family]          RECIPE, RUN, DATA as train_tiny.sh takes them
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
CUDA_VISIBLE_DEVICES=1 timeout "${1:-560}" bash scripts/gpu/lab.sh "${2:-32}" > "$out/lab.txt" 2>&1 &
lab=$!
CUDA_VISIBLE_DEVICES=0 bash scripts/gpu/train_tiny.sh "${1:-560}" 2>&1 | tail -40
wait $lab
tail -150 "$out/lab.txt" | cut -c1-300
