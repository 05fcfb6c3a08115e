#!/usr/bin/env bash
# Two GPUs, one call: RL on the second; on the first the tests, then labs. Whole texts come back in $OUT/texts.tar.gz.
#
#     first_call.sh [seconds of each lab, 60]
#         RL_SECONDS  of scripts/gpu/rl_tiny.sh on the second GPU (0: none), SEEDS its seeds, RL_ARGS its arguments
#         TESTS       folders of tests ("none"), TEST_SECONDS at most so long
#         LABS        labs to run, default "mla prefill decode experts slice"; also "serve", "peers", "sanitize", "eval"
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
texts=/tmp/texts
mkdir -p "$out" $texts
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/*.whl .whl2/*.whl $(ls .whl3/*.whl 2> /dev/null)
export PYTHONPATH="/tmp/site2:.:.whl3/stubs" # judges: wheels of reasoning-gym
each="${1:-60}"
if [ "${RL_SECONDS:-0}" -gt 0 ]; then
  # shellcheck disable=SC2086 (words are meant)
  FIRST_GPU=1 GPUS=1 bash scripts/gpu/rl_tiny.sh "$RL_SECONDS" ${SEEDS:-1 2 3} > $texts/rl.txt 2>&1 &
  rl=$!
fi
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 # many worker processes: a thread each
if [ "${TESTS:-}" != none ]; then
  # shellcheck disable=SC2086
  timeout "${TEST_SECONDS:-150}" python3 -m pytest -v --timeout 100 -n 8 -m gpu -p no:cacheprovider \
    ${TESTS:-tests/kernels tests/engine tests/trainer tests/rl tests/model} > $texts/tests.txt 2>&1
  echo "tests at $SECONDS s"
  grep -E "^(FAILED|ERROR|E  )|passed|failed" $texts/tests.txt | cut -c1-200 | head -40
fi
lab() { # name, seconds
  case $1 in
    serve) OMP_NUM_THREADS=2 python3 -m scripts.gpu.serve_tiny --json "$texts/serve.json" ;;
    peers) python3 -m scripts.gpu.kernels_peers --json "$out/peers.json" --seconds "$2" ;;
    sanitize) SANITIZE=1 SECONDS_EACH="$2" bash scripts/gpu/check_kernels.sh ;;
    eval) OMP_NUM_THREADS=4 python3 -m scripts.gpu.eval_tiny --model models/tiny --graphs 64 ;;
    slice) python3 -m scripts.gpu.lab_slice --seconds "$2" --json "$out/slice.json" ;;
    *) python3 -m "scripts.gpu.lab_$1" --seconds "$2" ;;
  esac
}
for name in ${LABS:-mla prefill decode experts slice}; do
  [ "$name" = none ] && continue
  echo "=== $name (at $SECONDS s)"
  export -f lab
  export texts out
  timeout $((each + 25)) bash -c "lab $name $each" > "$texts/$name.txt" 2>&1
  tail "-${LINES_EACH:-40}" "$texts/$name.txt" | cut -c1-180
  tar czf "$out/texts.tar.gz" -C /tmp texts
done
if [ "${RL_SECONDS:-0}" -gt 0 ]; then
  wait "$rl"
  tail -15 $texts/rl.txt | cut -c1-200
fi
tar czf "$out/texts.tar.gz" -C /tmp texts
echo "=== end at $SECONDS s"
