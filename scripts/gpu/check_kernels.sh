#!/usr/bin/env bash
# Correctness of everything that needs a CUDA device; prints the table of choices first.
set -uo pipefail
cd "$(dirname "$0")/../.."
python3 -m baltoro explain --device cuda || true
python3 -m pytest -q -x -m gpu -p no:cacheprovider tests/kernels
