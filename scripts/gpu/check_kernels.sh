#!/usr/bin/env bash
# Correctness of everything that needs a CUDA device; prints the table of choices first.
#
#     SANITIZE=1 check_kernels.sh       the small decode kernels under compute-sanitizer, memcheck then racecheck, instead
#         TOOLS, PARTS                  of them, e.g. TOOLS=racecheck PARTS="kda routed_experts" (small_decode.py names parts)
set -uo pipefail
cd "$(dirname "$0")/../.."
if [ -n "${SANITIZE:-}" ]; then
  for tool in ${TOOLS:-memcheck racecheck}; do
    echo "=== $tool"
    # shellcheck disable=SC2086 (words are meant)
    # without torch's cache of memory each tensor is an allocation of its own, whose end memcheck knows
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout "${SECONDS_EACH:-120}" compute-sanitizer --tool "$tool" \
      python3 -m scripts.gpu.small_decode ${PARTS:-} 2>&1 | tail -40
  done
  exit
fi
python3 -m baltoro explain --device cuda || true
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels
