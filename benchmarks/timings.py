"""How long a user waits, and how far repeated trials differ. Run nothing else on the machine meanwhile.

    python benchmarks/timings.py search --out FILE [--only PROCESSOR] ... [--job JOB] ...
    python benchmarks/timings.py start-up | noise | estimator [--count N] [--model NAME] [--out FILE]

search     a search as a user runs it, in a fresh store, on the processors that can be made out of this one: variables
           cap the instruction set that oneDNN and ATen take their kernels by. Seconds are of the whole command. What
           is in FILE is not measured again. Job `main` is `make search`, `again` is answered from its store, `probed`
           follows `autofit probe`, `tight` has 1 GiB, `plain` no options; `tight-unpredicted` makes no predictions.
start-up   the whole process of `autofit --help`, and of `recommend` from so many trials (100,000)
noise      one config so many times (10): how far repeats differ in the worst split into halves, how many stored
           intervals hold the median of all, and what a trial costs beside its steps
estimator  one config, after imports, and the lattice of `single-gpu`, the whole command: new, and known
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from autofit.core.outcome import Fits, OutOfMemory, StepSeconds, Trial
from autofit.core.repeatability import between_executions
from autofit.core.units import GIB
from autofit.operations import Estimation, WorkloadOptions, read_table
from autofit.store import Store
from autofit.techniques import Job, complete, parse
from autofit.trial.machine.detection import detect
from autofit.trial.process.runner import TrialRunner
from autofit.trial.request import TrialRequest

TABLE = Path(__file__).parent / "recorded" / "cpu-2c-smollm2-135m.jsonl"
AUTOFIT = [sys.executable, "-m", "autofit.cli.main"]
WORKLOAD = ["--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4"]
MAIN = ["search", *WORKLOAD, "--memory-limit", "2GiB"]
TIGHT = ["search", *WORKLOAD, "--memory-limit", "1GiB"]
JOBS = {
    "main": [MAIN],
    "again": [MAIN, MAIN],
    "probed": [["probe", "--model", "smollm2-135m"], MAIN],
    "lora": [[*MAIN, "--method", "lora"]],
    "plain": [["search", "--model", "smollm2-135m"]],
    "tight": [TIGHT],
    "tight-unpredicted": [[*TIGHT, "--no-predict", "--thorough", "--max-trials", "20"]],
}
"""The commands of each, of which the last is timed."""
PROCESSORS: dict[str, dict[str, str]] = {
    "own": {},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    "sse41": {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"},
    "own-1-thread": {"OMP_NUM_THREADS": "1"},
    "avx2-1-thread": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "OMP_NUM_THREADS": "1"},
}
REPEATED = "method=full,precision=bf16,micro_batch=4"
ESTIMATED = (
    "method=full,precision=bf16-mixed,micro_batch=4,checkpointing=full",
    "method=full,precision=bf16,micro_batch=4,checkpointing=none,optimizer=adamw-8bit,loss=chunked",
    "method=lora,rank=16,micro_batch=4,checkpointing=none",
    "method=qlora,rank=16,micro_batch=4,checkpointing=selective,loss=fused",
)
LIBRARIES = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes")
"""Libraries that an estimate would otherwise import while it runs."""


def search(asked: argparse.Namespace) -> None:
    """Run what is asked for and not yet in the file."""
    done = json.loads(asked.out.read_text()) if asked.out.exists() else []
    for job, processor in itertools.product(asked.job or ["main", "lora"], asked.only or PROCESSORS):
        if not any((known["job"], known["processor"]) == (job, processor) for known in done):
            done.append(searched(job, processor))
            asked.out.write_text(json.dumps(done, indent=1) + "\n")
            steps = [(trial["predicted_step_seconds"], trial["step_seconds"]) for trial in done[-1]["trials"]]
            errors = [abs(said / taken - 1) for said, taken in steps if said and taken]
            short = {name: done[-1].get(name) for name in ("seconds", "first_trial_after", "tokens_per_second")}
            short |= {"trials": len(steps), "prediction_error": statistics.median(errors) if errors else None}
            print(job, processor, json.dumps(short), flush=True)


def searched(job: str, processor: str) -> dict[str, Any]:
    """One search in a fresh store."""
    environment = {**os.environ, **PROCESSORS[processor]}
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "trials.jsonl"

        def autofit(*words: str) -> subprocess.CompletedProcess[str]:
            command = [*AUTOFIT, *words, "--store", f"{folder}/store.db"]
            return subprocess.run(command, env=environment, capture_output=True, text=True)

        for words in JOBS[job][:-1]:
            autofit(*words)
        started, began = time.monotonic(), datetime.now(UTC)
        done = autofit(*JOBS[job][-1], "--json")
        said: dict[str, Any] = {"job": job, "processor": processor, "exit_code": done.returncode}
        said["seconds"] = round(time.monotonic() - started, 1)
        said["recorded_at"] = datetime.now(UTC).isoformat(timespec="seconds")
        autofit("db", "export", str(exported))
        lines = [json.loads(line) for line in exported.read_text().splitlines()] if exported.exists() else []
    trials = [line for line in lines if "outcome" in line and datetime.fromisoformat(line["recorded_at"]) > began]
    said["trials"] = [_short(trial) for trial in trials]
    if trials:
        ended = datetime.fromisoformat(trials[0]["recorded_at"])
        said["first_trial_after"] = round((ended - began).total_seconds() - trials[0]["seconds"], 1)
    if done.returncode:
        return said | {"error": done.stderr[-1000:]}
    answer = json.loads(done.stdout)
    best = answer["recommendation"]
    return said | {
        "hardware": answer["frontier"]["hardware"],
        "stack": answer["frontier"]["stack"],
        "stopped_because": answer["stopped_because"],
        "regret_bound": answer["regret_bound"],
        "recommended": best["config"],
        "tokens_per_second": best["measurement"]["tokens_per_second"],
        "alternatives": [{name: one[name] for name in ("role", "config", "speedup")} for one in best["alternatives"]],
    }


def _short(trial: dict[str, Any]) -> dict[str, Any]:
    """What ran, how it ended and what it cost, beside what was predicted."""
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


def small_job() -> Job:
    """That of `make search`."""
    return WorkloadOptions(model="smollm2-135m", seq_len=128, global_batch=4).job(detect())


def start_up(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of commands that train nothing."""
    count = asked.count or 100_000
    with tempfile.TemporaryDirectory() as folder:
        with Store.open(store := f"{folder}/store.db") as opened:
            opened.add_new(made_trials(count))
        recommend = [*AUTOFIT, "recommend", *WORKLOAD, "--format", "json", "--store", store]
        found = {"help_seconds": command_seconds([*AUTOFIT, "--help"]), "recommend_seconds": command_seconds(recommend)}
    return {"trials": count, **found}


