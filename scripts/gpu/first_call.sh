#!/usr/bin/env bash
# Two GPUs, one call: RL on the second; on the first the tests, then labs. Whole texts lie in $OUT.
#
#     first_call.sh [seconds of each lab, 60]
#         LABS   labs to run, default "mla prefill decode experts"
#         TESTS  folders of tests, "none" for no test
#         RL     arguments of `baltoro rl`; "none" for no run
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/*.whl $(ls .whl3/*.whl .whl2/llguidance*.whl 2> /dev/null)
export PYTHONPATH="/tmp/site2:.:.whl3/stubs" # judges: wheels of reasoning-gym
each="${1:-60}"
if [ "${RL:-}" != none ]; then
  CUDA_VISIBLE_DEVICES=1 timeout "${RL_SECONDS:-200}" python3 -m baltoro rl recipes/rl-tiny.toml --out /tmp/rl \
    ${RL:---set steps=12 --set eval.tasks=64 --set eval.every_steps=6} > "$out/rl.txt" 2>&1 &
  rl=$!
fi
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 # many worker processes: a thread each
if [ "${TESTS:-}" != none ]; then
  timeout "${TEST_SECONDS:-150}" python3 -m pytest -v --timeout 100 -n 8 -m gpu -p no:cacheprovider \
    ${TESTS:-tests/kernels tests/engine tests/trainer tests/rl} > "$out/tests.txt" 2>&1
  echo "tests at $SECONDS s"
  grep -E "^(FAILED|ERROR|E  )|passed|failed" "$out/tests.txt" | cut -c1-200 | head -40
fi
for name in ${LABS:-mla prefill decode experts}; do
  [ "$name" = none ] && continue
  echo "=== $name (at $SECONDS s)"
  timeout $((each + 20)) python3 -m "scripts.gpu.lab_$name" --seconds "$each" > "$out/$name.txt" 2>&1
  tail "-${LINES_EACH:-45}" "$out/$name.txt" | cut -c1-200
done
if [ "${RL:-}" != none ]; then
  wait "$rl"
  tail -30 "$out/rl.txt" | cut -c1-300
  cat /tmp/rl/*.jsonl > "$out/rl-lines.jsonl"
fi
echo "=== end at $SECONDS s"
