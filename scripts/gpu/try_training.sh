#!/usr/bin/env bash
# The first call on a new machine: kernels right? where does a step's time go? how fast, at which batch size? About 4 minutes
# with an empty Triton cache, of which two are its tuning; leaves triton.tar.xz, profile.txt and timing.txt in $OUT.
#
#     try_training.sh [seconds of timing, 60]
set -uo pipefail
cd "$(dirname "$0")/../.."
. scripts/gpu/common.sh
"$python" -m baltoro explain --device cuda || true
"$python" -m pytest -q -m gpu -p no:cacheprovider tests/kernels tests/trainer 2>&1 | tail -30
unpack_data || exit 1
echo "data after $SECONDS s"
"$python" scripts/gpu/profile_step.py --data "$data" ${PROFILE_ARGS:-} 2>&1 | tee "$out/profile.txt"
pack_tuning
"$python" scripts/gpu/time_training.py --data "$data" --seconds "${1:-60}" ${TIME_ARGS:-} 2>&1 | tee "$out/timing.txt"
pack_tuning
