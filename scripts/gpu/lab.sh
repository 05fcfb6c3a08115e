#!/usr/bin/env bash
# Kernels on one GPU, family by family: right first, then times over configurations; text on stdout.
#
#     lab.sh [seconds of each family, 32]
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=/tmp/triton-lab
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site2 \
  .whl/msgspec*.whl .whl/pyzmq*.whl
export PYTHONPATH="/tmp/site2:."
each="${1:-32}"
# all at once for their compilations, which stay in Triton's cache; times are taken in the second round, one by one
for name in ${LABS:-prefill mla experts decode}; do
  timeout "${WARM:-50}" python3 -m "scripts.gpu.lab_$name" --seconds "${WARM:-50}" > "/tmp/warm_$name.txt" 2>&1 &
done
wait
echo "compiled after $SECONDS s"
for name in ${LABS:-prefill mla experts decode}; do
  echo "=== $name (at $SECONDS s)"
  timeout $((each + 15)) python3 -m "scripts.gpu.lab_$name" --seconds "$each" 2>&1
done
if [ -n "${RESUME_SECONDS:-}" ]; then
  # beside each other: both wait for the host most of the time
  timeout $((RESUME_SECONDS + 10)) python3 -m scripts.gpu.serve_tiny > /tmp/serve_tiny.txt 2>&1 &
  serving=$!
  echo "=== resume (at $SECONDS s)"
  PYTHONPATH="/tmp/site:/tmp/site2:." TRITON_CACHE_DIR=/tmp/triton timeout $((RESUME_SECONDS + 10)) \
    python3 -m scripts.gpu.check_resume --data "${DATA:-data/tiny}" --json /tmp/resume.json --seconds "$RESUME_SECONDS" \
    --steps "${RESUME_STEPS:-80}" 2>&1
  echo "RESUME $(cat /tmp/resume.json)"
  wait $serving
  tail -25 /tmp/serve_tiny.txt
fi
echo "=== end at $SECONDS s"
