#!/usr/bin/env bash
# Train every technique on the local NVIDIA GPU, alone and in pairs, and compare it with plain training, by the tests of
# tests/unit/training/test_exactness.py, which take the machine's device. They need the extra `dev`; Liger's loss and
# flash-attn are trained where they are installed.
#
#     benchmarks/record_gpu_exactness.sh OUT_DIR [PART ...]        parts: alone pair sixteen compiled; default: all
#
# Parts can be run one by one, each in a run of its own. Each leaves a report, OUT_DIR/exactness-PART.xml. Exits with the
# status of the last part that failed. $PYTHON names the interpreter; default: python3.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:?folder for the reports}"
out=$(cd "$1" && pwd); shift
cd "$root"
status=0
(($#)) || set -- alone pair sixteen compiled
for part in "$@"; do
  "${PYTHON:-python3}" -m pytest -q -p no:cacheprovider tests/unit/training/test_exactness.py -k "$part" \
    --junitxml "$out/exactness-$part.xml" || status=$?
done
exit "$status"
