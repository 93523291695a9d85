"""How long a user waits, and how far repeated trials differ. Run nothing else on the machine meanwhile.

    python benchmarks/timings.py search [--job JOB] [--out FILE]
    python benchmarks/timings.py start-up | noise | launches | estimator [--count N] [--model NAME] [--out FILE]

search     a search as a user runs it, in a fresh store; seconds are of the whole command. Job `main` is `make search`,
           `again` is answered from its store, `probed` follows `autofit probe`, `tight` has 1 GiB, `plain` no options;
           `tight-unpredicted` makes no predictions. Variables such as ONEDNN_MAX_CPU_ISA make another processor of it.
start-up   the whole process of `autofit --help`, and of `recommend` from so many trials (100,000)
noise      one config so many times (10): how far repeats differ in the worst split into halves, how many stored
           intervals hold the median of all, and what a trial costs beside its steps
launches   host time per operation of a tiny decoder, as the probe measures it, of the fastest of 12 micro-steps; on
           an emulated card it is the host's alone (tests/emulated_card/cards.py)
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch

from autofit.core.outcome import Fits, OutOfMemory, StepSeconds, Trial
from autofit.core.repeatability import between_executions
from autofit.core.units import GIB
from autofit.core.workload import Workload
from autofit.operations import Estimation, WorkloadOptions, read_table
from autofit.probe.launches import TINY, per_operation
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
REPEATED = "method=full,precision=bf16,micro_batch=4"
ESTIMATED = (
    "method=full,precision=bf16-mixed,micro_batch=4,checkpointing=full",
    "method=full,precision=bf16,micro_batch=4,checkpointing=none,optimizer=adamw-8bit,loss=chunked",
    "method=lora,rank=16,micro_batch=4,checkpointing=none",
    "method=qlora,rank=16,micro_batch=4,checkpointing=selective,loss=fused",
)
LIBRARIES = ("torch._dynamo", "transformers.models.llama.modeling_llama", "peft", "bitsandbytes")
"""Libraries that an estimate would otherwise import while it runs."""


def search(asked: argparse.Namespace) -> dict[str, Any]:
    """One search in a fresh store."""
    *before, timed = JOBS[asked.job]
    with tempfile.TemporaryDirectory() as folder:

        def autofit(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*AUTOFIT, *words, "--store", f"{folder}/store.db"], capture_output=True, text=True)

        for words in before:
            autofit(*words)
        started, began = time.monotonic(), datetime.now(UTC)
        done = autofit(*timed, "--json")
        seconds = round(time.monotonic() - started, 1)
        with Store.open(f"{folder}/store.db") as store:
            stored = [(datetime.fromisoformat(trial.recorded_at), trial) for trial in store.stream()]
    ran = [(ended, trial) for ended, trial in stored if ended > began]
    first = round((ran[0][0] - began).total_seconds() - ran[0][1].seconds, 1) if ran else None
    return {
        "job": asked.job,
        "seconds": seconds,
        "first_trial_after": first,
        "trials": [{"config": t.config.to_json(), "outcome": t.outcome.kind, "seconds": t.seconds} for _, t in ran],
        "answer": done.stderr[-1000:] if done.returncode else json.loads(done.stdout),
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
    base = next(trial for trial in read_table(TABLE).trials if isinstance(trial.outcome, Fits))
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


LAUNCHING = {
    "full": ("none", "full"),
    "lora": ("none", "full", "offload", "selective"),
    "qlora": ("none", "full", "offload", "selective"),
}
"""Of `launches`: the methods, and how each is checkpointed."""


def wall(run: Callable[[], None]) -> float:
    """Seconds of a call, by this process's clock: an emulated card's events have another."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def launches(asked: argparse.Namespace) -> dict[str, Any]:
    """Microseconds per operation, and their ratio to full training without checkpointing."""
    hardware, stack = detect("cuda")
    workload = Workload(model=TINY.name, model_digest=TINY.digest, seq_len=8, global_batch=1)
    job, found = Job(model=TINY, workload=workload, hardware=hardware, stack=stack), {}
    for method, values in LAUNCHING.items():
        for value in values:
            config = complete({"method": method, "precision": "bf16", "micro_batch": 1, "checkpointing": value})
            found[f"{method}, checkpointing={value}"] = 1e6 * per_operation(job, config, torch.device("cuda"), wall)
    plain = found["full, checkpointing=none"]
    return {"microseconds": found, "ratios": {name: taken / plain for name, taken in found.items()}}


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
    programs = {"search": search, "start-up": start_up, "noise": noise, "launches": launches, "estimator": estimator}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=programs)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", default="main", choices=JOBS, help="of `search`")
    parser.add_argument("--count", type=int)
    parser.add_argument("--model", default="llama-3.1-8b", help="of `estimator`")
    asked = parser.parse_args()
    hardware, stack = detect()
    about = {"recorded_at": datetime.now(UTC).isoformat(timespec="seconds"), "hardware": hardware.name}
    text = json.dumps({**about, "stack": stack.to_json(), **programs[asked.what](asked)}, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
