"""The `make search` job on the processors that can be made out of this one, each as a user would run it.

    python benchmarks/processors.py [--only NAME ...] [--job main|lora|plain|probed ...] [--out FILE]

oneDNN and ATen take their kernels by instruction set, which environment variables cap before a process starts: so one
machine is several really different processors, which differ most in what their number formats cost. Each search has a
store of its own and begins with the probe. Every result is written to the file as it ends, and is not measured again.
`plain` is the command without any option, for which a time budget of ten minutes must be enough; `probed` is `main` on
a machine that `autofit probe` has measured before. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

MAIN = ["--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--memory-limit", "2GiB"]
PROBED = "probed"
JOBS = {"main": MAIN, "lora": [*MAIN, "--method", "lora"], "plain": ["--model", "smollm2-135m"], PROBED: MAIN}
PROCESSORS: dict[str, dict[str, str]] = {
    "own": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "own-1-thread": {"OMP_NUM_THREADS": "1"},
    "avx2-1-thread": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"},
}


def searched(job: str, processor: str) -> dict[str, Any]:
    """One search in a fresh store; seconds are those of the whole process."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store.db")
        if job == PROBED:
            _autofit("probe", "--model", "smollm2-135m", store=store, processor=processor)
        started, began = time.monotonic(), datetime.now(UTC)
        done = _autofit("search", *JOBS[job], "--json", store=store, processor=processor)
        seconds = time.monotonic() - started
        said: dict[str, Any] = {"job": job, "processor": processor, "exit_code": done.returncode}
        said |= {"seconds": round(seconds, 1), "recorded_at": datetime.now(UTC).isoformat(timespec="seconds")}
        exported = Path(folder) / "trials.jsonl"
        _autofit("db", "export", str(exported), store=store, processor=processor)
        trials = [json.loads(line) for line in exported.read_text().splitlines()] if exported.exists() else []
        trials = [trial for trial in trials if "outcome" in trial]
        said["trials"] = [_short(trial) for trial in trials]
        if trials:
            ended = datetime.fromisoformat(trials[0]["recorded_at"])
            said["first_trial_after"] = round((ended - began).total_seconds() - trials[0]["seconds"], 1)
        if done.returncode:
            return said | {"error": done.stderr[-1000:]}
        answer = json.loads(done.stdout)
        recommended = answer["recommendation"]
        return said | {
            "hardware": answer["frontier"]["hardware"],
            "stack": answer["frontier"]["stack"],
            "stopped_because": answer["stopped_because"],
            "regret_bound": answer["regret_bound"],
            "recommended": recommended["config"],
            "tokens_per_second": recommended["measurement"]["tokens_per_second"],
            "alternatives": [
                {"role": beside["role"], "config": beside["config"], "speedup": beside["speedup"]}
                for beside in recommended["alternatives"]
            ],
        }


def _short(trial: dict[str, Any]) -> dict[str, Any]:
    """What is worth keeping of a trial: what ran, how it ended and what it cost, beside what was predicted."""
    measured, predicted = trial.get("measurement") or {}, trial.get("prediction") or {}
    return {
        "config": trial["config"],
        "outcome": trial["outcome"],
        "seconds": round(trial["seconds"], 1),
        "step_seconds": (measured.get("step_seconds") or {}).get("median"),
        "predicted_step_seconds": predicted.get("step_seconds"),
        "least_step_seconds": trial.get("least_step_seconds"),
        "device_bytes": measured.get("device_bytes"),
        "predicted_device_bytes": predicted.get("device_bytes"),
    }


def missed(trials: list[dict[str, Any]]) -> float:
    """The median relative error of the step times that were predicted before the first trial."""
    pairs = [(trial["predicted_step_seconds"], trial["step_seconds"]) for trial in trials]
    return statistics.median([abs(said / taken - 1.0) for said, taken in pairs if said and taken] or [math.nan])


def _autofit(*words: str, store: str, processor: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autofit.cli.main", *words, "--store", store]
    return subprocess.run(command, env={**os.environ, **PROCESSORS[processor]}, capture_output=True, text=True)


def main() -> None:
    """Run what is asked for and not yet in the file, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PROCESSORS)
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--out", type=Path, default=Path("processors.json"))
    arguments = parser.parse_args()
    done = json.loads(arguments.out.read_text()) if arguments.out.exists() else []
    for job in arguments.job or ["main", "lora"]:
        for processor in arguments.only or PROCESSORS:
            if any((known["job"], known["processor"]) == (job, processor) for known in done):
                continue
            done.append(searched(job, processor))
            arguments.out.write_text(json.dumps(done, indent=1) + "\n")
            found = done[-1]
            speed = f"{found['tokens_per_second']:,.0f} tokens/s" if "recommended" in found else "no answer"
            begins = f"the first after {found.get('first_trial_after')} s"
            print(
                f"{job} {processor}: {found['seconds']} s, {len(found['trials'])} trials, {begins}, {speed}, "
                f"predictions off by {missed(found['trials']):.0%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
