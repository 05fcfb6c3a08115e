#!/usr/bin/env bash
# The first call of a day on two GPUs: is everything right, and how fast is it? GPU 1: RL; GPU 0: tests, then labs.
#
#     first_call.sh [seconds of each lab, 60]         the whole text lies in $OUT
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-runs/out}"
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/*.whl $(ls .whl3/*.whl .whl2/llguidance*.whl 2> /dev/null)
export PYTHONPATH="/tmp/site2:.:.whl3/stubs" # judges: wheels of reasoning-gym
each="${1:-60}"
CUDA_VISIBLE_DEVICES=1 timeout 200 python3 -m baltoro rl recipes/rl-tiny.toml --out /tmp/rl --set engine.place=inline \
  --set steps=12 --set eval.tasks=64 --set eval.every_steps=6 ${RL_ARGS:-} > "$out/rl.txt" 2>&1 &
rl=$!
export CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=1 # many worker processes: a thread each
timeout 150 python3 -m pytest -q -m gpu -p no:cacheprovider ${TESTS:-tests/kernels tests/engine tests/trainer} > "$out/tests.txt" 2>&1
echo "tests at $SECONDS s"; grep -E "^(FAILED|ERROR)|passed|failed|Error" "$out/tests.txt" | cut -c1-200 | head -40
for name in ${LABS:-mla prefill decode}; do
  echo "=== $name (at $SECONDS s)"
  timeout $((each + 20)) python3 -m "scripts.gpu.lab_$name" --seconds "$each" > "$out/$name.txt" 2>&1
  tail -${LINES_EACH:-45} "$out/$name.txt" | cut -c1-200
done
wait $rl
tail -5 "$out/rl.txt" | cut -c1-300
cp /tmp/rl/metrics.jsonl "$out/rl-metrics.jsonl" 2> /dev/null
echo "=== end at $SECONDS s"
