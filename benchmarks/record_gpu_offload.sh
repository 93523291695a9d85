#!/usr/bin/env bash
# Full fine-tuning of llama-3.1-8b on the NVIDIA GPU at hand, with and without offload: every config measured, and
# predicted before.
#
#     benchmarks/record_gpu_offload.sh OUT_DIR
#
# Resumable: the table lies in OUT_DIR, so that a second run goes on where the first ended. The host needs 128 GiB:
# what does not fit it is recorded as out of memory.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?folder for the table}
mkdir -p "$out"
run=(python3 -m autofit.cli.main)
"${run[@]}" doctor --no-ray --build-ops --json | tee "$out/doctor.json" || true
"${run[@]}" bench record --model llama-3.1-8b --space "$here/offload_8b.yaml" --seq-len 2048 --global-batch 16 \
  --in-place --out "$out/offload-8b.jsonl"
