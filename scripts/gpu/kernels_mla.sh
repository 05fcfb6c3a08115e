#!/usr/bin/env bash
# Latent attention, depth mix, copies, sampling and graphs on a CUDA device: right first, then times.
set -euo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
python3 -m baltoro explain --device cuda
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels/test_mla_on_gpu.py tests/engine/test_graphs_on_gpu.py
python3 -m baltoro bench kernels --peers --only mla,attnres --json "$out/kernels-mla.json"
