#!/usr/bin/env bash
# Full fine-tuning of llama-3.1-8b on the local NVIDIA GPU, with and without offload: every config is measured, then its
# prediction is printed beside it.
#
#     benchmarks/record_gpu_offload.sh OUT_DIR [MAX_TRIALS] [SPACE]
#
# Resumable: the table is in OUT_DIR, so a second run goes on where the first ended. MAX_TRIALS is how many of the shuffled
# configs the table has at the end: 2, then 4, and so on split a recording into short runs; default: all. SPACE is a file
# in this folder; default: offload_8b.yaml. The host need of each is stated in it: a host that has less may kill the
# recording itself.
#
# Exits with the recording's status if it fails; else with that of estimate_trials.py, which is 0 only if a config trained
# with each of the space's values of offload, none of the table failed in another way than by running out of memory, and
# every one is predicted within 3 % (memory) and 25 % (time). The status of a shorter run is thus 1 as long as a value of
# offload has not had its turn. $PYTHON names the interpreter; default: python3.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?folder for the table}; most=${2:-1000}; space=${3:-offload_8b.yaml}
table=$out/${space%.yaml}.jsonl
mkdir -p "$out"
export PYTHONPATH=$here/..${PYTHONPATH:+:$PYTHONPATH}  # this checkout's autofit
python=${PYTHON:-python3}
values=$(sed -n 's/^  offload: \[\(.*\)\]$/\1/p' "$here/$space" | tr -d ' ')
# What it cannot build, record leaves out, and the comparison then fails.
"$python" -m autofit.cli.main doctor --no-ray --build-ops --json | tee "$out/doctor.json" || true
"$python" -m autofit.cli.main bench record --model llama-3.1-8b --space "$here/$space" --seq-len 2048 --global-batch 16 \
  --max-trials "$most" --in-place --out "$table"
"$python" "$here/estimate_trials.py" "$table" --memory 0.03 --time 0.25 --trained "offload=$values" \
  --json "${table%.jsonl}.estimates.json"
