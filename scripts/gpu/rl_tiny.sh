#!/usr/bin/env bash
# GRPO on the tiny model with several seeds beside each other, each for at most so many seconds, start-up included.
#
#     rl_tiny.sh SECONDS [seeds, default 1 2 3]          e.g. rl_tiny.sh 560 1 2 3
#     rl_tiny.sh SECONDS SEED:KEY=VALUE,KEY=VALUE ...    the same with other settings beside each other, to choose
#
# Seeds go round the GPUs (GPUS, default all, from FIRST_GPU on). Each ends by itself with an evaluation, a checkpoint and its plots; a
# second call on the same machine goes on where the first one stopped. RL_ARGS: more arguments of `baltoro rl`, for all.
# Left in $OUT, five files at most: rl-metrics.gz (all lines of all seeds), rl-tiny.json and .png, adapter.tar.gz (of the
# seed that ended highest), rl-logs.txt.
# At home: python -m scripts.rl_report rl-metrics.gz --json bench/results/rl-tiny.json --picture docs/pictures/rl-tiny.png
set -uo pipefail
cd "$(dirname "$0")/../.."
limit="${1:-560}"
shift || true
seeds="${*:-1 2 3}"
out="${OUT:-runs/out}"
run="${RUN:-runs/rl-tiny}"
python="${PYTHON:-python3}"
recipe="${RECIPE:-recipes/rl-tiny.toml}"
mkdir -p "$out"
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/triton-lab}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
if [ -d .whl ] && [ -z "${NO_WHEELS:-}" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site-rl \
    $(ls .whl/*.whl .whl2/llguidance*.whl .whl3/*.whl 2> /dev/null | grep -v -e fla_core -e flash_linear) # tunes for long
  export PYTHONPATH="/tmp/site-rl:.:.whl3/stubs" # stubs of packages that families of reasoning-gym import and do not need
else
  export PYTHONPATH="${PYTHONPATH:-.}"
fi
gpus="${GPUS:-$(nvidia-smi -L 2> /dev/null | wc -l)}"

left=$((limit - SECONDS - ${MARGIN:-15})) # the margin: exports, plots and packing
echo "starting after $SECONDS s, $left s for each of the seeds $seeds, on $gpus GPUs"
place=0
waiting=""
name_of() { echo "$run-$(echo "$1" | tr ':=,' '---')"; }
for item in $seeds; do
  folder="$(name_of "$item")"
  changes="--set seed=${item%%:*}"
  case "$item" in *:*) changes="$changes $(echo ",${item#*:}" | sed 's/,/ --set /g')" ;; esac
  mkdir -p "$folder"
  device=""
  [ "$gpus" -gt 0 ] && device="CUDA_VISIBLE_DEVICES=$((place % gpus + ${FIRST_GPU:-0}))"
  # shellcheck disable=SC2086 (words are meant)
  env $device timeout $((left + 60)) "$python" -m baltoro rl "$recipe" $changes --out "$folder" \
    --export "$folder/adapter" --stop-after "$left" --resume ${RL_ARGS:-} > "$folder/log.txt" 2>&1 &
  waiting="$waiting $!"
  place=$((place + 1))
done
status=0
for one in $waiting; do wait "$one" || status=1; done
echo "seeds have ended after $SECONDS s"

for item in $seeds; do
  echo "=== $item"
  tail -c 3000 "$(name_of "$item")/log.txt"
done > "$out/rl-logs.txt"
files=""
for item in $seeds; do
  file="$(name_of "$item")/metrics.jsonl"
  [ -s "$file" ] && files="$files $file"
done
if [ -n "$files" ]; then
  # shellcheck disable=SC2086
  "$python" -m scripts.rl_report $files --pack "$out/rl-metrics.gz" --json "$out/rl-tiny.json" \
    --picture "$out/rl-tiny.png"
  best="$("$python" -c "import json, sys; runs = json.load(open(sys.argv[1]))['runs']
print(max(runs, key=lambda name: runs[name]['sampled']['last']))" "$out/rl-tiny.json" 2> /dev/null)"
  folder="$(dirname "$run")/$best"
  [ -n "$best" ] && [ -d "$folder/adapter" ] && tar czf "$out/adapter.tar.gz" -C "$folder" adapter
fi
tail -n 4 "$out/rl-logs.txt"
ls -l "$out"
exit "$status"
