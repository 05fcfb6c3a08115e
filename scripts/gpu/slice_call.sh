#!/usr/bin/env bash
# One GPU: the small kernels and captured steps are right, then the rank slice, serving, margins, and the peers.
#
#     slice_call.sh [seconds of the slice, 110]        texts in $OUT; PEERS=seconds, EVAL=1, EQUIVALENCE=1 on request
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-lab}"
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/*.whl $(ls .whl2/*.whl .whl4/*.whl 2> /dev/null)
export PYTHONPATH="/tmp/site2:."
timeout 120 python3 -m pytest -q -m gpu -p no:cacheprovider tests/kernels/test_small_on_gpu.py \
  tests/engine/test_graphs_on_gpu.py > "$out/small.txt" 2>&1
echo "tests at $SECONDS s"; grep -E "^(FAILED|ERROR)|passed|failed" "$out/small.txt" | cut -c1-200 | head -20
timeout $((${1:-110} + 30)) python3 -m scripts.gpu.lab_slice --seconds "${1:-110}" --json "$out/slice.json" > "$out/slice.txt" 2>&1
echo "slice at $SECONDS s"; tail -200 "$out/slice.txt" | cut -c1-160
timeout 120 python3 -m scripts.gpu.serve_tiny --json "$out/serve.json" > "$out/serve.txt" 2>&1
echo "serving at $SECONDS s"; tail -12 "$out/serve.txt" | cut -c1-200
timeout 60 python3 -m scripts.gpu.margins --against cpu:bfloat16 > "$out/margins.txt" 2>&1
echo "margins at $SECONDS s"; tail -8 "$out/margins.txt" | cut -c1-200
if [ -n "${PEERS:-}" ]; then
  timeout $((PEERS + 20)) python3 -m scripts.gpu.kernels_peers --seconds "$PEERS" --json "$out/peers.json" > "$out/peers.txt" 2>&1
  echo "peers at $SECONDS s"; tail -45 "$out/peers.txt" | cut -c1-220
fi
if [ -n "${EVAL:-}" ]; then
  timeout 240 python3 -m scripts.gpu.eval_tiny --json "$out/eval.json" > "$out/eval.txt" 2>&1
  echo "evaluation at $SECONDS s"; tail -60 "$out/eval.txt" | cut -c1-160
fi
if [ -n "${EQUIVALENCE:-}" ]; then
  timeout 240 python3 -m pytest -q -m gpu -p no:cacheprovider tests/e2e/test_equivalence_on_gpu.py > "$out/equivalence.txt" 2>&1
  echo "equivalence at $SECONDS s"; grep -E "^(FAILED|ERROR|E  )|passed|failed" "$out/equivalence.txt" | cut -c1-250 | head -30
fi
echo "=== end at $SECONDS s"
