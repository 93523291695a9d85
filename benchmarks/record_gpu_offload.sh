#!/usr/bin/env bash
# Full fine-tuning of llama-3.1-8b on the local NVIDIA GPU, with and without offload: every config is predicted, then
# measured.
#
#     benchmarks/record_gpu_offload.sh OUT_DIR
#
# Resumable: the table is in OUT_DIR, so a second run continues where the first ended. The host needs 128 GiB: configs
# that do not fit it are recorded as out of memory.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?folder for the table}
mkdir -p "$out"
run=(python3 -m autofit.cli.main)
"${run[@]}" doctor --no-ray --build-ops --json | tee "$out/doctor.json" || true
"${run[@]}" bench record --model llama-3.1-8b --space "$here/offload_8b.yaml" --seq-len 2048 --global-batch 16 \
  --in-place --out "$out/offload-8b.jsonl"
