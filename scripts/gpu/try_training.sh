#!/usr/bin/env bash
# Kernels first, then the speed and memory of training steps of the tiny model's shape on the mini corpora.
set -uo pipefail
cd "$(dirname "$0")/../.."
scripts/gpu/check_kernels.sh
python3 scripts/gpu/time_training.py --tokens 16384 65536 131072
