"""What a search, launches and estimates take. Run nothing else on the machine meanwhile.

    python benchmarks/timings.py search [--job JOB] [--out FILE]
    python benchmarks/timings.py launches | estimator [--model NAME] [--out FILE]

search     a search as a user runs it, the whole command, in a fresh store. Job `main` is `make search`, `lora` the same
           with that method, `plain` has no options. ONEDNN_MAX_CPU_ISA and the like make another processor of it
launches   host time per operation of a tiny decoder, as the probe measures it, of the fastest of 12 micro-steps; on
           an emulated card it is the host's alone (tests/emulated_card/cards.py)
estimator  one config, after imports, and the lattice of `single-gpu`, the whole command: new, and known
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from autofit.core.workload import Workload
from autofit.operations import Estimation, WorkloadOptions
from autofit.probe.launches import TINY, per_operation
from autofit.store import Store
from autofit.techniques import Job, complete, parse
from autofit.trial.machine.detection import detect

WORKLOAD = ("--model", "smollm2-135m", "--seq-len", "128", "--global-batch", "4", "--memory-limit", "2GiB")
JOBS = {"main": WORKLOAD, "lora": (*WORKLOAD, "--method", "lora"), "plain": WORKLOAD[:2]}
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
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "autofit", "search", *JOBS[asked.job], "--json", "--store", f"{folder}/store.db"]
        started, began = time.monotonic(), datetime.now(UTC)
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        seconds = round(time.monotonic() - started, 1)
        with Store.open(f"{folder}/store.db") as store:
            trials = store.trials()
    first = [(datetime.fromisoformat(t.recorded_at) - began).total_seconds() - t.seconds for t in trials[:1]]
    return {
        "job": asked.job,
        "seconds": seconds,
        "first_trial_after": round(first[0], 1) if first else None,
        "trials": [{"config": t.config.to_json(), "outcome": t.outcome.kind, "seconds": t.seconds} for t in trials],
        "answer": done.stderr[-1000:] if done.returncode else json.loads(done.stdout),
    }


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
        runs = {name: lattice_seconds(asked.model, folder) for name in ("cold", "warm")}
    return {"model": asked.model, "singles": singles, "lattice": runs}


def estimate_seconds(model: str, config: str) -> dict[str, Any]:
    """Of one config in this process, after imports: new, and again once the store knows it."""
    for library in LIBRARIES:
        importlib.import_module(library)
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOFIT_CACHE"] = folder  # the traces of earlier runs would make it a known one
        for _ in range(2):
            started, workload = time.monotonic(), WorkloadOptions(model=model)
            Estimation.of(workload, complete(parse(config)), hardware="h100-80g", store=f"{folder}/store.db").estimate()
            taken.append(round(time.monotonic() - started, 4))
    return {"config": config, "new_seconds": taken[0], "known_seconds": taken[1]}


def lattice_seconds(model: str, folder: str) -> dict[str, Any]:
    """Of predicting the default space, the whole command, with what the folder keeps of an earlier one."""
    command = f"-m autofit search --dry-run --json --store {folder}/store.db --model {model} --hardware h100-80g"
    started, kept = time.monotonic(), {**os.environ, "AUTOFIT_CACHE": folder}
    said = subprocess.run([sys.executable, *command.split()], check=True, capture_output=True, env=kept).stdout
    return {"configs": json.loads(said)["configs"], "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    """Measure, print, write."""
    programs = {"search": search, "launches": launches, "estimator": estimator}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=programs)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", default="main", choices=JOBS, help="of `search`")
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
