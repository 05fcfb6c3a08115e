#!/usr/bin/env bash
# One call: what is timed on the first GPU, alone; RL and what is only right or wrong on the second.
#
#     call.sh "NAME:SECONDS ..." "NAME:SECONDS ..." ...      timed on GPU 0 one after the other; rows beside it, not timed
#         names: labs (mla, prefill, decode, experts, slice, rows), peers, serve, eval, ladder, sanitize, margins, idle,
#                tests[=folders,...]
#         RL_SECONDS  of scripts/gpu/rl_tiny.sh (0: none), SEEDS its seeds, RL_ARGS its arguments
#         MODULES     of peers, in this order, e.g. moe,kda; default all
#         BESIDE_GPU  of the rows and RL, default 1; 0 on a machine of one: let the timed row begin with `idle`
# Whole texts come back in $OUT/texts.tar.gz; JSON of peers, slice, eval and serve beside it.
set -uo pipefail
cd "$(dirname "$0")/../.."
export out="${OUT:-runs/out}" texts=/tmp/texts
mkdir -p "$out" $texts
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/*.whl .whl2/*.whl $(ls .whl3/*.whl .whl4/*.whl 2> /dev/null)
export PYTHONPATH="/tmp/site2:.:.whl3/stubs" # judges: wheels of reasoning-gym

one() { # name[=folders], seconds
  case $1 in
    serve) OMP_NUM_THREADS=2 python3 -m scripts.gpu.serve_tiny --json "$texts/serve.json" ;;
    peers) python3 -m scripts.gpu.kernels_peers --json "$out/peers.json" --seconds "$2" --only "${MODULES:-}" ;;
    sanitize) SANITIZE=1 SECONDS_EACH=$(($2 / $(wc -w <<< "${TOOLS:-memcheck racecheck}"))) bash scripts/gpu/check_kernels.sh ;;
    eval) OMP_NUM_THREADS=4 python3 -m scripts.gpu.eval_tiny --model models/tiny --graphs 64 --json "$texts/eval.json" ;;
    idle) sleep "$2" ;;
    margins) OMP_NUM_THREADS=2 python3 -m scripts.gpu.margins --model models/tiny --device cuda ;;
    ladder) OMP_NUM_THREADS=2 python3 -m scripts.gpu.ladder_score --every 12 --json "$texts/ladder.json" ;;
    slice) python3 -m scripts.gpu.lab_slice --seconds "$2" --json "$out/slice.json" ;;
    tests*)
      # only files with such tests: others want packages that this machine may lack
      folders="$(echo "${1#tests}" | tr '=,' '  ')" folders="$(grep -rl --include='*.py' 'mark.gpu' ${folders:-tests} | sort)"
      # shellcheck disable=SC2086 (words are meant)
      python3 -m pytest -v --tb=short -ra --timeout 100 -n "${TEST_WORKERS:-6}" -m gpu -p no:cacheprovider $folders
      ;;
    *) python3 -m "scripts.gpu.lab_$1" --seconds "$2" ;;
  esac
}
export -f one
beside="${BESIDE_GPU:-1}"
row() { # GPU, items
  for item in $2; do
    name="${item%%:*}" seconds="${item##*:}"
    file="$texts/${name%%=*}.txt"
    CUDA_VISIBLE_DEVICES=$1 OMP_NUM_THREADS=1 timeout -s INT -k 15 $((seconds + 20)) bash -c "one $name $seconds" > "$file" 2>&1
    echo "=== $name, ended at $SECONDS s, $?"
    case $name in
      tests*) grep -E "^(FAILED|ERROR|E  )|passed|failed" "$file" | cut -c1-180 | head -40 ;;
      *) tail "-${LINES_EACH:-30}" "$file" | cut -c1-170 ;;
    esac
  done
}
if [ "${RL_SECONDS:-0}" -gt 0 ]; then
  # shellcheck disable=SC2086
  FIRST_GPU="$beside" GPUS=1 bash scripts/gpu/rl_tiny.sh "$RL_SECONDS" ${SEEDS:-1 2 3} > $texts/rl.txt 2>&1 &
fi
number=0
for items in "${@:2}"; do
  number=$((number + 1))
  row "$beside" "$items" > "$texts/beside-$number.txt" 2>&1 &
done
row 0 "${1:-}"
wait
for file in "$texts"/beside-*.txt; do [ -f "$file" ] && tail -60 "$file"; done
[ -f $texts/rl.txt ] && tail -12 $texts/rl.txt | cut -c1-200
tar czf "$out/texts.tar.gz" -C /tmp texts
echo "=== end at $SECONDS s"
