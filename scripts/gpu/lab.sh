#!/usr/bin/env bash
# Kernels on one GPU: which part of a kernel is off, and hardware counters. Text on stdout.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/msgspec*.whl .whl/pyzmq*.whl
export PYTHONPATH="/tmp/site2:."
part() { # seconds, command
  echo "=== ${*:2} (at $SECONDS s)"
  timeout "$1" "${@:2}" 2>&1 | tail -400
}
part 120 python3 -m scripts.gpu.lab_prefill --seconds 60
for name in decode verify mla moe prefill fold attnres decode1; do
  part 60 ncu --profile-from-start off --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
    --section LaunchStats --section WarpStateStats --section ComputeWorkloadAnalysis python3 -m scripts.gpu.counters $name
done
echo "=== end at $SECONDS s"
