#!/usr/bin/env bash
# The first call on a GPU machine: all correctness tests beside a look at training (tests, profile, short timing).
# Leaves tests.txt, profile.txt, timing.txt and triton.tar.xz in $OUT. Times are only a lead while tests run beside.
#
#     first_call.sh [seconds of timing, 40]
set -uo pipefail
cd "$(dirname "$0")/../.."
. scripts/gpu/common.sh
"$python" -m baltoro explain --device cuda 2>&1 | tail -60
(
  export TRITON_CACHE_DIR=/tmp/triton-tests # its own: what travels is training's alone
  timeout "${TESTS_S:-400}" "$python" -m pytest -q -n "${TESTS_N:-8}" -m gpu -p no:cacheprovider --durations=8 \
    tests/kernels tests/engine > "$out/tests.txt" 2>&1
) &
tests=$!
timeout 150 "$python" -m pytest -q -m gpu -p no:cacheprovider tests/trainer 2>&1 | tail -25 | tee "$out/trainer.txt"
unpack_data || exit 1
echo "data after $SECONDS s"
timeout 250 "$python" scripts/gpu/profile_step.py --data "$data" ${PROFILE_ARGS:-} 2>&1 | tee "$out/profile.txt" | tail -70
pack_tuning
echo "profile after $SECONDS s"
wait $tests
echo "tests after $SECONDS s"
tail -40 "$out/tests.txt"
timeout 120 "$python" scripts/gpu/time_training.py --data "$data" --seconds "${1:-40}" ${TIME_ARGS:-} 2>&1 | tee "$out/timing.txt"
pack_tuning
