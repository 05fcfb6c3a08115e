#!/usr/bin/env bash
# Correctness of everything that needs a CUDA device; prints the table of choices first.
#
#     SANITIZE=1 check_kernels.sh       the small decode kernels under compute-sanitizer, memcheck then racecheck, instead
set -uo pipefail
cd "$(dirname "$0")/../.."
if [ -n "${SANITIZE:-}" ]; then
  # one kernel of a kind, at the smallest shape that has a tail; racecheck is slow on long loops
  for tool in memcheck racecheck; do
    echo "=== $tool"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${SECONDS_EACH:-120}" compute-sanitizer --tool "$tool" --kernel-regex \
      "kns=split_kernel,kns=merge_kernel,kns=products_kernel,kns=blend_kernel,kns=one_row,kns=thin,kns=deal,kns=add_parts,kns=select,kns=scatter_kernel,kns=sample_kernel" \
      python3 -m scripts.gpu.small_decode 2>&1 | tail -40
  done
  exit
fi
python3 -m baltoro explain --device cuda || true
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels
