#!/usr/bin/env bash
# Search llama-3.1-8b on the local NVIDIA GPU, and export every trial.
#
#     benchmarks/record_gpu_search.sh OUT_DIR [TIME_BUDGET]        default budget: 6m
#
# Needs no Ray. Resumable: the store is in OUT_DIR, so a second run goes on where the first ended. With the default, a run
# ends within ten minutes: the first one also checks the environment, and each loads the libraries and predicts. Exits
# with the search's own status, after the export. $PYTHON names the interpreter; default: python3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?folder for the store and the export}; budget=${2:-6m}
mkdir -p "$out"
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}  # this checkout's autofit
run=("${PYTHON:-python3}" -m autofit.cli.main)
if [[ ! -e $out/doctor.json ]]; then
  "${run[@]}" doctor --no-ray --store "$out/store.db" --json >"$out/doctor.new" || true  # it reports, search decides
  mv "$out/doctor.new" "$out/doctor.json"
fi
status=0
"${run[@]}" search --model llama-3.1-8b --space "$here/single_gpu_resident.yaml" --seq-len 2048 --global-batch 16 \
  --time-budget "$budget" --in-place --store "$out/store.db" --json \
  >"$out/search.json" 2> >(tee -a "$out/search.log" >&2) || status=$?
if [[ -e $out/store.db ]]; then
  "${run[@]}" db export "$out/trials.jsonl" --store "$out/store.db"
fi
exit "$status"