def made_trials(count: int) -> Iterator[Trial]:
    """Trials with made-up sizes and speeds, one in five out of memory: only their number matters."""
    job, draw, limit = small_job(), random.Random(0), 13 * GIB
    base = next(trial for trial in read_table(TABLE) if isinstance(trial.outcome, Fits))
    base = replace(base, workload=job.workload, hardware=job.hardware, stack=job.stack, memory_limit_bytes=limit)
    for number in range(count):
        config = complete({"method": draw.choice(("full", "lora")), "micro_batch": number + 1})
        size, speed = draw.randrange(GIB, 16 * GIB), draw.uniform(200, 400)
        steps = StepSeconds(median=job.workload.tokens_per_step / speed, p95=3.0, relative_spread=0.03)
        measured = replace(base.outcome.measurement, device_bytes=size, tokens_per_second=speed, step_seconds=steps)
        fits = Fits(measurement=measured)
        yield replace(base, config=config, outcome=fits if size <= limit else OutOfMemory(reason="made up"))


def command_seconds(command: Sequence[str]) -> dict[str, float]:
    """Seconds of the whole process, over seven runs after one that leaves compiled modules behind."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(8):
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.monotonic() - started)
    return {"median": round(statistics.median(seconds[1:]), 3), "max": round(max(seconds[1:]), 3)}


def noise(asked: argparse.Namespace) -> dict[str, Any]:
    """One config repeatedly."""
    job = small_job()
    request = TrialRequest(job=job, config=complete(parse(REPEATED)), memory_limit_bytes=4 * GIB)
    with TrialRunner(kind=job.hardware.kind) as runner:
        outcomes = [runner.attempt(request).outcome for _ in range(asked.count or 10)]
    measured = [outcome.measurement for outcome in outcomes if isinstance(outcome, Fits)]
    timed = [(one.tokens_per_second, one.step_seconds.relative_spread or 0.0) for one in measured]
    speeds = [round(speed, 1) for speed, _ in timed]
    middle = statistics.median(speeds)
    return {
        "config": REPEATED,
        "tokens_per_second": speeds,
        "worst_split": worst_split(speeds),
        "stored_spread_median": statistics.median(spread for _, spread in timed),
        "stored_intervals_that_hold_the_median": statistics.mean(abs(s - middle) <= s * w / 2 for s, w in timed),
        "executions_differ_by": between_executions([timed]),
        "overhead_seconds_first": measured[0].overhead_seconds,
        "overhead_seconds_median_after_first": statistics.median(one.overhead_seconds for one in measured[1:]),
    }


def worst_split(values: Sequence[float]) -> float:
    """The largest relative difference between the medians of two halves, over all splits into halves."""
    worst = 0.0
    for chosen in itertools.combinations(range(len(values)), len(values) // 2):
        a = statistics.median(values[i] for i in chosen)
        b = statistics.median(value for i, value in enumerate(values) if i not in chosen)
        worst = max(worst, abs(a - b) / min(a, b))
    return worst


def estimator(asked: argparse.Namespace) -> dict[str, Any]:
    """Each config in a process of its own, and the lattice."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
        singles = list(alone.map(partial(estimate_seconds, asked.model), ESTIMATED))
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: lattice_seconds(asked.model, f"{folder}/store.db") for name in ("cold", "warm")}
    return {"model": asked.model, "singles": singles, "lattice": runs}


def estimate_seconds(model: str, config: str) -> dict[str, Any]:
    """Of one config in this process, after imports: new, and again once the store knows it."""
    for library in LIBRARIES:
        importlib.import_module(library)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            started, workload = time.monotonic(), WorkloadOptions(model=model)
            Estimation.of(workload, complete(parse(config)), hardware="h100-80g", store=f"{folder}/store.db").estimate()
            taken.append(round(time.monotonic() - started, 4))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return {"config": config, "new_seconds": taken[0], "known_seconds": taken[1], "peak_mib": peak}


def lattice_seconds(model: str, store: str) -> dict[str, Any]:
    """Of predicting the default space, the whole command, with the memory of all its processes together."""
    command = [*AUTOFIT, "search", "--dry-run", "--json", "--store", store, "--model", model, "--hardware", "h100-80g"]
    started, peak = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as answer:
        process = psutil.Popen(command, stdout=answer, stderr=subprocess.DEVNULL)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error, FileNotFoundError):  # one has just ended
                every = (process, *process.children(recursive=True))
                peak = max(peak, sum(one.memory_full_info().pss for one in every))
            time.sleep(0.2)
        took = time.monotonic() - started
        answer.seek(0)
        said = json.load(answer)
    estimated = said["configs"] - said["ruled_out_by_floor"]
    return {"configs": said["configs"], "estimated": estimated, "seconds": round(took, 2), "peak_mib": peak // 1024**2}


def main() -> None:
    """Measure, print, write."""
    programs = {"start-up": start_up, "noise": noise, "estimator": estimator}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", *programs))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=PROCESSORS)
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--model", default="llama-3.1-8b", help="of `estimator`")
    asked = parser.parse_args()
    if asked.what == "search":
        return search(asked) if asked.out else parser.error("search keeps what it measures: name a file with --out")
    hardware, stack = detect()
    about = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), "hardware": hardware.name}
    text = json.dumps({**about, "stack": stack.to_json(), **programs[asked.what](asked)}, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
