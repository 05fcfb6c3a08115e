#!/usr/bin/env bash
# KDA kernels on a GPU: correctness first, then times; times are not taken where a check fails.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}."
python3 -m scripts.gpu.compile_kda
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels/test_kda_on_gpu.py tests/kernels/test_kda_enter_on_gpu.py
python3 -m scripts.gpu.bench_kda --json "$out/kernels-kda.json" "$@"
