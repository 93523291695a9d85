#!/usr/bin/env bash
# Search llama-3.1-8b on the local NVIDIA GPU and export every trial.
#
#     benchmarks/record_gpu_search.sh OUT_DIR [TIME_BUDGET]        default budget: 8m
#
# Resumable: the store is in OUT_DIR, so a second run continues where the first ended.
set -euo pipefail
out=${1:?folder for the store and the export}; budget=${2:-8m}
mkdir -p "$out"
run=(python3 -m autofit.cli.main)
"${run[@]}" doctor --no-ray --store "$out/store.db" --json | tee "$out/doctor.json" || true
"${run[@]}" search --model llama-3.1-8b --seq-len 2048 --global-batch 16 --time-budget "$budget" \
  --store "$out/store.db" --json >"$out/search.json" 2> >(tee "$out/search.log" >&2) || true
"${run[@]}" db export "$out/trials.jsonl" --store "$out/store.db"
