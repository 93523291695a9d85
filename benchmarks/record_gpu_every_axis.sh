#!/usr/bin/env bash
# Measure some configs with every value of every axis on the local NVIDIA GPU, for three models, and compare each with
# its prediction.
#
#     benchmarks/record_gpu_every_axis.sh OUT_DIR [SECONDS] [MAX_TRIALS]
#
# Needs no Ray. Resumable: the tables are in OUT_DIR, so a further call goes on where the last ended. No trial begins
# after SECONDS (default: 420), so that a call ends within ten minutes. MAX_TRIALS is how many configs each model has at
# the end; default: 24. offload=params of llama-3.1-8b takes 96 GiB of host memory by estimate, beside its process: a host
# that has less may kill the recording itself.
#
# Exits with 75 while something is left to record or to compare, with the recording's status if it fails, else with that of
# estimate_trials.py, which is 0 only if every target is reached. $PYTHON names the interpreter; default: python3.
set -euo pipefail
source "$(dirname "$0")/gpu_pieces.bash"
begin "${1:?folder for the tables}" "${2:-420}" --build-ops
tables=()
seed=0  # another one for each model, so that their configs differ
for model in qwen2.5-0.5b llama-3.2-1b llama-3.1-8b; do
  tables+=("$out/every-axis-$model.jsonl")
  record "${tables[-1]}" --model "$model" --space benchmarks/gpu_every_axis.yaml --seq-len 2048 --global-batch 8 \
    --seed $((seed++)) --max-trials "${3:-24}" --cover
done
((SECONDS < budget)) || unfinished=1  # the comparison takes minutes, too
stop_if_unfinished
"${PYTHON:-python3}" benchmarks/estimate_trials.py "${tables[@]}" --json "$out/every-axis.estimates.json"
