# What the scripts share that record on a GPU in several calls, each within a time budget. Sourced by them, not run.

UNFINISHED=75  # the exit status of a call after which something is left to record: EX_TEMPFAIL of sysexits.h

# begin OUT_DIR SECONDS [--build-ops]: goes to the checkout, whose autofit is then run, and checks the machine, unless an
# earlier call did. With --build-ops it does so each time: OUT_DIR may have come to a machine that has none compiled.
begin() {
  mkdir -p "$1"
  out=$(cd "$1" && pwd); budget=$2; unfinished=
  cd "$(dirname "${BASH_SOURCE[0]}")/.."  # a table names its space's file: by the same path on every machine
  export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
  autofit=("${PYTHON:-python3}" -m autofit.cli.main)
  if [[ ! -e $out/doctor.json || -n ${3:-} ]]; then
    "${autofit[@]}" doctor --no-ray ${3:-} --json >"$out/doctor.new" || true  # it reports, record decides
    mv "$out/doctor.new" "$out/doctor.json"
  fi
}

# record TABLE OPTION...: goes on with the recording in TABLE until it is done or the time is over; `unfinished` is then
# not empty. Ends the script with the recording's status if it fails.
record() {
  local left=$((budget - SECONDS)) said
  if ((left <= 0)); then unfinished=1; return; fi
  said=$("${autofit[@]}" bench record --out "$1" "${@:2}" --time-budget "${left}s" --in-place --json)
  if [[ $said != *'"left": 0'* ]]; then unfinished=1; fi
}

# stop_if_unfinished: ends the script with UNFINISHED if something is left.
stop_if_unfinished() {
  if [[ -n $unfinished ]]; then
    echo "not finished after $SECONDS s: run the same command again, with $out as it is now" >&2
    exit $UNFINISHED
  fi
}
