#!/usr/bin/env bash
# Kernels of the mixture of experts on a CUDA device: right first, then times. Stops where something is off.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
python3 -m baltoro explain --device cuda
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels/test_moe_on_gpu.py
python3 -m baltoro bench kernels --peers --only moe --json "$out/kernels-moe.json"
