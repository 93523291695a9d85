#!/usr/bin/env bash
# Record a complete grid of configs on the local NVIDIA GPU, for two models, to replay searches over; then measure some of
# them again under the memory limits of smaller cards, to check that the tables can be replayed under these.
#
#     benchmarks/record_gpu_tables.sh OUT_DIR [SECONDS] [MODEL ...]        default: llama-3.2-1b llama-3.1-8b
#
# Needs no Ray. Resumable: the tables are in OUT_DIR, so a further call goes on where the last ended. No trial begins
# after SECONDS (default: 420), so that a call ends within ten minutes.
#
# Exits with 75 while something is left to record, with the recording's status if it fails, and with 1 if a config that a
# table says fits a smaller card does not, else with 0. $PYTHON names the interpreter; default: python3.
set -euo pipefail
source "$(dirname "$0")/gpu_pieces.bash"
begin "${1:?folder for the tables}" "${2:-420}"
models=("${@:3}")
((${#models[@]})) || models=(llama-3.2-1b llama-3.1-8b)
for model in "${models[@]}"; do
  record "$out/grid-$model.jsonl" --model "$model" --space benchmarks/gpu_grid.yaml --seq-len 2048 --global-batch 16
done
stop_if_unfinished
status=0
for model in "${models[@]}"; do
  "${PYTHON:-python3}" benchmarks/smaller_limits.py "$out/grid-$model.jsonl" "$out/limits-$model.jsonl" \
    --limits 24GiB,40GiB,79GiB --time-budget "$((budget > SECONDS ? budget - SECONDS : 0))" || status=$?
  if ((status == UNFINISHED)); then unfinished=1; stop_if_unfinished; fi
done
exit "$status"
