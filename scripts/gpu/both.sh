#!/usr/bin/env bash
# On a machine of two GPUs: train the tiny model on the first, the kernels' lab on the second, its text in $OUT/lab.txt.
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
CUDA_VISIBLE_DEVICES=1 timeout "${1:-560}" bash scripts/gpu/lab.sh > "$out/lab.txt" 2>&1 &
lab=$!
CUDA_VISIBLE_DEVICES=0 bash scripts/gpu/train_tiny.sh "${1:-560}" 2>&1 | tail -60
wait $lab
cat "$out/lab.txt"
